"""Holdings of some tensors, told in the names of others that hold the same elements.

``Same`` says that a box of one tensor is a box of another: expert 3's gate is rows of a stacked
weight. A checkpoint's names, a module's and Meshwise's own are tied together by lists of these.
"""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from meshwise.bridges.strides import Region, flattened
from meshwise.reshard.holdings import HeldTensor, Holdings, Padded, buffers
from meshwise.reshard.regions import Box, Piece


class Same(NamedTuple):
    """``part`` of tensor ``name`` is ``of_part`` of tensor ``of``."""

    name: str
    part: Region
    of: str
    of_part: Region


Shapes = Mapping[str, tuple[int, ...]]


def renamed(held: Holdings, shapes: Shapes, same: Iterable[Same]) -> Holdings:
    """Return holdings of tensors of these shapes by what is held of others.

    ValueError if a tensor is another one transposed.
    """
    layouts: dict[str, list[Piece]] = {}
    padded: dict[str, dict[Padded, None]] = {}
    dtypes = dict[str, str]()
    locals_of: dict[int, dict[str, tuple[tuple[int, ...], str]]] = {}
    for each in same:
        if each.of not in held:
            continue
        tensor = held[each.of]
        if [*each.part.dims] != sorted(each.part.dims) or [*each.of_part.dims] != sorted(
            each.of_part.dims
        ):
            raise ValueError(f"{each.name} is {each.of} transposed; give the transposed view")
        dtypes[each.name] = tensor.dtype
        layouts.setdefault(each.name, [])
        ends = (end._replace(buffer=end.buffer or each.of) for end in tensor.padded)
        padded.setdefault(each.name, {}).update(dict.fromkeys(ends))
        for piece in tensor.layout:
            box = _box(each.of_part)
            if common := piece.box.intersect(box):
                if piece.rank not in locals_of:
                    locals_of[piece.rank] = buffers(held, piece.rank)
                shape, _ = locals_of[piece.rank][piece.buffer or each.of]
                layouts[each.name].append(_moved(each, piece, common, shape))
    return {
        name: HeldTensor(shapes[name], dtypes[name], tuple(layouts[name]), tuple(padded[name]))
        for name in layouts
    }


def _box(part: Region) -> Box:
    return Box(part.low, tuple(a + b for a, b in zip(part.low, part.sizes, strict=True)))


def _moved(same: Same, piece: Piece, common: Box, shape: tuple[int, ...]) -> Piece:
    """Return the common elements as a piece of ``same.name``. ``shape``: of the rank's buffer."""
    low, high = [*same.part.low], [*map(sum, zip(same.part.low, same.part.sizes, strict=True))]
    for dim, of in zip(same.part.dims, same.of_part.dims, strict=True):
        by = same.part.low[dim] - same.of_part.low[of]
        low[dim], high[dim] = common.low[of] + by, common.high[of] + by
    offset = piece.local(common).low
    extra = len(offset) - len(low)
    if extra > 0:  # leading dims of the buffer count as one
        offset = flattened(offset, shape, extra)
    return Piece(piece.rank, Box(tuple(low), tuple(high)), offset, piece.buffer or same.of)
