"""A mixture of experts on a GPU whose router leaves most of them without a token."""

import copy

import pytest

torch = pytest.importorskip("torch")

from meshwise.nn.experts import MoE, Routed  # noqa: E402
from meshwise.spec import Experts  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is visible"),
]


def run(moe, x, dy, experts):
    weights = torch.full(experts.shape, 0.5, dtype=x.dtype, device=x.device)
    x.requires_grad_()
    moe.routed(x, Routed(experts.to(x.device), weights, weights.mean(0))).backward(dy)
    first, down = (
        moe.experts.get_parameter(name).grad.double().cpu() for name in ("first", "down")
    )
    return x.grad.double().cpu(), first, down


def test_experts_without_tokens_have_no_gradient():
    torch.manual_seed(0)
    exact = MoE(64, Experts(num_experts=8, top_k=2, ffn=128), gated=True, bias=False).double()
    for parameter in exact.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    x, dy = torch.randn(2, 50, 64, dtype=torch.float64)
    experts = torch.tensor([2, 5]).repeat(50, 1)
    due = run(exact, x.clone(), dy, experts)
    dirt = [torch.full((2**20,), torch.nan, device="cuda") for _ in range(20)]
    del dirt  # the allocator hands it out again
    rounded = copy.deepcopy(exact).to("cuda", torch.bfloat16)
    found = run(rounded, x.to("cuda", torch.bfloat16), dy.to("cuda", torch.bfloat16), experts)
    for got, wanted in zip(found, due, strict=True):
        assert (got - wanted).norm() <= 0.02 * wanted.norm()
    for gradient in found[1:]:
        assert not gradient[[0, 1, 3, 4, 6, 7]].any()
