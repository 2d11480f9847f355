"""Collectives over groups of ranks, as a mesh's axes make them or as the user names them.

A group of ``size`` ranks ``stride`` apart is {o, o+stride, ..., o+(size-1)*stride}: stride 1 is the
innermost axis (tp), a larger stride an outer axis (dp). All such groups work at once. If a case
names its ranks, the others are idle. ``size_bytes`` is nccl-tests' ``size``.

Back ends: torch's choice for the device (""), ``gloo`` on host memory, ``nccl`` called directly
in its own memory (``meshwise.nccl``), and those of ``probe.symmetric``. torch's all_reduce, reduce
and broadcast are in place; no back end has all_to_all in place. Every case can be checked, after
one call or after the many calls of a graph, on data that reveal permutations (``probe.pattern``).
"""

import functools
from collections.abc import Callable
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist

from meshwise import nccl
from meshwise.probe import pattern, symmetric
from meshwise.probe.cases import effort
from meshwise.probe.cases.collectives import BACKENDS, SYMMETRIC
from meshwise.probe.work import Check, Unavailable, Work, torch_dtype
from meshwise.ranks import Ranks
from meshwise.spec import Case, Collective
from meshwise.spec.op import IN_PLACE_ONLY, REDUCING, WHOLE, WHOLE_NUMBERS

# torch 2.13 renamed these two and warns about the old names; 2.11 has only the old names.
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_DTYPES = {
    "fp8": torch.float8_e4m3fn, "int8": torch.int8, "uint8": torch.uint8, "int32": torch.int32,
    "int64": torch.int64,
}  # fmt: skip
_REDOPS = {
    "sum": dist.ReduceOp.SUM, "prod": dist.ReduceOp.PRODUCT, "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN, "avg": dist.ReduceOp.AVG,
}  # fmt: skip


class Party(NamedTuple):
    """This rank's group in a case: its global ranks, and this rank's index among them."""

    ranks: tuple[int, ...]
    here: int
    group: dist.ProcessGroup


class Buffers(NamedTuple):
    """Flat buffers. They overlap if the operation is in place."""

    source: torch.Tensor
    result: torch.Tensor


def members(world_size: int, size: int, stride: int) -> list[list[int]]:
    """List the groups that tile the world."""
    if world_size % (size * stride):
        raise ValueError(
            f"group_size = {size}, group_stride = {stride}: such groups do not tile "
            f"{world_size} ranks; use degrees that divide them"
        )
    starts = [i for i in range(world_size) if i // stride % size == 0]
    return [[start + i * stride for i in range(size)] for start in starts]


class Groups:
    """Process groups, communicators and symmetric memory, made when a case first needs them.

    All ranks build the same case at the same time, so they make groups in the same order.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.groups: dict[tuple[tuple[int, ...], str], dist.ProcessGroup] = {}
        self.communicators: dict[tuple[int, ...], nccl.Communicator] = {}
        self.heap = symmetric.Heap()

    def party(self, op: Collective, backend: str = "") -> Party | None:
        """Return this rank's group for ``op``; None if it is idle. Every rank must call this."""
        size, stride = op.group_size, op.group_stride
        tiles = [list(op.ranks)] if op.ranks else members(self.ranks.world_size, size, stride)
        if op.ranks and max(op.ranks) >= self.ranks.world_size:
            raise ValueError(
                f"Collective.ranks = {op.ranks}: there are {self.ranks.world_size} ranks"
            )
        library = backend if backend == "gloo" else ""
        found = None
        for tile in tiles:
            group = self._group(tuple(sorted(tile)), library)
            if self.ranks.rank in tile:
                found = Party(tuple(tile), tile.index(self.ranks.rank), group)
        return found

    def _group(self, tile: tuple[int, ...], library: str) -> dist.ProcessGroup:
        if (tile, library) not in self.groups:
            limit = timedelta(seconds=self.ranks.timeout_s)  # torch's own would be 30 minutes
            group = dist.new_group(list(tile), backend=library or None, timeout=limit)
            assert isinstance(group, dist.ProcessGroup | int)  # an int: not a member
            self.groups[tile, library] = group  # type: ignore[assignment]
            if self.ranks.rank in tile:  # connect; other ranks wait at the next gather
                device = torch.device("cpu") if library else self.ranks.device
                dist.all_reduce(torch.zeros(1, device=device), group=group)
        return self.groups[tile, library]

    def communicator(self, op: Collective, party: Party | None) -> nccl.Communicator | None:
        """Return our own NCCL communicator for the case's group. Every rank must call this."""
        known = party is not None and party.ranks in self.communicators
        if not all(self.ranks.gather(known or party is None)):
            leads = party is not None and party.here == 0
            ids = self.ranks.gather(nccl.unique_id() if leads else None)
            if party is not None:
                self.communicators[party.ranks] = nccl.Communicator(
                    ids[party.ranks[0]], party.here, op.group_size
                )
        return None if party is None else self.communicators[party.ranks]


def build(case: Case, groups: Groups) -> Work:
    op, backend = case.op, case.backend
    assert isinstance(op, Collective)
    on_host = backend == "gloo"
    _check_offered(op, backend)
    _check_numbers(op, backend, on_host or groups.ranks.device.type == "cpu")
    if on_host and case.regime == "graph":
        raise Unavailable("gloo cannot be captured in a graph")
    device = torch.device("cpu") if on_host else groups.ranks.device
    party = groups.party(op, backend)
    communicator = groups.communicator(op, party) if backend == "nccl" else None
    if party is None:
        idle = torch.zeros(1, device=device)
        check = functools.partial(_check, op, device, None, None)
        return Work(calls=(idle.zero_,), check=check, batch=effort.batch(op), on_host=on_host)
    if backend in SYMMETRIC:
        dtype, (sent, received) = sent_dtype(op), _lengths(op, party.here)
        source, handle = groups.heap.source(sent, dtype, party.group, device)
        in_place = backend == "two_shot"
        result = source if in_place else torch.empty(received, dtype=dtype, device=device)
        buffers = Buffers(source, result)
        call = symmetric.call(op, backend, source, result, handle, party.group)
    else:
        buffers = allocate(op, party.here, device, nccl.empty if communicator else torch.empty)
        call = functools.partial(communicate, op, buffers, party)
        if communicator is not None:
            call = _direct(op, buffers, party.here, communicator)
    check = functools.partial(_check, op, device, party, buffers)
    return Work(calls=(call,), check=check, batch=effort.batch(op), on_host=on_host)


def _check_offered(op: Collective, backend: str) -> None:
    kinds = SYMMETRIC.get(backend)
    if backend == "nccl":
        try:
            nccl.library()
        except OSError as error:
            raise Unavailable(str(error)) from None
    if op.group_size == 1 and op.kind in ("send_recv", "send"):
        raise Unavailable(f"{op.kind}: a group of one rank sends to nobody")
    if kinds is not None:
        if op.kind not in kinds:
            raise Unavailable(f"{backend} does {', '.join(kinds)}, not {op.kind}")
        if op.in_place != (backend == "two_shot"):
            raise Unavailable(
                f"{backend} works {'in' if backend == 'two_shot' else 'out of'} place"
            )
    elif backend not in BACKENDS:
        known = ", ".join(BACKENDS[1:])
        raise Unavailable(f"no back end {backend!r} for collectives; there are {known}")
    elif op.in_place and op.kind not in (*IN_PLACE_ONLY, "all_gather", "reduce_scatter"):
        raise Unavailable(f"{op.kind} has no form in place")
    elif not op.in_place and op.kind in IN_PLACE_ONLY and backend != "nccl":
        raise Unavailable(f"torch's {op.kind} is in place; the nccl back end has it out of place")


def _check_numbers(op: Collective, backend: str, by_gloo: bool) -> None:
    """Refuse numbers and reductions that the back end does not have."""
    reduces = op.kind in REDUCING
    if op.dtype == "fp8" and (reduces or by_gloo):
        raise Unavailable(f"fp8 is only moved by NCCL here, not {'reduced' if reduces else 'gloo'}")
    if by_gloo and op.redop == "avg":
        raise Unavailable("gloo has no avg")
    if reduces and backend in SYMMETRIC and (op.redop != "sum" or op.dtype in WHOLE_NUMBERS):
        raise Unavailable(f"{backend} has sums of floating-point numbers only")


def sent_dtype(op: Collective) -> torch.dtype:
    """Return torch's dtype of what a collective sends; fp8 is e4m3."""
    return _DTYPES.get(op.dtype) or torch_dtype(op.dtype)


def _lengths(op: Collective, here: int) -> tuple[int, int]:
    """Return the elements that a rank sends and receives."""
    size = sent_dtype(op).itemsize
    total, rest = divmod(op.size_bytes, size * (1 if op.kind in WHOLE else op.group_size))
    if op.splits:
        sent, received = sum(op.splits[here]), sum(row[here] for row in op.splits)
        if any(count % size for row in op.splits for count in row):
            raise ValueError(f"Collective.splits: must be multiples of {size} bytes ({op.dtype})")
        return sent // size, received // size
    if rest:
        raise ValueError(
            f"Collective.size_bytes = {op.size_bytes}: must be a multiple of "
            f"{size * op.group_size} (group size x {op.dtype})"
        )
    whole = total * (1 if op.kind in WHOLE else op.group_size)
    sends_part = op.kind in ("all_gather", "gather")
    gets_part = op.kind in ("reduce_scatter", "scatter")
    return total if sends_part else whole, total if gets_part else whole


def allocate(
    op: Collective,
    here: int,
    device: torch.device,
    empty: Callable[..., torch.Tensor] = torch.empty,
) -> Buffers:
    """Allocate the buffers that a rank of the group sends from and receives into."""
    dtype = sent_dtype(op)
    sent, received = _lengths(op, here)
    larger = empty(max(sent, received), dtype=dtype, device=device)
    if not op.in_place:
        other = empty(min(sent, received), dtype=dtype, device=device)
        return Buffers(larger, other) if sent > received else Buffers(other, larger)
    if op.kind == "all_gather":
        return Buffers(larger[here * sent :][:sent], larger)
    if op.kind == "reduce_scatter":
        return Buffers(larger, larger[here * received :][:received])
    return Buffers(larger, larger)


def communicate(op: Collective, buffers: Buffers, party: Party) -> None:
    """Run one operation by torch.distributed. A repeated all-reduce sums its own sums; they
    overflow, which does not change its time."""
    (source, result), group, here = buffers, party.group, party.here
    parts = functools.partial(torch.chunk, chunks=op.group_size)
    redop, root = _REDOPS[op.redop], op.root
    if op.kind == "all_reduce":
        dist.all_reduce(result, op=redop, group=group)
    elif op.kind == "reduce":
        dist.reduce(result, op=redop, group=group, group_dst=root)
    elif op.kind == "broadcast":
        dist.broadcast(result, group=group, group_src=root)
    elif op.kind == "all_gather":
        _gather(result, source, group=group)
    elif op.kind == "reduce_scatter":
        _scatter(result, source, op=redop, group=group)
    elif op.kind == "all_to_all":
        dist.all_to_all_single(result, source, group=group)
    elif op.kind == "all_to_all_v":
        size = source.element_size()
        outward = [count // size for count in op.splits[here]]
        inward = [row[here] // size for row in op.splits]
        dist.all_to_all_single(result, source, inward, outward, group=group)
    elif op.kind == "gather":
        into = list(parts(result)) if here == root else None
        dist.gather(source, into, group=group, group_dst=root)
    elif op.kind == "scatter":
        of = list(parts(source)) if here == root else None
        dist.scatter(result, of, group=group, group_src=root)
    else:
        _send(op, buffers, party)


def _send(op: Collective, buffers: Buffers, party: Party) -> None:
    """Run a ring shift, or send one message from the first of the case's ranks to the last."""
    ends, n, here = [], op.group_size, party.here
    peer = functools.partial(dist.P2POp, group=party.group)
    if op.kind == "send_recv" or here == 0:
        ends.append(peer(dist.isend, buffers.source, party.ranks[(here + 1) % n]))
    if op.kind == "send_recv" or here == n - 1:
        ends.append(peer(dist.irecv, buffers.result, party.ranks[(here - 1) % n]))
    for request in dist.batch_isend_irecv(ends):
        request.wait()


def _direct(
    op: Collective, buffers: Buffers, here: int, communicator: nccl.Communicator
) -> Callable[[], object]:
    if op.kind in (*IN_PLACE_ONLY, "all_gather", "reduce_scatter"):
        return communicator.collective(op.kind, *buffers, op.redop, op.root)
    sent = [
        nccl.Message(there, buffers.source[piece.start :][: piece.length])
        for there in range(op.group_size)
        for piece in pattern.pieces(op, there)
        if piece.sources == (here,)
    ]
    received = [
        nccl.Message(piece.sources[0], buffers.result[piece.at :][: piece.length])
        for piece in pattern.pieces(op, here)
    ]
    return communicator.exchange(sent, received)


def _check(
    op: Collective, device: torch.device, party: Party | None, buffers: Buffers | None, calls: int
) -> Check | None:
    """Return the check after so many calls; None if there is none. On an idle rank it passes."""
    tolerance = pattern.tolerance(op, sent_dtype(op), calls)
    # gloo's reduce overwrites the buffers of all ranks, so the next call's result is undefined
    scratch = op.kind == "reduce" and calls > 1 and device.type == "cpu"
    if tolerance is None or scratch:
        return None
    if party is None or buffers is None:
        return Check(lambda: None, lambda: 0)
    summed = pattern.num_summed(op, calls)

    def fill() -> None:
        buffers.result.fill_(pattern.POISON)
        pattern.fill(buffers.source, party.here, summed, op.redop)

    def num_wrong() -> int:
        wanted = pattern.pieces(op, party.here, calls)
        return pattern.num_wrong(buffers.result, wanted, summed, tolerance)

    return Check(fill, num_wrong)
