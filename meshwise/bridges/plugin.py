"""vLLM's plugin entry point (group ``vllm.general_plugins``). It imports nothing heavy and never
raises: vLLM calls it in every process that has Meshwise installed."""

import logging

_KNOWN = "0.33"


def register() -> None:
    """Register the weight-transfer backend ``meshwise``, where this vLLM has such an interface."""
    try:
        from vllm.distributed.weight_transfer import factory  # type: ignore[import-not-found]

        for registry, engine in (
            (factory.WeightTransferEngineFactory, "WorkerEngine"),
            (factory.WeightTransferTrainerFactory, "TrainerEngine"),
        ):
            if "meshwise" not in registry._registry:
                registry.register_engine("meshwise", "meshwise.bridges.vllm", engine)
    except Exception as error:
        logging.getLogger("meshwise").warning(
            "no weight transfer by meshwise: this vLLM's interface is not the one known "
            "(vLLM %s): %s", _KNOWN, error
        )  # fmt: skip
