"""Divide layers and devices among the stages of a pipeline: the inter-operator search.

A table prices the stages. Layers ``start`` to ``stop``, run in one way on its devices, take
``pace`` seconds of each microbatch, and ``once`` seconds of the first forward and last backward.
With k microbatches in flight they need resident + k held bytes. A layer that is computed again
takes ``slower`` seconds more and spares ``spared`` bytes of each microbatch; as few are as make the
stage fit (``_cells``). In 1F1B a stage with s stages behind it has k = min(s + 1, microbatches) in
flight. Over all divisions of the layers and the devices this module minimises

    T = sum of once / turns + (microbatches - 1 / turns) max of pace

With ``turns`` 1 this is the objective of Alpa (Zheng et al. 2022, arXiv:2201.12023, section 5),
after PipeDream and TeraPipe, with the messages between stages as part of a stage's seconds. In
interleaved 1F1B each rank has ``turns`` stages, here added up, of a layer or more each.

Alpa tries every limit of the slowest stage, and under each minimises the sum. Here a partial
division, from the last stage forward, keeps every pair (sum, max) that no other one beats in both
(``_keep``): each limit's answer is among them. A pair is dropped if it cannot lead below
``cutoff_s``, since the layers before it take at least the least sum and the least max of the
devices before it (``least``). What is found is exact for T.

Stages lie on devices in order. A stage stays within a host, or fills whole hosts.
"""

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray
_SAME = 1e-9  # of a layer: rounding in the count of layers computed again
_SLACKS = (1.03, 1.1, 1.3, np.inf)  # over the least possible, tried in turn


class StageTable(NamedTuple):
    """Prices of stages. ``devices`` of each way. ``hops_s`` [way, 2]: seconds of sending a result
    on and its gradient back, to a stage on the same host and to one on another. ``kind`` [start,
    stop]: of stages that cost the same, -1 for none. ``layers`` of each kind. The others [way,
    kind]: seconds and bytes; ``slower_s`` and ``spared`` of one layer and one microbatch."""

    devices: Array
    hops_s: Array
    kind: Array
    layers: Array
    once_s: Array
    pace_s: Array
    resident: Array
    held: Array
    slower_s: Array
    spared: Array

    @property
    def num_layers(self) -> int:
        return len(self.kind)

    @property
    def goes_on(self) -> Array:
        """Whether stages of each kind send a result on, as all but the last do."""
        found = np.ones(len(self.layers))
        found[self.kind[:, -1]] = 0.0
        return found


class Problem(NamedTuple):
    """The question put to a table. ``in_flight[s]``: microbatches of a stage with s stages behind
    it; there are as many stages at most, or ``exactly`` so many. ``recomputed``: the table counts
    every layer twice."""

    num_devices: int
    per_host: int
    num_microbatches: int
    in_flight: Sequence[float]
    limit_bytes: float
    turns: int = 1
    exactly: bool = False
    recomputed: bool = False

    def time_s(self, once_s: Any, pace_s: Any) -> Any:
        return once_s / self.turns + (self.num_microbatches - 1 / self.turns) * pace_s

    def is_within(self, first: int, devices: int) -> bool:
        """Return whether these devices are within a host, or are whole hosts."""
        inside = first % self.per_host
        return inside + devices <= self.per_host or (inside == devices % self.per_host == 0)


class Portion(NamedTuple):
    """A stage of a division: its way, its layers, and how many of them are computed again."""

    way: int
    start: int
    stop: int
    again: int


class Division(NamedTuple):
    time_s: float
    stages: tuple[Portion, ...]


class Least(NamedTuple):
    """The least sum and the least max of stages that run the first ``stop`` layers on the first
    ``used`` devices, [stop][used]."""

    sums: list[list[float]]
    maxes: list[list[float]]

    @property
    def whole(self) -> tuple[float, float]:
        return self.sums[-1][-1], self.maxes[-1][-1]


class _Quick(NamedTuple):
    """Some stages of a table: [stage]. ``place``: a number for each kind on so many devices.
    ``rest_s`` [2, stage]: the least sum and the least max of the layers before."""

    way: Array
    kind: Array
    place: Array
    layers: Array
    rest_s: Array
    once_s: Array
    pace_s: Array
    resident: Array
    held: Array
    slower_s: Array
    spared: Array

    def below(self, problem: Problem, below_s: float) -> "_Quick":
        """Return those that may be in a division below another time."""
        sums, maxes = self.rest_s
        fast = problem.time_s(self.once_s + sums, np.maximum(self.pace_s, maxes)) < below_s
        return _Quick(*[of[..., fast] for of in self])


class _Cells(NamedTuple):
    """Stages that fit, with the layers computed again for that: [stage]."""

    place: Array
    way: Array
    once_s: Array
    pace_s: Array
    again: Array


class _Pair(NamedTuple):
    """The sum and the max of the last stages, the first of them, and the pair of the others."""

    once_s: float
    pace_s: float
    stage: Portion | None = None
    behind: "_Pair | None" = None


_Ways = list[tuple[int, float, float, float]]  # way, once, pace, again
_States = dict[tuple[int, int], list[_Pair]]  # by first layer and number of devices


def divide(
    table: StageTable, problem: Problem, cutoff_s: float = np.inf, floor: Least | None = None
) -> list[Division]:
    """Return the best division, and others that are best in sum or max for their number of stages,
    fastest first. None takes ``cutoff_s`` or more; there may be none. ``floor``: ``least`` of both,
    if it is known."""
    rest = [floor or least(table, problem)]
    least_s = problem.time_s(*rest[0].whole)
    if least_s >= cutoff_s:
        return []
    quick = _quick(table, problem, cutoff_s, rest[0])
    for slack in _SLACKS:
        below_s = min(cutoff_s, slack * least_s)
        if found := _below(table, problem, rest, below_s, quick.below(problem, below_s)):
            return sorted(found, key=lambda division: division.time_s)
        if below_s == cutoff_s:
            break
    return []


def least(table: StageTable, problem: Problem) -> Least:
    """Return what stages take at least, each with as few microbatches in flight as can be."""
    count, ends = table.num_layers, np.arange(problem.num_devices + 1)
    sums, maxes = np.full((2, count + 1, len(ends)), np.inf)
    sums[0, 0] = maxes[0, 0] = 0.0
    again, fits = _again(table, problem, min(problem.in_flight))
    fits &= np.isfinite(table.pace_s)
    more_s, stages = again * table.slower_s, []
    order = np.argsort(table.devices, kind="stable")
    sizes, begins = np.unique(table.devices[order], return_index=True)
    for across in range(2):
        hops_s = problem.turns * table.hops_s[:, across, None] * table.goes_on
        seconds = []
        for each in (table.once_s, table.pace_s):
            each_s = np.where(fits, each + more_s + hops_s, np.inf)[order]
            none = np.full((len(sizes), 1), np.inf)  # the last: of no kind
            seconds.append(np.append(np.minimum.reduceat(each_s, begins), none, axis=1))
        for size, *both_s in zip(sizes.tolist(), *seconds, strict=True):
            fit = [end >= size and problem.is_within(end - size, size) for end in ends.tolist()]
            here = ends[np.asarray(fit) & ((ends % problem.per_host == 0) == across)]
            may = np.isfinite(both_s[1][:-1])
            if len(here) and may.any():
                longest = table.layers[may].max()
                stages.append((here, here - size, longest, *[each[table.kind] for each in both_s]))
    for stop in range(1, count + 1):
        for here, before, longest, once_s, pace_s in stages:
            of = slice(max(0, stop - longest), stop)
            total = (sums[of, before] + once_s[of, stop, None]).min(axis=0)
            slowest = np.maximum(maxes[of, before], pace_s[of, stop, None]).min(axis=0)
            sums[stop, here] = np.minimum(sums[stop, here], total)
            maxes[stop, here] = np.minimum(maxes[stop, here], slowest)
    return Least(sums.tolist(), maxes.tolist())


def _below(
    table: StageTable, problem: Problem, rest: list[Least], below_s: float, quick: "_Quick"
) -> list[Division]:
    """Go through the divisions below this time, stage by stage from the last. ``rest[n]``: the
    least of stages with 2^n or more behind them, of ``rest[0]`` any; missing ones are added.
    ``quick``: the stages that may be in them."""
    found = list[Division]()
    states: _States = {(table.num_layers, 0): [_Pair(0.0, 0.0)]}
    for behind, in_flight in enumerate(problem.in_flight):
        stages = _Stages(table, problem, in_flight, below_s, quick)
        if behind + 1 == 2 ** len(rest) < len(problem.in_flight) and not problem.exactly:
            fewest = problem._replace(in_flight=problem.in_flight[behind + 1 :])
            rest.append(least(table, fewest))
        sums, maxes = rest[min(len(rest), (behind + 1).bit_length()) - 1]
        further: _States = {}
        for (stop, used), pairs in states.items():
            end = problem.num_devices - used
            for size in stages.sizes:
                first = end - size
                if first < 0 or not problem.is_within(first, size):
                    continue
                for start, ways in stages.before(stop, size, end):
                    rest_s, slowest_s = sums[start][first], maxes[start][first]
                    if problem.time_s(rest_s, slowest_s) >= below_s:
                        continue
                    here = further.setdefault((start, used + size), [])
                    for (way, once_s, pace_s, again), pair in product(ways, pairs):
                        sum_s, max_s = pair.once_s + once_s, max(pair.pace_s, pace_s)
                        if problem.time_s(sum_s + rest_s, max(max_s, slowest_s)) < below_s:
                            stage = Portion(way, start, stop, int(again))
                            _keep(here, _Pair(sum_s, max_s, stage, pair))
        whole = further.pop((0, problem.num_devices), [])
        if not problem.exactly or behind == len(problem.in_flight) - 1:
            found += [_division(pair, problem) for pair in whole]
        states = {place: pairs for place, pairs in further.items() if pairs}
        if not states:
            break
    return found


def _keep(pairs: list[_Pair], new: _Pair) -> None:
    """Add a pair unless one there is as good in both; drop those that it is as good as."""
    for pair in pairs:
        if pair.once_s <= new.once_s and pair.pace_s <= new.pace_s:
            return
    pairs[:] = [p for p in pairs if p.once_s < new.once_s or p.pace_s < new.pace_s]
    pairs.append(new)


def _division(pair: _Pair, problem: Problem) -> Division:
    time_s, stages = problem.time_s(pair.once_s, pair.pace_s), list[Portion]()
    while pair.stage is not None and pair.behind is not None:
        stages.append(pair.stage)
        pair = pair.behind
    return Division(time_s, tuple(stages))


class _Stages:
    """The stages that may be in a division below a time, with some microbatches in flight."""

    def __init__(
        self, table: StageTable, problem: Problem, in_flight: float, below_s: float, of: _Quick
    ) -> None:
        self.table, self.problem = table, problem
        self.of_kind: dict[tuple[int, bool], dict[int, _Ways]] = {}
        self.known: dict[tuple[int, int, bool], list[tuple[int, _Ways]]] = {}
        for across, every in enumerate(_cells(table, problem, in_flight, below_s, of)):
            columns = _unbeaten(every)
            places = np.divmod(columns.place, len(table.layers))
            for size, kind, *way in zip(
                *[each.tolist() for each in (*places, *columns[1:])], strict=True
            ):
                by_kind = self.of_kind.setdefault((size, bool(across)), {})
                by_kind.setdefault(kind, []).append((way[0], way[1], way[2], way[3]))
        self.sizes = sorted({size for size, _ in self.of_kind})

    def before(self, stop: int, size: int, end: int) -> list[tuple[int, _Ways]]:
        """Return where stages may start that stop there, on devices up to ``end``, and how."""
        across = end % self.problem.per_host == 0
        found = self.known.get((stop, size, across))
        if found is None:
            by_kind = self.of_kind.get((size, across), {})
            kinds = enumerate(self.table.kind[:stop, stop].tolist())
            found = [(start, by_kind[kind]) for start, kind in kinds if kind in by_kind]
            self.known[stop, size, across] = found
        return found


def _quick(table: StageTable, problem: Problem, below_s: float, rest: Least) -> _Quick:
    """Return the stages that may be in a division below this time: they and the least of the layers
    before them, on any of the devices that they leave, take less."""
    starts, stops = np.nonzero(table.kind >= 0)
    sizes, at = np.unique(table.devices, return_inverse=True)
    found = np.full((2, len(table.layers), len(sizes)), np.inf)
    for least_s, of in zip(found, rest, strict=True):
        up_to = np.minimum.accumulate(np.asarray(of), axis=1)  # [start, devices at most]
        left = up_to[starts[:, None], np.maximum(0, problem.num_devices - sizes)]
        np.minimum.at(least_s, table.kind[starts, stops], left)
    sums, maxes = np.moveaxis(found[:, :, at], 1, 2)
    with np.errstate(invalid="ignore"):  # 0 times infinity
        fast = problem.time_s(table.once_s + sums, np.maximum(table.pace_s, maxes)) < below_s
    way, kind = np.nonzero(fast & (table.layers >= problem.turns))
    place = table.devices[way] * len(table.layers) + kind
    rest_s = np.asarray([sums[way, kind], maxes[way, kind]])
    costs = [each[way, kind] for each in table[4:]]
    return _Quick(way, kind, place, table.layers[kind], rest_s, *costs)


def _again(of: StageTable | _Quick, problem: Problem, in_flight: float) -> tuple[Array, Array]:
    """Return how many layers stages compute again to fit, and whether they do fit."""
    needed = of.resident + in_flight * of.held - problem.limit_bytes
    with np.errstate(divide="ignore", invalid="ignore"):
        again = np.ceil(np.maximum(needed, 0.0) / (in_flight * of.spared) - _SAME)
    again = np.where(needed > 0, again, 0.0)
    fits = (again <= of.layers) & (of.layers >= problem.turns)
    return np.where(fits, again, 0.0), fits


def _cells(
    table: StageTable, problem: Problem, in_flight: float, below_s: float, of: _Quick
) -> Iterator[_Cells]:
    """Yield those of some stages that fit and may be in a division below this time: where the next
    stage is on the same host, and where it is not."""
    again, fits = _again(of, problem, in_flight)
    more_s, (sums, maxes) = again * of.slower_s, of.rest_s
    for across in range(2):
        hops_s = problem.turns * table.hops_s[of.way, across] * table.goes_on[of.kind]
        once_s, pace_s = (each + more_s + hops_s for each in (of.once_s, of.pace_s))
        fast = problem.time_s(once_s + sums, np.maximum(pace_s, maxes)) < below_s
        yield _Cells(*[each[fits & fast] for each in (of.place, of.way, once_s, pace_s, again)])


def _unbeaten(cells: _Cells) -> _Cells:
    """Return those that no other at the same place beats in both seconds, the fastest pace first;
    of equal ones the first way."""
    order = np.lexsort((cells.way, cells.once_s, cells.pace_s, cells.place))
    cells = _Cells(*[of[order] for of in cells])
    number = np.cumsum(np.diff(cells.place, prepend=-1) != 0)
    # sums by their rank, later places below earlier ones: a running minimum starts anew with each
    rank = np.unique(cells.once_s, return_inverse=True)[1] - number * (len(order) + 1)
    least = np.minimum.accumulate(rank)
    kept = np.diff(least, prepend=1) < 0
    return _Cells(*[of[kept] for of in cells])
