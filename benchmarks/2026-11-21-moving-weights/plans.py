"""Which words of a Llama model go from which rank to which, between two layouts on four ranks.

Pure: a pattern is two layouts of one model, a job is what ``meshwise.reshard`` makes of it, a
table lists slices by (sender, receiver). Weights are bf16, held and counted as 8-byte words: a
free view, and torch's kernels for strided copies move one element a thread.
"""

from collections.abc import Iterator
from itertools import permutations
from math import prod
from typing import NamedTuple

from meshwise.reshard import bounds, regions
from meshwise.reshard.holdings import HeldTensor
from meshwise.reshard.regions import Box, Layout
from meshwise.reshard.transfer import transfer_list

LINK = 373e9  # bytes a second into one GPU: the most that was measured with all four pulling
WORLD, WORD, MiB = 4, 8, 2**20


class Weight(NamedTuple):
    shape: tuple[int, ...]  # in words
    dim: int | None  # which tensor parallelism cuts; None: every rank holds all of it
    blocks: tuple[int, ...] | None  # parts of ``dim`` that are cut each by itself
    depth: float  # where in the pipeline, 0 to 1


class Pattern(NamedTuple):
    source: tuple[int, int, int]  # tp, pp, dp; tp innermost
    destination: tuple[int, int, int]
    weights: list[Weight]
    buckets: list[int]  # bytes of a slot


def llama(layers: int, hidden: int, ffn: int, kv: int, vocab: int) -> list[Weight]:
    width = hidden * 2 // WORD
    weights = [Weight((vocab, width), 0, None, 0.0)]
    for depth in (i / layers for i in range(layers)):
        weights += [
            Weight((width,), None, None, depth),
            Weight((hidden + 2 * kv, width), 0, (hidden, kv, kv), depth),
            Weight((hidden, width), 1, None, depth),
            Weight((width,), None, None, depth),
            Weight((2 * ffn, width), 0, (ffn, ffn), depth),
            Weight((hidden, ffn * 2 // WORD), 1, None, depth),
        ]
    return [*weights, Weight((width,), None, None, 1.0), Weight((vocab, width), 0, None, 1.0)]


def patterns(tiny: bool) -> dict[str, Pattern]:
    whole, part = (llama(layers, 4096, 14336, 1024, 128256) for layers in (32, 8))
    small, few = llama(4, 1024, 2816, 256, 1024), [n * MiB for n in (1, 4, 16, 64)]
    sizes = [n * MiB for n in (64, 128, 256, 512)]
    if tiny:
        whole = part = small = llama(4, 64, 128, 32, 256)
        sizes = few = [4096, 16384]
    return {
        "tp2pp2-tp4": Pattern((2, 2, 1), (4, 1, 1), whole, sizes),
        "pp4-tp4": Pattern((1, 4, 1), (4, 1, 1), whole, sizes),
        "tp4-one": Pattern((4, 1, 1), (1, 1, 1), part, sizes),
        "tp2-tp1": Pattern((2, 1, 2), (1, 1, 4), part, sizes),
        "small": Pattern((2, 2, 1), (4, 1, 1), small, few),
    }


def layout(weight: Weight, tp: int, pp: int, dp: int) -> Layout:
    stage = min(int(weight.depth * pp), pp - 1)
    pieces: Layout = ()
    for replica in range(dp):
        first = (replica * pp + stage) * tp
        group = range(first, first + tp)
        if weight.dim is None:
            pieces += regions.replicated(weight.shape, group)
        else:
            pieces += regions.sharded(weight.shape, weight.dim, group, blocks=weight.blocks)
    return pieces


class Slice(NamedTuple):
    """``read`` of the sender's buffer of a weight becomes ``write`` of the receiver's."""

    weight: int
    read: Box
    write: Box


Table = dict[tuple[int, int], list[Slice]]  # (sender, receiver)


class Job(NamedTuple):
    """A pattern, planned; every rank plans the same."""

    pattern: Pattern
    source: list[Layout]
    destination: list[Layout]
    table: Table  # between different ranks
    local: list[list[Slice]]  # within each rank
    floor_s: float
    received_bytes: int  # by the busiest receiver


def plan(pattern: Pattern) -> Job:
    source = [layout(weight, *pattern.source) for weight in pattern.weights]
    destination = [layout(weight, *pattern.destination) for weight in pattern.weights]
    table: Table = {}
    for number, both in enumerate(zip(source, destination, strict=True)):
        for move in transfer_list(*both):
            slices = table.setdefault((move.source, move.destination), [])
            slices.append(Slice(number, move.read, move.write))
    local = [table.pop((rank, rank), []) for rank in range(WORLD)]
    held = [
        {str(i): HeldTensor(w.shape, "int64", layout) for i, (w, layout) in enumerate(both)}
        for both in (zip(pattern.weights, side, strict=True) for side in (source, destination))
    ]
    floor = bounds.limits(*held, bounds.Rates("pulls", LINK))
    floor_s = max(floor.ingress_s, floor.egress_s)
    into = [sum(words(s) for (_, to), s in table.items() if to == rank) for rank in range(WORLD)]
    return Job(pattern, source, destination, table, local, floor_s, max(into) * WORD)


def senders(table: Table, rank: int, in_turns: bool) -> list[int]:
    """Whom a receiver pulls from, in order: in turns, or from the next rank on."""
    if in_turns:
        return turns(table)[rank]
    return sorted((s for s, r in table if r == rank), key=lambda s: (s - rank) % WORLD)


def turns(table: Table) -> dict[int, list[int]]:
    """Every receiver's senders, in an order in which no sender serves two at once: matchings of
    receivers and senders, the heaviest first."""
    left = {pair: words(slices) for pair, slices in table.items()}
    order: dict[int, list[int]] = {rank: [] for rank in range(WORLD)}
    while left:
        best = max(
            permutations(range(WORLD)),
            key=lambda senders: sum(left.get((s, r), 0) for r, s in enumerate(senders)),
        )
        for receiver, sender in enumerate(best):
            if left.pop((sender, receiver), 0):
                order[receiver].append(sender)
    return order


def words(slices: list[Slice]) -> int:
    return sum(s.read.num_elements for s in slices)


def cut(slices: list[Slice], share: int) -> Iterator[list[Slice]]:
    """Buckets of ``share`` words and up to a row more, in order; slices are cut between rows."""
    bucket: list[Slice] = []
    left = share
    for s in slices:
        rows = s.read.shape[0] if len(s.read.shape) > 1 else 1
        row, start = s.read.num_elements // rows, 0
        while start < rows:
            stop = min(rows, start + -(-left // row))
            boxes = (box if stop - start == rows else part(box, start, stop) for box in s[1:])
            bucket.append(Slice(s.weight, *boxes))
            left -= (stop - start) * row
            start = stop
            if left <= 0:
                yield bucket
                bucket, left = [], share
    if bucket:
        yield bucket


def part(box: Box, start: int, stop: int) -> Box:
    low = box.low[0]
    return Box((low + start, *box.low[1:]), (low + stop, *box.high[1:]))


def steps_of(table: Table, bucket_bytes: int | None) -> list[Table]:
    """What every pair moves in each step: an equal part of what it moves in all.

    There are as many steps as buckets of the busiest rank; its bucket holds ``bucket_bytes`` and
    up to one row for each peer.
    """
    totals = [sum(words(s) for pair, s in table.items() if pair[end] == rank)
              for end in (0, 1) for rank in range(WORLD)]  # fmt: skip
    count = 1 if bucket_bytes is None else -(-max(totals) * WORD // bucket_bytes)
    buckets = {
        pair: list(cut(slices, -(-words(slices) // count))) for pair, slices in table.items()
    }
    assert all(len(found) <= count for found in buckets.values())
    return [{p: b[i] for p, b in buckets.items() if i < len(b)} for i in range(count)]


def spans(table: Table, rank: int, end: int) -> dict[int, tuple[int, int]]:
    """Where in ``rank``'s slot each peer's words lie, (start, stop); ``end`` 0: it sends."""
    found, at = {}, 0
    for pair in sorted(pair for pair in table if pair[end] == rank):
        found[pair[1 - end]] = at, at + words(table[pair])
        at += words(table[pair])
    return found


def held(layouts: list[Layout], rank: int) -> dict[int, tuple[int, ...]]:
    """The shapes of a rank's buffers, by number of the weight."""
    found: dict[int, tuple[int, ...]] = {}
    for number, pieces in enumerate(layouts):
        ends = [piece.local(piece.box).high for piece in pieces if piece.rank == rank]
        if ends:
            found[number] = tuple(map(max, zip(*ends, strict=True)))
    return found


def held_words(layouts: list[Layout], rank: int) -> int:
    return sum(map(prod, held(layouts, rank).values()))


def window(box: Box) -> tuple[slice, ...]:
    return tuple(slice(low, high) for low, high in zip(box.low, box.high, strict=True))
