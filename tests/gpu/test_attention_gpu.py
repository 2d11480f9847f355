"""Kernels of GPUs: every stock kernel's block, and rows by index, against float64 on the CPU."""

import pytest

torch = pytest.importorskip("torch")

import numpy as np  # noqa: E402

from meshwise.attention import kernels, rows  # noqa: E402
from meshwise.attention.dilated import dilated_attention  # noqa: E402
from meshwise.attention.merge import merge, nothing, result  # noqa: E402
from meshwise.spec import Dilation  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is visible"),
]
LIMITS = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
CASES = [
    ("cudnn", torch.bfloat16), ("cudnn", torch.float16), ("flash", torch.bfloat16),
    ("efficient", torch.float32), ("plain", torch.float64),
]  # fmt: skip


def error(found, expected):
    return float((found.double().cpu() - expected).norm() / expected.norm())


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("kernel", "dtype"), CASES)
def test_a_block_and_its_backward_are_right_by_every_kernel(kernel, dtype, causal, monkeypatch):
    torch.manual_seed(0)
    shapes = [(2, 8, 200, 64), (2, 2, 200, 64), (2, 2, 200, 64), (2, 8, 200, 64)]
    on_cpu = [torch.randn(shape, dtype=torch.float64).to(dtype).double() for shape in shapes]
    q, k, v, grad = on_cpu
    expected, lse = kernels.attend(q, k, v, causal=causal)
    grads = kernels.attend_backward(grad, q, k, v, expected, lse, causal=causal)
    monkeypatch.setenv("MESHWISE_ATTENTION", kernel)
    on_gpu = [x.to("cuda", dtype) for x in on_cpu]
    out, found_lse = kernels.attend(*on_gpu[:3], causal=causal)
    found = kernels.attend_backward(on_gpu[3], *on_gpu[:3], out, found_lse, causal=causal)
    limit = LIMITS.get(dtype, 1e-12)
    assert error(out, expected) < limit and error(found_lse, lse) < limit
    assert max(error(x, y) for x, y in zip(found, grads, strict=True)) < limit


def test_one_key_is_attended_though_cudnn_refuses():
    q, k, v = (torch.randn(3, 4, 1, 64, dtype=torch.bfloat16, device="cuda") for _ in range(3))
    out, lse = kernels.attend(q, k, v, causal=True)
    assert torch.equal(out, v)
    dq, _, dv = kernels.attend_backward(v, q, k, v, out, lse, causal=True)
    assert torch.equal(dv, v) and float(dq.abs().max()) < 1e-2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_taken_mixed_and_added_as_on_a_cpu(dtype):
    torch.manual_seed(0)
    tokens, heads = 24, 4
    view = rows.View(8, 2, 8, 3, 1, 3, 1, 2, 2)
    index = torch.randperm(tokens * heads)[:40].to(torch.int32)
    x = torch.randn(2, tokens * heads, 20).to(dtype)
    found = []
    for device in (torch.device("cpu"), torch.device("cuda")):
        torch.manual_seed(1)
        parts = []
        for at, count in ((view, 12), (index.to(device), 40), (None, 96)):
            values = torch.randn(2, count, 20).to(dtype).to(device)
            lse = torch.randn(2, count).to(device)
            parts.append(rows.RowPart(values, rows.places(at, tokens, heads, device), lse))
        like = x.to(device)
        taken = rows.take(like, index.to(device))
        out, lse = rows.combine(parts[:2], like)
        found.append([taken, out, lse.exp(), rows.total(parts, like)])
    for on_cpu, on_gpu in zip(*found, strict=True):
        assert torch.allclose(on_cpu.float(), on_gpu.cpu().float(), atol=LIMITS[dtype])


def parts_of(lse, count, spread, *, ones=False):
    """Values [count, 2, 3, 50, 40] of parts and their lse, a tenth of whose rows saw no key."""
    shape = (count, 2, 3, 50)
    lses = (lse + spread * torch.randn(shape, dtype=torch.float64)).float()
    lses[torch.rand(shape) < 0.1] = -torch.inf
    values = torch.ones(*shape, 40) if ones else torch.randn(*shape, 40)
    return values.cuda(), lses.cuda()


def one_by_one(values, lses):
    """Into every second row of what is so far, as strided views are; parts [.., rows, heads, D]."""
    so_far = nothing((2, 3, 100, 40), values.device)
    views = type(so_far)(*(x[:, :, ::2].unsqueeze(1) for x in so_far))
    for part, lse in zip(values, lses, strict=True):
        turned = part.transpose(1, 2).contiguous().transpose(1, 2)
        merge(views, turned.unsqueeze(1), lse.unsqueeze(1))
    assert not so_far.out[:, :, 1::2].any() and not so_far.share[:, :, 1::2].any()
    return result(type(so_far)(*(x[:, :, ::2] for x in so_far)), values[0])


def together(values, lses):
    """In places of their own: each part's rows are in another order."""
    count, parts = values[0].shape[1] * values[0].shape[2], []
    for part, lse in zip(values.flatten(2, 3), lses.flatten(2, 3), strict=True):
        order = torch.randperm(count, device=part.device)
        at = rows.places(order.to(torch.int32), count, 1, part.device)
        parts.append(rows.RowPart(part[:, order], at, lse[:, order]))
    out, lse = rows.combine(parts, values[0].flatten(1, 2))
    return out.view_as(values[0]), lse.view_as(lses[0])


@pytest.mark.parametrize("count", [2, 3, 8, 32, 33, 1000])
@pytest.mark.parametrize("merged", [one_by_one, together])
def test_merging_adds_next_to_nothing_at_any_size_and_number(merged, count):
    worst = 0.0
    for size in (0, 10, 1e3, 3.7e3, 3e4, 1e6):
        for spread in (0, 1, 20):
            torch.manual_seed(count)
            values, lses = parts_of(size, count, spread)
            out, lse = merged(values, lses)
            weights = lses.double().softmax(0).nan_to_num(0)
            exact = (weights.unsqueeze(-1) * values.double()).sum(0)
            ulp = np.spacing(np.float32(exact.abs().max().cpu()))
            worst = max(worst, float((out - exact).abs().max()) / ulp)
            exact_lse = lses.double().logsumexp(0)
            assert torch.equal(lse > -torch.inf, exact_lse > -torch.inf)
            assert float((lse - exact_lse).nan_to_num(0).abs().max()) <= 2**-23 * (size + 100)
            values, lses = parts_of(size, count, spread, ones=True)
            for dtype in (torch.float32, torch.bfloat16):
                out, lse = merged(values.to(dtype), lses)
                seen = (lse > -torch.inf).unsqueeze(-1).expand_as(out)
                assert torch.equal(out, seen.to(dtype))
    print(f"{merged.__name__}, {count} parts: {worst:.2f} ulp")
    assert worst <= 4


@pytest.mark.parametrize("mixture", ["exact", "detached"])
def test_dilated_attention_is_what_it_is_on_a_cpu(mixture):
    dilation = Dilation(segment_lengths=(64, 128, 512), dilation_rates=(1, 2, 6), mixture=mixture)
    torch.manual_seed(0)
    on_cpu = [torch.randn(2, 500, 4, 64, dtype=torch.float64).bfloat16().double() for _ in range(4)]
    results = []
    for inputs in (on_cpu, [x.to("cuda", torch.bfloat16) for x in on_cpu]):
        *qkv, grad = inputs
        for x in qkv:
            x.requires_grad_()
        out = dilated_attention(*qkv, dilation, causal=True)
        results.append([out.detach(), *torch.autograd.grad(out, qkv, grad)])
    for expected, found in zip(*results, strict=True):
        assert error(found, expected) < LIMITS[torch.bfloat16]
