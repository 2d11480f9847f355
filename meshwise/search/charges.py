"""Charge a stage's tasks: the price of each operation, corrected by what steps add to it.

A block that was measured corrects its operations (``Prices.factor``). The power cap slows products
down, by the mix of each block's forward and backward. FSDP2's copies are slower than other copies.
What data-parallel messages slow down depends on what runs beside them: ``simulate`` adds that up.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import product
from typing import NamedTuple

import msgspec

from meshwise.models import Device, Piece, Task, block_tasks, device_of
from meshwise.models.shard import OVER_DATA
from meshwise.prices import Estimate, Prices, in_step, op_key
from meshwise.prices.datasheet import Beside, attainable
from meshwise.prices.measured import in_bursts
from meshwise.search.simulate import COPIES, SHARING, SUMS, TO_HOST, WAITING, Charge
from meshwise.spec import Block, Collective, HeldOut, Layout, Op, Recompute
from meshwise.spec.op import Lowering

MESSAGES = (
    "tensor-parallel communication", "expert-parallel communication", "sums over data ranks",
)  # fmt: skip
AGAIN = ("recompute", "backward")  # the phases in the time of a layer measured recomputed
NO_HOOKS = (0.0, 0.0)  # forward, backward
Pieces = Callable[[Task], Piece]  # the block that holds a task
# by piece and direction, or by piece and what was measured recomputed with the backward
Factors = Mapping[tuple[Piece, str], tuple[float, HeldOut | None]]


class Corrections(NamedTuple):
    """Corrections of the prices of a stage's tasks: the ``factors`` of their blocks, ``pieces``
    that name these, and how much the power cap slows down the products of each (``stretch``).
    ``recompute``: one word per layer; () if no layer so recomputed was measured."""

    factors: Factors
    pieces: Pieces
    stretch: Mapping[Piece, float]
    recompute: Sequence[Recompute] = ()

    def way(self, task: Task) -> str:
        """Return the factor's direction, or the word of a layer that was measured recomputed."""
        if self.recompute and task.part == "layer" and task.phase in AGAIN:
            word = self.recompute[int(task.name.split(".")[1])]
            if (self.pieces(task), word) in self.factors:
                return word
        return direction_of(task.phase)

    def of(self, task: Task, estimate: Estimate) -> tuple[float, HeldOut | None]:
        """Return a task's factor, and the error of its block's if there is one."""
        if _is_over_data(task) or task.stream == "host":  # no measured block has it
            return 1.0, None
        piece = self.pieces(task)
        ratio, error = self.factors.get((piece, self.way(task)), (1.0, None))
        if in_bursts(task.op, estimate):
            ratio *= self.stretch.get(piece, 1.0)
        return ratio, error


def corrections(
    blocks: Mapping[tuple[Piece, str], Block],
    pieces: Pieces,
    prices: Prices,
    hooks: tuple[float, float] = NO_HOOKS,
    recompute: Sequence[Recompute] = (),
) -> Corrections:
    """Return the corrections of the prices of a stage's tasks. ``blocks``: the stage's, by piece
    and direction. ``hooks``: of FSDP2 around each layer, as of ``hooks_of``. ``recompute``: one
    word per layer."""
    words = frozenset({*recompute} - {"none"})
    key = tuple(blocks.items()), hooks, words
    stretch, factors, again = prices.once(key, lambda: _factors(blocks, prices, hooks, words))
    return Corrections(factors, pieces, stretch, recompute if again else ())


def _factors(
    blocks: Mapping[tuple[Piece, str], Block],
    prices: Prices,
    hooks: tuple[float, float],
    words: frozenset[Recompute],
) -> tuple[Mapping[Piece, float], Factors, bool]:
    """Return how much products slow down, and the factor of each block; also of those measured with
    a recomputation of ``words``, and whether there are any."""
    again = _measured_again(blocks, words, prices)
    blocks = {**blocks, **again}
    lowering = prices.costs.lowering
    device = device_of(prices.costs.cluster, lowering)
    tasks = {key: _tasks(block, device, lowering) for key, block in blocks.items()}
    both: dict[Piece, list[Task]] = {}
    for piece, direction in blocks:
        both.setdefault(piece, []).extend(tasks[piece, direction])
    stretch = {piece: prices.stretch_of(each) for piece, each in both.items()}
    factors = {
        (piece, direction): prices.factor(
            block,
            tasks[piece, direction],
            stretch[piece],
            hooks[block.direction == "backward"] if block.part == "layer" else 0.0,
        )
        for (piece, direction), block in blocks.items()
    }
    return stretch, factors, bool(again)


def _measured_again(
    blocks: Mapping[tuple[Piece, str], Block], words: Iterable[Recompute], prices: Prices
) -> dict[tuple[Piece, str], Block]:
    """Return the layers that were measured with a recomputation of ``words``, by piece and word."""
    costs, found = prices.costs, dict[tuple[Piece, str], Block]()
    for ((piece, way), block), word in product(blocks.items(), words):
        if way == "backward" and block.part == "layer":
            again = msgspec.structs.replace(block, recompute=word)
            how = in_step(again, costs.cluster, costs.lowering)
            if op_key(again, how, costs.cluster).category in prices.known:
                found[piece, word] = again
    return found


def hooks_of(inside: Layout, prices: Prices) -> tuple[float, float]:
    """Return the seconds that the host takes for FSDP2's calls around a layer's forward and its
    backward in every microbatch: a gather with ZeRO-3, and a reduction if each backward has one."""
    if inside.data_ranks == 1 or prices.costs.cluster.device.kind == "cpu":
        return NO_HOOKS
    known = attainable().host
    gather_s = known.gather_s * (inside.zero == 3)
    reduces = inside.zero >= 2 or inside.num_microbatches == 1
    return gather_s, gather_s + known.reduce_s * reduces


def small(block: Block) -> list[Block]:
    """Return the block with microbatches of one and of two sequences if its own, larger ones
    follow linearly from these; else nothing."""
    moe = getattr(block.model, "experts", None)
    even = moe is None or (moe.load == "mean" and moe.group_size is None)
    sizes = (1, 2) if block.microbatch_size > 2 and block.cp == 1 and even else ()
    return [msgspec.structs.replace(block, microbatch_size=size) for size in sizes]


@lru_cache(maxsize=4096)
def _tasks(block: Block, device: Device, lowering: Lowering = "eager") -> Sequence[Task]:
    one, *others = (block_tasks(each, device, lowering) for each in small(block) or [block])
    if not others:
        return one
    pairs = [(task.op, other.op) for task, other in zip(one, *others, strict=True)]
    return with_ops(one, grown(pairs, block.microbatch_size - 1, 1))


def with_ops(tasks: Sequence[Task], ops: Sequence[Op]) -> tuple[Task, ...]:
    """Return the tasks with these operations."""
    return tuple([
        task if task.op is op else msgspec.structs.replace(task, op=op)
        for task, op in zip(tasks, ops, strict=True)
    ])  # fmt: skip


def grown(pairs: Iterable[tuple[Op, Op]], by: int, of: int) -> tuple[Op, ...]:
    """Extrapolate operations. The second of a pair has ``of`` sequences more than the first; the
    result has ``by`` more."""
    return tuple([op if op is other else _grown(op, other, by, of) for op, other in pairs])


@lru_cache(maxsize=65536)
def _grown(op: Op, other: Op, by: int, of: int) -> Op:
    fields = {name: (getattr(op, name), getattr(other, name)) for name in op.__struct_fields__}
    more = {name: a + (b - a) * by // of for name, (a, b) in fields.items() if a != b}
    return msgspec.structs.replace(op, **more)


@lru_cache(maxsize=4096)
def beside_of(inside: Layout, prices: Prices) -> Beside | None:
    """Return how data-parallel messages and other work slow each other down within a pipeline rank.
    If they leave the host, they share their links with other messages that do, as experts' over
    ranks of several hosts, and not with tensor parallelism's."""
    cluster, known = prices.costs.cluster, prices.beside
    if cluster.device.kind == "cpu":
        return None
    host_ranks = cluster.num_devices_per_host
    if inside.tp * inside.data_ranks <= host_ranks:
        return known
    apart = {"messages": 1.0, "network": known.messages, "host_ranks": host_ranks}
    return msgspec.structs.replace(known, **apart)


def copies_take(prices: Prices) -> tuple[float, float]:
    """Return the time of a copy of weights or gradients, into or out of a data-parallel message,
    over that of another copy of as many bytes, and the relative error that this adds."""
    if prices.costs.cluster.device.kind == "cpu":
        return 1.0, 0.0
    known = attainable().copies
    return 1 / known.share, known.error


def direction_of(phase: str) -> str:
    """Return the direction whose factor applies: recomputed tasks run as in the forward pass."""
    return "forward" if phase == "recompute" else phase


def charges(correct: Corrections, prices: Prices) -> Callable[[Task], Charge]:
    """Return a function that gives a task's seconds, what they count as, and their error."""
    known: dict[tuple[object, ...], Charge] = {}  # equal tasks share their record

    def charge(task: Task) -> Charge:
        key = (id(task.op), correct.pieces(task), task.phase, correct.way(task), task.stream)
        found = known.get(key)
        if found is None:
            found = known[key] = priced(task)
        return found

    def priced(task: Task) -> Charge:
        estimate = prices.estimate(task.op)
        ratio, error = correct.of(task, estimate)
        group, relative = task.part + correct.way(task), estimate.error
        kernel = prices.in_step(task.op).backend  # that measured blocks do not have
        if kernel or error is None or error.num_points == 0:
            group = f"{type(task.op).__name__} {kernel}".rstrip()
            relative += error.p90 if error is not None else 0.0
        else:
            relative = error.p90
        if (part := spent_on(task)) == COPIES:
            longer, more = copies_take(prices)
            ratio, relative = longer * ratio, relative + more
        time_s = estimate.time_s * ratio
        return Charge(time_s, part, group, time_s * relative)

    return charge


def spent_on(task: Task) -> str:
    """Return the part of a step that a task's seconds count as."""
    if task.part == "dp" and task.stream == "compute":
        return SUMS if isinstance(task.op, Collective) else COPIES
    if task.part == "dp":
        return WAITING
    if task.stream in ("cp", "host"):
        return SHARING if task.stream == "cp" else TO_HOST
    if _is_over_data(task):
        return MESSAGES[2]
    if isinstance(task.op, Collective) and task.phase != "optimizer":
        to_experts = any(f".experts.{way}." in task.name for way in ("dispatch", "combine"))
        return MESSAGES[to_experts]
    return "optimizer" if task.phase == "optimizer" else f"{task.phase} {task.part}"


def _is_over_data(task: Task) -> bool:
    """Whether a task sums statistics of all data ranks within a layer, as norms of images do."""
    return task.name.endswith((OVER_DATA, f"{OVER_DATA}.tp"))
