"""The forward graph of a Llama-type decoder with a dense feed-forward.

    x = embed[tokens]
    layer:  x = x + out(attention(rope(q(norm1(x))), rope(k(norm1(x))), v(norm1(x))))
            x = x + down(silu(gate(norm2(x))) * up(norm2(x)))
    head:   logits = norm(x) head^T;  loss = mean(nll(log_softmax(float(logits)), targets))

q and k may be normed by head (Qwen3), products may have biases (Qwen2), and without a gate the
feed-forward is down(gelu(up(norm2(x)))). Query heads are written as ``kv_heads`` times the
``queries`` that share one (GQA). ``nn/llama.py`` is the same mathematics as a torch module.
"""

from meshwise.models.families.build import STREAM, Build
from meshwise.models.graph import Graph
from meshwise.spec import Decoder

KV_HEADS = ("kv_heads", "head_dim")
HEADS = ("kv_heads", "queries", "head_dim")


def forward(
    model: Decoder, batch: int, seq: int, dtype: str, layers: int, *, first: bool, last: bool
) -> Graph:
    """``families.forward`` of a decoder without experts and latent attention."""
    build = Build(dtype)
    x = build.embedding() if first else build.tensor("stage.in", STREAM)
    for i in range(layers):
        x = _layer(build, model, x, i)
    if last:
        build.part, build.layer = "head", 0
        tied = model.tied and first
        build.head(build.rms_norm(x, "norm"), "embed.weight" if tied else "head.weight")
    return build.graph(
        {
            "batch": batch, "seq": seq, "hidden": model.hidden, "kv_heads": model.kv_heads,
            "queries": model.heads // model.kv_heads, "head_dim": model.head_dim,
            "half": model.head_dim // 2, "ffn": model.ffn, "vocab": model.vocab, "two": 2,
            "three": 3, "one": 1,
        }
    )  # fmt: skip


def _layer(build: Build, model: Decoder, x: str, i: int) -> str:
    build.part, build.layer, at = "layer", i, f"layers.{i}"
    normed = build.rms_norm(x, f"{at}.norm1")
    q, k, v = (
        build.linear(normed, f"{at}.{name}", dims, ("hidden",), bias=model.qkv_bias)
        for name, dims in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS))
    )
    if model.qk_norm:
        q, k = (
            build.rms_norm(product, f"{at}.{name}_norm", cheap=False)
            for name, product in (("q", q), ("k", k))
        )
    q, k = (_rope(build, product, f"{at}.{name}.rope") for name, product in (("q", q), ("k", k)))
    mixed = build.attention(f"{at}.attention", (q, k, v), HEADS[:2])
    out = build.linear(mixed, f"{at}.out", ("hidden",), HEADS, bias=model.out_bias)
    x = build.elementwise(f"{at}.add1", "add", x, out)
    return build.elementwise(f"{at}.add2", "add", x, _feed_forward(build, model, x, at))


def _rope(build: Build, x: str, name: str) -> str:
    """Turn the halves of each head against each other, in fp32: x cos + flip(x) sin."""
    cos, sin = (
        build.tensor(f"rope.{table}", ("seq", "half"), "fp32", "constant")
        for table in ("cos", "sin")
    )
    signed = build.tensor(f"{name}.signed", ("seq", "two", "half"), "fp32", "constant")
    dtype = build.dtype
    if dtype != "fp32":
        x = build.elementwise(f"{name}.wide", "cast", x, dtype="fp32")
    kept = build.elementwise(f"{name}.cos", "mul", x, cos)
    flipped = build.elementwise(f"{name}.flip", "copy", x)
    build.node(f"{name}.signs", "copy", (sin,), signed)
    turned = build.elementwise(f"{name}.sin", "mul", flipped, signed)
    x = build.elementwise(f"{name}.add", "add", kept, turned)
    return x if dtype == "fp32" else build.elementwise(f"{name}.narrow", "cast", x, dtype=dtype)


def _feed_forward(build: Build, model: Decoder, x: str, at: str) -> str:
    normed, wide, bias = build.rms_norm(x, f"{at}.norm2"), ("ffn",), model.mlp_bias
    if model.gated:
        gate = build.linear(normed, f"{at}.gate", wide, ("hidden",), bias=bias)
    up = build.linear(normed, f"{at}.up", wide, ("hidden",), bias=bias)
    if model.gated:
        silu = build.elementwise(f"{at}.silu", "silu", gate, cheap=True)
        inner = build.elementwise(f"{at}.gated", "mul", silu, up, cheap=True)
    else:
        inner = build.elementwise(f"{at}.gelu", "gelu", up, cheap=True)
    return build.linear(inner, f"{at}.down", ("hidden",), wide, bias=bias)
