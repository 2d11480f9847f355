"""Rewrite a step's graph for linear layers in fp8: bf16 products in, casts and fp8 products out.

``parallel/fp8.py`` computes each product of a layer's linear module, y = x w^T, dx = dy w and
dw = dy^T x, as A B^T of casts. Each operand of each product is cast for it alone, by its own
largest element. These are the kernels:

    eager      a copy if the operand is transposed, |x|, its maximum, three of the scale, x in fp32,
               x / scale, the clamp, the cast
    compiled   the maximum of |x|; the rest in one. Equal casts in one pass are made once: q, k and
               v share that of x

Backward reads x and w in bf16: casts are not saved. The head, the experts and weights that the
kernels do not take (``FP8_ALIGNMENT``) stay in bf16.
"""

from dataclasses import replace

from meshwise.models.graph import Graph, Node, Tensor, module_shape
from meshwise.spec.op import FP8_ALIGNMENT, Lowering

_ONE = ("one",)  # dims of a scale
# name, kind, what it reads, dtype of the result; "x" is the operand
_KERNELS: dict[Lowering, tuple[tuple[str, str, tuple[str, ...], str], ...]] = {
    "eager": (
        ("abs", "copy", ("x",), "bf16"),
        ("amax", "copy", ("abs",), "bf16"),
        ("float", "cast", ("amax",), "fp32"),
        ("least", "clamp", ("float",), "fp32"),
        ("scale", "mul", ("least",), "fp32"),
        ("wide", "cast", ("x",), "fp32"),
        ("divide", "mul", ("wide", "scale"), "fp32"),
        ("clamp", "clamp", ("divide",), "fp32"),
        ("cast", "cast", ("clamp",), "fp8"),
    ),
    "compiled": (("amax", "copy", ("x",), "fp32"), ("cast", "cast", ("x", "amax"), "fp8")),
}
_SCALES = ("amax", "float", "least", "scale")


def in_fp8(graph: Graph, lowering: Lowering) -> Graph:
    """Return the graph of a step with the layers' products in fp8. ``lowering``: of the casts."""
    casts = _Casts(graph, lowering)
    for node in graph.nodes:
        if _is_linear(graph, node):
            casts.product(node)
        else:
            casts.nodes.append(node)
    return replace(
        graph, sizes={**graph.sizes, "one": 1}, tensors=casts.tensors, nodes=tuple(casts.nodes)
    )


def _is_linear(graph: Graph, node: Node) -> bool:
    """Whether a node is a product of a linear module that computes in fp8."""
    if (node.kind, node.part) != ("gemm", "layer") or node.room == "experts":
        return False
    weight = graph.tensors[node.outputs[0] if node.name.endswith(".wgrad") else node.inputs[1]]
    if weight.role not in ("parameter", "gradient"):  # a router's, cast to fp32
        return False
    return not any(extent % FP8_ALIGNMENT for extent in module_shape(weight, graph.sizes))


class _Casts:
    """The rewritten nodes and tensors so far. ``made``: what is cast already."""

    def __init__(self, graph: Graph, lowering: Lowering) -> None:
        self.tensors, self.nodes = dict(graph.tensors), list[Node]()
        self.lowering: Lowering = lowering
        self.made: dict[tuple[str, bool, str], str] = {}

    def product(self, node: Node) -> None:
        """Append a product with the casts of its operands; a bias is added behind it."""
        (a, b, *bias), (result,) = node.inputs, node.outputs
        backward, turned = node.phase == "backward", node.name.endswith(".wgrad")
        casts = self.cast(node, "a", a, turned and backward), self.cast(node, "b", b, backward)
        product = result
        if bias:
            product = self.tensor(f"{node.name}.product", result, "bf16")
        self.nodes.append(node._replace(inputs=casts, outputs=(product,)))
        if bias:
            self.kernel(node, "bias", "add", (product, *bias), result)

    def cast(self, node: Node, side: str, x: str, turned: bool) -> str:
        """Append the kernels that cast an operand, and return the cast. ``turned``: transposed."""
        known, eager = (x, turned, node.phase), self.lowering == "eager"
        if known in self.made and not eager:
            return self.made[known]
        at, read, held = f"{node.name}.{side}", {"x": x}, list[str]()
        if turned and eager:
            read["x"] = self.tensor(f"{at}.copy", x, "bf16")
            self.kernel(node, f"{side}.copy", "copy", (x,), read["x"])
            held.append(read["x"])
        for name, kind, inputs, dtype in _KERNELS[self.lowering]:
            read[name] = self.tensor(f"{at}.{name}", x, dtype, scale=name in _SCALES)
            inputs = tuple([read[of] for of in inputs])
            self.kernel(node, f"{side}.{name}", kind, inputs, read[name])
        self.nodes[-1] = self.nodes[-1]._replace(holds=tuple(held))  # the caller's argument
        self.made[known] = read["cast"]
        return read["cast"]

    def kernel(self, of: Node, name: str, kind: str, inputs: tuple[str, ...], output: str) -> None:
        name = f"{of.name}.{name}"
        self.nodes.append(of._replace(name=name, kind=kind, inputs=inputs, outputs=(output,)))

    def tensor(self, name: str, like: str, dtype: str, *, scale: bool = False) -> str:
        dims = _ONE if scale else self.tensors[like].dims
        self.tensors[name] = Tensor(name, dims, dtype)
        return name
