"""``measure overlap``: work of a model's layer beside training's collectives. No torch."""

from itertools import product
from typing import Any, cast

from meshwise.models.decoder import products
from meshwise.options.measure import OverlapOptions
from meshwise.prices import in_step
from meshwise.probe.cases.fsdp import beside_units
from meshwise.probe.cases.profile import profile_of
from meshwise.probe.cases.scope import Scope, models_of, typed
from meshwise.probe.cases.sizes import parse_sizes
from meshwise.spec import DTYPE_BYTES, Case, Collective, Gemm, Overlap
from meshwise.spec.op import IN_PLACE_ONLY, CollectiveKind, Dtype

_SENT: dict[Dtype, Dtype] = {"fp8": "bf16", "tf32": "fp32"}  # the dtype that training sends
KINDS: tuple[CollectiveKind, ...] = ("all_gather", "reduce_scatter", "all_reduce", "send_recv")


def cases(scope: Scope, asked: OverlapOptions) -> list[Case]:
    """Pair the largest product of each model's layers with collectives over all ranks.

    Without models the product is a cube of 8192 (512 on CPUs). Each size is rounded down until it
    divides among the ranks. With ``layers``, the layers of each model instead, beside the messages
    of their FSDP2 unit: its gather, and beside a backward the reduction of its gradients, too.
    """
    ranks, kinds = scope.world_size, cast("tuple[CollectiveKind, ...]", asked.kinds) or KINDS
    if ranks < 2:
        raise ValueError(f"overlap: {ranks} rank has no collective; use at least 2 (--nproc 2)")
    lowering = scope.cluster.device.lowering
    if asked.layers:
        if not asked.model:
            raise ValueError("layers: whose? add --model, as --model gpt-2.6b")
        profile = profile_of(scope, None, asked.seq_len)
        return [
            Case(op=op, world_size=ranks, **in_step(op, scope.cluster, lowering)._asdict())
            for model in models_of(asked)
            for op in beside_units(
                model,
                profile.length(model),
                asked.microbatch_size or profile.microbatches(model)[0],
                ranks,
                scope.dtype,
            )
        ]
    sizes = asked.sizes
    if sizes is None:
        sizes = "16M,256M" if scope.on_gpus else "256K,4M"
    found = parse_sizes(sizes)
    side = 8192 if scope.on_gpus else 512
    computes = [_product(scope, model, asked) for model in models_of(asked)]
    if not computes:
        computes = [typed(Gemm(m=side, n=side, k=side), scope.dtype)]
    sent = _SENT.get(scope.dtype, scope.dtype)
    unit = ranks * DTYPE_BYTES[sent]
    if min(found) < unit:
        raise ValueError(f"sizes = {sizes!r}: must be at least {unit} bytes, one {sent} a rank")
    if "all_to_all_v" in kinds:
        raise ValueError(f"kinds = {kinds}: overlap has no all_to_all_v; take all_to_all")
    return [
        Case(
            op=Overlap(
                compute=compute,
                collective=Collective(
                    kind=kind,
                    size_bytes=size // unit * unit,
                    group_size=ranks,
                    dtype=sent,
                    in_place=kind in IN_PLACE_ONLY,
                ),
            ),
            backend=backend,
            world_size=ranks,
        )
        for compute, size, kind, backend in product(computes, found, kinds, asked.backends or ("",))
    ]


def _product(scope: Scope, model: Any, asked: OverlapOptions) -> Gemm:
    tokens = asked.seq_len or min(model.max_seq_len, 4096 if scope.on_gpus else 128)
    found = products(model, asked.microbatch_size or 1, tokens)
    dense = [one.gemm for one in found if one.part == "layer" and one.gemm.groups == 1]
    return typed(max(dense, key=lambda gemm: gemm.flops), scope.dtype)
