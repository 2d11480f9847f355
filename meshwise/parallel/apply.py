"""Apply a layout to a model or a stage of one: tensor, expert and context parallelism,
recomputation, compilation, data parallelism.

In: a module of ``nn`` built on the meta device, a rank's ``MeshPlace``. Out: the same module with
initialised weights, each rank holding its share. The order is torchtitan's: DTensor hooks are
compiled with the layer, and FSDP2's hooks run outside the compiled code.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import loss_parallel

from meshwise import torch_private
from meshwise.nn import ModelStage
from meshwise.nn.experts import MoE
from meshwise.nn.initial import reset_buffers
from meshwise.nn.stage import Layer, cross_entropy
from meshwise.parallel import data, fp8, offload, recompute, tensor
from meshwise.parallel.mesh import MeshPlace, share
from meshwise.parallel.sums import Sums
from meshwise.spec import Layout, Recipe, Recompute
from meshwise.spec.plan import MOST_GRAPHS

Lowering = Literal["eager", "compiled"]
Loss = Callable[[Tensor, Tensor], Tensor]
# By default the compiler waits for a collective right where it starts it. With these options it
# starts tp's collectives early and waits late, so they overlap independent products of backward.
BESIDE_PRODUCTS = {
    "reorder_for_compute_comm_overlap": True,
    "reorder_for_compute_comm_overlap_passes": [
        "raise_comms", "reorder_communication_preserving_peak_memory", "sink_waits",
    ],
}  # fmt: skip


def parallelize(
    model: ModelStage,
    place: MeshPlace,
    *,
    dtype: str,
    lowering: Lowering,
    recipe: Recipe | None = None,
    seed: int = 0,
) -> ModelStage:
    """Lay the model out. Its weights equal those of ``init_weights(seed)`` under any layout.

    Each unit is filled and sharded before the next is allocated. So a rank holds at most its share
    of the model plus one unit and one whole parameter.
    """
    recipe, layout = recipe or Recipe(), place.layout
    if dtype not in ("fp32", "bf16"):
        raise ValueError(f"dtype = {dtype!r}: training runs in fp32 or bf16; plan for one of them")
    sharded = data.is_needed(layout, dtype)
    masters = torch.bfloat16 if recipe.weights == "bf16" and dtype == "bf16" else torch.float32
    in_bf16 = dtype == "bf16"
    narrow = torch.bfloat16 if in_bf16 and recipe.reduce == "bf16" else torch.float32
    sums = Sums(place, layout.tp_sums, torch.bfloat16 if in_bf16 else None, narrow)
    model.sum_gradients = sums.add_up
    kinds = layout.recomputed(len(model.layers))
    if lowering == "compiled":
        torch_private.allow_graphs(MOST_GRAPHS)
    for layer, kind in zip(filled(model, place, masters, seed, sums), kinds, strict=True):
        if recipe.fp8 and dtype == "bf16":
            fp8.use_fp8(layer)
        lower(layer, kind, layout, lowering, BESIDE_PRODUCTS if recipe.async_tp else None)
        if sharded:
            data.shard(layer, place, dtype, recipe, root=False, unseen=sums.unseen())
    if sharded:
        data.shard(model, place, dtype, recipe, root=True, unseen=sums.unseen())
        if recipe.prefetch > 1:
            data.prefetch(list(model.layers.values()), recipe.prefetch)
    if recipe.offload:
        offload.offload_saved(model)
    return model


def filled(
    model: ModelStage, place: MeshPlace, dtype: torch.dtype, seed: int, sums: Sums | None = None
) -> Iterator[Layer]:
    """Split the model over tp, then allocate and fill it; yield each layer as soon as it is filled.

    The rest of the model is filled after the last layer, so iterate to the end.
    """
    tensor.cut_model(model, place, sums)
    device = device_of(place.mesh)
    for index, layer in model.layers.items():
        assert isinstance(layer, Layer)
        fill(model, layer, f"layers.{index}", seed, device, dtype)
        yield layer
    for name, child in model.named_children():
        if name != "layers":
            fill(model, child, name, seed, device, dtype)
    model.tie()


def lower(
    layer: Layer, kind: Recompute, layout: Layout, lowering: Lowering, options: Any = None
) -> None:
    """Set what a layer's backward recomputes, and compile the layer if ``lowering`` says so.
    ``options``: torch.compile's."""
    in_one = lowering == "compiled" and is_one_graph(layer, layout)
    recompute.recompute_layer(layer, kind, "compiled" if in_one else "eager")
    if lowering == "compiled":
        how: Any = {"fullgraph": in_one, "dynamic": False, "options": options}
        # a compiled checkpoint cannot keep a mesh (2.13); around several graphs it is eager
        if kind == "full" and (layout.tp > 1 or not in_one):
            layer.compute = torch.compile(layer.compute, **how)  # type: ignore[method-assign]
        else:
            layer.compile(**how)


def is_one_graph(layer: nn.Module, layout: Layout) -> bool:
    """Whether the layer can be compiled as one graph. Context parallelism, attention with a window
    and the exchange of tokens with experts are not compiled."""
    return layout.cp == 1 and not any(
        isinstance(module, MoE) or getattr(module, "window", None) is not None
        for module in layer.modules()
    )


def device_of(mesh: DeviceMesh) -> torch.device:
    if mesh.device_type == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device(mesh.device_type)


def fill(
    model: ModelStage,
    module: nn.Module,
    name: str,
    seed: int,
    device: torch.device,
    dtype: torch.dtype,
) -> None:
    """Allocate a module's parameters on the device and give them their initial values. A tied
    parameter may be filled twice, with the same value. Buffers (statistics) stay fp32."""
    module.to_empty(device=device)
    if dtype != torch.float32:
        module.to(dtype)
        for part in module.modules():
            for name_of, buffer in part.named_buffers(recurse=False):
                setattr(part, name_of, buffer.float())
    for full_name, parameter in module.named_parameters(prefix=name):
        value = model.initial_value(full_name, seed, device)
        if isinstance(parameter, DTensor):  # every rank has the whole value, so nothing is sent
            value = distribute_tensor(
                value, parameter.device_mesh, parameter.placements, src_data_rank=None
            )
        with torch.no_grad():
            parameter.copy_(value)
    reset_buffers(module)


def loss_function(layout: Layout, lowering: Lowering, tp_mesh: DeviceMesh | None) -> Loss:
    """Return (logits, targets) -> this rank's mean loss as a local scalar, compiled if the layers
    are.

    When compiled, the fp32 copies of the logits are never written to memory. With tp the logits
    are split by vocabulary or by tokens, as the layout cuts the head. Call the loss and its
    backward inside ``loss_context``.
    """
    compute: Loss = cross_entropy
    if lowering == "compiled":
        compute = torch.compile(cross_entropy, fullgraph=True, dynamic=False)
    if layout.tp == 1 or tp_mesh is None:
        return compute
    taken, added = tensor.loss_parts(tp_mesh, layout.placed)

    def local_loss(logits: Tensor, targets: Tensor) -> Tensor:
        return added(share(compute(logits, taken(targets))))

    return local_loss


def loss_context(layout: Layout) -> AbstractContextManager[None]:
    """Return the context for the loss and the backward, for logits split by vocabulary over tp."""
    is_split = layout.tp > 1 and layout.placed.head == "vocab"
    return loss_parallel() if is_split else nullcontext()
