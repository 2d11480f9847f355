"""Tensor and sequence parallelism through DTensor, in place, on the tp axis of a mesh.

Weights (Shoeybi et al. 2019, Megatron-LM): what heads or ffn are made of is split by rows (col in
plan.json), what reads them by columns (row), embedding and head by vocabulary; experts in
``parallel.experts``. Activations between those are whole on every rank, or with
``sequence_parallel`` split by position (Korthikanti et al. 2022). Logits stay split by vocabulary
and are a DTensor; ``apply.loss_context`` computes their loss that way.

Every parameter becomes a DTensor on the tp mesh, norms and positions as replicas, so that
gradients that are partial sums are known to be. Fewer key and value heads than ranks are computed
by several ranks each.
"""

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)

from meshwise.nn import llama
from meshwise.nn.experts import MoE
from meshwise.nn.gpt import GPT, GPTLayer, Head
from meshwise.nn.llama import DecoderLayer, Llama
from meshwise.nn.stage import Stage
from meshwise.nn.wide_resnet import WideResNet as WideResNetModule
from meshwise.parallel import channels, experts
from meshwise.parallel.mesh import Place

SEQ_DIM, HEADS_DIM = 1, 2


def _stream(sequence_parallel: bool) -> Placement:
    """How activations between the split weights lie on the tp ranks."""
    return Shard(SEQ_DIM) if sequence_parallel else Replicate()


def _replicate(module: nn.Module, tp_mesh: DeviceMesh, stream: Placement) -> None:
    """Keep all of a module's parameters on every rank; it reads and writes the stream."""

    def read(_: nn.Module, inputs: Any, mesh: DeviceMesh) -> tuple[DTensor]:
        return (DTensor.from_local(inputs[0], mesh, [stream]),)

    def write(_: nn.Module, output: Any, mesh: DeviceMesh) -> Tensor:
        return output.to_local()  # type: ignore[no-any-return]

    distribute_module(module, tp_mesh, input_fn=read, output_fn=write)  # type: ignore[arg-type]


def _share(module: nn.Module, tp_mesh: DeviceMesh, stream: Placement) -> None:
    """Give a module all of the stream, and take its result as a part of a sum."""

    def read(_: nn.Module, inputs: Any, mesh: DeviceMesh) -> tuple[Tensor]:
        whole = DTensor.from_local(inputs[0], mesh, [stream]).redistribute(mesh, [Replicate()])
        return (whole.to_local(grad_placements=[Partial()]),)

    def write(_: nn.Module, output: Any, mesh: DeviceMesh) -> Tensor:
        parts = DTensor.from_local(output, mesh, [Partial()])
        return parts.redistribute(mesh, [stream]).to_local()

    module.register_forward_pre_hook(lambda m, inputs: read(m, inputs, tp_mesh))
    module.register_forward_hook(lambda m, _, output: write(m, output, tp_mesh))


def _split_embedding(embed: nn.Embedding, tp_mesh: DeviceMesh, stream: Placement) -> None:
    """Split the table by vocabulary. The result is awaited here: torch's RowwiseParallel leaves
    that to the reader, and a compiled layer gives such an input no gradient (torch 2.13)."""

    def cut(_: str, module: nn.Module, mesh: DeviceMesh) -> None:
        weight = distribute_tensor(embed.weight, mesh, [Shard(0)], src_data_rank=None)
        embed.weight = nn.Parameter(weight)

    def read(_: nn.Module, inputs: Any, mesh: DeviceMesh) -> tuple[DTensor]:
        return (DTensor.from_local(inputs[0], mesh, [Replicate()]),)

    def write(_: nn.Module, output: Any, mesh: DeviceMesh) -> Tensor:
        return output.redistribute(mesh, [stream]).to_local()  # type: ignore[no-any-return]

    distribute_module(embed, tp_mesh, cut, input_fn=read, output_fn=write)  # type: ignore[arg-type]


def split_gpt_layer(layer: GPTLayer, tp_mesh: DeviceMesh, sequence_parallel: bool) -> GPTLayer:
    """Split one layer; its input and output are local tensors, [b,s/tp,hidden] when sp."""
    stream = _stream(sequence_parallel)
    _replicate(layer.norm1, tp_mesh, stream)
    _replicate(layer.norm2, tp_mesh, stream)
    plan = {
        "attention.qkv": ColwiseParallel(input_layouts=stream),
        "attention.out": RowwiseParallel(output_layouts=stream),
    }
    if layer.dense:
        plan["mlp.up"] = ColwiseParallel(input_layouts=stream)
        plan["mlp.down"] = RowwiseParallel(output_layouts=stream)
    parallelize_module(layer, tp_mesh, plan)
    return layer


def split_decoder_layer(
    layer: DecoderLayer, tp_mesh: DeviceMesh, sequence_parallel: bool
) -> DecoderLayer:
    """The same for a Llama-type layer; what reads one input fetches it once."""
    stream, once = _stream(sequence_parallel), Replicate()
    for norm in (layer.norm1, layer.post1, layer.norm2, layer.post2):
        if not isinstance(norm, nn.Identity):
            _replicate(norm, tp_mesh, stream)
    fetch = PrepareModuleInput(input_layouts=(stream,), desired_input_layouts=(once,))
    plan: dict[str, Any] = {"qkv": fetch, "out": RowwiseParallel(output_layouts=stream)}
    if isinstance(layer.qkv, llama.QKV):
        plan["qkv.q"] = ColwiseParallel(input_layouts=once)
        for name in ("k", "v"):
            if layer.qkv.kv_heads % tp_mesh.size():
                _repeat_heads(getattr(layer.qkv, name), tp_mesh, layer.qkv.head_dim)
            else:
                plan[f"qkv.{name}"] = ColwiseParallel(input_layouts=once)
        for name, module in layer.attention.named_children():
            if name.endswith("_norm"):
                _replicate(module, tp_mesh, Shard(HEADS_DIM))
    else:
        _split_latent(layer.qkv, tp_mesh, plan)
    if layer.dense:
        plan["gate_up"] = fetch
        for name, _ in layer.gate_up.named_children():
            plan[f"gate_up.{name}"] = ColwiseParallel(input_layouts=once)
        plan["down"] = RowwiseParallel(output_layouts=stream)
    parallelize_module(layer, tp_mesh, plan)
    return layer


def _split_latent(qkv: nn.Module, tp_mesh: DeviceMesh, plan: dict[str, Any]) -> None:
    """What leads down to the latent rows is whole on every rank, what leads up split by heads."""
    for name, module in qkv.named_children():
        if name in ("q", "q_up", "kv_up"):
            plan[f"qkv.{name}"] = ColwiseParallel(input_layouts=Replicate())
        else:
            distribute_module(module, tp_mesh)

    def local(_: nn.Module, __: Any, output: Any) -> tuple[Tensor, ...]:
        return tuple(
            x.to_local(grad_placements=[Partial()]) if isinstance(x, DTensor) else x for x in output
        )

    qkv.register_forward_hook(local)


def _repeat_heads(linear: nn.Linear, tp_mesh: DeviceMesh, head_dim: int) -> None:
    """Each rank computes the one head that its queries read, several ranks the same one."""
    distribute_module(linear, tp_mesh)
    linear.rows = repeated_rows(linear.out_features // head_dim, head_dim, tp_mesh)  # type: ignore[assignment]
    linear.__class__ = RowsOfLinear  # a function of each module's own would be compiled for each


def repeated_rows(heads: int, head_dim: int, tp_mesh: DeviceMesh) -> slice:
    """The rows of a weight of fewer heads than ranks that make this rank's head."""
    head = tp_mesh.get_local_rank() * heads // tp_mesh.size()
    return slice(head * head_dim, (head + 1) * head_dim)


class RowsOfLinear(nn.Linear):
    """x of all ranks -> the product with the ``rows`` of the weight that make this rank's head."""

    rows: slice

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = experts.local(self.weight), self.bias
        part = None if bias is None else experts.local(bias)[self.rows]
        return F.linear(experts.local(x), weight[self.rows], part)


def split_head(
    head: Head | llama.Head, tp_mesh: DeviceMesh, sequence_parallel: bool
) -> Head | llama.Head:
    """Split the projection by vocabulary; the logits are a DTensor split in their last dim."""
    stream = _stream(sequence_parallel)
    _replicate(head.norm, tp_mesh, stream)
    projection = ColwiseParallel(
        input_layouts=stream, output_layouts=Shard(-1), use_local_output=False
    )
    parallelize_module(head, tp_mesh, {"projection": projection})
    return head


def apply(model: Stage, place: Place) -> None:
    """Split a whole model, or a stage of one, over tp, and its experts over ep."""
    if isinstance(model, WideResNetModule):
        channels.divide(model, place)
        return
    for module in list(model.modules()):
        if isinstance(module, MoE):
            experts.divide(module, place)
            if place.layout.tp > 1:
                _share(module, place.mesh["tp"], _stream(place.layout.sequence_parallel))
    if place.layout.tp > 1:
        assert isinstance(model, GPT | Llama)
        _split(model, place.mesh["tp"], place.layout.sequence_parallel)
        model.tie()  # the splits made two parameters of one


def _split(model: GPT | Llama, tp_mesh: DeviceMesh, sequence_parallel: bool) -> None:
    stream = _stream(sequence_parallel)
    if model.first:
        _split_embedding(model.embed, tp_mesh, stream)
        if isinstance(model, GPT):
            _replicate(model.positions, tp_mesh, stream)
    for layer in model.layers.values():
        if isinstance(layer, GPTLayer):
            split_gpt_layer(layer, tp_mesh, sequence_parallel)
        else:
            assert isinstance(layer, DecoderLayer)
            split_decoder_layer(layer, tp_mesh, sequence_parallel)
    if model.last:
        split_head(model.head, tp_mesh, sequence_parallel)
