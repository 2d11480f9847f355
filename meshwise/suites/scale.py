"""The structure of a case at a size that a device can hold.

In: model, workload and layout of a case, and the bytes of one device. Out: the same of a smaller
one, and what was changed, in words. Every degree of the mesh, the number of experts, the width
factor and the residual blocks stay, and so does the ratio of layers between stages; the rest is
divided by 2^r, with the smallest r that fits:

- hidden, heads, feed-forwards, vocabulary, sequence; channels, image, classes; rows of a
  microbatch; layers, each stage's by the same divisor, so that experts stay in the same places;
- and microbatches: no more than two a pipeline stage.

What fits is a rough bound, not a prediction: ``MARGIN`` times the states of weights (ZeRO as in
the layout) and what a stage keeps of the microbatches in flight, all in fp32 and not divided by tp.
A transformer layer keeps 10 hidden + 3 ffn numbers a token, ffn for every expert chosen, and
3 seq^2 a head of attention scores; a convolution two outputs. Of recomputed layers only the inputs
stay, besides all of one layer.

CPUs have more memory than they can compute with: there the ladder goes on until an iteration has at
most ``device_flops`` a device, or to its end.
"""

from math import gcd, inf, lcm, prod
from typing import NamedTuple

import msgspec

from meshwise.models import step_flops, wide_resnet
from meshwise.models.counts import weights
from meshwise.models.decoder import Weight
from meshwise.spec import Layout, Model, WideResNet, Workload

MARGIN = 1.5
_RUNGS = 24  # by then every size is its smallest
_SMALLEST = {  # what no rung goes below, unless it was smaller before
    "seq_len": 32,
    "vocab": 128,
    "image_size": 64,  # the last resolution has 2 x 2: batch norm needs several values
    "num_classes": 16,
    "channels": 8,
    "head_dim": 8,
}


class Scaled(NamedTuple):
    """``changes``: ``hidden 2560 -> 320`` and so on; empty if the case fits as it is."""

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
    """The largest of the ladder that fits ``device_bytes``; ValueError if none does. With
    ``device_flops`` smaller still, until an iteration has no more of them a device."""
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
    """The case with its sizes divided by 2^rung."""
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
    """``size`` / 2^rung, not below the smallest, rounded up to a multiple; never above ``size``."""
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
    """Every field that differs, once."""
    found = []
    for old, new in zip(before, after, strict=True):
        for field in old.__struct_fields__:
            a, b = getattr(old, field), getattr(new, field)
            if field == "experts" and a and a.ffn != b.ffn:
                found.append(f"experts.ffn {a.ffn} -> {b.ffn}")
            elif a != b and field not in ("name", "experts", "max_seq_len"):
                found.append(f"{field} {_text(a)} -> {_text(b)}")
    return tuple(found)


def _text(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def flops(
    model: Model | WideResNet, workload: Workload, layout: Layout, *, inference: bool = False
) -> float:
    """FLOPs of an iteration on all devices: forward, backward twice that, and forward again."""
    passes = 1 if inference else 4 if layout.recompute == "full" else 3
    return step_flops(model, workload) / 3 * passes


def least_bytes(
    model: Model | WideResNet, layout: Layout, element_bytes: int, *, inference: bool = False
) -> float:
    """Bytes that the fullest device holds whatever else it does: weights of ``element_bytes`` an
    element, and in training their gradients in fp32, after ZeRO. Less than it is, by the norms that
    tp does not divide and the tied copy in a pipeline's last stage."""
    most = 0.0
    for stage, layers in enumerate(layout.stage_layers(model.layers)):
        inside = layout.of_rank(stage)
        weight_shards = inside.shards if inside.zero == 3 else 1
        gradient_shards = inside.shards if inside.zero >= 2 else 1
        held = 0.0
        for weight in weights(model):
            if not _is_in(weight, layers, model.layers):
                continue
            ep = inside.ep if ".experts." in weight.name else 1
            each = element_bytes / max(weight_shards, ep)
            each += 0.0 if inference else 4 / max(gradient_shards, ep)
            held += weight.num_elements / inside.tp * each
        most = max(most, held)
    return most


def _is_in(weight: Weight, layers: range, count: int) -> bool:
    """Whether the stage of these layers has it, of the model's ``count``."""
    if weight.unit != "root":
        return int(weight.unit.removeprefix("layers.")) in layers
    comes_before = weight.name.startswith(("embed", "positions", "stem"))
    return layers.start == 0 if comes_before else layers.stop == count


def stage_bytes(
    model: Model | WideResNet, workload: Workload, layout: Layout, *, inference: bool = False
) -> float:
    """A bound of what the fullest device holds, in fp32."""
    most = 0.0
    for stage, layers in enumerate(layout.stage_layers(model.layers)):
        inside = layout.of_rank(stage)
        kept = 1 if inference else min(layout.pp - stage, layout.num_microbatches)
        if isinstance(model, WideResNet):
            held = _images_of_stage(model, layers, inside, kept, inference)
        else:
            held = _text_of_stage(model, workload.seq_len, layers, inside, kept, inference)
        state = _state_bytes(held.dense, inside, inside.shards, inference)
        state += _state_bytes(held.experts, inside, max(1, inside.shards // inside.ep), inference)
        most = max(most, state + 4 * held.activations)
    return MARGIN * most


class _Held(NamedTuple):
    """Numbers on one device: parameters of both kinds, before ZeRO, and activations."""

    dense: float
    experts: float
    activations: float


def _state_bytes(parameters: float, inside: Layout, shards: int, inference: bool) -> float:
    """Masters of 4 bytes and copies of 2, gradients of 4 and moments of 8."""
    if inference:
        return 6 * parameters
    moments = 8 / shards if inside.zero >= 1 else 8
    gradients = 4 / shards if inside.zero >= 2 else 4
    weights = 6 / shards if inside.zero == 3 else 6
    return parameters * (moments + gradients + weights)


def _text_of_stage(
    model: Model, seq: int, layers: range, inside: Layout, kept: int, inference: bool
) -> _Held:
    h, rows, experts = model.hidden, inside.microbatch_size, model.experts
    with_experts = sum(model.has_experts(layer) for layer in layers)
    ends = (layers.start == 0) + (layers.stop == model.layers)
    divided = len(layers) * 4 * h**2 + (len(layers) - with_experts) * 2 * h * model.ffn
    dense = divided / inside.tp + ends * (model.vocab / inside.tp + seq) * h
    routed = 0.0
    if experts:
        routed = with_experts * experts.num_experts * 2 * h * experts.ffn / (inside.ep * inside.tp)

    tokens = rows * seq
    chosen = experts.top_k if experts else 1
    whole = tokens * (10 * h + 3 * chosen * model.ffn) + 3 * rows * model.heads * seq**2
    stays = 0 if inference else tokens * h if inside.recompute == "full" else whole
    logits = 3 * tokens * model.vocab / inside.tp if layers.stop == model.layers else 0.0
    return _Held(dense, routed, kept * len(layers) * stays + whole + logits)


def _images_of_stage(
    model: WideResNet, layers: range, inside: Layout, kept: int, inference: bool
) -> _Held:
    units = {f"layers.{layer}" for layer in layers}
    if layers.start == 0 or layers.stop == model.layers:
        units.add("root")
    parameters = sum(weight.num_elements for weight in weights(model) if weight.unit in units)
    outputs = dict.fromkeys(units, 0)
    for conv in wide_resnet.convolutions(model):
        if conv.unit in units:
            outputs[conv.unit] += 2 * conv.out_channels * conv.size**2  # and their norm's
    inputs = sum(prod(wide_resnet.activation_shape(model, 1, layer)) for layer in layers)
    every = inputs if inside.recompute == "full" else sum(outputs.values())
    stays = 0 if inference else kept * every
    return _Held(parameters, 0.0, inside.microbatch_size * (stays + max(outputs.values())))
