"""Parts of a softmax merged, against float64: in units of the last place of the largest value."""

import math

import numpy as np
import pytest
import torch

from meshwise.attention import rows
from meshwise.attention.blocks import add_gradients, attend_pieces, zeros_of
from meshwise.attention.merge import merge, nothing, result
from meshwise.attention.pieces import MaskPiece

LSES = [0, 10, 1e3, 3.7e3, 3e4, 1e6]
COUNTS = [2, 3, 8, 64, 1000]
MOST_ULP = 4


def parts_of(lse, count, spread, dead, ones=False, num_rows=128, width=16):
    """Values [count, 1, rows, width] and their lse in fp32; a row of a part is dead by chance."""
    draw = torch.Generator().manual_seed(count)
    shape = (count, 1, num_rows)
    lses = (lse + spread * torch.randn(shape, generator=draw, dtype=torch.float64)).float()
    lses[torch.rand(shape, generator=draw) < dead] = -torch.inf
    values = torch.randn(*shape, width, generator=draw)
    return torch.ones_like(values) if ones else values, lses


def expected(values, lses):
    weights = lses.double().softmax(0).nan_to_num(0)  # NaN: all parts are dead
    return (weights.unsqueeze(-1) * values.double()).sum(0), lses.double().logsumexp(0)


def one_by_one(values, lses):
    so_far = nothing(values[0].shape, values.device)
    for part, lse in zip(values, lses, strict=True):
        merge(so_far, part, lse)
    return result(so_far, values[0])


def together(values, lses):
    """As rows of dilated attention, in places of their own: each part's are in another order."""
    size, parts = values.shape[2], []
    for number, (part, lse) in enumerate(zip(values, lses, strict=True)):
        order = torch.randperm(size, generator=torch.Generator().manual_seed(number))
        at = rows.places(order.to(torch.int32), size, 1, values.device)
        parts.append(rows.RowPart(part[:, order], at, lse[:, order]))
    return rows.combine(parts, values[0])


def ulps(found, exact):
    return float((found.double() - exact).abs().max() / np.spacing(np.float32(exact.abs().max())))


@pytest.mark.parametrize("merged", [one_by_one, together])
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("lse", LSES)
def test_merging_adds_next_to_nothing_at_any_size_and_number(merged, lse, count):
    for spread, dead in ((0, 0), (1e-3, 0), (1, 0), (1, 0.5), (20, 0.1), (lse / 2, 0.1)):
        values, lses = parts_of(lse, count, spread, dead)
        out, total = merged(values, lses)
        exact, exact_lse = expected(values, lses)
        assert ulps(out, exact) <= MOST_ULP, (spread, dead)
        alive = exact_lse > -torch.inf
        assert torch.equal(total > -torch.inf, alive)
        assert torch.equal(total[alive], exact_lse[alive].float())  # rounded once


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("count", COUNTS)
def test_values_of_1_stay_1(count, dtype):
    for lse in LSES:
        values, lses = parts_of(lse, count, 2, 0.1, ones=True)
        lse_dtype = torch.float64 if dtype == torch.float64 else torch.float32
        for merged in (one_by_one, together):
            out, total = merged(values.to(dtype), lses.to(lse_dtype))
            assert torch.equal(out, (total > -torch.inf).to(dtype).unsqueeze(-1).expand_as(out))


def test_rows_without_a_key_are_0_and_those_of_infinite_scores_take_all():
    values, lses = torch.randn(3, 1, 4, 8), torch.zeros(3, 1, 4)
    lses[:, :, 0] = -torch.inf
    lses[1, :, 1] = torch.inf
    lses[:2, :, 2] = -torch.inf
    for merged in (one_by_one, together):
        out, total = merged(values, lses)
        assert total[0].tolist() == [-math.inf, math.inf, 0.0, float(torch.tensor(3.0).log())]
        assert torch.equal(out[0, 0], torch.zeros(8))
        assert torch.equal(out[0, 1], values[1, 0, 1]) and torch.equal(out[0, 2], values[2, 0, 2])


# ---- blocks of keys, forward and backward, beside one call of the same kernel


def block_errors(size, blocks, dtype=torch.float32, ones=False):
    """Error norms of out, dq, dk, dv: of ``blocks`` blocks of keys; of one call. Relative; where
    values are all 1, and so no score has a gradient, to those of dv."""
    draw = torch.Generator().manual_seed(blocks)
    q, k, v, grad = (torch.randn(2, 4, 192, 32, generator=draw) for _ in range(4))
    q[..., 0] = k[..., 0] = math.sqrt(size)  # of every score, so that |lse| is about ``size``
    v = torch.ones_like(v) if ones else v
    q, k, v, grad = (x.to(dtype) for x in (q, k, v, grad))
    exact = [x.double().requires_grad_() for x in (q, k, v)]
    weights = (exact[0] @ exact[1].mT).softmax(-1)
    (weights @ exact[2]).backward(grad.double())
    goal = [(weights @ exact[2]).detach(), *(x.grad for x in exact)]
    each = 192 // blocks
    pieces = tuple(MaskPiece(0, 192, i * each, (i + 1) * each, "full") for i in range(blocks))
    found = []
    for cut in (pieces, (MaskPiece(0, 192, 0, 192, "full"),)):
        out, lse = result(attend_pieces(q, k, v, cut, 1.0), q)
        totals = [zeros_of(x) for x in (q, k, v)]
        add_gradients(grad, q, k, v, out, lse, cut, 1.0, totals)
        made = [out, *(x.to(dtype) for x in totals)]
        found.append(
            [
                float((a - b).norm() / (goal[3] if ones else b).norm())
                for a, b in zip(made, goal, strict=True)
            ]
        )
    return found


@pytest.mark.parametrize("blocks", [2, 8, 64])
@pytest.mark.parametrize("size", [0, 100, 3700, 3e4])
def test_gradients_of_blocks_are_no_worse_than_those_of_one_call(size, blocks):
    of_blocks, of_one = block_errors(size, blocks)
    for name, ours, stock in zip(("out", "dq", "dk", "dv"), of_blocks, of_one, strict=True):
        if name == "dq" and size > 100:
            continue  # the kernel rounded each block's lse, and all keys share a large component
        assert ours <= 1.2 * stock, name


@pytest.mark.parametrize("blocks", [2, 8, 64])
@pytest.mark.parametrize("size", LSES)
def test_blocks_of_equal_values_give_these_and_no_gradient_of_scores(size, blocks):
    of_blocks, of_one = block_errors(size, blocks, ones=True)
    for ours, stock in zip(of_blocks, of_one, strict=True):
        assert ours <= max(1.2 * stock, 5e-7)
