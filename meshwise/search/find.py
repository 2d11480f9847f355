"""Search for the fastest layout that fits, its runners-up, and why the others lose.

The search is best first: layouts wait in order of a lower bound on their step time (``bound``). The
first one gets a sharper bound, then a price, until no waiting layout can be among the best. A
layout that does not fit waits again with more recomputation. A layout that fits is not tried with
more: that would only cost time. The search cuts the parts of a model over tp in the usual ways, and
sums gradients over tp last (``tp_sums``); for those that it keeps, it also looks for the best cuts
(``intra_op_parts``) and prices the other orders.
"""

import gc
import logging
import math
from bisect import insort
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from heapq import heapify, heappop, heappush, nsmallest
from itertools import groupby, islice

import msgspec

from meshwise.models import kernels
from meshwise.prices import Prices
from meshwise.search import balance, bound, inter_op_stages, intra_op_parts, layer, room
from meshwise.search.charges import MESSAGES
from meshwise.search.predict import memory_of, moved, predict
from meshwise.search.progress import Reporter
from meshwise.search.simulate import SUMS, Peak
from meshwise.search.space import OUTSIDE, check, legal_layouts, recipe_obstacle, unchecked
from meshwise.search.stage import forms, views
from meshwise.search.within import ANY, Space
from meshwise.spec import (
    AnyModel,
    Candidate,
    Costs,
    Cuts,
    Infeasible,
    Layout,
    Plan,
    Removal,
    Workload,
    stages_of,
)
from meshwise.spec.layout import SPLIT
from meshwise.units import format_bytes

log = logging.getLogger("meshwise")
_ROUNDS = 4  # of choosing uneven pipelines
_TABLES = 2  # of parts' costs: one takes a tenth of a second
_FASTER = 0.999  # a layout that is not plainer is taken if the step takes less than this share
_AWAY = 64  # devices more and fewer, among which legal numbers of them are looked for
_USUAL = (Cuts(), Cuts(stream="seq"))
# The nearest layout that does not fit is looked for among those whose lower bound is near a share
# of the memory; what needs up to so many times the memory is near enough.
_NEAR = ((0.98, 1.02), (0.95, 1.03), (0.9, 1.05), (0.85, 1.07), (0.8, 1.1))


class NoLayout(ValueError):
    """No layout is legal, can be priced, or fits. ``args``: what is wrong, and the fix if any."""

    def __str__(self) -> str:
        return "; ".join(self.args)


@contextmanager
def _searching() -> Iterator[None]:
    """Pause the garbage collector during a search and drop the search's programs afterwards. A
    search makes millions of tuples and no cycles; looking for cycles took a fifth of its time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        forms.cache_clear()
        if was_on:
            gc.enable()


@_searching()
def find(
    model: AnyModel,
    workload: Workload,
    costs: Costs,
    *,
    num_devices: int,
    top: int = 10,
    measured_only: bool = False,
    within: Space = ANY,
) -> Plan:
    """Find the ``top`` fastest layouts ``within`` a space that fit on ``num_devices``. If none of
    them is a pipeline, add the fastest pipeline, since users compare with it. Operations that were
    not measured are priced by the data sheet; with ``measured_only`` they are an error."""
    cluster = costs.cluster
    if num_devices > cluster.num_devices:
        hosts = -(-num_devices // cluster.num_devices_per_host)
        raise ValueError(
            f"gpus = {num_devices}: cluster {cluster.name!r} has {cluster.num_devices} devices; "
            f"plan for fewer, or for more hosts with --hosts {hosts}"
        )
    layouts, removed = legal_layouts(model, workload, costs, num_devices, within)
    log.info("comparing %s layouts of %d device(s)", f"{len(layouts):,}", num_devices)
    prices = Prices(costs, datasheet=not measured_only)
    limit = cluster.usable_bytes
    about = (model, workload.seq_len, prices, within)
    found = _all_ladders(layouts, *about)
    ladders = [ladder for layout in layouts for ladder in found[layout]]
    if outside := [*found.values()].count([]):
        removed.append(Removal(constraint=f"cut or recomputed {OUTSIDE}", count=outside))
    ranked, passed_over = _best_first(model, workload, prices, ladders, limit, top)
    removed += [Removal(constraint=name, count=n) for name, n in passed_over.items() if n]
    ranked = _with_uneven(model, workload, prices, ranked, num_devices, within)
    nearest = _nearest(model, workload, prices, ladders, limit)
    if not ranked and not layouts:
        near = _legal_counts(model, workload, costs, num_devices, within)
        hint = f"; give --gpus {' or '.join(map(str, near))}" if near else ""
        raise NoLayout(f"no layout of {num_devices} devices is legal: {_reasons(removed)}{hint}")
    if not ranked and nearest is None:
        raise NoLayout(f"no layout of {num_devices} devices can be priced: {_reasons(removed)}")
    if not ranked:
        more = f"--gpus, up to {cluster.num_devices}, or " * (num_devices < cluster.num_devices)
        fix = f"give more devices with {more}--hosts"
        raise NoLayout(_too_large(model, num_devices, nearest), fix)
    num_considered = len(ranked) + sum(removal.count for removal in removed)
    kept = ranked[:top]
    if not any(candidate.layout.pp > 1 for candidate in kept):
        pipelines = [ladder for ladder in ladders if ladder[0].pp > 1]
        kept += _best_first(model, workload, prices, pipelines, limit, 1)[0][:1]
    kept = _refined(model, workload, prices, kept, within)
    best, *others = _plainest_first(kept)
    return msgspec.structs.replace(
        _plan(model, workload, costs, best),
        runners_up=tuple(
            msgspec.structs.replace(other, ties=other.prediction.ties(best.prediction))
            for other in others
        ),
        removed=tuple(removed),
        nearest_infeasible=nearest,
        num_considered=num_considered,
    )


def _legal_counts(
    model: AnyModel, workload: Workload, costs: Costs, num_devices: int, within: Space
) -> list[int]:
    """Return the next smaller and the next larger number of devices, within ``_AWAY`` and the
    cluster, that have legal layouts."""
    most = min(costs.cluster.num_devices, num_devices + _AWAY)
    fewer = range(num_devices - 1, max(0, num_devices - _AWAY - 1), -1)
    found = list[int]()
    for counts in fewer, range(num_devices + 1, most + 1):
        legal = (n for n in counts if legal_layouts(model, workload, costs, n, within)[0])
        found += islice(legal, 1)
    return found


def _too_large(model: AnyModel, num_devices: int, nearest: Infeasible | None) -> str:
    assert nearest is not None
    return (
        f"no layout of {model.name or 'the model'} fits {num_devices} device(s); the nearest, "
        f"{nearest.layout.name}: {nearest.reason}"
    )


def _reasons(removed: Sequence[Removal]) -> str:
    return "; ".join(f"{removal.constraint} ({removal.count})" for removal in removed)


def given(
    model: AnyModel,
    workload: Workload,
    costs: Costs,
    layout: Layout,
    *,
    measured_only: bool = False,
) -> Plan:
    """Plan one given layout. It may be uneven, and it need not fit."""
    check(model, workload, layout)
    kernels.check(costs.recipe, costs.cluster.device.kind, costs.dtype, model)
    if reason := recipe_obstacle(model, workload.seq_len, layout, costs):
        raise ValueError(f"layout = {layout.name}: {reason}")
    prices = Prices(costs, datasheet=not measured_only)
    prediction = predict(model, workload, layout, prices)
    return _plan(model, workload, costs, Candidate(layout=layout, prediction=prediction))


def _plan(model: AnyModel, workload: Workload, costs: Costs, chosen: Candidate) -> Plan:
    return Plan(
        model=model,
        workload=workload,
        cluster=costs.cluster,
        dtype=costs.dtype,
        lowering=costs.lowering,
        recipe=costs.recipe,
        layout=chosen.layout,
        stages=stages_of(chosen.layout, model),
        prediction=chosen.prediction,
        num_considered=1,
        runs=costs.runs,
        versions=costs.versions,
    )


def _all_ladders(
    layouts: Sequence[Layout], model: AnyModel, seq_len: int, prices: Prices, within: Space
) -> dict[Layout, list[tuple[Layout, ...]]]:
    """Return the ladders of each layout, and say how far this is."""
    tell, found = Reporter(), dict[Layout, list[tuple[Layout, ...]]]()
    for layout in sorted(layouts, key=bound.by_cut):
        found[layout] = [*_ladders(layout, model, seq_len, prices, within)]
        tell("%d of %d layouts have bounds", len(found), len(layouts))
    return found


def _ladders(
    layout: Layout, model: AnyModel, seq_len: int, prices: Prices, within: Space
) -> Iterator[tuple[Layout, ...]]:
    """Yield the ladders of ``layout``: one with equal stages, one with stages balanced by time. A
    ladder is a layout with more and more recomputation, fastest first. Under offload each rung is
    one of its own: what is computed again is not copied, so that any may be the fastest."""
    ladder, other = _ladder(layout, model), tuple[Layout, ...]()
    if layout.pp > 1:
        equal = layout.layers or (model.layers // layout.num_stages,) * layout.num_stages
        dealt = [(rung, balance.counts(model, seq_len, rung, prices)) for rung in ladder]
        other = tuple(unchecked(rung, layers=counts) for rung, counts in dealt if counts != equal)
    for every in (ladder, other):
        if kept := tuple(rung for rung in every if within.has_cut(model, seq_len, rung)):
            yield from zip(kept) if prices.costs.recipe.offload else (kept,)


def _ladder(layout: Layout, model: AnyModel) -> tuple[Layout, ...]:
    """Return ``layout`` with more and more recomputation, fastest first. A split backward has one
    rung: torch would recompute a layer once for each of its weights."""
    if layout.schedule in SPLIT:
        return (layout,)
    half = model.layers // layout.num_stages // 2
    return (
        layout,
        unchecked(layout, recompute="selective"),
        *([unchecked(layout, recompute="full", recompute_layers=half)] if half else []),
        unchecked(layout, recompute="full"),
    )


def _best_first(
    model: AnyModel,
    workload: Workload,
    prices: Prices,
    ladders: Sequence[tuple[Layout, ...]],
    limit: float,
    top: int,
) -> tuple[list[Candidate], Counter[str]]:
    """Return the candidates that fit, fastest first, and the number of layouts passed over for
    each reason."""
    ranked: list[Candidate] = []
    tell = Reporter()
    passed_over, too_large = Counter[str](), f"memory: more than {format_bytes(limit)} a device"
    about = (model, workload.seq_len)
    waiting = [
        (bound.mathematics_s(*about, ladder[0], prices), number, 0, False)
        for number, ladder in enumerate(ladders)
    ]
    heapify(waiting)
    while waiting:
        tell("%d layouts wait, %d are priced", len(waiting), len(ranked))
        least_s, number, rung, sharp = heappop(waiting)
        layout, *rest = ladders[number][rung:]
        if len(ranked) >= top and least_s > ranked[top - 1].prediction.step_time_s:
            others = sum(len(ladders[number]) - rung for _, number, rung, _ in waiting)
            passed_over[f"slower than the {top} fastest, by a lower bound"] = 1 + len(rest) + others
            break
        needed = bound.memory_bytes(*about, layout, prices)
        if needed <= limit and not sharp:
            if missing := _unmeasured(model, workload, layout, prices):
                passed_over[missing] += 1 + len(rest)
                continue
            traffic_s = bound.traffic_s(*about, layout, prices)
            heappush(waiting, (max(least_s, traffic_s), number, rung, True))
            continue
        if needed <= limit:
            needed, most = room.between(model, workload, layout, prices)
            if needed <= limit < most:
                needed = _peak(model, workload, layout, prices)[1].total_bytes
            if needed <= limit:
                prediction = predict(model, workload, layout, prices)
                needed = prediction.peak_memory_bytes  # the bound may be short of it
            if needed <= limit:
                candidate = Candidate(layout=layout, prediction=prediction)
                insort(ranked, candidate, key=lambda c: c.prediction.step_time_s)
                passed_over["recomputation that is not needed to fit"] += len(rest)
                continue
        passed_over[too_large] += 1
        if rest:
            least_s = bound.mathematics_s(*about, rest[0], prices)
            heappush(waiting, (least_s, number, rung + 1, False))
    return ranked, passed_over


def _with_uneven(
    model: AnyModel,
    workload: Workload,
    prices: Prices,
    uniform: list[Candidate],
    num_devices: int,
    within: Space,
) -> list[Candidate]:
    """Add the uneven pipelines that fit and may be faster than the fastest uniform layout. The
    bytes that they were chosen by are a little too few: if one does not fit, choose again for a
    memory that is smaller by what it lacks, among those of its rows, until there is one."""
    limit, lacks = prices.costs.cluster.usable_bytes, dict[inter_op_stages.Rows, float]()
    ranked, known = list(uniform), {each.layout for each in uniform}
    cutoff_s = ranked[0].prediction.step_time_s if ranked else math.inf
    frames = inter_op_stages.frames(model, workload, prices, num_devices, within, cutoff_s)
    tell = Reporter()
    for _ in range(_ROUNDS):
        cutoff_s = ranked[0].prediction.step_time_s if ranked else math.inf
        chosen = inter_op_stages.layouts(frames, limit, lacks, cutoff_s)
        missing = dict[inter_op_stages.Rows, float]()
        for layout in [each for each in chosen if each not in known]:
            tell("%d pipelines of unlike stages are priced", len(known) - len(uniform))
            known.add(layout)
            if within.schedule not in (None, layout.schedule):
                continue
            _, peak = memory_of(model, workload, layout, prices)
            if peak.total_bytes > limit:
                rows = layout.microbatch_size * layout.dp, layout.stages_per_rank
                missing.setdefault(rows, peak.total_bytes - limit)
                continue
            with suppress(ValueError):  # something was not measured
                prediction = predict(model, workload, layout, prices)
                candidate = Candidate(layout=layout, prediction=prediction)
                insort(ranked, candidate, key=lambda c: c.prediction.step_time_s)
        if not missing:
            break
        lacks.update({rows: lacks.get(rows, 0.0) + more for rows, more in missing.items()})
    return ranked


def _refined(
    model: AnyModel, workload: Workload, prices: Prices, kept: list[Candidate], within: Space
) -> list[Candidate]:
    """Return the candidates, some with faster cuts, all with the fastest order of their sums. Cuts
    are looked for where a layout would be the fastest of all without its messages between tp ranks,
    as long as few tables of parts are needed, and not where the space asks for usual ones."""
    limit = prices.costs.cluster.usable_bytes
    best_s, tables = min(each.prediction.step_time_s for each in kept), set[Layout]()
    known, found = {each.layout for each in kept}, list[Candidate]()

    def alone_s(of: Candidate) -> float:
        sent = [part.value for part in of.prediction.time_parts if part.name in MESSAGES]
        return of.prediction.step_time_s - sum(sent)

    for candidate in sorted(kept, key=alone_s):
        cut = {layer.cut_of(view) for view in views(candidate.layout) if view.tp > 1}
        is_free = within.sequence_parallel is None and len(tables | cut) <= _TABLES
        if cut and is_free and alone_s(candidate) < best_s:
            tables |= cut
            with suppress(ValueError):  # something was not measured
                other = intra_op_parts.fastest(model, workload, candidate.layout, prices, limit)
                slowest_s = _FASTER * candidate.prediction.step_time_s
                if other and other.layout not in known and other.prediction.step_time_s < slowest_s:
                    candidate = other
                    known.add(other.layout)
        found.append(candidate)
    return [_in_best_order(model, workload, prices, each, limit) for each in found]


def _plainest_first(kept: Sequence[Candidate]) -> list[Candidate]:
    """Return the candidates, fastest first; those that take as long as the fastest (``_FASTER``)
    before all, without cuts of their own first, then with the fewest axes."""
    best_s = min(each.prediction.step_time_s for each in kept)

    def key(of: Candidate) -> tuple[bool, bool, int, float]:
        layout, time_s = of.layout, of.prediction.step_time_s
        if _FASTER * time_s > best_s:
            return True, False, 0, time_s
        inside = views(layout)
        is_cut = any(view.cuts not in _USUAL for view in inside)
        degrees = [(layout.pp, view.dp, view.tp, view.cp, view.ep) for view in inside]
        axes = sum(max(of_axis) > 1 for of_axis in zip(*degrees, strict=True))
        return False, is_cut, axes, time_s

    return sorted(kept, key=key)


def _in_best_order(
    model: AnyModel, workload: Workload, prices: Prices, best: Candidate, limit: float
) -> Candidate:
    """Return the candidate with the fastest order of its sums over tp that fits."""
    layout = best.layout
    apart = layout.zero or layout.ways or layout.data_ranks == 1
    apart = apart or prices.costs.recipe.weights == "bf16"  # its sums would be in bf16
    orders = ["first"] if apart else ["first", "together"]
    if not any(part.name == SUMS for part in best.prediction.time_parts):
        return best
    for order in orders:
        other = unchecked(layout, tp_sums=order)
        prediction = predict(model, workload, other, prices)
        is_faster = prediction.step_time_s < best.prediction.step_time_s
        if is_faster and prediction.peak_memory_bytes <= limit:
            best = Candidate(layout=other, prediction=prediction)
    return best


def _unmeasured(model: AnyModel, workload: Workload, layout: Layout, prices: Prices) -> str | None:
    """Return the error that names the measurement this pipeline's price lacks, or None."""
    try:
        for op in moved(model, workload, layout, prices.costs).values():
            prices.estimate(op)
    except ValueError as missing:
        return str(missing)
    return None


def _peak(model: AnyModel, workload: Workload, layout: Layout, prices: Prices) -> tuple[int, Peak]:
    among = room.fullest(model, workload, layout, prices)
    return memory_of(model, workload, layout, prices, among=among)


def _nearest(
    model: AnyModel,
    workload: Workload,
    prices: Prices,
    ladders: Sequence[tuple[Layout, ...]],
    limit: float,
) -> Infeasible | None:
    """Return the layout that needs the least memory among those that do not fit, or one that is
    near enough (``_NEAR``): it is looked for first. Layouts wait in order of a lower bound, and
    whichever comes first is looked at more closely: those that differ only in recomputation
    together, each alone, by the sharper bound of ``room``, evaluated."""
    about = (model, workload.seq_len)
    layouts, together = list[Layout](), dict[int, tuple[Layout, ...]]()
    for ladder in ladders:
        for _, alike in groupby(ladder, key=lambda rung: rung.layers):
            together[len(layouts)] = tuple(alike)
            layouts += together[len(layouts)]
    found, tell = _just_beyond(model, workload, prices, layouts, limit), Reporter()
    near = found is not None and found[2].total_bytes < _NEAR[-1][1] * limit
    waiting = [
        (bound.memory_bytes(*about, layout, prices, others), 0, number)
        for number, (layout, *others) in (together.items() if not near else ())
    ]
    heapify(waiting)
    while waiting and (found is None or waiting[0][0] < found[2].total_bytes):
        tell("looking for the layout nearest to fitting: %d wait", len(waiting))
        floor, looks, number = heappop(waiting)
        if looks == 0:
            floors = [bound.memory_bytes(*about, rung, prices) for rung in together[number]]
            hopeless = max(floors) > limit
            if hopeless or not room.all_fit(model, workload, together[number], prices, limit):
                for at, each in enumerate(floors, number):
                    heappush(waiting, (each, 1, at))
            continue
        layout = layouts[number]
        if looks == 1:
            least, most = room.between(model, workload, layout, prices)
            if most > limit:
                heappush(waiting, (max(floor, least), 2, number))
            continue
        rank, peak = _peak(model, workload, layout, prices)
        if limit < peak.total_bytes and (found is None or peak.total_bytes < found[2].total_bytes):
            found = layout, rank, peak
    if found is None:
        return None
    layout, rank, peak = found
    missing, reason = peak.total_bytes - limit, peak.shortfall(rank, limit)
    return Infeasible(layout=layout, missing_bytes=missing, reason=reason)


def _just_beyond(
    model: AnyModel,
    workload: Workload,
    prices: Prices,
    layouts: Sequence[Layout],
    limit: float,
) -> tuple[Layout, int, Peak] | None:
    """Return the nearest of some layouts that do not fit, with its fullest rank and that one's
    peak. Peaks are up to a tenth above their lower bound, so these are looked for below the
    limit, too."""
    found: tuple[Layout, int, Peak] | None = None
    about = (model, workload.seq_len)
    floors = [bound.memory_bytes(*about, layout, prices) / limit for layout in layouts]
    for share, enough in _NEAR:
        pool = nsmallest(100, ((abs(floor - share), at) for at, floor in enumerate(floors)))
        least = [(room.between(model, workload, layouts[at], prices)[0], at) for _, at in pool]
        for _, at in nsmallest(20, (each for each in least if each[0] > limit)):
            rank, peak = _peak(model, workload, layouts[at], prices)
            if found is None or peak.total_bytes < found[2].total_bytes:
                found = layouts[at], rank, peak
            if found[2].total_bytes < enough * limit:
                return found
    return found


def misfit(plan: Plan, costs: Costs, *, measured_only: bool = False) -> str:
    """Say which rank of a plan needs more memory than a device has (``Peak.shortfall``); "" if all
    fit. ``costs``: the prices that the plan was made from."""
    prices, limit = Prices(costs, datasheet=not measured_only), plan.cluster.usable_bytes
    rank, peak = memory_of(plan.model, plan.workload, plan.layout, prices)
    return peak.shortfall(rank, limit) if peak.total_bytes > limit else ""
