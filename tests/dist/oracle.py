"""Training steps in plain float64 PyTorch, written from the papers: what the package is held to.

In: a model's sizes (the plain dict that its JSON is), weights by the names that the papers give
them, batches. Out: losses, weights and optimizer states after every step. Nothing of the package is
imported here, and nothing is computed its way where there is another one: attention is a softmax
that is written out, positions turn complex numbers, every expert sees every token and is weighted
by 0 where it was not chosen, optimizers are the formulas of their papers.

What a weight is cut from is the package's documented shape, since Adafactor's statistics depend on
it: q, k and v of GPT are rows [heads, 3, head_dim], an expert's gate stands before its up.

GPT: Radford et al. 2019. Llama: Touvron et al. 2023; RoPE: Su et al. 2021. Norms behind attention
and feed-forward: OLMo 2 (2025), section 2.1; before and behind, windows in some layers with
positions of their own: Gemma 2 (2024) and 3 (2025), section 2. Multipliers: Granite 3.0 (2024),
after Yang et al. 2022. Latent attention and
routing in groups: DeepSeek-V2, section 2, and V3, section 2.1. Mixtral: Jiang et al. 2024. Places
of experts: Lepikhin et al. 2021 (GShard). The load
balancing loss: Fedus et al. 2022, equations 4 to 6. Wide-ResNet: He et al. 2016, Zagoruyko and
Komodakis 2016. AdamW: Loshchilov and Hutter 2019. SGD: Sutskever et al. 2013. Adafactor: Shazeer
and Stern 2018, algorithms 4 and 5.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F

KINDS = ("adamw", "adafactor", "sgd")


class Trained(NamedTuple):
    """``states`` of a weight by their names, ``statistics`` of norms over batches."""

    losses: list[float]
    weights: dict[str, torch.Tensor]
    states: dict[str, dict[str, torch.Tensor]]
    statistics: dict[str, torch.Tensor]


class Recipe(NamedTuple):
    """``eps1`` of Adafactor: the machine epsilon of what it runs in, as torch documents it.
    ``aux``: weight of the load balancing loss. ``max_norm``: 0 does not clip."""

    optimizer: str
    rate: float
    decay: float
    max_norm: float
    aux: float
    eps1: float = 2.0**-52


# ---- weights ----


def shapes(sizes):
    """Every weight's shape by its name."""
    return dict({"gpt": _gpt, "decoder": _decoder, "wide_resnet": _resnet}[sizes["family"]](sizes))


def _gpt(s):
    h, f = s["hidden"], s["ffn"]
    yield from {"wte.w": (s["vocab"], h), "wpe.w": (s["max_seq_len"], h)}.items()
    for i in range(s["layers"]):
        for norm in ("ln1", "ln2"):
            yield from {f"h{i}.{norm}.w": (h,), f"h{i}.{norm}.b": (h,)}.items()
        yield from {f"h{i}.attn.w": (3 * h, h), f"h{i}.attn.b": (3 * h,)}.items()
        yield from {f"h{i}.proj.w": (h, h), f"h{i}.proj.b": (h,)}.items()
        if has_experts(s, i):
            yield from _experts(f"h{i}", h, s["experts"], gated=False, bias=True)
        else:
            yield from {f"h{i}.fc.w": (f, h), f"h{i}.fc.b": (f,)}.items()
            yield from {f"h{i}.out.w": (h, f), f"h{i}.out.b": (h,)}.items()
    yield from {"lnf.w": (h,), "lnf.b": (h,)}.items()


def _decoder(s):
    h, f, d = s["hidden"], s["ffn"], s["head_dim"]
    yield "tok.w", (s["vocab"], h)
    for i in range(s["layers"]):
        for part in ("attention", "ffn"):
            for place in PLACES[s["norms"]]:
                yield f"l{i}.{part}_{place}.w", (h,)
        width = d if s["mla"] is None else s["mla"]["v_head_dim"]
        yield from _linear(f"l{i}.wo", h, s["heads"] * width, s["out_bias"])
        if s["mla"] is None:
            for name, heads in (("wq", s["heads"]), ("wk", s["kv_heads"]), ("wv", s["kv_heads"])):
                yield from _linear(f"l{i}.{name}", heads * d, h, s["qkv_bias"])
            for name, heads in (("q", "heads"), ("k", "kv_heads")) if s["qk_norm"] else ():
                yield f"l{i}.{name}_norm.w", (d * (s[heads] if over_all(s) else 1),)
        else:
            yield from _latent(f"l{i}", s, s["mla"])
        if has_experts(s, i):
            yield from _experts(f"l{i}", h, s["experts"], gated=s["gated"], bias=s["mlp_bias"])
        else:
            for name in ("w1", "w3") if s["gated"] else ("w3",):
                yield from _linear(f"l{i}.{name}", f, h, s["mlp_bias"])
            yield from _linear(f"l{i}.w2", h, f, s["mlp_bias"])
    yield "norm.w", (h,)
    if not s["tied"]:
        yield "output.w", (s["vocab"], h)


PLACES = {"before": ("norm",), "after": ("post",), "both": ("norm", "post")}


def over_all(s):
    """Whether q and k are normed over all their heads."""
    return s["qk_norm_over"] == "projection"


def _linear(name, outputs, inputs, bias):
    yield f"{name}.w", (outputs, inputs)
    if bias:
        yield f"{name}.b", (outputs,)


def _latent(at, s, mla):
    h, query = s["hidden"], s["heads"] * (mla["nope_head_dim"] + mla["rope_head_dim"])
    if mla["q_lora_rank"] is None:
        yield f"{at}.wq.w", (query, h)
    else:
        yield from _linear(f"{at}.w_dq", mla["q_lora_rank"], h, s["qkv_bias"])
        yield f"{at}.q_norm.w", (mla["q_lora_rank"],)
        yield f"{at}.w_uq.w", (query, mla["q_lora_rank"])
    latent = mla["kv_lora_rank"]
    yield from _linear(f"{at}.w_dkv", latent + mla["rope_head_dim"], h, s["qkv_bias"])
    yield f"{at}.kv_norm.w", (latent,)
    yield f"{at}.w_ukv.w", (s["heads"] * (mla["nope_head_dim"] + mla["v_head_dim"]), latent)


def _experts(at, hidden, e, *, gated, bias):
    n, ffn, halves = e["num_experts"], e["ffn"], 2 if gated else 1
    yield f"{at}.router.w", (n, hidden)
    yield from {f"{at}.e1.w": (n, halves, ffn, hidden), f"{at}.e2.w": (n, hidden, ffn)}.items()
    if bias:
        yield from {f"{at}.e1.b": (n, halves, ffn), f"{at}.e2.b": (n, hidden)}.items()
    if e["shared_ffn"]:
        for name in ("s1", "s3") if gated else ("s3",):
            yield from _linear(f"{at}.{name}", e["shared_ffn"], hidden, bias)
        yield from _linear(f"{at}.s2", hidden, e["shared_ffn"], bias)
        if e["shared_gate"]:
            yield f"{at}.score.w", (1, hidden)


def _resnet(s):
    c = s["channels"]
    yield from {"stem.w": (c, 3, 7, 7), "stem.n.w": (c,), "stem.n.b": (c,)}.items()
    for i, (inputs, filters, _) in enumerate(blocks(s)):
        inner, outputs = filters * s["width_factor"], 4 * filters
        for number, (n, k, size) in enumerate(
            [(filters, inputs, 1), (inner, filters, 3), (outputs, inner, 1), (outputs, inputs, 1)]
        ):
            if number < 3 or inputs != outputs:
                yield f"b{i}.{number}.w", (n, k, size, size)
                yield from {f"b{i}.{number}.n.w": (n,), f"b{i}.{number}.n.b": (n,)}.items()
    yield from _linear("fc", s["num_classes"], 4 * filters, True)


def blocks(s):
    """[inputs, filters, stride] of every bottleneck."""
    found, inputs = [], s["channels"]
    for resolution, count in enumerate(s["blocks"]):
        filters = s["channels"] * 2**resolution
        for number in range(count):
            found.append((inputs, filters, 2 if resolution and not number else 1))
            inputs = 4 * filters
    return found


def has_experts(s, layer):
    e = s["experts"]
    return e is not None and layer >= e["first_dense"] and layer % e["every"] == 0


def start(sizes, seed):
    """Weights that let every part of the model matter; half the layers' biases begin at 0, as they
    do in practice, which is a case of its own to Adafactor."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, shape in shapes(sizes).items():
        numbers = torch.randn(shape, generator=generator, dtype=torch.float64)
        if name.endswith(".b"):
            # below 0 in norms before a ReLU: where a channel is positive in all images, the next
            # norm takes its bias away, and that has a gradient of rounding alone
            numbers = 0.2 * numbers - 0.5 * name.endswith(".n.b")
            numbers *= name[1] not in "02468"
        elif len(shape) == 1:  # a norm's
            numbers = 1 + 0.2 * numbers
        elif name in ("wte.w", "wpe.w", "tok.w"):
            numbers *= 0.5
        else:  # what reads one output's inputs
            inputs = math.prod(shape[-3:] if len(shape) == 4 and shape[-1] < 8 else shape[-1:])
            numbers *= inputs**-0.5
        found[name] = numbers
    return found


def router_biases(sizes, seed):
    """A number an expert that counts in the choice only, by the layers that have experts."""
    if sizes["family"] == "wide_resnet" or not (sizes["experts"] or {}).get("router_bias"):
        return {}
    generator, n = torch.Generator().manual_seed(seed), sizes["experts"]["num_experts"]
    return {
        f"l{i}.router.b": 0.1 * torch.randn(n, generator=generator, dtype=torch.float64)
        for i in range(sizes["layers"])
        if has_experts(sizes, i)
    }


# ---- models ----


def forward(sizes, w, inputs, statistics):
    """Logits, and the sum of the layers' load balancing losses. ``statistics``: router biases, and
    running means and variances of norms over batches, which are moved."""
    model = {"gpt": gpt, "decoder": decoder, "wide_resnet": resnet}[sizes["family"]]
    return model(sizes, w, inputs, statistics)


def linear(w, name, x):
    y = x @ w[f"{name}.w"].T
    return y + w[f"{name}.b"] if f"{name}.b" in w else y


def gpt(s, w, tokens, _):
    x, balance, heads = w["wte.w"][tokens] + w["wpe.w"][: tokens.shape[1]], 0.0, s["heads"]
    for i in range(s["layers"]):
        qkv = linear(w, f"h{i}.attn", layer_norm(w, f"h{i}.ln1", x))
        q, k, v = qkv.reshape(*x.shape[:2], heads, 3, -1).unbind(3)
        x = x + linear(w, f"h{i}.proj", attention(q, k, v))
        y = layer_norm(w, f"h{i}.ln2", x)
        if has_experts(s, i):
            y, more = experts(w, f"h{i}", y, s["experts"], None, gated=False)
            balance = balance + more
        else:
            y = linear(w, f"h{i}.out", gelu(linear(w, f"h{i}.fc", y)))
        x = x + y
    return layer_norm(w, "lnf", x) @ w["wte.w"].T, balance


def layer_norm(w, name, x):
    centred = x - x.mean(-1, keepdim=True)
    variance = (centred**2).mean(-1, keepdim=True)
    return centred / (variance + 1e-5) ** 0.5 * w[f"{name}.w"] + w[f"{name}.b"]


def gelu(x):
    """The tanh form of Hendrycks and Gimpel 2016."""
    return x / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def silu(x):
    return x / (1 + torch.exp(-x))


def attention(q, k, v, scale=None, window=None):
    """q [b,s,heads,d], k, v [b,s,kv_heads,...]: head i reads key head i * kv_heads // heads. A
    token sees the last ``window`` positions, its own included."""
    heads, length = q.shape[2], q.shape[1]
    reads = torch.arange(heads) * k.shape[2] // heads
    scores = torch.einsum("bihd,bjhd->bhij", q, k[:, :, reads])
    scores = scores / math.sqrt(q.shape[-1]) if scale is None else scores * scale
    later = torch.arange(length)[:, None] < torch.arange(length)
    if window is not None:
        later = later | (torch.arange(length)[:, None] - torch.arange(length) >= window)
    shares = torch.exp(scores - scores.detach().amax(-1, keepdim=True)).masked_fill(later, 0.0)
    shares = shares / shares.sum(-1, keepdim=True)
    return torch.einsum("bhij,bjhd->bihd", shares, v[:, :, reads]).flatten(2)


def decoder(s, w, tokens, statistics):
    assert s["rope_scaling"] is None
    x, balance, eps = w["tok.w"][tokens] * s["embed_scale"], 0.0, s["norm_eps"]

    def normed(x, name):
        return rms_norm(x, w[f"{name}.w"], eps) if f"{name}.w" in w else x

    for i in range(s["layers"]):
        y = normed(x, f"l{i}.attention_norm")
        heads = heads_of if s["mla"] is None else latent_heads_of
        window = None if i in s["full_layers"] else s["window"]
        theta = s["rope_theta"] if window is None else s["local_rope_theta"] or s["rope_theta"]
        q, k, v = heads(s | {"rope_theta": theta}, w, f"l{i}", y)
        y = linear(w, f"l{i}.wo", attention(q, k, v, s["softmax_scale"], window))
        x = x + s["residual_scale"] * normed(y, f"l{i}.attention_post")
        y = normed(x, f"l{i}.ffn_norm")
        if has_experts(s, i):
            bias = statistics.get(f"l{i}.router.b")
            y, more = experts(w, f"l{i}", y, s["experts"], bias, gated=s["gated"])
            balance = balance + more
        else:
            up = linear(w, f"l{i}.w3", y)
            gate = {"silu": silu, "gelu": gelu}[s["activation"]]
            wide = gate(linear(w, f"l{i}.w1", y)) * up if s["gated"] else gelu(up)
            y = linear(w, f"l{i}.w2", wide)
        x = x + s["residual_scale"] * normed(y, f"l{i}.ffn_post")
    head = w["tok.w"] if s["tied"] else w["output.w"]
    return normed(x, "norm") @ head.T * s["logits_scale"], balance


def rms_norm(x, weight, eps):
    return x / ((x**2).mean(-1, keepdim=True) + eps) ** 0.5 * weight


def rotate(x, theta):
    """x [b,s,heads,d]: the pair (i, i + d/2) at position p is turned by p * theta^(-2i / d)."""
    real, imaginary = x.chunk(2, -1)
    pairs = torch.arange(real.shape[-1], dtype=torch.float64)
    angles = torch.arange(x.shape[1], dtype=torch.float64).outer(
        theta ** (-2 * pairs / x.shape[-1])
    )
    turned = torch.complex(real, imaginary) * torch.polar(torch.ones_like(angles), angles)[:, None]
    return torch.cat([turned.real, turned.imag], -1)


def heads_of(s, w, at, x):
    q, k, v = (linear(w, f"{at}.{name}", x) for name in ("wq", "wk", "wv"))
    if s["qk_norm"] and over_all(s):
        q = rms_norm(q, w[f"{at}.q_norm.w"], s["norm_eps"])
        k = rms_norm(k, w[f"{at}.k_norm.w"], s["norm_eps"])
    q, k, v = (x.unflatten(-1, (-1, s["head_dim"])) for x in (q, k, v))
    if s["qk_norm"] and not over_all(s):
        q = rms_norm(q, w[f"{at}.q_norm.w"], s["norm_eps"])
        k = rms_norm(k, w[f"{at}.k_norm.w"], s["norm_eps"])
    return rotate(q, s["rope_theta"]), rotate(k, s["rope_theta"]), v


def latent_heads_of(s, w, at, x):
    """DeepSeek-V2, equations 9 to 19: the turned part of k is one row that all heads share."""
    # DeepSeek's modeling_deepseek.py makes these two norms without the config's eps: 1e-6
    mla, heads, eps = s["mla"], s["heads"], 1e-6
    nope, rope = mla["nope_head_dim"], mla["rope_head_dim"]
    if mla["q_lora_rank"] is None:
        q = linear(w, f"{at}.wq", x)
    else:
        c_q = rms_norm(linear(w, f"{at}.w_dq", x), w[f"{at}.q_norm.w"], eps)
        q = linear(w, f"{at}.w_uq", c_q)
    q = q.unflatten(-1, (heads, nope + rope))
    both = linear(w, f"{at}.w_dkv", x)
    c_kv = rms_norm(both[..., : mla["kv_lora_rank"]], w[f"{at}.kv_norm.w"], eps)
    k_rope = rotate(both[..., None, mla["kv_lora_rank"] :], s["rope_theta"])
    kv = linear(w, f"{at}.w_ukv", c_kv).unflatten(-1, (heads, -1))
    q = torch.cat([q[..., :nope], rotate(q[..., nope:], s["rope_theta"])], -1)
    k = torch.cat([kv[..., :nope], k_rope.repeat(1, 1, heads, 1)], -1)
    return q, k, kv[..., nope:]


def experts(w, at, x, e, bias, *, gated):
    """x [b,s,hidden] -> the chosen experts' results, weighted, and the layer's balancing loss."""
    shape, x = x.shape, x.flatten(0, 1)
    n, logits = e["num_experts"], linear(w, f"{at}.router", x)
    if e["router_bias"]:
        scores = 1 / (1 + torch.exp(-logits))
    else:
        scores = torch.exp(logits) / torch.exp(logits).sum(-1, keepdim=True)
    chosen = choice(scores.detach() if bias is None else scores.detach() + bias, e)
    taken = chosen if e["group_size"] is None else admitted(scores, chosen, e)
    weights = torch.where(taken, scores, 0.0)
    if e["normalized"]:
        total = weights.sum(-1, keepdim=True)
        weights = weights / torch.where(total > 0, total, 1.0)
    y = torch.zeros_like(x)
    for expert in range(n):
        first = x @ w[f"{at}.e1.w"][expert].transpose(-1, -2)  # [1 or 2, tokens, ffn]
        if f"{at}.e1.b" in w:
            first = first + w[f"{at}.e1.b"][expert][:, None]
        wide = silu(first[0]) * first[1] if gated else gelu(first[0])
        result = wide @ w[f"{at}.e2.w"][expert].T
        if f"{at}.e2.b" in w:
            result = result + w[f"{at}.e2.b"][expert]
        y = y + weights[:, expert, None] * e["routed_scale"] * result
    if e["shared_ffn"]:
        y = y + shared(w, at, x, gated)
    share_of_choices = chosen.double().mean(0) / e["top_k"]
    balance = n * (share_of_choices * (scores / scores.sum(-1, keepdim=True)).mean(0)).sum()
    return y.view(shape), balance


def choice(ranking, e):
    """Which experts each token goes to, [tokens, experts]: one token at a time."""
    chosen = torch.zeros_like(ranking, dtype=torch.bool)
    size = e["num_experts"] // e["groups"]
    for token, row in enumerate(ranking.tolist()):
        groups = [row[start : start + size] for start in range(0, len(row), size)]
        counted = 2 if e["router_bias"] else 1
        merit = [sum(sorted(group)[-counted:]) for group in groups]
        best = sorted(range(len(groups)), key=lambda g: -merit[g])[: e["top_groups"]]
        seen = [expert for expert in range(len(row)) if expert // size in best]
        chosen[token, sorted(seen, key=lambda expert: -row[expert])[: e["top_k"]]] = True
    return chosen


def admitted(scores, chosen, e):
    """Which of the choices find a place (GShard, algorithm 1): of a group of tokens all first
    choices in their order, then all second ones; an expert that has its capacity takes no more."""
    taken, size = torch.zeros_like(chosen), e["group_size"]
    capacity = max(math.floor(e["capacity_factor"] * e["top_k"] * size / e["num_experts"]), 1)
    for start in range(0, len(chosen), size):
        places = [capacity] * e["num_experts"]
        wishes = {}
        for token in range(start, start + size):
            liked = chosen[token].nonzero().flatten().tolist()
            wishes[token] = sorted(liked, key=lambda expert: -scores[token, expert].item())
        for turn in range(e["top_k"]):
            for token, experts in wishes.items():
                if places[experts[turn]]:
                    places[experts[turn]] -= 1
                    taken[token, experts[turn]] = True
    return taken


def shared(w, at, x, gated):
    up = linear(w, f"{at}.s3", x)
    y = linear(w, f"{at}.s2", silu(linear(w, f"{at}.s1", x)) * up if gated else gelu(up))
    if f"{at}.score.w" in w:
        y = y / (1 + torch.exp(-linear(w, f"{at}.score", x)))
    return y


def resnet(s, w, x, statistics):
    x = torch.relu(normed(w, "stem", F.conv2d(x, w["stem.w"], stride=2, padding=3), statistics))
    x = F.max_pool2d(x, 3, 2, 1)
    for i, (_, _, stride) in enumerate(blocks(s)):
        y = torch.relu(normed(w, f"b{i}.0", F.conv2d(x, w[f"b{i}.0.w"]), statistics))
        y = F.conv2d(y, w[f"b{i}.1.w"], stride=stride, padding=1)
        y = torch.relu(normed(w, f"b{i}.1", y, statistics))
        y = normed(w, f"b{i}.2", F.conv2d(y, w[f"b{i}.2.w"]), statistics)
        if f"b{i}.3.w" in w:
            x = normed(w, f"b{i}.3", F.conv2d(x, w[f"b{i}.3.w"], stride=stride), statistics)
        x = torch.relu(x + y)
    return linear(w, "fc", x.mean((2, 3))), 0.0


def normed(w, name, x, statistics):
    """Ioffe and Szegedy 2015; running statistics are of the batch as it is and keep 0.9."""
    mean = x.mean((0, 2, 3))
    variance = ((x - mean[:, None, None]) ** 2).mean((0, 2, 3))
    for kind, seen, begun in (("mean", mean, 0.0), ("var", variance, 1.0)):
        before = statistics.get(f"{name}.n.{kind}", torch.full_like(seen, begun))
        statistics[f"{name}.n.{kind}"] = 0.9 * before + 0.1 * seen.detach()
    standard = (x - mean[:, None, None]) / (variance[:, None, None] + 1e-5) ** 0.5
    return standard * w[f"{name}.n.w"][:, None, None] + w[f"{name}.n.b"][:, None, None]


# ---- training ----


def train(sizes, weights, biases, batches, recipe, microbatches):
    """One step on every batch (inputs, targets), each in so many microbatches."""
    leaves = {name: value.clone().requires_grad_() for name, value in weights.items()}
    states = {name: {} for name in leaves}
    losses, statistics = [], dict(biases)
    update = {"adamw": adamw, "adafactor": adafactor, "sgd": sgd}[recipe.optimizer]
    for number, (inputs, targets) in enumerate(batches, 1):
        total = 0.0
        for x, y in zip(inputs.chunk(microbatches), targets.chunk(microbatches), strict=True):
            logits, balance = forward(sizes, leaves, x, statistics)
            loss = cross_entropy(logits, y)
            ((loss + recipe.aux * balance) / microbatches).backward()
            total += loss.item() / microbatches
        with torch.no_grad():
            gradients = clipped({n: leaf.grad for n, leaf in leaves.items()}, recipe.max_norm)
            for name, leaf in leaves.items():
                update(leaf, gradients[name], states[name], number, recipe)
                leaf.grad = None
        losses.append(total)
    done = {name: leaf.detach() for name, leaf in leaves.items()}
    return Trained(losses, done, states, statistics)


def cross_entropy(logits, targets):
    logits = logits.flatten(0, -2)
    chosen = logits.gather(-1, targets.flatten()[:, None])[:, 0]
    return (torch.logsumexp(logits, -1) - chosen).mean()


def clipped(gradients, most):
    if not most:
        return gradients
    norm = math.sqrt(sum(float((g**2).sum()) for g in gradients.values()))
    return {name: g * min(1.0, most / (norm + 1e-6)) for name, g in gradients.items()}


def adamw(w, g, state, t, r):
    beta1, beta2 = 0.9, 0.95
    state["m"] = beta1 * state.get("m", 0.0) + (1 - beta1) * g
    state["v"] = beta2 * state.get("v", 0.0) + (1 - beta2) * g**2
    m, v = state["m"] / (1 - beta1**t), state["v"] / (1 - beta2**t)
    w.copy_(w - r.rate * r.decay * w - r.rate * m / (v**0.5 + 1e-8))


def sgd(w, g, state, t, r):
    """Nesterov's momentum 0.9; the decay is part of the gradient."""
    g = g + r.decay * w
    state["momentum"] = 0.9 * state["momentum"] + g if t > 1 else g
    w.copy_(w - r.rate * (g + 0.9 * state["momentum"]))


def adafactor(w, g, state, t, r):
    """With torch's eps1: a floor of the mean of R, and of sqrt(V)."""
    eps2, beta = 1e-3, 1 - t**-0.8
    if w.ndim < 2:
        state["variance"] = v = beta * state.get("variance", 0.0) + (1 - beta) * g**2
    else:
        state["row"] = beta * state.get("row", 0.0) + (1 - beta) * (g**2).mean(-1, keepdim=True)
        state["col"] = beta * state.get("col", 0.0) + (1 - beta) * (g**2).mean(-2, keepdim=True)
        v = state["row"] * state["col"] / state["row"].mean(-2, keepdim=True).clamp(min=r.eps1)
    u = g / (v**0.5).clamp(min=r.eps1)
    alpha = max(eps2, rms(w)) * min(r.rate, t**-0.5)
    w.copy_(w - r.rate * r.decay * w - alpha * u / max(1.0, rms(u)))


def rms(x):
    return float((x**2).mean()) ** 0.5
