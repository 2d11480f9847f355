"""Build forward graphs: one node for each kernel that eager PyTorch launches."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from meshwise.models.graph import Graph, Node, Tensor
from meshwise.spec import LayerKind

Layers = tuple[LayerKind, ...]
TOKEN = ("batch", "seq")
STREAM = (*TOKEN, "hidden")


class Build:
    """Builds a graph. Each method appends a node and returns its result. ``part`` and ``layer``
    apply to the nodes that follow."""

    def __init__(self, dtype: str) -> None:
        self.dtype = dtype
        self.tensors: dict[str, Tensor] = {}
        self.nodes: list[Node] = []
        self.part, self.layer, self.room = "embed", 0, "stream"
        self.window: int | None = None  # of the layer's attention

    def graph(self, sizes: Mapping[str, int]) -> Graph:
        return Graph(sizes, self.tensors, tuple(self.nodes))

    def tensor(
        self, name: str, dims: tuple[str, ...], dtype: str = "", role: str = "activation"
    ) -> str:
        self.tensors[name] = Tensor(name, dims, dtype or self.dtype, role)
        return name

    def parameter(self, name: str, *dims: str) -> str:
        return self.tensor(name, dims, role="parameter")

    def node(
        self, name: str, kind: str, inputs: tuple[str, ...], *outputs: str, cheap: bool = False
    ) -> str:
        """Append a node. ``cheap``: selective recomputation recomputes its result instead of
        keeping it."""
        self.nodes.append(
            Node(name, kind, inputs, outputs, self.part, self.layer, "forward", cheap, self.room)
        )
        return outputs[0]

    def split(self, x: str, **parts: str) -> tuple[str, ...]:
        """Return views of x: one per name, with the given last dim."""
        rows, dtype = self.tensors[x].dims[:-1], self.tensors[x].dtype
        at = x.removesuffix(".y")
        views = [self.tensor(f"{at}.{name}", (*rows, dim), dtype) for name, dim in parts.items()]
        self.node(f"{at}.split", "view", (x,), *views)
        return tuple(views)

    def concat(self, name: str, x: str, *others: str, dim: str) -> str:
        """Concatenate x [batch, seq, heads, ..] and ``others``, which may lack the heads."""
        dims = (*self.tensors[x].dims[:-1], dim)
        return self.node(name, "concat", (x, *others), self.tensor(f"{name}.y", dims))

    @contextmanager
    def within(self, room: str) -> Iterator[None]:
        """Assign the nodes in this block to ``room``, a part of the model whose dims tp divides
        in one way."""
        self.room = room
        yield
        self.room = "stream"

    def elementwise(
        self, name: str, kind: str, *inputs: str, dtype: str = "", cheap: bool = False
    ) -> str:
        """Append a node whose result has the first input's dims."""
        first = self.tensors[inputs[0]]
        result = self.tensor(f"{name}.y", first.dims, dtype or first.dtype)
        return self.node(name, kind, inputs, result, cheap=cheap)

    def move(self, name: str, x: str, indices: tuple[str, str], dims: tuple[str, ...]) -> str:
        """Pick rows of x by the first index. Backward picks gradient rows by the second."""
        y = self.tensor(f"{name}.y", dims, self.tensors[x].dtype)
        return self.node(name, "move", (x, *indices), y)

    def layer_norm(self, x: str, name: str, *, cheap: bool = True) -> str:
        y = self.tensor(f"{name}.y", STREAM)
        stats = self.tensor(f"{name}.stats", (*TOKEN, "two"), "fp32")  # mean and rstd
        weight, bias = (self.parameter(f"{name}.{part}", "hidden") for part in ("weight", "bias"))
        return self.node(name, "layer_norm", (x, weight, bias), y, stats, cheap=cheap)

    def rms_norm(self, x: str, name: str, *, cheap: bool = True, over: int = 1) -> str:
        """Normalise x over its last ``over`` dims."""
        dims = self.tensors[x].dims
        y = self.tensor(f"{name}.y", dims)
        rstd = self.tensor(f"{name}.rstd", dims[:-over], "fp32")
        weight = self.parameter(f"{name}.weight", *dims[-over:])
        return self.node(name, "rms_norm", (x, weight), y, rstd, cheap=cheap)

    def linear(
        self,
        x: str,
        name: str,
        out: tuple[str, ...],
        into: tuple[str, ...],
        *,
        bias: bool = False,
        cheap: bool = False,
    ) -> str:
        y = self.tensor(f"{name}.y", (*TOKEN, *out))
        weights = [self.parameter(f"{name}.weight", *out, *into)]
        weights += [self.parameter(f"{name}.bias", *out)] if bias else []
        return self.node(name, "gemm", (x, *weights), y, cheap=cheap)

    def attention(
        self, name: str, inputs: tuple[str, ...], heads: tuple[str, ...], dim: str = "head_dim"
    ) -> str:
        """Append an attention. ``inputs``: q, k and v, or one tensor of the three. ``heads``:
        the dims of q's heads. ``dim``: the dim of one head of v."""
        y = self.tensor(f"{name}.y", (*TOKEN, *heads, dim))
        lse = self.tensor(f"{name}.lse", ("batch", *heads, "seq"), "fp32")
        self.node(name, "attention", inputs, y, lse)
        self.nodes[-1] = self.nodes[-1]._replace(window=self.window)
        return y

    def embedding(self) -> str:
        tokens = self.tensor("tokens", TOKEN, "int64", "index")
        table = self.parameter("embed.weight", "vocab", "hidden")
        y = self.tensor("embed.y", STREAM)
        with self.within("embed"):
            return self.node("embed", "embedding", (tokens, table), y)

    def head(self, x: str, table: str) -> None:
        """Project the normed stream by ``table`` and take the loss of the logits."""
        self.parameter(table, "vocab", "hidden")
        with self.within("head"):
            y = self.tensor("head.y", (*TOKEN, "vocab"))
            self.loss(self.node("head", "gemm", (x, table), y))

    def loss(self, logits: str) -> None:
        """Append the mean cross entropy of logits; their last dim is the classes."""
        dims = self.tensors[logits].dims
        if self.dtype != "fp32":
            wide = self.tensor("loss.logits", dims, "fp32")
            logits = self.node("loss.cast", "cast", (logits,), wide)
        log_p = self.tensor("loss.log_p", dims, "fp32")
        terms = self.tensor(
            "loss.terms", (*dims[:-1], "three"), "fp32"
        )  # row's max, sum, target logit
        self.node("loss.softmax", "cross_entropy", (logits,), log_p, terms)
        targets = self.tensor("targets", dims[:-1], "int64", "index")
        self.node("loss", "cross_entropy", (terms, targets), self.tensor("loss", ("one",), "fp32"))
