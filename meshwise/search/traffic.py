"""Price what stages of the inter-operator search send: data-parallel traffic, and their results."""

from collections import defaultdict
from functools import lru_cache
from typing import NamedTuple

import msgspec

from meshwise.models import placement, program_of
from meshwise.prices import Prices
from meshwise.search import space
from meshwise.search.bound import DataTraffic
from meshwise.search.charges import copies_take, spent_on
from meshwise.search.predict import exchanged, images_bytes, in_transit, most_sent, moved
from meshwise.search.simulate import COPIES, WAITING
from meshwise.search.stage import StageKind, graph_of
from meshwise.spec import AnyModel, LayerKind, Layout, Workload


class StageTraffic(NamedTuple):
    """Seconds of a stage's data parallelism: of messages and of copies that a middle microbatch
    needs (``each``), and of those that the first forward and the last backward need (``once``). Of
    the latter's messages, those of the layer and of the root that reduce gradients, and the first
    forward's gathers (``ahead_s``). ``ending_s``: of the work after the last action, which is the
    optimizer's and sums over tp."""

    each: DataTraffic
    once: DataTraffic
    layer_s: float
    root_s: float
    ahead_s: float
    ending_s: float

    @property
    def gathers_s(self) -> float:
        return self.once.messages_s - self.layer_s - self.root_s


def sent(
    model: AnyModel,
    seq_len: int,
    way: Layout,
    prices: Prices,
    kind: LayerKind,
    first: bool = False,
    last: bool = False,
) -> StageTraffic:
    """Return the traffic of a stage of one layer. It moves weights, so that the size of
    microbatches does not matter."""
    some = space.unchecked(way, num_microbatches=min(3, way.num_microbatches), microbatch_size=1)
    return _sent(StageKind(model, seq_len, (kind,), first, last, (), some, False), prices)


@lru_cache(maxsize=16384)
def _sent(stage: StageKind, prices: Prices) -> StageTraffic:
    costs, way = prices.costs, stage.layout
    graph, count = graph_of(stage, costs), way.num_microbatches
    program = program_of(graph, way, costs.dtype, idle=True, recipe=costs.recipe)
    of_each = ("F", min(1, count - 1)), ("B", max(0, count - 2))
    of_once = ("F", 0), ("B", count - 1)
    each, once, reduces = (defaultdict[str | bool, float](float) for _ in range(3))
    ahead_s = 0.0
    for action, microbatch, start, stop in program.actions:
        for task in program.tasks[start:stop]:
            if (part := spent_on(task)) not in (WAITING, COPIES):
                continue
            time_s, at = prices.estimate(task.op).time_s, (action, microbatch)
            each[part] += time_s * (at in of_each)
            once[part] += time_s * (at in of_once)
            if part == WAITING and getattr(task.op, "kind", "") == "all_gather":
                ahead_s += time_s * (at == ("F", 0))
            elif part == WAITING:
                reduces[task.name.startswith("root.")] += time_s * (at in of_once)
    longer, _ = copies_take(prices)
    ending = program.tasks[program.actions[-1].stop :]
    return StageTraffic(
        DataTraffic(each[WAITING], longer * each[COPIES]),
        DataTraffic(once[WAITING], longer * once[COPIES]),
        reduces[False],
        reduces[True],
        ahead_s,
        sum(
            prices.estimate(task.op).time_s * (longer if spent_on(task) == COPIES else 1.0)
            for task in ending
        ),
    )


def passed_on(
    model: AnyModel, workload: Workload, way: Layout, prices: Prices
) -> tuple[float, ...]:
    """Return the seconds of sending a stage's result on and getting its gradient, on a host and to
    the next host; of a step's exchange of a tied embedding; and the bytes of messages and of all
    else that is no layer's."""
    if not placement.is_tied(model):  # then these do not matter
        way = space.unchecked(way, zero=0, replicas=1, ep=1)
    return _passed(model, workload, way, prices)


@lru_cache(maxsize=4096)
def _passed(model: AnyModel, workload: Workload, way: Layout, prices: Prices) -> tuple[float, ...]:
    two = space.unchecked(way, pp=2, schedule="1f1b", layers=(1, model.layers - 1))
    costs = prices.costs
    op = moved(model, workload, two, costs)[0, 1]
    apart = costs.cluster.num_devices_per_host if costs.cluster.num_hosts > 1 else 1
    far = msgspec.structs.replace(op, group_stride=max(op.group_stride, apart))
    within, across = (2 * prices.estimate(each).time_s for each in (op, far))
    tied = exchanged(model, two, costs)
    tied_s = prices.estimate(tied).time_s if tied else 0.0
    moving, _ = in_transit(model, workload, two, costs)
    beside = images_bytes(model, workload, two) + costs.memory_overhead_bytes
    return within, across, tied_s, beside + (most_sent(two, costs) + 1) * moving
