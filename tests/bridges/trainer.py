"""A trainer's rank: trainer.py FOLDER STORE PORT WORKERS [FAULT]. For each model in the folder it
makes transformers' own, shards it by FSDP2, and sends two versions to vLLM's workers. It trains
nothing: a step adds noise to every weight, in place, as an optimizer would. FAULT: flip, die, or
layouts (no fault: workers that then read saved layouts).
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM
from vllm.distributed.weight_transfer.base import TrainerWeightTransferEngine
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

from meshwise.bridges import plugin


class Client:
    """Calls the workers through a file; each answers. What a server would do with HTTP or Ray."""

    def __init__(self, path: str, name: str, workers: int) -> None:
        self.store, self.name, self.workers = dist.FileStore(path, -1), name, workers
        self.path = path
        self.count, self.versions = 0, list[str | None]()

    def call(self, what: str, **arguments: object) -> None:
        self.count += 1
        self.store.set(f"{self.name}-call-{self.count}", json.dumps([what, arguments]))
        for worker in range(self.workers):
            said = self.store.get(f"{self.name}-answer-{self.count}-{worker}").decode()
            if said != "done":
                raise RuntimeError(f"worker {worker}: {said}")

    def init_weight_transfer_engine(self, init_info: dict[str, object]) -> None:
        self.call("init_weight_transfer_engine", init_info=init_info)

    def start_weight_update(self) -> None:
        self.call("start_weight_update")

    def update_weights(self, update_info: dict[str, object]) -> None:
        self.call("update_weights", update_info=update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.call("finish_weight_update")
        self.versions.append(weight_version)


def made(folder: Path) -> nn.Module:
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(folder)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def step(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            local.add_(torch.randn_like(local))


def saved(model: nn.Module, folder: Path) -> str:
    """Save the whole model as transformers does, on rank 0."""
    whole = {
        name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        for name, tensor in model.state_dict().items()
        if name not in model.all_tied_weights_keys  # gathered, they are no longer one tensor
    }
    if dist.get_rank() == 0:
        model.save_pretrained(folder, state_dict=whole)
    dist.barrier()
    return str(folder)


def main(folder: str, path: str, port: str, workers: str, fault: str = "") -> None:
    dist.init_process_group("gloo")
    plugin.register()
    from meshwise.bridges.vllm import TrainerInfo

    first = dist.get_rank() == 0
    for number, config in enumerate(sorted(Path(folder).iterdir())):
        model, client = made(config), Client(path, config.name, int(workers))
        address = f"127.0.0.1:{int(port) + number}"
        limit_s = 20.0 if fault == "die" else 120.0
        info = TrainerInfo(address=address, rank=dist.get_rank(), timeout_s=limit_s)
        engine = WeightTransferTrainerFactory.trainer_init(info, client=client, source=model)
        for version in ("1", "2"):
            step(model)
            engine.send_weights()
            path_of = saved(model, Path(path).parent / f"{config.name}-{version}")
            if first:
                client.call("compare", path=path_of)
                assert client.versions[-1] == version
        if first:
            keys = [f"{config.name}-bytes-{rank}" for rank in range(client.workers)]
            counts = [json.loads(client.store.get(key)) for key in keys]
            moved, least = map(sum, zip(*counts, strict=True))
            print(f"{config.name}: as vLLM loads it, twice; {moved} of {least} bytes", flush=True)
        if fault == "layouts":
            of_layouts(engine, info, client, model, path_of)
        elif fault:
            fails(fault, engine, client, model, path_of)
        elif first:
            client.call("stop")
        if fault not in ("die", "layouts"):
            engine.shutdown()
    dist.barrier()
    dist.destroy_process_group()


def of_layouts(
    engine: TrainerWeightTransferEngine,
    info: Any,
    client: Client,
    model: nn.Module,
    path: str,
) -> None:
    """Send a version to workers that read what they saved of their loaders: into vLLM's models,
    then into plain tensors made of the files."""
    first = dist.get_rank() == 0
    for kind in ("saved", "plain"):
        if first:
            client.call("again", kind=kind)
        engine.shutdown()
        info.layout = str(Path(client.path).parent / "layouts" / client.name)
        engine = WeightTransferTrainerFactory.trainer_init(info, client=client, source=model)
        step(model)
        engine.send_weights()
        saved(model, Path(path).parent / f"{client.name}-{kind}")
        if first:
            client.call("compare", path=str(Path(path).parent / f"{client.name}-{kind}"))
            print(f"{client.name}: {kind} layouts", flush=True)
    if first:
        client.call("stop")
    engine.shutdown()


def fails(
    fault: str,
    engine: TrainerWeightTransferEngine,
    client: Client,
    model: nn.Module,
    old: str,
) -> None:
    """Send a version on which something goes wrong; the workers keep the one before."""
    first = dist.get_rank() == 0
    if first:
        client.call(fault)
    dist.barrier()
    step(model)
    try:
        engine.send_weights()
    except Exception as error:
        print(f"rank {dist.get_rank()}: {type(error).__name__}: {error}", flush=True)
    else:
        raise AssertionError("the fault was not noticed")
    if fault == "flip" and first:
        assert client.versions == ["1", "2"]
        client.call("compare", path=old)
        print("old version kept", flush=True)
    dist.barrier()
    if fault == "flip":
        engine.send_weights()  # the next one is whole
        path = saved(model, Path(old).parent / "after")
        if first:
            client.call("compare", path=path)
            print("next version arrived", client.versions[-1], flush=True)
            client.call("stop")


if __name__ == "__main__":
    main(*sys.argv[1:])
