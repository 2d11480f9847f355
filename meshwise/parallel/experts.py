"""Expert parallelism: ranks of an ep group hold different experts and send each other tokens.

In: a mixture of experts whose weights are DTensors, divided by expert over ep and by ffn over tp,
or by expert over both (then the axis ``ep`` of the experts' mesh has the ranks of both). Two
all-to-alls send rows to the rank of their expert and back, with the splits that the routers chose.
No row is dropped or padded, and an expert without rows is no special case. Where experts have a
capacity, each rank sends all its slots, equally many to each rank.

A weight's gradient sums over the rows of all ep ranks, but data parallelism takes means over
ranks. So gradients are divided by ep as they enter the experts, and multiplied as they leave.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)

from meshwise.models.placement import ROWS
from meshwise.nn.experts import MoE, move
from meshwise.parallel.mesh import MeshPlace
from meshwise.parallel.redistribute import addend
from meshwise.parallel.sums import Sums

SHARED_DIMS = {"gate": (0, 0), "up": (0, 0), "down": (1, None), "score": (None, None)}
FFN_DIMS = {"first": 2, "down": 2, "first_bias": 2, "down_bias": None}


def divide(moe: MoE, place: MeshPlace, sums: Sums) -> None:
    """Divide the experts over ep, and over tp by ffn, by tokens or by expert."""
    tp, word = place.layout.tp, place.layout.placed.of("experts")
    over_tokens, at_once = tp > 1 and word in ROWS, sums.order == "first"
    # Ranks that hold the same weight each have a part of its gradient, unless all compute the same.
    # The last bias is added once. Its gradient is partial only if ranks have different tokens.
    due = sums if word != "whole" else None
    of_bias = sums if over_tokens else None
    if place.experts is not None:
        mesh, over_experts = place.experts["ep", "tp"], [Shard(0)]
        group = place.experts["ep"].get_group()
        moe.exchange = AllToAll(group, place.layout.ep)
        # Only the host knows the splits: compiled, this would break into seven graphs and guards.
        moe.forward = torch.compiler.disable(moe.forward)  # type: ignore[method-assign]
    else:
        mesh, over_experts = place.mesh["tp"], []
    if tp > 1 or place.experts is not None:
        for name, dim in FFN_DIMS.items():
            at = [*over_experts, _placement(dim, word)]
            _distribute(moe.experts, name, mesh, at, of_bias if dim is None else due)
        summed = word != "whole" and at_once
        moe.local = moe.experts.local = partial(local, summed=summed, cast=sums.cast)
        moe.experts.added = partial(
            added,
            ranks=tp if word == "ffn" else 1,
            summed=over_tokens and at_once,
            cast=sums.cast,
        )
    if tp > 1:
        mesh = place.mesh["tp"]
        _distribute(moe.router, "weight", mesh, [Replicate()], due)
        if moe.shared is not None:
            moe.shared.added = moe.experts.added
            for name, dims in SHARED_DIMS.items():
                module = getattr(moe.shared, name)
                if module is not None:
                    for part, dim in zip(("weight", "bias"), dims, strict=True):
                        is_last = (name, part) == ("down", "bias")
                        at = [_placement(dim, word)]
                        _distribute(module, part, mesh, at, of_bias if is_last else due)
    others = [place.mesh["tp"].get_group()] if over_tokens else []
    moe.count = partial(_total, groups=[*place.data_groups, *others])


def _placement(dim: int | None, word: str) -> Placement:
    return Shard(dim) if word == "ffn" and dim is not None else Replicate()


def _distribute(
    module: nn.Module, name: str, mesh: DeviceMesh, placements: list[Any], due: Sums | None
) -> None:
    """Distribute a parameter. If tp ranks hold the same values, note it in ``due``."""
    parameter = getattr(module, name)
    if parameter is None:
        return
    if due is not None and placements[-1].is_replicate() and mesh.size(mesh.ndim - 1) > 1:
        mesh, placements = due.placed(module, name, mesh, placements)
    placed = distribute_tensor(parameter, mesh, placements, src_data_rank=None)
    setattr(module, name, nn.Parameter(placed))


def local(weight: Tensor, *, summed: bool = True, cast: torch.dtype | None = None) -> Tensor:
    """Return this rank's part of a weight, in the dtype ``cast``. ``summed``: the ranks that hold
    the same part each compute a partial sum of its gradient."""
    if isinstance(weight, DTensor):
        gradients = [Partial() if summed and p.is_replicate() else p for p in weight.placements]
        weight = weight.to_local(grad_placements=gradients)
    return weight if cast is None else weight.to(cast)


def added(bias: Tensor, *, ranks: int, summed: bool, cast: torch.dtype | None = None) -> Tensor:
    """Return what this rank adds of a bias, so that the sum over ``ranks`` has it once."""
    bias = local(bias, summed=summed, cast=cast)
    return addend(bias, ranks) if ranks > 1 else bias


def _total(counts: Tensor, groups: Sequence[dist.ProcessGroup]) -> Tensor:
    counts = counts.clone()
    for group in groups:
        dist.all_reduce(counts, group=group)
    return counts


Splits = list[int] | None  # rows to or from each rank; None: the same for all


class Ticket(NamedTuple):
    """Data to send the rows back. ``sent`` and ``received``: rows by rank. ``order``: the received
    row at each sorted position. ``place``: the sorted position of each received row."""

    sent: list[int]
    received: list[int]
    order: Tensor
    place: Tensor


class AllToAll:
    """Sends rows, sorted by expert, to the ranks of their experts, and back. Each rank holds
    equally many consecutive experts. ``ep``: how many of the ranks are data ranks."""

    def __init__(self, group: dist.ProcessGroup, ep: int) -> None:
        self.group, self.ranks, self.ep = group, dist.get_world_size(group), ep

    def out(self, rows: Tensor, counts: Tensor) -> tuple[Tensor, Tensor, Ticket]:
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts, group=self.group)
        theirs = theirs.view(self.ranks, -1)  # [from, expert of mine]
        sent, received = torch.stack(
            [counts.view(self.ranks, -1).sum(1), theirs.sum(1)]
        ).tolist()  # the only wait for the device
        arrived = self._send(rows, sent, received, self.ep)
        expert = torch.arange(theirs.shape[1], device=rows.device).repeat(self.ranks)
        order = expert.repeat_interleave(theirs.flatten(), output_size=len(arrived))
        order = order.argsort(stable=True)  # by rank and expert -> by expert
        place = order.argsort()
        ticket = Ticket(sent, received, order, place)
        return move(arrived, order, place), theirs.sum(0), ticket

    def back(self, rows: Tensor, ticket: Ticket) -> Tensor:
        rows = move(rows, ticket.place, ticket.order)
        return self._send(rows, ticket.received, ticket.sent, 1 / self.ep)

    def out_equal(self, rows: Tensor) -> Tensor:
        arrived = self._send(rows, None, None, self.ep)
        return arrived.view(self.ranks, -1, *rows.shape[1:]).transpose(0, 1).flatten(1, 2)

    def back_equal(self, rows: Tensor) -> Tensor:
        by_rank = rows.unflatten(1, (self.ranks, -1)).transpose(0, 1)
        return self._send(by_rank.flatten(0, 1), None, None, 1 / self.ep)

    def _send(self, rows: Tensor, sent: Splits, received: Splits, scale: float) -> Tensor:
        return _Exchange.apply(  # type: ignore[no-any-return,no-untyped-call]
            rows, sent, received, self.group, scale
        )


class _Exchange(torch.autograd.Function):
    """An all-to-all of rows. Backward sends gradients the other way and multiplies by ``scale``."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        sent: Splits,
        received: Splits,
        group: dist.ProcessGroup,
        scale: float,
    ) -> Tensor:
        ctx.given = (sent, received, group, scale)
        return _all_to_all(rows, sent, received, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        sent, received, group, scale = ctx.given
        gradient = _all_to_all(gradients[0], received, sent, group)
        return gradient * scale, None, None, None, None


def _all_to_all(rows: Tensor, sent: Splits, received: Splits, group: dist.ProcessGroup) -> Tensor:
    rows = rows.contiguous()
    shape = rows.shape if received is None else (sum(received), rows.shape[1])
    arrived = rows.new_empty(shape)
    dist.all_to_all_single(arrived, rows, received, sent, group=group)
    return arrived
