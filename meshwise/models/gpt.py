"""The forward graph of a GPT, one node for each kernel that eager PyTorch launches.

    e = embed[tokens];  x = e + positions
    layer:  x = x + out(attention(qkv(norm1(x))));  x = x + down(gelu(up(norm2(x))))
    head:   logits = norm(x) embed^T;  loss = mean(nll(log_softmax(float(logits)), targets))

A pipeline stage is some of the layers, with the embedding if it is the first and the head if it is
the last. Any other stage begins with ``stage.in``, which no node produces, and ends with the
residual stream. A last stage that is not the first has its own copy of the tied weight.

``nn/gpt.py`` is the same mathematics as a torch module; tests hold the two to the same parameter
count, FLOPs and, in eager mode, the same bytes saved for backward.
"""

from meshwise.models.graph import Graph, Node, Tensor
from meshwise.spec import Model

TOKEN = ("batch", "seq")
STREAM = ("batch", "seq", "hidden")


def forward(
    model: Model,
    batch: int,
    seq: int,
    dtype: str,
    *,
    layers: int | None = None,
    first: bool = True,
    last: bool = True,
) -> Graph:
    """The graph of one forward pass over ``batch`` sequences of ``seq`` tokens.

    Of a stage of ``layers`` layers (by default all), numbered from 0 whichever they are in the
    model, so that equal stages are one graph.
    """
    if model.experts is not None:
        raise ValueError(
            f"{model.name or 'the model'} has experts: its layouts are run, not priced yet; give "
            "the layout yourself"
        )
    if seq > model.max_seq_len:
        raise ValueError(
            f"seq_len = {seq}: {model.name or 'the model'} has positions for {model.max_seq_len}; "
            f"use a shorter sequence"
        )
    sizes = {
        "batch": batch, "seq": seq, "hidden": model.hidden, "heads": model.heads, "three": 3,
        "head_dim": model.head_dim, "ffn": model.ffn, "vocab": model.vocab,
        "positions": model.max_seq_len, "two": 2, "one": 1,
    }  # fmt: skip
    graph = _Forward(dtype)
    x = graph.embedding() if first else graph.tensor("stage.in", STREAM)
    for i in range(model.layers if layers is None else layers):
        x = graph.layer(x, i)
    if last:
        graph.head(x, "embed.weight" if first else "head.weight")
    return Graph(sizes, graph.tensors, tuple(graph.nodes))


class _Forward:
    """The nodes and tensors written so far; each method adds some and returns its result."""

    def __init__(self, dtype: str) -> None:
        self.dtype = dtype
        self.tensors: dict[str, Tensor] = {}
        self.nodes: list[Node] = []

    def tensor(
        self, name: str, dims: tuple[str, ...], dtype: str = "", role: str = "activation"
    ) -> str:
        self.tensors[name] = Tensor(name, dims, dtype or self.dtype, role)
        return name

    def parameter(self, name: str, *dims: str) -> str:
        return self.tensor(name, dims, role="parameter")

    def norm(self, x: str, name: str, part: str, layer: int) -> str:
        y = self.tensor(f"{name}.y", STREAM)
        stats = self.tensor(f"{name}.stats", (*TOKEN, "two"), "fp32")  # mean and rstd
        weight = self.parameter(f"{name}.weight", "hidden")
        bias = self.parameter(f"{name}.bias", "hidden")
        self.nodes.append(Node(name, "layer_norm", (x, weight, bias), (y, stats), part, layer))
        return y

    def linear(
        self, x: str, name: str, out: tuple[str, ...], into: tuple[str, ...], layer: int
    ) -> str:
        y = self.tensor(f"{name}.y", (*TOKEN, *out))
        weight = self.parameter(f"{name}.weight", *out, *into)
        bias = self.parameter(f"{name}.bias", *out)
        self.nodes.append(Node(name, "gemm", (x, weight, bias), (y,), "layer", layer))
        return y

    def add(self, a: str, b: str, name: str, part: str, layer: int = 0) -> str:
        y = self.tensor(f"{name}.y", STREAM)
        self.nodes.append(Node(name, "add", (a, b), (y,), part, layer))
        return y

    def embedding(self) -> str:
        tokens = self.tensor("tokens", TOKEN, "int64", "index")
        table = self.parameter("embed.weight", "vocab", "hidden")
        looked_up = self.tensor("embed.y", STREAM)
        self.nodes.append(Node("embed", "embedding", (tokens, table), (looked_up,), "embed"))
        positions = self.parameter("positions.weight", "positions", "hidden")
        return self.add(looked_up, positions, "positions", "embed")

    def layer(self, x: str, i: int) -> str:
        at = f"layers.{i}"
        normed = self.norm(x, f"{at}.norm1", "layer", i)
        qkv = self.linear(normed, f"{at}.qkv", ("heads", "three", "head_dim"), ("hidden",), i)
        mixed = self.tensor(f"{at}.attention.y", (*TOKEN, "heads", "head_dim"))
        lse = self.tensor(f"{at}.attention.lse", ("batch", "heads", "seq"), "fp32")
        self.nodes.append(Node(f"{at}.attention", "attention", (qkv,), (mixed, lse), "layer", i))
        out = self.linear(mixed, f"{at}.out", ("hidden",), ("heads", "head_dim"), i)
        x = self.add(x, out, f"{at}.add1", "layer", i)
        normed = self.norm(x, f"{at}.norm2", "layer", i)
        up = self.linear(normed, f"{at}.up", ("ffn",), ("hidden",), i)
        gelu = self.tensor(f"{at}.gelu.y", (*TOKEN, "ffn"))
        self.nodes.append(Node(f"{at}.gelu", "gelu", (up,), (gelu,), "layer", i))
        down = self.linear(gelu, f"{at}.down", ("hidden",), ("ffn",), i)
        return self.add(x, down, f"{at}.add2", "layer", i)

    def head(self, x: str, table: str) -> None:
        """Final norm, projection by ``table`` and loss."""
        normed = self.norm(x, "norm", "head", 0)
        self.parameter(table, "vocab", "hidden")
        logits = self.tensor("head.y", (*TOKEN, "vocab"))
        self.nodes.append(Node("head", "gemm", (normed, table), (logits,), "head"))
        if self.dtype != "fp32":
            wide = self.tensor("loss.logits", (*TOKEN, "vocab"), "fp32")
            self.nodes.append(Node("loss.cast", "cast", (logits,), (wide,), "head"))
            logits = wide
        log_p = self.tensor("loss.log_p", (*TOKEN, "vocab"), "fp32")
        terms = self.tensor("loss.terms", (*TOKEN, "three"), "fp32")  # row's max, sum, target logit
        softmax = Node("loss.softmax", "cross_entropy", (logits,), (log_p, terms), "head")
        targets = self.tensor("targets", TOKEN, "int64", "index")
        loss = self.tensor("loss", ("one",), "fp32")
        self.nodes += [softmax, Node("loss", "cross_entropy", (terms, targets), (loss,), "head")]
