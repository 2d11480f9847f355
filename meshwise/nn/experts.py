"""A mixture of experts in place of a feed-forward: every token goes to ``top_k`` of them.

In: x[b,s,hidden]. Out: the sum of the chosen experts' results, each times its score, plus the
shared expert's result. Scores are a softmax over the experts (Shazeer et al. 2017; GShard; Mixtral;
DeepSeek-V2) or a sigmoid of each, with a bias that affects only the choice (DeepSeek-V3).

Rows are sorted by expert and go through one grouped product per weight. Each group starts at a
multiple of 8 rows, as grouped products on GPUs require. No group is empty, since Blackwell does not
write an empty group's gradient (pytorch/pytorch#172439). The rows between groups are zero, and the
rest of the buffer belongs to the last group, so every shape is known without asking the device. No
row is dropped.

With a capacity, an expert has equally many places for each group of tokens. Rows are in a buffer
[experts,places,hidden] and go through one batched product per weight. If an expert has no place
left, a token gets nothing from it; only the weights of its other experts are normalized to add up
(GShard: Lepikhin et al. 2021, algorithm 1, as in Alpa's ``top2_gating``).

The load balancing loss of a layer (Fedus et al. 2022, eq. 4) is n * sum over experts of its share
of the choices times its mean score. It is not returned: ``Balance`` adds its gradient in backward.
The shares are those of the whole global microbatch; ``count`` sums them over ranks.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwise.nn.initial import WEIGHT, ZEROS
from meshwise.nn.stage import activate, identity, wide
from meshwise.spec import EXPERT_ALIGNMENT as ALIGNMENT
from meshwise.spec import Experts as Sizes
from meshwise.spec.recipe import Routing


class TokenExchange(Protocol):
    """Moves rows, sorted by expert, to the ranks that hold the experts, and back."""

    def out(self, rows: Tensor, counts: Tensor) -> tuple[Tensor, Tensor, Any]:
        """Send rows [n,hidden] of all experts, with ``counts`` [experts]. Return the rows of this
        rank's experts, sorted, their counts, and a ticket for ``back``."""

    def back(self, rows: Tensor, ticket: Any) -> Tensor:
        """Send the experts' results back, in the order of the rows given to ``out``."""

    def out_equal(self, rows: Tensor) -> Tensor:
        """Send rows [experts,places,hidden]; return [own experts,places of all ranks,hidden]."""

    def back_equal(self, rows: Tensor) -> Tensor:
        """Send such rows back."""


class Here:
    """An exchange that moves nothing: all experts are on this rank."""

    def out(self, rows: Tensor, counts: Tensor) -> tuple[Tensor, Tensor, Any]:
        return rows, counts, None

    def back(self, rows: Tensor, ticket: Any) -> Tensor:
        return rows

    def out_equal(self, rows: Tensor) -> Tensor:
        return rows

    def back_equal(self, rows: Tensor) -> Tensor:
        return rows


class Routed(NamedTuple):
    """The router's choice: ``experts`` [tokens,top_k] and ``weights`` of the same shape.
    ``mean`` [experts]: the mean score of each expert. ``places``: the result of ``placed``, if
    experts have a capacity."""

    experts: Tensor
    weights: Tensor
    mean: Tensor
    places: tuple[Tensor, Tensor] | None = None


class Balance(torch.autograd.Function):
    """Returns x. In backward, the loss, which is computed separately, gets gradient ``scale``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        (gradient,) = gradients
        return gradient, torch.full((), ctx.scale, device=gradient.device), None


class Router(nn.Module):
    """Scores every token for every expert, in fp32 at least, and chooses experts."""

    starts = {"weight": WEIGHT}

    def __init__(self, hidden: int, sizes: Sizes, routing: Routing) -> None:
        super().__init__()
        self.sizes, self.routing = sizes, routing
        self.weight = nn.Parameter(torch.empty(sizes.num_experts, hidden))
        if sizes.router_bias:
            self.register_buffer("bias", torch.empty(sizes.num_experts))

    def reset_buffers(self) -> None:
        if self.sizes.router_bias:
            self.bias: Tensor
            self.bias.zero_()

    def forward(self, x: Tensor, weight: Tensor) -> Routed:
        """Route x [tokens,hidden]; ``weight``: this module's, whole."""
        sizes = self.sizes
        logits = F.linear(wide(x), wide(weight))
        scores = logits.sigmoid() if sizes.router_bias else logits.softmax(-1)
        if self.routing == "learned":
            ranking = scores + self.bias if sizes.router_bias else scores
            experts = self.in_groups(ranking).topk(sizes.top_k, dim=-1).indices
        else:
            experts = forced(len(x), sizes, self.routing, x.device)
        weights, places = scores.gather(-1, experts), None
        if sizes.capacity_factor is not None:
            places = placed(experts, sizes)
            weights = weights * (places[0] >= 0).view_as(weights)
        if sizes.normalized:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        shares = scores / scores.sum(-1, keepdim=True) if sizes.router_bias else scores
        return Routed(experts, weights * sizes.routed_scale, shares.mean(0), places)

    def in_groups(self, ranking: Tensor) -> Tensor:
        """Return the ranking [tokens,experts] with -inf outside of the best groups."""
        sizes = self.sizes
        if sizes.top_groups == sizes.groups:
            return ranking
        grouped = ranking.unflatten(-1, (sizes.groups, -1))
        best = grouped.topk(2 if sizes.router_bias else 1, dim=-1).values.sum(-1)
        seen = torch.zeros_like(best, dtype=torch.bool)
        seen = seen.scatter(-1, best.topk(sizes.top_groups, dim=-1).indices, True)
        found: Tensor = grouped.masked_fill(~seen.unsqueeze(-1), -torch.inf).flatten(-2)
        return found


def forced(tokens: int, sizes: Sizes, routing: Routing, device: torch.device) -> Tensor:
    """Choose [tokens,top_k] experts without scores: in turn, or expert e with share 1 / (e + 1)."""
    n, total = sizes.num_experts, tokens * sizes.top_k
    turn = torch.arange(total, device=device).view(tokens, sizes.top_k)
    if routing == "balanced":
        return turn % n
    edges = (1 / torch.arange(1, n + 1, device=device, dtype=torch.float32)).cumsum(0)
    golden = (turn * 0.6180339887498949) % 1.0  # equidistributed, and the same on all devices
    return torch.searchsorted(edges / edges[-1], golden.float()).clamp(max=n - 1)


def placed(experts: Tensor, sizes: Sizes) -> tuple[Tensor, Tensor]:
    """Place the copies of tokens. Return the place of each copy in [experts,groups,capacity], or -1
    if no place was left, and the copy at each place, or -1. First choices come before second ones.

    ``experts`` [tokens,top_k]; copies are numbered like its elements, row by row.
    """
    tokens, top_k = experts.shape
    if tokens % (size := sizes.group_size or 1):
        sizes.fail("group_size", f"must divide the {tokens} tokens of a rank's microbatch")
    groups, capacity, device = tokens // size, sizes.capacity, experts.device
    copies = torch.arange(experts.numel(), device=device)
    queue = experts.flatten() * groups + copies // (size * top_k)  # one queue per expert and group
    by_choice = copies.view(groups, size, top_k).transpose(1, 2).flatten()
    order = by_choice[queue[by_choice].argsort(stable=True)]
    counts = torch.zeros(sizes.num_experts * groups, dtype=torch.int64, device=device)
    counts = counts.scatter_add(0, queue, torch.ones_like(queue))
    before = counts.cumsum(0) - counts
    turn = order.argsort() - before[queue]
    place = torch.where(turn < capacity, queue * capacity + turn, -1)
    seat = torch.arange(capacity, device=device)
    at = (before.unsqueeze(1) + seat).clamp(max=len(order) - 1)
    return place, torch.where(seat < counts.unsqueeze(1), order[at], -1).flatten()


class FeedForwards(nn.Module):
    """The experts' weights, stacked. ``first``: [experts,1,ffn,hidden], or with a gate
    [experts,2,ffn,hidden], gate before up. ``down``: [experts,hidden,ffn]. Biases if the model has
    them.

    ``local``: maps a weight to the part to compute with. ``added``: maps the last bias to this
    rank's addend, if ranks compute partial sums.
    """

    starts = {"first": WEIGHT, "down": WEIGHT, "first_bias": ZEROS, "down_bias": ZEROS}

    def __init__(self, hidden: int, sizes: Sizes, *, gated: bool, bias: bool) -> None:
        super().__init__()
        n, ffn, halves = sizes.num_experts, sizes.ffn, 2 if gated else 1
        self.gated = gated
        self.first = nn.Parameter(torch.empty(n, halves, ffn, hidden))
        self.down = nn.Parameter(torch.empty(n, hidden, ffn))
        self.first_bias = nn.Parameter(torch.empty(n, halves, ffn)) if bias else None
        self.down_bias = nn.Parameter(torch.empty(n, hidden)) if bias else None
        self.local: Callable[[Tensor], Tensor] = identity
        self.added: Callable[[Tensor], Tensor] = identity

    def forward(self, rows: Tensor, counts: Tensor | None) -> Tensor:
        """Turn rows [n,hidden], sorted by expert with ``counts`` [experts], into [n,hidden].
        Without counts, turn [experts,places,hidden] into the same shape."""
        first, down = self.local(self.first).flatten(1, 2), self.local(self.down)
        first_bias = down_bias = None
        if self.first_bias is not None and self.down_bias is not None:
            first_bias = self.local(self.first_bias).flatten(1)
            down_bias = self.added(self.down_bias)
        if counts is None:
            x = batched(rows, first, first_bias)
            return batched(_activated(x, self.gated), down, down_bias)
        place, source, offsets = padded(counts, len(rows))
        x = move(rows, source, place)
        x = product(x, first, offsets, first_bias)
        x = product(_activated(x, self.gated), down, offsets, down_bias)
        return move(x, place, source)


class MoveRows(torch.autograd.Function):
    """Moves rows by reading at indices, forward and backward. Scattered writes are many times
    slower on GPUs."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, there: Tensor, back: Tensor, copies: int, lossy: bool
    ) -> Tensor:
        ctx.save_for_backward(back)
        ctx.copies, ctx.lossy = copies, lossy
        return _rows(x, there, lossy or len(there) > len(x) * copies)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None]:
        (back,), (gradient,) = ctx.saved_tensors, gradients
        found = _rows(gradient, back, ctx.lossy or len(back) > len(gradient))
        if ctx.copies > 1:
            found = found.unflatten(0, (-1, ctx.copies)).sum(1)
        return found, None, None, None, None


def move(x: Tensor, there: Tensor, back: Tensor, copies: int = 1, *, lossy: bool = False) -> Tensor:
    """Move row ``there[i]`` of x to row i of the result; -1 gives a row of 0. ``back``: the places
    of each row of x, ``copies`` in a row. ``lossy``: some rows of x are dropped."""
    return MoveRows.apply(x, there, back, copies, lossy)  # type: ignore[no-any-return,no-untyped-call]


def _rows(x: Tensor, index: Tensor, some_absent: bool) -> Tensor:
    """Pick rows of x; index -1 gives a row of 0."""
    if not some_absent:
        return x.index_select(0, index)
    if not len(x):  # no expert of this rank has a token
        return x.new_zeros(len(index), x.shape[1])
    found = x.index_select(0, index.clamp(min=0))
    return found.masked_fill((index < 0).unsqueeze(1), 0)


def padded(counts: Tensor, n: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the place of each of n sorted rows in a buffer with room for any sizes of groups, the
    row at each of the buffer's places (-1: none), and the end of each expert's group there."""
    room = n + ALIGNMENT * len(counts)
    padded_counts = (counts.clamp(min=1) + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
    ends, padded_ends = counts.cumsum(0), padded_counts.cumsum(0)
    gaps = padded_ends - padded_counts - ends + counts  # before each expert's rows
    row = torch.arange(n, device=counts.device)
    place = row + gaps[torch.searchsorted(ends, row, right=True)]
    source = row.new_full((room,), -1).scatter(0, place, row)
    offsets = padded_ends.to(torch.int32)
    offsets[-1] = room
    return place, source, offsets


def _activated(x: Tensor, gated: bool) -> Tensor:
    """Return silu(gate) * up for x = [gate, up], or gelu(x)."""
    return activate(x.chunk(2, -1) if gated else (x,))


def product(x: Tensor, weight: Tensor, offsets: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply x [n,k] by weight [groups,out,k] -> [n,out]. Rows of group g end at
    ``offsets[g]``."""
    in_fp32 = (
        x.device.type == "cpu" and not torch.compiler.is_compiling()
    )  # compiled code knows bf16 only
    dtypes = (torch.bfloat16, *([torch.float32] if in_fp32 else []))
    aligned = all(width * x.element_size() % 16 == 0 for width in weight.shape[1:])
    if x.dtype in dtypes and aligned:
        y = F.grouped_mm(x, weight.transpose(-2, -1), offs=offsets)
    else:  # there is no grouped kernel
        ends = offsets.tolist()
        groups = zip([0, *ends[:-1]], ends, weight, strict=True)
        y = torch.cat([F.linear(x[start:end], w) for start, end, w in groups])
    if bias is None:
        return y
    group = torch.searchsorted(offsets, torch.arange(len(x), device=x.device), right=True)
    one_hot = group.unsqueeze(1) == torch.arange(len(bias), device=x.device)
    return torch.addmm(y, one_hot.to(y.dtype), bias)  # so the bias' gradient is a product, too


class Batched(torch.autograd.Function):
    """x [experts,n,k], weight [experts,out,k], bias [experts,out] -> [experts,n,out].

    The weight's gradient has the weight's memory layout; that of ``torch.bmm`` would be copied.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.biased = bias is not None
        if bias is None:
            return torch.bmm(x, weight.mT)
        return torch.baddbmm(bias.unsqueeze(1), x, weight.mT)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        (x, weight), (dy,) = ctx.saved_tensors, gradients
        return torch.bmm(dy, weight), torch.bmm(dy.mT, x), dy.sum(1) if ctx.biased else None


def batched(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return Batched.apply(x, weight, bias)  # type: ignore[no-any-return,no-untyped-call]


class SharedExpert(nn.Module):
    """A feed-forward for every token, times a score if the model has one (Qwen).

    ``added``: as in ``FeedForwards``.
    """

    def __init__(self, hidden: int, sizes: Sizes, *, gated: bool, bias: bool) -> None:
        super().__init__()
        self.gate = nn.Linear(hidden, sizes.shared_ffn, bias) if gated else None
        self.up = nn.Linear(hidden, sizes.shared_ffn, bias)
        self.down = nn.Linear(sizes.shared_ffn, hidden, bias)
        self.score = nn.Linear(hidden, 1, bias=False) if sizes.shared_gate else None
        self.added: Callable[[Tensor], Tensor] = identity

    def forward(self, x: Tensor, local: Callable[[Tensor], Tensor]) -> Tensor:
        def product(linear: nn.Linear, x: Tensor, biased: Callable[..., Tensor] = local) -> Tensor:
            bias = None if linear.bias is None else biased(linear.bias)
            return F.linear(x, local(linear.weight), bias)

        up = product(self.up, x)
        first = torch.cat([product(self.gate, x), up], -1) if self.gate else up
        y = product(self.down, _activated(first, self.gate is not None), self.added)
        return y if self.score is None else y * product(self.score, x).sigmoid()


class MoE(nn.Module):
    """The experts' part of a layer: router, experts, shared expert.

    Set these if ranks share the work: ``exchange``; ``count``, which maps this rank's counts of
    choices [experts] to the global microbatch's; ``local``, as in ``FeedForwards``.
    ``balance_scale``: weight of the load balancing loss in this rank's loss; 0 leaves it out.
    """

    def __init__(
        self, hidden: int, sizes: Sizes, *, gated: bool, bias: bool, routing: Routing = "learned"
    ) -> None:
        super().__init__()
        self.sizes = sizes
        self.router = Router(hidden, sizes, routing)
        self.experts = FeedForwards(hidden, sizes, gated=gated, bias=bias)
        self.shared = None
        if sizes.shared_ffn:
            self.shared = SharedExpert(hidden, sizes, gated=gated, bias=bias)
        self.exchange: TokenExchange = Here()
        self.count: Callable[[Tensor], Tensor] = identity
        self.local: Callable[[Tensor], Tensor] = identity
        self.balance_scale = 0.0

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, -2)
        chosen = self.router(tokens, self.local(self.router.weight))
        y = self.routed(tokens, chosen)
        if self.shared is not None:
            y = y + self.shared(tokens, self.local)
        return y.view_as(x)

    def routed(self, x: Tensor, chosen: Routed) -> Tensor:
        """Send x [tokens,hidden] through the chosen experts."""
        n, top_k = self.sizes.num_experts, self.sizes.top_k
        flat, limited = chosen.experts.flatten(), chosen.places is not None
        counts = torch.zeros(n, dtype=torch.int64, device=x.device)
        counts = counts.scatter_add(0, flat, torch.ones_like(flat))
        x = self.balanced(x, chosen, counts)
        if chosen.places is None:
            order = flat.argsort(stable=True)
            place = order.argsort()
        else:
            place, order = chosen.places
        rows = move(x, order // top_k, place, top_k, lossy=limited)
        if limited:
            rows = self.exchange.out_equal(rows.unflatten(0, (n, -1)))
            rows = self.exchange.back_equal(self.experts(rows, None)).flatten(0, 1)
        else:
            rows, local, ticket = self.exchange.out(rows, counts)
            rows = self.exchange.back(self.experts(rows, local), ticket)
        picked = move(rows, place, order, lossy=limited).view(len(x), top_k, -1)
        return (picked * chosen.weights.to(x.dtype).unsqueeze(-1)).sum(1)

    def balanced(self, x: Tensor, chosen: Routed, counts: Tensor) -> Tensor:
        """Return x, with the gradient of the load balancing loss tied to it."""
        if not self.balance_scale or not torch.is_grad_enabled():
            return x
        total = self.count(counts).to(chosen.mean.dtype)
        loss = self.sizes.num_experts * (total / total.sum() * chosen.mean).sum()
        return Balance.apply(x, loss, self.balance_scale)  # type: ignore[no-any-return,no-untyped-call]
