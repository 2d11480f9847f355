"""Expert parallelism by hand: rows to the ranks of their experts and back, however routed.

The oracle is the same layer with all experts on each rank, whose weights' gradients are summed over
ranks.
"""

import copy

import pytest
import torch
import torch.distributed as dist

from meshwise.nn.experts import MoE, Routed
from meshwise.parallel.experts import AllToAll
from meshwise.spec import Experts

pytestmark = pytest.mark.dist

HIDDEN, TOKENS, NUM_EXPERTS, TOP_K = 16, 10, 8, 2
WEIGHTS = ("first", "down", "first_bias", "down_bias")


def chosen_by(routing, rank):
    """[TOKENS, TOP_K] experts that a rank's tokens go to."""
    if routing == "random":
        scores = torch.rand(TOKENS, NUM_EXPERTS, generator=torch.Generator().manual_seed(rank))
        return scores.topk(TOP_K).indices
    ends = {"first": (0, 1), "last": (NUM_EXPERTS - 1, NUM_EXPERTS - 2)}
    pair = ends[routing] if routing in ends else ends["first" if rank else "last"]
    return torch.tensor(pair).repeat(TOKENS, 1)


def errors(ranks, routing):
    """How far the results, the tokens' gradients and the weights' are apart on this rank."""
    torch.manual_seed(0)
    sizes = Experts(num_experts=NUM_EXPERTS, top_k=TOP_K, ffn=24)
    whole = MoE(HIDDEN, sizes, gated=True, bias=True).double()
    for parameter in whole.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    divided = copy.deepcopy(whole)
    divided.exchange = AllToAll(dist.group.WORLD, ranks.world_size)
    for name in WEIGHTS:
        mine = getattr(whole.experts, name).detach().chunk(ranks.world_size)[ranks.rank].clone()
        setattr(divided.experts, name, torch.nn.Parameter(mine))

    torch.manual_seed(1 + ranks.rank)
    x, dy = torch.randn(2, TOKENS, HIDDEN, dtype=torch.float64)
    experts = chosen_by(routing, ranks.rank)
    found = []
    for moe in (whole, divided):
        mine = x.clone().requires_grad_()
        weights = torch.linspace(0.2, 0.8, TOKENS * TOP_K).view(TOKENS, TOP_K).double()
        y = moe.routed(mine, Routed(experts, weights, torch.full((NUM_EXPERTS,), 1 / NUM_EXPERTS)))
        y.backward(dy)
        found.append([y, mine.grad])
    for name in WEIGHTS:
        due = getattr(whole.experts, name).grad
        dist.all_reduce(due)
        part = due.chunk(ranks.world_size)[ranks.rank]
        got = getattr(divided.experts, name).grad
        found[0].append(part / ranks.world_size)  # data parallelism multiplies a mean again
        found[1].append(torch.zeros_like(part) if got is None else got)
    return [(a - b).abs().max().item() for a, b in zip(*found, strict=True)]


@pytest.mark.parametrize("routing", ["random", "first", "last", "crossed"])
@pytest.mark.parametrize("world", [2, 4])
def test_rows_return_whatever_rank_has_none(gloo_ranks, world, routing):
    for of_rank in gloo_ranks(world, errors, routing=routing):
        assert max(of_rank) < 1e-12
