"""The plain GPT: parameter count, initial weights, mathematics against an independent forward."""

import math

import msgspec
import pytest
import torch

from meshwise.nn import build, gpt
from meshwise.nn.stage import cross_entropy
from meshwise.spec import Decoder, Model, WideResNet

MODEL = Model(hidden=32, layers=2, heads=4, ffn=128, vocab=61, max_seq_len=24)


def built(model=MODEL, seed=0):
    module = gpt.GPT(model)
    module.init_weights(seed)
    return module


@pytest.mark.parametrize(
    ("hidden", "layers", "vocab"), [(32, 2, 61), (64, 3, 100), (768, 12, 50257)]
)
def test_parameter_count(hidden, layers, vocab):
    model = Model(hidden=hidden, layers=layers, heads=4, ffn=4 * hidden, vocab=vocab)
    with torch.device("meta"):
        module = gpt.GPT(model)
    counted = sum(parameter.numel() for parameter in module.parameters())
    formula = layers * (12 * hidden**2 + 13 * hidden) + vocab * hidden + 1024 * hidden + 2 * hidden
    assert counted == formula


def test_initial_weights():
    first, again, other = built(), built(), built(seed=1)
    weights = dict(first.named_parameters())
    for (name, a), (_, b), (_, c) in zip(
        first.named_parameters(), again.named_parameters(), other.named_parameters(), strict=True
    ):
        assert torch.equal(a, b), name
        if name.endswith(".bias"):
            assert (a == 0).all()
        elif "norm" in name:
            assert (a == 1).all()
        else:
            assert not torch.equal(a, c), name
            assert a.std().item() == pytest.approx(0.02, rel=0.1)
            assert abs(a.mean().item()) < 0.003
    qkvs = [weights[f"layers.{i}.attention.qkv.weight"] for i in range(2)]
    assert not torch.equal(*qkvs)  # every parameter has numbers of its own
    assert first.head.projection.weight is first.embed.weight


GPT = Model(hidden=8, layers=3, heads=2, ffn=8, vocab=16)
LLAMA = Decoder(
    hidden=8, layers=3, heads=2, kv_heads=2, head_dim=4, ffn=8, vocab=16, max_seq_len=8, tied=True
)
UNTIED = msgspec.structs.replace(LLAMA, tied=False)
IMAGES = WideResNet(blocks=(3,), channels=4, image_size=32, num_classes=8)


@pytest.mark.parametrize(
    ("model", "is_tied"), [(GPT, True), (LLAMA, True), (UNTIED, False), (IMAGES, False)]
)
def test_the_ends_of_a_pipeline_have_the_tied_weight(model, is_tied):
    whole, first, middle, last = (
        build(model, layers) for layers in (None, range(1), range(1, 2), range(2, 3))
    )
    assert middle.tied is None
    head = "head.weight" if model is IMAGES else "head.projection.weight"
    if not is_tied:
        assert whole.tied is first.tied is last.tied is None
        assert last.origin(head) == head
        assert whole.get_parameter(head) is not next(whole.parameters())
        return
    assert whole.tied is whole.embed.weight is whole.head.projection.weight
    assert first.tied is first.embed.weight
    assert last.tied is last.head.projection.weight
    for stage in (first, last):
        stage.init_weights(0)
    assert torch.equal(first.tied, last.tied)
    assert last.origin("layers.2.norm1.weight") == "layers.2.norm1.weight"
    whole.head.projection.weight = torch.nn.Parameter(torch.zeros(16, 8))
    whole.tie()
    assert whole.head.projection.weight is whole.embed.weight


def test_forward_against_explicit_loops():
    """One head and one position at a time, in float64, from the formulas of the paper."""
    module = built().double()
    for parameter in module.parameters():  # biases and norms away from 0 and 1
        generator = torch.Generator().manual_seed(parameter.numel())
        parameter.data.add_(
            torch.randn(parameter.shape, generator=generator, dtype=torch.float64), alpha=0.1
        )
    weights = {name: value.detach() for name, value in module.state_dict().items()}
    tokens = torch.randint(MODEL.vocab, (2, 7), generator=torch.Generator().manual_seed(3))
    logits = module(tokens)
    for row in range(2):
        expected = _forward(weights, tokens[row])
        torch.testing.assert_close(logits[row], expected, rtol=1e-9, atol=1e-9)
    targets = torch.randint(MODEL.vocab, (2, 7), generator=torch.Generator().manual_seed(4))
    chosen = [
        math.log(logits[b, s].softmax(0)[targets[b, s]].item()) for b in range(2) for s in range(7)
    ]
    assert cross_entropy(logits, targets).item() == pytest.approx(-sum(chosen) / 14, rel=1e-5)


def _forward(weights, tokens):
    x = torch.stack(
        [weights["embed.weight"][t] + weights["positions.weight"][i] for i, t in enumerate(tokens)]
    )
    for layer in range(MODEL.layers):
        own = {
            name.removeprefix(f"layers.{layer}."): value
            for name, value in weights.items()
            if name.startswith(f"layers.{layer}.")
        }
        x = x + _attention(own, _norm(x, own["norm1.weight"], own["norm1.bias"]))
        h = _norm(x, own["norm2.weight"], own["norm2.bias"])
        h = h @ own["mlp.up.weight"].T + own["mlp.up.bias"]
        h = 0.5 * h * (1 + torch.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h**3)))
        x = x + h @ own["mlp.down.weight"].T + own["mlp.down.bias"]
    x = _norm(x, weights["head.norm.weight"], weights["head.norm.bias"])
    return x @ weights["embed.weight"].T


def _norm(x, weight, bias):
    centred = x - x.mean(-1, keepdim=True)
    return centred / torch.sqrt((centred**2).mean(-1, keepdim=True) + 1e-5) * weight + bias


def _attention(own, x):
    d = MODEL.head_dim
    heads = []
    for head in range(MODEL.heads):
        rows = [slice((head * 3 + part) * d, (head * 3 + part + 1) * d) for part in range(3)]
        q, k, v = (
            x @ own["attention.qkv.weight"][r].T + own["attention.qkv.bias"][r] for r in rows
        )
        out = []
        for i in range(len(x)):
            scores = torch.stack([q[i] @ k[j] / math.sqrt(d) for j in range(i + 1)])
            out.append(sum(p * v[j] for j, p in enumerate(scores.softmax(0))))
        heads.append(torch.stack(out))
    return torch.cat(heads, -1) @ own["attention.out.weight"].T + own["attention.out.bias"]
