"""One vLLM worker: worker.py FOLDER STORE RANK WORLD [STAGES]. For each model in the folder it
builds vLLM's own, and answers a client's calls by vLLM's own methods. ``compare`` holds the weights
beside those that vLLM's loader makes of the saved checkpoint.
"""

import itertools
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ |= {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_TARGET_DEVICE": "cpu"}

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from vllm.config import (
    DeviceConfig,
    ModelConfig,
    ParallelConfig,
    VllmConfig,
    set_current_vllm_config,
)
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed import parallel_state
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.m2n_layout import resolve_parameter_destinations
from vllm.model_executor.kernels.linear.scaled_mm.cpu import CPUFp8BlockScaledMMKernel
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.plugins import load_general_plugins
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm.v1.worker.gpu_worker import Worker

from meshwise import jobs
from meshwise.bridges import layouts
from meshwise.bridges.weights import joined
from meshwise.reshard.transports.carriers import Gloo

# The wheel lacks the operator of this kernel. Weights are made and loaded without it.
CPUFp8BlockScaledMMKernel.is_supported = classmethod(lambda *_, **__: (True, None))


class Served(Worker):
    """vLLM's worker, of which only the model and what moves its weights are made."""

    def __init__(self, vllm_config: VllmConfig, model: torch.nn.Module) -> None:
        self.vllm_config, self.model = vllm_config, model
        self._weight_update_active = False
        self.model_runner = SimpleNamespace(reset_lora_state=lambda: None)
        self.weight_transfer_engine = WeightTransferEngineFactory.create_engine(
            vllm_config.weight_transfer_config, vllm_config, torch.device("cpu"), model
        )

    def get_model(self) -> torch.nn.Module:
        return self.model


def built(
    folder: str, rank: int, world: int, meeting: str, stages: int = 1
) -> tuple[VllmConfig, torch.nn.Module]:
    model = ModelConfig(
        model=folder, tokenizer=folder, skip_tokenizer_init=True, dtype="bfloat16",
        enforce_eager=True,
    )  # fmt: skip
    config = VllmConfig(
        model_config=model,
        parallel_config=ParallelConfig(
            tensor_parallel_size=world // stages, pipeline_parallel_size=stages
        ),
        device_config=DeviceConfig(device="cpu"),
        weight_transfer_config=WeightTransferConfig(backend="meshwise"),
    )
    with set_current_vllm_config(config):
        if not parallel_state.model_parallel_is_initialized():
            parallel_state.init_distributed_environment(world, rank, meeting, rank, backend="gloo")
            parallel_state.initialize_model_parallel(world // stages, stages)
        with set_default_torch_dtype(torch.bfloat16):
            return config, initialize_model(config)


def differences(served: Served, path: str) -> list[str]:
    """Load a checkpoint by vLLM's own loader; return the parameters that differ from the live
    ones, which stay."""
    kept = {name: tensor.clone() for name, tensor in served.model.named_parameters()}
    loaded = by_vllm(served, saved_in(path))
    restored(served, kept)
    return [name for name, tensor in loaded.items() if not torch.equal(tensor, kept[name])]


def filled_bytes(served: Served, path: str) -> int:
    """Count the bytes that vLLM's loader fills: load a checkpoint of ones into zeros."""
    kept = {name: tensor.clone() for name, tensor in served.model.named_parameters()}
    ones = {name: torch.ones_like(tensor) for name, tensor in saved_in(path).items()}
    loaded = by_vllm(served, ones)
    restored(served, kept)
    return sum(of.element_size() * int((of == 1).sum()) for of in loaded.values())


def other_bytes(served: Served, path: str) -> list[int]:
    """Count what this worker needs, and what vLLM's nccl (whole tensors) and nccl_m2n (shards where
    a tensor is a parameter of its own, as vLLM's code decides) send to it."""
    tensors = saved_in(path)
    ranks = served.vllm_config.parallel_config.tensor_parallel_size
    of_m2n = resolve_parameter_destinations(
        served.model, [*tensors], [t.dtype for t in tensors.values()],
        [t.shape for t in tensors.values()], num_workers=ranks, shard_axis_size=ranks,
        allow_direct=True,
    )  # fmt: skip
    parts = [tensors[of.name] if of.tensor is None else of.tensor for of in of_m2n]
    whole = [*tensors.values()]
    return [filled_bytes(served, path), *(sum(t.nbytes for t in kind) for kind in (whole, parts))]


def saved_in(path: str) -> dict[str, torch.Tensor]:
    return {k: v for file in Path(path).glob("*.safetensors") for k, v in load_file(file).items()}


def by_vllm(served: Served, checkpoint: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    with set_current_vllm_config(served.vllm_config), torch.no_grad():
        for tensor in served.model.parameters():
            tensor.zero_()
        served.model.load_weights(iter(checkpoint.items()))
    return {name: tensor.clone() for name, tensor in served.model.named_parameters()}


def restored(served: Served, kept: dict[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, tensor in served.model.named_parameters():
            tensor.copy_(kept[name])


class Plain:
    """A worker without vLLM: tensors made of a saved layout, and a Refit into them."""

    def __init__(self, path: Path) -> None:
        self.layout = layouts.read(path)
        self.model = layouts.tensors(self.layout)

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        ranks = jobs.join_at(init_info["address"], "server", ("trainer", "server"))
        self.refit = joined(
            ranks, server=self.model, convert=True, atomic=True,
            read=lambda _, rank: layouts.loaded(self.layout, rank),
        )  # fmt: skip

    def start_weight_update(self) -> None:
        pass

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.refit()

    def finish_weight_update(self) -> None:
        pass

    def shutdown(self) -> None:
        self.refit.close()
        self.refit.ranks.leave()


ARMED: list[bool] = []  # the next message that arrives gets a flipped bit


def exchange(self: Gloo, host: Any, sends: Any, into: torch.Tensor, receives: Any) -> None:
    GENUINE(self, host, sends, into, receives)
    if ARMED and receives and into.dtype == torch.uint8:
        into[next(iter(receives.values())).start] ^= ARMED.pop()


GENUINE, Gloo._exchange = Gloo._exchange, exchange


def serve(store: dist.Store, rank: str, served: Served, name: str, folder: Path) -> None:
    """Answer calls until the client is done with this model."""
    answers: Any = served
    for count in itertools.count(1):
        what, arguments = json.loads(store.get(f"{name}-call-{count}"))
        said = "done"
        try:
            if what == "compare":
                if answers is not served:
                    restored(served, dict(served.model.named_parameters()) | answers.model)
                if wrong := differences(served, **arguments):
                    said = f"differ: {wrong[:5]}"
                if refit := served.weight_transfer_engine.refit:
                    counts = [refit.moved.received_bytes, *other_bytes(served, **arguments)]
                    store.set(f"{name}-bytes-{rank}", json.dumps(counts))
            elif what == "die" and rank == "1":  # as soon as the next version begins
                served.update_weights = lambda **_: os._exit(9)
            elif what == "flip":
                ARMED.append(True)
            elif what not in ("die", "trainer", "stop", "again"):
                getattr(answers, what)(**arguments)
        except Exception as error:
            said = f"{type(error).__name__}: {error}"
            print(said, flush=True)
        store.set(f"{name}-answer-{count}-{rank}", said)
        if what in ("stop", "again"):
            (served.weight_transfer_engine if answers is served else answers).shutdown()
        if what == "stop":
            return
        if what == "again":  # without a second model, then without vLLM's
            served.weight_transfer_engine._new = None
            for tensor in served.model.parameters():
                tensor.data.zero_()
            if arguments["kind"] == "plain":
                answers = Plain(layouts.file_of(folder / name, int(rank)))


def main(folder: str, path: str, rank: str, world: str, stages: str = "1") -> None:
    load_general_plugins()  # as vLLM does at its start: ours is found by its entry point
    store = dist.FileStore(path, -1)
    saved = Path(path).parent / "layouts"
    for model in sorted(Path(folder).iterdir()):
        os.environ["MESHWISE_SAVE_LAYOUT"] = str(saved / model.name)
        place = int(rank), int(world), f"file://{path}-workers", int(stages)
        served = Served(*built(str(model), *place))
        for tensor in served.model.parameters():
            tensor.data.zero_()
        serve(store, rank, served, model.name, saved)


if __name__ == "__main__":
    main(*sys.argv[1:])
