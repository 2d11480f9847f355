"""The forward graph of a GPT, one node for each kernel that eager PyTorch launches.

    e = embed[tokens];  x = e + positions
    layer:  x = x + out(attention(qkv(norm1(x))));  x = x + down(gelu(up(norm2(x))))
    head:   logits = norm(x) embed^T;  loss = mean(nll(log_softmax(float(logits)), targets))

``nn/gpt.py`` is the same mathematics as a torch module; tests hold the two to the same parameter
count, FLOPs and, in eager mode, the same bytes saved for backward.
"""

from meshwise.models.graph import Graph, Node, Tensor
from meshwise.spec import Model

TOKEN = ("batch", "seq")
STREAM = ("batch", "seq", "hidden")


def forward(model: Model, batch: int, seq: int, dtype: str) -> Graph:
    """The graph of one forward pass over ``batch`` sequences of ``seq`` tokens."""
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
    tensors: dict[str, Tensor] = {}
    nodes: list[Node] = []

    def tensor(
        name: str, dims: tuple[str, ...], dtype: str = dtype, role: str = "activation"
    ) -> str:
        tensors[name] = Tensor(name, dims, dtype, role)
        return name

    def parameter(name: str, *dims: str) -> str:
        return tensor(name, dims, role="parameter")

    def norm(x: str, name: str, part: str, layer: int) -> str:
        y = tensor(f"{name}.y", STREAM)
        stats = tensor(f"{name}.stats", (*TOKEN, "two"), "fp32")  # mean and rstd
        inputs = (x, parameter(f"{name}.weight", "hidden"), parameter(f"{name}.bias", "hidden"))
        nodes.append(Node(name, "layer_norm", inputs, (y, stats), part, layer))
        return y

    def linear(x: str, name: str, out: tuple[str, ...], into: tuple[str, ...], layer: int) -> str:
        y = tensor(f"{name}.y", (*TOKEN, *out))
        inputs = (x, parameter(f"{name}.weight", *out, *into), parameter(f"{name}.bias", *out))
        nodes.append(Node(name, "gemm", inputs, (y,), "layer", layer))
        return y

    def add(a: str, b: str, name: str, part: str, layer: int) -> str:
        y = tensor(f"{name}.y", STREAM)
        nodes.append(Node(name, "add", (a, b), (y,), part, layer))
        return y

    tokens = tensor("tokens", TOKEN, "int64", "index")
    targets = tensor("targets", TOKEN, "int64", "index")
    table = parameter("embed.weight", "vocab", "hidden")
    looked_up = tensor("embed.y", STREAM)
    nodes.append(Node("embed", "embedding", (tokens, table), (looked_up,), "embed"))
    x = add(
        looked_up, parameter("positions.weight", "positions", "hidden"), "positions", "embed", 0
    )

    for i in range(model.layers):
        at = f"layers.{i}"
        qkv_dims = ("heads", "three", "head_dim")
        qkv = linear(norm(x, f"{at}.norm1", "layer", i), f"{at}.qkv", qkv_dims, ("hidden",), i)
        mixed = tensor(f"{at}.attention.y", (*TOKEN, "heads", "head_dim"))
        lse = tensor(f"{at}.attention.lse", ("batch", "heads", "seq"), "fp32")
        nodes.append(Node(f"{at}.attention", "attention", (qkv,), (mixed, lse), "layer", i))
        o = linear(mixed, f"{at}.out", ("hidden",), ("heads", "head_dim"), i)
        x = add(x, o, f"{at}.add1", "layer", i)
        up = linear(norm(x, f"{at}.norm2", "layer", i), f"{at}.up", ("ffn",), ("hidden",), i)
        gelu = tensor(f"{at}.gelu.y", (*TOKEN, "ffn"))
        nodes.append(Node(f"{at}.gelu", "gelu", (up,), (gelu,), "layer", i))
        x = add(x, linear(gelu, f"{at}.down", ("hidden",), ("ffn",), i), f"{at}.add2", "layer", i)

    normed = norm(x, "norm", "head", 0)
    logits = tensor("head.y", (*TOKEN, "vocab"))
    nodes.append(Node("head", "gemm", (normed, table), (logits,), "head"))
    if dtype != "fp32":
        wide = tensor("loss.logits", (*TOKEN, "vocab"), "fp32")
        nodes.append(Node("loss.cast", "cast", (logits,), (wide,), "head"))
        logits = wide
    log_p = tensor("loss.log_p", (*TOKEN, "vocab"), "fp32")
    terms = tensor("loss.terms", (*TOKEN, "three"), "fp32")  # max, sum and target logit of a row
    nodes.append(Node("loss.softmax", "cross_entropy", (logits,), (log_p, terms), "head"))
    loss = tensor("loss", ("one",), "fp32")
    nodes.append(Node("loss", "cross_entropy", (terms, targets), (loss,), "head"))
    return Graph(sizes, tensors, tuple(nodes))
