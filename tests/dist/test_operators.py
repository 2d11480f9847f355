"""Products, attention and overlap: what is timed is right, and what cannot be done is said."""

import collections
import contextlib
import json
import statistics

import msgspec
import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from meshwise.fit import calibrate
from meshwise.models import graph, program_of
from meshwise.options.measure import ProfileOptions
from meshwise.prices import Prices
from meshwise.prices.measured import AS_COPIES
from meshwise.probe import attention, block, collectives, operators, overlap
from meshwise.probe.cases import attention as attention_cases
from meshwise.probe.cases import profile
from meshwise.probe.cases.scope import Scope
from meshwise.probe.work import Unavailable, tried
from meshwise.spec import (
    Attention,
    Case,
    Cluster,
    Collective,
    Convolution,
    Decoder,
    Device,
    Elementwise,
    Experts,
    Gemm,
    Layout,
    Model,
    Overlap,
    RunInfo,
    Sample,
)
from tests import sample_records as known

CPU = torch.device("cpu")
PLAIN = ((False, True), (False, False), (True, False), (True, True))
CONVOLUTIONS = (((9, 7), 3, 1), ((9, 7), 3, 2), ((8, 6), 3, 2), ((8, 5), 1, 2), ((12, 9), 7, 2))
SCALING = {"tensor": (1, 1), "row": (24, 1)}
METRICS = ("alone_s", "slowdown", "covered")
MASKS = ({"causal": False}, {"causal": True}, {"causal": True, "window": 5})


def tf32() -> tuple[bool, bool]:
    """Whether products and convolutions of fp32 tensors are TF32 on a GPU, by torch's older words,
    which raise where its newer ones say something else."""
    return torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32


def product(settings: contextlib.ExitStack, **fields: object):
    """The call of a product, and its operands as they were given to torch."""
    (call,) = operators.build(Case(op=Gemm(**fields)), CPU, settings).calls
    return call, [x.double() for x in call.args if isinstance(x, Tensor)]


@pytest.fixture
def settings():
    with contextlib.ExitStack() as stack:
        yield stack


@pytest.mark.parametrize("dtype", ["fp64", "fp32", "bf16", "fp16"])
@pytest.mark.parametrize(("trans_a", "trans_b"), PLAIN)
def test_a_product_is_right_and_stored_as_asked(settings, dtype, trans_a, trans_b):
    stored = {"trans_a": trans_a, "trans_b": trans_b}
    call, (a, b) = product(settings, m=24, n=40, k=56, dtype=dtype, **stored)
    assert (a.shape, b.shape) == ((24, 56), (56, 40))
    given = call.args[:2]
    assert [x.is_contiguous() for x in given] == [not trans_a, not trans_b]
    rough = {"fp64": 1e-14, "fp32": 1e-6, "bf16": 8e-3, "fp16": 1e-3}[dtype]
    found = call()
    assert found.dtype == given[0].dtype
    torch.testing.assert_close(found.double(), a @ b, rtol=rough, atol=8 * rough)


@pytest.mark.parametrize("scaling", ["tensor", "row"])
def test_an_fp8_product_is_that_of_its_dequantised_operands(settings, scaling):
    fields = {"m": 24, "n": 32, "k": 48, "dtype": "fp8", "scaling": scaling}
    try:
        call, (a, b, scale_a, scale_b, _) = product(settings, **fields)
    except Unavailable as reason:  # torch 2.11 on a CPU scales by tensor only
        assert scaling == "row" and "per-tensor" in str(reason)
        return
    assert call.args[0].dtype == torch.float8_e4m3fn
    assert scale_a.shape == SCALING[scaling]
    found = call()
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), a * scale_a @ (b * scale_b), rtol=8e-3, atol=0.02)


@pytest.mark.parametrize("scaling", ["tensor", "row"])
def test_quantised_numbers_use_the_whole_range_and_come_back(scaling):
    x = torch.randn(24, 48, generator=torch.Generator().manual_seed(1))
    numbers, scale = operators.quantised(x, scaling)
    assert scale.shape == SCALING[scaling]
    largest = numbers.float().abs().amax(dim=1 if scaling == "row" else (0, 1))
    assert torch.all(largest == 448)  # the largest number of e4m3
    # three bits of mantissa: half a unit in the last place is 1/16, less below 2^-6
    torch.testing.assert_close(numbers.float() * scale, x, rtol=1 / 16, atol=2**-9 * 0.02)


@pytest.mark.parametrize("rows", [32, 35])
@pytest.mark.parametrize("trans_b", [True, False])
def test_a_grouped_product_multiplies_each_group_by_its_own_matrix(settings, rows, trans_b):
    fields = {"m": rows, "n": 24, "k": 16, "dtype": "bf16", "groups": 3}
    call, (a, b) = product(settings, **fields, trans_b=trans_b)
    ends = {32: (8, 16, 32), 35: (8, 16, 35)}[rows]  # thirds, rounded down to padded rows
    assert tuple(call.keywords["offs"].tolist()) == ends
    starts = (0, *ends)
    wanted = [a[i:j] @ b[g] for g, (i, j) in enumerate(zip(starts, ends, strict=False))]
    torch.testing.assert_close(call().double(), torch.cat(wanted), rtol=8e-3, atol=0.05)


def test_a_grouped_weight_gradient_gives_each_group_its_own_result(settings):
    fields = {"m": 16, "n": 24, "k": 64, "dtype": "bf16", "groups": 4}
    call, (a, b) = product(settings, **fields, trans_a=True, trans_b=False)
    assert (a.shape, b.shape) == ((16, 64), (64, 24))
    wanted = torch.stack([a[:, i : i + 16] @ b[i : i + 16] for i in (0, 16, 32, 48)])
    torch.testing.assert_close(call().double(), wanted, rtol=8e-3, atol=0.05)


@pytest.mark.parametrize("trans_a", [False, True])
def test_a_batched_product_gives_each_group_as_much(settings, trans_a):
    fields = {"m": 10, "n": 6, "k": 20, "dtype": "fp64", "groups": 5, "batched": True}
    call, (a, b) = product(settings, **fields, trans_a=trans_a, trans_b=not trans_a)
    assert a.shape == ((5, 10, 4) if trans_a else (5, 2, 20)) and a.mT.is_contiguous() == trans_a
    wanted = torch.stack([a[i] @ b[i] for i in range(5)])
    assert wanted.shape == ((5, 10, 6) if trans_a else (5, 2, 6))
    torch.testing.assert_close(call(), wanted)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"dtype": "tf32"}, "tf32 is a precision of GPUs"),
        ({"dtype": "fp8", "scaling": "tensor", "trans_b": False}, r"\(nt\) only"),
        ({"dtype": "fp8", "scaling": "row", "k": 40}, "multiples of 16, not 16 and 40"),
        ({"groups": 2, "dtype": "fp64"}, "grouped products in fp64"),
        ({"groups": 2, "trans_a": True}, "two transposed operands"),
        ({"groups": 2, "k": 12}, "strides should be multiple of 16 bytes"),  # torch's own words
    ],
)
def test_a_product_without_a_kernel_says_why(settings, fields, reason):
    with pytest.raises(Unavailable, match=reason):
        product(settings, **({"m": 16, "n": 16, "k": 16} | fields))


def test_the_precision_of_fp32_is_put_back():
    assert tf32() == (False, True)  # torch's own
    with contextlib.ExitStack() as settings:
        product(settings, m=8, n=8, k=8, dtype="fp32")
        assert tf32() == (False, False)
    assert tf32() == (False, True)


# --- convolutions ---


@pytest.mark.parametrize("dtype", ["fp64", "fp32", "bf16"])
@pytest.mark.parametrize(("size", "kernel", "stride"), CONVOLUTIONS)
def test_the_products_of_a_convolution_are_its_result_and_gradients(
    settings, size, kernel, stride, dtype
):
    """Autograd in fp64; sizes and FLOPs of the record are torch's."""
    height, width = size
    op = Convolution(
        batch=2, in_channels=6, out_channels=8, height=height, width=width, kernel=kernel,
        stride=stride, dtype=dtype,
    )  # fmt: skip
    got, calls = {}, {}
    for product in ("forward", "dgrad", "wgrad"):
        case = Case(op=msgspec.structs.replace(op, product=product))
        (calls[product],) = operators.build(case, CPU, settings).calls
        with FlopCounterMode(display=False) as counter:
            found = calls[product]()
        assert counter.get_total_flops() == case.op.flops
        (got[product],) = [found] if product == "forward" else [y for y in found if y is not None]
    dy, *operands = calls["dgrad"].args[:3]
    for here, there in zip(operands, calls["forward"].args, strict=False):
        assert torch.equal(here, there) and here.is_contiguous(memory_format=torch.channels_last)
    x, w = (of.double().requires_grad_() for of in operands)
    y = torch.nn.functional.conv2d(x, w, stride=stride, padding=kernel // 2)
    y.backward(dy.double())
    tolerance = {"fp64": 1e-12, "fp32": 1e-5, "bf16": 2e-2}[dtype]
    for product, right in (("forward", y), ("dgrad", x.grad), ("wgrad", w.grad)):
        scale = right.detach().abs().max().item()
        assert got[product].shape == right.shape and got[product].dtype == dy.dtype
        torch.testing.assert_close(
            got[product].double(), right.detach(), rtol=tolerance, atol=tolerance * scale
        )
    elements = x.numel() + w.numel() + y.numel()
    assert op.bytes == elements * dy.itemsize and op.out_pixels == y[0, 0].numel()


def test_a_convolution_in_tf32_needs_a_gpu_and_leaves_the_precision_alone(settings):
    sizes = {"batch": 1, "in_channels": 4, "out_channels": 4, "height": 5, "width": 5, "kernel": 3}
    with pytest.raises(Unavailable, match="precision of GPUs"):
        operators.build(Case(op=Convolution(**sizes, dtype="tf32")), CPU, settings)
    with contextlib.ExitStack() as held:
        operators.build(Case(op=Convolution(**sizes, dtype="fp32")), CPU, held)
        assert tf32() == (False, False)
    assert tf32() == (False, True)


# --- attention ---


def shape(**fields: object) -> Attention:
    usual = {"batch": 2, "q_len": 16, "kv_len": 16, "heads": 4, "kv_heads": 2, "head_dim": 8}
    return Attention(**(usual | {"dtype": "fp32"} | fields))


def attend(op: Attention, backend: str, settings: contextlib.ExitStack):
    (call,) = attention.build(Case(op=op, backend=backend), CPU, settings).calls
    return call


def dense(op: Attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax(Q K^T / sqrt(d)) V head by head in float64, the mask by its definition."""
    out = []
    for head in range(op.heads):
        shared = head * op.kv_heads // op.heads
        scores = q[:, head] @ k[:, shared].mT / op.head_dim**0.5
        for i in range(op.q_len):
            for j in range(op.kv_len):
                behind = i + op.kv_len - op.q_len - j
                if op.causal and not 0 <= behind < (op.window or op.kv_len):
                    scores[:, i, j] = -torch.inf
        out.append(torch.softmax(scores, -1) @ v[:, shared])
    return torch.stack(out, 1)


def operands(call) -> list[Tensor]:
    """q, k and v of a forward call."""
    return [x.detach().double().requires_grad_() for x in call.args[-3:]]


ON_CPU = [
    *(("", {"heads": 4, "kv_heads": kv}) for kv in (4, 2)),
    *((backend, mask) for backend in ("flash", "math", "flex") for mask in MASKS[:2]),
    *((backend, {"head_dim_v": 24}) for backend in ("math", "flex")),
    *((backend, {"q_len": 5} | mask) for backend in ("math", "flex") for mask in MASKS),
]


@pytest.mark.parametrize(("backend", "fields"), ON_CPU)
def test_attention_is_that_of_the_dense_formula(settings, backend, fields):
    op = shape(**fields)
    call = attend(op, backend, settings)
    found = call()
    assert found.shape == (op.batch, op.heads, op.q_len, op.value_dim)
    torch.testing.assert_close(found.double(), dense(op, *operands(call)), rtol=1e-5, atol=1e-5)
    # as a model's projections leave heads; it saves for backward where there is one
    assert call.args[0].transpose(1, 2).is_contiguous()
    assert found.requires_grad == (backend != "flex")


@pytest.mark.parametrize(
    ("backend", "fields"),
    [("", {}), ("flash", {}), ("math", {"head_dim_v": 24}), ("math", {"window": 5, "q_len": 11})],
)
def test_gradients_of_attention_are_those_of_the_dense_formula(settings, backend, fields):
    op = shape(**fields, direction="backward")
    call = attend(op, backend, settings)
    _, inputs, gradient = call.args
    exact = [x.detach().double().requires_grad_() for x in inputs]
    wanted = torch.autograd.grad(dense(op, *exact), exact, gradient.double())
    for _ in range(2):  # the graph is kept
        for found, right in zip(call(), wanted, strict=True):
            torch.testing.assert_close(found.double(), right, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("backend", "fields", "reason"),
    [
        ("cudnn", {}, "No viable backend"),
        ("efficient", {}, "No viable backend"),
        ("flash", {"head_dim_v": 24}, "No available kernel.*; .*same last dimension"),
        ("flash", {"window": 5}, "a window by flash; flex and varlen have it"),
        ("", {"q_len": 5}, "q_len != kv_len by torch's choice"),
        ("math", {"q_len": 17}, "its first queries see no key"),
        ("flex", {"direction": "backward"}, "no backward on a CPU"),
        ("varlen", {}, "needs a CUDA device"),
        ("fa3", {}, "flash_attn_3 is not installed"),
        ("fa4", {}, "flash-attn-4 is not installed"),
        ("math", {"dtype": "fp8"}, "no probe for fp8"),
    ],
)
def test_attention_without_a_kernel_says_why(settings, backend, fields, reason):
    with pytest.raises(Unavailable, match=reason) as error:
        attend(shape(**fields), backend, settings)
    assert "Triggered internally" not in str(error.value)


def test_an_unknown_back_end_is_refused(settings):
    with pytest.raises(ValueError, match=r"backend = 'fash': must be one of flash, cudnn"):
        attend(shape(), "fash", settings)
    assert attention.BACKENDS == attention_cases.BACKENDS


def test_a_held_kernel_is_let_go():
    enabled = torch.backends.cuda.math_sdp_enabled
    assert enabled()
    with contextlib.ExitStack() as settings:
        attend(shape(), "flash", settings)
        assert not enabled()
    assert enabled()


def test_only_a_missing_kernel_is_unavailable():
    with pytest.raises(RuntimeError, match="cannot be multiplied") as error:
        tried(lambda: torch.ones(2, 3) @ torch.ones(2, 3))
    assert not isinstance(error.value, Unavailable)
    assert tried(lambda: 3) == 3


@pytest.mark.parametrize("kind", ["h2d", "d2h"])
def test_a_cpu_has_no_host_link(kind):
    case = Case(op=Elementwise(kind=kind, read_bytes=64, write_bytes=64))
    with pytest.raises(Unavailable, match="no host link: the device is the host"):
        operators.build(case, CPU, contextlib.ExitStack())


# --- element-wise work by its kind ---

GPT = Model(hidden=32, layers=2, heads=4, ffn=96, vocab=160, max_seq_len=16)
FAMILIES = {
    "gpt": GPT,
    "experts": msgspec.structs.replace(
        GPT, experts=Experts(num_experts=4, top_k=2, ffn=48, every=1)
    ),
    "llama": Decoder(
        hidden=32, layers=2, heads=4, kv_heads=2, head_dim=8, ffn=96, vocab=160, max_seq_len=16,
        qk_norm=True, qk_norm_over="projection",
    ),
}  # fmt: skip
SIZE_OF = {"fp32": 4, "bf16": 2}


def kinds_of(family: str, device: str, dtype: str) -> list[Elementwise]:
    """The cases of a profile of one rank that are there for their kind."""
    cluster = Cluster(
        name="test", num_hosts=1, num_devices_per_host=1, tiers=(),
        device=Device(name="x", kind=device, memory_bytes=2**37),
    )  # fmt: skip
    asked = ProfileOptions(model=(FAMILIES[family],), lowering="eager")
    found = profile.with_uses(Scope(cluster, 1, dtype), asked)
    return [case.op for case, use in found if use == "element-wise work"]


def moved(op: Elementwise, device: str, table: int) -> tuple[int, int]:
    """Bytes read and written, from shapes alone. A LayerNorm keeps two numbers a row, in fp32 on
    GPUs; the softmax of the loss three."""
    rows, size = op.rows, SIZE_OF[op.dtype]
    x, w, backward = rows * op.width * size, op.width * size, op.direction == "backward"
    two = 2 * rows * (4 if device == "cuda" else size)
    return {
        "add": (2 * x, x),
        "mul": (2 * x, x),
        "cast": (x, x // 2 if op.dtype == "fp32" else 2 * x),
        "gelu": (2 * x if backward else x, x),
        "silu": (2 * x if backward else x, x),
        "layer_norm": (2 * x + w + two, x + 2 * w) if backward else (x + 2 * w, x + two),
        "rms_norm": (2 * x + w + 4 * rows, x + w) if backward else (x + w, x + 4 * rows),
        "cross_entropy": (2 * x, x) if backward else (x, x + 12 * rows),
        "embedding": (x + 8 * rows, table * w) if backward else (8 * rows + table * w, x),
    }[op.kind]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_kind_moves_the_bytes_of_its_tensors(settings, family, device, dtype):
    """And is timed on these: operands and results have the rows, width and dtype of the case."""
    ops, sizes = kinds_of(family, device, dtype), collections.defaultdict(list)
    for op in ops:
        sizes[op.kind, op.direction].append(op.bytes)
        (call,) = operators.build(Case(op=op), CPU, settings).calls
        held = [x for x in call.args if isinstance(x, Tensor)]
        found, whole, wide = call(), (op.rows, op.width), SIZE_OF[op.dtype]
        backward = isinstance(found, tuple)
        assert backward == (op.direction == "backward")
        first = found[0] if backward else held[0]
        if op.kind == "embedding":
            (tokens, *_), result = held, first if backward else found
            table = len(result) if backward else len(held[1])
            assert backward or (len(tokens), tuple(result.shape)) == (op.rows, whole)
        else:
            table, result = 0, first if backward else found
            assert tuple(first.shape) == tuple(result.shape) == whole
        assert first.element_size() == wide or op.kind == "embedding"
        read, written = moved(op, device, table)
        assert (op.read_bytes, op.write_bytes) == (read, written), op
        extra = {"layer_norm": 2, "rms_norm": 1}.get(op.kind, 0)
        assert len(found if backward else held) == 1 + extra + (
            not backward and op.kind in ("add", "mul", "embedding")
        )
    for (kind, direction), each in sizes.items():
        assert 3 <= len(each) <= 4 and max(each) >= 32 * min(each), (kind, direction)
    one_kernel = {"add", "mul", "cast"}
    both = {kind for kind, _ in sizes} - one_kernel
    assert {*sizes} == {(kind, way) for kind in both for way in ("forward", "backward")} | {
        (kind, "forward") for kind in one_kernel & {kind for kind, _ in sizes}
    }
    norm = {"layer_norm"} if family != "llama" else {"rms_norm"} if device == "cuda" else set()
    acts = {"silu", "mul"} if family == "llama" else {"gelu"}
    casts = {"cast"} if dtype == "bf16" else set()
    expected = {"add", "embedding", "cross_entropy"} | norm | acts | casts
    assert {kind for kind, _ in sizes} >= expected


def test_a_backward_is_its_formula_again_and_again(settings):
    """Against formulas written out, of the softmax and of the lookup."""
    ops = {(op.kind, op.direction): op for op in kinds_of("gpt", "cpu", "fp32")}
    (call,) = operators.build(Case(op=ops["cross_entropy", "backward"]), CPU, settings).calls
    _, (x,), dy = call.args
    p = torch.softmax(x.detach().double(), -1)
    wanted = dy.double() - p * dy.double().sum(-1, keepdim=True)
    torch.testing.assert_close(call()[0].double(), wanted, rtol=1e-4, atol=1e-4)
    (call,) = operators.build(Case(op=ops["embedding", "backward"]), CPU, settings).calls
    dy = call.args[-1]
    (found,) = call()
    torch.testing.assert_close(found.sum(0), dy.sum(0), rtol=1e-4, atol=1e-4)
    again = call()[0]
    assert torch.equal(found, again)  # nothing was used up, nothing was added up


def test_kinds_that_were_measured_have_prices_of_their_own(settings):
    """Others are copies, and say so."""
    cluster = known.CPUS
    asked = ProfileOptions(model=(GPT,))
    cases = [
        case
        for case in profile.cases(Scope(cluster, 1, "fp32"), asked)
        if isinstance(case.op, Elementwise)
    ]
    samples = []
    for case in cases:
        operators.build(case, CPU, settings)
        time_s = case.op.bytes / (1e9 if case.op.kind == "copy" else 1e8) + 1e-6
        samples.append(Sample(case_id=case.id, case=case, status="ok", times_s=(time_s,) * 3))
    info = RunInfo(
        run_id="20260101T000000-measure-profile-cpus", verb="measure", command=(), world_size=1,
        status="complete", started="2026-01-01T00:00:00Z", cluster=cluster,
    )  # fmt: skip
    prices = Prices(calibrate([(info, samples)]))
    whole = graph(GPT, 2, 16, "fp32", device="cpu")
    for task in program_of(whole, Layout(microbatch_size=2), "fp32", device="cpu").tasks:
        op = task.op
        if not isinstance(op, Elementwise):
            continue
        found = prices.estimate(op)
        if op.kind == "grad_norm":
            assert found.source == "transferred" and found.note.startswith(AS_COPIES)
        elif op.kind != "adamw":
            assert found.source != "transferred" and AS_COPIES not in found.note, op
            least = min(each.op.bytes for each in cases if each.op.kind == op.kind)
            if op.bytes >= least:
                assert found.time_s == pytest.approx(op.bytes / 1e8, rel=0.2), op


# --- overlap, on two gloo ranks ---


def overlaps(ranks, kind: str):
    """The sample's times and metrics, and how often this rank did each of the two."""
    world_size = ranks.world_size
    op = Overlap(
        compute=Gemm(m=96, n=96, k=96, dtype="fp32"),
        collective=Collective(
            kind=kind, size_bytes=2**16, group_size=world_size, dtype="fp32",
            in_place=kind == "all_reduce",
        ),
    )  # fmt: skip
    calls = [0, 0]

    def counted(index, call):
        def count():
            calls[index] += 1
            call()

        return count

    groups = collectives.Groups(ranks)
    with contextlib.ExitStack() as settings:
        case = Case(op=op, world_size=world_size)
        work = overlap.build(case, groups, block.Blocks(ranks), settings)
        both = [counted(i, call) for i, call in enumerate(work.calls)]
        timed = overlap.measure(*both, ranks, max_seconds=0.02)
    return json.loads(json.dumps([timed.times_s, timed.rank_times_s, timed.metrics, calls]))


@pytest.mark.dist
@pytest.mark.parametrize("kind", ["all_reduce", "send_recv"])
def test_overlap_measures_each_alone_and_beside_the_other(gloo_ranks, kind):
    found = gloo_ranks(2, overlaps, kind=kind)
    times_s, rank_times_s, metrics, _ = found[0]
    assert found[1][:3] == found[0][:3]
    assert found[0][3] == found[1][3]  # equally many of each, else the ranks would hang
    names = {f"{what}_{end}" for what in ("compute", "collective") for end in METRICS}
    assert set(metrics) == names | {"collective_beside_s"}
    assert all(value > 0 for name, value in metrics.items() if "covered" not in name)
    assert all(0 <= metrics[f"{what}_covered"] <= 1 for what in ("compute", "collective"))
    assert times_s == [max(pair) for pair in zip(*rank_times_s, strict=True)]
    slowed_s = metrics["compute_slowdown"] * metrics["compute_alone_s"]
    assert slowed_s == pytest.approx(statistics.median(times_s))
