"""What a layout takes at least, cheaply: so that ``find`` need not price every one in full.

One layer, the embedding and the head are priced by themselves for each way to cut them (tp,
sequence parallelism, microbatch size, recomputation); stages and ranks are sums of them.

Mathematics: whatever the schedule, a rank does its work on all microbatches after the forwards of
the stages before its first, and before their backwards:

    T >= sum over stages s < p of (F_s + B_s) + microbatches * (F + B of rank p)

without B_s where backward is split, since a W may come last. Traffic, of the first rank: no
schedule hides the root's gather before all else and its reduction behind; nor can all traffic in a
row end sooner than itself.

Memory, of the first rank, which holds most microbatches: parameters, optimizer, the copies that
all actions compute with, and what microbatches in flight have saved. More closely, of every rank:
to these comes how far a stage of one layer rises above what it holds. Layer by layer that changes
in proportion, so that it is most before or after an action.
"""

import math
from collections import Counter, defaultdict
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple

import msgspec
import numpy as np

from meshwise import schedule
from meshwise.models import apply, graph
from meshwise.models.graph import num_bytes
from meshwise.models.placement import is_tied
from meshwise.prices import Prices
from meshwise.schedule import Name
from meshwise.search.predict import images_bytes, in_transit, most_sent
from meshwise.search.simulate import COPIES, ROLES, WAITING, WEIGHTS, Spent
from meshwise.search.stage import StageKind, graph_of, stage_cost, stage_memory
from meshwise.spec import (
    DTYPE_BYTES,
    AnyModel,
    Collective,
    Cuts,
    LayerKind,
    Layout,
    Workload,
    layer_kinds,
)
from meshwise.spec.layout import SPLIT, V_SHAPED, Recompute, rank_of

_ROUNDING = 32  # bytes a layer: shards are rounded up


class Work(NamedTuple):
    """Of some layers and one microbatch: seconds; bytes kept from forward to backward; bytes of
    float32 parameters and of the copies that are computed with."""

    forward_s: float = 0.0
    backward_s: float = 0.0
    saved_bytes: float = 0.0
    parameter_bytes: float = 0.0
    copy_bytes: float = 0.0

    @property
    def both_s(self) -> float:
        return self.forward_s + self.backward_s

    def plus(self, other: "Work", times: int = 1) -> "Work":
        return Work(*[mine + times * more for mine, more in zip(self, other, strict=True)])


class Holding(NamedTuple):
    """Bytes of a stage: what lasts through the step; of one microbatch from forward to backward, at
    most and at least, and at most of one layer with the stage's ends; gradients; what an action
    adds at most, and a backward at least."""

    lasting: float
    held: float
    held_least: float
    single: float
    gradients: float
    action: float
    backward: float


class Of(NamedTuple):
    """A layer: its kind, and what backward computes again of it."""

    kind: LayerKind
    word: Recompute


State = tuple[int, ...]
End = tuple[tuple[LayerKind, ...], bool, bool]  # a stage: its layers, whether first, whether last
Again = tuple[Recompute, int | None]  # what backward computes again, in how many layers


class Sharing(NamedTuple):
    """What of a layout, besides its cut, decides what a stage holds."""

    zero: int
    shards: int
    adds_up: bool  # gradients before they are reduced
    alone: bool  # one device
    split: bool


class Ranks(NamedTuple):
    """``first``: the first rank's work with its ends, and in each respect the ``least`` of one of
    its stages without them. ``times``: pairs of seconds before and after the work of a rank, and of
    its work for a microbatch; none of which another exceeds in both."""

    first: Work
    least: Work
    times: tuple[tuple[float, float], ...]


def mathematics_s(model: AnyModel, seq_len: int, layout: Layout, prices: Prices) -> float:
    """No prediction of ``layout`` is shorter."""
    ranks, count = _ranks(model, seq_len, layout, prices), layout.num_microbatches
    return max([around_s + count * both_s for around_s, both_s in ranks.times])


def traffic_s(model: AnyModel, seq_len: int, layout: Layout, prices: Prices) -> float:
    """No prediction of ``layout`` is shorter either."""
    inside = msgspec.structs.replace(layout.of_rank(0), num_microbatches=1)
    stages = _stages(model, seq_len, layout.num_stages, layout.layers)
    mine = [
        kind
        for stage, (kinds, _, _) in enumerate(stages)
        if rank_of(layout.schedule, stage, layout.pp) == 0
        for kind in kinds
    ]
    gathers_s = reductions_s = 0.0
    for kind, number in Counter(mine).items():
        gather_s, reduce_s, root_gather_s, root_reduce_s = _traffic(
            model, seq_len, kind, inside, layout.pp == 1, prices
        )
        gathers_s, reductions_s = gathers_s + number * gather_s, reductions_s + number * reduce_s
    gathers_s, reductions_s = gathers_s + root_gather_s, reductions_s + root_reduce_s
    count = layout.num_microbatches
    first, alone = _ranks(model, seq_len, layout, prices).first, layout.stages_per_rank == 1
    exposed_s = root_gather_s + count * first.both_s
    if layout.schedule not in SPLIT:
        exposed_s += root_reduce_s
    if layout.zero == 3:
        in_a_row_s = count * (gathers_s + reductions_s)
    elif layout.zero == 2:
        in_a_row_s = count * reductions_s + (first.forward_s if alone else 0.0)
    else:  # reductions begin in the last backward
        backwards_s = (count - 1) * first.backward_s if alone else 0.0
        in_a_row_s = count * first.forward_s + backwards_s + reductions_s
    return max(exposed_s, in_a_row_s)


def memory_bytes(model: AnyModel, seq_len: int, layout: Layout, prices: Prices) -> float:
    """No prediction of ``layout`` needs less."""
    ranks = _ranks(model, seq_len, layout, prices)
    state = 3 * ranks.first.parameter_bytes / layout.shards
    copies = ranks.first.copy_bytes if layout.zero < 3 else 0.0
    whole = layout.zero < 2 and layout.num_microbatches > 1  # added up before they are reduced
    gradients = ranks.least.parameter_bytes / (1 if whole else layout.shards)
    moments = _moments(layout.schedule, layout.pp, layout.stages_per_rank, layout.num_microbatches)
    held = max(alive * ranks.least.saved_bytes + reduced * gradients for alive, reduced in moments)
    return state + copies + held + prices.costs.memory_overhead_bytes


def memory_between(
    model: AnyModel, workload: Workload, layout: Layout, prices: Prices
) -> tuple[float, float]:
    """No prediction of ``layout`` needs less than the first, and none more than the second."""
    sharing = Sharing(
        zero=layout.zero,
        shards=layout.shards,
        adds_up=layout.zero < 2 and layout.num_microbatches > 1,
        alone=layout.num_devices == layout.pp,
        split=layout.schedule in SPLIT,
    )
    again = (layout.recompute, layout.recompute_layers)
    about = (model, workload.seq_len, cut_of(layout), again, sharing)
    moving, exchanged = in_transit(model, workload, layout, prices.costs)
    lows, highs = [0.0], [0.0]
    for ends, states, early in _states(
        layout.schedule,
        layout.pp,
        layout.stages_per_rank,
        layout.num_microbatches,
        _stages(model, workload.seq_len, layout.num_stages, layout.layers),
    ):
        of = np.asarray([_holding(*about, *end, prices) for end in ends])
        lasting, held, held_least, single, gradients, action, backward = of.T
        during = (states @ np.concatenate([held, single, gradients, action])).max()
        highs.append(lasting.sum() + max(during, gradients.sum() + exchanged))
        if layout.schedule not in SPLIT:
            during = (early @ np.concatenate([held_least, single, gradients, backward])).max()
            lows.append(lasting.sum() + during - 3 * _ROUNDING * model.layers)
    overhead = prices.costs.memory_overhead_bytes + images_bytes(model, workload, layout)
    most = (most_sent(layout, prices.costs) + 1) * moving
    return max(lows) + overhead, max(highs) + most + overhead


@lru_cache(maxsize=65536)
def _holding(
    model: AnyModel,
    seq_len: int,
    cut: Layout,
    again: Again,
    sharing: Sharing,
    kinds: tuple[LayerKind, ...],
    first: bool,
    last: bool,
    prices: Prices,
) -> Holding:
    """Of a stage of layers of these kinds, with the model's first layer or last. FSDP2 gathers one
    unit ahead of its use."""
    zero, shards, adds_up, alone, split = sharing
    dtype, layers = prices.costs.dtype, _layers(kinds, again)

    def some(of: tuple[Of, ...], first: bool, last: bool) -> tuple[float, ...]:
        """Parameters of these layers with these ends, what they hold, and what actions add to
        that: at most, and in the backward no less."""
        kinds, words = zip(*of, strict=True)
        stage = StageKind(model, seq_len, kinds, first, last, words, cut, split)
        cost = stage_memory(stage, prices)
        live = {kind: of[0][1] for kind, of in cost.actions.items()}
        copies = live["F"].left.get(WEIGHTS, 0.0)
        left = {
            kind: sum(of.left.values()) - of.left.get(WEIGHTS, 0.0) for kind, of in live.items()
        }
        held = left["F"] + max(0.0, left.get("I", 0.0))  # I leaves what W needs
        rises = [sum(of.rise.values()) - held * (kind == "F") for kind, of in live.items()]
        least = live["I" if split else "B"].rise.get(ROLES["activation"], 0.0)
        return cost.resident["parameters"], held, max(rises) - copies, max(0.0, least)

    def weights(first: bool, last: bool, *kinds: LayerKind) -> np.ndarray:
        over = (cut.tp, cut.ep, cut.cuts, shards if zero else 0)
        return _weights(model, kinds, first, last, *over)

    whole = {of: some((of,), first, last) for of in set(layers)}
    single = {of: some((of,), False, False) for of in set(layers)}
    pairs = {two: some(two, False, False)[1] for two in {*pairwise(layers), (layers[0],) * 2}}
    start, *others = layers
    parameters = whole[start][0] + sum(single[of][0] for of in others)
    here, gathered = weights(first, last, *kinds)
    widest = max(weights(False, False, kind)[1] for kind in set(kinds))
    root = (weights(first, last, kinds[0]) - weights(False, False, kinds[0]))[1]
    copied = DTYPE_BYTES[dtype] / 4 * (not alone or dtype != "fp32")
    copies = gathered if zero < 3 else root  # the root's stay until the backward
    added = 0 if zero < 3 else gathered if split else widest
    unit = max(widest, root)
    bare = dtype == "fp32" and cut.num_devices == 1  # it needs no copies: to reduce
    rounding = _ROUNDING * len(layers)
    further = {two: held - single[two[0]][1] for two, held in pairs.items()}
    held = whole[start][1] + sum(further[two] for two in pairwise(layers))
    # the first microbatch has its input in full, the others as much as is saved of it
    unsaved = further[start, start] - single[start][1]
    return Holding(
        lasting=3 * here + copied * copies + rounding,
        held=held + max(0.0, unsaved),
        held_least=held + min(0.0, unsaved),
        single=max(of[1] for of in whole.values()),
        gradients=(parameters if adds_up else here) + rounding,
        action=max(of[2] for of in whole.values())
        + copied * (added + (unit if zero else 0))
        + unit  # what the unit before it reduced
        + bare * unit
        + adds_up * DTYPE_BYTES[dtype] / 4 * parameters,  # gradients that wait for the others
        backward=some(layers[-1:], False, last)[3],  # its first layer has all others' beside it
    )


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
) -> np.ndarray:
    """Bytes of a stage's float32 parameters on one rank, and of those that it gathers to compute
    with, padded as FSDP2 pads them; of 0 shards each rank has its own."""
    if len(kinds) > 1:
        found = _weights(model, kinds[:1], first, last, tp, ep, cuts, shards)
        for kind, count in Counter(kinds[1:]).items():
            found = found + count * _weights(model, (kind,), False, False, tp, ep, cuts, shards)
        return found
    one = graph(model, 1, 1, "fp32", layers=kinds, first=first, last=last)
    layout = Layout(dp=shards or ep, tp=tp, ep=ep, zero=3 if shards > 1 else 0, cuts=cuts)
    program = apply(one, layout, "fp32")
    return np.asarray([program.resident_bytes["parameters"], 4 * program.gathered])


@lru_cache(maxsize=4096)
def _stages(model: AnyModel, seq_len: int, count: int, layers: tuple[int, ...]) -> tuple[End, ...]:
    """Each of so many stages, of equal size or with these ``layers``."""
    ends = [*accumulate(layers or (model.layers // count,) * count, initial=0)]
    kinds = layer_kinds(model, seq_len)
    return tuple(
        (kinds[start:stop], start == 0, stop == model.layers) for start, stop in pairwise(ends)
    )


@lru_cache(maxsize=4096)
def _states(
    name: Name, pp: int, stages_per_rank: int, num_microbatches: int, every: tuple[End, ...]
) -> tuple[tuple[tuple[End, ...], np.ndarray, np.ndarray], ...]:
    """Of ranks whose stages are alike, of ``every`` stage, before and after each action, of each of
    these stages: its microbatches alive, whether one layer more is, whether it has gradients,
    whether it acts. Then those before backwards up to the first of the last microbatch, after which
    gradients shrink."""
    some = num_microbatches if name == "looped_bfs" else min(num_microbatches, 4 * pp)
    found: dict[tuple[End, ...], tuple[set[State], set[State]]] = {}
    nothing, ones = (0,) * stages_per_rank, np.eye(stages_per_rank, dtype=int).tolist()
    for rank, row in enumerate(schedule.table(name, pp, stages_per_rank, some)):
        stages = [s for s in range(len(every)) if rank_of(name, s, pp) == rank]
        ends = tuple(every[stage] for stage in stages)
        states, early = found.setdefault(ends, (set(), set()))
        alive, reduced, over = list(nothing), list(nothing), False
        for kind, stage, microbatch in row:
            at = stages.index(stage)
            alive[at] += kind == "F"
            states.add(state := (*alive, *nothing, *reduced, *ones[at]))
            if kind != "F" and not over:
                early.add(state)
                over = microbatch == some - 1
            if kind in "BW":
                alive[at] -= 1
                reduced[at] = 1
                states.add((*alive, *ones[at], *reduced, *ones[at]))
    return tuple(
        (ends, np.asarray([*states]), np.asarray([*early]))
        for ends, (states, early) in found.items()
    )


def _layers(kinds: tuple[LayerKind, ...], again: Again) -> tuple[Of, ...]:
    """A stage's layers; what is recomputed as ``Layout.recomputed`` has it."""
    word, some = again
    count = min(len(kinds), some or len(kinds))
    return tuple(Of(kind, word if layer < count else "none") for layer, kind in enumerate(kinds))


@lru_cache(maxsize=4096)
def _cut(
    tp: int, cp: int, sequence_parallel: bool, microbatch_size: int, ep: int, cuts: Cuts
) -> Layout:
    """A device, or its tp group, and one microbatch; as many of these as share its sequences, and
    as hold all experts."""
    return Layout(
        dp=ep // math.gcd(ep, cp),
        cp=cp,
        ep=ep,
        tp=tp,
        sequence_parallel=sequence_parallel,
        cuts=cuts,
        microbatch_size=microbatch_size,
    )


def cut_of(layout: Layout) -> Layout:
    """Keep what the work of a layer depends on."""
    shape = (layout.tp, layout.cp, layout.sequence_parallel, layout.microbatch_size, layout.ep)
    return _cut(*shape, layout.cuts)


def _ranks(model: AnyModel, seq_len: int, layout: Layout, prices: Prices) -> Ranks:
    stages = _stages(model, seq_len, layout.num_stages, layout.layers)
    kind = (layout.pp, layout.schedule in V_SHAPED, layout.schedule in SPLIT)
    again = (layout.recompute, layout.recompute_layers)
    return _ranks_of(model, seq_len, cut_of(layout), stages, kind, again, prices)


@lru_cache(maxsize=65536)
def _ranks_of(
    model: AnyModel,
    seq_len: int,
    cut: Layout,
    stages: tuple[End, ...],
    kind: tuple[int, bool, bool],
    again: Again,
    prices: Prices,
) -> Ranks:
    """Add up the work of each rank; ``kind``: ranks, whether in a V, whether backward is split."""
    pp, v_shaped, split = kind
    schedule: Name = "zbv" if v_shaped else "1f1b"  # any in a V, or in loops
    about = (model, seq_len, cut, prices)
    bare, whole = dict[End, Work](), dict[End, Work]()
    for end in {*stages}:
        kinds, first, last = end
        work = Work()
        for of, number in Counter(_layers(kinds, again)).items():
            work = work.plus(layer_work(*about, of), number)
        bare[end] = work
        if first and last and is_tied(model):  # both ends hold one weight
            work = work.plus(end_work(*about, kinds[0], first=True, last=True))
        else:
            work = work.plus(end_work(*about, kinds[0], first=True)) if first else work
            work = work.plus(end_work(*about, kinds[-1], last=True)) if last else work
        whole[end] = work
    ranks = [Work()] * pp
    for stage, end in enumerate(stages):
        rank = rank_of(schedule, stage, pp)
        ranks[rank] = ranks[rank].plus(whole[end])
    around_s, times = 0.0, list[tuple[float, float]]()
    for rank, work in enumerate(ranks):
        times = [time for time in times if time[1] > work.both_s]  # what comes later begins later
        times.append((around_s, work.both_s))
        around_s += whole[stages[rank]].forward_s if split else whole[stages[rank]].both_s
    mine = {end for stage, end in enumerate(stages) if rank_of(schedule, stage, pp) == 0}
    least = Work(*map(min, zip(*[bare[end] for end in mine], strict=True)))
    return Ranks(ranks[0], least, tuple(times))


def layer_work(
    model: AnyModel,
    seq_len: int,
    cut: Layout,
    prices: Prices,
    of: Of,
    first: bool = False,
    last: bool = False,
) -> Work:
    """The work of one layer, with these ends of the model."""
    kind, word = of
    return _work(StageKind(model, seq_len, (kind,), first, last, (word,), cut, False), prices)


def end_work(
    model: AnyModel,
    seq_len: int,
    cut: Layout,
    prices: Prices,
    kind: LayerKind,
    *,
    first: bool = False,
    last: bool = False,
) -> Work:
    """The work of the embedding, of the head, or of both, beside a layer of this kind."""
    about, of = (model, seq_len, cut, prices), Of(kind, "none")
    return layer_work(*about, of, first, last).plus(layer_work(*about, of), -1)


@lru_cache(maxsize=4096)
def _work(kind: StageKind, prices: Prices) -> Work:
    """Price a stage of one layer, on one device or its tp group, without data parallelism. A result
    that it keeps is the next layer's input; that alone counts it as it arrived and as a copy."""
    cost = stage_cost(kind, prices)
    (forward, kept), (backward, _) = cost.actions["F"][0], cost.actions["B"][0]
    whole = graph_of(kind, prices.costs)
    *_, result = (node.outputs[0] for node in whole.nodes if node.phase == "forward")
    is_kept = any(result in node.inputs for node in whole.nodes if node.phase != "forward")
    passed_on = 2 * num_bytes(whole.tensors[result], whole.sizes) if is_kept else 0

    def own_s(spent: Spent) -> float:
        return spent.time_s - spent.parts.get(COPIES, 0.0) - spent.parts.get(WAITING, 0.0)

    return Work(
        forward_s=own_s(forward),
        backward_s=own_s(backward),
        saved_bytes=sum(kept.left.values()) - kept.left.get(WEIGHTS, 0.0) - passed_on,
        parameter_bytes=cost.resident["parameters"],
        copy_bytes=kept.left.get(WEIGHTS, 0.0),
    )


@lru_cache(maxsize=4096)
def _traffic(
    model: AnyModel, seq_len: int, kind: LayerKind, inside: Layout, last: bool, prices: Prices
) -> tuple[float, float, float, float]:
    """Seconds of a layer's gathers and reductions for one microbatch, then of the root's."""
    stage = StageKind(model, seq_len, (kind,), True, last, (), inside, False)
    seconds: dict[tuple[bool, bool], float] = defaultdict(float)
    for task in apply(graph_of(stage, prices.costs), inside, prices.costs.dtype).tasks:
        if task.stream == "dp":
            assert isinstance(task.op, Collective)
            place = task.name.startswith("root."), task.op.kind != "all_gather"
            seconds[place] += prices.estimate(task.op).time_s
    return (
        seconds[False, False], seconds[False, True], seconds[True, False], seconds[True, True],
    )  # fmt: skip


@lru_cache(maxsize=4096)
def _moments(
    name: Name, pp: int, stages_per_rank: int, num_microbatches: int
) -> frozenset[tuple[int, int]]:
    """On the first rank, after a forward: how many of its stages' microbatches are alive at most
    where so many of its stages have gradients. More microbatches repeat what some show."""
    some = num_microbatches if name == "looped_bfs" else min(num_microbatches, 4 * pp)
    alive, reduced, found = 0, set[int](), dict[int, int]()
    for kind, stage, _ in schedule.table(name, pp, stages_per_rank, some)[0]:
        alive += {"F": 1, "B": -1, "I": -1, "W": 0}[kind]  # I may free part, so count none
        if kind in "BW":
            reduced.add(stage)
        elif kind == "F":
            found[len(reduced)] = max(alive, found.get(len(reduced), 0))
    return frozenset((most, count) for count, most in found.items())
