"""List FSDP2's units and the collectives of one training step, exactly.

A unit is a layer, or the root with all weights outside layers (``parallel/data.py``). Its weights
are sent as one message. Each weight is cut by its first dim, padded to a multiple of the ranks, so
a rank holds sum(ceil(dim0 / ranks) * rest) elements (torch/distributed/fsdp/_fully_shard:
_chunk_with_empty, _get_dim0_padded_size). NCCL's traces show that number as the ``count`` of
AllGather and ReduceScatter.
"""

from typing import NamedTuple

from msgspec.structs import replace

from meshwise.models import families
from meshwise.models.apply import program_of
from meshwise.models.backward import training_step
from meshwise.models.data_parallel import padded_shard
from meshwise.models.decoder import ROUTER_BIAS, Weight, weights
from meshwise.spec import DTYPE_BYTES, AnyModel, Collective, Layout, layer_kinds
from meshwise.spec.op import Dtype


class Unit(NamedTuple):
    name: str
    weights: tuple[Weight, ...]


class Planned(NamedTuple):
    """A collective that each rank issues ``count`` times in a step, in the mean if ranks differ.
    ``elements_per_rank``: those that the rank sends to an all-gather, keeps of a reduce-scatter, or
    all-reduces. ``phase``: forward or backward."""

    unit: str
    phase: str
    collective: Collective
    elements_per_rank: int
    count: float  # type: ignore[assignment]  # not tuple's method


def units(model: AnyModel) -> list[Unit]:
    """Return the units: the layers, then the root. They leave out a router's score bias, which is
    state here."""
    members: dict[str, list[Weight]] = {}
    for weight in weights(model):
        if not weight.name.endswith(ROUTER_BIAS):
            members.setdefault(weight.unit, []).append(weight)
    members["root"] = members.pop("root")
    return [Unit(name, tuple(held)) for name, held in members.items()]


def num_elements(unit: Unit) -> int:
    return sum(weight.num_elements for weight in unit.weights)


def shard_elements(unit: Unit, ranks: int) -> int:
    """Return the elements of a unit that each rank holds, padding included."""
    if ranks < 1:
        raise ValueError(f"ranks = {ranks}: must be >= 1")
    return sum(padded_shard(weight.shape, ranks) for weight in unit.weights)


def planned(
    model: AnyModel,
    *,
    shard: int,
    replicas: int = 1,
    param_dtype: Dtype = "bf16",
    reduce_dtype: Dtype = "fp32",
    reshard: bool = True,
    microbatches: int = 1,
) -> list[Planned]:
    """Return the collectives of one step over ``replicas`` groups of ``shard`` ranks each.

    With ``reshard`` (ZeRO-3), layers are gathered for each forward and again for each backward; the
    root stays gathered in between. Without it (ZeRO-2) each unit is gathered once a step.
    Gradients are reduce-scattered, and with replicas also all-reduced, in each microbatch. ZeRO-1
    and ZeRO-0 (replicas of one shard) do this once a step: plan them as one microbatch.
    """
    for name, value in {"shard": shard, "replicas": replicas, "microbatches": microbatches}.items():
        if value < 1:
            raise ValueError(f"{name} = {value}: must be >= 1")
    layout = Layout(dp=replicas)  # of one shard: all is sent once for each of the microbatches
    if shard > 1:
        layout = Layout(
            dp=shard * replicas,
            replicas=replicas,
            zero=3 if reshard else 2,
            num_microbatches=min(2, microbatches),
        )
    kinds = layer_kinds(model, 1)
    different = tuple(dict.fromkeys(kinds))  # plan one layer of each kind: there may be thousands
    alike: dict[str, list[str]] = {"root": ["root"]}
    for index, kind in enumerate(kinds):
        alike.setdefault(f"layers.{different.index(kind)}", []).append(f"layers.{index}")
    found: dict[tuple[str, str, str], Planned] = {}
    step = training_step(families.forward(model, 1, 1, "fp32", layers=different))
    for task in program_of(step, layout, param_dtype).tasks:
        op, (of, _, name) = task.op, task.name.rpartition(".")
        if task.stream != "dp" or not isinstance(op, Collective) or op.group_size == 1:
            continue
        elements, is_gather = op.size_bytes // DTYPE_BYTES[op.dtype], name == "all_gather"
        dtype = param_dtype if is_gather else reduce_dtype
        op = replace(op, dtype=dtype, size_bytes=elements * DTYPE_BYTES[dtype])
        held = elements if name == "all_reduce" else elements // op.group_size
        phase = task.phase.rstrip("0123456789")
        count = 1 if is_gather and not reshard else microbatches
        for unit in alike[of]:
            found.setdefault((phase, unit, name), Planned(unit, phase, op, held, count))
    order = {"root": -1} | {f"layers.{index}": index for index in range(len(kinds))}
    forward = [row for row in found.values() if row.phase == "forward"]
    backward = [row for row in found.values() if row.phase == "backward"]
    return [
        *sorted(forward, key=lambda row: order[row.unit]),
        *sorted(backward, key=lambda row: -order[row.unit]),
    ]


_TESTS = {"all_to_all": "alltoall", "send_recv": "sendrecv"}  # the other names are the same
_DTYPES = {
    "fp64": "double", "fp32": "float", "tf32": "float", "bf16": "bfloat16", "fp16": "half",
    "fp8": "f8e4m3",
}  # fmt: skip


def nccl_tests_command(collective: Collective) -> str:
    """Return the nccl-tests (or rccl-tests) command for the same size. Its ``-b`` is the total
    over ranks. nccl-tests rounds a rank's part of a gather or scatter down to 16 bytes."""
    kind, size = collective.kind, collective.size_bytes
    if kind in ("send", "all_to_all_v"):
        raise ValueError(f"Collective.kind = {kind!r}: nccl-tests has no test of it")
    ranks, dtype = collective.group_size, _DTYPES[collective.dtype]
    return f"{_TESTS.get(kind, kind)}_perf -b {size} -e {size} -g {ranks} -d {dtype}"
