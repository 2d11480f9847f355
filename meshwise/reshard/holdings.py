"""Holdings of all ranks of a model: each logical tensor's layout, by name.

In: a model and how it is laid out (a ``WeightLayout``, or a ``Plan`` that ``meshwise run``
executes). Out: ``Holdings``; ``buffers`` turns them back into the tensors of one rank. They may
also be made by hand from ``regions.sharded``, ``placed``, ``moved`` and ``cropped``.

A tied model has no logical ``head.weight``. If its head is a tensor of its own (of another stage,
or by ``tied=False``), that buffer holds the embedding's pieces a second time. So it serves as a
source and is filled as a destination. An untied model cannot be held tied. That is refused, because
both sides are laid out from one model record.

No piece holds rows of padding, and nothing sends or writes them. Only ``padded`` tells how large
such buffers are.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import NamedTuple

from meshwise.models.decoder import ROUTER_BIAS, weights
from meshwise.reshard.orders import Fused, Member, Place, Share, buffers_of, layer_prefix
from meshwise.reshard.regions import Layout, Piece, chunk_bounds
from meshwise.spec import Cuts, Decoder, Model, Plan, WeightLayout
from meshwise.spec.op import DTYPE_BYTES, Dtype
from meshwise.spec.weights import Order

# nn.GPT nests what models.decoder.weights lists flat.
_NN_PREFIX = {
    "qkv": "attention.",
    "out": "attention.",
    "up": "mlp.",
    "down": "mlp.",
    "norm": "head.",
}


class Padded(NamedTuple):
    """``rank`` has a buffer of this shape. It reaches past its pieces, or has none."""

    rank: int
    shape: tuple[int, ...]
    buffer: str = ""


class HeldTensor(NamedTuple):
    """A logical tensor as one side holds it. ``dtype`` is a name of ``ITEMSIZES``.

    ``buffer_dims``: the dims of the buffers, if they have fewer than the logical tensor.
    """

    shape: tuple[int, ...]
    dtype: str
    layout: Layout
    padded: tuple[Padded, ...] = ()
    buffer_dims: int | None = None


Holdings = Mapping[str, HeldTensor]

ITEMSIZES = {  # bytes of an element of everything that can be moved
    **DTYPE_BYTES, "fp8_e5m2": 1, "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1,
    "bool": 1,
}  # fmt: skip


class _Mesh(NamedTuple):
    """The ranks of one stage and the degrees that divide its tensors among them."""

    ranks: range
    tp: int
    fsdp: int
    ep: int = 1
    etp: int = 1


class _Layers(NamedTuple):
    """A stage's layers. ``prefix`` of its buffers' names; ``head``: it has its own head tensor."""

    layers: range
    mesh: _Mesh
    head: bool
    prefix: str = ""


def holdings(model: Decoder | Model, layout: WeightLayout) -> Holdings:
    """Return the holdings of a layout's ranks; refuse by name sizes that a degree does not divide.

    In megatron order layers are numbered within their stage. If a rank has several stages, the
    names of its c-th begin with ``model{c}.``, as in Megatron's checkpoints.
    """
    check(model, layout)
    stages = []
    width = layout.tp * layout.dp
    for number, layers in enumerate(layout.stage_layers(model.layers)):
        chunk, pipeline_rank = divmod(number, layout.pp)
        first = layout.first_rank + pipeline_rank * width
        mesh = _Mesh(range(first, first + width), layout.tp, layout.fsdp, layout.ep, layout.etp)
        prefix = ""
        if layout.order == "megatron" and layout.stages_per_rank > 1:
            prefix = f"model{chunk}."
        head = not _is_tied(model) or layout.num_stages > 1 or layout.tied is False
        stages.append(_Layers(layers, mesh, head, prefix))
    return _held(model, stages, layout.order, layout.dtype, layout.vocab_multiple)


def of_plan(plan: Plan) -> Holdings:
    """Return the holdings of ``meshwise run``, by parameter names of ``nn.GPT``: fp32 whatever the
    plan computes in, cut by tp, then by FSDP2 over the shards of dp (see ``parallel.data``)."""
    if not isinstance(plan.model, Model) or plan.model.experts is not None:
        raise ValueError(
            f"Plan.model {plan.model.name!r}: only plans of dense GPTs say where weights lie; "
            "leave the plan out (None): the module's DTensors say what each rank holds"
        )
    if plan.layout.cuts != Cuts() or any(way.cuts for way in plan.layout.ways):
        raise ValueError(
            f"Plan.layout {plan.layout.name}: where these cuts put weights is not known; "
            "leave the plan out (None): the module's DTensors say what each rank holds"
        )
    stages = []
    for stage in plan.stages:
        check(plan.model, WeightLayout(tp=stage.tp))
        inside = plan.layout.of_rank(stage.pipeline_rank)
        ranks = range(stage.devices[0], stage.devices[-1] + 1)
        layers = range(stage.first_layer, stage.last_layer)
        mesh = _Mesh(ranks, stage.tp, inside.shards)
        stages.append(_Layers(layers, mesh, head=len(plan.stages) > 1))
    return _held(plan.model, stages, "plain", "fp32")


def buffers(held: Holdings, rank: int) -> dict[str, tuple[tuple[int, ...], str]]:
    """Return shape and dtype of each buffer of a rank, padding included; empty ones are left
    out."""
    found: dict[str, tuple[tuple[int, ...], str]] = {}
    for name, tensor in held.items():
        dims = len(tensor.shape) if tensor.buffer_dims is None else tensor.buffer_dims
        reached = [
            (piece.buffer or name, piece.local(piece.box).high[len(tensor.shape) - dims :])
            for piece in tensor.layout
            if piece.rank == rank
        ]
        reached += [(p.buffer or name, p.shape) for p in tensor.padded if p.rank == rank]
        for buffer, end in reached:
            shape, dtype = found.get(buffer, (end, tensor.dtype))
            if dtype != tensor.dtype or len(shape) != len(end):
                raise ValueError(
                    f"buffer {buffer} of rank {rank} would hold {dtype} of {len(shape)} dims and, "
                    f"of {name}, {tensor.dtype} of {len(end)}; give these tensors one of each"
                )
            found[buffer] = tuple(map(max, shape, end)), dtype
    return found


def _is_tied(model: Decoder | Model) -> bool:
    return isinstance(model, Model) or model.tied


def _vocab_rows(vocab: int, multiple: int) -> int:
    return -(-vocab // multiple) * multiple


def check(model: Decoder | Model, layout: WeightLayout) -> None:
    """Refuse, by the name of the field, a layout that cannot cut this model."""
    tp, moe = layout.tp, None if isinstance(model, Model) else model.experts
    if isinstance(model, Decoder):
        model.check_computed()
        if layout.order in ("megatron", "engine") and model.norms != "before":
            layout.fail("order", "has no names for norms after attention; use plain or hf")
    elif layout.order.startswith("hf"):
        layout.fail("order", "has no names for GPT-2's transposed weights; use plain")
    if layout.tied and not _is_tied(model):
        layout.fail("tied", "the model's embedding and head differ; use null or false")
    if moe is None and layout.ep * layout.etp > 1:
        layout.fail("ep" if layout.ep > 1 else "etp", "must be 1, since the model has no experts")
    divided = [("tp", tp, "heads", model.heads)]
    if isinstance(model, Model) or not all(map(model.has_experts, range(model.layers))):
        divided.append(("tp", tp, "ffn", model.ffn))
    if moe:
        divided.append(("tp", tp, "experts.shared_ffn", moe.shared_ffn))
        divided.append(("ep", layout.ep, "experts.num_experts", moe.num_experts))
        divided.append(("etp", layout.etp, "experts.ffn", moe.ffn))
    for field, degree, name, size in divided:
        if size % degree:
            layout.fail(field, f"must divide the model's {name} = {size}")
    if isinstance(model, Decoder) and model.mla is None:
        kv_heads = model.kv_heads
        if kv_heads % tp and tp % kv_heads:
            layout.fail("tp", f"must divide the model's kv_heads = {kv_heads} or be a multiple")
        rows = (model.heads + 2 * kv_heads) * model.head_dim
        if layout.order == "megatron" and rows % tp:
            layout.fail("tp", f"must divide the {rows} rows of q, k and v; use another tp")
    rows = _vocab_rows(model.vocab, layout.vocab_multiple)
    if layout.order in ("megatron", "engine") and rows % tp:
        layout.fail("vocab_multiple", f"tp = {tp} must divide the {rows} rows; use {128 * tp}")


def members_of(model: Decoder | Model) -> dict[str, tuple[Member, ...]]:
    """Group logical tensors by ``layers.3`` or ``root``; split stacked gates and ups."""
    found: dict[str, list[Member]] = {}
    for weight in weights(model):
        name = weight.name.removeprefix(f"{weight.unit}.")
        names = [name]
        shape = weight.shape
        if name.startswith("experts.gate_up."):
            names = [name.replace("gate_up", half) for half in ("gate", "up")]
            shape = (shape[0], shape[1] // 2, *shape[2:])
        elif isinstance(model, Model):
            names = [_NN_PREFIX.get(name.split(".")[0], "") + name]
        found.setdefault(weight.unit, []).extend(Member(each, each, shape) for each in names)
    return {unit: tuple(members) for unit, members in found.items()}


def _held(
    model: Decoder | Model, stages: Sequence[_Layers], order: Order, dtype: Dtype, multiple: int = 1
) -> Holdings:
    """Build the holdings stage by stage. Equal layers of a stage differ only in their buffers'
    names. ``multiple``: rows of the vocabulary are padded to a multiple of it."""
    units = members_of(model)
    (table,) = (member.shape for member in units["root"] if member.role == "embed.weight")
    vocab_rows = _vocab_rows(table[0], multiple)
    made: dict[tuple[tuple[Member, ...], _Mesh], dict[str, HeldTensor]] = {}
    found: dict[str, HeldTensor] = {}
    for number, stage in enumerate(stages):
        is_last = number == len(stages) - 1
        unit_of = {
            f"layers.{layer}.": (layer_prefix(model, order, layer, local), units[f"layers.{layer}"])
            for local, layer in enumerate(stage.layers)
        }
        unit_of[""] = "", root_of(model, units["root"], number == 0, is_last, stage.head)
        for logical, (prefix, members) in unit_of.items():
            key = members, stage.mesh
            if key not in made:
                made[key] = _spread(members, model, order, dtype, vocab_rows, stage.mesh)
            for name, tensor in made[key].items():
                add(found, logical + name, _renamed(tensor, stage.prefix + prefix))
    return found


def root_of(
    model: Decoder | Model, members: Sequence[Member], first: bool, last: bool, head: bool
) -> tuple[Member, ...]:
    """Return the tensors of a stage that are in no layer."""
    inputs = tuple(m for m in members if m.role in ("embed.weight", "positions.weight"))
    outputs = tuple(m for m in members if m not in inputs)
    if _is_tied(model) and head:
        role = "head.projection.weight" if isinstance(model, Model) else "head.weight"
        outputs += (Member("embed.weight", role, inputs[0].shape),)
    return inputs * first + outputs * last


def add(found: dict[str, HeldTensor], name: str, tensor: HeldTensor) -> None:
    """Add what more ranks, or more buffers, hold of a tensor."""
    if name in found:
        old = found[name]
        tensor = old._replace(layout=old.layout + tensor.layout, padded=old.padded + tensor.padded)
    found[name] = tensor


def _renamed(tensor: HeldTensor, prefix: str) -> HeldTensor:
    """Put ``prefix`` before the buffers' names. A tensor whose buffers are called as the logical
    tensor (``plain``) stays the same."""
    names = {b: prefix + b if b else "" for b in {piece.buffer for piece in tensor.layout}}
    if not prefix or not any(names):
        return tensor
    layout = tuple(Piece(rank, box, at, names[buffer]) for rank, box, at, buffer in tensor.layout)
    padded = tuple(p._replace(buffer=prefix + p.buffer) for p in tensor.padded)
    return tensor._replace(layout=layout, padded=padded)


def _spread(
    members: Sequence[Member],
    model: Decoder | Model,
    order: Order,
    dtype: Dtype,
    vocab_rows: int,
    mesh: _Mesh,
) -> dict[str, HeldTensor]:
    """Lay the members out over the ranks of a mesh, rank by rank, buffer names without a prefix."""
    buffers = (
        (rank, buffer, buffer.name if order != "plain" or buffer.name != buffer.tensor else "")
        for rank, buffer in _by_rank(members, model, order, vocab_rows, mesh)
    )
    dtypes = {name: "fp32" if name == ROUTER_BIAS else dtype for name, _, _ in members}
    return spread(members, buffers, dtypes)


def spread(
    members: Sequence[Member], buffers: Iterable[tuple[int, Fused, str]], dtypes: Mapping[str, str]
) -> dict[str, HeldTensor]:
    """Return what buffers hold of each member. A buffer: its rank, what it holds, its name ("": as
    the logical tensor)."""
    layouts: dict[str, list[Piece]] = {member.tensor: [] for member in members}
    padded: dict[str, list[Padded]] = {member.tensor: [] for member in members}
    missing = dict.fromkeys(layouts, 0)
    for rank, buffer, called in buffers:
        for name, (_, box, offset, _) in buffer.pieces:
            layouts[name].append(Piece(rank, box, offset, called))
            missing[name] = buffer.missing_dims
        if buffer.is_padded:
            padded[buffer.tensor].append(Padded(rank, buffer.shape, called))
    return {
        name: HeldTensor(
            shape,
            dtypes[name],
            tuple(layouts[name]),
            tuple(padded[name]),
            len(shape) - missing[name] if missing[name] else None,
        )
        for name, _, shape in members
    }


def _by_rank(
    members: Sequence[Member], model: Decoder | Model, order: Order, vocab_rows: int, mesh: _Mesh
) -> Iterator[tuple[int, Fused]]:
    """Yield every rank with each of its buffers, its shares of what the axes divide. FSDP does not
    cut the router's bias, because it is no parameter."""
    experts = tuple(m for m in members if m.role.startswith("experts."))
    state = tuple(m for m in members if m.role == ROUTER_BIAS)
    dense = tuple(m for m in members if m not in experts + state)
    ep_ranks = mesh.ep * mesh.etp
    copies = mesh.fsdp * mesh.tp // ep_ranks if mesh.fsdp > 1 else 1

    @cache
    def held(group: tuple[Member, ...], place: Place, shard: Share) -> list[Fused]:
        return [
            part
            for buffer in buffers_of(group, model, order, place)
            if (part := _chunk_of(buffer, shard)).shape[0]
        ]

    for index, rank in enumerate(mesh.ranks):
        of_tp = Place(vocab_rows, tp=Share(index % mesh.tp, mesh.tp))
        shares = Share(index // mesh.etp % mesh.ep, mesh.ep), Share(index % mesh.etp, mesh.etp)
        of_ep = Place(vocab_rows, ep=shares[0], etp=shares[1])
        shard = Share(index // mesh.tp % mesh.fsdp, mesh.fsdp)
        expert_shard = Share(index // ep_ranks % copies, copies)
        for buffer in (
            *held(dense, of_tp, shard),
            *held(state, Place(vocab_rows), Share()),
            *held(experts, of_ep, expert_shard),
        ):
            yield rank, buffer


def _chunk_of(buffer: Fused, shard: Share) -> Fused:
    """Cut the first dim as FSDP2 does, which is torch.chunk's way."""
    if shard.parts == 1:
        return buffer
    return buffer.rows(*chunk_bounds(buffer.shape[0], shard.parts, shard.which))
