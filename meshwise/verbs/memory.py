"""Compare the least memory that ranks need with what the machine has, before any process starts.

In: a plan and its options. Out: a reason in words. A device needs its weights. Training adds
gradients, moments and compute copies; decoding adds keys and values. A check needs the whole model
on rank 0's device, after all ranks have let go of the training. Activations are not counted (except
layer inputs that offload sends to the host), nor is the processes' own memory. So a refused plan
cannot run, but one that passes may still not fit. On CPUs all ranks of a host share its memory, or
less under a container's limit.
"""

import sys
from collections.abc import Sequence
from math import prod

from meshwise import machine
from meshwise.models import stream_shape
from meshwise.models.decoder import Weight, attention, stage_weights, weights
from meshwise.models.optimizer import WHOLE_STATES
from meshwise.options.run import RunOptions
from meshwise.spec import DTYPE_BYTES, Cluster, Layout, Plan, WideResNet
from meshwise.spec.layout import rank_of
from meshwise.units import format_bytes

FIX = {
    "train": "shard with zero 3, tp or pp over more devices, or take a smaller model; `meshwise "
    "plan` finds layouts that fit",
    "infer": "divide the weights over more devices with tp or pp, or take a smaller model",
    "decode": "divide weights and cache over more devices with tp or pp, or decode fewer sequences "
    "or tokens",
}


def check(plan: Plan, asked: RunOptions) -> None:
    """Refuse a plan that needs more than its devices or their hosts have."""
    if lacks := shortage(plan, asked):
        raise ValueError(f"{plan.model.name} {plan.layout.name}: {lacks}; {FIX[asked.mode]}")


def shortage(plan: Plan, asked: RunOptions) -> str:
    """Say what memory a plan lacks; "" if it lacks none that we know of."""
    lacks = missing(plan.cluster, *needed(plan, asked))
    return lacks or (missing(plan.cluster, checked(plan)) if asked.check else "")


def missing(cluster: Cluster, devices: Sequence[float], hosts: Sequence[float] = ()) -> str:
    """Say what memory ``cluster`` lacks if each rank needs these bytes of its device and host."""
    device, per_host = cluster.device, cluster.num_devices_per_host
    shared = device.kind == "cpu"
    most = max(devices)
    limit = cluster.usable_bytes
    if not shared and most > limit:
        return (
            f"rank {devices.index(most)} needs at least {format_bytes(most)} of device memory, and "
            f"{device.name} has {format_bytes(limit)}"
        )
    each = [*hosts] or [0.0] * len(devices)
    each = [a + b for a, b in zip(each, devices, strict=True)] if shared else each
    most = max(sum(each[start : start + per_host]) for start in range(0, len(each), per_host))
    if most > (limit := _host_bytes(cluster) if most else 0):
        return (
            f"the ranks of a host together need at least {format_bytes(most)} of its memory, and "
            f"here are {format_bytes(limit)}"
        )
    return ""


def _host_bytes(cluster: Cluster) -> int:
    """Return the memory of this host, or less if the cluster's file says so."""
    shares = cluster.num_devices_per_host * cluster.device.memory_bytes
    said = shares if cluster.device.kind == "cpu" else cluster.host_memory_bytes
    return min(machine.host_memory_bytes(), said or sys.maxsize)


def needed(plan: Plan, asked: RunOptions) -> tuple[list[float], list[float]]:
    """Return the bytes that each rank needs on its device, and those on its host."""
    layout, model = plan.layout, plan.model
    devices, hosts = [0.0] * layout.pp, [0.0] * layout.pp
    for stage, layers in enumerate(layout.stage_layers(model.layers)):
        inside, rank = layout.of_stage(stage), rank_of(layout.schedule, stage, layout.pp)
        for weight in stage_weights(model, layers):
            devices[rank] += weight.num_elements * _each_bytes(plan, inside, weight, asked)
        if asked.mode == "decode":
            devices[rank] += len(layers) * _cache_bytes(
                plan, inside, asked.counts(plan.cluster.device.kind).new_tokens
            )
        if asked.mode == "train" and plan.recipe.offload:
            hosts[rank] += _offloaded_bytes(plan, inside, layers)
    of_ranks = [layout.pipeline_rank_of(rank) for rank in range(layout.num_devices)]
    return [devices[rank] for rank in of_ranks], [hosts[rank] for rank in of_ranks]


def checked(plan: Plan) -> list[float]:
    """Return the bytes that each rank needs on its device while rank 0 trains the whole model."""
    each = (8 if isinstance(plan.model, WideResNet) else 4) * (2 + _moments(plan))
    whole = each * sum(weight.num_elements for weight in weights(plan.model))
    return [whole] + [0.0] * (plan.layout.num_devices - 1)


def _each_bytes(plan: Plan, inside: Layout, weight: Weight, asked: RunOptions) -> float:
    """Return the bytes that one element of a weight takes on a device of its stage. This counts
    every weight as cut by tp."""
    ep = inside.ep if ".experts." in weight.name else 1
    compute = DTYPE_BYTES[plan.dtype]
    if asked.mode == "decode":
        return compute / inside.tp / ep
    shards = max(inside.shards, ep)
    if asked.mode == "infer":
        return compute / inside.tp / shards
    kept = DTYPE_BYTES[plan.recipe.weights]
    copied = inside.zero < 3 and (shards > ep or compute != kept)
    return (kept * (2 + _moments(plan)) / shards + copied * compute / ep) / inside.tp


def _moments(plan: Plan) -> int:
    return WHOLE_STATES[plan.recipe.optimizer]


def _cache_bytes(plan: Plan, inside: Layout, new_tokens: int) -> float:
    """Return the bytes of a layer's keys and values, for a device's sequences at full length."""
    assert not isinstance(plan.model, WideResNet)
    rows, tokens = plan.workload.global_batch_size // inside.dp, plan.workload.seq_len + new_tokens
    op = attention(plan.model, rows, tokens, dtype=plan.dtype)
    width = op.head_dim + (op.head_dim_v or op.head_dim)
    return rows * tokens * op.kv_heads * width * DTYPE_BYTES[plan.dtype] / inside.tp


def _offloaded_bytes(plan: Plan, inside: Layout, layers: range) -> float:
    """Return the bytes of a microbatch's layer inputs that leave the device: neither the last
    layer's nor what the stage receives."""
    shape = plan.model, inside.microbatch_size, plan.workload.seq_len
    inputs = sum(prod(stream_shape(*shape, layer)) for layer in layers[layers.start > 0 : -1])
    return inputs * DTYPE_BYTES[plan.dtype] / inside.cp / inside.tp
