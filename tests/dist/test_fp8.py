"""Products in fp8: what is cast, with which scale, and that a model still learns."""

import msgspec
import pytest
import torch
from torch import nn

from meshwise.nn import build
from meshwise.nn.stage import cross_entropy
from meshwise.parallel import fp8
from meshwise.spec import Decoder, Layout, Recipe, Workload

MODEL = Decoder(
    hidden=64, layers=2, heads=4, kv_heads=2, head_dim=16, ffn=96, vocab=64, max_seq_len=32
)


def rounded(x, kind):
    """x as fp8 with one scale for all has it, in float64."""
    limit = torch.finfo(kind).max
    scale = x.abs().max().double() / limit
    return (x.double() / scale).float().to(kind).double() * scale


@pytest.fixture
def operands():
    torch.manual_seed(3)
    x = (torch.randn(32, 64) * 3).bfloat16().requires_grad_()
    weight = nn.Linear(64, 48, bias=True).bfloat16()
    return x, weight


def test_the_three_products_are_of_rounded_operands(operands):
    x, linear = operands
    fp8.use_fp8(linear)
    y = linear(x)
    dy = torch.randn_like(y)
    y.backward(dy)
    e4m3, e5m2 = torch.float8_e4m3fn, torch.float8_e5m2
    rx, rw, rdy = (
        rounded(x.detach(), e4m3),
        rounded(linear.weight.detach(), e4m3),
        rounded(dy, e5m2),
    )
    wanted = {
        "y": (y, rx @ rw.T + linear.bias.double()),
        "dx": (x.grad, rdy @ rw),
        "dw": (linear.weight.grad, rdy.T @ rx),
    }
    for name, (found, exact) in wanted.items():
        error = (found.double() - exact).norm() / exact.norm()
        assert error < 5e-3, name  # of bf16 results
        plain = {"y": x @ linear.weight.T + linear.bias, "dx": dy @ linear.weight, "dw": dy.T @ x}
        assert not torch.equal(found, plain[name]), name  # nothing was cast


def test_a_model_learns_as_in_bf16():
    losses = {}
    tokens = torch.randint(64, (4, 17), generator=torch.Generator().manual_seed(1))
    for kind in ("bf16", "fp8"):
        model = build(MODEL)
        model.init_weights(0)
        model.bfloat16()
        if kind == "fp8":
            for layer in model.layers.values():
                fp8.use_fp8(layer)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        losses[kind] = []
        for _ in range(12):
            loss = cross_entropy(model(tokens[:, :-1]), tokens[:, 1:])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses[kind].append(loss.item())
    assert losses["fp8"][-1] < 0.8 * losses["fp8"][0]
    assert losses["fp8"][-1] == pytest.approx(losses["bf16"][-1], rel=0.05)


def test_a_number_of_tokens_that_the_kernels_refuse_is_named(operands):
    x, linear = operands
    fp8.use_fp8(linear)
    with pytest.raises(ValueError, match="20 tokens on a rank: fp8 needs a multiple of 16"):
        linear(x[:20])


def test_fp8_under_tensor_parallelism_is_refused(plan_of):
    workload = Workload(global_batch_size=1, seq_len=16)
    plan = plan_of(MODEL, workload, Layout(), dtype="bf16")
    assert msgspec.structs.replace(plan, recipe=Recipe(fp8=True)).recipe.fp8
    plan = plan_of(MODEL, workload, Layout(tp=2), dtype="bf16")
    with pytest.raises(ValueError, match=r"Plan.recipe.*use dtype bf16 and tp 1"):
        msgspec.structs.replace(plan, recipe=Recipe(fp8=True)).check()
