"""Collectives over groups of ranks that a mesh axis would make, every group of a kind at once.

A group of ``size`` ranks ``stride`` apart is {o, o+stride, ..., o+(size-1)*stride}: stride 1 as
the innermost axis (tp), a larger one as an outer axis (dp). ``size_bytes`` is nccl-tests'
``size``: the gathered tensor of all_gather, the unreduced one of reduce_scatter, the whole send
buffer of all_to_all. send_recv is a ring shift: every rank sends to the next, receives from the
previous.
"""

import functools
from collections.abc import Iterable

import torch
import torch.distributed as dist

from meshwise.probe.work import Unavailable, Work, torch_dtype
from meshwise.spec import Case, Collective
from meshwise.timing import randn

Groups = dict[tuple[int, int], dist.ProcessGroup]  # (size, stride) -> the one this rank is in

# torch 2.13 renamed these two and warns about the old names, 2.11 has only those.
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def members(world_size: int, size: int, stride: int) -> list[list[int]]:
    """The groups that tile the world."""
    if world_size % (size * stride):
        raise ValueError(
            f"group_size = {size}, group_stride = {stride}: such groups do not tile "
            f"{world_size} ranks; use degrees that divide them"
        )
    starts = [i for i in range(world_size) if i // stride % size == 0]
    return [[start + i * stride for i in range(size)] for start in starts]


def make_groups(cases: Iterable[Case], rank: int, world_size: int, device: torch.device) -> Groups:
    """Every group that ``cases`` need, made in the same order on all ranks, and connected."""
    ops = [case.op for case in cases if isinstance(case.op, Collective)]
    groups: Groups = {}
    for size, stride in sorted({(op.group_size, op.group_stride) for op in ops}):
        for ranks in members(world_size, size, stride):
            group = dist.new_group(ranks)
            if rank in ranks:
                assert isinstance(group, dist.ProcessGroup)
                groups[size, stride] = group
        dist.all_reduce(torch.zeros(1, device=device), group=groups[size, stride])
    return groups


def build(case: Case, device: torch.device, groups: Groups) -> Work:
    op = case.op
    assert isinstance(op, Collective)
    group = groups[op.group_size, op.group_stride]
    source, result = allocate(op, device, seed=dist.get_rank())
    return Work(calls=(functools.partial(communicate, op, source, result, group),))


def allocate(op: Collective, device: torch.device, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What a rank sends and where it receives; one tensor twice when the operation is in place."""
    dtype = torch_dtype(op.dtype)
    whole, rest = divmod(op.size_bytes, op.group_size * dtype.itemsize)
    if rest:
        raise ValueError(
            f"Collective.size_bytes = {op.size_bytes}: must be a multiple of "
            f"{op.group_size * dtype.itemsize} (group size x {op.dtype})"
        )
    total = whole * op.group_size
    source = randn((whole if op.kind == "all_gather" else total,), dtype, device, seed)
    if op.kind in ("all_reduce", "broadcast"):
        return source, source
    received = whole if op.kind == "reduce_scatter" else total
    return source, torch.empty(received, dtype=dtype, device=device)


def communicate(
    op: Collective, source: torch.Tensor, result: torch.Tensor, group: dist.ProcessGroup
) -> None:
    """One operation. A repeated all-reduce sums its own sums: they overflow, at no cost in time."""
    if op.kind == "all_reduce":
        dist.all_reduce(result, group=group)
    elif op.kind == "all_gather":
        _gather(result, source, group=group)
    elif op.kind == "reduce_scatter":
        _scatter(result, source, group=group)
    elif op.kind == "all_to_all":
        dist.all_to_all_single(result, source, group=group)
    elif op.kind == "broadcast":
        dist.broadcast(result, group=group, group_src=0)
    elif op.kind == "send_recv":
        here = dist.get_rank(group)
        onward = dist.P2POp(dist.isend, source, group=group, group_peer=(here + 1) % op.group_size)
        inward = dist.P2POp(dist.irecv, result, group=group, group_peer=(here - 1) % op.group_size)
        for request in dist.batch_isend_irecv([onward, inward]):
            request.wait()
    else:
        raise Unavailable(f"no probe for {op.kind}")
