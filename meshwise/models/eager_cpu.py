"""Rewrite a graph for eager PyTorch on CPUs: a graph of CUDA's kernels in, of the CPU's out.

An RMSNorm is one kernel on CUDA. On CPUs it is several, and autograd keeps each kernel's inputs:
x in fp32, and x / rms(x) before it is multiplied by the weight (ATen, rms_norm_composite). A
LayerNorm keeps mean and rstd in x's dtype; CUDA keeps them in fp32.
"""

from dataclasses import replace
from typing import Literal

from meshwise.models.graph import Device, Graph, Node, Tensor
from meshwise.spec import Cluster


def device_of(cluster: Cluster, lowering: Literal["eager", "compiled"]) -> Device:
    """Return the device whose kernels a step runs. Compiled code fuses its own: it is "cuda"."""
    return "cpu" if cluster.device.kind == "cpu" and lowering == "eager" else "cuda"


def on_cpu(graph: Graph) -> Graph:
    """Return the graph with the kernels that eager PyTorch runs on a CPU."""
    tensors, nodes = dict(graph.tensors), list[Node]()
    for node in graph.nodes:
        if node.kind == "rms_norm":
            nodes += _of_operators(node, tensors)
            continue
        nodes.append(node)
        if node.kind == "layer_norm":
            stats = node.outputs[1]
            tensors[stats] = tensors[stats]._replace(dtype=tensors[node.inputs[0]].dtype)
    return replace(graph, tensors=tensors, nodes=tuple(nodes))


def _of_operators(node: Node, tensors: dict[str, Tensor]) -> list[Node]:
    """Return the nodes of y = x * rstd * weight, in fp32."""
    (x, weight), (y, rstd) = node.inputs, node.outputs
    _, dims, dtype, _ = tensors[x]

    def wide(name: str) -> str:
        tensors[f"{node.name}.{name}"] = Tensor(f"{node.name}.{name}", dims, "fp32")
        return f"{node.name}.{name}"

    def to(of: str, kind: str, inputs: tuple[str, ...], y: str) -> Node:
        return node._replace(name=f"{node.name}.{of}", kind=kind, inputs=inputs, outputs=(y,))

    narrow, normed = dtype != "fp32", wide("normed")
    x_wide, y_wide = (wide("wide"), wide("scaled")) if narrow else (x, y)
    nodes = [
        to("rms", "rms", (x_wide,), rstd),
        to("divide", "mul", (x_wide, rstd), normed),
        to("scale", "mul", (normed, weight), y_wide),
    ]
    if narrow:
        nodes = [to("cast", "cast", (x,), x_wide), *nodes, to("narrow", "cast", (y_wide,), y)]
    return nodes
