"""Check before anything moves: plans match this rank's tensors, no memory is written twice or read
while it is written, and tied weights get one value.

In: both sides' holdings, tensors and shares. Out: nothing, or a ValueError that lists what is
wrong.
"""

from collections.abc import Mapping, Sequence
from math import prod

from torch import Tensor

from meshwise.ranks import Ranks
from meshwise.reshard import holdings, live
from meshwise.reshard.holdings import Holdings
from meshwise.reshard.overlaps import Extent, shared
from meshwise.reshard.regions import Piece
from meshwise.reshard.transfer import fits
from meshwise.reshard.transports.copies import DTYPES

SIDES = "source", "destination"
Tensors = Mapping[str, Tensor]


def check_held(
    ranks: Ranks,
    plans: Sequence[Holdings],
    models: Sequence[Tensors],
    shares: Sequence[live.Shares],
) -> None:
    """Check that the plans name existing ranks, and that this rank holds what they say. ``shares``:
    the live tensors of a side whose plan was given, [] if the plan was read off them."""
    wrong = []
    for side, plan, model, own in zip(SIDES, plans, models, _own(ranks, shares), strict=True):
        for name, held in model.items():
            if held.device != (here := ranks.device):
                told = f"is on {held.device}, this rank works on {here}; move it there"
                wrong.append(f"{side} {name}: {told}")
        for name, tensor in plan.items():
            if (most := max((p.rank for p in tensor.layout), default=0)) >= ranks.world_size:
                raise ValueError(
                    f"{side} {name} is planned on rank {most}, but {ranks.world_size} joined; "
                    "start as many ranks as the plans name"
                )
            if name in own and not _agree(ranks.rank, tensor, own[name]):
                wrong.append(
                    f"{side} {name}: is a DTensor placed by {own[name].placements}, which is not "
                    "what the plan says of this rank; give None for the plan"
                )
        for name, (shape, dtype) in holdings.buffers(plan, ranks.rank).items():
            if name not in model:
                wrong.append(f"{side} {name}: missing here, but planned; name it so")
            elif _flat(model[name].shape, shape) != _flat(shape, model[name].shape):
                wrong.append(
                    f"{side} {name}: shape {tuple(model[name].shape)}, planned {shape}; give the "
                    "plan by which it was made"
                )
            elif model[name].dtype != DTYPES[dtype]:
                wrong.append(
                    f"{side} {name}: {model[name].dtype}, planned {dtype}; plan what it is"
                )
    refuse(wrong)


def check_memory(
    ranks: Ranks, names: Sequence[str], plans: Sequence[Holdings], models: Sequence[Tensors]
) -> None:
    """Check that no tensor of ``names`` is written where another is written or read.

    Two buffers may be the same memory if they hold the same: weights that are tied, or that both
    models share.
    """
    contents = [_contents(ranks.rank, names, plan) for plan in plans]
    extents = []
    for side, (model, held) in enumerate(zip(models, contents, strict=True)):
        for name in held:
            at = model[name]
            key = side, name
            extents.append(Extent(at.data_ptr(), at.shape, at.stride(), at.itemsize, key))
    wrong = []
    for one, other in shared(extents):
        (side, name), (next_side, next_name) = one.name, other.name
        same = contents[side][name] == contents[next_side][next_name]
        if 1 in (side, next_side) and not (same and one[:4] == other[:4]):
            wrong.append(
                f"{SIDES[side]} {name}: shares memory with {SIDES[next_side]} {next_name}, which "
                "holds something else; give each its own (tied weights: tie both models)"
            )
    refuse(wrong)


def check_tied(source: Holdings, destination: live.Shares, only: Sequence[str]) -> None:
    """Check that weights tied in the destination are tied in the source, and all asked for."""
    wrong = []
    for name, first in live.tied(destination).items():
        chosen = fits(name, only), fits(first, only)
        if chosen == (True, False):
            wrong.append(
                f"destination {name}: is one tensor with {first}, which only = {list(only)} leaves "
                "out; name both"
            )
        elif all(chosen) and name in source and _places(source, name) != _places(source, first):
            wrong.append(
                f"destination {name}: is one tensor with {first}, but the source has two that may "
                f"differ; untie it, or leave {name} out of the source if they never do"
            )
    refuse(wrong)


def refuse(wrong: Sequence[str], because: str = "") -> None:
    """Raise ValueError if anything is wrong."""
    if wrong:
        more = f"; {len(wrong) - 8} more" if len(wrong) > 8 else ""
        raise ValueError(because + "; ".join(wrong[:8]) + more)


def _own(ranks: Ranks, shares: Sequence[live.Shares]) -> list[dict[str, live.LocalPart]]:
    """Return this rank's DTensors, of either side."""
    mine = (side[ranks.rank] if side else [] for side in shares)
    return [{share.name: share for share in of if share.placements} for of in mine]


def _agree(rank: int, planned: holdings.HeldTensor, share: live.LocalPart) -> bool:
    """Whether a plan puts a DTensor's elements, in a buffer of its name, where its placements put
    them. A DTensor of another shape is fused, and its placements say nothing about its contents."""
    if planned.shape != share.shape:
        return True
    live_pieces = list(live.pieces(rank, share))
    own = [p for p in planned.layout if p.rank == rank and p.buffer in ("", share.name)]
    if not own:
        return True  # in a buffer of another name
    same = sum(
        common.num_elements
        for a in own
        for b in live_pieces
        if (common := a.box.intersect(b.box)) and a.local(common) == b.local(common)
    )
    return _num_elements(own) == _num_elements(live_pieces) == same


def _num_elements(pieces: Sequence[Piece]) -> int:
    return sum(piece.box.num_elements for piece in pieces)


def _contents(rank: int, names: Sequence[str], plan: Holdings) -> dict[str, set[object]]:
    """The parts of these tensors in a rank's buffers, and where they lie."""
    found: dict[str, set[object]] = {}
    for name in names:
        for piece in plan[name].layout:
            if piece.rank == rank:
                held = name, piece.box, piece.offset
                found.setdefault(piece.buffer or name, set()).add(held)
    return found


def _places(held: Holdings, name: str) -> set[object]:
    layout = held[name].layout if name in held else ()
    return {piece._replace(buffer=piece.buffer or name) for piece in layout}


def _flat(shape: Sequence[int], other: Sequence[int]) -> tuple[int, ...]:
    """Flatten leading dims of a shape until it has no more dims than the other."""
    extra = max(0, len(shape) - len(other))
    return (prod(shape[: extra + 1]), *shape[extra + 1 :])
