"""vLLM's plugin entry point (group ``vllm.general_plugins``). It imports nothing heavy and never
raises: vLLM calls it in every process that has Meshwise installed."""

import logging
from importlib import metadata

KNOWN = "0.33"  # vLLM's versions whose interface of weight transfer is the one used


def unknown(error: object) -> str:
    """Say in one line which vLLM is needed, and which is here."""
    try:
        found = f"here is {metadata.version('vllm')}"
    except metadata.PackageNotFoundError:
        found = "vLLM is not installed"
    said = " ".join(str(error).split())
    return f"meshwise knows the weight transfer of vLLM {KNOWN}; {found} ({said})"


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
        logging.getLogger("meshwise").warning("no weight transfer by meshwise: %s", unknown(error))
