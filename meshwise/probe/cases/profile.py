"""``measure profile``: the cases that prices are fitted from, the most useful first. No torch.

In: cluster, models, dtype. Out: cases, ordered so that a run cut short calibrates best:

    1  copies; the operations of each model's layer and head at a typical microbatch size; the
       collectives of plans, and the exchanges of pipelines; these layers and heads as blocks
    2  operations and blocks of every tensor-parallel degree, with and without sequence
       parallelism; then unsharded at the other microbatch sizes, the smallest first
    3  the other collectives, sizes in between, square and skinny GEMMs, attention shapes; the
       sharded blocks at the smallest microbatch

Operations come before the block they make up, since a block calibrates nothing without their
prices. A block's forward and backward are neighbours, to share one set-up. Image models have layers
of several shapes, a block each: the most frequent in round 1, the others first in round 2.

Each case is timed as a step runs it (``prices.in_step``). On a GPU, blocks are timed after half a
second of the same work, to run at the clocks that the power cap allows. Cases with the same price
key and coordinates become one case. Reductions are also measured in fp32, the dtype in which
gradients are reduced over data ranks.
"""

import itertools
from collections.abc import Iterable, Iterator
from typing import Literal, NamedTuple

from meshwise.models import DIRECTIONS, block_ops, blocks_of, graph, placement, program_of
from meshwise.models.catalogue import default_model, default_workload
from meshwise.options.measure import ProfileOptions
from meshwise.prices import in_step, op_key
from meshwise.probe.cases.scope import Scope, models_of
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
    Shaped,
    WideResNet,
    layer_kinds,
)
from meshwise.spec.op import CollectiveKind, Dtype

KiB, MiB, GiB = 2**10, 2**20, 2**30
SHARDING: tuple[CollectiveKind, ...] = ("all_gather", "reduce_scatter")
MAIN: tuple[CollectiveKind, ...] = (*SHARDING, "all_reduce")
IN_PLACE = ("all_reduce", "broadcast")  # as in torch
FIRST = slice(1)  # only the first of several blocks or sizes
OTHER: tuple[CollectiveKind, ...] = ("all_to_all", "broadcast", "send_recv")


class ProfileSizes(NamedTuple):
    """Sizes that suit one kind of device; ``coarse`` ones come first, ``dense`` ones last."""

    microbatches: tuple[int, ...]  # a typical one, for round 1, the smallest, others
    images: tuple[int, ...]  # in a microbatch, a typical number first
    coarse_bytes: tuple[int, ...]  # collectives
    dense_bytes: tuple[int, ...]  # most important first: those outside the coarse range
    coarse_copies: tuple[int, ...]
    dense_copies: tuple[int, ...]
    squares: tuple[int, ...]
    long: int  # the long side of a skinny GEMM
    skinny: tuple[int, ...]
    attention: tuple[tuple[int, int, int], ...]  # heads, tokens, head_dim


SCALES = {
    "cuda": ProfileSizes(
        microbatches=(8, 1, 4, 2),
        images=(32, 8, 64),
        coarse_bytes=(64 * KiB, MiB, 16 * MiB, 256 * MiB),
        dense_bytes=(GiB, 4 * KiB, 64 * MiB, 4 * MiB, 256 * KiB),
        coarse_copies=(64 * KiB, 4 * MiB, 64 * MiB, GiB),
        dense_copies=(MiB, 16 * MiB, 256 * MiB, 4 * GiB, 256 * KiB),
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
        images=(2, 1),
        coarse_bytes=(4 * KiB, 64 * KiB, MiB, 16 * MiB),
        dense_bytes=(64 * MiB, 4 * MiB, 256 * KiB, 16 * KiB),
        coarse_copies=(64 * KiB, MiB, 16 * MiB, 256 * MiB),
        dense_copies=(64 * MiB, 4 * MiB, 256 * KiB),
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
    lowering: Literal["eager", "compiled"]
    scale: ProfileSizes
    seq_len: int | None = None

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


def cases(scope: Scope, asked: ProfileOptions) -> list[Case]:
    """List the cases of a profile in priority order, none twice.

    The operations are those of ``model``, by default of a model that fills the cluster.
    ``lowering`` is that of the blocks, and so of the plans made from them. Its default is compiled
    on GPUs and eager on CPUs. Single operations are always eager.
    """
    cluster, world_size = scope.cluster, scope.world_size
    if not 1 <= world_size <= cluster.num_devices:
        raise ValueError(
            f"world_size = {world_size}: cluster {cluster.name!r} has {cluster.num_devices} "
            f"devices; use 1 to {cluster.num_devices}"
        )
    profile = Profile(
        cluster,
        world_size,
        scope.dtype,
        asked.lowering or cluster.device.lowering,
        SCALES[cluster.device.kind],
        asked.seq_len,
    )
    planned = models_of(asked) or (default_model(cluster),)
    rounds = [part(profile, planned) for part in (_round_1, _round_2, _round_3)]
    found: dict[tuple[object, ...], Case] = {}
    for op in (op for part in rounds for op in part):
        run = in_step(op, cluster, profile.lowering)
        category, coordinates = op_key(op, run, cluster)
        case = Case(op=op, world_size=world_size, **run._asdict())
        found.setdefault((category, *coordinates.values()), case)
    return list(found.values())


def _round_1(profile: Profile, models: tuple[AnyModel, ...]) -> Iterator[Op]:
    yield from map(_copy, profile.scale.coarse_copies)
    blocks = [block for model in models for block in _blocks(profile, model, 0)]
    yield from _products(blocks)
    yield from _beside_blocks(profile, models, FIRST)
    yield from map(_adamw, profile.scale.coarse_copies)
    yield from _collectives(profile, MAIN, profile.scale.coarse_bytes[:2])
    if any(not isinstance(model, WideResNet) and model.experts for model in models):
        yield from _collectives(profile, ("all_to_all",), profile.scale.coarse_bytes)
    yield from _pairs(profile)
    yield from blocks
    yield from _collectives(profile, MAIN, profile.scale.coarse_bytes[2:])


def _round_2(profile: Profile, models: tuple[AnyModel, ...]) -> Iterator[Op]:
    for model in models:
        yield from _behind_their_products(list(_blocks(profile, model, 0, which=slice(1, None))))
    yield from _tensor_parallel(profile, models, 0)
    for nth in range(1, len(profile.scale.microbatches)):
        for model in models:
            yield from _behind_their_products(list(_blocks(profile, model, nth)))
    for tp in _degrees(profile.world_size)[1:]:
        yield from _beside_blocks(profile, models, FIRST, tp)
    yield from _beside_blocks(profile, models, slice(1, None))


def _round_3(profile: Profile, models: tuple[AnyModel, ...]) -> Iterator[Op]:
    scale, dtype = profile.scale, profile.dtype
    yield from _collectives(profile, MAIN, scale.dense_bytes[:1])
    yield from _collectives(profile, OTHER, scale.coarse_bytes)
    yield from _collectives(profile, MAIN, scale.dense_bytes[1:])
    for size in scale.dense_copies:
        yield from (_copy(size), _adamw(size))
    for n in scale.squares:
        yield from _passes(n, n, n, dtype)
    for thin in scale.skinny:
        yield from _passes(scale.long, thin, scale.long, dtype)
        yield from _passes(thin, scale.long, scale.long, dtype)
    for heads, tokens, head_dim in scale.attention:
        for direction in DIRECTIONS:
            yield Attention(
                batch=1, q_len=tokens, kv_len=tokens, heads=heads, kv_heads=heads,
                head_dim=head_dim, direction=direction, dtype=dtype,
            )  # fmt: skip
    yield from _tensor_parallel(profile, models, 1)


def _tensor_parallel(profile: Profile, models: tuple[AnyModel, ...], nth: int) -> Iterator[Op]:
    """Yield blocks of every degree above 1, with sequence parallelism first: it saves memory."""
    for tp in _degrees(profile.world_size)[1:]:
        for model in models:
            sharded = (_blocks(profile, model, nth, tp, sp) for sp in (True, False))
            yield from _behind_their_products([block for blocks in sharded for block in blocks])


def _behind_their_products(blocks: list[Block]) -> Iterator[Op]:
    yield from _products(blocks)
    yield from blocks


def _products(blocks: list[Block]) -> Iterator[Shaped]:
    for block in blocks:
        yield from _shaped(block_ops(block))


def _beside_blocks(
    profile: Profile, models: tuple[AnyModel, ...], chosen: slice, tp: int = 1
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
    for (piece, _), block in found.items():
        if piece in layers or (piece[0] == "head" and which == FIRST):
            yield block


def _degrees(world_size: int) -> list[int]:
    """List the powers of two that divide the world size, and the world size; 1 first."""
    powers = (2**i for i in range(world_size.bit_length()))
    return sorted({size for size in powers if world_size % size == 0} | {1, world_size})


def _collectives(
    profile: Profile, kinds: tuple[CollectiveKind, ...], sizes: tuple[int, ...]
) -> Iterator[Collective]:
    """Yield every kind over every group that plans use, all small sizes before larger ones."""
    for size in sizes:
        for group_size in _degrees(profile.world_size)[1:]:
            whole = size - size % (group_size * DTYPE_BYTES["fp32"])
            dtypes: tuple[Dtype, ...] = (profile.dtype, "fp32")
            # next to each other as in tp groups, and as far apart as in dp groups
            strides = (1, profile.world_size // group_size)
            for kind, dtype, stride in itertools.product(kinds, dtypes, strides):
                yield Collective(
                    kind=kind, size_bytes=whole, group_size=group_size, group_stride=stride,
                    dtype=dtype, in_place=kind in IN_PLACE,
                )  # fmt: skip


def _pairs(profile: Profile) -> Iterator[Collective]:
    """Yield messages of pipeline neighbours, as near as they can be over each tier of links."""
    reaches = [1, *(tier.num_devices for tier in profile.cluster.tiers)]
    for size in profile.scale.coarse_bytes:
        for stride in reaches:
            if profile.world_size % (2 * stride) == 0:
                yield Collective(
                    kind="send_recv", size_bytes=size, group_size=2, group_stride=stride,
                    dtype=profile.dtype,
                )  # fmt: skip
