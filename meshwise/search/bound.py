"""What a layout takes at least, cheaply: so that ``find`` need not price every one in full.

One layer, the embedding and the head are priced by themselves for each way to cut them (tp,
sequence parallelism, microbatch size, recomputation); ranks of equal stages are sums of them.

Mathematics: whatever the schedule, a rank does its work on all microbatches after the forwards of
the stages before its first, and before their backwards:

    T >= sum over stages s < p of (F_s + B_s) + microbatches * (F + B of rank p)

without B_s where backward is split, since a W may come last. Middle stages are equal, so that the
first or the last rank bounds. Traffic, of the first rank: no schedule hides the root's gather
before all else and its reduction behind; nor can all traffic in a row end sooner than itself.

Memory, of the first rank, which holds most microbatches: parameters, optimizer, the copies that
all actions compute with, and what microbatches in flight have saved.
"""

from collections import Counter, defaultdict
from functools import lru_cache
from typing import NamedTuple

import msgspec

from meshwise import schedule
from meshwise.models import apply
from meshwise.prices import Prices
from meshwise.schedule import Name
from meshwise.search.simulate import COPIES, WEIGHTS
from meshwise.search.stage import StageKind, graph_of, stage_cost
from meshwise.spec import Collective, Layout, Model
from meshwise.spec.layout import SPLIT, V_SHAPED, Recompute


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


class Ranks(NamedTuple):
    """Work of any pipeline rank's layers, and of the first and the last rank with their ends."""

    layers: Work
    first: Work
    last: Work


def mathematics_s(model: Model, seq_len: int, layout: Layout, prices: Prices) -> float:
    """No prediction of ``layout`` is shorter."""
    ranks, count = _ranks(model, seq_len, layout, prices), layout.num_microbatches
    before_s = ranks.layers.forward_s if layout.schedule in SPLIT else ranks.layers.both_s
    before_s *= (layout.pp - 1) / layout.stages_per_rank
    return max(count * ranks.first.both_s, before_s + count * ranks.last.both_s)


def traffic_s(model: Model, seq_len: int, layout: Layout, prices: Prices) -> float:
    """No prediction of ``layout`` is shorter either."""
    inside = msgspec.structs.replace(layout.of_rank(0), num_microbatches=1)
    gather_s, reduce_s, root_gather_s, root_reduce_s = _traffic(
        model, seq_len, inside, layout.pp == 1, prices
    )
    layers, count = model.layers // layout.pp, layout.num_microbatches
    gathers_s, reductions_s = layers * gather_s + root_gather_s, layers * reduce_s + root_reduce_s
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


def memory_bytes(model: Model, seq_len: int, layout: Layout, prices: Prices) -> float:
    """No prediction of ``layout`` needs less."""
    ranks, stages = _ranks(model, seq_len, layout, prices), layout.stages_per_rank
    state = 3 * ranks.first.parameter_bytes / layout.shards
    copies = ranks.first.copy_bytes if layout.zero < 3 else 0.0
    whole = layout.zero < 2 and layout.num_microbatches > 1  # added up before they are reduced
    gradients = ranks.layers.parameter_bytes / (1 if whole else layout.shards)
    moments = _moments(layout.schedule, layout.pp, stages, layout.num_microbatches)
    held = max(
        (alive * ranks.layers.saved_bytes + reduced * gradients) / stages
        for alive, reduced in moments
    )
    return state + copies + held + prices.costs.memory_overhead_bytes


def _ranks(model: Model, seq_len: int, layout: Layout, prices: Prices) -> Ranks:
    cut = Layout(
        tp=layout.tp,
        sequence_parallel=layout.sequence_parallel,
        microbatch_size=layout.microbatch_size,
    )

    def one_layer(word: Recompute = "none", first: bool = False, last: bool = False) -> Work:
        return _work(StageKind(model, seq_len, 1, first, last, (word,), cut, False), prices)

    layers = Work()
    words = layout.recomputed(model.layers // layout.num_stages)
    for word, count in Counter(words).items():
        layers = layers.plus(one_layer(word), count * layout.stages_per_rank)
    if layout.pp == 1:  # both ends hold one weight
        whole = layers.plus(one_layer(first=True, last=True)).plus(one_layer(), -1)
        return Ranks(layers, whole, whole)
    first = layers.plus(one_layer(first=True)).plus(one_layer(), -1)
    head = one_layer(last=True).plus(one_layer(), -1)
    if layout.schedule in V_SHAPED:
        return Ranks(layers, first.plus(head), layers)
    return Ranks(layers, first, layers.plus(head))


@lru_cache(maxsize=4096)
def _work(kind: StageKind, prices: Prices) -> Work:
    """Of a stage of one layer, on one device or its tp group."""
    cost = stage_cost(kind, prices)
    (forward, kept), (backward, _) = cost.actions["F"][0], cost.actions["B"][0]
    return Work(
        forward_s=forward.time_s - forward.parts.get(COPIES, 0.0),
        backward_s=backward.time_s - backward.parts.get(COPIES, 0.0),
        saved_bytes=sum(kept.left.values()) - kept.left.get(WEIGHTS, 0.0),
        parameter_bytes=cost.resident["parameters"],
        copy_bytes=kept.left.get(WEIGHTS, 0.0),
    )


@lru_cache(maxsize=4096)
def _traffic(
    model: Model, seq_len: int, inside: Layout, last: bool, prices: Prices
) -> tuple[float, float, float, float]:
    """Seconds of a layer's gathers and reductions for one microbatch, then of the root's."""
    kind = StageKind(model, seq_len, 1, True, last, (), inside, False)
    seconds: dict[tuple[bool, bool], float] = defaultdict(float)
    for task in apply(graph_of(kind, prices.costs.dtype), inside, prices.costs.dtype).tasks:
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
    """On the first rank, after a forward: how many of its stages' microbatches are alive, and how
    many of its stages have gradients. More microbatches repeat what some show."""
    some = num_microbatches if name == "looped_bfs" else min(num_microbatches, 4 * pp)
    alive, reduced, found = 0, set[int](), set[tuple[int, int]]()
    for kind, stage, _ in schedule.table(name, pp, stages_per_rank, some)[0]:
        alive += {"F": 1, "B": -1, "I": -1, "W": 0}[kind]  # I may free part, so count none
        if kind in "BW":
            reduced.add(stage)
        elif kind == "F":
            found.add((alive, len(reduced)))
    return frozenset(found)
