"""List what plans of models send over groups of ranks, and the sizes that price it. No torch.

The messages are read off programs: of every degree of tp (with and without sequence parallelism),
cp, dp and ep that the ranks allow, replicated and sharded (ZeRO 3), for several microbatch sizes.
Each curve of prices then gets sizes from the least to the most of its messages.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import product
from typing import NamedTuple

from msgspec.structs import replace

from meshwise.models import graph, placement, program_of, stream_shape
from meshwise.models.fsdp import units
from meshwise.probe.cases.scope import Scope
from meshwise.spec import DTYPE_BYTES, AnyModel, Collective, Cuts, Layout, layer_kinds
from meshwise.spec.op import REDUCING

NUM_SIZES = 9  # of a curve
ORDER = (0, 4, 8, 2, 6, 1, 3, 5, 7)  # the least, the middle and the most, then between them
LEAST = 2**12  # bytes; below, all messages take as long
MOST = {"cuda": 2**31, "cpu": 2**28}  # bytes
RANGE = 256  # at least, from the least to the most size, so that steps are octaves or more
VECTOR_BYTES = 16

Sizes = dict[int, str]  # what each number of bytes is for


class Sizing(NamedTuple):
    """A model on sequences of a length, with microbatch sizes for each degree of dp."""

    model: AnyModel
    seq_len: int
    microbatches: dict[int, tuple[int, ...]]


class Sent(NamedTuple):
    """The messages of one curve. ``like``: one of them. ``strides``: between the ranks of a group.
    ``sizes``: in bytes, the most useful first. ``use``: what they are for."""

    like: Collective
    strides: tuple[int, ...]
    sizes: tuple[int, ...]
    use: str


def degrees(world_size: int) -> list[int]:
    """List the powers of two that divide the world size, and the world size; 1 first."""
    powers = (2**i for i in range(world_size.bit_length()))
    return sorted({size for size in powers if world_size % size == 0} | {1, world_size})


def sent(scope: Scope, works: Sequence[Sizing]) -> list[Sent]:
    """List what plans of these models send, curve by curve: small groups first, pipelines last."""
    found: dict[tuple[str, ...], tuple[Collective, Sizes]] = {}
    for op, use in (one for work in works for one in _messages(scope, work)):
        word = op.dtype if op.kind in REDUCING else ""  # others move bytes, whatever they mean
        _, sizes = found.setdefault((f"{op.group_size:6}", op.kind, word), (op, {}))
        sizes.setdefault(op.size_bytes, use)
    curves, most = [], MOST[scope.cluster.device.kind]
    for _, (op, sizes) in sorted(found.items()):
        strides = tuple(dict.fromkeys((1, scope.world_size // op.group_size)))
        curves.append(_curve(op, strides, sizes, most))
    reaches = [1, *(tier.num_devices for tier in scope.cluster.tiers)]
    strides = tuple(n for n in dict.fromkeys(reaches) if scope.world_size % (2 * n) == 0)
    if strides:
        handed = {size: "pipelines" for work in works for size in _handed_on(scope, work)}
        op = Collective(kind="send_recv", size_bytes=1, group_size=2, dtype=scope.dtype)
        curves.append(_curve(op, strides, handed, most))
    return curves


def _curve(like: Collective, strides: tuple[int, ...], sizes: Sizes, most: int) -> Sent:
    chosen = [_ladder([*sizes], most)[at] for at in ORDER]
    part = VECTOR_BYTES * like.group_size
    aligned = tuple(dict.fromkeys(size - size % part for size in chosen))
    return Sent(like, strides, aligned, ", ".join(sorted(set(sizes.values()))))


def _ladder(sizes: list[int], limit: int) -> list[int]:
    """Return ``NUM_SIZES`` sizes in bytes, ascending; one that plans send is taken as it is."""
    most = min(max(*sizes, LEAST * RANGE), limit)
    least = max(min(*sizes, most // RANGE), LEAST)
    step = (most / least) ** (1 / (NUM_SIZES - 1))
    return [_nearest(least * step**rung, step, sizes) for rung in range(NUM_SIZES)]


def _nearest(rung: float, step: float, sizes: list[int]) -> int:
    apart, size = min((abs(math.log(size / rung)), size) for size in sizes)
    return size if apart < math.log(step) / 2 else round(rung)


def _messages(scope: Scope, work: Sizing) -> Iterator[tuple[Collective, str]]:
    """Yield the messages of the work's programs, and what each is for."""
    kinds = tuple(dict.fromkeys(layer_kinds(work.model, work.seq_len)))
    for layout in _layouts(scope, work):
        if placement.obstacle(work.model, work.seq_len, layout):
            continue
        of = graph(work.model, layout.microbatch_size, work.seq_len, scope.dtype, layers=kinds)
        for task in program_of(of, layout, scope.dtype).tasks:
            op = task.op
            if not isinstance(op, Collective) or op.group_size == 1 or op.splits or not op.bytes:
                continue
            use = "units of weights" if task.stream == "dp" else "tensor parallelism"
            use = "context parallelism" if task.stream == "cp" else use
            use = "experts" if op.kind == "all_to_all" and layout.ep > 1 else use
            yield replace(op, group_stride=1, ranks=()), use


def _layouts(scope: Scope, work: Sizing) -> Iterator[Layout]:
    all_degrees, experts = degrees(scope.world_size), getattr(work.model, "experts", None)
    for cp, size in product(all_degrees[1:], work.microbatches[1]):
        yield Layout(cp=cp, microbatch_size=size)
    for tp, dp in product(all_degrees, all_degrees):
        if scope.world_size % (tp * dp) or tp > scope.cluster.num_devices_per_host:
            continue
        ways = [(False, Cuts()), (True, Cuts()), (True, Cuts(experts="experts"))]
        ways = ways[: 2 + bool(experts)] if tp > 1 else ways[:1]
        shared = [(0, 1), (3, 1)] if dp > 1 else [(0, 1)]
        shared += [(3, ep) for ep in all_degrees[1:] if experts and dp % ep == 0]
        for (sp, cuts), (zero, ep), size in product(ways, shared, work.microbatches[dp]):
            yield Layout(
                tp=tp, dp=dp, zero=zero, ep=ep, sequence_parallel=sp, cuts=cuts,
                microbatch_size=size,
            )  # fmt: skip


def _handed_on(scope: Scope, work: Sizing) -> Iterator[int]:
    """Yield the bytes that a stage may send the next one, and those of a tied embedding."""
    model = work.model
    for size in {size for sizes in work.microbatches.values() for size in sizes}:
        for layer in range(1, model.layers) if model.layers < 64 else (1,):
            shape = stream_shape(model, size, work.seq_len, layer)
            yield math.prod(shape) * DTYPE_BYTES[scope.dtype]
    if placement.is_tied(model):
        root = units(model)[-1]
        yield max(weight.num_elements for weight in root.weights) * DTYPE_BYTES["fp32"]
