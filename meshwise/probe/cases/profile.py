"""``measure profile``: the cases that prices are fitted from, the most useful first. No torch.

In: cluster, models, dtype. Out: cases, ordered so that a run cut short calibrates best:

    0  what no plan can do without: copies, one product of each kind, and the messages that plans
       send (``messages``), of every curve the least size and one in the middle
    1  the products of each model's layer at a typical microbatch size and the layers as blocks,
       the optimizer, head and its products; the largest messages that plans send
    2  the same of every tensor-parallel degree, with and without sequence parallelism; unsharded at
       two other microbatch sizes; messages in between; layers whose sequences or experts ranks
       share; sharded at the other two sizes; layers beside the messages of their FSDP2 unit
    3  the other sizes of messages, the layer's attention at other lengths, one more microbatch
       size, element-wise work by its kind, what this model does not send, square and skinny GEMMs,
       other attention shapes

Operations come before the block they make up, since a block calibrates nothing without their
prices. A block's forward and backward are neighbours, to share one set-up. Image models have layers
of several shapes, a block each: the most frequent in round 1, the others in round 2.

Each case is timed as a step runs it (``prices.in_step``). On a GPU, blocks are timed after half a
second of the same work, to run at the clocks that the power cap allows. Cases with the same price
key and coordinates become one case. Reductions are also measured in fp32, the dtype in which
gradients are reduced over data ranks.
"""

import itertools
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from msgspec.structs import replace

from meshwise.models import DIRECTIONS, block_ops, blocks_of, graph, placement, program_of
from meshwise.models.catalogue import default_model, default_workload
from meshwise.models.eager_cpu import device_of
from meshwise.models.graph import Graph
from meshwise.options.measure import ProfileOptions, largest_bytes
from meshwise.prices import in_step, op_key
from meshwise.prices.key import How
from meshwise.probe.cases.fsdp import beside_units
from meshwise.probe.cases.kinds import by_kind
from meshwise.probe.cases.messages import Sent, Sizing, degrees, sent
from meshwise.probe.cases.scope import Scope, in_fp8, models_of, refuse_none_in_fp8, with_fp8
from meshwise.spec import (
    DTYPE_BYTES,
    AnyModel,
    Attention,
    Block,
    Case,
    Cluster,
    Collective,
    Elementwise,
    Gemm,
    Layout,
    Op,
    Overlap,
    Shaped,
    WideResNet,
    layer_kinds,
)
from meshwise.spec.op import REDUCING, CollectiveKind, Dtype, Lowering

KiB, MiB, GiB = 2**10, 2**20, 2**30
SHARDING: tuple[CollectiveKind, ...] = ("all_gather", "reduce_scatter")
MAIN: tuple[CollectiveKind, ...] = (*SHARDING, "all_reduce")
IN_PLACE = ("all_reduce", "broadcast")  # as in torch
FIRST = slice(1)  # only the first of several blocks or sizes
OTHER: tuple[CollectiveKind, ...] = ("all_to_all", "broadcast", "send_recv")


Models = tuple[AnyModel, ...]
Messages = list[Sent]
For = tuple[Op, str]  # and what it is measured for
PRODUCTS = "products of the model"


class ProfileSizes(NamedTuple):
    """Sizes that suit one kind of device; ``coarse`` ones come first, ``dense`` ones last."""

    microbatches: tuple[int, ...]  # first one that outlasts the host's launches, then others
    images: tuple[int, ...]  # in a microbatch, a typical number first
    coarse_bytes: tuple[int, ...]  # collectives
    dense_bytes: tuple[int, ...]  # most important first: those outside the coarse range
    coarse_copies: tuple[int, ...]
    dense_copies: tuple[int, ...]
    optimizer: tuple[int, ...]  # bytes of a step; a model's step moves more than the largest
    squares: tuple[int, ...]
    long: int  # the long side of a skinny GEMM
    skinny: tuple[int, ...]
    attention: tuple[tuple[int, int, int], ...]  # heads, tokens, head_dim


SCALES = {
    "cuda": ProfileSizes(
        microbatches=(16, 4, 1, 8),
        images=(32, 8, 64),
        coarse_bytes=(64 * KiB, MiB, 16 * MiB, 256 * MiB),
        dense_bytes=(GiB, 4 * KiB, 64 * MiB, 4 * MiB, 256 * KiB),
        coarse_copies=(64 * KiB, 4 * MiB, 64 * MiB, GiB),
        dense_copies=(MiB, 16 * MiB, 256 * MiB, 4 * GiB, 256 * KiB),
        optimizer=(GiB, 64 * MiB, 4 * GiB, 256 * MiB, 16 * MiB, 2 * GiB),
        squares=(8192, 4096, 2048, 1024, 512, 256),
        long=8192,
        skinny=(128, 1024),
        attention=(
            (32, 512, 128),
            (32, 2048, 128),
            (32, 4096, 128),
            (32, 2048, 64),
            (8, 8192, 128),
        ),
    ),
    "cpu": ProfileSizes(
        microbatches=(2, 1, 4),
        images=(2, 1, 4),
        coarse_bytes=(4 * KiB, 64 * KiB, MiB, 16 * MiB),
        dense_bytes=(64 * MiB, 4 * MiB, 256 * KiB, 16 * KiB, 2 * MiB),
        coarse_copies=(64 * KiB, MiB, 16 * MiB, 256 * MiB),
        dense_copies=(64 * MiB, 4 * MiB, 256 * KiB),
        optimizer=(64 * MiB, MiB, 256 * MiB, 16 * MiB, 4 * MiB, 128 * MiB),
        squares=(1024, 512, 256, 128),
        long=1024,
        skinny=(64, 256),
        attention=((4, 64, 64), (4, 256, 64), (4, 512, 64), (4, 256, 128)),
    ),
}


class Profile(NamedTuple):
    """The settings that all cases of one profile share."""

    cluster: Cluster
    world_size: int
    dtype: Dtype
    lowering: Lowering
    scale: ProfileSizes
    seq_len: int | None = None
    fp8: bool = False  # layers are measured in fp8, too

    def length(self, model: AnyModel) -> int:
        """Return the tokens of a sequence: ``seq_len`` if given, else the model's default."""
        usual = default_workload(self.cluster, model).seq_len
        return usual if self.seq_len is None or isinstance(model, WideResNet) else self.seq_len

    def microbatches(self, model: AnyModel) -> tuple[int, ...]:
        """List microbatch sizes, a typical one first; the longer the sequences, the fewer."""
        if isinstance(model, WideResNet):
            return self.scale.images
        usual = default_workload(self.cluster, model).seq_len
        fewer = (size * usual // self.length(model) for size in self.scale.microbatches)
        return tuple(dict.fromkeys(max(1, size) for size in fewer))

    def work(self, model: AnyModel) -> Sizing:
        """Return the model with its smallest, a typical and its largest microbatch by dp."""
        usual, typical = default_workload(self.cluster, model), self.microbatches(model)[0]
        batch = usual.global_batch_size * usual.seq_len // self.length(model)
        by_dp = {dp: max(1, batch // dp) for dp in degrees(self.world_size)}
        sizes = {dp: tuple(sorted({1, min(typical, most), most})) for dp, most in by_dp.items()}
        return Sizing(model, self.length(model), sizes)


def cases(scope: Scope, asked: ProfileOptions) -> list[Case]:
    """List the cases of a profile in priority order, none twice.

    The operations are those of ``model``, by default of a model that fills the cluster.
    ``lowering`` is that of the blocks, and so of the plans made from them. Its default is compiled
    on GPUs and eager on CPUs. Single operations are always eager.
    """
    return [case for case, _ in with_uses(scope, asked)]


def with_uses(scope: Scope, asked: ProfileOptions) -> list[tuple[Case, str]]:
    """List the cases of a profile, each with the words for what it is for."""
    cluster, world_size = scope.cluster, scope.world_size
    if not 1 <= world_size <= cluster.num_devices:
        raise ValueError(
            f"world_size = {world_size}: cluster {cluster.name!r} has {cluster.num_devices} "
            f"devices; use 1 to {cluster.num_devices}"
        )
    profile = profile_of(scope, asked.lowering, asked.seq_len)
    profile = profile._replace(fp8=in_fp8(asked.recipe, scope))
    planned = models_of(asked) or (default_model(cluster),)
    messages = sent(scope, [profile.work(model) for model in planned])
    found: dict[tuple[object, ...], tuple[Case, str]] = {}
    rounds = (part(profile, planned, messages) for part in (_round_0, _round_1, _round_2, _round_3))
    for op, use in itertools.chain.from_iterable(rounds):
        if _is_too_large(op, cluster, asked):
            continue
        run = in_step(op, cluster, profile.lowering)
        category, coordinates = op_key(op, run, cluster)
        case = Case(op=op, world_size=world_size, **run._asdict())
        found.setdefault((category, *coordinates.values()), (case, use))
    if profile.fp8:
        refuse_none_in_fp8(case for case, _ in found.values())
    return list(found.values())


def _is_too_large(op: Op, cluster: Cluster, asked: ProfileOptions) -> bool:
    message = op.collective if isinstance(op, Overlap) else op
    if not isinstance(message, Collective):
        return False
    span = (message.group_size - 1) * message.group_stride + 1
    within, between = asked.max_comm_size_intra_node, asked.max_comm_size_inter_node
    most = within if span <= cluster.num_devices_per_host else between
    return most is not None and message.size_bytes > largest_bytes(most)


def profile_of(scope: Scope, lowering: Lowering | None, seq_len: int | None) -> Profile:
    device = scope.cluster.device
    return Profile(
        scope.cluster,
        scope.world_size,
        scope.dtype,
        lowering or device.lowering,
        SCALES[device.kind],
        seq_len,
    )


def _round_0(profile: Profile, models: Models, messages: Messages) -> Iterator[For]:
    """Yield one price of each kind: what no plan can do without."""
    small, _, large, *_ = profile.scale.coarse_copies
    yield from _for("copies", map(_copy, (small, large)))
    blocks = [block for model in models for block in _blocks(profile, model, 0)]
    ops = [*_products(_of("layer", blocks)), *_beside_blocks(profile, models, FIRST)]
    categories = {op_key(op, How(), profile.cluster).category: op for op in reversed(ops)}
    yield from _for(PRODUCTS, reversed(categories.values()))
    yield from _sizes(messages, slice(2))


def _round_1(profile: Profile, models: Models, messages: Messages) -> Iterator[For]:
    blocks = [block for model in models for block in _blocks(profile, model, 0)]
    yield from _behind_their_products(_of("layer", blocks))
    yield from _for("optimizer", map(_adamw, profile.scale.optimizer[:2]))
    yield from _for(PRODUCTS, _beside_blocks(profile, models, FIRST))
    yield from _behind_their_products(_of("head", blocks))
    yield from _sizes(messages, slice(2, 3))
    yield from _for("copies", map(_copy, profile.scale.coarse_copies))
    yield from _for("optimizer", map(_adamw, profile.scale.optimizer))


def _round_2(profile: Profile, models: Models, messages: Messages) -> Iterator[For]:
    yield from _tensor_parallel(profile, models, 0)
    for nth in (1, 2):
        for model in models:
            yield from _behind_their_products(list(_blocks(profile, model, nth)))
    yield from _sizes(messages, slice(3, 5))
    for model in models:
        yield from _behind_their_products(list(_blocks(profile, model, 0, which=slice(1, None))))
    for degree in degrees(profile.world_size)[1:]:
        yield from _behind_their_products(list(_shared(profile, models, degree)))
    for nth in (1, 2):
        yield from _tensor_parallel(profile, models, nth)
    for tp in degrees(profile.world_size)[1:]:
        yield from _for(PRODUCTS, _beside_blocks(profile, models, FIRST, tp))
    yield from _for("work beside messages", _beside_messages(profile, models))
    yield from _for(PRODUCTS, _beside_blocks(profile, models, slice(1, None)))


def _round_3(profile: Profile, models: Models, messages: Messages) -> Iterator[For]:
    scale, dtype = profile.scale, profile.dtype
    yield from _sizes(messages, slice(5, None))
    yield from _for("other lengths", _lengths(profile, models))
    for model in models:
        yield from _behind_their_products(list(_blocks(profile, model, 3)))
    yield from _for("element-wise work", by_kind(_graphs(profile, models)))
    sizes = (*scale.coarse_bytes, *scale.dense_bytes)
    others = (_collectives(profile, kinds, sizes, messages) for kinds in (MAIN, OTHER))
    yield from _for("other messages", itertools.chain.from_iterable(others))
    yield from _for("copies", map(_copy, scale.dense_copies))
    square = (_passes(n, n, n, dtype) for n in scale.squares)
    long = scale.long
    skinny = (
        (*_passes(long, thin, long, dtype), *_passes(thin, long, long, dtype))
        for thin in scale.skinny
    )
    yield from _for("other shapes", itertools.chain(*square, *skinny))
    for heads, tokens, head_dim in scale.attention:
        for direction in DIRECTIONS:
            op = Attention(
                batch=1, q_len=tokens, kv_len=tokens, heads=heads, kv_heads=heads,
                head_dim=head_dim, direction=direction, dtype=dtype,
            )  # fmt: skip
            yield op, "other shapes"


def _for(use: str, ops: Iterable[Op]) -> Iterator[For]:
    return ((op, use) for op in ops)


def _of(part: str, blocks: list[Block]) -> list[Block]:
    return [block for block in blocks if block.part == part]


def _sizes(messages: Messages, which: slice) -> Iterator[For]:
    """Yield messages of every curve, one size after the other. ``which``: of their sizes."""
    rows = itertools.zip_longest(*(of.sizes[which] for of in messages))
    for row in rows:
        for of, size in zip(messages, row, strict=True):
            for stride in of.strides if size else ():
                yield replace(of.like, size_bytes=size, group_stride=stride), of.use


def _lengths(profile: Profile, models: Models) -> Iterator[Attention]:
    """Yield the attention of a layer at other lengths, about as many tokens in all."""
    for block in (block for model in models for block in _blocks(profile, model, 0)):
        for op in block_ops(block):
            for times in (0.25, 0.5, 2, 4) if isinstance(op, Attention) else ():
                assert isinstance(op, Attention)
                length, batch = int(op.q_len * times), int(op.batch / times)
                if op.q_len == op.kv_len and length and batch:
                    yield replace(op, q_len=length, kv_len=length, batch=batch)


def _tensor_parallel(profile: Profile, models: Models, nth: int) -> Iterator[For]:
    """Yield blocks of every degree above 1, with sequence parallelism first: it saves memory."""
    for tp in degrees(profile.world_size)[1:]:
        for model in models:
            sharded = (_blocks(profile, model, nth, tp, sp) for sp in (True, False))
            yield from _behind_their_products([block for blocks in sharded for block in blocks])


def _behind_their_products(blocks: list[Block]) -> Iterator[For]:
    yield from _for(PRODUCTS, _products(blocks))
    yield from ((block, f"{block.part}s") for block in blocks)


def _products(blocks: list[Block]) -> Iterator[Shaped]:
    for block in blocks:
        yield from _shaped(block_ops(block))


def _shared(profile: Profile, models: Models, degree: int) -> Iterator[Block]:
    """Yield layers whose experts, or whose sequences, ``degree`` ranks share, at a typical
    microbatch size."""
    for model in models:
        seq_len, size = profile.length(model), profile.microbatches(model)[0]
        by_experts = Layout(dp=profile.world_size, ep=degree, microbatch_size=size)
        by_sequence = Layout(cp=degree, microbatch_size=size)
        for layout in (by_experts, by_sequence):
            if placement.obstacle(model, seq_len, layout) is None:
                found = blocks_of(model, seq_len, layout, profile.dtype).values()
                shared = (block for block in found if block.part == "layer" and block.is_shared)
                yield from with_fp8(shared, profile.fp8)


def _beside_messages(profile: Profile, models: Models) -> Iterator[Overlap]:
    """Yield layers beside the messages of their units, on GPUs. On CPUs both share the cores, so
    nothing runs beside anything."""
    if profile.world_size > 1 and profile.cluster.device.kind == "cuda":
        for model in models:
            size = profile.microbatches(model)[0]
            about = (model, profile.length(model), size, profile.world_size, profile.dtype)
            yield from beside_units(*about)


def _beside_blocks(
    profile: Profile, models: Models, chosen: slice, tp: int = 1
) -> Iterator[Shaped]:
    """Yield the operations of models whose blocks do not contain all of them: image models, and
    models with experts. ``chosen``: which microbatch sizes."""
    for model in models:
        if isinstance(model, WideResNet) or model.experts is not None:
            for size in profile.microbatches(model)[chosen]:
                yield from of_program(profile, model, size, tp)


def of_program(
    profile: Profile, model: AnyModel, microbatch_size: int, tp: int = 1
) -> Iterator[Shaped]:
    """Yield the products, convolutions and attention of a model, each kind of layer once; nothing
    if the model cannot have this degree."""
    seq_len = profile.length(model)
    layout = Layout(tp=tp, microbatch_size=microbatch_size)
    if placement.obstacle(model, seq_len, layout):
        return
    kinds = tuple(dict.fromkeys(layer_kinds(model, seq_len)))
    whole = graph(model, microbatch_size, seq_len, profile.dtype, layers=kinds)
    yield from _shaped(task.op for task in program_of(whole, layout, profile.dtype).tasks)


def _graphs(profile: Profile, models: Models) -> Iterator[Graph]:
    """Yield the graphs of models at their least and largest microbatch size, each kind of layer
    once."""
    device = device_of(profile.cluster, profile.lowering)
    for model in models:
        seq_len, sizes = profile.length(model), profile.microbatches(model)
        kinds = tuple(dict.fromkeys(layer_kinds(model, seq_len)))
        for size in {min(sizes), max(sizes)}:
            yield graph(model, size, seq_len, profile.dtype, layers=kinds, device=device)


def _shaped(ops: Iterable[Op]) -> Iterator[Shaped]:
    """Keep the operations priced by surfaces (the others are priced by curves over bytes)."""
    return (op for op in ops if isinstance(op, Shaped))


def _copy(size_bytes: int) -> Elementwise:
    """Return a copy that moves ``size_bytes`` in all: half read, half written."""
    return Elementwise(kind="copy", read_bytes=size_bytes // 2, write_bytes=size_bytes // 2)


def _adamw(size_bytes: int) -> Elementwise:
    """Return a step that moves about ``size_bytes``: fp32 p, g, m, v read; p, m, v written."""
    elements = -(-size_bytes // 28)
    return Elementwise(kind="adamw", read_bytes=16 * elements, write_bytes=12 * elements)


def _passes(m: int, n: int, k: int, dtype: Dtype) -> Iterator[Gemm]:
    """Yield the storage orders of a linear layer's forward, input and weight gradient."""
    for trans_a, trans_b in ((False, True), (False, False), (True, False)):
        yield Gemm(m=m, n=n, k=k, dtype=dtype, trans_a=trans_a, trans_b=trans_b)


def _blocks(
    profile: Profile,
    model: AnyModel,
    nth: int,
    tp: int = 1,
    sequence_parallel: bool = False,
    which: slice = FIRST,
) -> Iterator[Block]:
    """Yield layer and head at the nth microbatch size, forward and backward; nothing if the model
    cannot have this degree. ``which``: which of the layers of several shapes."""
    sizes, seq_len = profile.microbatches(model), profile.length(model)
    if nth >= len(sizes):
        return
    layout = Layout(tp=tp, sequence_parallel=sequence_parallel, microbatch_size=sizes[nth])
    if placement.obstacle(model, seq_len, layout):
        return
    found = blocks_of(model, seq_len, layout, profile.dtype)
    layers = [*dict.fromkeys(piece for piece, _ in found if piece[0] == "layer")][which]
    chosen = (
        block
        for (piece, _), block in found.items()
        if piece in layers or (piece[0] == "head" and which == FIRST)
    )
    yield from with_fp8(chosen, profile.fp8)


def _collectives(
    profile: Profile,
    kinds: tuple[CollectiveKind, ...],
    sizes: tuple[int, ...],
    messages: Messages,
) -> Iterator[Collective]:
    """Yield every kind over every group, without those that the model's plans send."""
    known = {_curve_of(of.like) for of in messages}
    for size in sizes:
        for group_size in degrees(profile.world_size)[1:]:
            whole = size - size % (group_size * DTYPE_BYTES["fp32"])
            dtypes: tuple[Dtype, ...] = (profile.dtype, "fp32")
            # next to each other as in tp groups, and as far apart as in dp groups
            strides = (1, profile.world_size // group_size)
            for kind, dtype, stride in itertools.product(kinds, dtypes, strides):
                op = Collective(
                    kind=kind, size_bytes=whole, group_size=group_size, group_stride=stride,
                    dtype=dtype, in_place=kind in IN_PLACE,
                )  # fmt: skip
                if _curve_of(op) not in known:
                    yield op


def _curve_of(op: Collective) -> tuple[str | int, ...]:
    return op.kind, op.dtype if op.kind in REDUCING else "", op.group_size
