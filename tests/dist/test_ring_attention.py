"""Dense attention over ranks against one softmax in float64, with the mask written out."""

import hashlib

import pytest
import torch
import torch.distributed as dist

from meshwise.attention import dense, volume
from meshwise.attention.dense import ring_attention
from meshwise.attention.shards import Shards, contiguous, of_lengths, positions, zigzag
from meshwise.attention.volume import dense_bytes
from meshwise.attention.wire import Wire
from meshwise.spec.long_attention import LongAttention

pytestmark = pytest.mark.dist
N, WIDTH, BATCH = 24, 8, 2
WAYS = ("heads", "ring", "gather", "ring_heads")
LAYOUTS = ("contiguous", "zigzag", "uneven", "empty", "scattered")


def tensors(heads, kv_heads, dtype=torch.float64, size=1.0, n=N):
    """q, k, v and the gradient of out, of the whole sequence; the same on all ranks."""
    draw = torch.Generator().manual_seed(heads * 100 + kv_heads)
    shapes = [(BATCH, n, h, WIDTH) for h in (heads, kv_heads, kv_heads, heads)]
    made = [torch.randn(s, generator=draw, dtype=torch.float64) for s in shapes]
    return [(x * size).to(dtype) for x in made]


def oracle(q, k, v, grad, causal, window, documents):
    """out, lse, dq, dk, dv of the definition, in float64."""
    q, k, v = (x.double().clone().requires_grad_() for x in (q, k, v))
    n, groups = q.shape[1], q.shape[2] // k.shape[2]
    p, x = torch.arange(n)[:, None], torch.arange(n)[None]
    allowed = torch.ones(n, n, dtype=torch.bool)
    if causal:
        allowed &= x <= p
    if window is not None:
        allowed &= p - x < window
    if documents:
        starts = torch.tensor(documents)
        document = torch.bucketize(torch.arange(n), starts, right=True)
        allowed &= document[:, None] == document[None]
    keys, values = (t.repeat_interleave(groups, dim=2) for t in (k, v))
    scores = torch.einsum("bphd,bxhd->bhpx", q, keys) / WIDTH**0.5
    scores = scores.masked_fill(~allowed, -torch.inf)
    out = torch.einsum("bhpx,bxhd->bphd", scores.softmax(-1), values)
    out.backward(grad.double())
    return out.detach(), scores.logsumexp(-1).detach(), q.grad, k.grad, v.grad


def layout(name, ranks, n=N) -> Shards:
    if name == "contiguous":
        return contiguous(n, ranks)
    if name == "zigzag":
        return zigzag(n, ranks)
    if name == "scattered":  # runs in no order, of lengths that do not divide
        runs = [(a, min(a + 5, n)) for a in range(0, n, 5)][::-1]
        return Shards(tuple(tuple(runs[rank::ranks]) for rank in range(ranks)))
    lengths = [n // ranks + 3 * (-1) ** rank for rank in range(ranks)]
    if name == "empty" and ranks > 1:
        lengths[ranks // 2] = 0
    lengths[-1] += n - sum(lengths)
    return of_lengths(lengths)


def of_rank(x, shards, rank):
    return x[:, torch.from_numpy(positions(shards, rank))].contiguous()


def cases(ranks) -> list[dict]:
    """Every way with every kind of mask, heads and layout; not every product of all four."""
    masks = [
        {}, {"causal": True}, {"causal": True, "window": 1}, {"causal": True, "window": 5},
        {"causal": True, "window": 100}, {"documents": [0, 7, 8, 19]},
        {"causal": True, "documents": [6, 12, 18]},
        {"causal": True, "window": 3, "documents": [0, 10, 14]},
    ]  # fmt: skip
    heads = [(4, 4), (8, 4), (8, 2), (3, 1), (6, 3), (12, 6)]
    found = []
    for number, way in enumerate(WAYS):
        for at, mask in enumerate(masks):
            for shift, name in enumerate(LAYOUTS):
                q_heads, kv_heads = heads[(number + at + shift) % len(heads)]
                if way == "ring_heads":
                    if ranks not in (4, 8):
                        continue
                    kv_heads = kv_heads if kv_heads in (2, 4, 6) else 2
                    q_heads = 2 * kv_heads
                found.append(
                    {"way": way, "layout": name, "heads": q_heads, "kv_heads": kv_heads, **mask}
                )
    return found


# --- on every rank ---


def errors(ranks, cases) -> list[list[float]]:
    """The largest difference from the oracle of out, lse, and of the gradients."""
    found = []
    for case in cases:
        case = dict(case)
        whole = tensors(case.pop("heads"), case.pop("kv_heads"))
        shards = layout(case.pop("layout"), ranks.world_size)
        mask = {name: case.get(name) for name in ("causal", "window", "documents")}
        expected = oracle(*whole, **mask)
        q, k, v, grad = (of_rank(x, shards, ranks.rank) for x in whole)
        for x in (q, k, v):
            x.requires_grad_()
        out, lse = ring_attention(q, k, v, shards=shards, return_lse=True, **case)
        out.backward(grad)
        at = torch.from_numpy(positions(shards, ranks.rank))
        got = [out, lse.transpose(1, 2), q.grad, k.grad, v.grad]
        want = [expected[0], expected[1].transpose(1, 2), *expected[2:]]
        differ = [_most(a - b[:, at]) for a, b in zip(got, want, strict=True)]
        found.append([differ[0], differ[1], max(differ[2:])])
    return found


def _most(x) -> float:
    return float(x.detach().abs().max()) if x.numel() else 0.0


def errors_in_slices(ranks, cases) -> list:
    """The same where every message is large enough to be sent in slices."""
    usual, volume.SLICE_BYTES = volume.SLICE_BYTES, 0
    dense.run_of.cache_clear()
    found = [errors(ranks, cases), collectives(ranks)]
    volume.SLICE_BYTES = usual
    dense.run_of.cache_clear()
    return found


def collectives(ranks) -> int:
    wire, shards = Wire(), contiguous(N, ranks.world_size)
    q, k, v, _ = (of_rank(x, shards, ranks.rank) for x in tensors(8, 8))
    ring_attention(q.requires_grad_(), k, v, wire=wire, way="heads").sum().backward()
    return wire.collectives


def default_call(ranks, tokens) -> float:
    """No shards given: every rank says how long its part is."""
    whole, shards = tensors(4, 4, n=tokens), contiguous(tokens, ranks.world_size)
    q, k, v, _ = (of_rank(x, shards, ranks.rank) for x in whole)
    out = ring_attention(q, k, v, causal=True)
    return _most(out - of_rank(oracle(*whole, True, None, None)[0], shards, ranks.rank))


def relative_errors(ranks, dtype, way, ring_size) -> list[float]:
    """Of out, dq, dk, dv over all rows, relative in norm, in the first ``ring_size`` ranks."""
    group = dist.new_group(list(range(ring_size)))
    if ranks.rank >= ring_size:
        return []
    n = 256
    whole = tensors(4, 4, getattr(torch, dtype), n=n)
    expected = oracle(*whole, True, None, None)
    shards = zigzag(n, ring_size)
    q, k, v, grad = (of_rank(x, shards, ranks.rank) for x in whole)
    for x in (q, k, v):
        x.requires_grad_()
    out = ring_attention(q, k, v, causal=True, shards=shards, way=way, group=group)
    out.backward(grad)
    sums = []
    for got, want in zip((out, q.grad, k.grad, v.grad), (expected[0], *expected[2:]), strict=True):
        part = of_rank(want, shards, ranks.rank)
        sums += [(got - part).square().sum(), part.square().sum()]
    total = torch.stack([x.detach() for x in sums])
    dist.all_reduce(total, group=group)
    dist.destroy_process_group(group)
    return (total[::2] / total[1::2]).sqrt().tolist()


def bytes_counted(ranks, way, name, given, dtype) -> list:
    """What the wire counted for the forward and the backward, sent and received, and what
    ``volume`` says that this rank receives."""
    given = dict(given)
    heads, kv_heads = given.pop("heads"), given.pop("kv_heads")
    shards, wire = layout(name, ranks.world_size), Wire()
    whole = tensors(heads, kv_heads, getattr(torch, dtype))
    q, k, v, grad = (of_rank(x, shards, ranks.rank) for x in whole)
    for x in (q, k, v):
        x.requires_grad_()
    out = ring_attention(q, k, v, shards=shards, way=way, wire=wire, **given)
    sent, received = [wire.sent_bytes], [wire.received_bytes]
    out.backward(grad)
    sent.append(wire.sent_bytes - sent[0])
    received.append(wire.received_bytes - received[0])
    op = LongAttention(
        batch=BATCH, seq_len=N, heads=heads, kv_heads=kv_heads, head_dim=WIDTH,
        causal=given.get("causal", False), window=given.get("window"),
        dtype={"float64": "fp64", "float32": "fp32", "bfloat16": "bf16"}[dtype],
    )  # fmt: skip
    documents = tuple(given.get("documents", ()))
    said = dense_bytes(op, shards, way, documents)
    return [sent, received, [each[ranks.rank] for each in said]]


class _MyRows(torch.autograd.Function):
    """Of a tensor that every rank has whole; so is its gradient."""

    @staticmethod
    def forward(ctx, x, rank):
        ctx.rank = rank
        return x.chunk(2, dim=1)[rank].contiguous()

    @staticmethod
    def backward(ctx, grad):
        return _joined(grad), None


class _AllRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, rank):
        ctx.rank = rank
        return _joined(x)

    @staticmethod
    def backward(ctx, grad):
        return grad.chunk(2, dim=1)[ctx.rank].contiguous(), None


def _joined(x):
    parts = [torch.empty_like(x) for _ in range(2)]
    dist.all_gather(parts, x.contiguous())
    return torch.cat(parts, 1)


def gradcheck(ranks, way) -> bool:
    draw = torch.Generator().manual_seed(1)
    shapes = ((1, 6, 4, 2), (1, 6, 2, 2), (1, 6, 2, 2))
    whole = [torch.randn(s, generator=draw, dtype=torch.float64) for s in shapes]

    def attention(*given):
        mine = [_MyRows.apply(x, ranks.rank) for x in given]
        return _AllRows.apply(ring_attention(*mine, causal=True, way=way), ranks.rank)

    return torch.autograd.gradcheck(attention, [x.requires_grad_() for x in whole])


def digests(ranks, way) -> list[str]:
    """Of out and gradients, three times."""
    found, shards = [], layout("uneven", ranks.world_size)
    for _ in range(3):
        whole = tensors(4, 2, torch.bfloat16)
        q, k, v, grad = (of_rank(x, shards, ranks.rank) for x in whole)
        for x in (q, k, v):
            x.requires_grad_()
        out = ring_attention(q, k, v, causal=True, shards=shards, way=way)
        out.backward(grad)
        told = [x.detach().float().numpy().tobytes() for x in (out, q.grad, k.grad, v.grad)]
        found.append(hashlib.sha256(b"".join(told)).hexdigest())
    return found


def are_finite(ranks, way, dtype) -> list[bool]:
    shards = zigzag(N, ranks.world_size)
    whole = tensors(4, 4, getattr(torch, dtype), size=1e4)
    q, k, v, _ = (of_rank(x, shards, ranks.rank) for x in whole)
    for x in (q, k, v):
        x.requires_grad_()
    out, lse = ring_attention(q, k, v, causal=True, shards=shards, way=way, return_lse=True)
    out.backward(torch.ones_like(out) * 1e-4)
    return [bool(x.isfinite().all()) for x in (out, lse, q.grad, k.grad, v.grad)]


def complaint(ranks, shapes, given) -> str:
    """The error of this rank, whose tensors are of these shapes."""
    q, k, v = (torch.zeros(s, dtype=torch.float64) for s in shapes[ranks.rank])
    given = dict(given)
    if "lengths" in given:
        given["shards"] = of_lengths(given.pop("lengths"))
    if "intervals" in given:
        given["shards"] = Shards(tuple(tuple(map(tuple, x)) for x in given.pop("intervals")))
    if "causal_on" in given:
        given["causal"] = ranks.rank == given.pop("causal_on")
    try:
        ring_attention(q, k, v, **given)
    except ValueError as error:
        return str(error)
    return ""


def muted_shapes(ranks, way) -> list:
    """Of out and the gradients when nothing is sent."""
    wire, shards = Wire(), contiguous(N, ranks.world_size)
    wire.muted = True
    q, k, v, _ = (of_rank(x, shards, ranks.rank).requires_grad_() for x in tensors(4, 2))
    out = ring_attention(q, k, v, way=way, wire=wire)
    out.sum().backward()
    return [list(x.shape) for x in (out, q.grad, k.grad, v.grad)]


def compiled_and_mixed(ranks) -> list:
    """A compiled model around it against a recomputed one; dtypes under autocast."""
    from torch.utils.checkpoint import checkpoint

    whole, shards = tensors(4, 4, torch.float32), contiguous(N, ranks.world_size)
    x, weight = of_rank(whole[0], shards, ranks.rank).requires_grad_(), torch.ones(())

    def model(x):
        x = x * weight
        return ring_attention(x, x, x, causal=True) + x

    compiled = torch.compile(model, backend="eager")(x)
    (grad,) = torch.autograd.grad(compiled.sum(), x)
    recomputed = checkpoint(model, x, use_reentrant=False)
    (other,) = torch.autograd.grad(recomputed.sum(), x)
    with torch.autocast("cpu", torch.bfloat16):
        mixed, lse = ring_attention(x, x, x, causal=True, return_lse=True)
    (third,) = torch.autograd.grad(mixed.sum(), x)
    assert not lse.requires_grad
    told = [str(each.dtype) for each in (mixed, lse, third)]
    return [_most(compiled - recomputed), _most(grad - other), told]


# --- the tests ---


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_every_way_equals_one_softmax_with_its_gradient(gloo_ranks, ranks):
    asked = cases(ranks)
    for rank, found in enumerate(gloo_ranks(ranks, errors, cases=asked)):
        for case, (out, lse, grads) in zip(asked, found, strict=True):
            assert out <= 1e-12 and lse <= 1e-12 and grads <= 1e-11, (rank, case, out, lse, grads)


def test_more_ranks_than_key_heads_and_than_heads(gloo_ranks):
    asked = [
        {"way": way, "layout": name, "heads": heads, "kv_heads": kv_heads, "causal": causal}
        for way, heads, kv_heads in (
            ("heads", 8, 8), ("heads", 8, 2), ("heads", 12, 3), ("heads", 5, 5), ("ring", 4, 2),
            ("gather", 2, 1), ("ring_heads", 8, 4), ("ring_heads", 4, 2), ("auto", 6, 3),
        )
        for name, causal in (("contiguous", False), ("zigzag", True), ("empty", True))
    ]  # fmt: skip
    for rank, found in enumerate(gloo_ranks(8, errors, cases=asked)):
        for case, (out, lse, grads) in zip(asked, found, strict=True):
            assert out <= 1e-12 and lse <= 1e-12 and grads <= 1e-11, (rank, case, out, lse, grads)


@pytest.mark.parametrize("ranks", [2, 4])
def test_slices_of_heads_equal_one_softmax(gloo_ranks, ranks):
    asked = [
        {"way": "heads", "layout": name, "heads": heads, "kv_heads": kv_heads, "causal": causal}
        for heads, kv_heads in ((8, 8), (16, 8), (12, 12))
        for name, causal in (("contiguous", True), ("uneven", False))
    ]
    for found, calls in gloo_ranks(ranks, errors_in_slices, cases=asked):
        assert all(out <= 1e-12 and lse <= 1e-12 and g <= 1e-11 for out, lse, g in found)
        assert calls == 8  # two slices, there and back, forward and backward
    assert gloo_ranks(ranks, collectives) == [4] * ranks


@pytest.mark.parametrize(("ranks", "tokens"), [(1, 24), (3, 20), (4, 24)])
def test_without_shards_each_rank_has_one_run_as_long_as_its_tensors(gloo_ranks, ranks, tokens):
    assert max(gloo_ranks(ranks, default_call, tokens=tokens)) <= 1e-12


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("way", ["heads", "ring", "gather"])
def test_rounding_errors_do_not_grow_with_the_ranks(gloo_ranks, dtype, way):
    found = [
        gloo_ranks(4, relative_errors, dtype=dtype, way=way, ring_size=size)[0]
        for size in (1, 2, 4)
    ]
    for one, *more in zip(*found, strict=True):
        assert 0 < one < {"bfloat16": 1e-2, "float16": 1.5e-3}[dtype]
        assert max(more) <= 1.2 * one


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize(
    ("way", "given"),
    [
        ("heads", {"heads": 8, "kv_heads": 4}),
        ("heads", {"heads": 6, "kv_heads": 3, "causal": True}),
        ("ring", {"heads": 4, "kv_heads": 2}),
        ("ring", {"heads": 4, "kv_heads": 2, "causal": True}),
        ("ring", {"heads": 4, "kv_heads": 2, "causal": True, "window": 4}),
        ("ring", {"heads": 4, "kv_heads": 2, "documents": [0, 6, 12, 18]}),
        ("gather", {"heads": 4, "kv_heads": 2, "causal": True}),
        ("ring_heads", {"heads": 8, "kv_heads": 2}),
        ("ring_heads", {"heads": 8, "kv_heads": 2, "causal": True, "window": 4}),
    ],
)
def test_bytes_counted_are_those_that_the_plan_says(gloo_ranks, way, given, name):
    dtype = "bfloat16" if name in ("contiguous", "uneven") else "float64"
    asked = {"way": way, "name": name, "given": given, "dtype": dtype}
    sent, received, said = zip(*gloo_ranks(4, bytes_counted, **asked), strict=True)
    assert received == said
    assert [sum(each) for each in zip(*sent, strict=True)] == [
        sum(each) for each in zip(*received, strict=True)
    ]


def test_one_rank_moves_nothing(gloo_ranks):
    given = {"heads": 4, "kv_heads": 2, "causal": True}
    asked = {"way": "auto", "name": "contiguous", "given": given, "dtype": "float32"}
    assert gloo_ranks(1, bytes_counted, **asked) == [[[0, 0]] * 3]


@pytest.mark.parametrize("way", ["heads", "ring", "gather"])
def test_gradients_are_those_of_finite_differences(gloo_ranks, way):
    assert gloo_ranks(2, gradcheck, way=way) == [True, True]


@pytest.mark.parametrize("way", WAYS)
def test_results_are_the_same_bit_for_bit(gloo_ranks, way):
    for found in gloo_ranks(4, digests, way=way):
        assert len(set(found)) == 1


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
@pytest.mark.parametrize("way", WAYS)
def test_extreme_logits_stay_finite(gloo_ranks, way, dtype):
    assert gloo_ranks(4, are_finite, way=way, dtype=dtype) == [[True] * 5] * 4


GOOD = [(1, 4, 2, 8), (1, 4, 2, 8), (1, 4, 2, 8)]


@pytest.mark.parametrize(
    ("shapes", "given", "says"),
    [
        ([GOOD, [(1, 4, 4, 8), *GOOD[1:]]], {}, "heads"),
        ([GOOD, [(2, *s[1:]) for s in GOOD]], {}, "batch"),
        ([GOOD, [s[1:] for s in GOOD]], {}, "each must be [batch, length, heads, head_dim]"),
        ([[(1, 4, 3, 8), *GOOD[1:]]] * 2, {}, "must be a multiple of key heads 2"),
        ([[*GOOD[:2], (1, 5, 2, 8)]] * 2, {}, "must be alike"),
        ([GOOD] * 2, {"causal_on": 1}, "causal"),
        ([GOOD] * 2, {"window": 4}, "set causal=True"),
        ([GOOD] * 2, {"window": 0, "causal": True}, "must be 1 or more"),
        ([GOOD] * 2, {"lengths": [5, 3]}, "shards"),
        ([GOOD] * 2, {"intervals": [[[0, 4]], [[2, 6]]]}, "each of 8 tokens once"),
        ([GOOD] * 2, {"way": "ring_heads"}, "ring_heads"),
        ([GOOD] * 2, {"way": "star"}, "must be one of"),
        ([GOOD] * 2, {"documents": [4, 2]}, "must ascend"),
        ([GOOD] * 2, {"documents": [0, 4, 9]}, "documents"),
    ],
)
def test_what_does_not_fit_is_one_error_on_all_ranks(gloo_ranks, shapes, given, says):
    first, second = gloo_ranks(2, complaint, shapes=shapes, given=given)
    assert first == second
    assert says in first and "\n" not in first


@pytest.mark.parametrize("way", WAYS)
def test_a_muted_wire_leaves_the_shapes_as_they_are(gloo_ranks, way):
    rows = [BATCH, N // 4]
    each = [[*rows, 4, WIDTH], [*rows, 4, WIDTH], [*rows, 2, WIDTH], [*rows, 2, WIDTH]]
    assert gloo_ranks(4, muted_shapes, way=way) == [each] * 4


def test_it_works_in_a_compiled_model_with_autocast_and_recomputation(gloo_ranks):
    for values, grads, dtypes in gloo_ranks(2, compiled_and_mixed):
        assert values <= 1e-6 and grads <= 1e-6
        assert dtypes == ["torch.bfloat16", "torch.float32", "torch.float32"]
