"""Price the stages that ``inter_op`` may choose, and make layouts of what it chose.

A frame is what all stages share: the rows of a microbatch over the whole stage, and how many
microbatches there are. A way to run a stage is a mesh (dp, tp) whose dp divides the rows, with one
of the ways to share its state, its experts and its activations. Seconds and bytes of a stage are
those of its layers added up, and of its ends (``Terms``). Seconds are the terms of ``bound``, bytes
those of ``room``'s lower bound, so that no stage is simulated; ``find`` prices what is best.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache, lru_cache
from itertools import chain
from typing import NamedTuple, TypeVar

import msgspec
import numpy as np

from meshwise import schedule
from meshwise.models import placement
from meshwise.prices import Prices
from meshwise.search import room, space
from meshwise.search.bound import End, by_cut, side_by_side_s
from meshwise.search.charges import beside_of, hooks_of
from meshwise.search.inter_op import Array, Division, Least, Problem, StageTable, divide, least
from meshwise.search.layer import NOTHING, cut_of, end_work, layer_work, slower_by
from meshwise.search.progress import Reporter
from meshwise.search.traffic import passed_on, sent
from meshwise.search.within import ANY, Space
from meshwise.spec import AnyModel, Cuts, LayerKind, Layout, Workload, layer_kinds
from meshwise.spec.layout import Recompute, Way

MOST = 50  # layouts returned
_UNITS = 64  # that devices are counted in: more take long, and stages have many of them
_MARGIN, _FEW = 1.01, 0.15  # estimates further off the best are not priced; more off by microbatch
_TURNS = (2, 4)  # stages of a rank, if several
_DEEP = 16  # ranks; interleaved, more of them are tried only if their number divides the devices
_WORDS: tuple[Recompute, ...] = ("selective", "full")
T = TypeVar("T")
Rows = tuple[int, int]  # of a microbatch over a whole stage, and the stages of a rank


class Terms(NamedTuple):
    """The addends of a layer, or of an end of a stage. ``pace_s``: forward and backward of a
    microbatch, beside the messages that ZeRO-2 and 3 send with each. ``first_s``: what messages
    that a step sends once add to the first forward and the last backward. After the last backward,
    ``reduce_s``: of the reduction that nothing hides, ``ending_s``: of the optimizer. ``resident``:
    bytes at any time. ``held``: of each microbatch in flight. ``slower_s`` and ``spared``: seconds
    more and bytes less if the layer is computed again."""

    pace_s: float = 0.0
    first_s: float = 0.0
    reduce_s: float = 0.0
    ending_s: float = 0.0
    resident: float = 0.0
    held: float = 0.0
    slower_s: float = 0.0
    spared: float = 0.0


class _Answer(NamedTuple):
    """The divisions that were found with so much memory below a time."""

    limit_bytes: float
    cutoff_s: float
    divisions: list[Division]

    def holds(self, limit_bytes: float, cutoff_s: float) -> bool:
        """Return whether it answers another question: what needs less and is faster is in it."""
        less = limit_bytes == self.limit_bytes or not self.divisions
        return less and limit_bytes <= self.limit_bytes and cutoff_s <= self.cutoff_s


_Priced = tuple[Layout, list[Terms], tuple[float, ...]]  # a way, and as of _terms, passed_on


class Frame(NamedTuple):
    """The stages with so many ``rows`` in a microbatch, and the problems about them: 1F1B of any
    depth, whose ``floor`` it is, then interleaved, depth by depth. ``answers``: the last to each
    problem."""

    rows: int
    ways: list[Layout]
    table: StageTable
    problems: list[Problem]
    floor: Least
    answers: dict[int, _Answer]


class _Asked(NamedTuple):
    """The settings that all frames of a search share."""

    model: AnyModel
    workload: Workload
    prices: Prices
    num_devices: int
    within: Space
    unit: int


def frames(
    model: AnyModel,
    workload: Workload,
    prices: Prices,
    num_devices: int,
    within: Space = ANY,
    cutoff_s: float = np.inf,
) -> list[Frame]:
    """Return all frames that may have pipelines ``within`` a space of less than ``cutoff_s``
    seconds, the most promising first."""
    may = not within.uniform and within.schedule in (None, "1f1b", "interleaved_1f1b")
    rows = space.divisors(workload.global_batch_size) if may else []
    unit = _unit(num_devices, prices.costs.cluster.num_devices_per_host)
    asked = _Asked(model, workload, prices, num_devices, within, unit)
    problems = {each: [*_problems(asked, each)] for each in rows}
    ways = {each: _ways(asked, each) for each in rows if problems[each]}
    every = sorted(chain(*ways.values()), key=by_cut)  # so that layers of all sizes come in a row
    tell, priced, found = Reporter(), dict[Layout, list[_Priced]](), list[Frame]()
    for way in every:
        tell("%d of %d ways to run a stage are priced", len(priced), len(every))
        priced[way] = [*_priced(asked, way)]
    for number, (each, of) in enumerate(ways.items()):
        tell("stages of %d of %d sizes of microbatch are priced", number, len(ways))
        here = [p for way in of for p in priced.pop(way)]
        if frame := _frame(asked, each, problems[each], here, cutoff_s):
            found.append(frame)
    return sorted(
        found,
        key=lambda frame: frame.problems[0].least_s(*frame.floor.whole),
    )


def layouts(
    of: Sequence[Frame], limit_bytes: float, lacks: Mapping[Rows, float], cutoff_s: float
) -> list[Layout]:
    """Return pipelines that need up to ``limit_bytes`` and may take less than ``cutoff_s`` seconds,
    the best first. Their stages may differ in layers, meshes and ways. ``lacks``: by how many bytes
    pipelines of so many rows and turns were found to need more."""
    found = list[tuple[float, Layout]]()
    hopeless = set[Rows]()  # rows, turns; deeper pipelines have more in flight
    posed = [(frame, *numbered) for frame in of for numbered in enumerate(frame.problems)]
    tell = Reporter()
    for at, (frame, number, problem) in enumerate(sorted(posed, key=lambda each: each[2].turns)):
        tell("dividing layers among unlike stages: %d of %d questions answered", at, len(posed))
        about, floor_s = (frame.rows, problem.turns), problem.least_s(*frame.floor.whole)
        problem = problem._replace(limit_bytes=limit_bytes - lacks.get(about, 0.0))
        if about in hopeless or cutoff_s <= floor_s:
            continue
        answer = frame.answers.get(number)
        if answer is None or not answer.holds(problem.limit_bytes, cutoff_s):
            floor = frame.floor if problem.turns == 1 else least(frame.table, problem)
            if problem.least_s(*floor.whole) >= cutoff_s:
                hopeless.add(about)
                continue
            divisions = divide(frame.table, problem, cutoff_s, floor)
            if divisions is None:
                hopeless.add(about)
            answer = _Answer(problem.limit_bytes, cutoff_s, divisions or [])
            frame.answers[number] = answer
        for division in [fast for fast in answer.divisions if fast.time_s < cutoff_s]:
            found.append((division.time_s, _layout(division, frame.ways, problem, frame.rows)))
            cutoff_s = min(cutoff_s, (_MARGIN + _FEW / problem.num_microbatches) * division.time_s)
    return [layout for _, layout in sorted(found, key=lambda each: each[0])[:MOST]]


def _frame(
    asked: _Asked,
    rows: int,
    problems: list[Problem],
    priced: Sequence[_Priced],
    cutoff_s: float,
) -> Frame | None:
    """Return a frame, or None if no way to run a stage has a price, or all take ``cutoff_s``."""
    if not priced:
        return None
    ways, table = _stages(asked, priced)
    floor = least(table, problems[0])
    if min([problem.least_s(*floor.whole) for problem in problems]) >= cutoff_s:
        return None
    return Frame(rows, ways, table, problems, floor, {})


def _unit(num_devices: int, per_host: int) -> int:
    """Return the number of devices that every stage has a multiple of: 1, or whole hosts of a large
    cluster, so that there are up to ``_UNITS`` of them."""
    if num_devices <= _UNITS or num_devices % per_host:
        return 1
    hosts = num_devices // per_host
    return per_host * min(each for each in space.divisors(hosts) if hosts // each <= _UNITS)


def _problems(asked: _Asked, rows: int) -> Iterator[Problem]:
    model, workload, prices, num_devices, within, unit = asked
    cluster = prices.costs.cluster
    units, per_host = num_devices // unit, max(1, cluster.num_devices_per_host // unit)
    most = min(units, within.num_auto_layers or model.layers, within.pp or units)
    count, exactly = workload.global_batch_size // rows, within.pp is not None
    limit, about = cluster.usable_bytes, (units, per_host, count)
    if most < 2 or schedule.check("1f1b", most, 1, count) is not None:
        return
    again = within.recompute in _WORDS
    ahead = [float(min(count, s + 1)) for s in range(most)]
    yield Problem(*about, ahead, limit, exactly=exactly, recomputed=again)
    for turns in _TURNS if within.schedule != "1f1b" else ():
        for pp in range(most if exactly else 2, min(most, model.layers // turns) + 1):
            is_usual = pp <= _DEEP or units % pp == 0
            if is_usual and schedule.check("interleaved_1f1b", pp, turns, count) is None:
                ahead = [min(count, (2 * s + 1 + (turns - 1) * pp) / turns) for s in range(pp)]
                yield Problem(*about, ahead, limit, turns, True, recomputed=again)


def _ways(asked: _Asked, rows: int) -> list[Layout]:
    """Return the ways to run a stage on some of the devices."""
    model, workload, prices, num_devices, within, unit = asked
    host = prices.costs.cluster.num_devices_per_host
    moe = bool(getattr(model, "experts", None))
    count, found = workload.global_batch_size // rows, list[Layout]()
    for size in range(unit, num_devices, unit):
        if size > host and size % host:
            continue
        for tp in space.divisors(size):
            if tp > host or (size > host and host % tp) or rows % (size // tp):
                continue
            for shared in space.shared(size // tp, 1, tp, moe):
                inside = space.unchecked(
                    shared, microbatch_size=rows * tp // size, num_microbatches=count
                )
                gains = inside.replicas == 1 and not (inside.zero == 1 == count)
                wanted = gains and within.has_stage(inside, size, host)
                about = model, workload.seq_len, inside
                may = not (space.obstacle(*about) or space.recipe_obstacle(*about, prices.costs))
                if wanted and may:
                    found.append(inside)
    return found


def _priced(asked: _Asked, way: Layout) -> Iterator[_Priced]:
    """Yield a way with each word of what it computes again, and its terms; nothing if a part of it
    was not measured."""
    model, seq_len, prices = asked.model, asked.workload.seq_len, asked.prices
    with suppress(ValueError):
        between = passed_on(model, asked.workload, way, prices)
        for word, terms_of in _terms(model, seq_len, way, prices, layer_kinds(model, seq_len)):
            if asked.within.recompute in (None, "none", word):
                yield space.unchecked(way, recompute=word), terms_of, between


def _stages(asked: _Asked, priced: Sequence[_Priced]) -> tuple[list[Layout], StageTable]:
    """Add up the terms of every stage. Return the ways that no other on as many devices beats in
    all, with their table."""
    model, workload, num_devices = asked.model, asked.workload, asked.num_devices
    within, unit = asked.within, asked.unit
    kinds = layer_kinds(model, workload.seq_len)
    order = [*dict.fromkeys(kinds)]
    terms, beside = (np.asarray([each[at] for each in priced]) for at in (1, 2))
    devices = np.asarray([way.num_devices // unit for way, *_ in priced])
    kept = _unbeaten(devices, terms, beside)
    terms, beside, devices = terms[kept], beside[kept], devices[kept]
    each = terms[:, [order.index(kind) for kind in kinds]]
    inner, first, last = np.moveaxis(terms[:, len(order) :, None], 1, 0)
    sums = np.concatenate([np.zeros_like(each[:, :1]), np.cumsum(each, axis=1)], axis=1)
    kind, start, stop = _kinds(kinds, within)
    of = sums[:, stop] - sums[:, start] + inner
    of[:, start == 0] += first
    of[:, stop == len(kinds)] += last
    pace_s, first_s, reduce_s, ending_s, resident, held, slower_s, spared = np.moveaxis(of, -1, 0)
    if within.recompute is not None:  # nothing is left to choose
        if within.recompute != "none":
            pace_s, held = pace_s + slower_s, held - spared
        slower_s = spared = np.zeros_like(spared)
    if (shares := within.shares(model, workload.seq_len)) is not None:
        of_devices = devices[:, None] * unit / num_devices
        fair = within.is_balanced(of_devices, shares[stop] - shares[start])
        pace_s = np.where(fair, pace_s, np.inf)
    table = StageTable(
        devices=devices,
        hops_s=beside[:, :2],
        kind=kind,
        layers=stop - start,
        once_s=pace_s + first_s,
        pace_s=pace_s,
        late_s=reduce_s + ending_s + (start == 0) * beside[:, 2:3],
        tied_s=(stop == len(kinds)) * placement.is_tied(model) * (ending_s + beside[:, 2:3]),
        resident=resident + beside[:, 3:],
        held=held,
        slower_s=slower_s / (stop - start),
        spared=spared / (stop - start),
    )
    return [priced[at][0] for at in kept], table


@lru_cache(maxsize=16)
def _kinds(layers: tuple[LayerKind, ...], within: Space) -> tuple[Array, Array, Array]:
    """Return the kind of every stage, [start, stop], -1 where it is none or has all layers, and
    where the first of each kind starts and stops. Runs of ``size`` layers are alike if those of one
    layer fewer are, and the last layers."""
    count, known = len(layers), [*dict.fromkeys(layers)]
    each = np.asarray([known.index(layer) for layer in layers])
    edge = np.asarray([within.is_edge(at, count) for at in range(count + 1)])
    kind, alike = np.full((count, count + 1), -1), np.zeros(count + 1, int)
    for size in range(1, count):
        starts = np.arange(count - size + 1)
        runs = alike[:-1] * len(known) + each[size - 1 :]
        alike = np.unique(runs, return_inverse=True)[1]
        ends = 2 * (starts == 0) + (starts + size == count)
        may = edge[starts] & edge[starts + size]
        kind[starts, starts + size] = np.where(may, (size * count + alike) * 4 + ends, -1)
    starts, stops = np.nonzero(kind >= 0)
    _, at, number = np.unique(kind[starts, stops], return_index=True, return_inverse=True)
    kind[starts, stops] = at.argsort().argsort()[number]  # in the order in which they begin
    at.sort()
    return kind, starts[at], stops[at]


def _unbeaten(devices: Array, terms: Array, beside: Array) -> list[int]:
    """Return the ways that no other on as many devices beats in all terms; of equal ones the
    first."""
    worst = terms * (np.ones(len(Terms._fields)) + Terms(spared=-2.0))
    costs = np.concatenate([worst.reshape(len(terms), -1), beside], axis=1)
    order = np.lexsort(costs.T[::-1])  # none comes before one that beats it
    kept, costs = np.ones(len(order), bool), costs[order]
    for size in np.unique(devices):
        here = np.flatnonzero(devices[order] == size)
        beats = np.tri(len(here), k=-1, dtype=bool).T  # [of earlier ones, of later ones]
        for cost in costs[here].T:
            beats &= cost[:, None] <= cost
        kept[here] = ~beats.any(axis=0)
    return order[kept].tolist()  # type: ignore[no-any-return]


def _terms(
    model: AnyModel, seq_len: int, way: Layout, prices: Prices, kinds: Sequence[LayerKind]
) -> Iterator[tuple[Recompute, list[Terms]]]:
    """Yield, for each word of what may be computed again, the terms of each kind of layer, then of
    a stage beside its layers, and what the first and the last stage add to these."""
    cut, about, order = cut_of(way), (model, seq_len), [*dict.fromkeys(kinds)]
    hooks, beside = hooks_of(way, prices), beside_of(way, prices)

    @cache
    def stage_bytes(kind: LayerKind, count: int, first: bool = False, last: bool = False) -> Array:
        """Return the bytes of a stage at any time, and of a microbatch in flight."""
        end = End(kinds=(kind,) * count, first=first, last=last)
        return np.asarray(room.of_stage(*about, way, end, NOTHING, prices))

    def layer(kind: LayerKind) -> Terms:
        work, third = layer_work(*about, cut, prices, (kind, NOTHING)), stage_bytes(kind, 3)
        of = sent(*about, way, prices, kind)
        ahead, back = slower_by(*about, cut, prices, kind, hooks)
        alone_s = ahead * work.forward_s + back * work.backward_s
        pace_s, once_s = (
            side_by_side_s(alone_s + each.copies_s, work.messages_s, each.messages_s, beside)
            for each in (of.each, of.once)
        )
        return Terms(pace_s, once_s - pace_s, 0.0, of.ending_s, *(third - stage_bytes(kind, 2)))

    def recomputed(kind: LayerKind, word: Recompute) -> Terms:
        slower_s, held = _recomputed(*about, cut, prices, kind, word)
        spared = max(0.0, layers[kind].held - held)
        return layers[kind]._replace(slower_s=slower_s, spared=spared)

    def end(kind: LayerKind, first: bool = False, last: bool = False) -> Terms:
        """Return the terms of a stage beside its layers."""
        size = stage_bytes(kind, 2, first, last) if first or last else stage_bytes(kind, 2)
        resident, held = size[0] - 2 * layers[kind].resident, size[1] - 2 * layers[kind].held
        work = end_work(*about, cut, prices, kind, first=first, last=last)
        of, inner = sent(*about, way, prices, kind, first, last), sent(*about, way, prices, kind)
        # messages before all work and after it: of a layer, or of the embedding and one
        gathers_s = (of if first else inner).gathers_s
        waits_s, reduce_s = (of.layer_s, of.root_s) if first else (0.0, of.layer_s)
        each_s = gathers_s * (way.zero == 3) + waits_s * (way.zero >= 2)
        once_s = gathers_s + waits_s + of.once.copies_s - inner.once.copies_s
        each_s += of.each.copies_s - inner.each.copies_s
        ending_s = of.ending_s - inner.ending_s
        return Terms(work.both_s + each_s, once_s - each_s, reduce_s, ending_s, resident, held)

    layers = {kind: layer(kind) for kind in order}
    inner = Terms(*map(max, zip(*map(end, order), strict=True)))
    ends = (end(kinds[0], first=True), kinds[0]), (end(kinds[-1], last=True), kinds[-1])
    more = [inner, *[Terms(*np.subtract(of, end(kind))) for of, kind in ends]]
    for word in _WORDS:
        yield word, [*[recomputed(kind, word) for kind in order], *more]


@lru_cache(maxsize=16384)
def _recomputed(
    model: AnyModel, seq_len: int, cut: Layout, prices: Prices, kind: LayerKind, word: Recompute
) -> tuple[float, float]:
    """Return the seconds that a layer takes more if it is computed again, and the bytes that it
    then holds of each microbatch."""
    about = (model, seq_len, cut, prices)
    plain, again = (layer_work(*about, (kind, of)) for of in (NOTHING, word))
    ends = [End(kinds=(kind,) * count, first=False, last=False) for count in (2, 3)]
    two, three = [room.of_stage(model, seq_len, cut, end, word, prices)[1] for end in ends]
    return again.both_s - plain.both_s, three - two


def _layout(division: Division, ways: Sequence[Layout], problem: Problem, rows: int) -> Layout:
    """Return the layout of a division. What most stages have in common is the layout's, the rest
    each stage's own way."""
    chosen = [ways[stage.way] for stage in division.stages]
    pp, turns = len(chosen), problem.turns
    meshes = tuple((way.dp, way.tp) for way in chosen)
    equal = len({*meshes}) == 1
    dp, tp = meshes[0] if equal else (1, 1)
    dealt = [space.equal_counts(stage.stop - stage.start, turns) for stage in division.stages]
    counts = [dealt[rank][turn] for turn in range(turns) for rank in range(pp)]
    words = [
        _again(way.recompute, count if problem.recomputed else -(-stage.again // turns), count)
        for stage, way, count in zip(division.stages * turns, chosen * turns, counts, strict=True)
    ]
    cut = {(way.sequence_parallel, way.cuts) for way in chosen if way.tp > 1}
    alike = len(cut) == 1
    sp, cuts = cut.pop() if alike else (False, Cuts())
    word, again = _usual(words)
    shared = Layout(
        dp=dp,
        tp=tp,
        pp=pp,
        ep=chosen[0].ep if len({way.ep for way in chosen}) == 1 else 1,
        zero=_usual([way.zero for way in chosen if way.dp > 1] or [0]),
        sequence_parallel=sp,
        cuts=cuts,
        microbatch_size=rows // dp,
        num_microbatches=problem.num_microbatches,
        schedule="1f1b" if turns == 1 else "interleaved_1f1b",
        stages_per_rank=turns,
        recompute=word,
        recompute_layers=again,
        layers=tuple(counts) if len({*counts}) > 1 else (),
        meshes=() if equal else meshes,
    )
    own = tuple(
        Way(
            zero=way.zero if way.dp > 1 and way.zero != shared.zero else None,
            ep=way.ep if way.ep != shared.ep else None,
            cuts=way.placed if not alike and way.placed != Cuts() else None,
            recompute=of[0] if of != (word, again) else None,
            recompute_layers=of[1] if of != (word, again) else None,
        )
        for way, of in zip(chosen * turns, words, strict=True)
    )
    return msgspec.structs.replace(shared, ways=own) if any(way.given for way in own) else shared


def _again(word: Recompute, again: int, count: int) -> tuple[Recompute, int | None]:
    """Return the fields of a stage with ``count`` layers, some computed again."""
    return (word, None if again >= count else again) if again else ("none", None)


def _usual(values: Sequence[T]) -> T:
    return Counter(values).most_common(1)[0][0]
