"""Products, attention, host copies and overlap on a GPU: right against float64."""

import contextlib

import pytest

torch = pytest.importorskip("torch")

from meshwise import ranks as ranks_module  # noqa: E402
from meshwise.probe import attention, operators, overlap  # noqa: E402
from meshwise.probe.work import Unavailable  # noqa: E402
from meshwise.spec import Attention, Case, Elementwise, Gemm  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is visible"),
]
DEVICE = torch.device("cuda")
LARGE = {"m": 256, "n": 512, "k": 1024}
# what torch itself brings on GPUs of compute capability 8 and later
ALWAYS = ("", "flash", "math", "flex", "varlen")


@pytest.fixture
def settings():
    with contextlib.ExitStack() as stack:
        yield stack


def product(settings, **fields):
    case = Case(op=Gemm(**(LARGE | fields)), regime="cold")
    calls = operators.build(case, DEVICE, settings).calls
    assert len({call.args[0].data_ptr() for call in calls}) == len(calls) > 1  # buffers rotate
    return calls[-1], [x.double() for x in calls[-1].args if isinstance(x, torch.Tensor)]


def error(found, wanted) -> float:
    return float((found.double() - wanted).abs().max() / wanted.abs().max())


@pytest.mark.parametrize(
    ("dtype", "least", "most"),
    [("fp64", 0, 1e-13), ("fp32", 0, 3e-6), ("tf32", 1e-5, 2e-3), ("bf16", 1e-4, 8e-3)],
)
def test_a_product_has_the_precision_of_its_dtype(settings, dtype, least, most):
    if dtype == "tf32" and torch.cuda.get_device_capability()[0] < 8:
        pytest.skip("tf32 needs compute capability 8.0")
    call, (a, b) = product(settings, dtype=dtype)
    assert least <= error(call(), a @ b) <= most


@pytest.mark.parametrize("scaling", ["tensor", "row"])
def test_an_fp8_product_is_that_of_its_dequantised_operands(settings, scaling):
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("fp8 needs compute capability 8.9")
    call, (a, b, scale_a, scale_b, _) = product(settings, dtype="fp8", scaling=scaling)
    assert error(call(), a * scale_a @ (b * scale_b)) < 1e-2


def test_grouped_products_of_all_three_passes_are_right(settings):
    for trans_b in (True, False):
        call, (a, b) = product(settings, groups=4, trans_b=trans_b)
        wanted = torch.cat([a[64 * g : 64 * (g + 1)] @ b[g] for g in range(4)])
        assert error(call(), wanted) < 8e-3
    call, (a, b) = product(settings, groups=4, trans_a=True, trans_b=False)
    parts = [slice(256 * g, 256 * (g + 1)) for g in range(4)]
    wanted = torch.stack([a[:, part] @ b[part] for part in parts])
    assert error(call(), wanted) < 8e-3


def shape(**fields) -> Attention:
    usual = {"batch": 2, "q_len": 256, "kv_len": 256, "heads": 8, "kv_heads": 8, "head_dim": 64}
    return Attention(**(usual | fields))


def dense(op: Attention, q, k, v):
    """float64; heads before positions."""
    k, v = (x.repeat_interleave(op.heads // op.kv_heads, 1) for x in (k, v))
    scores = q @ k.mT / op.head_dim**0.5
    ahead = (
        torch.arange(op.kv_len, device=q.device) - torch.arange(op.q_len, device=q.device)[:, None]
    )
    ahead = ahead - (op.kv_len - op.q_len)  # positions that a key is ahead of its query
    if op.causal:
        scores = scores.masked_fill((ahead > 0) | (ahead <= -(op.window or op.kv_len)), -torch.inf)
    return torch.softmax(scores, -1) @ v


def heads_first(op: Attention, x):
    """[batch, heads, seq, dim], of a packed tensor [batch * seq, heads, dim] too."""
    return x.unflatten(0, (op.batch, -1)).transpose(1, 2) if x.dim() == 3 else x


def check(op: Attention, backend: str, settings) -> None:
    forward = attention.build(Case(op=op, backend=backend), DEVICE, settings).calls[0]
    exact = [heads_first(op, x.detach()).double().requires_grad_() for x in forward.args[-3:]]
    wanted = dense(op, *exact)
    assert error(heads_first(op, forward()), wanted.detach()) < 2e-2
    back_op = Attention(
        **{name: getattr(op, name) for name in op.__struct_fields__} | {"direction": "backward"}
    )
    settings.close()
    backward = attention.build(Case(op=back_op, backend=backend), DEVICE, settings).calls[0]
    _, inputs, gradient = backward.args
    exact = [heads_first(op, x.detach()).double().requires_grad_() for x in inputs]
    out = dense(op, *exact)
    rights = torch.autograd.grad(out, exact, heads_first(op, gradient).double())
    for found, right in zip(backward(), rights, strict=True):
        assert error(heads_first(op, found), right) < 3e-2


@pytest.mark.parametrize("backend", attention.BACKENDS)
@pytest.mark.parametrize(
    "fields",
    [
        {"causal": False},
        {},
        {"kv_heads": 2},
        {"window": 32},
        {"q_len": 128},
        {"head_dim": 192, "head_dim_v": 128},
    ],
    ids=lambda fields: " ".join(fields) or "causal",
)
def test_a_back_end_is_right_or_says_why_not(settings, backend, fields):
    op = shape(**fields)
    try:
        check(op, backend, settings)
    except Unavailable as reason:
        plain = not {"window", "q_len", "head_dim_v"} & set(fields)
        assert not (plain and backend in ALWAYS), reason
        assert not ({"window", "q_len"} & set(fields) and backend in ("flex", "varlen")), reason
        assert str(reason)


@pytest.mark.parametrize("kind", ["h2d", "d2h"])
def test_host_copies_arrive(kind):
    op = Elementwise(kind=kind, read_bytes=2**20, write_bytes=2**20)
    (call, *_) = operators.build(Case(op=op), DEVICE, contextlib.ExitStack()).calls
    target, source = call(), call.args[0]
    torch.cuda.synchronize()
    assert {target.device.type, source.device.type} == {"cpu", "cuda"}
    assert (source if kind == "h2d" else target).is_pinned()
    assert torch.equal(target.cpu(), source.cpu())


def test_overlap_keeps_the_other_work_running_beside_each_call():
    a, b = (torch.randn(4096, 4096, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    x = torch.randn(2**27, device=DEVICE)
    timed = overlap.measure(
        lambda: torch.mm(a, b), lambda: x.mul_(1.0), ranks_module.alone("cuda"), 0.2
    )
    assert 0 < timed.metrics["compute_covered"] <= 1
    assert 0 < timed.metrics["collective_covered"] <= 1
    assert min(timed.times_s) > 0
