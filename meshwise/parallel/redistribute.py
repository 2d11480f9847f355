"""Change an activation's placement on the tp ranks in forward, and its gradient's in backward.

A placement is ``whole``, ``partial`` (the ranks hold parts of a sum) or the tensor dim that the
ranks divide, as in ``models.placement``. Inputs and outputs are local tensors, so no DTensor is
dispatched, and layers of equal placements share compiled code.
"""

from typing import Any, Literal, NamedTuple

from torch import Tensor, contiguous_format
from torch.autograd import Function

from meshwise import torch_private

Placement = int | Literal["whole", "partial"]


class NamedGroup(NamedTuple):
    """A group of ranks by name, its size, and this rank's number in it."""

    group: str
    size: int
    rank: int


class Edge(NamedTuple):
    """The change of placement between two parts of a model: ``there`` (from, to) for a tensor in
    forward, ``back`` (from, to) for its gradient."""

    there: tuple[Placement, Placement]
    back: tuple[Placement, Placement]
    ranks: NamedGroup

    def move(self, x: Tensor) -> Tensor:
        if self.there[0] == self.there[1] and self.back[0] == self.back[1]:
            return x
        return _Moved.apply(x, *self)  # type: ignore[no-any-return,no-untyped-call]


class _Moved(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Any, back: Any, ranks: NamedGroup) -> Tensor:
        ctx.way = back, ranks
        return moved(x, there[0], there[1], ranks)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        back, ranks = ctx.way
        return moved(gradients[0], back[0], back[1], ranks), None, None, None


def moved(x: Tensor, have: Placement, wanted: Placement, ranks: NamedGroup) -> Tensor:
    """Move x from the placement ``have`` to ``wanted``; return this rank's part."""
    if have == wanted:
        return x.view_as(x)
    if have == "whole":
        assert isinstance(wanted, int)
        # clone rows too: from a view torch 2.11 compiles wrong gradients (2.13 does not)
        return x.chunk(ranks.size, wanted)[ranks.rank].clone(memory_format=contiguous_format)
    if have == "partial":
        if wanted == "whole":
            return torch_private.all_reduced(x, ranks.group)
        assert isinstance(wanted, int)
        return torch_private.scattered(_split_in_front(x, wanted, ranks), ranks.group, ranks.size)
    if wanted == "whole":
        return _join_from_front(torch_private.gathered(x, ranks.group, ranks.size), have, ranks)
    assert isinstance(wanted, int)
    exchanged = torch_private.exchanged(_split_in_front(x, wanted, ranks), ranks.group, ranks.size)
    return _join_from_front(exchanged, have, ranks)


def _split_in_front(x: Tensor, dim: int, ranks: NamedGroup) -> Tensor:
    """Cut ``dim`` into one part for each rank, and concatenate the parts along dim 0."""
    parts: Tensor = x.unflatten(dim, (ranks.size, -1)).movedim(dim, 0)
    return parts.flatten(0, 1).contiguous()


def _join_from_front(x: Tensor, dim: int, ranks: NamedGroup) -> Tensor:
    """Cut dim 0 into one part for each rank, and concatenate the parts along ``dim``."""
    parts: Tensor = x.unflatten(0, (ranks.size, -1)).movedim(0, dim)
    return parts.flatten(dim, dim + 1)


def addend(x: Tensor, ranks: int) -> Tensor:
    """Return x / ``ranks``, so that the sum over so many ranks has x once. On each rank the
    gradient of x is the whole gradient of that sum."""
    return _Addend.apply(x, ranks)  # type: ignore[no-any-return,no-untyped-call]


class _Addend(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: int) -> Tensor:
        return x / ranks

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None
