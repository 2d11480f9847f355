"""Divide layers and devices among the stages of a pipeline: the inter-operator search.

A table prices the stages. Layers ``start`` to ``stop``, run in one way on its devices, take
``pace`` seconds of each microbatch, and ``once`` seconds of the first forward and last backward.
After these they take ``late`` seconds: gradients that nothing hides are reduced, and the optimizer
runs. With k microbatches in flight they need resident + k held bytes. A layer that is computed
again takes ``slower`` seconds more and spares ``spared`` bytes of each microbatch; as few are as
make the stage fit (``_cells``). In 1F1B a stage with s stages behind it has k = min(s + 1,
microbatches) in flight. Of stages i and on, with turns t and c = microbatches - 1 / t,

    S_i = once_i / t + S_(i+1)
    V_i = once_i / t + max(V_(i+1), c pace_i + max(0, S_(i+1) - ahead_i pace_i / 3))
    T_i = max(T_(i+1) + once_i / 3 t, V_i + late_i)

S is how long one microbatch takes. V lasts from the first forward of stage i to the end of its last
backward. The slowest stage works without a pause, but for the first gradient to come back, and by
then it has run the forwards that are ``ahead``: of 1F1B k - 1. T lasts to the end of the step: a
later stage's end may be hidden behind the backwards before it. A forward is a third of a stage's
seconds. ``tied`` are seconds of the last stage that wait for the first one's last backward, as they
share a weight. This module minimises the step over all divisions of the layers and the devices:

    max(T_0, V_0 + tied of the last stage)

Where nothing is late or ahead this is the objective of Alpa (Zheng et al. 2022, arXiv:2201.12023,
section 5): S + (microbatches - 1) max of pace, after PipeDream and TeraPipe, with the messages
between stages as part of a stage's seconds. In interleaved 1F1B each rank has ``turns`` stages,
here added up, of a layer or more each, and none ahead.

Alpa tries every limit of the slowest stage, and under each minimises the sum. Here a partial
division, from the last stage forward, keeps every (S, V, T, tied of the last stage) that no other
one beats in all (``_keep``): all grow with those behind, so that what is beaten stays so. One is
dropped if it cannot lead below ``cutoff_s``, since the layers before it take at least the least sum
and the least max of the devices before it (``least``). What is found is exact.

Stages lie on devices in order. A stage stays within a host, or fills whole hosts.
"""

import logging
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray
log = logging.getLogger("meshwise")
_FORWARD = 1 / 3  # of a stage's seconds
_MOST_S = 1e300  # for infinity, of which 0 times and differences have no value
_SAME = 1e-9  # of a layer: rounding in the count of layers computed again
_GIVEN_UP = "of %d microbatches, too many unlike stages to compare them all"
MOST = 100_000  # partial divisions; models of up to 126 layers had up to 35,000
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
    late_s: Array
    tied_s: Array
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

    @property
    def further(self) -> float:
        """The times that the slowest stage's pace counts beside the sum."""
        return self.num_microbatches - 1 / self.turns

    def ahead(self, in_flight: float) -> float:
        return in_flight - 1 if self.turns == 1 else 0.0

    def spare_s(self, below_s: float) -> float:
        """Return the most seconds that a stage's forwards ahead hide of each stage behind it, in a
        division below a time: a third of the most that the slowest stage can take."""
        if self.turns > 1 or self.further <= 0:
            return 0.0
        return min(_FORWARD * below_s / self.further, _MOST_S)

    def least_s(self, sum_s: Any, slowest_s: Any, net_s: Any = -np.inf) -> Any:
        """Return the least T of stages whose sum and whose max are at least these. ``net_s``: at
        least their sum, less ``spare_s`` for each stage."""
        hidden, slowest_s = (
            _FORWARD * self.ahead(max(self.in_flight)),
            np.minimum(slowest_s, _MOST_S),
        )
        return np.maximum(
            sum_s + (self.further - hidden) * slowest_s,
            self.further * slowest_s + np.maximum(0.0, net_s),
        )

    def may_be(self, once_s: Array, pace_s: Array, rest_s: Array, below_s: float) -> Array:
        """Return which stages, of so many seconds in all turns, may be in a division below a time,
        with the least sum and the least max of the layers before them."""
        sums, maxes = rest_s
        found: Array = self.least_s(once_s / self.turns + sums, np.maximum(pace_s, maxes)) < below_s
        return found

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
    ``used`` devices, [stop][used]. The first stage's late is part of the sum. ``nets``: of the
    least sum less ``spare_s`` for each stage."""

    sums: Array
    maxes: Array
    nets: Array

    @property
    def whole(self) -> tuple[float, float, float]:
        return float(self.sums[-1, -1]), float(self.maxes[-1, -1]), float(self.nets[-1, -1])


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
    late_s: Array
    tied_s: Array
    resident: Array
    held: Array
    slower_s: Array
    spared: Array

    def below(self, problem: Problem, below_s: float) -> "_Quick":
        """Return those that may be in a division below another time."""
        fast = problem.may_be(self.once_s, self.pace_s, self.rest_s, below_s)
        return _Quick(*[of[..., fast] for of in self])


class _Cells(NamedTuple):
    """Stages that fit, with the layers that are computed again for that: [stage]. ``once_s``: of
    one turn."""

    place: Array
    way: Array
    once_s: Array
    pace_s: Array
    late_s: Array
    tied_s: Array
    again: Array


class _Before(NamedTuple):
    """Stages that stop at one layer, on so many devices: [stage]."""

    start: Array
    way: Array
    once_s: Array
    pace_s: Array
    late_s: Array
    tied_s: Array
    again: Array


class _Partial(NamedTuple):
    """S, V and T of the last stages, and the seconds that the last one waits to spend after the
    first; the first of them, and the others."""

    sum_s: float = 0.0
    busy_s: float = 0.0
    time_s: float = 0.0
    tied_s: float = 0.0
    stage: Portion | None = None
    behind: "_Partial | None" = None


_States = dict[tuple[int, int], list[_Partial]]  # by first layer and number of devices


def divide(
    table: StageTable, problem: Problem, cutoff_s: float = np.inf, floor: Least | None = None
) -> list[Division] | None:
    """Return the best division, and others, fastest first: each first stage before all that no
    other beats behind it. None takes ``cutoff_s`` or more; there may be none. None: with more
    stages and as much in flight, or more, there are none either, or too many. ``floor``: ``least``
    of both, if it is known."""
    if floor is not None and problem.least_s(*floor.whole) >= cutoff_s:
        return None
    rest = [least(table, problem, cutoff_s)]
    least_s = problem.least_s(*rest[0].whole)
    if least_s >= cutoff_s:
        return None
    quick = _quick(table, problem, cutoff_s, rest[0])
    for slack in _SLACKS:
        below_s = min(cutoff_s, slack * least_s)
        try:
            found = _below(table, problem, rest, cutoff_s, below_s, quick.below(problem, below_s))
        except OverflowError:
            log.info(_GIVEN_UP, problem.num_microbatches)
            return None
        if found or below_s == cutoff_s:
            return found and sorted(found, key=lambda division: division.time_s)
    return []


def least(table: StageTable, problem: Problem, below_s: float = np.inf) -> Least:
    """Return what stages take at least, each with as few microbatches in flight as can be, in a
    division below a time."""
    count, ends = table.num_layers, np.arange(problem.num_devices + 1)
    sums, maxes, nets = np.full((3, count + 1, len(ends)), np.inf)
    sums[0, 0] = maxes[0, 0] = nets[0, 0] = 0.0
    spare_s = problem.spare_s(below_s)
    again, fits = _again(table, problem, min(problem.in_flight))
    fits &= np.isfinite(table.pace_s)
    more_s, stages = again * table.slower_s, []
    order = np.argsort(table.devices, kind="stable")
    sizes, begins = np.unique(table.devices[order], return_index=True)
    for across in range(2):
        hops_s = problem.turns * table.hops_s[:, across, None] * table.goes_on
        once_s, pace_s = (of + more_s + hops_s for of in (table.once_s, table.pace_s))
        once_s, seconds = once_s / problem.turns, []
        for each in (once_s, once_s + table.late_s, pace_s):
            each_s = np.where(fits, each, np.inf)[order]
            none = np.full((len(sizes), 1), np.inf)  # the last: of no kind
            seconds.append(np.append(np.minimum.reduceat(each_s, begins), none, axis=1))
        for size, once_s, first_s, pace_s in zip(sizes.tolist(), *seconds, strict=True):
            fit = [end >= size and problem.is_within(end - size, size) for end in ends.tolist()]
            here = ends[np.asarray(fit) & ((ends % problem.per_host == 0) == across)]
            may = np.isfinite(pace_s[:-1])
            if len(here) and may.any():
                sum_s, first_s, slowest_s = (of[table.kind] for of in (once_s, first_s, pace_s))
                sum_s[0] = first_s[0]
                stages.append((here, here - size, table.layers[may].max(), sum_s, slowest_s))
    for stop in range(1, count + 1):
        for here, before, longest, once_s, pace_s in stages:
            of = slice(max(0, stop - longest), stop)
            total = (sums[of, before] + once_s[of, stop, None]).min(axis=0)
            slowest = np.maximum(maxes[of, before], pace_s[of, stop, None]).min(axis=0)
            net = (nets[of, before] + once_s[of, stop, None]).min(axis=0) - spare_s
            sums[stop, here] = np.minimum(sums[stop, here], total)
            nets[stop, here] = np.minimum(nets[stop, here], net)
            maxes[stop, here] = np.minimum(maxes[stop, here], slowest)
    return Least(sums, maxes, nets)


def _below(
    table: StageTable,
    problem: Problem,
    rest: list[Least],
    cutoff_s: float,
    below_s: float,
    quick: _Quick,
) -> list[Division] | None:
    """Go through the divisions below this time, stage by stage from the last; None if there are
    none with so many stages or more. ``rest[n]``: the least of stages with 2^n or more behind them,
    of ``rest[0]`` any; missing ones are added. ``quick``: the stages that may be in them. An
    OverflowError if there are more partial ones than ``MOST``."""
    found, num_partials, spare_s = list[Division](), 0, problem.spare_s(cutoff_s)
    # forwards ahead of a stage beyond one for each stage behind it
    beyond = max([problem.ahead(of) - behind for behind, of in enumerate(problem.in_flight)])
    states: _States = {(table.num_layers, 0): [_Partial()]}
    for behind, in_flight in enumerate(problem.in_flight):
        stages = _Stages(table, problem, in_flight, below_s, quick)
        ahead = problem.ahead(in_flight)
        if behind + 1 == 2 ** len(rest) < len(problem.in_flight) and not problem.exactly:
            fewest = problem._replace(in_flight=problem.in_flight[behind + 1 :])
            rest.append(least(table, fewest, cutoff_s))
        sums, maxes, nets = rest[min(len(rest), (behind + 1).bit_length()) - 1]
        further: _States = {}
        for (stop, used), partials in states.items():
            end, behind_s = problem.num_devices - used, np.asarray([of[:4] for of in partials])
            for size in stages.sizes:
                first = end - size
                if first < 0 or not problem.is_within(first, size):
                    continue
                of = stages.before(stop, size, end)
                if not len(of.start):
                    continue
                seconds = _before(behind_s.T[:, :, None], problem, ahead, of)
                rest_s, slowest_s = sums[of.start, first], maxes[of.start, first]
                sum_s, busy_s, time_s, _ = seconds
                net_s = nets[of.start, first] + sum_s - (behind + 1 + beyond) * spare_s
                may = problem.least_s(sum_s + rest_s, slowest_s, net_s) < below_s
                may &= (busy_s + rest_s < below_s) & (time_s < below_s)
                for other, new in _unbeaten_before(seconds, of, may, stop):
                    assert new.stage is not None
                    num_partials += 1
                    here = further.setdefault((new.stage.start, used + size), [])
                    if new.stage.start:
                        _keep(here, new._replace(behind=partials[other]))
                    else:
                        here.append(new._replace(behind=partials[other]))
            if num_partials > MOST:
                raise OverflowError
        whole = further.pop((0, problem.num_devices), [])
        if not problem.exactly or behind == len(problem.in_flight) - 1:
            found += [_division(partial) for partial in whole]
        states = {place: partials for place, partials in further.items() if partials}
        if not states:
            return found or None
    return found


def _before(others: Array, problem: Problem, ahead: float, of: _Before) -> tuple[Array, ...]:
    """Return S, V, T and tied of partial divisions, [partial, stage], with a stage put before."""
    sum_s, busy_s, time_s, tied_s = others
    waits_s = np.maximum(0.0, sum_s - _FORWARD * ahead * of.pace_s)
    busy_s = of.once_s + np.maximum(busy_s, problem.further * of.pace_s + waits_s)
    tied_s = np.maximum(tied_s, of.tied_s)
    time_s = np.maximum(time_s + _FORWARD * of.once_s, busy_s + of.late_s)
    time_s = np.where(of.start == 0, np.maximum(time_s, busy_s + tied_s), time_s)
    return of.once_s + sum_s, busy_s, time_s, tied_s


def _unbeaten_before(
    seconds: tuple[Array, ...], of: _Before, may: Array, stop: int
) -> Iterator[tuple[int, _Partial]]:
    """Yield, of the partial divisions that ``may`` be, each first stage before all, and what no
    other that starts there beats; with the number of the partial division behind."""
    if not may.any():
        return
    others, ways = np.nonzero(may)
    columns, starts = [each[others, ways] for each in seconds], of.start[ways]
    place = np.where(starts > 0, starts, stop + np.arange(len(ways)))
    for at in _front(place, *columns).tolist():
        way = ways[at]
        stage = Portion(int(of.way[way]), int(of.start[way]), stop, int(of.again[way]))
        yield others[at], _Partial._make([*[float(column[at]) for column in columns], stage, None])


def _keep(partials: list[_Partial], new: _Partial) -> None:
    """Add a partial division unless one there is as good in all; drop those that it is as good
    as."""
    a, b, c, d = new[:4]
    for of in partials:
        if of[0] <= a and of[1] <= b and of[2] <= c and of[3] <= d:
            return
    partials[:] = [of for of in partials if of[0] < a or of[1] < b or of[2] < c or of[3] < d]
    partials.append(new)


def _division(partial: _Partial) -> Division:
    time_s, stages = partial.time_s, list[Portion]()
    while partial.stage is not None and partial.behind is not None:
        stages.append(partial.stage)
        partial = partial.behind
    return Division(time_s, tuple(stages))


class _Stages:
    """The stages that may be in a division below a time, with some microbatches in flight."""

    def __init__(
        self, table: StageTable, problem: Problem, in_flight: float, below_s: float, of: _Quick
    ) -> None:
        self.table, self.problem = table, problem
        self.of_place: dict[tuple[int, bool], _Cells] = {}
        self.known: dict[tuple[int, int, bool], _Before] = {}
        for across, every in enumerate(_cells(table, problem, in_flight, below_s, of)):
            cells = _unbeaten(every)
            size, kind = np.divmod(cells.place, len(table.layers))
            for each in np.unique(size).tolist():
                here = cells._replace(place=kind)
                self.of_place[each, bool(across)] = _Cells(*[of[size == each] for of in here])
        self.sizes = sorted({size for size, _ in self.of_place})

    def before(self, stop: int, size: int, end: int) -> _Before:
        """Return the stages that stop there, on devices up to ``end``."""
        across = end % self.problem.per_host == 0
        found = self.known.get((stop, size, across))
        if found is None:
            kinds = self.table.kind[:stop, stop]
            cells = self.of_place.get((size, across))
            if cells is None:
                cells = _Cells(*[np.zeros(0, int)] * len(_Cells._fields))
            starts = np.full(len(self.table.layers), stop)
            starts[kinds[kinds >= 0]] = np.flatnonzero(kinds >= 0)
            at = np.flatnonzero(starts[cells.place] < stop)
            at = at[np.argsort(starts[cells.place[at]], kind="stable")]
            found = _Before(starts[cells.place[at]], *[of[at] for of in cells[1:]])
            self.known[stop, size, across] = found
        return found


def _quick(table: StageTable, problem: Problem, below_s: float, rest: Least) -> _Quick:
    """Return the stages that may be in a division below this time: they and the least of the layers
    before them, on any of the devices that they leave, take less."""
    starts, stops = np.nonzero(table.kind >= 0)
    sizes, at = np.unique(table.devices, return_inverse=True)
    found = np.full((2, len(table.layers), len(sizes)), np.inf)
    for least_s, of in zip(found, rest[:2], strict=True):
        up_to = np.minimum.accumulate(of, axis=1)  # [start, devices at most]
        left = up_to[starts[:, None], np.maximum(0, problem.num_devices - sizes)]
        np.minimum.at(least_s, table.kind[starts, stops], left)
    sums, maxes = np.moveaxis(found[:, :, at], 1, 2)
    fast = problem.may_be(table.once_s, table.pace_s, np.asarray([sums, maxes]), below_s)
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
    more_s = again * of.slower_s
    for across in range(2):
        hops_s = problem.turns * table.hops_s[of.way, across] * table.goes_on[of.kind]
        once_s, pace_s = (each + more_s + hops_s for each in (of.once_s, of.pace_s))
        may = fits & problem.may_be(once_s, pace_s, of.rest_s, below_s)
        every = (of.place, of.way, once_s / problem.turns, pace_s, of.late_s, of.tied_s, again)
        yield _Cells(*[each[may] for each in every])


def _unbeaten(cells: _Cells) -> _Cells:
    """Return those that no other at the same place beats in all seconds; of equal ones the first
    way."""
    kept = _front(cells.place, cells.pace_s, cells.once_s, cells.late_s, cells.tied_s)
    return _Cells(*[of[kept] for of in cells])


def _front(place: Array, *values: Array) -> Array:
    """Return the indices of what no other at the same place beats in all values: those of least
    first value, then those of least first value that are less in another, and so on."""
    left, kept = np.lexsort((*values[::-1], place)), list[Array]()
    while len(left) or not kept:
        here = place[left]
        begins = np.append(True, here[1:] != here[:-1])[: len(left)]
        kept.append(left[begins])
        best, beats = kept[-1][np.cumsum(begins) - 1], np.zeros(len(left), bool)
        for of in values[1:]:
            beats |= of[left] < of[best]
        left = left[beats]
    return np.concatenate(kept)
