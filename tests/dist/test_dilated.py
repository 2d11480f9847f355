"""Dilated attention over gloo ranks against its definition: a softmax over the multiset of keys."""

import random

import pytest
import torch

from meshwise.attention import pattern, plan, shards
from meshwise.spec import Dilation, LongAttention
from meshwise.spec.long_attention import offsets

SOURCE = Dilation(segment_lengths=(8, 16, 32), dilation_rates=(1, 2, 4))


def multiset(dilation, heads, kv_heads, n, causal):
    """How often each query sees each key: [branches, heads, n, n], from the definition."""
    p = torch.arange(n)
    found = torch.zeros(dilation.num_branches, heads, n, n, dtype=torch.float64)
    for i, (width, rate) in enumerate(
        zip(dilation.segment_lengths, dilation.dilation_rates, strict=True)
    ):
        for head, offset in enumerate(offsets(dilation, i, heads, kv_heads)):
            if offset is None:
                continue
            kept = (p % min(width, n)) % rate == offset
            same = p[:, None] // min(width, n) == p // min(width, n)
            found[i, head] = (kept[:, None] & kept & same).double()
    return found * (p[:, None] >= p) if causal else found


def softmax(q, k, v, count):
    """out and lse of keys that count so often; dead rows are 0 and -inf."""
    k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) for x in (k, v))
    scores = torch.einsum("bphd,bxhd->bhpx", q, k) * q.shape[-1] ** -0.5
    scores = torch.where(count > 0, scores + count.clamp(min=1).log(), -1e30)
    lse, dead = scores.logsumexp(-1), count.sum(-1) == 0
    weights = (scores - lse[..., None]).exp() * ~dead[..., None]
    return torch.einsum("bhpx,bxhd->bphd", weights, v), lse.masked_fill(dead, -torch.inf)


def oracle(q, k, v, dilation, causal):
    count = multiset(dilation, q.shape[2], k.shape[2], q.shape[1], causal)
    if dilation.mixture == "exact":
        return softmax(q, k, v, count.sum(0))
    outs, lses = zip(*(softmax(q, k, v, each) for each in count), strict=True)
    lse = torch.stack(lses).logsumexp(0)
    alive = [(one - lse).nan_to_num(-torch.inf, neginf=-torch.inf) for one in lses]
    weights = [x.exp().detach().transpose(1, 2).unsqueeze(-1) for x in alive]
    return sum(w * out for w, out in zip(weights, outs, strict=True)), lse


def random_case(seed, world):
    """A dilation, shapes and cuts that divide nothing in particular."""
    rng = random.Random(seed)
    branches = rng.randint(1, 3)
    n, kv_heads = rng.choice([16, 24, 31, 40, 64]), rng.choice([1, 2, 3])
    dilation = Dilation(
        segment_lengths=tuple(rng.choice([3, 4, 8, 16, 32, 100]) for _ in range(branches)),
        dilation_rates=tuple(rng.choice([1, 1, 2, 3, 4, 6]) for _ in range(branches)),
        offsets=rng.choice(["mod", "block", "group"]),
        offset_heads=rng.choice(["query", "kv"]),
        mixture=rng.choice(["exact", "exact", "detached"]),
    )
    cuts = [n * (rank + 1) // world for rank in range(world - 1)]
    if rng.random() < 0.5:
        cuts = sorted(rng.choices(range(n + 1), k=world - 1))
    return {
        "dilation": dilation,
        "cuts": [0, *cuts, n],
        "batch": rng.choice([1, 2]),
        "heads": kv_heads * rng.choice([1, 2]),
        "kv_heads": kv_heads,
        "causal": rng.random() < 0.5,
        "way": rng.choice(["auto", "gather", "heads", "ring"]),
    }


def tensors(seed, case, dtype=torch.float64):
    torch.manual_seed(seed)
    n = case["cuts"][-1]
    shapes = [(case["batch"], n, case[of], 4) for of in ("heads", "kv_heads", "kv_heads", "heads")]
    return [torch.randn(shape, dtype=torch.float64).to(dtype) for shape in shapes]


def errors(ranks, seeds):
    """The largest absolute errors of out, lse and gradients, over cases and this rank's rows."""
    from meshwise.attention.dilated import dilated_attention

    worst = [0.0, 0.0, 0.0]
    for seed in seeds:
        case = random_case(seed, ranks.world_size)
        q, k, v, grad = tensors(seed, case)
        whole = [x.clone().requires_grad_() for x in (q, k, v)]
        expected, expected_lse = oracle(*whole, case["dilation"], case["causal"])
        expected.backward(grad)
        here = slice(*case["cuts"][ranks.rank : ranks.rank + 2])
        own = [x[:, here].clone().requires_grad_() for x in (q, k, v)]
        out, lse = dilated_attention(
            *own, case["dilation"], causal=case["causal"], way=case["way"], return_lse=True
        )
        out.backward(grad[:, here])
        finite = expected_lse[:, :, here] > -torch.inf
        assert torch.equal(lse > -torch.inf, finite), (seed, case)
        pairs = [(out, expected[:, here]), (lse[finite], expected_lse[:, :, here][finite])]
        found = [float((a - b).abs().max().detach()) if a.numel() else 0.0 for a, b in pairs]
        gradients = [
            float((a.grad - b.grad[:, here]).abs().max()) if a.numel() else 0.0
            for a, b in zip(own, whole, strict=True)
        ]
        found.append(max(gradients))
        assert all(x == x for x in found), (seed, case)
        worst = [max(a, b) for a, b in zip(worst, found, strict=True)]
    return worst


@pytest.mark.parametrize(("world", "count"), [(1, 60), (2, 60), (3, 50), (4, 50), (8, 15)])
def test_any_dilation_on_any_shards_is_the_softmax_over_its_multiset(gloo_ranks, world, count):
    for out, lse, gradients in gloo_ranks(world, errors, seeds=list(range(count))):
        assert out <= 1e-12 and lse <= 1e-12 and gradients <= 1e-11


def moved(ranks, seeds):
    """Bytes that the wire counted, forward and with backward, sent and received, and what the plan
    said that each rank receives."""
    from meshwise.attention.dilated import dilated_attention
    from meshwise.attention.wire import Wire

    found = []
    for seed in seeds:
        case = random_case(seed, ranks.world_size)
        here = slice(*case["cuts"][ranks.rank : ranks.rank + 2])
        own = [x[:, here].float().requires_grad_() for x in tensors(seed, case)[:3]]
        wire = Wire()
        out = dilated_attention(
            *own, case["dilation"], causal=case["causal"], way=case["way"], wire=wire
        )
        forward = wire.sent_bytes, wire.received_bytes
        out.sum().backward()
        op = LongAttention(
            batch=case["batch"], seq_len=case["cuts"][-1], heads=case["heads"],
            kv_heads=case["kv_heads"], head_dim=4, causal=case["causal"], dtype="fp32",
            dilation=case["dilation"], way=case["way"],
        )  # fmt: skip
        lengths = [b - a for a, b in zip(case["cuts"], case["cuts"][1:], strict=False)]
        said = plan.exchange_plan(op, ranks.world_size, shards.of_lengths(lengths))
        for counted, direction in (
            (forward, "forward"), ((wire.sent_bytes, wire.received_bytes), "backward"),
        ):  # fmt: skip
            found.append([list(counted), said.received_bytes(direction)])
    return found


@pytest.mark.parametrize("world", [2, 3])
def test_what_is_sent_is_what_was_planned(gloo_ranks, world):
    found = list(zip(*gloo_ranks(world, moved, seeds=list(range(12))), strict=True))
    assert any(received for of in found for (_, received), _ in of)
    for of in found:  # of all ranks
        assert all(planned == [received for (_, received), _ in of] for _, planned in of)
        assert sum(sent for (sent, _), _ in of) == sum(received for (_, received), _ in of)


def calls(ranks):
    from meshwise.attention.dilated import dilated_attention
    from meshwise.attention.wire import Wire

    wire = Wire()
    q, k, v = (torch.randn(2, 64, 6, 4, requires_grad=True) for _ in range(3))
    dilated_attention(q, k, v, SOURCE, wire=wire).sum().backward()
    return wire.collectives, wire.sent_bytes


def test_segments_inside_shards_launch_no_collective(gloo_ranks):
    assert gloo_ranks(2, calls) == [[0, 0], [0, 0]]


def numeric(ranks, dtype):
    """The relative error norm of out and of dq, dk, dv in a narrow dtype."""
    from meshwise.attention.dilated import dilated_attention

    case = {"cuts": [ranks.world_size, 64], "batch": 1, "heads": 4, "kv_heads": 4}
    q, k, v, grad = tensors(0, case, getattr(torch, dtype))
    whole = [x.double().requires_grad_() for x in (q, k, v)]
    expected, _ = oracle(*whole, SOURCE, True)
    expected.backward(grad.double())
    each = 64 // ranks.world_size
    here = slice(ranks.rank * each, (ranks.rank + 1) * each)
    own = [x[:, here].clone().requires_grad_() for x in (q, k, v)]
    out = dilated_attention(*own, SOURCE, causal=True, way="heads")
    out.backward(grad[:, here])
    pairs = [(out, expected), *((a.grad, b.grad) for a, b in zip(own, whole, strict=True))]
    return [
        [float((a.double() - b[:, here]).square().sum()), float(b[:, here].square().sum())]
        for a, b in pairs
    ]


@pytest.mark.parametrize(("dtype", "limit"), [("bfloat16", 6e-3), ("float16", 8e-4)])
def test_errors_of_narrow_dtypes_do_not_grow_with_ranks(gloo_ranks, dtype, limit):
    for world in (1, 2, 4):
        squares = torch.tensor(gloo_ranks(world, numeric, dtype=dtype)).sum(0)
        assert (squares[:, 0] / squares[:, 1]).sqrt().max() < limit, world


def strange(ranks):
    """Extreme logits, repeated runs, autocast, recomputation, a compiled model around it."""
    from torch import nn
    from torch.utils.checkpoint import checkpoint

    from meshwise.attention import RingDilatedAttention

    attention = RingDilatedAttention((8, 32), (1, 4), causal=True)
    torch.manual_seed(ranks.rank)
    x = torch.randn(1, 16, 4, 8, requires_grad=True)

    def gradient(run):
        x.grad = None
        run(x).sum().backward()
        return x.grad.clone()

    def plain(x):
        return attention(x, 2 * x, x.sin())

    first = gradient(plain)
    found = {"repeats": torch.equal(first, gradient(plain))}
    found["recomputes"] = torch.equal(
        first, gradient(lambda x: checkpoint(plain, x, use_reentrant=False))
    )

    class Around(nn.Module):
        def forward(self, x):
            return plain(x * 1.0) * 1.0

    compiled = torch.compile(Around(), backend="aot_eager")
    found["compiles"] = torch.allclose(first, gradient(compiled), atol=1e-6)
    huge = attention(x * 1e4, x * 1e4, x)
    huge.sum().backward()
    found["finite"] = bool(huge.isfinite().all() and x.grad.isfinite().all())
    with torch.autocast("cpu", torch.bfloat16):
        found["autocast"] = attention(x, x, x).dtype == torch.bfloat16
    return found


def test_it_works_inside_what_models_are_wrapped_in(gloo_ranks):
    for found in gloo_ranks(2, strange):
        assert found == dict.fromkeys(found, True)


def refusals(ranks):
    from meshwise.attention import RingDilatedAttention, dilated_attention

    def said(call):
        try:
            call()
        except ValueError as error:
            return str(error)
        return "nothing"

    x = torch.randn(1, 8, 4, 8)
    odd = torch.randn(1, 8, 4 + ranks.rank, 8)
    return [
        said(lambda: dilated_attention(odd, odd, odd, SOURCE)),
        said(lambda: dilated_attention(x, x, x, SOURCE, causal=ranks.rank == 0)),
        said(lambda: RingDilatedAttention((8, 16), (1,))),
        said(lambda: RingDilatedAttention((0,), (1,))),
        said(lambda: RingDilatedAttention((8,), (1,), ring_size=3)),
        said(lambda: RingDilatedAttention((8,), (1,), dropout=0.1)),
        said(lambda: dilated_attention(x, x, x, SOURCE, shards=shards.of_lengths([4, 12]))),
    ]


def test_what_ranks_cannot_do_all_of_them_refuse_alike(gloo_ranks):
    first, second = gloo_ranks(2, refusals)
    assert first == second
    for text, word in zip(
        first,
        ("ranks disagree", "causal", "dilation_rates", "segment_lengths", "ring_size", "dropout",
         "shards"),
        strict=True,
    ):  # fmt: skip
        assert word in text and "\n" not in text, text


def rings(ranks):
    from meshwise.attention import RingDilatedAttention

    attention = RingDilatedAttention((64,), (2,), ring_size=2)
    torch.manual_seed(7)
    q = torch.randn(1, 32, 4, 4, dtype=torch.float64)
    member = ranks.rank % 2
    out = attention(*(q[:, member * 16 : (member + 1) * 16],) * 3)
    expected, _ = oracle(q, q, q, Dilation(segment_lengths=(64,), dilation_rates=(2,)), False)
    return float((out - expected[:, member * 16 : (member + 1) * 16]).abs().max())


def test_rings_smaller_than_the_job_each_have_their_own_sequence(gloo_ranks):
    assert max(gloo_ranks(4, rings)) < 1e-12


def test_gradients_pass_gradcheck():
    from meshwise.attention.dilated import dilated_attention

    q, k, v = (torch.randn(1, 12, 2, 3, dtype=torch.float64, requires_grad=True) for _ in range(3))
    dilation = Dilation(segment_lengths=(4, 12), dilation_rates=(1, 2))

    def run(q, k, v):
        return dilated_attention(q, k, v, dilation, causal=True)

    assert torch.autograd.gradcheck(run, (q, k, v))


@pytest.mark.parametrize("way", ["gather", "ring", "heads"])
def test_every_row_is_asked_of_the_rank_that_holds_it_and_computed_once(way):
    op = LongAttention(
        batch=1, seq_len=50, heads=4, kv_heads=2, head_dim=4, causal=True,
        dilation=Dilation(segment_lengths=(20, 50), dilation_rates=(2, 3)),
    )  # fmt: skip
    cut = shards.of_lengths([13, 0, 20, 17])
    for branch in pattern.branches(op):
        pairs = set()
        for rank in range(4):
            for call in [c for each in pattern.calls(op, branch, cut, way, rank) for c in each]:
                for head, queries, keys in zip(
                    call.head.ravel(), call.queries.reshape(-1, call.queries.shape[-1]),
                    call.keys.reshape(-1, call.keys.shape[-1]), strict=True,
                ):  # fmt: skip
                    for i, q in enumerate(queries // op.heads):
                        seen = keys // op.kv_heads
                        for x in (
                            seen[: i + 1] if call.causal and len(seen) == len(queries) else seen
                        ):
                            pair = (int(head), int(q), int(x))
                            assert pair not in pairs
                            pairs.add(pair)
        count = multiset(op.dilation, 4, 2, 50, True)[branch.number]
        assert pairs == {tuple(at) for at in count.nonzero().tolist()}


def test_a_length_that_changes_is_asked_for_again(gloo_ranks):
    assert gloo_ranks(2, lengths) == [[[10, 10], [12, 12], [10, 12]]] * 2


def lengths(ranks):
    """As NCCL's ranks remember what they agreed on."""
    from unittest.mock import patch

    import torch.distributed as dist

    from meshwise.attention.wire import Wire

    wire, real = Wire(), dist.get_backend()
    found = []
    for mine in ((10, 10), (12, 12), (10, 12)):
        with (
            patch.object(torch.Tensor, "to", lambda self, *_: self),
            patch.object(dist, "get_backend", lambda group: f"{real}, nccl"),
        ):
            found.append(wire.agree({"way": "ring"}, mine[ranks.rank]))
    return found


def oddities(ranks):
    import torch.distributed as dist

    from meshwise.attention import dilated_attention, ring_attention

    x = torch.randn(1, 8, 4, 8, requires_grad=True)
    alone = dist.new_group([0])

    def said(call):
        try:
            call()
        except (ValueError, RuntimeError) as error:
            return str(error)
        return "nothing"

    def twice(attend):
        (gradient,) = torch.autograd.grad(attend(x).sum(), x, create_graph=True)
        return gradient

    found = [
        said(lambda: twice(lambda x: ring_attention(x, x, x))),
        said(lambda: twice(lambda x: dilated_attention(x, x, x, SOURCE))),
        said(lambda: ring_attention(x, x, x, causal=True, scale=-1.0)),
        said(lambda: dilated_attention(x, x, x, SOURCE, scale=0.0)),
        said(lambda: dilated_attention(x, x, x.to("meta"), SOURCE)),
    ]
    if ranks.rank == 1:
        found.append(said(lambda: ring_attention(x, x, x, group=alone)))
    return found


def test_what_would_be_silently_wrong_is_refused(gloo_ranks):
    for found in gloo_ranks(2, oddities):
        words = ("second derivative", "second derivative", "scale", "scale", "one device", "group")
        for text, word in zip(found, words, strict=False):
            assert word in text, text


def test_a_call_under_another_device_leaves_nothing_behind():
    from meshwise.attention.dilated import dilated_attention

    x = torch.randn(1, 24, 4, 8)
    dilation = Dilation(segment_lengths=(6, 24), dilation_rates=(2, 3))
    with torch.device("meta"):
        first = dilated_attention(x, x, x, dilation)
    assert torch.equal(first, dilated_attention(x, x, x, dilation))
