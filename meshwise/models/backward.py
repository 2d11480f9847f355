"""From a forward graph to a training step: reverse-mode differentiation of the graph itself.

Rules, for a result's gradient dy:
    gemm y = x w + b    dx = dy w (dgrad);  dw = dy^T x (wgrad);  db = sum of dy (bgrad)
    layer_norm          dx, dw, db from dy, x, stats and w
    attention           dqkv from dy, qkv, y and the log-sum-exp
    gelu, cast          dx from dy (and x)
    add                 both gradients are dy: no operation
    embedding           dw scatters dy into a dense table
    loss                d log_p from the targets, then dlogits from d log_p and log_p
A tensor read twice gets its gradients added. What a rule reads of the forward pass is what eager
autograd saves.
"""

from meshwise.models.graph import Graph, Node, Tensor


def training_step(graph: Graph) -> Graph:
    """The forward graph with its backward nodes and the optimizer's appended."""
    tensors = dict(graph.tensors)
    nodes: list[Node] = list(graph.nodes)
    gradient_of: dict[str, str] = {}  # forward tensor -> its gradient so far

    def declare(of: str, suffix: str) -> str:
        source = tensors[of]
        role = "gradient" if source.role == "parameter" else "activation"
        name = f"d.{of}{suffix}"
        tensors[name] = Tensor(name, source.dims, source.dtype, role)
        return name

    def add_node(of: Node, suffix: str, kind: str, inputs: list[str], outputs: list[str]) -> None:
        name = f"{of.name}.{suffix}"
        nodes.append(Node(name, kind, tuple(inputs), tuple(outputs), of.part, of.layer, "backward"))

    def contribute(of: Node, to: list[str]) -> list[str]:
        """Names for new gradients; the second contribution to a tensor is added to the first."""
        return [declare(name, "" if name not in gradient_of else f".{of.name}") for name in to]

    def accumulate(of: Node, to: list[str], new: list[str]) -> None:
        for name, gradient in zip(to, new, strict=True):
            first = gradient_of.setdefault(name, gradient)
            if first != gradient:
                total = declare(name, f".sum.{of.name}")
                add_node(of, f"accumulate.{name}", "add", [first, gradient], [total])
                gradient_of[name] = total

    def emit(of: Node, suffix: str, kind: str, inputs: list[str], to: list[str]) -> None:
        new = contribute(of, to)
        add_node(of, suffix, kind, inputs, new)
        accumulate(of, to, new)

    for node in reversed(graph.nodes):
        if node.name == "loss":
            log_p = "loss.log_p"
            emit(node, "dlog_p", "cross_entropy", ["targets"], [log_p])
            continue
        dy = gradient_of[node.outputs[0]]
        first = node.inputs[0]
        if node.kind == "gemm":
            x, weight = node.inputs[:2]
            emit(node, "dgrad", "gemm", [dy, weight], [x])
            emit(node, "wgrad", "gemm", [dy, x], [weight])
            for bias in node.inputs[2:]:
                emit(node, "bgrad", "add", [dy], [bias])
        elif node.kind == "layer_norm":
            emit(
                node, "grad", node.kind, [dy, *node.inputs[:2], node.outputs[1]], list(node.inputs)
            )
        elif node.kind == "attention":
            emit(node, "grad", node.kind, [first, dy, *node.outputs], [first])
        elif node.kind == "gelu":
            emit(node, "grad", node.kind, [dy, first], [first])
        elif node.kind == "cast":
            emit(node, "grad", node.kind, [dy], [first])
        elif node.kind == "cross_entropy":
            emit(node, "grad", node.kind, [dy, node.outputs[0]], [first])
        elif node.kind == "add":
            for name in node.inputs:
                if tensors[name].role == "parameter":  # positions: summed over the batch
                    emit(node, f"grad.{name}", "add", [dy], [name])
                else:
                    accumulate(node, [name], [dy])
        else:
            assert node.kind == "embedding", node.kind
            emit(node, "wgrad", node.kind, [dy, node.inputs[0]], [node.inputs[1]])
    weights = tuple(tensor.name for tensor in graph.parameters())
    for name in ("grad_norm", "adamw"):
        nodes.append(Node(name, name, weights, (), "optimizer", 0, "optimizer"))
    gradients = {name: gradient_of[name] for name in weights}
    return Graph(graph.sizes, tensors, tuple(nodes), gradients)
