"""Attention by a back end that a recipe names: what it can run, and what ``math`` keeps.

The others are one kernel each way. ``math`` is torch's own operations, in fp32: their backward
reads copies of q, k and v, and the softmax, [batch, heads, seq, seq] (ATen,
_scaled_dot_product_attention_math). What else is there while they run is not counted; q, k and v
themselves, which it lets go, are.
"""

from dataclasses import replace

from meshwise.models import decoder
from meshwise.models.graph import Device, Graph, Node, Tensor
from meshwise.spec import AnyModel, Recipe, WideResNet
from meshwise.spec.op import Dtype
from meshwise.spec.recipe import FLASH_HEAD_DIM

KEPT = ".kept"  # ends the names of what ``math`` keeps, and no other back end


def check(recipe: Recipe, device: Device, dtype: Dtype, model: AnyModel) -> None:
    """Raise a ValueError if the recipe's back end cannot run the model's attention."""
    if reason := _lacking(recipe.attention, device == "cuda", dtype, model):
        raise ValueError(f"Recipe.attention = {recipe.attention!r}: {reason}; use auto")


def _lacking(name: str, on_gpu: bool, dtype: Dtype, model: AnyModel) -> str:
    if name == "auto":
        return ""
    if isinstance(model, WideResNet):
        return f"{model.name or 'the model'} has none"
    op, flash = decoder.attention(model, 1, 1, dtype=dtype), name == "flash"
    reasons = {
        "it is a kernel for GPUs, and this is a CPU": name in ("cudnn", "efficient") and not on_gpu,
        f"it computes in 16 bits, and the plan's dtype is {dtype}": (
            name in ("cudnn", "flash") and on_gpu and dtype not in ("bf16", "fp16")
        ),
        f"it shares no key heads, and there are {op.kv_heads} for {op.heads} heads": (
            name == "efficient" and op.kv_heads != op.heads
        ),
        f"its keys and values are as wide, and these are {op.head_dim} and {op.value_dim}": (
            flash and op.value_dim != op.head_dim
        ),
        f"its heads are {FLASH_HEAD_DIM} wide at most, and these are {op.head_dim}": (
            flash and on_gpu and op.head_dim > FLASH_HEAD_DIM
        ),
    }
    return next((reason for reason, applies in reasons.items() if applies), "")


def by_math(graph: Graph) -> Graph:
    """Return the graph with what attention by ``math`` writes besides its result."""
    tensors = dict(graph.tensors)

    def written(node: Node) -> Node:
        if node.kind != "attention":
            return node
        y, lse = (tensors[name].dims for name in node.outputs)
        wide = {f"{node.name}.{of}{KEPT}": y for of in ("q", "k", "v")}
        dims = wide | {f"{node.name}.softmax{KEPT}": (*lse, "seq")}
        tensors.update((name, Tensor(name, of, "fp32")) for name, of in dims.items())
        return node._replace(outputs=(*node.outputs, *dims))

    nodes = tuple(map(written, graph.nodes))
    return replace(graph, tensors=tensors, nodes=nodes)
