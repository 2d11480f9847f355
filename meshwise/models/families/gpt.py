"""The forward graph of a GPT.

    e = embed[tokens];  x = e + positions
    layer:  x = x + out(attention(qkv(norm1(x))));  x = x + down(gelu(up(norm2(x)))), or experts
    head:   logits = norm(x) embed^T;  loss = mean(nll(log_softmax(float(logits)), targets))

``nn/gpt.py`` is the same mathematics as a torch module. Tests compare the two: parameter count,
FLOPs and, in eager mode, bytes saved for backward must be equal.
"""

from meshwise.models.families import experts
from meshwise.models.families.build import STREAM, Build, Layers
from meshwise.models.graph import Graph
from meshwise.spec import Model


def forward(
    model: Model, batch: int, seq: int, dtype: str, layers: Layers, *, first: bool, last: bool
) -> Graph:
    """Return the forward graph of a GPT, as ``families.forward`` does."""
    build = Build(dtype)
    x = _embedding(build) if first else build.tensor("stage.in", STREAM)
    for i, kind in enumerate(layers):
        x = _layer(build, model, x, i, has_experts=kind.form == "experts")
    if last:
        build.part, build.layer = "head", 0
        build.head(build.layer_norm(x, "norm"), "embed.weight" if first else "head.weight")
    return build.graph(
        {
            "batch": batch, "seq": seq, "hidden": model.hidden, "heads": model.heads, "three": 3,
            "head_dim": model.head_dim, "ffn": model.ffn, "vocab": model.vocab,
            "positions": model.max_seq_len, "two": 2, "one": 1, **experts.sizes(model, batch, seq),
        }
    )  # fmt: skip


def _embedding(build: Build) -> str:
    looked_up = build.embedding()
    positions = build.parameter("positions.weight", "positions", "hidden")
    return build.elementwise("positions", "add", looked_up, positions)


def _layer(build: Build, model: Model, x: str, i: int, *, has_experts: bool) -> str:
    build.part, build.layer, at = "layer", i, f"layers.{i}"
    normed, per_head = build.layer_norm(x, f"{at}.norm1"), ("heads", "three", "head_dim")
    with build.within("attention"):
        qkv = build.linear(normed, f"{at}.qkv", per_head, ("hidden",), bias=True)
        mixed = build.attention(f"{at}.attention", (qkv,), ("heads",))
        out = build.linear(mixed, f"{at}.out", ("hidden",), ("heads", "head_dim"), bias=True)
    x = build.elementwise(f"{at}.add1", "add", x, out)
    normed = build.layer_norm(x, f"{at}.norm2", cheap=not has_experts)
    if has_experts:
        with build.within("experts"):
            y = experts.experts(build, model, normed, at)
        return build.elementwise(f"{at}.add2", "add", x, y)
    with build.within("feed_forward"):
        up = build.linear(normed, f"{at}.up", ("ffn",), ("hidden",), bias=True)
        gelu = build.elementwise(f"{at}.gelu", "gelu", up, cheap=True)
        down = build.linear(gelu, f"{at}.down", ("hidden",), ("ffn",), bias=True)
    return build.elementwise(f"{at}.add2", "add", x, down)
