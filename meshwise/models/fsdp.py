"""FSDP2's units and the collectives of one training step, exactly.

A unit is a layer, or the root: all that is in no layer (``parallel/data.py``). Its weights travel
as one message. Each is cut by its first dim, padded to a multiple of the ranks, so a rank holds
sum(ceil(dim0 / ranks) * rest) elements (torch/distributed/fsdp/_fully_shard: _chunk_with_empty,
_get_dim0_padded_size). NCCL's traces show that number as the ``count`` of AllGather and
ReduceScatter.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

from meshwise.models.apply import padded_shard
from meshwise.models.decoder import ROUTER_BIAS, Weight, weights
from meshwise.spec import DTYPE_BYTES, Collective, Decoder, Model
from meshwise.spec.op import Dtype


class Unit(NamedTuple):
    name: str
    weights: tuple[Weight, ...]


class Planned(NamedTuple):
    """A collective that each rank issues ``count`` times in a step. ``elements_per_rank``: what it
    sends to a gather, keeps of a scatter, and all-reduces. ``phase``: forward or backward."""

    unit: str
    phase: str
    collective: Collective
    elements_per_rank: int
    count: int  # type: ignore[assignment]  # not tuple's method


def units(model: Decoder | Model) -> list[Unit]:
    """Layer by layer, then the root. A router's score bias is not cut: it is no parameter here."""
    members: dict[str, list[Weight]] = {}
    for weight in weights(model):
        if not weight.name.endswith(ROUTER_BIAS):
            members.setdefault(weight.unit, []).append(weight)
    members["root"] = members.pop("root")
    return [Unit(name, tuple(held)) for name, held in members.items()]


def num_elements(unit: Unit) -> int:
    return sum(weight.num_elements for weight in unit.weights)


def shard_elements(unit: Unit, ranks: int) -> int:
    """What each of the ranks holds of a unit, padding included."""
    if ranks < 1:
        raise ValueError(f"ranks = {ranks}: must be >= 1")
    return sum(padded_shard(weight.shape, ranks) for weight in unit.weights)


def planned(
    model: Decoder | Model,
    *,
    shard: int,
    replicas: int = 1,
    param_dtype: Dtype = "bf16",
    reduce_dtype: Dtype = "fp32",
    reshard: bool = True,
    microbatches: int = 1,
) -> list[Planned]:
    """The collectives of one step over ``replicas`` groups of ``shard`` ranks each.

    ``reshard`` (ZeRO-3): layers are gathered for each forward and again for each backward; the
    root stays from its forward to its backward. Without it (ZeRO-2) each unit is gathered once a
    step. Gradients are scattered, and with replicas all-reduced, in each microbatch; ZeRO-1, and
    ZeRO-0, which is replicas of one shard, do so once a step: plan these as one microbatch.
    """
    for name, value in {"replicas": replicas, "microbatches": microbatches}.items():
        if value < 1:
            raise ValueError(f"{name} = {value}: must be >= 1")
    layers, root = units(model)[:-1], units(model)[-1]

    def gathers(phase: str, chosen: list[Unit], count: int) -> Iterator[Planned]:
        for unit in chosen if shard > 1 else []:
            elements = shard_elements(unit, shard)
            op = _collective("all_gather", elements * shard, shard, 1, param_dtype)
            yield Planned(unit.name, phase, op, elements, count)

    def reductions(unit: Unit) -> Iterator[Planned]:
        elements = shard_elements(unit, shard)
        if shard > 1:
            op = _collective("reduce_scatter", elements * shard, shard, 1, reduce_dtype)
            yield Planned(unit.name, "backward", op, elements, microbatches)
        if replicas > 1:
            op = _collective("all_reduce", elements, replicas, shard, reduce_dtype)
            yield Planned(unit.name, "backward", op, elements, microbatches)

    found = list(gathers("forward", [root, *layers], microbatches if reshard else 1))
    for unit in [*reversed(layers), root]:
        if reshard and unit is not root:
            found += gathers("backward", [unit], microbatches)
        found += reductions(unit)
    return found


def _collective(kind: Any, elements: int, ranks: int, stride: int, dtype: Dtype) -> Collective:
    return Collective(
        kind=kind,
        size_bytes=elements * DTYPE_BYTES[dtype],
        group_size=ranks,
        group_stride=stride,
        dtype=dtype,
    )


_TESTS = {"all_to_all": "alltoall", "send_recv": "sendrecv"}  # the others are called as here
_DTYPES = {
    "fp64": "double", "fp32": "float", "tf32": "float", "bf16": "bfloat16", "fp16": "half",
    "fp8": "f8e4m3",
}  # fmt: skip


def nccl_tests_command(collective: Collective) -> str:
    """The nccl-tests (or rccl-tests) command of the same size; its ``-b`` is the total over ranks,
    of which it rounds a rank's part of a gather or scatter down to 16 bytes."""
    kind, size = collective.kind, collective.size_bytes
    if kind in ("send", "all_to_all_v"):
        raise ValueError(f"Collective.kind = {kind!r}: nccl-tests has no test of it")
    ranks, dtype = collective.group_size, _DTYPES[collective.dtype]
    return f"{_TESTS.get(kind, kind)}_perf -b {size} -e {size} -g {ranks} -d {dtype}"
