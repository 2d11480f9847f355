"""Kernels of GPUs: every stock kernel's block, and rows by index, against float64 on the CPU."""

import pytest

torch = pytest.importorskip("torch")

from meshwise.attention import kernels, rows  # noqa: E402
from meshwise.attention.dilated import dilated_attention  # noqa: E402
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
            parts.append(rows.Part(values, rows.places(at, tokens, heads, device), lse))
        like = x.to(device)
        taken = rows.take(like, index.to(device))
        out, lse = rows.combine(parts[:2], like)
        found.append([taken, out, lse.exp(), rows.total(parts, like)])
    for on_cpu, on_gpu in zip(*found, strict=True):
        assert torch.allclose(on_cpu.float(), on_gpu.cpu().float(), atol=LIMITS[dtype])


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
