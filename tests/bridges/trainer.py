"""A trainer's rank: trainer.py FOLDER STORE PORT WORKERS [FAULT]. For each model in the folder it
makes transformers' own, shards it, and sends two versions to vLLM's workers. A step adds noise to
every weight, in place, as an optimizer would; where the folder says a way of sharding (llama@tp),
the second step is one of AdamW on a loss. FAULT: flip, die (a
worker), trainer (one dies), refuse (no engine can be made), or layouts (no fault: workers that then
read saved layouts). Megatron-core's model (llama@megatron-...) is made, changed and saved by
``megatron_model``.
"""

import copy
import json
import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.distributed import DistributedConfig
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
        wrong: list[str] = []
        for worker in range(self.workers):
            said = self.store.get(f"{self.name}-answer-{self.count}-{worker}").decode()
            wrong += [f"worker {worker}: {said}"] * (said != "done")
        if wrong:
            raise RuntimeError("; ".join(wrong))

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
    return sharded(model, folder.name.partition("@")[2])


def sharded(model: nn.Module, way: str) -> nn.Module:
    """Shard by FSDP2; over 2 x 2 ranks by HSDP, by torch's tp and FSDP2, or all by transformers."""
    ranks = dist.get_world_size()
    if way == "transformers":
        asked = DistributedConfig(tp_size=2, fsdp_size=2)
        how, _, meshes = model.prepare_distribute_model(asked)
        return model.maybe_distribute_model(model, how, meshes)
    mesh = init_device_mesh("cpu", (ranks,))
    if way == "hsdp":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    elif way == "tp":
        both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        mesh = both["dp"]
        rows, columns = (
            ("o_proj", "down_proj"),
            ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"),
        )
        plan = {f"model.layers.*.*.{name}": RowwiseParallel() for name in rows}
        plan |= {f"model.layers.*.*.{name}": ColwiseParallel() for name in columns}
        plan["model.embed_tokens"] = RowwiseParallel(input_layouts=Replicate())
        plan["lm_head"] = ColwiseParallel(output_layouts=Replicate())
        parallelize_module(model, both["tp"], plan)
        model.tie_weights()
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def step(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            local.add_(torch.randn_like(local))


def train(model: nn.Module) -> None:
    """Do one step of AdamW on the loss of some tokens."""
    torch.manual_seed(0)
    tokens = torch.randint(250, (2, 16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, foreach=False)
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    assert loss.isfinite()
    optimizer.step()
    optimizer.zero_grad()


def saved(model: nn.Module, folder: Path) -> str:
    """Save the whole model as transformers does, on rank 0."""
    whole = {
        name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        for name, tensor in model.state_dict().items()
        if name not in model.all_tied_weights_keys  # gathered, they are no longer one tensor
    }
    if dist.get_rank() == 0:
        with torch.device("meta"):  # one that is not sharded
            plain = AutoModelForCausalLM.from_config(copy.copy(model.config))
        plain.config.distributed_config = None
        plain.save_pretrained(folder, state_dict=whole)
    dist.barrier()
    return str(folder)


def main(folder: str, path: str, port: str, workers: str, fault: str = "") -> None:
    dist.init_process_group("gloo")
    plugin.register()
    from meshwise.bridges.vllm import TrainerInfo

    first = dist.get_rank() == 0
    for number, config in enumerate(sorted(Path(folder).iterdir())):
        by_megatron = "@megatron" in config.name
        how = import_module("tests.bridges.megatron_model" if by_megatron else __name__)
        model, client = how.made(config), Client(path, config.name, int(workers))
        address = f"127.0.0.1:{int(port) + number}"
        limit_s = 20.0 if fault in ("die", "trainer") else 120.0
        info = TrainerInfo(address=address, rank=dist.get_rank(), timeout_s=limit_s)
        info.checkpoint = str(config) if by_megatron else ""
        if fault == "refuse":
            refused(info, client, model)
            continue
        engine = WeightTransferTrainerFactory.trainer_init(info, client=client, source=model)
        for version in ("1", "2"):
            if version == "2" and "@" in config.name and not by_megatron:
                train(model)
            else:
                how.step(model)
            engine.send_weights()
            path_of = how.saved(model, Path(path).parent / f"{config.name}-{version}")
            if first:
                client.call("compare", path=path_of)
                assert client.versions[-1] == version
        if first:
            keys = [f"{config.name}-bytes-{rank}" for rank in range(client.workers)]
            counts = [json.loads(client.store.get(key)) for key in keys]
            moved, least, nccl, m2n = map(sum, zip(*counts, strict=True))
            said = f"as vLLM loads it, twice; {moved} of {least} bytes, nccl {nccl}, m2n {m2n}"
            print(f"{config.name}: {said}", flush=True)
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


def refused(info: Any, client: Client, model: nn.Module) -> None:
    try:
        WeightTransferTrainerFactory.trainer_init(info, client=client, source=model)
    except Exception as error:
        print(f"{client.name} rank {info.rank}: {type(error).__name__}: {error}", flush=True)
    else:
        raise AssertionError(f"{client.name} was taken")
    dist.barrier()
    if info.rank == 0:
        client.call("stop")


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
    if fault == "trainer" and not first:
        os._exit(0)  # torchrun lets the others go on
    try:
        engine.send_weights()
    except Exception as error:
        print(f"rank {dist.get_rank()}: {type(error).__name__}: {error}", flush=True)
    else:
        raise AssertionError("the fault was not noticed")
    if fault in ("flip", "trainer") and first:
        assert client.versions == ["1", "2"]
        client.call("compare", path=old)
        print("old version kept", flush=True)
    if fault == "trainer":
        client.call("stop")
        os._exit(0)
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
