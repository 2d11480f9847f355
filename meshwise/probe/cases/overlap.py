"""``measure overlap``: a product of a model's layer beside training's collectives. No torch."""

from itertools import product

from meshwise.models.decoder import products
from meshwise.probe.cases.scope import Scope, typed
from meshwise.probe.cases.sizes import parse_sizes
from meshwise.spec import DTYPE_BYTES, Case, Collective, Decoder, Gemm, Model, Overlap
from meshwise.spec.op import IN_PLACE_ONLY, CollectiveKind, Dtype

_SENT: dict[Dtype, Dtype] = {"fp8": "bf16", "tf32": "fp32"}  # by training in these
KINDS: tuple[CollectiveKind, ...] = ("all_gather", "reduce_scatter", "all_reduce", "send_recv")


def cases(
    scope: Scope,
    *,
    models: tuple[Model | Decoder, ...] = (),
    microbatch_size: int = 1,
    seq_len: int | None = None,
    kinds: tuple[CollectiveKind, ...] = KINDS,
    sizes: str | None = None,
    backends: tuple[str, ...] = ("",),
) -> list[Case]:
    """Pair the largest product of each model's layers with collectives.

    Without models the product is a cube of 8192 (512 on CPUs).

    ``sizes`` of the collectives over all ranks as ``parse_sizes`` reads them, by default 16M,256M
    (256K,4M on CPUs), each rounded down to what divides among the ranks. ``backends``: of the
    collectives.
    """
    ranks = scope.world_size
    if ranks < 2:
        raise ValueError(f"overlap: {ranks} rank has no collective; use at least 2 (--nproc 2)")
    if sizes is None:
        sizes = "16M,256M" if scope.on_gpus else "256K,4M"
    found = parse_sizes(sizes)
    side = 8192 if scope.on_gpus else 512
    computes = [_product(scope, model, microbatch_size, seq_len) for model in models]
    if not models:
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
        for compute, size, kind, backend in product(computes, found, kinds, backends)
    ]


def _product(
    scope: Scope, model: Model | Decoder, microbatch_size: int, seq_len: int | None
) -> Gemm:
    tokens = seq_len or min(model.max_seq_len, 4096 if scope.on_gpus else 128)
    found = products(model, microbatch_size, tokens)
    dense = [one.gemm for one in found if one.part == "layer" and one.gemm.groups == 1]
    return typed(max(dense, key=lambda gemm: gemm.flops), scope.dtype)
