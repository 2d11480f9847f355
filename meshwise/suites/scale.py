"""Shrink a case so that a device can hold it, without changing its structure.

In: model, workload and layout of a case, and the bytes of one device. Out: a smaller model,
workload and layout, and the changes in words. Every degree of the mesh, the number of experts, the
width factor, the residual blocks, and the ratio of layers between stages stay. The rest is divided
by 2^r, with the smallest r that fits:

- hidden, heads, feed-forwards, vocabulary, sequence; channels, image, classes; rows of a
  microbatch; layers, by the same divisor in each stage, so that experts stay in the same places;
  groups of tokens, so that a rank's microbatch has whole groups;
- and microbatches: at most two for each pipeline stage.

Whether a size fits is a rough bound, not a prediction. The bound is ``MARGIN`` times: the weights'
states (ZeRO as in the layout), what a stage keeps of the microbatches in flight by the graph, and
all that one layer keeps and both ends make, in fp32.

CPUs have more memory than they can compute with. There the sizes shrink on until an iteration has
at most ``device_flops`` a device, or to the smallest sizes.
"""

from collections import Counter
from functools import lru_cache
from math import gcd, inf, lcm
from typing import NamedTuple

import msgspec

from meshwise.models import graph, program_of, step_flops
from meshwise.models.decoder import stage_weights
from meshwise.spec import LayerKind, Layout, Model, WideResNet, Workload, layer_kinds
from meshwise.spec.layout import Recompute

MARGIN = 1.5
_RUNGS = 24  # values of r; by then every size is its smallest
_SMALLEST = {  # lower limits, unless a size was smaller before
    "seq_len": 32,
    "vocab": 128,
    "image_size": 64,  # the last resolution has 2 x 2: batch norm needs several values
    "num_classes": 16,
    "channels": 8,
    "head_dim": 8,
}


_OF_EXPERTS = ("ffn", "group_size")


class Scaled(NamedTuple):
    """A shrunk case. ``changes``: as ``hidden 2560 -> 320``; empty if the case fits as it is."""

    model: Model | WideResNet
    workload: Workload
    layout: Layout
    changes: tuple[str, ...]


def scaled(
    model: Model | WideResNet,
    workload: Workload,
    layout: Layout,
    device_bytes: float,
    *,
    inference: bool = False,
    device_flops: float = inf,
) -> Scaled:
    """Return the largest size that fits ``device_bytes``; ValueError if none does. Shrink it on
    until an iteration has at most ``device_flops`` a device, if any size has."""
    whole = Scaled(model, workload, layout, ())
    first = found = None
    for rung in range(_RUNGS):
        case = _at(rung, whole) if rung else whole
        if stage_bytes(*case[:3], inference=inference) > device_bytes:
            continue
        first, found = first or case, case
        if flops(*case[:3], inference=inference) <= device_flops * layout.num_devices:
            break
    if found is not None:
        why = (f"to {device_flops / 1e12:g} TFLOP an iteration of each device",)
        return found._replace(changes=found.changes + (why if found != first else ()))
    raise ValueError(
        f"device memory of {device_bytes / 1e9:.3g} GB: too little for the smallest size of "
        f"{model.name} as {layout.name}; use a case with fewer layers or experts"
    )


def _at(rung: int, whole: Scaled) -> Scaled:
    """Return the case with its sizes divided by 2^rung."""
    model, workload, layout, _ = whole
    meshes = layout.meshes or ((layout.dp, layout.tp),)
    tp = lcm(*(mesh[1] for mesh in meshes))
    counts = _stage_layers(rung, model, layout)
    if isinstance(model, WideResNet):
        smaller: Model | WideResNet = _wide_resnet(rung, model, tp)
        seq_len = 1
    else:
        seq_len = _divided(workload.seq_len, rung, "seq_len", tp)
        smaller = _transformer(rung, model, tp, layers=sum(counts), seq_len=seq_len)
    unit = lcm(*(mesh[0] for mesh in layout.meshes)) if layout.meshes else 1
    rows = max(unit, (layout.microbatch_size >> rung) // unit * unit)
    if isinstance(smaller, Model) and (moe := smaller.experts) and moe.group_size:
        group = gcd(moe.group_size, rows // unit * seq_len)
        experts = msgspec.structs.replace(moe, group_size=group)
        smaller = msgspec.structs.replace(smaller, experts=experts)
    cut = msgspec.structs.replace(
        layout,
        microbatch_size=rows,
        num_microbatches=min(layout.num_microbatches, 2 * layout.pp),
        layers=counts if layout.layers else (),
    )
    smaller = msgspec.structs.replace(smaller, name=f"{model.name}-scaled")
    batch = cut.dp * rows * cut.num_microbatches
    work = Workload(global_batch_size=batch, seq_len=seq_len)
    return Scaled(smaller, work, cut, _changes((model, workload, layout), (smaller, work, cut)))


def _divided(size: int, rung: int, name: str, multiple: int = 1) -> int:
    """Return ``size`` / 2^rung or the lower limit, rounded up to a multiple, at most ``size``."""
    least = max(size >> rung, _SMALLEST[name])
    return min(size, -(-least // multiple) * multiple)


def _stage_layers(rung: int, model: Model | WideResNet, layout: Layout) -> tuple[int, ...]:
    counts = [len(stage) for stage in layout.stage_layers(model.layers)]
    if isinstance(model, WideResNet):
        return tuple(counts)
    every = model.experts.every if model.experts else 1
    shared = gcd(*counts)
    if shared % every:
        return tuple(counts)  # stages differ in their experts; a divisor would move them
    spare = shared // every
    divisor = max(d for d in range(1, spare + 1) if spare % d == 0 and d <= 2**rung)
    return tuple(count // divisor for count in counts)


def _transformer(rung: int, model: Model, tp: int, *, layers: int, seq_len: int) -> Model:
    heads = max(tp, (model.heads >> rung) // tp * tp)
    head_dim = (model.hidden >> rung) // heads // 8 * 8
    hidden = heads * min(model.head_dim, max(head_dim, _SMALLEST["head_dim"]))
    experts = model.experts
    if experts:
        width = experts.ffn * hidden // model.hidden
        experts = msgspec.structs.replace(experts, ffn=width)
    return msgspec.structs.replace(
        model,
        hidden=hidden,
        layers=layers,
        heads=heads,
        ffn=model.ffn * hidden // model.hidden,
        vocab=_divided(model.vocab, rung, "vocab"),
        max_seq_len=seq_len,
        experts=experts,
    )


def _wide_resnet(rung: int, model: WideResNet, tp: int) -> WideResNet:
    return msgspec.structs.replace(
        model,
        channels=_divided(model.channels, rung, "channels", tp),
        image_size=_divided(model.image_size, rung, "image_size"),
        num_classes=_divided(model.num_classes, rung, "num_classes"),
    )


def _changes(
    before: tuple[msgspec.Struct, ...], after: tuple[msgspec.Struct, ...]
) -> tuple[str, ...]:
    """List every field that differs, with its old and new value."""
    found = []
    for old, new in zip(before, after, strict=True):
        for field in old.__struct_fields__:
            a, b = getattr(old, field), getattr(new, field)
            if field == "experts" and a:
                sizes = ((name, getattr(a, name), getattr(b, name)) for name in _OF_EXPERTS)
                found += [f"experts.{name} {x} -> {y}" for name, x, y in sizes if x != y]
            elif a != b and field not in ("name", "experts", "max_seq_len"):
                found.append(f"{field} {_text(a)} -> {_text(b)}")
    return tuple(found)


def _text(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def flops(
    model: Model | WideResNet, workload: Workload, layout: Layout, *, inference: bool = False
) -> float:
    """Count FLOPs of an iteration on all devices: forward 1, backward 2, recomputation 1."""
    passes = 1 if inference else 4 if layout.recompute == "full" else 3
    return step_flops(model, workload) / 3 * passes


def stage_bytes(
    model: Model | WideResNet, workload: Workload, layout: Layout, *, inference: bool = False
) -> float:
    """Return a rough bound of the bytes on the fullest device, in fp32."""
    most = 0.0
    for stage, layers in enumerate(layout.stage_layers(model.layers)):
        inside = layout.of_rank(stage)
        in_flight = 0 if inference else min(layout.pp - stage, layout.num_microbatches)
        kinds, about = (
            layer_kinds(model, workload.seq_len, layers),
            (model, workload.seq_len, _alike(inside)),
        )
        ends = layers.start == 0, layers.stop == model.layers
        held: float = sum(
            count * in_flight * _kept_bytes(*about, kind, inside.recompute)
            for kind, count in Counter(kinds).items()
        )
        held += max(_kept_bytes(*about, kind, "none", *ends) for kind in set(kinds))
        for weight in stage_weights(model, layers):
            ep = inside.ep if ".experts." in weight.name else 1
            shards = max(1, inside.shards // ep)
            each = _state_bytes(inside, shards, inference)
            held += weight.num_elements / (inside.tp * ep) * each
        most = max(most, held)
    return MARGIN * most


def _state_bytes(inside: Layout, shards: int, inference: bool) -> float:
    """Return the bytes of a parameter: masters 4, copies 2, gradients 4, moments 8, or shares."""
    if inference:
        return 6.0
    moments = 8 / shards if inside.zero >= 1 else 8
    gradients = 4 / shards if inside.zero >= 2 else 4
    return moments + gradients + (6 / shards if inside.zero == 3 else 6)


def _alike(inside: Layout) -> Layout:
    """Return a layout with only the fields that decide how much a layer saves of a microbatch."""
    return Layout(
        dp=inside.ep,
        ep=inside.ep,
        tp=inside.tp,
        sequence_parallel=inside.sequence_parallel,
        microbatch_size=inside.microbatch_size,
    )


@lru_cache(maxsize=4096)
def _kept_bytes(
    model: Model | WideResNet,
    seq_len: int,
    layout: Layout,
    kind: LayerKind,
    word: Recompute,
    first: bool = False,
    last: bool = False,
) -> int:
    """Return the bytes that a layer saves of a microbatch for backward, with its input. ``first``
    and ``last`` add what is made before the first layer and after the last."""
    whole = graph(
        model, layout.microbatch_size, seq_len, "fp32", layers=(kind,), first=first, last=last,
        recompute=(word,),
    )  # fmt: skip
    program = program_of(whole, layout, "fp32")
    tasks = [task for task in program.tasks if task.stream == "compute" and task.part != "dp"]
    written = {name for task in tasks if task.phase == "forward" for name in task.writes}
    kept = written & {name for task in tasks if task.phase != "forward" for name in task.reads}
    kept |= {name for task in tasks if task.part in ("embed", "head") for name in task.writes}
    buffers = (program.buffers[name] for name in kept)
    return sum(buffer.num_bytes for buffer in buffers if buffer.role == "activation")
