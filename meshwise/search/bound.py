"""Bound a layout's step time and memory from below, cheaply, so that ``find`` prices few in full.

Stages and ranks are sums of layers, each priced alone (``layer``).

Compute: under any schedule a rank works on all microbatches. It starts after the forwards of the
stages before its first stage, and ends before their backwards:

    T >= sum over stages s < p of (F_s + B_s) + microbatches * (F + B of rank p)

With a split backward B_s is dropped, since a W may come last. Under offload the tensors of a layer
move to the host while the next layer runs forward, and back while that runs backward:

    F >= sum over layers l of max(f_l, d2h_(l-1))    B >= sum over layers l of max(b_l, h2d_(l-1))

Data parallelism adds the copies that its messages need. Queued messages take at least the sum of
their times, and slow down the work beside them, unless they pass before or after the rank's work;
while layers wait for the host they may pass, too, so with them these waits do not count.

Memory of the first rank, which holds the most microbatches: parameters, optimizer state, gathered
copies, and the saved tensors of the microbatches in flight. ``room`` gives a closer bound.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

from msgspec.structs import astuple

from meshwise import schedule
from meshwise.models import program_of
from meshwise.models.optimizer import WHOLE_STATES
from meshwise.models.placement import is_tied
from meshwise.prices import Prices
from meshwise.prices.datasheet import Beside
from meshwise.schedule import Name
from meshwise.search.charges import beside_of, copies_take, spent_on
from meshwise.search.layer import (
    LayerWork,
    added_bytes,
    cut_of,
    end_work,
    idle_s,
    layer_work,
)
from meshwise.search.simulate import COPIES, WAITING
from meshwise.search.space import unchecked
from meshwise.search.stage import Layer, StageKind, graph_of
from meshwise.spec import AnyModel, LayerKind, Layout, layer_kinds
from meshwise.spec.layout import SPLIT, V_SHAPED, Recompute, rank_of
from meshwise.spec.record import Record


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
    """Return a lower bound of the step time from compute and copies to the host."""
    ranks, count = _ranks(model, seq_len, layout, prices), layout.num_microbatches
    return max([around_s + count * work.whole_s for around_s, work in ranks.each.values()])


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


def by_cut(layout: Layout) -> tuple[Any, ...]:
    """Order layouts by how layers are cut, then by microbatch size: layers of other sizes have the
    same program, which is kept for as long as they are priced in a row."""
    shape = (layout.tp, layout.cp, layout.ep, layout.sequence_parallel)
    return *shape, astuple(layout.cuts), layout.microbatch_size


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
        each = {at: of for at, of in each.items() if at == 0 or of[1].exceeds(work)}
        each[rank] = (around_s, work)
        around_s += whole[stages[rank]].forward_s if split else whole[stages[rank]].whole_s
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
    layers = layers_of(end.kinds, again)
    for of, number in Counter(layers).items():
        work = layer_work(*about, of)
        whole = whole.plus(work, number)
        bare = bare.plus(work._replace(saved_bytes=added_bytes(*about, of)), number)
    if prices.costs.recipe.offload:
        whole = whole._replace(idle_s=idle_s(*about, layers, end.first))
    if end.first and end.last and is_tied(model):  # embedding and head are one weight
        return bare, whole.plus(end_work(*about, first, first=True, last=True))
    whole = whole.plus(end_work(*about, first, first=True)) if end.first else whole
    return bare, whole.plus(end_work(*about, last, last=True)) if end.last else whole


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
