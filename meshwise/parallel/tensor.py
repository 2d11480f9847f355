"""Tensor parallelism in place, on the tp axis of a mesh, as a layout's ``cuts`` say.

Weights (Shoeybi et al. 2019, Megatron-LM): products whose outputs are heads or ffn are split by
rows (col in plan.json), and products that read those by columns (row). Embedding and head are split
by vocabulary; ``parallel.experts`` splits experts. The stream between these is whole on every rank,
or split by position (Korthikanti et al. 2022) or by sequence. A part of the model may also be
repeated on every rank, or divided by its tokens. Logits split by vocabulary are a DTensor, and
their loss needs ``apply.loss_context``.

Every parameter becomes a DTensor on the tp mesh, norms and positions as replicas, so that torch
knows which gradients are partial sums. Activations are local tensors, and ``redistribute`` moves
them. If there are fewer key and value heads than ranks, several ranks compute the same head.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement as Placed
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from meshwise.nn import llama
from meshwise.nn.experts import MoE
from meshwise.nn.gpt import GPT, GPTLayer, Positions
from meshwise.nn.llama import DecoderLayer, Llama
from meshwise.nn.stage import Head, ModelStage, identity
from meshwise.nn.wide_resnet import WideResNetModule
from meshwise.parallel import channels, experts
from meshwise.parallel.mesh import MeshPlace
from meshwise.parallel.redistribute import Edge, NamedGroup, Placement, addend, moved
from meshwise.parallel.sums import Sums
from meshwise.spec import Cuts

DIM: dict[str, int] = {"batch": 0, "seq": 1}  # dims of an activation
COL, ROW = ("weight", 0), ("weight", 1)


class Room(NamedTuple):
    """The placements of a part of the model. ``needs``: of its input and of its result's gradient.
    ``leaves``: of its result and of its input's gradient."""

    needs: Placement
    leaves: Placement

    @property
    def summed(self) -> bool:
        """Whether ranks that hold the same weight each have a part of its gradient."""
        return self.leaves != "whole"


class Splitter:
    """Lays the modules of a stage out over one tp mesh."""

    def __init__(self, mesh: DeviceMesh, cuts: Cuts, sums: Sums | None = None) -> None:
        group = mesh.get_group()
        self.mesh, self.cuts, self.sums = mesh, cuts, sums
        self.ranks = NamedGroup(group.group_name, group.size(), group.rank())
        self.stream = self.room("stream").needs

    def room(self, name: str) -> Room:
        word = self.cuts.of(name)
        if word in DIM:
            return Room(DIM[word], DIM[word])
        return Room("whole", "whole" if word == "whole" else "partial")

    def enter(self, name: str) -> Edge:
        """Return the change of placement from the stream into a part of the model."""
        room = self.room(name)
        return Edge((self.stream, room.needs), (room.leaves, self.stream), self.ranks)

    def leave(self, name: str) -> Edge:
        room = self.room(name)
        return Edge((room.leaves, self.stream), (self.stream, room.needs), self.ranks)

    @property
    def streamed(self) -> Placed:
        """The stream's placement as a DTensor placement."""
        return Shard(self.stream) if isinstance(self.stream, int) else Replicate()

    def local(
        self,
        module: nn.Module,
        room: str,
        cut: tuple[str, int] | None = None,
        *,
        leave: Edge | None = None,
    ) -> Any:
        """Make a module compute with this rank's part of its weights. They are cut by outputs
        (``COL``), by inputs (``ROW``), or whole."""
        cut = cut if self.room(room).leaves == "partial" else None
        summed = cut is None and self.room(room).summed
        assert self.sums is not None
        for name, parameter in list(module.named_parameters(recurse=False)):
            both = cut == COL or (cut == ROW and name == "weight")
            placed: Placed = Shard(cut[1]) if cut is not None and both else Replicate()
            mesh, at = self.mesh, [placed]
            if summed:
                mesh, at = self.sums.placed(module, name, mesh, at)
            made = distribute_tensor(parameter, mesh, at, src_data_rank=None)
            setattr(module, name, nn.Parameter(made))
        module.__class__ = LOCAL[type(module)]
        module.leave, module.cast = leave, self.sums.cast  # type: ignore[assignment]
        module.summed = summed and self.sums.order == "first"  # type: ignore[assignment]
        if cut == ROW:
            module.adders = self.ranks.size  # type: ignore[assignment]
        return module

    def layer(self, layer: GPTLayer | DecoderLayer) -> None:
        """Split one layer. Its input and output are local tensors with the stream's placement."""
        self.local(layer.norm1, "stream", leave=self.enter("attention"))
        into = "feed_forward" if layer.dense else "experts"
        self.local(layer.norm2, "stream", leave=self.enter(into))
        if isinstance(layer, GPTLayer):
            self.local(layer.attention.qkv, "attention", COL)
            out = layer.attention.out
        else:
            for post in (layer.post1, layer.post2):
                self.local(post, "stream")
            self.projections(layer.qkv)
            for name, module in layer.attention.named_children():
                if name.endswith("_norm"):
                    self.local(module, "attention")
            out = layer.out
        self.local(out, "attention", ROW, leave=self.leave("attention"))
        if not layer.dense:
            self.local(layer.moe, "experts", leave=self.leave("experts"))
            return
        if isinstance(layer, GPTLayer):
            self.local(layer.mlp.up, "feed_forward", COL)
            down = layer.mlp.down
        else:
            for up in layer.gate_up.children():
                self.local(up, "feed_forward", COL)
            down = layer.down
        self.local(down, "feed_forward", ROW, leave=self.leave("feed_forward"))

    def projections(self, qkv: nn.Module) -> None:
        """Split a Llama-type layer's projections. Projections down to latent rows stay whole."""
        repeats = False
        if isinstance(qkv, llama.QKV) and self.room("attention").leaves == "partial":
            repeats = qkv.kv_heads % self.ranks.size > 0
        for name, module in qkv.named_children():
            repeated = repeats and name in ("k", "v")
            is_cut = name in ("q", "k", "v", "q_up", "kv_up") and not repeated
            local = self.local(module, "attention", COL if is_cut else None)
            if repeated:
                local.rows = repeated_rows(qkv.kv_heads, qkv.head_dim, self.mesh)  # type: ignore[arg-type]

    def embedding(self, embed: nn.Embedding) -> None:
        self.local(embed, "embed", COL, leave=self.leave("embed"))
        embed.take = self.take(self.cuts.embed)  # type: ignore[assignment]
        if self.cuts.embed == "vocab":
            rows = -(-embed.num_embeddings // self.ranks.size)
            embed.first_row = self.ranks.rank * rows  # type: ignore[assignment]

    def take(self, word: str) -> tuple[int, NamedGroup] | None:
        """Return the dim along which each rank takes its part of a whole tensor; None if it takes
        all of it."""
        return (DIM[word], self.ranks) if word in DIM else None

    def head(self, head: Head) -> None:
        """Split the projection by vocabulary, where logits are a DTensor, or by its tokens."""
        self.local(head.norm, "stream")
        if self.cuts.head != "vocab":
            self.local(head.projection, "head").enter = self.enter("head")
            return
        projection = ColwiseParallel(
            input_layouts=self.streamed, output_layouts=Shard(-1), use_local_output=False
        )
        parallelize_module(head, self.mesh, {"projection": projection})


def repeated_rows(heads: int, head_dim: int, tp_mesh: DeviceMesh) -> slice:
    """Return the rows of this rank's head in a weight that has fewer heads than tp has ranks."""
    head = tp_mesh.get_local_rank() * heads // tp_mesh.size()
    return slice(head * head_dim, (head + 1) * head_dim)


def part(weight: Tensor | None, module: Any) -> Any:
    """Return this rank's part of a module's weight."""
    if weight is None:
        return None
    return experts.local(weight, summed=module.summed, cast=module.cast)


class _Local:
    """Settings that ``Splitter.local`` sets on an instance, so that layers share compiled code."""

    summed = False
    cast: torch.dtype | None = None
    enter: Edge | None = None
    leave: Edge | None = None

    def left(self, y: Tensor) -> Tensor:
        return y if self.leave is None else self.leave.move(y)


class LocalLinear(_Local, nn.Linear):
    """``rows``: this rank's rows of the weight, if several ranks compute the same head.
    ``adders``: how many ranks' results are summed. The sum has the bias once."""

    rows: slice | None = None
    adders = 1

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.enter is None else self.enter.move(x)
        weight, bias = part(self.weight, self), part(self.bias, self)
        if self.adders > 1 and bias is not None:
            bias = addend(experts.local(self.bias, summed=False), self.adders)
        if self.rows is not None:
            weight, bias = weight[self.rows], None if bias is None else bias[self.rows]
        return self.left(F.linear(x, weight, bias))


class LocalLayerNorm(_Local, nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        weight, bias = part(self.weight, self), part(self.bias, self)
        return self.left(F.layer_norm(x, self.normalized_shape, weight, bias, self.eps))


class LocalRMSNorm(_Local, nn.RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        weight = part(self.weight, self)
        return self.left(F.rms_norm(x, self.normalized_shape, weight, self.eps))


class LocalIdentity(_Local, nn.Identity):
    def forward(self, x: Tensor) -> Tensor:
        return self.left(x)


class LocalMoE(_Local, MoE):
    def forward(self, x: Tensor) -> Tensor:
        return self.left(super().forward(x))


class LocalEmbedding(_Local, nn.Embedding):
    """``take``: the dim of the tokens that ranks divide. ``first_row``: where this rank's part of
    the table begins; other ranks' tokens give 0. (A DTensor lookup would make a gradient of the
    whole table on every rank, torch 2.13.)"""

    take: tuple[int, NamedGroup] | None = None
    first_row: int | None = None

    def forward(self, tokens: Tensor) -> Tensor:
        weight = part(self.weight, self)
        if self.take is not None:
            tokens = moved(tokens, "whole", *self.take)
        if self.first_row is None:
            return self.left(F.embedding(tokens, weight))
        index = tokens - self.first_row
        elsewhere = (index < 0) | (index >= len(weight))
        rows = F.embedding(index.masked_fill(elsewhere, 0), weight)
        return self.left(rows.masked_fill(elsewhere.unsqueeze(-1), 0))


class LocalPositions(_Local, Positions):
    """``take``: set if ranks divide the stream by positions."""

    take: tuple[int, NamedGroup] | None = None

    def forward(self, x: Tensor) -> Tensor:
        weight = part(self.weight, self)
        ranks = self.take[1] if self.take is not None else NamedGroup("", 1, 0)
        if self.at is None:
            rows: Tensor = weight[ranks.rank * x.shape[1] :][: x.shape[1]]
            return x + rows
        return x + F.embedding(moved(self.at, "whole", 0, ranks), weight)


LOCAL: dict[type[nn.Module], type[nn.Module]] = {
    local.__mro__[2]: local
    for local in (
        LocalLinear, LocalLayerNorm, LocalRMSNorm, LocalIdentity, LocalMoE, LocalEmbedding,
        LocalPositions,
    )
}  # fmt: skip


def cut_model(model: ModelStage, place: MeshPlace, sums: Sums | None = None) -> None:
    """Split a model or a stage over tp, and its experts over ep. ``sums`` notes the gradients to
    sum later."""
    sums = sums or Sums(place)
    if isinstance(model, WideResNetModule):
        channels.divide(model, place)
        return
    if place.layout.tp > 1:
        assert isinstance(model, GPT | Llama)
        splitter = Splitter(place.mesh["tp"], place.layout.placed, sums)
        if model.first:
            splitter.embedding(model.embed)
            if isinstance(model, GPT):
                splitter.local(model.positions, "stream")
                by_position = splitter.cuts.stream == "seq"
                model.positions.take = splitter.take("seq") if by_position else None  # type: ignore[assignment]
        for layer in model.layers.values():
            assert isinstance(layer, GPTLayer | DecoderLayer)
            splitter.layer(layer)
        if model.last:
            splitter.head(model.head)
        model.tie()  # the splits made two parameters of one
    for module in list(model.modules()):
        if isinstance(module, MoE):
            experts.divide(module, place, sums)


def loss_parts(tp_mesh: DeviceMesh, cuts: Cuts) -> tuple[Callable[[Tensor], Tensor], ...]:
    """Return two functions. The first picks the targets of this rank's logits, the second averages
    the ranks' mean losses over tp."""
    splitter = Splitter(tp_mesh, cuts)
    taken = splitter.take(cuts.head)
    if taken is None:
        return identity, identity
    mean = Edge(("partial", "whole"), ("whole", "whole"), splitter.ranks)
    size = splitter.ranks.size
    return lambda targets: moved(targets, "whole", *taken), lambda loss: mean.move(loss / size)
