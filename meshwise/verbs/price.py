"""show price: what an operation costs, how sure that is, and what it rests on."""

import math
import re
from collections.abc import Sequence
from typing import Any, cast, get_args

import msgspec

from meshwise import models
from meshwise.models import Piece, catalogue, placement
from meshwise.models.decoder import weights
from meshwise.options import keywords
from meshwise.options.price import PriceOptions
from meshwise.prices import Prices, in_step, op_key
from meshwise.prices.key import How
from meshwise.prices.uneven import as_even, even_bytes
from meshwise.probe.cases.scope import typed
from meshwise.probe.cases.sizes import embedding_splits
from meshwise.search.charges import charges, corrections
from meshwise.search.simulate import Amounts, add
from meshwise.spec import (
    Attention,
    Block,
    Collective,
    Convolution,
    Curve,
    Elementwise,
    Factor,
    Gemm,
    Layout,
    Op,
    PriceTier,
    Recipe,
    Record,
    Sized,
    Surface,
    WideResNet,
)
from meshwise.spec.op import (
    DTYPE_BYTES,
    REDUCING,
    ROOTED,
    WHOLE_NUMBERS,
    CollectiveKind,
    Dtype,
    ElementwiseKind,
    SentDtype,
)
from meshwise.units import format_bytes, parse_bytes
from meshwise.verbs import measure
from meshwise.verbs.costs import known_prices

COLLECTIVES, MEMORY_BOUND = get_args(CollectiveKind), get_args(ElementwiseKind)
_MODEL = ("model", "tp", "dtype")
_RUN = ("regime", "backend")
_EVEN = ("size", "group", "stride", "in_place", "dtype", *_RUN)
USES = {
    **{
        kind: (*_EVEN, *["op"] * (kind in REDUCING), *["root"] * (kind in ROOTED))
        for kind in COLLECTIVES
    },
    "all_to_all_v": ("splits", "tables", "rule", "dtype", *_RUN),
    **dict.fromkeys(MEMORY_BOUND, ("size", "direction", *_RUN)),
    "gemm": ("size", "shape", "trans", "groups", "dtype", *_RUN),
    **dict.fromkeys(("attention", "conv"), ("size", "shape", "direction", "dtype", *_RUN)),
    "layer": (*_MODEL, "cp", "ep", "microbatch_size", "seq_len", "direction"),
    "unit": (*_MODEL, "group", "stride", *_RUN),
}  # fmt: skip


class Priced(Record, kw_only=True):
    """A price with its interval: time / (1 + error) to time x (1 + error). ``rests_on``: the law
    and the points, or the neighbours, that it comes from."""

    op: Op
    name: str
    time_s: float
    low_s: float
    high_s: float
    tier: PriceTier
    rests_on: str
    notes: tuple[str, ...] = ()


@keywords(PriceOptions)
def price(asked: PriceOptions) -> list[Priced]:
    """Price an operation: a collective or memory-bound work of some bytes, a product, attention, a
    convolution, a layer of a model, or the collectives of one of its FSDP units."""
    costs = known_prices(asked.cluster, asked.hosts, asked.costs)
    prices, dtype = Prices(costs, datasheet=True), asked.dtype or costs.dtype

    def run(op: Op) -> How:
        usual = in_step(op, costs.cluster, costs.lowering)
        return usual._replace(backend=asked.backend, regime=asked.regime or usual.regime)

    return [of(op, prices, run(op)) for op in _ops(asked, dtype)]


def _ops(asked: PriceOptions, dtype: SentDtype) -> Sequence[Op]:
    what = asked.what.replace("-", "_")
    if what not in USES:
        raise ValueError(f"what = {asked.what!r}: must be one of {', '.join(USES)}")
    if odd := asked.said().keys() - {"what", "cluster", "hosts", "costs", *USES[what]}:
        raise ValueError(f"{min(odd)}: the price of {what} does not depend on it; leave it out")
    if what in COLLECTIVES:
        return [_collective(what, asked, dtype)]
    if dtype in WHOLE_NUMBERS:
        raise ValueError(f"dtype = {dtype!r}: only collectives have it")
    if what in MEMORY_BOUND:
        half = _bytes(asked) // 2
        parts = {"read_bytes": half, "write_bytes": _bytes(asked) - half}
        return [Elementwise(kind=what, direction=asked.direction, **parts)]  # type: ignore[arg-type]
    if what == "gemm":
        m, n, k = _extents(asked, "M,N,K")
        trans: dict[str, Any] = {"trans_a": asked.trans[0] == "t", "trans_b": asked.trans[1] == "t"}
        return [typed(Gemm(m=m, n=n, k=k, groups=asked.groups, **trans), cast("Dtype", dtype))]
    if what == "attention":
        batch, tokens, heads, width = _extents(asked, "BATCH,TOKENS,HEADS,HEAD_DIM")
        sizes = {"q_len": tokens, "kv_len": tokens, "heads": heads, "kv_heads": heads}
        of = {"dtype": dtype, "direction": asked.direction}
        return [Attention(batch=batch, head_dim=width, **sizes, **of)]  # type: ignore[arg-type]
    if what == "conv":
        return _convolutions(asked, dtype)
    return _layer(asked, dtype) if what == "layer" else _unit(asked, dtype)


def _convolutions(asked: PriceOptions, dtype: SentDtype) -> list[Convolution]:
    """Return the products of a convolution's forward or its backward."""
    names = ("batch", "in_channels", "out_channels", "height", "width", "kernel", "stride")
    extents = _extents(asked, "BATCH,IN,OUT,HEIGHT,WIDTH,KERNEL,STRIDE")
    how: dict[str, Any] = {"dtype": dtype, **dict(zip(names, extents, strict=True))}
    backward = asked.direction == "backward"
    products: tuple[Any, ...] = ("dgrad", "wgrad") if backward else ("forward",)
    return [Convolution(product=product, **how) for product in products]


def _bytes(asked: PriceOptions) -> int:
    if asked.size is None:
        raise ValueError(f"size: {asked.what} needs one, as 64MiB")
    return parse_bytes(asked.size, "size")


def _extents(asked: PriceOptions, names: str) -> list[int]:
    """Parse the shape, as many whole numbers as there are ``names``."""
    if asked.shape and asked.size:
        raise ValueError(f"shape = {asked.shape!r}: {asked.size} says it already; give one of them")
    words = (asked.shape or asked.size or "").split(",")
    if not any(words):
        raise ValueError(f"shape: {asked.what} needs one, as {names}")
    if len(words) != names.count(",") + 1 or not all(re.fullmatch("[0-9]+", w) for w in words):
        raise ValueError(f"shape = {asked.shape or asked.size!r}: must be {names}, whole numbers")
    return list(map(int, words))


def _collective(kind: str, asked: PriceOptions, dtype: SentDtype) -> Collective:
    usual = "yes" if kind == "all_reduce" else "no"
    in_place = (usual if asked.in_place == "usual" else asked.in_place) == "yes"
    how: dict[str, Any] = {"kind": kind, "dtype": dtype, "in_place": in_place}
    how |= {"redop": asked.op, "root": asked.root}
    if kind != "all_to_all_v":
        group: dict[str, Any] = {"group_size": asked.group, "group_stride": asked.stride}
        return Collective(size_bytes=_bytes(asked), **group, **how)
    if (asked.splits is None) == (asked.tables is None):
        raise ValueError("splits: all_to_all_v needs them: --splits FILE, or --tables, not both")
    splits = (
        measure.splits_of(asked.splits)
        if asked.tables is None
        else embedding_splits(asked.tables, "tables")
    )
    if any(len(row) != len(splits) for row in splits):
        raise ValueError(f"splits: must be {len(splits)} rows of {len(splits)} byte counts")
    sums = [*map(sum, splits), *map(sum, zip(*splits, strict=True))]
    op = Collective(size_bytes=max(sums), splits=splits, group_size=len(splits), **how)
    return op if asked.rule == "busiest" else as_even(op, asked.rule)


def _model(asked: PriceOptions) -> Any:
    if asked.model is None:
        raise ValueError(f"model: {asked.what} needs one, as gpt-2.6b")
    return catalogue.find_any(asked.model)


def _layer(asked: PriceOptions, dtype: SentDtype) -> list[Block]:
    model = _model(asked)
    seq_len = asked.seq_len or (1 if isinstance(model, WideResNet) else model.max_seq_len)
    layout = Layout(
        dp=math.lcm(asked.ep, asked.cp) // asked.cp,
        tp=asked.tp,
        cp=asked.cp,
        ep=asked.ep,
        microbatch_size=asked.microbatch_size,
    )
    if reason := placement.obstacle(model, seq_len, layout):
        raise ValueError(reason)
    blocks = models.blocks_of(model, seq_len, layout, cast("Dtype", dtype))
    return [
        msgspec.structs.replace(block, recompute=asked.recompute)
        for ((part, _), way), block in blocks.items()
        if part == "layer" and way == asked.direction
    ]  # fmt: skip


def _unit(asked: PriceOptions, dtype: SentDtype) -> list[Op]:
    """Return the gather of a layer's parameters, and the scatter of their gradients."""
    model = _model(asked)
    if reason := placement.obstacle(model, 1, Layout(tp=asked.tp)):
        raise ValueError(reason)
    first = [weight for weight in weights(model) if weight.unit == "layers.0"]
    elements = sum(weight.num_elements for weight in first) // asked.tp
    elements -= elements % asked.group
    group: dict[str, Any] = {"group_size": asked.group, "group_stride": asked.stride}
    sent: tuple[tuple[CollectiveKind, SentDtype], ...] = (
        ("all_gather", dtype), ("reduce_scatter", Recipe().reduce)
    )  # fmt: skip
    return [
        Collective(kind=kind, size_bytes=elements * DTYPE_BYTES[kept], dtype=kept, **group)
        for kind, kept in sent
    ]


def of(op: Op, prices: Prices, run: How) -> Priced:
    """Price an operation alone, or a layer as the sum of its operations, as in a plan."""
    prices.begin()
    costs = prices.costs
    key = op_key(op, run, costs.cluster)
    if isinstance(op, Block):
        piece: Piece = (op.part, op.form)
        errors = Amounts()
        ways = (op.direction,) if op.recompute == "none" else models.DIRECTIONS
        blocks: dict[tuple[Piece, str], Block] = {
            (piece, way): msgspec.structs.replace(op, direction=way, recompute="none")
            for way in ways
        }
        correct = corrections(blocks, lambda _: piece, prices, recompute=(op.recompute,))
        tasks = models.block_tasks(
            op, models.device_of(costs.cluster, costs.lowering), costs.lowering
        )
        parts = [*map(charges(correct, prices), tasks)]
        for part in parts:
            add(errors, part.group, part.error_s)
        apart = {
            way: [task for task in tasks if correct.way(task) == way] for _, way in correct.factors
        }
        time_s = sum(
            correct.factors[piece, way][0] * prices.composed_s(some, correct.stretch[piece])
            for way, some in apart.items()
        )
        factor = time_s / prices.composed_s(tasks, correct.stretch[piece])
        error = math.hypot(*errors.values()) / time_s
        rests_on = f"{len(parts)} operations"
        if key.category in prices.known:
            rests_on += f" added up, x {factor:.3f}: a measured layer over such a sum"
        tier = prices.tier
    else:
        found = prices.estimate(op, run)
        time_s, error, tier = found.time_s, found.error, found.source
        rests_on = _rests_on(prices.fitted(op, run), op, tier)
        if isinstance(op, Sized) and not time_s:
            rests_on = "no bytes"
        elif key.category not in prices.known and tier != "datasheet":
            rests_on = f"a similar operation: {rests_on}"
    return Priced(
        op=op,
        name=key.name,
        time_s=time_s,
        low_s=time_s / (1 + error),
        high_s=time_s * (1 + error),
        tier=tier,
        rests_on=rests_on,
        notes=tuple(prices.notes),
    )


def _rests_on(price: Curve | Surface | Factor | None, op: Op, tier: PriceTier) -> str:
    if tier == "datasheet" or price is None:
        return "the cluster's data sheet"
    many = len(price.runs) > 2  # which of them measured it is not kept
    runs = f", of {f'{len(price.runs)} runs' if many else ', '.join(price.runs)}"
    if isinstance(price, Surface):
        shapes = f"{len(price.shapes)} measured shapes"
        return f"{'its measured time' if tier == 'measured' else shapes}{runs}"
    if not isinstance(price, Curve) or not isinstance(op, Sized):
        return f"measured layers{runs}"
    x = even_bytes(op) if isinstance(op, Collective) else op.bytes
    if tier == "measured":
        return f"the measured time of {format_bytes(x)}{runs}"
    near = [size for size in price.x_bytes if size <= x][-1:] + [
        size for size in price.x_bytes if size > x
    ][:1]
    return f"{price.law} at {' and '.join(map(format_bytes, near))}{runs}"
