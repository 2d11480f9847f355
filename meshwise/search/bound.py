"""Bound a layout's step time and memory from below, cheaply, so that ``find`` prices few in full.

One layer, the embedding and the head are priced alone for each way to cut them (tp, sequence
parallelism, microbatch size, recomputation). Stages and ranks are sums of these.

Compute: under any schedule a rank works on all microbatches. It starts after the forwards of the
stages before its first stage, and ends before their backwards:

    T >= sum over stages s < p of (F_s + B_s) + microbatches * (F + B of rank p)

With a split backward B_s is dropped, since a W may come last. Data parallelism adds the copies that
its messages need. Queued messages take at least the sum of their times, and slow down the work
beside them, unless they pass before or after the rank's work.

Memory of the first rank, which holds the most microbatches: parameters, optimizer state, gathered
copies, and the saved tensors of the microbatches in flight. ``room`` gives a closer bound.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from msgspec.structs import astuple

from meshwise import schedule
from meshwise.models import ENTRY, program_of
from meshwise.models.graph import num_bytes
from meshwise.models.optimizer import WHOLE_STATES
from meshwise.models.placement import is_tied
from meshwise.prices import Prices
from meshwise.prices.datasheet import Beside
from meshwise.schedule import Name
from meshwise.search.charges import (
    MESSAGES,
    NO_HOOKS,
    beside_of,
    copies_take,
    corrections,
    spent_on,
)
from meshwise.search.simulate import (
    COPIES,
    ROLES,
    SLOWED,
    SUMS,
    TO_HOST,
    WAITING,
    WEIGHTS,
    Live,
    Spent,
)
from meshwise.search.space import unchecked
from meshwise.search.stage import (
    Layer,
    StageKind,
    blocks_in,
    graph_of,
    layers_ahead,
    pieces_of,
    priced,
    stage_cost,
    stage_memory,
)
from meshwise.spec import AnyModel, Cuts, LayerKind, Layout, WideResNet, layer_kinds
from meshwise.spec.layout import SPLIT, V_SHAPED, Recompute, rank_of
from meshwise.spec.record import Record


class LayerWork(NamedTuple):
    """The work of some layers on one microbatch: seconds (``messages_s`` of them in messages
    between tp ranks or to experts), bytes saved for the backward, bytes of parameters, and
    bytes of the copies that compute reads."""

    forward_s: float = 0.0
    backward_s: float = 0.0
    messages_s: float = 0.0
    saved_bytes: float = 0.0
    parameter_bytes: float = 0.0
    copy_bytes: float = 0.0

    @property
    def both_s(self) -> float:
        return self.forward_s + self.backward_s

    def plus(self, other: "LayerWork", times: int = 1) -> "LayerWork":
        forward_s, backward_s, messages_s, saved, parameters, copies = other
        return LayerWork(
            self.forward_s + times * forward_s,
            self.backward_s + times * backward_s,
            self.messages_s + times * messages_s,
            self.saved_bytes + times * saved,
            self.parameter_bytes + times * parameters,
            self.copy_bytes + times * copies,
        )


class DataTraffic(NamedTuple):
    """Seconds of data parallelism in a step: of its messages, and of the copies on the compute
    stream that these need."""

    messages_s: float = 0.0
    copies_s: float = 0.0

    def plus(self, other: "DataTraffic", times: int = 1) -> "DataTraffic":
        return DataTraffic(*[mine + times * its for mine, its in zip(self, other, strict=True)])


class End(Record):
    """A stage: its layers, and whether it is the first or the last."""

    kinds: tuple[LayerKind, ...]
    first: bool
    last: bool


NOTHING: Recompute = "none"
_APART = (COPIES, SLOWED, SUMS, WAITING, TO_HOST)  # of data parallelism and offload
Again = tuple[Recompute, int | None]  # what backward recomputes, in how many layers


class RankWork(NamedTuple):
    """Work per rank. ``least``: the minimum over the first rank's stages, field by field, without
    embedding and head. ``each``: by rank, seconds before and after its work, and its work on one
    microbatch, with embedding and head. Of others than the first, a rank is left out if a later one
    has more work."""

    least: LayerWork
    each: dict[int, tuple[float, LayerWork]]

    @property
    def first(self) -> LayerWork:
        return self.each[0][1]


def mathematics_s(model: AnyModel, seq_len: int, layout: Layout, prices: Prices) -> float:
    """Return a lower bound of the step time from compute alone."""
    ranks, count = _ranks(model, seq_len, layout, prices), layout.num_microbatches
    return max([around_s + count * work.both_s for around_s, work in ranks.each.values()])


def traffic_s(model: AnyModel, seq_len: int, layout: Layout, prices: Prices) -> float:
    """Return a lower bound of the step time from the compute and dp traffic of each rank."""
    inside, count = layout.of_rank(0), layout.num_microbatches
    stages = stages_of(model, seq_len, layout.num_stages, layout.layers)
    ranks, beside = _ranks(model, seq_len, layout, prices), beside_of(inside, prices)
    # ZeRO-0 and 1 send nothing but in the first forward and the last backward of a stage
    busy = 1 if layout.zero < 2 and layout.stages_per_rank == 1 else count
    least_s = 0.0
    for rank, (around_s, work) in ranks.each.items():
        mine = [
            kind
            for stage, end in enumerate(stages)
            if rank_of(layout.schedule, stage, layout.pp) == rank
            for kind in end.kinds
        ]
        sent = DataTraffic()
        for kind, number in Counter(mine).items():
            layer, root = traffic_of(model, seq_len, kind, inside, layout.pp == 1, prices)
            sent = sent.plus(layer, number)
        sent = sent if rank else sent.plus(root)
        # what passes before or after the rank's work slows nothing down, nor beside waits for cp
        beside_s = max(0.0, sent.messages_s - around_s) if layout.cp == 1 else 0.0
        work_s = (count - busy) * work.both_s + side_by_side_s(
            busy * work.both_s + sent.copies_s, busy * work.messages_s, beside_s, beside
        )
        least_s = max(least_s, sent.messages_s, around_s + work_s)
    return least_s


def side_by_side_s(work_s: float, messages_s: float, sent_s: float, beside: Beside | None) -> float:
    """Return the least seconds of work and data-parallel messages (``sent_s``) side by side, where
    both are slower than alone. ``messages_s``: the part of the work that is messages between tp
    ranks or to experts. What these let pass at no cost is taken off ``sent_s`` first."""
    if beside is None:
        return work_s + sent_s
    passed_s = min(sent_s, max(0.0, 2 - 1 / beside.messages) * messages_s)
    work_s, sent_s = work_s - messages_s, sent_s - passed_s
    speed, collective = beside.fastest
    together_s = min(work_s / speed, sent_s / collective)
    saved_s = max(0.0, speed + collective - 1) * together_s
    return messages_s + work_s + sent_s - saved_s


def memory_bytes(
    model: AnyModel, seq_len: int, layout: Layout, prices: Prices, others: Sequence[Layout] = ()
) -> float:
    """Return a lower bound of the peak memory of ``layout`` and of ``others``, which differ from it
    only in recomputation."""
    ranks = _ranks(model, seq_len, layout, prices, others)
    kept = 1 + WHOLE_STATES[prices.costs.recipe.optimizer]
    state = kept * ranks.first.parameter_bytes / layout.shards
    copies = ranks.first.copy_bytes if layout.zero < 3 else 0.0
    whole = layout.zero < 2 and layout.num_microbatches > 1  # added up before they are reduced
    added = prices.costs.recipe.widening
    gradients = ranks.least.parameter_bytes * (added if whole else 1 / layout.shards)
    held = max(
        alive * ranks.least.saved_bytes + reduced * gradients for alive, reduced in moments(layout)
    )
    return state + copies + held + prices.costs.memory_overhead_bytes


@lru_cache(maxsize=4096)
def stages_of(
    model: AnyModel, seq_len: int, count: int, layers: tuple[int, ...]
) -> tuple[End, ...]:
    """Return ``count`` stages of equal size, or with these numbers of ``layers``."""
    ends = [*accumulate(layers or (model.layers // count,) * count, initial=0)]
    kinds = layer_kinds(model, seq_len)
    return tuple(
        End(kinds=kinds[start:stop], first=start == 0, last=stop == model.layers)
        for start, stop in pairwise(ends)
    )


def layers_of(kinds: tuple[LayerKind, ...], again: Again) -> tuple[Layer, ...]:
    """Return a stage's layers, each with its recomputation, as ``Layout.recomputed`` does."""
    word, some = again
    count = min(len(kinds), some or len(kinds))
    return tuple((kind, word if layer < count else "none") for layer, kind in enumerate(kinds))


@lru_cache(maxsize=4096)
def _cut(
    tp: int, cp: int, sequence_parallel: bool, microbatch_size: int, ep: int, cuts: Cuts
) -> Layout:
    """Return the smallest layout with these cuts: one microbatch, and just enough dp ranks to share
    its sequences and to hold all experts."""
    return Layout(
        dp=ep // math.gcd(ep, cp),
        cp=cp,
        ep=ep,
        tp=tp,
        sequence_parallel=sequence_parallel,
        cuts=cuts,
        microbatch_size=microbatch_size,
    )


def by_cut(layout: Layout) -> tuple[Any, ...]:
    """Order layouts by how layers are cut, then by microbatch size: layers of other sizes have the
    same program, which is kept for as long as they are priced in a row."""
    shape = (layout.tp, layout.cp, layout.ep, layout.sequence_parallel)
    return *shape, astuple(layout.cuts), layout.microbatch_size


def cut_of(layout: Layout) -> Layout:
    """Keep the fields of a layout that a layer's work depends on."""
    shape = (layout.tp, layout.cp, layout.sequence_parallel, layout.microbatch_size, layout.ep)
    return _cut(*shape, layout.cuts)


def _ranks(
    model: AnyModel, seq_len: int, layout: Layout, prices: Prices, others: Sequence[Layout] = ()
) -> RankWork:
    stages = stages_of(model, seq_len, layout.num_stages, layout.layers)
    kind = (layout.pp, layout.schedule in V_SHAPED, layout.schedule in SPLIT)
    about = (model, seq_len, cut_of(layout), stages, kind, prices)
    if others:
        return _leanest(*about, tuple([again_of(each) for each in (layout, *others)]))
    return _ranks_of(*about, again_of(layout))


@lru_cache(maxsize=65536)
def _leanest(*about: Any) -> RankWork:
    """Return the work per rank under the way to recompute that saves the fewest bytes."""
    *of, words = about
    return min([_ranks_of(*of, word) for word in words], key=lambda ranks: ranks.least.saved_bytes)


def again_of(layout: Layout) -> Again:
    return layout.recompute, layout.recompute_layers


@lru_cache(maxsize=65536)
def _ranks_of(
    model: AnyModel,
    seq_len: int,
    cut: Layout,
    stages: tuple[End, ...],
    kind: tuple[int, bool, bool],
    prices: Prices,
    again: Again,
) -> RankWork:
    """Add up the work of each rank. ``kind``: number of ranks, whether they form a V, whether the
    backward is split."""
    pp, v_shaped, split = kind
    schedule: Name = "zbv" if v_shaped else "1f1b"  # stands for any V-shaped, or any other
    works = {end: _stage_work(model, seq_len, cut, prices, again, end) for end in {*stages}}
    bare, whole = ({end: work[at] for end, work in works.items()} for at in (0, 1))
    ranks = [LayerWork()] * pp
    for stage, end in enumerate(stages):
        rank = rank_of(schedule, stage, pp)
        ranks[rank] = ranks[rank].plus(whole[end])
    around_s, each = 0.0, dict[int, tuple[float, LayerWork]]()
    for rank, work in enumerate(ranks):
        each = {at: of for at, of in each.items() if at == 0 or of[1].both_s > work.both_s}
        each[rank] = (around_s, work)
        around_s += whole[stages[rank]].forward_s if split else whole[stages[rank]].both_s
    mine = {end for stage, end in enumerate(stages) if rank_of(schedule, stage, pp) == 0}
    least = LayerWork(*map(min, zip(*[bare[end] for end in mine], strict=True)))
    return RankWork(least, each)


@lru_cache(maxsize=65536)
def _stage_work(
    model: AnyModel, seq_len: int, cut: Layout, prices: Prices, again: Again, end: End
) -> tuple[LayerWork, LayerWork]:
    """Return the work of a stage's layers, without and with embedding and head."""
    about, bare = (model, seq_len, cut, prices), LayerWork()
    whole, first, last = bare, end.kinds[0], end.kinds[-1]
    for of, number in Counter(layers_of(end.kinds, again)).items():
        work = layer_work(*about, of)
        whole = whole.plus(work, number)
        bare = bare.plus(work._replace(saved_bytes=_added_bytes(*about, of)), number)
    if end.first and end.last and is_tied(model):  # embedding and head are one weight
        return bare, whole.plus(end_work(*about, first, first=True, last=True))
    whole = whole.plus(end_work(*about, first, first=True)) if end.first else whole
    return bare, whole.plus(end_work(*about, last, last=True)) if end.last else whole


def layer_work(
    model: AnyModel,
    seq_len: int,
    cut: Layout,
    prices: Prices,
    of: Layer,
    first: bool = False,
    last: bool = False,
) -> LayerWork:
    """Return the work of one layer, with the embedding (``first``) and the head (``last``)."""
    kind, word = of
    stage = StageKind(model, seq_len, (kind,), first, last, (word,), cut, False, hooked=False)
    return _work(stage, prices)


@lru_cache(maxsize=65536)
def _added_bytes(model: AnyModel, seq_len: int, cut: Layout, prices: Prices, of: Layer) -> float:
    """Return the bytes that a layer behind other such layers saves: of compiled layers only the
    first one's input is saved whole."""
    kind, word = of
    one = StageKind(model, seq_len, (kind,), False, False, (word,), cut, False, hooked=False)
    counts = layers_ahead(prices), layers_ahead(prices) + 1
    each = [one._replace(layers=one.layers * n, recompute=one.recompute * n) for n in counts]
    less, more = (_left(stage_memory(some, prices).actions["F"][0][1]) for some in each)
    return more - less


def end_work(
    model: AnyModel,
    seq_len: int,
    cut: Layout,
    prices: Prices,
    kind: LayerKind,
    *,
    first: bool = False,
    last: bool = False,
) -> LayerWork:
    """Return the work of the embedding, the head, or both, next to a layer of this kind."""
    about, layer = (model, seq_len, cut, prices), (kind, NOTHING)
    return layer_work(*about, layer, first, last).plus(layer_work(*about, layer), -1)


@lru_cache(maxsize=65536)
def _work(kind: StageKind, prices: Prices) -> LayerWork:
    """Price a stage of one layer on one device or its tp group, without data parallelism. If its
    result is saved, the next layer counts it as its saved input. So it is subtracted here, twice:
    a stage alone counts it twice, as the input that it receives and as a copy."""
    cost = stage_cost(kind, prices)
    some_bytes(kind, prices)  # is asked for later, and known as long as ``cost`` is
    (forward, kept), (backward, _) = cost.actions["F"][0], cost.actions["B"][0]
    size, one = kind.layout.microbatch_size, unchecked(kind.layout, microbatch_size=1)
    whole = graph_of(kind._replace(layout=one), prices.costs)
    *_, result = (node.outputs[0] for node in whole.nodes if node.phase == "forward")
    is_kept = any(result in node.inputs for node in whole.nodes if node.phase != "forward")
    entry_s = [0.0, 0.0]  # a stage of images copies its input once, not once a layer
    if isinstance(kind.model, WideResNet):
        program, charge = priced(kind, prices)
        for at, (_, _, start, stop) in enumerate(program.actions):
            entry = [task for task in program.tasks[start:stop] if task.name.startswith(ENTRY[0])]
            entry_s[at] = sum(charge(task).time_s for task in entry)
    passed_on = 2 * size * num_bytes(whole.tensors[result], whole.sizes) if is_kept else 0

    def own_s(action: int, spent: Spent) -> float:
        return spent.time_s - sum(spent.parts.get(part, 0.0) for part in _APART) - entry_s[action]

    return LayerWork(
        forward_s=own_s(0, forward),
        backward_s=own_s(1, backward),
        messages_s=sum(
            spent.parts.get(part, 0.0) for spent in (forward, backward) for part in MESSAGES
        ),
        saved_bytes=_left(kept) - passed_on,
        parameter_bytes=cost.resident["parameters"],
        copy_bytes=kept.left.get(WEIGHTS, 0.0),
    )


@lru_cache(maxsize=65536)
def some_bytes(kind: StageKind, prices: Prices) -> tuple[float, ...]:
    """Return the bytes of a stage of a layer or two: parameters, held per microbatch, the most that
    an action adds, and the least that a backward adds."""
    cost = stage_memory(kind, prices)
    live = {action: of[0][1] for action, of in cost.actions.items()}
    copies = live["F"].left.get(WEIGHTS, 0.0)
    left = {action: _left(of) for action, of in live.items()}
    held = left["F"] + max(0.0, left.get("I", 0.0))  # I leaves what W needs
    rises = [sum(of.rise.values()) - held * (action == "F") for action, of in live.items()]
    least = live["I" if kind.split else "B"].rise.get(ROLES["activation"], 0.0)
    return cost.resident["parameters"], held, max(rises) - copies, max(0.0, least)


def _left(live: Live) -> float:
    """Return the bytes that an action leaves, without gathered weights."""
    return sum(live.left.values()) - live.left.get(WEIGHTS, 0.0)


@lru_cache(maxsize=4096)
def slower_by(
    model: AnyModel,
    seq_len: int,
    cut: Layout,
    prices: Prices,
    kind: LayerKind,
    hooks: tuple[float, float],
) -> tuple[float, float]:
    """Return what FSDP2's calls on the host multiply a layer's forward by, and its backward
    (``charges.hooks_of``)."""
    stage = StageKind(model, seq_len, (kind,), False, False, (NOTHING,), cut, False, hooked=False)
    blocks, pieces = blocks_in(stage, prices.costs), pieces_of(stage)
    plain, hooked = (corrections(blocks, pieces, prices, of).factors for of in (NO_HOOKS, hooks))
    ratios = {key[1]: hooked[key][0] / plain[key][0] for key in blocks if key[0][0] == "layer"}
    return ratios.get("forward", 1.0), ratios.get("backward", 1.0)


@lru_cache(maxsize=4096)
def traffic_of(
    model: AnyModel, seq_len: int, kind: LayerKind, inside: Layout, last: bool, prices: Prices
) -> tuple[DataTraffic, DataTraffic]:
    """Return the traffic of a layer, and of the root. It moves weights, so that the size of
    microbatches and what is computed again do not matter."""
    plain = {"microbatch_size": 1, "recompute": "none", "recompute_layers": None}
    return _traffic(model, seq_len, kind, unchecked(inside, **plain), last, prices)


@lru_cache(maxsize=16384)
def _traffic(
    model: AnyModel, seq_len: int, kind: LayerKind, inside: Layout, last: bool, prices: Prices
) -> tuple[DataTraffic, DataTraffic]:
    count = min(3, inside.num_microbatches)  # the second stands for all between first and last
    some = unchecked(inside, num_microbatches=count)
    stage = StageKind(model, seq_len, (kind,), True, last, (), some, False)
    costs = prices.costs
    program = program_of(graph_of(stage, costs), some, costs.dtype, idle=True, recipe=costs.recipe)
    seconds: dict[tuple[bool, str], float] = defaultdict(float)
    for _, microbatch, start, stop in program.actions:
        times = inside.num_microbatches - 2 if (microbatch, count) == (1, 3) else 1
        for task in program.tasks[start:stop]:
            if (part := spent_on(task)) in (WAITING, COPIES):
                of = task.name.startswith("root."), part
                seconds[of] += times * prices.estimate(task.op).time_s
    longer, _ = copies_take(prices)
    layer, root = (
        DataTraffic(seconds[of_root, WAITING], longer * seconds[of_root, COPIES])
        for of_root in (False, True)
    )
    return layer, root


def moments(layout: Layout, rank: int = 0) -> tuple[tuple[int, int], ...]:
    """Return pairs (most microbatches alive, stages that already hold gradients) of a pipeline
    rank, right after its forwards; none has less of both than another."""
    name, pp = layout.schedule, layout.pp
    some = schedule.enough(name, pp, layout.num_microbatches)
    return _moments(name, pp, rank, layout.stages_per_rank, some)


@lru_cache(maxsize=4096)
def _moments(
    name: Name, pp: int, rank: int, stages_per_rank: int, num_microbatches: int
) -> tuple[tuple[int, int], ...]:
    alive, reduced, found = 0, set[int](), dict[int, int]()
    for kind, stage, _ in schedule.row(name, pp, rank, stages_per_rank, num_microbatches):
        alive += {"F": 1, "B": -1, "I": -1, "W": 0}[kind]  # I may free some: count as freed
        if kind in "BW":
            reduced.add(stage)
        elif kind == "F":
            found[len(reduced)] = max(alive, found.get(len(reduced), 0))
    most, kept = -1, list[tuple[int, int]]()
    for count in sorted(found, reverse=True):
        if found[count] > most:  # else another moment has as many of both
            most = found[count]
            kept.append((most, count))
    return tuple(kept)
