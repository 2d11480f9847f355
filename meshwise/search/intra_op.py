"""Place every operation of a stage on its mesh: the intra-operator search.

A stage is a graph. Each node is in one of a few placements. Node i costs c_i(x_i) in its placement
x_i: computation, and collectives inside. Edge (i, j) costs c_ij(x_i, x_j): resharding. Costs are of
a step. They are seconds of the compute stream; bytes, held through the step or by the microbatches
in flight; bytes that are transient, while this node or edge runs; and for each window w the excess,
messages less computation. A window is a time in which computation hides messages that the next one
waits for: with FSDP2, a unit's computation hides the gather of the next unit. The search finds

    min over x   sum over windows of max(work, messages) + what no window hides
               = sum of seconds + sum over w of max(0, sum of excess_w)
    where        sum of bytes + max of transient <= limit

since max(work, messages) = work + max(0, messages - work). It finds x for every limit at once.

- Labels (``_labels``). A label is what some nodes and edges cost in placements chosen for them:
  seconds, bytes, the most transient bytes, and of each window the excess so far. That is the state:
  what the nodes that are still to be placed can hide, or have to.
- Elimination (``_eliminated``). Nodes are placed one by one, the one with the fewest neighbours
  first. The costs of a node and of its edges become one table of the neighbours, which holds labels
  by their placements. A chain of layers is so walked from its first to its last.
- The end of a window (``_closed``). Where no other cost touches a window, max(0, excess) of it
  becomes seconds.
- Dominance (``_front``). What is still to come adds the same to labels of the same placements. It
  adds e to an excess of D, which makes max(0, D + e) at the end. max(0, D + e) - max(0, D' + e) is
  at most max(0, D - D'), so a label beats another one if

    seconds + sum over w of max(0, D_w - D'_w) <= seconds'
    bytes <= bytes'   and   bytes + transient <= bytes' + transient'

  and what is dropped could not have won: time and memory are exact. Of equal labels, that of the
  placements listed first is kept.
"""

from collections.abc import Mapping, Sequence
from itertools import product
from typing import NamedTuple

import numpy as np

Array = np.ndarray
_Table = tuple[tuple[int, ...], dict[tuple[int, ...], Array]]  # of some nodes, by their placements
SECONDS, BYTES, TRANSIENT, WINDOWS = range(
    4
)  # columns of costs; from the fourth on, of each window


class CostGraph(NamedTuple):
    """``nodes``: [placement, cost] each. ``edges``: [placement of i, of j, cost], by (i, j).
    Infinite seconds forbid a placement, or a pair."""

    nodes: Sequence[Array]
    edges: Mapping[tuple[int, int], Array]


class Placements(NamedTuple):
    """A placement of each node, and what all take together."""

    time_s: float
    num_bytes: float
    placements: tuple[int, ...]


def solve(graph: CostGraph) -> list[Placements]:
    """Return the fastest placements for every limit of bytes: those that no others beat in both,
    the fastest first."""
    sizes, tables = [len(node) for node in graph.nodes], list[_Table]()
    for node, costs in enumerate(graph.nodes):
        tables.append(((node,), _labels(costs, len(sizes), node)))
    tables += [(nodes, _labels(costs, len(sizes))) for nodes, costs in graph.edges.items()]
    left = [*range(len(sizes))]
    while left:
        node = min(left, key=lambda node: len(_neighbours(tables, node)))
        left.remove(node)
        tables = _eliminated(tables, node, sizes)
    whole = _joined([table[()] for _, table in tables], len(sizes))
    whole = _closed(whole, _touched([((), {(): whole})], len(sizes)))
    whole[:, BYTES] += whole[:, TRANSIENT]
    whole[:, TRANSIENT] = 0.0
    found = _front(whole, len(sizes)).tolist()
    return [Placements(of[0], of[1], tuple(map(int, of[-len(sizes) :]))) for of in found]


def _labels(costs: Array, count: int, node: int | None = None) -> dict[tuple[int, ...], Array]:
    """Return c_i as a label of each placement that may be taken, or c_ij as one of each pair. The
    last ``count`` columns are the placements of all nodes, 0 until they are chosen."""
    found = dict[tuple[int, ...], Array]()
    for at in np.ndindex(costs.shape[:-1]):
        label = np.append(costs[at], np.zeros(count))
        if node is not None:
            label[node - count] = at[0]
        found[at] = label[None][: int(np.isfinite(label[SECONDS]))]
    return found


def _neighbours(tables: Sequence[_Table], node: int) -> set[int]:
    return {other for nodes, _ in tables if node in nodes for other in nodes} - {node}


def _eliminated(tables: Sequence[_Table], node: int, sizes: Sequence[int]) -> list[_Table]:
    """Return the tables with those that a node is in replaced by one of its neighbours."""
    mine, rest = [of for of in tables if node in of[0]], [of for of in tables if node not in of[0]]
    closes = _touched(mine, len(sizes)) & ~_touched(rest, len(sizes))
    nodes, made = tuple(sorted(_neighbours(mine, node))), dict[tuple[int, ...], Array]()
    for at in product(*[range(sizes[other]) for other in nodes]):
        labels = list[Array]()
        for own in range(sizes[node]):
            lies = dict(zip((*nodes, node), (*at, own), strict=True))
            each = [table[tuple([lies[of] for of in where])] for where, table in mine]
            labels.append(_closed(_joined(each, len(sizes)), closes))
        made[at] = _front(np.concatenate(labels), len(sizes))
    return [*rest, (nodes, made)]


def _touched(tables: Sequence[_Table], count: int) -> Array:
    """Return which windows have an excess in labels of these tables."""
    some = [labels[:, WINDOWS:-count].any(axis=0) for _, of in tables for labels in of.values()]
    found: Array = np.logical_or.reduce(some)
    return found


def _joined(fronts: Sequence[Array], count: int) -> Array:
    """Return the sums of labels, one of each front; of transient bytes the most."""
    total, *others = fronts
    for more in others:
        both = (total[:, None] + more).reshape(-1, total.shape[1])
        most = np.maximum(total[:, None, TRANSIENT], more[:, TRANSIENT])
        both[:, TRANSIENT] = most.ravel()
        total = _front(both, count)
    return total


def _closed(labels: Array, closes: Array) -> Array:
    """Return labels with max(0, excess) of windows that nothing else touches among the seconds."""
    excess = labels[:, WINDOWS : WINDOWS + len(closes)]
    labels[:, SECONDS] += np.maximum(0.0, excess[:, closes]).sum(axis=1)
    excess[:, closes] = 0.0
    return labels


def _front(labels: Array, count: int) -> Array:
    """Return the labels that no other beats, the fastest first."""
    found = list[Array]()
    labels = labels[np.lexsort(labels[:, :-count].T[::-1])]
    while len(labels):
        best, labels = labels[0], labels[1:]
        found.append(best)
        more = best - labels
        later_s = np.maximum(0.0, more[:, WINDOWS:-count]).sum(axis=1)
        is_beaten = (more[:, SECONDS] + later_s <= 0) & (more[:, BYTES] <= 0)
        is_beaten &= more[:, BYTES] + more[:, TRANSIENT] <= 0
        labels = labels[~is_beaten]
    return np.asarray(found).reshape(-1, labels.shape[1])
