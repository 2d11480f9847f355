"""Bound a layout's memory from below and above, so that ``find`` evaluates few in full.

A stage's peak is the sum of three: bytes that last through the step, bytes that the microbatches in
flight hold, and one layer's peak above what it holds. Memory changes by equal steps from layer to
layer, so the peak is before or after an action. The bytes of a stage without data parallelism and
those that data parallelism adds are cached separately, because many layouts share few stages.
"""

import math
from collections import Counter
from functools import lru_cache
from itertools import pairwise, zip_longest
from typing import NamedTuple

import numpy as np

from meshwise import schedule
from meshwise.models import graph, program_of
from meshwise.prices import Prices
from meshwise.schedule import Name
from meshwise.search.bound import Again, End, again_of, layers_of, stages_of
from meshwise.search.layer import cut_of, some_bytes
from meshwise.search.predict import images_bytes, in_transit, most_sent
from meshwise.search.stage import Layer, StageKind, layers_ahead
from meshwise.spec import (
    DTYPE_BYTES,
    AnyModel,
    Costs,
    Cuts,
    LayerKind,
    Layout,
    Recipe,
    Workload,
)
from meshwise.spec.layout import SPLIT, Recompute, rank_of

_ROUNDING = 32  # bytes a layer: shards are rounded up
State = tuple[int, ...]


class Activity(NamedTuple):
    """Bytes of a stage without data parallelism. ``parameters``: as they are kept. ``held``,
    ``held_least``: the most and the least that a microbatch holds from forward to backward;
    ``single``: the same for one layer with the stage's ends. ``action``: the most that an action
    adds. ``backward``: the least that a backward adds. ``second``: the least that its second layer
    adds once the first is freed; minus infinity with one layer."""

    parameters: float
    held: float
    held_least: float
    single: float
    action: float
    backward: float
    second: float


def between(
    model: AnyModel, workload: Workload, layout: Layout, prices: Prices
) -> tuple[float, float]:
    """Return a lower and an upper bound of the layout's peak memory."""
    _, lows, highs = zip(*_of_ranks(model, workload, (layout,), prices), strict=True)
    return max(lows), max(highs)


def fullest(model: AnyModel, workload: Workload, layout: Layout, prices: Prices) -> set[int]:
    """Return the pipeline ranks that may have the largest peak."""
    of_ranks = _of_ranks(model, workload, (layout,), prices)
    least = max(low for _, low, _ in of_ranks)
    return {rank for ranks, _, high in of_ranks if high >= least for rank in ranks}


def all_fit(
    model: AnyModel, workload: Workload, ladder: tuple[Layout, ...], prices: Prices, limit: float
) -> bool:
    """Return whether all layouts of a ladder fit by the upper bound. They differ only in
    recomputation; the bound takes the largest of each quantity over all of them."""
    return max(high for _, _, high in _of_ranks(model, workload, ladder, prices)) <= limit


def of_stage(
    model: AnyModel, seq_len: int, inside: Layout, end: End, word: Recompute, prices: Prices
) -> tuple[float, float]:
    """Return the bytes that a stage needs at least in 1F1B: at any time, and besides for each
    microbatch in flight. ``word``: what its backward recomputes in all layers."""
    active = _activity(model, seq_len, cut_of(inside), (word, None), False, end, prices)
    of = _holding(model, inside, end, active, prices.costs)
    lasting, gradients, *_, held, backward, waits = of
    return lasting + gradients + max(backward, waits - held), held


@lru_cache(maxsize=4096)
def _of_ranks(
    model: AnyModel, workload: Workload, ladder: tuple[Layout, ...], prices: Prices
) -> list[tuple[tuple[int, ...], float, float]]:
    """Return groups of ranks with the same stages, each with a lower and an upper bound. If the
    ladder has several rungs, only the upper bound holds."""
    layout, seq_len, cut = ladder[0], workload.seq_len, cut_of(ladder[0])
    words = [again_of(rung) for rung in ladder]
    split = layout.schedule in SPLIT
    moving, exchanged = in_transit(model, workload, layout, prices.costs)
    overhead = prices.costs.memory_overhead_bytes + images_bytes(model, workload, layout)
    most = (most_sent(layout, prices.costs) + 1) * moving
    stages = stages_of(model, seq_len, layout.num_stages, layout.layers)
    some = schedule.enough(layout.schedule, layout.pp, layout.num_microbatches)
    found = []
    for ends, ranks in _alike(layout.schedule, layout.pp, stages):
        states, early = _states(layout.schedule, layout.pp, layout.stages_per_rank, some, ranks)
        of = []
        for end in ends:
            each = [_activity(model, seq_len, cut, word, split, end, prices) for word in words]
            most_active = (
                each[0] if len(each) == 1 else Activity(*map(max, zip(*each, strict=True)))
            )
            of.append(_holding(model, layout, end, most_active, prices.costs))
        lasting, gradients, scratch, held, single, action, waits, *least = np.asarray(of).T
        lasts, low = lasting.sum(), 0.0
        during = (states @ np.concatenate([gradients, held, single, action, waits])).max()
        high = lasts + max(during, gradients.sum() + max(exchanged, scratch.sum()))
        if not split:
            during = (early @ np.concatenate([gradients, *least])).max()
            low = lasts + during - 3 * _ROUNDING * model.layers
        found.append((ranks, max(low, 0.0) + overhead, high + most + overhead))
    return found


def _holding(
    model: AnyModel, layout: Layout, end: End, of: Activity, costs: Costs
) -> tuple[float, ...]:
    """Return the bytes of a stage: lasting through the step, gradients, what the optimizer
    allocates at most, then the terms of the upper
    and of the lower bound. Upper: held per microbatch, held by one layer, added by an action,
    gradients that wait for the end of a backward. Lower: held per microbatch, added by a backward,
    gradients that wait. FSDP2 gathers one unit ahead of its use."""
    shards = layout.shards if layout.zero else 0
    recipe = costs.recipe
    plain = Recipe(optimizer=recipe.optimizer)  # in float32
    of_units = _units(model, end, layout.tp, layout.ep, layout.cuts, shards, plain)
    dtypes = (costs.dtype, recipe.weights, recipe.reduce)
    computed, kept, reduced = [DTYPE_BYTES[dtype] for dtype in dtypes]
    here, gathered, states, widest, least, root = [kept / 4 * size for size in of_units]
    adds_up = layout.zero < 2 and layout.num_microbatches > 1  # before they are reduced
    wide, narrow, sums = computed / kept, costs.dtype != "fp32", reduced / kept
    copied = wide if narrow or layout.num_devices > layout.pp else 0.0
    bare = not narrow and layout.tp * layout.cp * layout.ep == 1  # ``of`` has no copies to reduce
    # ZeRO-3: this unit's and, while a layer is computed again, the next one's
    added = 0.0 if layout.zero < 3 else gathered if layout.schedule in SPLIT else 2 * widest
    unit, rounding = max(widest, root), _ROUNDING * len(end.kinds)
    sent = unit * (sums + (reduced != kept))  # and what was reduced in another dtype
    waits = adds_up * wide * of.parameters
    even = len(set(end.kinds)) == 1  # all layers hold as much, and as many gradients wait
    backward = of.backward
    if layout.zero == 3 and layout.expert_ranks == 1:  # gathered, being gathered, reduced
        ahead, count = copied * least, len(end.kinds)
        first, second = 1 + (count > 1 and not end.last), 1 + (count > 2)
        backward = max(backward + first * ahead, of.second + sums * least + second * ahead)
    return (
        # the root's copies stay until the backward
        here + states + copied * (gathered if layout.zero < 3 else root) + rounding,
        (sums * of.parameters if adds_up else here) + rounding,
        {"adamw": 0.0, "sgd": here, "adafactor": 3 * unit}[recipe.optimizer],
        of.held,
        of.single,
        of.action
        + copied * (added + (unit if layout.zero else 0))
        + sent  # the previous unit's reduced gradients
        + bare * unit
        + (0.0 if even else waits),
        waits if even else 0.0,
        of.held_least,
        backward,
        waits if computed != reduced and layout.expert_ranks == 1 else 0.0,
    )


@lru_cache(maxsize=65536)
def _activity(
    model: AnyModel, seq_len: int, cut: Layout, again: Again, split: bool, end: End, prices: Prices
) -> Activity:
    layers = layers_of(end.kinds, again)

    def some(of: tuple[Layer, ...], first: bool, last: bool) -> tuple[float, ...]:
        kinds, words = zip(*of, strict=True)
        return some_bytes(
            StageKind(model, seq_len, kinds, first, last, words, cut, split, hooked=False), prices
        )

    whole = {of: some((of,), end.first, end.last) for of in set(layers)}
    single = {of: some((of,), False, False) for of in set(layers)}
    start, *others = layers
    count = layers_ahead(prices)
    pairs = {
        two: some((two[0],) * count + two[1:], False, False)
        for two in {*pairwise(layers), (start, start)}
    }
    further = {two: of[1] - some(two[:1] * count, False, False)[1] for two, of in pairs.items()}
    held = whole[start][1] + sum(further[two] for two in pairwise(layers))
    # the first microbatch holds its input whole, the others only the part that is saved
    unsaved = further[start, start] - single[start][1]
    more, less = max(0.0, unsaved), min(0.0, unsaved)
    if prices.costs.recipe.offload:  # a stage may keep its first layer's input, or move it
        more = some(((start[0], "full"),), False, False)[1]
        less = -more
    most_single = max(of[1] for of in whole.values())
    return Activity(
        parameters=whole[start][0] + sum(single[of][0] for of in others),
        held=held + more,
        held_least=held + less,
        single=most_single,
        action=max(of[2] for of in (*whole.values(), *pairs.values())),
        backward=some(layers[-1:], False, end.last)[3],  # its first layer: all others' are held
        second=single[layers[-2]][3] - most_single if others else -math.inf,
    )


@lru_cache(maxsize=4096)
def _units(
    model: AnyModel, end: End, tp: int, ep: int, cuts: Cuts, shards: int, recipe: Recipe
) -> tuple[float, ...]:
    """Return the bytes of a stage's float32 parameters that one rank keeps, of all those that it
    gathers, and of its optimizer's states; then what it gathers of the largest layer, the smallest
    layer, and the root."""

    def weights(first: bool, last: bool, *kinds: LayerKind) -> np.ndarray:
        return _weights(model, kinds, first, last, tp, ep, cuts, shards, recipe)

    here, gathered, states = weights(end.first, end.last, *end.kinds).tolist()
    layers = [float(weights(False, False, kind)[1]) for kind in set(end.kinds)]
    one = end.kinds[0]
    root = float((weights(end.first, end.last, one) - weights(False, False, one))[1])
    return here, gathered, states, max(layers), min(layers), root


@lru_cache(maxsize=4096)
def _weights(
    model: AnyModel,
    kinds: tuple[LayerKind, ...],
    first: bool,
    last: bool,
    tp: int,
    ep: int,
    cuts: Cuts,
    shards: int,
    recipe: Recipe,
) -> np.ndarray:
    """Return the bytes of a stage's float32 parameters that one rank keeps and that it gathers,
    padded as FSDP2 pads them, and those of its optimizer's states. With 0 shards nothing is
    sharded."""
    of = (tp, ep, cuts, shards, recipe)
    if len(kinds) > 1:
        found = _weights(model, kinds[:1], first, last, *of)
        for kind, count in Counter(kinds[1:]).items():
            found = found + count * _weights(model, (kind,), False, False, *of)
        return found
    one = graph(model, 1, 1, "fp32", layers=kinds, first=first, last=last)
    layout = Layout(dp=shards or ep, tp=tp, ep=ep, zero=3 if shards > 1 else 0, cuts=cuts)
    program = program_of(one, layout, "fp32", recipe=recipe)
    resident = program.resident_bytes
    here, states = resident["parameters"], resident["optimizer state"]
    return np.asarray([here, 4 * program.gathered, states])


@lru_cache(maxsize=4096)
def _alike(
    name: Name, pp: int, stages: tuple[End, ...]
) -> tuple[tuple[tuple[End, ...], tuple[int, ...]], ...]:
    """Return the distinct lists of stages that ranks hold, and the ranks that hold each."""
    found: dict[tuple[End, ...], tuple[int, ...]] = {}
    for rank in range(pp):
        ends = tuple(end for stage, end in enumerate(stages) if rank_of(name, stage, pp) == rank)
        found[ends] = (*found.get(ends, ()), rank)
    return tuple(found.items())


@lru_cache(maxsize=4096)
def _states(
    name: Name, pp: int, stages_per_rank: int, num_microbatches: int, ranks: tuple[int, ...]
) -> tuple[np.ndarray, np.ndarray]:
    """Return the states of these ranks before and after each action, one row per state. Columns per
    stage: has gradients, microbatches alive, one more layer alive, acts now, gradients of one
    microbatch wait for the end of its backward. The second array, for the lower bound, lacks the
    column for the layer. It holds the states before backwards, up to the last microbatch's first
    one, since gradients shrink after it, and after backwards between first and last microbatch."""
    states, early = set[State](), set[State]()
    nothing, ones = (0,) * stages_per_rank, np.eye(stages_per_rank, dtype=int).tolist()
    for rank in ranks:
        place = {s: at for at, s in enumerate(schedule.stages_of(name, rank, pp, stages_per_rank))}
        alive, reduced, over, repeats = list(nothing), list(nothing), False, 0
        row = schedule.row(name, pp, rank, stages_per_rank, num_microbatches)
        for action, behind in zip_longest(row, row[1:]):
            kind, stage, microbatch = action
            at, ends = place[stage], behind is None or behind[:2] != action[:2]
            alive[at] += kind == "F"
            # in a run of equal actions the last forward or the second backward has the peak
            shown = ends if kind == "F" else repeats < 2
            repeats = 0 if ends else repeats + 1
            if shown:
                states.add((*reduced, *alive, *nothing, *ones[at], *nothing))
            if kind != "F" and not over:
                if shown:
                    early.add((*reduced, *alive, *ones[at], *nothing))
                over = microbatch == num_microbatches - 1
            if kind in "BW":
                alive[at] -= 1
                reduced[at] = 1
                if shown:
                    states.add((*reduced, *alive, *ones[at], *ones[at], *ones[at]))
                if shown and microbatch > 0 and not over:
                    early.add((*reduced, *alive, *nothing, *ones[at]))
    return np.asarray([*states]), np.asarray([*early])
