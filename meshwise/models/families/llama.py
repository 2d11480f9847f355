"""The forward graph of a Llama-type decoder.

    x = embed[tokens]
    layer:  x = x + out(attention(rope(q(norm1(x))), rope(k(norm1(x))), v(norm1(x))))
            x = x + down(silu(gate(norm2(x))) * up(norm2(x))), or experts
    head:   logits = norm(x) head^T;  loss = mean(nll(log_softmax(float(logits)), targets))

q and k may be normed by head (Qwen3) or over all heads (OLMo 2). Products may have biases (Qwen2).
Without a gate the feed-forward is down(gelu(up(norm2(x)))). The terms added to x may be normed
(OLMo 2, Gemma 2) or scaled (Granite). q, the embedding and the logits may be scaled, too. Latent
attention (DeepSeek-V2) computes k and v, and q if it has a rank, from a narrow normed row; all
heads share the rotary part of k. Query heads have two dims (GQA): ``kv_heads``, and the ``queries``
that share one. ``nn/llama.py`` is the same mathematics as a torch module.
"""

from meshwise.models.families import experts
from meshwise.models.families.build import STREAM, Build, Layers
from meshwise.models.graph import Graph
from meshwise.spec import Decoder, Mla

KV_HEADS = ("kv_heads", "head_dim")
HEADS = ("kv_heads", "queries", "head_dim")


def forward(
    model: Decoder, batch: int, seq: int, dtype: str, layers: Layers, *, first: bool, last: bool
) -> Graph:
    """Return the forward graph of a decoder, as ``families.forward`` does."""
    build, mla = Build(dtype), model.mla
    x = build.embedding() if first else build.tensor("stage.in", STREAM)
    if first and model.embed_scale != 1:
        x = build.elementwise("embed.scale", "copy", x)
    for i, kind in enumerate(layers):
        build.window = kind.window
        x = _layer(build, model, x, i, has_experts=kind.form == "experts")
    if last:
        build.part, build.layer = "head", 0
        x, tied = build.rms_norm(x, "norm"), model.tied and first
        if model.logits_scale != 1:
            x = build.elementwise("head.scale", "copy", x)
        build.head(x, "embed.weight" if tied else "head.weight")
    sizes = {
        "batch": batch, "seq": seq, "hidden": model.hidden, "ffn": model.ffn, "vocab": model.vocab,
        "two": 2, "three": 3, "one": 1, **experts.sizes(model, batch, seq),
    }  # fmt: skip
    sizes |= dict(model.more_weights)
    return build.graph(sizes | (_head_sizes(model) if mla is None else _latent_sizes(model, mla)))


def _head_sizes(model: Decoder) -> dict[str, int]:
    queries, width = model.heads // model.kv_heads, model.head_dim
    return {"kv_heads": model.kv_heads, "queries": queries, "head_dim": width, "half": width // 2}


def _latent_sizes(model: Decoder, mla: Mla) -> dict[str, int]:
    nope, rope, value, latent = (
        mla.nope_head_dim, mla.rope_head_dim, mla.v_head_dim, mla.kv_lora_rank
    )  # fmt: skip
    return {
        "heads": model.heads, "nope": nope, "rope": rope, "half": rope // 2, "qk": nope + rope,
        "value": value, "kv": nope + value, "kv_latent": latent, "kv_down": latent + rope,
        "q_latent": mla.q_lora_rank or 0,
    }  # fmt: skip


def _layer(build: Build, model: Decoder, x: str, i: int, *, has_experts: bool) -> str:
    build.part, build.layer, at = "layer", i, f"layers.{i}"
    normed = _before(build, model, x, f"{at}.norm1")
    heads: tuple[str, ...] = HEADS
    with build.within("attention"):
        if model.mla is None:
            mixed = _attention(build, model, normed, at)
        else:
            mixed = _latent_attention(build, model, model.mla, normed, at)
            heads = ("heads", "value")
        out = build.linear(mixed, f"{at}.out", ("hidden",), heads, bias=model.out_bias)
    x = _add(build, model, x, out, at, 1)
    normed = _before(build, model, x, f"{at}.norm2", cheap=not has_experts)
    with build.within("experts" if has_experts else "feed_forward"):
        feed_forward = experts.experts if has_experts else _feed_forward
        y = feed_forward(build, model, normed, at)
    x = _add(build, model, x, y, at, 2)
    for name, _ in model.more_weights:  # of a model that is only listed: any place will do
        x = build.elementwise(f"{at}.{name}", "add", x, build.parameter(f"{at}.{name}", name))
    return x


def _before(build: Build, model: Decoder, x: str, name: str, *, cheap: bool = True) -> str:
    """Return the input of the first product. Without a norm it is a view of x, so that the
    gradients of its readers are summed before the stream's gradient is added."""
    if model.norms != "after":
        return build.rms_norm(x, name, cheap=cheap)
    return build.node(f"{name}.in", "view", (x,), build.tensor(f"{name}.x", STREAM))


def _add(build: Build, model: Decoder, x: str, y: str, at: str, place: int) -> str:
    """Return x + y; y is normed and scaled first if the model does so."""
    if model.norms != "before":
        y = build.rms_norm(y, f"{at}.post{place}", cheap=False)
    if model.residual_scale != 1:
        y = build.elementwise(f"{at}.scale{place}", "copy", y)
    return build.elementwise(f"{at}.add{place}", "add", x, y)


def _attention(build: Build, model: Decoder, x: str, at: str) -> str:
    q, k, v = (
        build.linear(x, f"{at}.{name}", dims, ("hidden",), bias=model.qkv_bias)
        for name, dims in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS))
    )
    if model.qk_norm:
        by_head = model.qk_norm_over == "head"
        q, k = (
            build.rms_norm(y, f"{at}.{name}_norm", cheap=False, over=1 if by_head else len(dims))
            for name, y, dims in (("q", q, HEADS), ("k", k, KV_HEADS))
        )
    q, k = (_rope(build, product, f"{at}.{name}.rope") for name, product in (("q", q), ("k", k)))
    if model.softmax_scale is not None:
        q = build.elementwise(f"{at}.q.scale", "copy", q)
    return build.attention(f"{at}.attention", (q, k, v), HEADS[:2])


def _latent_attention(build: Build, model: Decoder, mla: Mla, x: str, at: str) -> str:
    into, bias = ("hidden",), model.qkv_bias
    if mla.q_lora_rank is None:
        q = build.linear(x, f"{at}.q", ("heads", "qk"), into)
    else:
        row = build.linear(x, f"{at}.q_down", ("q_latent",), into, bias=bias, cheap=True)
        row = build.rms_norm(row, f"{at}.q_norm")
        q = build.linear(row, f"{at}.q_up", ("heads", "qk"), ("q_latent",))
    row = build.linear(x, f"{at}.kv_down", ("kv_down",), into, bias=bias, cheap=True)
    latent, shared = build.split(row, latent="kv_latent", shared="rope")
    latent = build.rms_norm(latent, f"{at}.kv_norm")
    kv = build.linear(latent, f"{at}.kv_up", ("heads", "kv"), ("kv_latent",))
    plain, turned = build.split(q, plain="nope", turned="rope")
    k, v = build.split(kv, k="nope", v="value")
    shared = _rope(build, shared, f"{at}.k.rope")
    q = build.concat(f"{at}.q.concat", plain, _rope(build, turned, f"{at}.q.rope"), dim="qk")
    if model.rope_scaling and model.rope_scaling.softmax_scale != 1:
        q = build.elementwise(f"{at}.q.scale", "copy", q)
    k = build.concat(f"{at}.k.concat", k, shared, dim="qk")
    return build.attention(f"{at}.attention", (q, k, v), ("heads",), "value")


def _rope(build: Build, x: str, name: str) -> str:
    """Rotate the halves of each head, in fp32: x cos + flip(x) sin."""
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
    wide, bias = ("ffn",), model.mlp_bias
    if model.gated:
        gate = build.linear(x, f"{at}.gate", wide, ("hidden",), bias=bias)
    up = build.linear(x, f"{at}.up", wide, ("hidden",), bias=bias)
    if model.gated:
        kind = model.activation
        acted = build.elementwise(f"{at}.{kind}", kind, gate, cheap=True)
        inner = build.elementwise(f"{at}.gated", "mul", acted, up, cheap=True)
    else:
        inner = build.elementwise(f"{at}.gelu", "gelu", up, cheap=True)
    return build.linear(inner, f"{at}.down", ("hidden",), wide, bias=bias)
