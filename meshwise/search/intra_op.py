"""Place every operation of a stage on its mesh: the intra-operator search.

A stage is a chain of pieces. A piece is a graph of nodes, each in one of a few placements. Its last
node is the first of the next piece: at this boundary the residual stream lies in some placement.
Nodes i have costs c_i(x_i) in their placements x_i: computation, and collectives inside. Edges (i,
j) have costs c_ij(x_i, x_j): resharding. A cost is five numbers: seconds of each microbatch and
seconds once a step; bytes resident through the step, held by each microbatch in flight, and
transient, while this node or edge runs. With n microbatches, k of them in flight, the search finds

    min over x   sum of (n pace + once)
    where        sum of (resident + k held) + max of transient <= limit

- Elimination (``boundary``). A layer's graph is narrow. Its inner nodes are eliminated one by one:
  the sum of a node's costs and of its edges', over its placements, becomes one table of the
  neighbours. What is left is a matrix of all pairs of boundary placements. Its entries are labels
  (n pace + once, resident + k held, choices), those that no other beats in both: memory is exact.
- Powers (``_power``). Equal layers in a row are a min-plus power of their matrix.
- Transient bytes (``solve``). The largest is guessed, as Alpa guesses the slowest stage: under each
  threshold, larger placements are left out, and the others have the rest of the limit.
- Multipliers (``_between``). min of seconds + m bytes, less m limit, bounds the answer from below
  for every m >= 0; a solution of it that fits bounds it from above. Multipliers reach the convex
  hull alone, so they only bound.
- The chain (``_walk``). Labels go from piece to piece. One is dropped if others beat it, or if it
  can lead to nothing that fits or is as fast as the upper bound: by multiplier, and by bytes.

The answer is exact for this objective. Of placements that cost the same, those listed first are
taken. Where all layers share one placement, as in a stage with one ``Cuts``, the table says so: a
node stands for this part of all layers, and its boundary matrix is diagonal in the stream's
placement (``intra_op_parts``).
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from operator import itemgetter
from typing import NamedTuple, TypeVar

import numpy as np

Array = np.ndarray
Choice = tuple[tuple[int, int], ...]  # nodes and their placements
Label = tuple[float, float, Choice]  # seconds, bytes
Front = list[Label]  # faster and larger ones first
Matrix = list[list[Front]]  # [placement of the first node, of the last]
_Link = tuple["_Link | None", Choice]  # the choices of the pieces before, and of one
_Step = tuple[float, float, "_Link | None"]  # seconds, bytes
_Any = TypeVar("_Any", Label, _Step)
_Table = tuple[tuple[int, ...], dict[tuple[int, ...], Front]]  # of some nodes, by their placements
_ROUNDING = 1e-12
# Shares of the gap between both bounds: the chain is walked up to each until it has an answer.
_SHARES = (0.01, 0.03, 0.1, 0.3, 1.0)


class Cost(NamedTuple):
    """The last axis of a piece's arrays. An infinite ``pace_s`` forbids a placement."""

    pace_s: float = 0.0
    once_s: float = 0.0
    resident: float = 0.0
    held: float = 0.0
    transient: float = 0.0


class GraphPiece(NamedTuple):
    """``nodes``: two or more [placement, cost]; the first is the last of the piece before, and its
    costs count there. ``edges`` [placement of i, of j, cost], by (i, j). ``times``: pieces like
    this in a row, each with placements of its own."""

    nodes: Sequence[Array]
    edges: Mapping[tuple[int, int], Array]
    times: int = 1


class Question(NamedTuple):
    """The question put to a chain: microbatches, how many are in flight, and bytes."""

    num_microbatches: int
    in_flight: float
    limit_bytes: float


class Placements(NamedTuple):
    """The best placements: of each piece, repeated ones one by one, by node."""

    time_s: float
    num_bytes: float
    placements: tuple[dict[int, int], ...]


class _Bounds(NamedTuple):
    """Seconds that the answer has at least and at most, and the multiplier that says so."""

    least_s: float
    most_s: float
    multiplier: float


def solve(
    pieces: Sequence[GraphPiece], question: Question, cutoff_s: float = math.inf
) -> Placements | None:
    """Return the best placements below ``cutoff_s``, or None."""
    waiting = list[tuple[_Bounds, float, list[Matrix]]]()
    for most in _thresholds(pieces):
        matrices = [boundary(piece, question, most) for piece in pieces]
        limit = question.limit_bytes - most
        if (bounds := _between(pieces, matrices, limit)) is not None:
            waiting.append((bounds, most, matrices))
    best: Placements | None = None
    for bounds, most, matrices in sorted(waiting, key=lambda each: each[0].least_s):
        if bounds.least_s >= cutoff_s:
            break
        every = [of for piece, of in zip(pieces, matrices, strict=True) for _ in range(piece.times)]
        for share in _SHARES:
            gap_s = min(bounds.most_s, cutoff_s) - bounds.least_s
            within = bounds._replace(most_s=bounds.least_s + share * gap_s)
            if found := _walk(every, question.limit_bytes - most, within):
                break
        if found is not None and found.time_s < cutoff_s:
            best, cutoff_s = found._replace(num_bytes=found.num_bytes + most), found.time_s
    return best


def boundary(piece: GraphPiece, question: Question, most: float = math.inf) -> Matrix:
    """Eliminate the inner nodes of a piece. Placements with more than ``most`` transient bytes are
    left out."""
    sizes, tables = [len(node) for node in piece.nodes], list[_Table]()
    for node, costs in enumerate(piece.nodes):
        if node:
            tables.append(((node,), _labels(costs, question, most, node)))
    tables += [(nodes, _labels(of, question, most)) for nodes, of in piece.edges.items()]
    inner = set(range(1, len(sizes) - 1))

    def neighbours(node: int) -> tuple[int, ...]:
        return tuple(sorted({n for nodes, _ in tables if node in nodes for n in nodes} - {node}))

    while inner:
        node = min(inner, key=lambda node: len(neighbours(node)))
        inner.remove(node)
        joined = [table for table in tables if node in table[0]]
        made = neighbours(node), _joined(joined, neighbours(node), (node,), sizes)
        tables = [table for table in tables if node not in table[0]] + [made]
    ends = 0, len(sizes) - 1
    of = _joined(tables, ends, (), sizes)
    return [[of[first, last] for last in range(sizes[-1])] for first in range(sizes[0])]


def _labels(
    costs: Array, question: Question, most: float, node: int | None = None
) -> dict[tuple[int, ...], Front]:
    """Return c_i as a label of each placement that may be taken, or c_ij as one of each pair:
    n pace + once, and resident + k held."""
    pace_s, once_s, resident, held, transient = np.moveaxis(costs, -1, 0)
    seconds = question.num_microbatches * pace_s + once_s
    size = resident + question.in_flight * held
    found = dict[tuple[int, ...], Front]()
    for at in np.ndindex(seconds.shape):
        choice = () if node is None else ((node, *at),)
        may = math.isfinite(seconds[at]) and transient[at] <= most
        found[at] = [(float(seconds[at]), float(size[at]), choice)] if may else []
    return found


def _joined(
    tables: Sequence[_Table], nodes: tuple[int, ...], gone: tuple[int, ...], sizes: Sequence[int]
) -> dict[tuple[int, ...], Front]:
    """Return the sum of tables as one of ``nodes``: of the placements of those that are ``gone``,
    those that no other beats."""
    found = dict[tuple[int, ...], Front]()
    for at in product(*[range(sizes[node]) for node in nodes]):
        labels = list[Label]()
        for inside in product(*[range(sizes[node]) for node in gone]):
            lies = dict(zip((*nodes, *gone), (*at, *inside), strict=True))
            total: Front = [(0.0, 0.0, ())]
            for of, table in tables:
                more = table[tuple([lies[node] for node in of])]
                total = _front([_sum(a, b) for a in total for b in more])
            labels += total
        found[at] = _front(labels)
    return found


def _sum(one: Label, two: Label) -> Label:
    return one[0] + two[0], one[1] + two[1], one[2] + two[2]


def _front(labels: Iterable[_Any]) -> list[_Any]:
    """Return the labels that no other beats in seconds and bytes."""
    found, least = list[_Any](), math.inf
    for label in sorted(labels, key=itemgetter(0, 1)):
        if label[1] < least:
            least = label[1]
            found.append(label)
    return found


def _thresholds(pieces: Sequence[GraphPiece]) -> list[float]:
    """Return the values that max of transient can have."""
    each = [node[:, -1] for piece in pieces for node in piece.nodes[1:]]
    each += [edge[..., -1] for piece in pieces for edge in piece.edges.values()]
    needed = max(of.min() for of in each)
    return sorted({most for of in each for most in of[of >= needed].tolist()})


def _between(
    pieces: Sequence[GraphPiece], matrices: Sequence[Matrix], limit: float
) -> _Bounds | None:
    """Return bounds of the least seconds of a chain that needs up to ``limit`` bytes, or None if it
    cannot: the multiplier rises and falls until the solutions on both sides of the limit are
    neighbours on the convex hull."""

    def best(weights: tuple[float, float]) -> tuple[float, float]:
        through: Array | None = None
        for piece, matrix in zip(pieces, matrices, strict=True):
            of = _power(_chosen(matrix, weights), piece.times, weights)
            through = of if through is None else _times(through, of, weights)
        assert through is not None
        seconds, size = min(through.reshape(-1, 2).tolist(), key=lambda of: _value(of, weights))
        return seconds, size

    fast, lean = best((1.0, 0.0)), best((0.0, 1.0))
    if lean[1] > limit:
        return None
    if fast[1] <= limit:
        return _Bounds(fast[0], fast[0], 0.0)
    while True:
        multiplier = (lean[0] - fast[0]) / (fast[1] - lean[1])
        weights = 1.0, multiplier
        middle, edge_s = best(weights), _value(fast, weights)
        if _value(middle, weights) >= edge_s * (1 - _ROUNDING) or middle in (fast, lean):
            return _Bounds(edge_s - multiplier * limit, lean[0], multiplier)
        fast, lean = (fast, middle) if middle[1] <= limit else (middle, lean)


def _value(of: Sequence[float], weights: tuple[float, float]) -> float:
    return math.inf if math.isinf(of[0]) else weights[0] * of[0] + weights[1] * of[1]


def _values(both: Array, weights: tuple[float, float]) -> Array:
    with np.errstate(invalid="ignore"):  # 0 times infinity
        return np.where(np.isinf(both[..., 0]), np.inf, both @ np.asarray(weights))


def _chosen(matrix: Matrix, weights: tuple[float, float]) -> Array:
    """Return the seconds and bytes [first, last, 2] of the label of least weighted sum."""
    none = (math.inf, math.inf)
    return np.asarray([
        [min(front, key=lambda of: _value(of[:2], weights), default=none)[:2] for front in row]
        for row in matrix
    ])  # fmt: skip


def _times(one: Array, two: Array, weights: tuple[float, float]) -> Array:
    """Return the min-plus product of two matrices, which takes the least weighted sum."""
    both = one[:, :, None] + two[None]
    at = _values(both, weights).argmin(axis=1)
    return np.take_along_axis(both, at[:, None, :, None], axis=1)[:, 0]


def _power(matrix: Array, times: int, weights: tuple[float, float]) -> Array:
    """Return the min-plus power of a matrix, by squaring."""
    found, square = matrix if times % 2 else None, matrix
    while times := times // 2:
        square = _times(square, square, weights)
        if times % 2:
            found = square if found is None else _times(found, square, weights)
    assert found is not None
    return found


def _walk(matrices: Sequence[Matrix], limit: float, bounds: _Bounds) -> Placements | None:
    """Take labels along the chain; return the fastest that fits, up to the upper bound."""
    weights, last = (1.0, bounds.multiplier), len(matrices[-1][0])
    rests, leans = [np.zeros(last)], [np.zeros(last)]
    for matrix in reversed(matrices):
        for least, of in ((rests, weights), (leans, (0.0, 1.0))):
            least.insert(0, (_values(_chosen(matrix, of), of) + least[0]).min(axis=1))
    most = (bounds.most_s + bounds.multiplier * limit) * (1 + _ROUNDING)
    fronts: list[list[_Step]] = [[(0.0, 0.0, None)] for _ in matrices[0]]
    for matrix, rest, lean in zip(matrices, rests[1:], leans[1:], strict=True):
        rest_of, lean_of = rest.tolist(), lean.tolist()
        valued = [
            sorted([(_value(step[:2], weights), *step) for step in front], key=itemgetter(0))
            for front in fronts
        ]
        fronts = []
        for end in range(len(matrix[0])):
            within, room = most - rest_of[end], limit - lean_of[end]
            steps = list[_Step]()
            for before, row in zip(valued, matrix, strict=True):
                for seconds, size, choice in row[end]:
                    up_to = within - _value((seconds, size), weights)
                    for value, before_s, held, link in before:
                        if value > up_to:
                            break
                        if held + size <= room:
                            steps.append((before_s + seconds, held + size, (link, choice)))
            fronts.append(_front(steps))
    until_s = bounds.most_s * (1 + _ROUNDING)
    ends = [step for front in fronts for step in front if step[0] <= until_s]
    if not ends:
        return None
    seconds, size, link = min(ends, key=itemgetter(0, 1))
    placements = list[dict[int, int]]()
    while link is not None:
        link, choice = link
        placements.insert(0, dict(choice))
    return Placements(seconds, size, tuple(placements))
