"""Extend a forward graph to a training step by reverse-mode differentiation of the graph.

Rules, for a result's gradient dy:
    gemm y = x w + b    dx = dy w (dgrad);  dw = dy^T x (wgrad);  db = sum of dy (bgrad)
    layer_norm          dx, dw, db from dy, x, stats and w
    rms_norm            dx, dw from dy, x, rstd and w
    rms                 dx from drstd, x and rstd
    attention           dq, dk, dv from dy, q, k, v, y and the log-sum-exp
    convolution         dx from dy and w (dgrad), dw from dy and x (wgrad)
    gelu, silu, clamp, square   dx from dy and x
    softmax, sigmoid, relu, rsqrt   dx from dy and y
    max_pool            dx from dy, x and the indices of the maxima
    var_mean            dx = (x - mean) dvar + each image's share of dmean
    normalize y = x/s   dx from dy, x and s
    cast, copy, mean    dx from dy
    mul z = x y         dx from dz and y, dy from dz and x, summed over repeated dims; a constant
                        gets no gradient
    add                 both gradients are dy: no operation
    sum                 dy is the gradient of each part
    gather, move        dx puts dy back where the rows came from and adds up copies of one row
    exchange, average   dx is dy, sent the opposite way
    balance             the gradient of the mean scores is the experts' loads
    view                dx joins the gradients of the parts that x was split into
    concat              views of dy, summed over the heads that an input lacks
    embedding           dw scatters dy into a dense table
    loss                d log_p from the targets, then dlogits from d log_p and log_p
If a tensor is read twice, its gradients are added. The forward tensors that a rule reads are those
that eager autograd saves. A stage without a loss is given the gradient of its last result.

Recomputation (Chen et al. 2016, arXiv:1604.06174; selective: in the spirit of Korthikanti et al.
2022, arXiv:2205.05198): tensors that a recomputed layer's backward reads are not kept. They are
computed again as ``<tensor>.again``, just before their first reader. ``torch.utils.checkpoint``
with early stop does the same: it does not recompute tensors that backward does not read.
    full                only the layer's input is kept
    selective           results of cheap nodes are recomputed; other tensors that backward reads
                        are kept
"""

from meshwise.models.graph import Graph, Node, Tensor
from meshwise.spec.layout import Recompute

REPEATED = ("heads", "top_k")


def training_step(graph: Graph, recompute: tuple[Recompute, ...] = ()) -> Graph:
    """Append the backward nodes to a forward graph. ``recompute``: one word per
    layer; () recomputes nothing."""
    step = _Backward(graph, recompute)
    for node in reversed(graph.nodes):
        step.differentiate(node)
    gradients = {each.name: step.gradient_of[each.name] for each in graph.parameters()}
    return Graph(graph.sizes, step.tensors, tuple(step.nodes), gradients)


# Forward tensors that an input's gradient reads: indices of the node's inputs, and of its outputs.
_READS: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    **dict.fromkeys(("gelu", "silu", "clamp", "square"), ((0,), ())),
    **dict.fromkeys(("softmax", "sigmoid", "relu", "rsqrt"), ((), (0,))),
    **dict.fromkeys(("rms", "normalize"), ((0,), (-1,))),
    **dict.fromkeys(("cast", "copy", "mean", "exchange", "average"), ((), ())),
    "max_pool": ((0,), (1,)),
    "gather": ((0, 1), ()),
}


class _Backward:
    """The nodes and tensors so far, with the name of each gradient and the producer of each
    forward result."""

    def __init__(self, graph: Graph, recompute: tuple[Recompute, ...]) -> None:
        self.tensors = dict(graph.tensors)
        self.nodes = list(graph.nodes)
        self.gradient_of: dict[str, str] = {}  # forward tensor -> its gradient so far
        self.recompute = recompute
        self.producers = {name: node for node in graph.nodes for name in node.outputs}
        if (last := graph.nodes[-1]).name != "loss":
            (result,) = last.outputs
            self.gradient_of[result] = self.declare(result, "")

    def declare(self, of: str, suffix: str) -> str:
        source = self.tensors[of]
        role = "gradient" if source.role == "parameter" else "activation"
        name = f"d.{of}{suffix}"
        self.tensors[name] = Tensor(name, source.dims, source.dtype, role)
        return name

    def add_node(
        self, of: Node, suffix: str, kind: str, inputs: list[str], outputs: list[str]
    ) -> None:
        self.nodes.append(
            of._replace(
                name=f"{of.name}.{suffix}", kind=kind, inputs=tuple(inputs),
                outputs=tuple(outputs), phase="backward", cheap=False,
            )
        )  # fmt: skip

    def emit(self, of: Node, suffix: str, kind: str, inputs: list[str], to: list[str]) -> None:
        """Append a node that computes the gradients of ``to``."""
        new = [self.declare(t, f".{of.name}" if t in self.gradient_of else "") for t in to]
        self.add_node(of, suffix, kind, inputs, new)
        for name, gradient in zip(to, new, strict=True):
            self.accumulate(of, name, gradient)

    def accumulate(self, of: Node, name: str, gradient: str) -> None:
        """Add a second contribution to a tensor's gradient."""
        first = self.gradient_of.setdefault(name, gradient)
        if first != gradient:
            total = self.declare(name, f".sum.{of.name}")
            self.add_node(of, f"accumulate.{name}", "add", [first, gradient], [total])
            self.gradient_of[name] = total

    def saved(self, name: str, reader: Node) -> str:
        """Return the name under which ``reader`` (forward or backward) reads a forward result:
        the tensor if it is kept, or a copy whose recomputation is appended here."""
        producer = self.producers.get(name)
        if producer is None or not self.is_redone(producer, reader):
            return name
        if f"{name}.again" not in self.tensors:
            inputs = tuple([self.saved(x, producer) for x in producer.inputs])
            outputs = tuple([f"{y}.again" for y in producer.outputs])
            for y, again in zip(producer.outputs, outputs, strict=True):
                self.tensors[again] = self.tensors[y]._replace(name=again)
            self.nodes.append(
                producer._replace(
                    name=f"{producer.name}.again", inputs=inputs, outputs=outputs, phase="recompute"
                )
            )
        return f"{name}.again"

    def is_redone(self, producer: Node, reader: Node) -> bool:
        """Return whether a result is recomputed for ``reader`` rather than kept. A layer's input
        is kept."""
        while producer.kind == "view":
            if producer.inputs[0] not in self.producers:
                return False
            producer = self.producers[producer.inputs[0]]
        inside = producer.part == reader.part == "layer" and producer.layer == reader.layer
        word = self.recompute[producer.layer] if inside and self.recompute else "none"
        return word == "full" or (word == "selective" and producer.cheap)

    def reduced(self, node: Node, kind: str, inputs: list[str], to: str) -> None:
        """Append a node that computes the gradient of ``to``. If the forward node repeated
        ``to`` (over all heads, over the copies of a token, or along any dim of a factor), append
        another that sums it. If a factor is narrower than the product, cast its gradient."""
        source, result = self.tensors[to], self.tensors[node.outputs[0]]
        more = [dim for dim in result.dims if dim not in source.dims]
        if kind == "move" and "room" in more and "top_k" not in source.dims:
            more = ["top_k"]  # the room's rows are copies of tokens
        if kind != "mul":
            more = [dim for dim in more if dim in REPEATED and "room" not in source.dims]
        narrow = kind == "mul" and source.dtype != result.dtype
        if not (more or narrow):
            self.emit(node, f"grad.{to}", kind, inputs, [to])
            return
        every = f"d.{to}.every.{node.name}"
        self.tensors[every] = Tensor(every, (*source.dims, *more), result.dtype)
        self.add_node(node, f"grad.{to}.every", kind, inputs, [every])
        self.emit(node, f"grad.{to}", "add" if more else "cast", [every], [to])

    def product(self, node: Node, dy: str) -> None:
        """Differentiate a product or convolution by its input, its weight and its bias."""
        x = node.inputs[0]
        weight, *others = node.inputs[1:]
        saved = self.saved(x, node)  # one operator in torch: x is recomputed before both products
        roles = {name: self.tensors[name].role for name in node.inputs}
        ends = [self.saved(name, node) for name in others if roles[name] == "constant"]
        kept = self.saved(weight, node)  # a parameter, or one cast
        if roles[x] == "activation":
            self.emit(node, "dgrad", node.kind, [dy, kept, *ends], [x])
        self.emit(node, "wgrad", node.kind, [dy, saved, *ends], [weight])
        for name in others:
            if roles[name] == "parameter":
                self.emit(node, "bgrad", "add", [dy], [name])
            elif roles[name] == "activation":
                self.accumulate(node, name, dy)

    def moments(self, node: Node) -> None:
        """Differentiate variance and mean as torch does, kernel by kernel."""
        x = node.inputs[0]
        saved, (variance, mean) = self.saved(x, node), node.outputs
        each = [self.declare(x, f".{word}.{node.name}") for word in ("less", "apart", "level")]
        self.add_node(node, "grad.less", "add", [saved, saved], each[:1])
        self.add_node(node, "grad.apart", "mul", [each[0], self.gradient_of[variance]], each[1:2])
        self.add_node(node, "grad.level", "copy", [self.gradient_of[mean]], each[2:])
        at = len(self.nodes)
        self.emit(node, "grad", "add", each[1:], [x])
        self.nodes[at] = self.nodes[at]._replace(holds=(saved,))

    def differentiate(self, node: Node) -> None:
        """Append the backward of a forward node; a constant has none."""
        if node.kind == "balance":
            loads = self.saved(node.outputs[0], node)
            self.emit(node, "grad", node.kind, [loads], [node.inputs[1]])
            return
        if self.tensors[node.outputs[0]].role == "constant":
            return
        if node.name == "loss":
            self.emit(node, "dlog_p", "cross_entropy", ["targets"], ["loss.log_p"])
            return
        dy = self.gradient_of[node.outputs[0]]
        x = node.inputs[0]
        if node.kind in ("gemm", "convolution"):
            self.product(node, dy)
        elif node.kind in ("layer_norm", "rms_norm"):
            saved, stats = self.saved(x, node), self.saved(node.outputs[1], node)
            self.emit(
                node, "grad", node.kind, [dy, saved, node.inputs[1], stats], list(node.inputs)
            )
        elif node.kind == "attention":
            inputs, results = (
                [self.saved(name, node) for name in names] for names in (node.inputs, node.outputs)
            )
            self.emit(node, "grad", node.kind, [*inputs, dy, *results], list(node.inputs))
        elif node.kind in _READS:
            of_inputs, of_results = _READS[node.kind]
            read = [self.saved(node.inputs[i], node) for i in of_inputs]
            read += [self.saved(node.outputs[i], node) for i in of_results]
            self.emit(node, "grad", node.kind, [dy, *read], [x])
            if x == "stage.in" and not read:  # the caller of backward holds it
                self.nodes[-1] = self.nodes[-1]._replace(holds=(x,))
        elif node.kind == "var_mean":
            self.moments(node)
        elif node.kind == "move":
            self.reduced(node, "move", [dy, self.saved(node.inputs[2], node)], x)
        elif node.kind == "sum":
            self.emit(node, "grad", "view", [dy], [x])
        elif node.kind == "view" and self.tensors[x].dims == self.tensors[node.outputs[0]].dims:
            self.accumulate(node, x, dy)
        elif node.kind == "view":
            gradients = [self.gradient_of[name] for name in node.outputs]
            self.emit(node, "grad", "copy", gradients, [x])
        elif node.kind == "concat":
            for name in node.inputs:
                self.reduced(node, "view", [dy], name)
        elif node.kind == "mul":
            self.factors(node, dy)
        elif node.kind == "cross_entropy":
            self.emit(node, "grad", node.kind, [dy, node.outputs[0]], [x])
        elif node.kind == "add":
            self.terms(node, dy)
        else:
            assert node.kind == "embedding", node.kind
            self.emit(node, "wgrad", node.kind, [dy, x], [node.inputs[1]])

    def factors(self, node: Node, dy: str) -> None:
        """Give each factor of an element-wise product its gradient."""
        held: tuple[str, ...] = ()
        for name, other in (node.inputs, node.inputs[::-1]):
            if self.tensors[name].role in ("activation", "parameter"):
                saved, at = self.saved(other, node), len(self.nodes)
                self.reduced(node, "mul", [dy, saved], name)
                self.nodes[at] = self.nodes[at]._replace(holds=held)
                held = (saved,)

    def terms(self, node: Node, dy: str) -> None:
        """Give each term of a sum its gradient. Those of positions, and of one value per channel,
        are summed over the batch."""
        for name in node.inputs:
            dims, role = self.tensors[name].dims, self.tensors[name].role
            if role == "parameter" or dims != self.tensors[node.outputs[0]].dims:
                self.emit(node, f"grad.{name}", "add", [dy], [name])
            else:
                self.accumulate(node, name, dy)
