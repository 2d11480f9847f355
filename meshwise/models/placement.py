"""Decide how tensors are placed on the tp ranks of a stage, and which layouts are legal.

Each part of a model (a field of ``Cuts``) names the dim that its operations divide over tp. A
tensor with this dim is cut by it. Other tensors are ``whole``, or ``partial``: still to be summed
over ranks. The placement that a producer left and the one a consumer needs decide the collective:

    partial -> whole   all_reduce           partial -> cut   reduce_scatter
    cut     -> whole   all_gather           whole   -> cut   nothing (a view)
    cut by one dim -> by another            all_to_all

If there are fewer key and value heads than ranks, every rank holds their whole weight. Each rank
computes only the head that its queries read, and the weight's gradients are summed over ranks.
"""

from collections.abc import Iterator, Mapping
from math import lcm

from meshwise.models.families import experts
from meshwise.models.graph import Graph, Tensor
from meshwise.spec import (
    AnyModel,
    Cuts,
    Decoder,
    Experts,
    LanguageModel,
    Layout,
    Model,
    WideResNet,
    Workload,
)
from meshwise.spec.op import CollectiveKind
from meshwise.spec.plan import CHANNELS
from meshwise.spec.vision import MOST_RESOLUTIONS

WHOLE, PARTIAL = "whole", "partial"
ROWS = ("batch", "seq")
DIMS = {  # the dims that a part of the model may divide: the first that a tensor has
    "heads": ("heads", "kv_heads"),
    "ffn": ("ffn", "expert_ffn", "shared_ffn"),
    "vocab": ("vocab",),
    CHANNELS: tuple(f"inner.{resolution}" for resolution in range(MOST_RESOLUTIONS)),
}


class Cut:
    """The extents of a graph's dims on one of ``tp`` ranks, in an expert group of ``ep``, where
    ``cp`` ranks share each sequence."""

    def __init__(self, graph: Graph, tp: int, cuts: Cuts, ep: int, cp: int = 1) -> None:
        self.tp, self.cuts, self.sizes = tp, cuts, dict(graph.sizes)
        self.expert_ranks = cuts.expert_ranks(ep, tp)
        self.sizes["seq"] //= cp
        if "experts" in self.sizes:
            self.sizes["experts"] //= self.expert_ranks
            self.sizes["room"] = experts.room(self.sizes)
        self.copies = max(1, tp // self.sizes.get("kv_heads", tp))  # ranks per kv head
        self._local: dict[str, Mapping[str, int]] = {}

    def of(self, room: str) -> str:
        """Return the word in ``Cuts`` for the dim that a part of the model divides."""
        if self.tp == 1:
            return WHOLE
        return CHANNELS if room == "convolutions" else self.cuts.of(room)

    def dim(self, room: str, tensors: list[Tensor]) -> str:
        """Return the dim that an operation on these tensors divides, or ``whole``."""
        word = self.of(room)
        if word == WHOLE:
            return WHOLE
        for dim in DIMS.get(word, (word,)):
            for tensor in tensors:
                if has(tensor, dim):
                    return dim
        return WHOLE

    def repeats(self, tensor: Tensor, dim: str) -> bool:
        """Return whether several ranks hold each head of a tensor cut by ``dim``."""
        return self.copies > 1 and dim == "kv_heads" and "queries" not in tensor.dims

    def local(self, dim: str) -> Mapping[str, int]:
        """Return the extents on the first rank if ``dim`` is divided: its share is the largest."""
        if dim in (WHOLE, PARTIAL):
            return self.sizes
        if dim not in self._local:
            sizes = dict(self.sizes)
            if dim == "kv_heads":
                sizes["queries"] //= self.copies
            divisor = self.tp // self.copies if dim == "kv_heads" else self.tp
            sizes[dim] = -(-sizes[dim] // divisor)
            if dim in ROWS and "room" in sizes:
                sizes["room"] = experts.room(sizes)
            self._local[dim] = sizes
        return self._local[dim]


def has(tensor: Tensor, dim: str) -> bool:
    """Return whether a tensor has a dim; the ``room`` of experts holds rows of the batch."""
    return dim in tensor.dims or (dim in ROWS and "room" in tensor.dims)


def collective(have: str, wanted: str) -> CollectiveKind | None:
    """Return the collective that turns placement ``have`` into ``wanted``, or None if none is
    needed."""
    if have in (WHOLE, wanted):
        return None
    if have == PARTIAL:
        return "all_reduce" if wanted == WHOLE else "reduce_scatter"
    return "all_gather" if wanted == WHOLE else "all_to_all"


def check(model: AnyModel, workload: Workload, layout: Layout) -> None:
    """Raise a ValueError with field, degree and size if a layout within a pipeline rank is
    illegal."""
    if reason := obstacle(model, workload.seq_len, layout):
        raise ValueError(f"Layout.{reason}")


def obstacle(model: AnyModel, seq_len: int, layout: Layout) -> str | None:
    """Return why a layout within a pipeline rank (``Layout.of_rank``) is illegal, or None."""
    if isinstance(model, WideResNet):
        return next(_images(model, seq_len, layout), None)
    return next(_language(model, seq_len, layout), None)


def _images(model: WideResNet, seq_len: int, layout: Layout) -> Iterator[str]:
    inner = model.channels * model.width_factor
    yield from _indivisible("tp", layout.tp, {"channels * width_factor": inner})
    if layout.cp > 1:
        yield f"cp = {layout.cp}: images have no sequence to share; use 1"
    if layout.ep > 1:
        yield f"ep = {layout.ep}: the model has no experts; use 1"
    if layout.sequence_parallel:
        yield "sequence_parallel = true: images have no sequence; set it false"
    if layout.cuts != Cuts():
        yield f"cuts = {layout.cuts.name}: images are cut by channel alone; leave them out"
    if layout.tp_sums != "last":
        yield f"tp_sums = {layout.tp_sums}: image models sum no gradient over tp; leave it out"
    if seq_len != 1:
        raise ValueError(
            f"Workload.seq_len = {seq_len}: image models have no sequence; leave it out"
        )


def _language(model: LanguageModel, seq_len: int, layout: Layout) -> Iterator[str]:
    cuts, tp, moe = layout.placed, layout.tp, model.experts
    yield from _indivisible("cp", layout.cp, {"seq_len": seq_len})
    if moe is None and layout.ep > 1:
        yield f"ep = {layout.ep}: the model has no experts; use 1"
    if moe is not None:
        axes = "ep" if layout.expert_ranks == layout.ep else "ep * tp"
        sizes = {"experts.num_experts": moe.num_experts}
        yield from _indivisible(axes, layout.expert_ranks, sizes)
        yield from _groups(moe, seq_len, layout)
    if seq_len > model.max_seq_len:
        raise ValueError(
            f"Workload.seq_len = {seq_len}: must be <= max_seq_len = {model.max_seq_len} of the "
            "model"
        )
    if isinstance(model, Decoder):
        model.check_computed()
        model.check_rotary()
    if tp == 1:
        return
    if cuts.attention == "heads":
        yield from _heads(model, tp)
    has_dense = moe is None or not all(map(moe.are_in, range(model.layers)))
    if cuts.feed_forward == "ffn" and has_dense:
        yield from _indivisible("tp", tp, {"ffn": model.ffn})
    if moe is not None and cuts.experts == "ffn":
        sizes = {"experts.ffn": moe.ffn, "experts.shared_ffn": moe.shared_ffn}
        yield from _indivisible("tp", tp, sizes)
    if moe is None and cuts.experts == "experts":
        yield f"cuts = {cuts.name}: the model has no experts; leave experts out"
    if cuts.experts == "experts" and cuts.stream == WHOLE:
        yield (
            f"cuts = {cuts.name}: ranks with different experts need tokens of their own; cut the "
            "stream by seq (sequence_parallel) or batch"
        )
    words = {getattr(cuts, room) for room in Cuts.__struct_fields__}
    if "seq" in words:
        yield from _indivisible("tp", tp, {"seq_len / cp": seq_len // layout.cp})
    if "batch" in words:
        yield from _indivisible("tp", tp, {"microbatch_size": layout.microbatch_size})
    if "vocab" in words and (tp - 1) * -(-model.vocab // tp) >= model.vocab:
        yield f"tp = {tp}: some rank would have no share of vocab = {model.vocab}; use less"
    ways = {ROWS if word in ROWS else word for word in (cuts.embed, cuts.head)}
    if is_tied(model) and len(ways) > 1:
        yield (
            f"cuts = {cuts.name}: embedding and head are one weight; cut both by vocab, both by "
            "tokens, or neither"
        )


def _groups(moe: Experts, seq_len: int, layout: Layout) -> Iterator[str]:
    """Check that each rank's runs of tokens are whole groups: one rank holds a whole group."""
    word, cp = layout.placed.of("experts") if layout.tp > 1 else WHOLE, layout.cp
    parts = cp * lcm(2 if cp > 1 else 1, layout.tp if word == "seq" else 1)  # cp has two chunks
    run, rest = divmod(seq_len, parts)
    if parts == 1:
        run *= layout.microbatch_size // (layout.tp if word == "batch" else 1)
    if moe.group_size is not None and (rest or run % moe.group_size):
        field = "microbatch_size" if parts == 1 else "cp" if cp > 1 else "tp"
        have = f"{run} tokens" + (" of a sequence" if parts > 1 else "") + " in a row"
        yield (
            f"{field} = {getattr(layout, field)}: each rank has {have}, which experts.group_size = "
            f"{moe.group_size} must divide; use more, or a smaller group_size"
        )


def is_tied(model: AnyModel) -> bool:
    return model.tied if isinstance(model, Decoder) else isinstance(model, Model)


def _heads(model: LanguageModel, tp: int) -> Iterator[str]:
    yield from _indivisible("tp", tp, {"heads": model.heads})
    if not isinstance(model, Decoder):
        return
    if model.qk_norm and model.qk_norm_over == "projection":
        yield (
            f"tp = {tp}: q and k are normed over all heads (qk_norm_over), which tp divides; use "
            "1, or cuts with attention = whole"
        )
    if model.mla is None and model.kv_heads % tp and tp % model.kv_heads:
        yield f"tp = {tp}: must divide kv_heads = {model.kv_heads} or be a multiple"


def _indivisible(axis: str, degree: int, sizes: Mapping[str, int]) -> Iterator[str]:
    for name, size in sizes.items():
        if size % degree:
            yield f"{axis} = {degree}: must divide {name} = {size}"
