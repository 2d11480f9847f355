"""A GPT whose attention several ranks share trains as the same GPT on one device does.

The oracle holds all tokens in float64 and attends by the definition: a softmax over the multiset
of keys, written out as a matrix.
"""

import functools

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

from meshwise.attention import RingDilatedAttention, ring_attention
from meshwise.attention.shards import contiguous, loss_weight, next_tokens, positions, zigzag
from meshwise.nn import gpt
from meshwise.nn.stage import causal, cross_entropy
from meshwise.parallel import apply, mesh, recompute
from meshwise.spec import Layout, Model

pytestmark = pytest.mark.dist

N, BATCH, STEPS = 50, 2, 3  # no number of ranks divides the tokens
MODEL = Model(hidden=32, layers=2, heads=4, ffn=64, vocab=37, max_seq_len=N + 3)
SEGMENTS, RATES = (6, 20, N), (1, 2, 4)
EXACT = (1e-6, 1e-5)  # relative, of losses and gradients
# bf16 keeps 8 bits: single numbers are off by 2^-9, losses by less, since errors average out
BF16 = (1e-3, 5e-2)


# --- one device ---


def multiset(kind):
    """How often the query of a row sees the key of a column, by head [heads, N, N]."""
    p = torch.arange(N)
    seen = torch.zeros(MODEL.heads, N, N)
    branches = zip(SEGMENTS, RATES, strict=True) if kind == "dilated" else [(N, 1)]
    for width, rate in branches:
        for head in range(MODEL.heads):
            kept = p % width % rate == head % rate
            seen[head] += kept[:, None] & kept & (p[:, None] // width == p // width)
    return seen * (p[:, None] >= p)


def by_definition(kind):
    bias = multiset(kind).double().log()

    def attend(q, k, v):
        scores = torch.einsum("bphd,bxhd->bhpx", q, k) * q.shape[-1] ** -0.5 + bias
        return torch.einsum("bhpx,bxhd->bphd", scores.softmax(-1), v)

    return attend


def started(attend):
    """Weights are three times the usual, so that attention has a say in the loss."""
    model = gpt.GPT(MODEL, attend=attend)
    model.init_weights(0)
    with torch.no_grad():
        for weight in model.parameters():
            weight *= 3 if weight.dim() == 2 else 1
    return model


def text():
    return torch.randint(MODEL.vocab, (BATCH, N), generator=torch.Generator().manual_seed(1))


def one_device(kind):
    """Losses, and the gradients of the last step."""
    model, losses = started(by_definition(kind)).double(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(STEPS):
        optimizer.zero_grad()
        logits = model(text())[:, :-1]
        loss = F.cross_entropy(logits.flatten(0, 1), text()[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] - losses[-1] > 0.3, "it learns"
    return losses, {name: weight.grad for name, weight in model.named_parameters()}


# --- what ranks do: plain functions, called on every rank ---


def attention(kind, shards, way="auto"):
    if kind == "dilated":
        return RingDilatedAttention(SEGMENTS, RATES, causal=True, shards=shards, way=way)
    return functools.partial(ring_attention, causal=True, shards=shards, way=way)


def sharding(ranks, order):
    return {"contiguous": contiguous, "zigzag": zigzag}[order](N, ranks.world_size)


def errors_of(ranks, model, kind, shards, dtype="float32"):
    """The largest relative errors of a loss and of a gradient over three steps.

    Gradients of FSDP are means over ranks, those of a bare model are summed here.
    """
    averages = any("FSDP" in type(module).__name__ for module in model.modules())
    mine, following = (torch.from_numpy(of(shards, ranks.rank)) for of in (positions, next_tokens))
    labels = text()[:, following].masked_fill(following < 0, -100)
    model.at(mine)
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.5), []
    for _ in range(STEPS):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16"):
            logits = model(text()[:, mine])
        share = cross_entropy(logits, labels) * loss_weight(shards, ranks.rank)
        (share * ranks.world_size if averages else share).backward()
        if not averages:
            for weight in model.parameters():
                dist.all_reduce(weight.grad)
        optimizer.step()
        losses.append(sum(ranks.gather(share.item())))
    expected, gradients = one_device(kind)
    found = {name: whole(weight.grad) for name, weight in model.named_parameters()}
    assert found.keys() == gradients.keys()
    return [
        max(abs(a / b - 1) for a, b in zip(losses, expected, strict=True)),
        max(float((found[name] - g).norm() / g.norm()) for name, g in gradients.items()),
    ]


def whole(gradient):
    return gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient


def errors(ranks, kind, order, way="auto"):
    shards = sharding(ranks, order)
    return errors_of(ranks, started(attention(kind, shards, way)), kind, shards)


def errors_wrapped(ranks, kind, fsdp=False, recomputed="none", compiles=False, dtype="float32"):
    """The errors; and how many graphs were compiled."""
    import torch._dynamo.testing

    shards = sharding(ranks, "zigzag" if kind == "dense" else "contiguous")
    model = started(attention(kind, shards))
    backend = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    for layer in model.layers.values():
        recompute.recompute_layer(layer, recomputed, "eager")
        if compiles and recomputed == "full":  # dynamo gives up a checkpoint with a graph break
            layer.compute = torch.compile(layer.compute, backend=backend, dynamic=False)
        elif compiles:
            layer.compile(backend=backend, dynamic=False)
        if fsdp:
            fully_shard(layer)
    if fsdp:
        fully_shard(model)
    ranks.arrive("training")  # imports for compiling take as long as collectives wait
    found = errors_of(ranks, model, kind, shards, dtype)
    torch.compiler.reset()
    return found, backend.frame_count


def errors_laid_out(ranks, kind, zero, dtype):
    """As the engine builds its models: on the meta device, then laid out."""
    shards = sharding(ranks, "contiguous")
    with torch.device("meta"):
        model = gpt.GPT(MODEL, attend=attention(kind, shards))
    layout = Layout(dp=ranks.world_size, zero=zero, recompute="full", recompute_layers=1)
    place = mesh.build(layout, "cpu")
    apply.parallelize(model, place, dtype=dtype, lowering="eager")
    with torch.no_grad():
        for weight in model.parameters():
            weight *= 3 if weight.dim() == 2 else 1
    return errors_of(ranks, model, kind, shards)


def logits_of_stages(ranks, kind):
    """Of this rank's tokens, layer by layer as stages of a pipeline; the largest error."""
    shards = sharding(ranks, "contiguous")
    mine = torch.from_numpy(positions(shards, ranks.rank))
    x = text()[:, mine]
    for number in range(MODEL.layers):
        stage = gpt.GPT(MODEL, range(number, number + 1), attend=attention(kind, shards))
        stage.init_weights(0)
        stage.at(mine)
        x = stage(x)
    model = gpt.GPT(MODEL, attend=by_definition(kind))
    model.init_weights(0)
    return float((x - model.double()(text())[:, mine]).abs().max())


# --- the tests ---


DENSE = [("dense", order, way) for order in ("contiguous", "zigzag")
         for way in ("ring", "gather", "heads")]  # fmt: skip
DILATED = [("dilated", "contiguous", way) for way in ("ring", "gather", "heads")]
BOTH = [("dense", "zigzag", "ring_heads")]


def is_within(found, most):
    return all(error <= limit for error, limit in zip(found, most, strict=True))


@pytest.mark.parametrize(
    ("ranks", "kind", "order", "way"),
    [(n, *case) for n in (2, 4) for case in DENSE + DILATED + BOTH * (n == 4)],
)
def test_training_equals_one_device(gloo_ranks, ranks, kind, order, way):
    for found in gloo_ranks(ranks, errors, kind=kind, order=order, way=way):
        assert is_within(found, EXACT), found


@pytest.mark.parametrize("kind", ["dense", "dilated"])
@pytest.mark.parametrize(
    ("ranks", "given"),
    [
        (2, {"fsdp": True}),
        (4, {"fsdp": True}),
        (2, {"recomputed": "full"}),
        (2, {"recomputed": "selective"}),
        (4, {"fsdp": True, "recomputed": "full"}),
    ],
)
def test_training_sharded_and_recomputed_equals_one_device(gloo_ranks, kind, ranks, given):
    for found, _ in gloo_ranks(ranks, errors_wrapped, kind=kind, **given):
        assert is_within(found, EXACT), found


@pytest.mark.parametrize("kind", ["dense", "dilated"])
@pytest.mark.parametrize(
    "given",
    [{}, {"fsdp": True}, {"recomputed": "full"}, {"fsdp": True, "recomputed": "selective"}],
)
def test_compiled_layers_train_as_one_device_does(gloo_ranks, kind, given):
    for found, graphs in gloo_ranks(2, errors_wrapped, kind=kind, compiles=True, **given):
        assert is_within(found, EXACT), found
        assert graphs, "nothing was compiled"


@pytest.mark.parametrize("kind", ["dense", "dilated"])
@pytest.mark.parametrize("given", [{}, {"fsdp": True}, {"recomputed": "full", "compiles": True}])
def test_training_under_autocast_is_as_near_as_bf16_can_be(gloo_ranks, kind, given):
    for found, _ in gloo_ranks(2, errors_wrapped, kind=kind, dtype="bfloat16", **given):
        assert is_within(found, BF16), found
        assert found[1] > EXACT[1], "it was fp32"


@pytest.mark.parametrize("kind", ["dense", "dilated"])
@pytest.mark.parametrize(("zero", "dtype"), [(0, "fp32"), (2, "fp32"), (3, "fp32"), (3, "bf16")])
def test_laid_out_models_train_as_one_device_does(gloo_ranks, kind, zero, dtype):
    for found in gloo_ranks(2, errors_laid_out, kind=kind, zero=zero, dtype=dtype):
        assert is_within(found, EXACT if dtype == "fp32" else BF16), found


@pytest.mark.parametrize("kind", ["dense", "dilated"])
def test_stages_of_a_pipeline_have_attention_and_positions_too(gloo_ranks, kind):
    assert max(gloo_ranks(2, logits_of_stages, kind=kind)) <= 1e-5


def test_positions_that_the_model_lacks_are_refused():
    model = gpt.GPT(MODEL)
    model.at(torch.tensor([0, N + 2]))
    with pytest.raises(ValueError, match="position 53: the model has max_seq_len = 53"):
        model.at(torch.tensor([N + 3, 0]))


def test_positions_of_a_whole_sequence_change_nothing():
    model = started(causal)
    without = model(text())
    model.at(torch.arange(N))
    assert torch.equal(model(text()), without)
