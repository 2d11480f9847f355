"""``measure attention``: shapes of models, listed or default shapes, by every back end. No torch.

The order is shape by shape, then back end by back end: forward, then backward. A back end that a
machine lacks is a case too, so that the record says it was skipped, and why.
"""

from collections.abc import Iterator
from itertools import product
from typing import Literal, NamedTuple, get_args

from msgspec.structs import replace

from meshwise.models import decoder
from meshwise.models.primus import AttentionShape
from meshwise.options.measure import AttentionOptions
from meshwise.probe.cases.scope import Scope, distinct, models_of
from meshwise.spec import Attention, Case, Derived
from meshwise.spec.op import Direction

Backend = Literal["", "flash", "cudnn", "efficient", "math", "flex", "varlen", "fa3", "fa4"]

BACKENDS: tuple[Backend, ...] = get_args(Backend)
DIRECTIONS: tuple[Direction, ...] = get_args(Direction)


class Heads(NamedTuple):
    heads: int
    kv_heads: int
    head_dim: int


class FlopScale(NamedTuple):
    """Default shapes: each of ``heads`` with each of ``seq_lens``, ``tokens`` in a batch."""

    heads: tuple[Heads, ...]
    tokens: int
    seq_lens: tuple[int, ...]
    of_models: int  # a model's sequence length, or less if the model allows only less


GPU = FlopScale((Heads(32, 32, 128), Heads(32, 8, 128)), 16384, (2048, 4096, 8192, 16384), 4096)
CPU = FlopScale((Heads(4, 4, 64), Heads(4, 2, 64)), 512, (128, 512), 128)


def cases(scope: Scope, asked: AttentionOptions) -> list[Case]:
    """List each shape with every back end, no case twice."""
    return distinct(derived(scope, asked))


def derived(scope: Scope, asked: AttentionOptions) -> list[Derived]:
    """List cases with their model; a shape of two models comes twice. Each ``window`` adds a case
    to every shape.

    Without models or shapes: 32 heads of 128, 32 or 8 key heads, 16384 tokens (less on CPUs).
    """
    windows, shapes = asked.windows, asked.shapes or ()
    backends, directions = asked.backends or BACKENDS, asked.directions or DIRECTIONS
    sizes = asked.microbatch_sizes or (1,)
    if windows and not asked.causal:
        raise ValueError(
            f"windows = {windows}: only causal attention has a window; leave causal on"
        )
    if unknown := set(backends) - set(BACKENDS):
        known = ", ".join(filter(None, BACKENDS))
        raise ValueError(f"backends = {', '.join(sorted(unknown))}: must be of {known}")
    found: list[tuple[str, Attention]] = []
    if asked.model or shapes:
        found += dict.fromkeys(_of_models(scope, asked, sizes))
        found += [(one.model, _listed(scope, one, size)) for one in shapes for size in sizes]
    else:
        found += [("", op) for op in _usual(scope, asked.seq_lens, asked.causal)]
    regime: Literal["cold", "warm"] = "cold" if scope.on_gpus else "warm"
    rows = []
    for name, op in found:
        masks = [op, *(replace(op, window=window) for window in windows if op.causal)]
        for mask, backend, direction in product(masks, backends, directions):
            case = Case(
                op=replace(mask, direction=direction),
                regime=regime,
                backend=backend,
                world_size=scope.world_size,
            )
            hidden = op.heads * op.head_dim
            rows.append(Derived(name, op.batch, op.q_len, hidden, 1, "attention", case))
    return rows


def _of_models(
    scope: Scope, asked: AttentionOptions, sizes: tuple[int, ...]
) -> Iterator[tuple[str, Attention]]:
    usual = (GPU if scope.on_gpus else CPU).of_models
    for model in models_of(asked):
        lengths = asked.seq_lens or (min(model.max_seq_len, usual),)
        for batch, length in product(sizes, lengths):
            for op in decoder.attentions(model, batch, length, dtype=scope.dtype):
                yield model.name, op if asked.causal else replace(op, causal=False, window=None)


def _listed(scope: Scope, shape: AttentionShape, batch: int) -> Attention:
    same = shape.head_dim_v == shape.head_dim_qk
    return Attention(
        batch=batch,
        q_len=shape.seqlen_q,
        kv_len=shape.seqlen_kv,
        heads=shape.num_head_q,
        kv_heads=shape.num_head_kv,
        head_dim=shape.head_dim_qk,
        head_dim_v=None if same else shape.head_dim_v,
        causal=shape.causal,
        dtype=scope.dtype,
    )


def _usual(scope: Scope, seq_lens: tuple[int, ...], causal: bool) -> Iterator[Attention]:
    scale = GPU if scope.on_gpus else CPU
    for (heads, kv_heads, head_dim), length in product(scale.heads, seq_lens or scale.seq_lens):
        yield Attention(
            batch=max(1, scale.tokens // length), q_len=length, kv_len=length, heads=heads,
            kv_heads=kv_heads, head_dim=head_dim, causal=causal, dtype=scope.dtype,
        )  # fmt: skip
