"""Exchange rows for heads, and back (Ulysses): one exchange for several tensors.

Each rank of a group holds some rows of all heads, [B, L, H, D]. ``to_heads`` gives each rank all
rows of some heads, [B, h, N, D], in global order; ``to_rows`` is the reverse. A message to one rank
is [heads, B, rows, D]. If heads and rows divide evenly, a tensor is packed and unpacked in one
copy; else rank by rank. A head that several ranks had comes back as the sum.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from meshwise.attention.merge import wide
from meshwise.attention.shards import Shards
from meshwise.attention.volume import grouped
from meshwise.attention.wire import Wire

Ranges = Sequence[tuple[int, int]]  # [first, last) heads of each member


class Members(NamedTuple):
    """A group of consecutive ranks from ``first`` on. ``places[member]``: (row in the member's
    shard, row in the group's global order, count) of each run of its rows."""

    wire: Wire
    first: int
    lengths: tuple[int, ...]
    places: tuple[tuple[tuple[int, int, int], ...], ...]

    @property
    def me(self) -> int:
        return self.wire.rank - self.first

    @property
    def even(self) -> bool:
        """Whether members have equally many rows that follow one another in global order."""
        each = self.lengths[0]
        return all(p == ((0, i * each, each),) for i, p in enumerate(self.places))

    def exchange(
        self, x: Tensor, send: Sequence[int], receive: Sequence[int]
    ) -> Callable[[], Tensor]:
        """Exchange x as rows of its last dim; ``send``, ``receive``: rows by member."""
        before, after = self.first, self.wire.size - self.first - len(self.lengths)
        splits = ([0] * before + list(each) + [0] * after for each in (send, receive))
        return self.wire.exchange(x.view(-1, x.shape[-1]), *splits)


def members(wire: Wire, shards: Shards, size: int) -> Members:
    first = wire.rank // size * size
    held = shards.intervals[first : first + size]
    (order,) = grouped(Shards(held), size).intervals if size > 1 else held
    places = []
    for intervals in held:
        there, runs = 0, []
        for a, b in intervals:
            if a < b:
                runs.append((there, _row(order, a), b - a))
            there += b - a
        places.append(tuple(runs))
    return Members(wire, first, Shards(held).lengths, tuple(places))


def to_heads(
    group: Members, tensors: Sequence[Tensor], ranges: Sequence[Ranges]
) -> Callable[[], list[Tensor]]:
    """Send ``tensors`` [B, L, H_t, D]; each member gets the heads ``ranges[t]`` of tensor t. Call
    the result for this rank's [B, h_t, N, D]."""
    batch, length, _, width = tensors[0].shape
    counts = _counts(ranges)
    buffer = tensors[0].new_empty(sum(counts), batch, length, width)
    for block, heads in _parts(buffer, tensors, ranges):
        block.copy_(heads)
    mine, unit = counts[group.me], batch * length
    arrived = group.exchange(
        buffer, [n * unit for n in counts], [mine * batch * n for n in group.lengths]
    )

    def unpack() -> list[Tensor]:
        every = in_order(group, arrived(), mine, batch)
        cuts = [r[group.me][1] - r[group.me][0] for r in ranges]
        return [heads_first(x) for x in every.split(cuts)]

    return unpack


def to_rows(
    group: Members, tensors: Sequence[Tensor], ranges: Sequence[Ranges]
) -> Callable[[Sequence[Tensor]], None]:
    """Send back ``tensors`` [B, h_t, N, D] of this rank's heads. Call the result with tensors from
    ``like_rows`` [B, L, H_t, D]; it writes into them."""
    batch, width = tensors[0].shape[0], tensors[0].shape[3]
    counts, length = _counts(ranges), group.lengths[group.me]
    arrived = group.exchange(
        by_rows(group, tensors),
        [counts[group.me] * batch * n for n in group.lengths],
        [n * batch * length for n in counts],
    )

    def unpack(into: Sequence[Tensor]) -> None:
        blocks = arrived().view(sum(counts), batch, length, width)
        adds = not _divides(into, ranges)
        for block, heads in _parts(blocks, into, ranges):
            heads.add_(block) if adds else heads.copy_(block)

    return unpack


def like_rows(
    group: Members, tensors: Sequence[Tensor], ranges: Sequence[Ranges], heads: Sequence[int]
) -> list[Tensor]:
    """Make tensors [B, L, heads, D] for ``to_rows`` to write into; wide zeros if it adds."""
    every = all(_even(r, n) for r, n in zip(ranges, heads, strict=True))
    found = []
    for x, n in zip(tensors, heads, strict=True):
        shape = (x.shape[0], group.lengths[group.me], n, x.shape[3])
        found.append(
            x.new_empty(shape) if every
            else torch.zeros(shape, dtype=wide(x.dtype), device=x.device)
        )  # fmt: skip
    return found


def in_order(group: Members, flat: Tensor, count: int, batch: int) -> Tensor:
    """Put the members' blocks [count, B, rows, D] into global order, [count, B, N, D]."""
    width, total = flat.shape[-1], sum(group.lengths)
    if group.even:
        blocks = flat.view(len(group.lengths), count, batch, group.lengths[0], width)
        return blocks.permute(1, 2, 0, 3, 4).reshape(count, batch, total, width)
    found = flat.new_empty(count, batch, total, width)
    blocks = flat.split([count * batch * n for n in group.lengths])
    for block, length, runs in zip(blocks, group.lengths, group.places, strict=True):
        rows = block.view(count, batch, length, width)
        for there, here, n in runs:
            found[:, :, here : here + n] = rows[:, :, there : there + n]
    return found


def by_rows(group: Members, tensors: Sequence[Tensor]) -> Tensor:
    """Cut tensors [B, h_t, N, D] into a block [sum of h_t, B, rows, D] for each member."""
    batch, width = tensors[0].shape[0], tensors[0].shape[3]
    count, size = sum(x.shape[1] for x in tensors), len(group.lengths)
    flat = tensors[0].new_empty(count * batch * sum(group.lengths), width)
    if group.even:
        blocks, at = flat.view(size, count, batch, group.lengths[0], width), 0
        for x in tensors:
            part = x.unflatten(2, (size, group.lengths[0])).permute(2, 1, 0, 3, 4)
            blocks[:, at : at + x.shape[1]].copy_(part)
            at += x.shape[1]
        return flat
    split = flat.split([count * batch * n for n in group.lengths])
    for block, length, runs in zip(split, group.lengths, group.places, strict=True):
        rows, at = block.view(count, batch, length, width), 0
        for x in tensors:
            for there, here, n in runs:
                part = x[:, :, here : here + n].transpose(0, 1)
                rows[at : at + x.shape[1], :, there : there + n] = part
            at += x.shape[1]
    return flat


def heads_first(x: Tensor) -> Tensor:
    """View [heads, B, N, D] as [B, heads, N, D]. For one sequence it has the strides of a
    contiguous tensor, because a kernel copies a tensor with other strides."""
    return x.squeeze(1).unsqueeze(0) if x.shape[1] == 1 else x.transpose(0, 1)


def _row(order: Sequence[tuple[int, int]], position: int) -> int:
    row = 0
    for a, b in order:
        if a <= position < b:
            return row + position - a
        row += b - a
    raise AssertionError((order, position))


def _counts(ranges: Sequence[Ranges]) -> list[int]:
    """Heads of each member, over all tensors."""
    return [sum(last - first for first, last in each) for each in zip(*ranges, strict=True)]


def _parts(
    blocks: Tensor, tensors: Sequence[Tensor], ranges: Sequence[Ranges]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Pair parts of the members' blocks [heads, B, L, D] with the heads of a tensor [B, L, H_t, D]
    that go there: one pair per tensor if heads divide, else one per tensor and member."""
    size, at = len(ranges[0]), 0
    if _divides(tensors, ranges):
        by_member = blocks.unflatten(0, (size, len(blocks) // size))
        for x, r in zip(tensors, ranges, strict=True):
            (first, last), parts = r[0], x.unflatten(2, (size, -1)).permute(2, 3, 0, 1, 4)
            yield by_member[:, at : at + last - first], parts[:, first:last]
            at += last - first
        return
    for member in range(size):
        for x, r in zip(tensors, ranges, strict=True):
            first, last = r[member]
            yield blocks[at : at + last - first], x[:, :, first:last].permute(2, 0, 1, 3)
            at += last - first


def _divides(tensors: Sequence[Tensor], ranges: Sequence[Ranges]) -> bool:
    return all(_even(r, x.shape[2]) for x, r in zip(tensors, ranges, strict=True))


def _even(ranges: Ranges, heads: int) -> bool:
    """Whether all members have equally many heads, at the same place in their equal shares."""
    step, rest = divmod(heads, len(ranges))
    first, last = ranges[0]
    moved = [(first + i * step, last + i * step) for i in range(len(ranges))]
    return not rest and last <= step and list(ranges) == moved
