"""Dilated attention over the ranks of a group, with a hand-written backward.

In: this rank's rows of q [B, L, H, D], k and v [B, L, Hkv, D], in contiguous shards. Out: out like
q and the log-sum-exp [B, H, L]. ``spec.long_attention`` defines the operation; ``schedule`` says
which rank computes what. A call:

    1  fetches the remote rows of branches that span shards, in one exchange per round
    2  meanwhile computes branches inside shards, and the local part of the others
    3  computes the rest as rows arrive; by heads, it returns results to the ranks of the queries
    4  mixes all results of a query by their log-sum-exp, once

The backward mirrors the forward. Each block's backward takes out and log-sum-exp of the whole mix,
so that the block gradients add up to the exact gradient. With ``detached`` it takes those of its
branch, and the gradient of out times the branch's weight.
"""

import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from meshwise.attention import rows
from meshwise.attention.arguments import agreed, no_view, refuse_second_derivatives, uncompiled
from meshwise.attention.kernels import attend, attend_backward
from meshwise.attention.merge import wide
from meshwise.attention.plan import SPARSE_WAYS, exchange_plan
from meshwise.attention.rows import RowPart, select, unselect
from meshwise.attention.schedule import Batch, RankBranch, Schedule, schedule
from meshwise.attention.shards import Shards, of_lengths
from meshwise.attention.wire import Wire, wire_of
from meshwise.prices import Prices
from meshwise.spec import Dilation, LongAttention
from meshwise.spec.long_attention import Way

WAYS = ("auto", *SPARSE_WAYS)
Rows = Sequence[Tensor]  # q, k and v, each [B, rows, heads, D]


class Mix(NamedTuple):
    """Inputs of a branch's block backwards: grad and out [B, rows, H, D], lse [B, rows, H]."""

    grad: Tensor
    out: Tensor
    lse: Tensor


@uncompiled
def dilated_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dilation: Dilation,
    *,
    group: dist.ProcessGroup | None = None,
    wire: Wire | None = None,
    causal: bool = False,
    shards: Shards | None = None,
    scale: float | None = None,
    prices: Prices | None = None,
    way: Way = "auto",
    return_lse: bool = False,
) -> Any:
    """Return out [B, L, H, D]; with ``return_lse`` also lse [B, H, L], which has no gradient.

    ``shards``: contiguous. By default each is as long as its rank's q, and the ranks exchange these
    lengths in every call; pass ``shards`` in training. ``way``: gather, heads or ring, for branches
    whose segments span ranks; auto picks one per branch by ``prices``, else by bytes. A row that no
    branch keeps is 0, its lse -inf. All ranks raise ValueError if shapes, options or prices differ.
    """
    wire = wire_of(group, wire)
    call = agreed(
        q, k, v, wire, lambda: wrong_way(way), return_lse, dilation=dilation, causal=causal,
        shards=shards, scale=scale, prices=prices, way=way,
    )  # fmt: skip
    if call.shards != of_lengths(call.lengths):
        raise ValueError(
            f"shards = {call.shards.intervals}: ranks hold {call.lengths} tokens; give contiguous "
            "shards"
        )
    op = call.op(causal=causal, dilation=dilation, way=way)
    ways = _ways(op, call.shards, prices)
    planned = schedule(op, call.shards, ways, wire.rank, call.q.device)
    out, lse = _Dilated.apply(  # type: ignore[no-untyped-call]
        call.q, call.k, call.v, planned, wire, call.scale
    )
    return (out, lse.transpose(1, 2)) if return_lse else out


def wrong_way(way: str) -> str:
    """Describe the fault of an unknown way; empty if the way exists."""
    return "" if way in WAYS else f"way = {way!r}: must be one of {', '.join(WAYS)}"


@functools.lru_cache(64)
def _ways(op: LongAttention, shards: Shards, prices: Prices | None) -> tuple[str, ...]:
    return exchange_plan(op, len(shards.lengths), shards, prices).ways


class _Dilated(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[no-untyped-def]
        ctx, q: Tensor, k: Tensor, v: Tensor, planned: Schedule, wire: Wire, scale: float
    ):
        run = _Run(planned, wire, scale)
        out, lse, mixes, arrived = run.forward([x.contiguous() for x in (q, k, v)])
        ctx.save_for_backward(q, k, v, out, lse, *mixes, *arrived)
        ctx.run, ctx.num_mixes = run, len(mixes)
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx, grad: Tensor, _: Tensor):  # type: ignore[no-untyped-def]
        refuse_second_derivatives()
        q, k, v, out, lse, *rest = ctx.saved_tensors
        mixes, arrived = rest[: ctx.num_mixes], rest[ctx.num_mixes :]
        grads = ctx.run.backward(
            [x.contiguous() for x in (q, k, v)], Mix(grad.contiguous(), out, lse), mixes, arrived
        )
        return *grads, None, None, None


class _Run(NamedTuple):
    """One call on one rank."""

    planned: Schedule
    wire: Wire
    scale: float

    def forward(self, own: Rows) -> tuple[Tensor, Tensor, list[Tensor], list[Tensor]]:
        """Return out, lse; for the backward, branches' out and lse (``detached``), fetched rows."""
        parts: dict[int, list[RowPart]] = defaultdict(list)
        arrived: list[Tensor] = []
        pending = self._start(own, 0)
        for branch in self.planned.branches:
            if branch.way != "heads":
                self._compute(branch.rounds[0], own, own, parts[branch.number])
        for number in range(self.planned.num_rounds):
            came = self._take_in(pending(), number)
            if number + 1 < self.planned.num_rounds:
                pending = self._start(own, number + 1)
            returned = []
            for branch, rows_of in came:
                arrived += rows_of
                if branch.way == "heads":
                    returned.append((branch, *self._of_heads(branch, rows_of)))
                else:
                    batches = branch.rounds[number + 1]
                    keys = (own[0], *(_as_heads(x) for x in rows_of))
                    self._compute(batches, own, keys, parts[branch.number])
            self._bring_home(returned, parts)
        like = own[0].flatten(1, 2)
        out, lse = rows.combine([part for of in parts.values() for part in of], like)
        mixes: list[Tensor] = []
        if self.planned.op.dilation.mixture == "detached":  # type: ignore[union-attr]
            for branch in self.planned.branches:
                mixes += rows.combine(parts[branch.number], like)
        heads = own[0].shape[2]
        out, lse = (no_view(x.unflatten(1, (-1, heads))) for x in (out, lse))
        return out, lse, mixes, arrived

    def backward(
        self, own: Rows, whole: Mix, mixes: Sequence[Tensor], arrived: Sequence[Tensor]
    ) -> list[Tensor]:
        """Return dq, dk, dv of this rank's rows."""
        of_branch = self._mixes(whole, mixes)
        pending = self._send_for_mixes(of_branch)
        parts: list[list[RowPart]] = [[], [], []]  # dq; dk and dv, one row per query head
        shared: list[list[RowPart]] = [[], []]  # dk and dv, one row per key head
        for branch in self.planned.branches:
            if branch.way != "heads":
                mix = of_branch[branch.number]
                for batch in branch.rounds[0]:
                    dq, dk, dv = self._back(batch, own, own, mix)
                    parts[0].append(RowPart(dq, batch.query_places))
                    to = shared if batch.shares else parts[1:]
                    for of, x in zip(to, (dk, dv), strict=True):
                        of.append(RowPart(x, batch.key_places))
        self._backward_of_others(own, of_branch, pending, list(arrived), parts[0], shared)
        dq = rows.total(parts[0], own[0].flatten(1, 2)).unflatten(1, own[0].shape[1:3])
        return [dq, *(self._key_gradient(own, parts[i + 1], shared[i], own[i + 1]) for i in (0, 1))]

    # ---- forward's pieces

    def _start(self, own: Rows, number: int) -> Callable[[], list[Tensor]]:
        """Start to fetch a round's rows: k and v of every branch, and q of branches by heads."""
        wanted = []
        for branch in self._remote(number):
            if branch.way == "heads":
                wanted.append((branch.queries, own[0].flatten(1, 2)))
            wanted += [(branch.keys[number], x.flatten(1, 2)) for x in own[1:]]
        return rows.fetch(self.wire, wanted)

    def _remote(self, number: int) -> list[RankBranch]:
        return [branch for branch in self.planned.branches if number < len(branch.keys)]

    def _take_in(self, came: list[Tensor], number: int) -> list[tuple[RankBranch, list[Tensor]]]:
        tensors = iter(came)
        return [
            (branch, [next(tensors) for _ in range(3 if branch.way == "heads" else 2)])
            for branch in self._remote(number)
        ]

    def _compute(
        self, batches: Iterable[Batch], queries: Rows, keys: Rows, into: list[RowPart]
    ) -> None:
        for batch in batches:
            q = select(queries[0], batch.query)
            k, v = (select(x, batch.key) for x in keys[1:])
            out, lse = attend(q, k, v, causal=batch.causal, scale=self.scale)
            into.append(
                RowPart(
                    unselect(out, batch.query, len(queries[0])),
                    batch.query_places,
                    unselect(lse.unsqueeze(-1), batch.query, len(queries[0])).squeeze(-1),
                )
            )

    def _of_heads(self, branch: RankBranch, rows_of: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Return out [B, rows, D] and lse [B, rows] of the queries that other ranks sent here."""
        found: list[RowPart] = []
        came = [_as_heads(x) for x in rows_of]
        self._compute(branch.rounds[0], came, came, found)
        if not found:
            empty = rows_of[0]
            return empty, empty.new_zeros(empty.shape[:-1], dtype=wide(empty.dtype))
        return rows.combine(found, rows_of[0])

    def _bring_home(
        self, returned: Sequence[tuple[RankBranch, Tensor, Tensor]], parts: dict[int, list[RowPart]]
    ) -> None:
        if not returned:
            return
        outs = rows.give_back(self.wire, [(b.queries, out) for b, out, _ in returned])
        lses = rows.give_back(self.wire, [(b.queries, lse.unsqueeze(-1)) for b, _, lse in returned])
        for (branch, _, _), out, lse in zip(returned, outs(), lses(), strict=True):
            parts[branch.number].append(RowPart(out, branch.returned, lse.squeeze(-1)))

    # ---- backward's pieces

    def _mixes(self, whole: Mix, mixes: Sequence[Tensor]) -> dict[int, Mix]:
        if not mixes:
            return {branch.number: whole for branch in self.planned.branches}
        found = {}
        heads = whole.out.shape[2]
        pairs = zip(mixes[::2], mixes[1::2], strict=True)
        for branch, (out, lse) in zip(self.planned.branches, pairs, strict=True):
            out, lse = (x.unflatten(1, (-1, heads)) for x in (out, lse))
            alive = lse != -torch.inf
            weight = (lse - whole.lse).masked_fill(~alive, -torch.inf).exp()
            grad = (whole.grad * weight.unsqueeze(-1)).to(whole.grad.dtype)
            found[branch.number] = Mix(grad, out, lse)
        return found

    def _send_for_mixes(self, of_branch: dict[int, Mix]) -> Callable[[], list[Mix]]:
        """Start to fetch gradient, out and lse of queries computed here, for branches by heads."""
        asked = [branch for branch in self.planned.branches if branch.way == "heads"]
        wanted, wanted_lse = [], []
        for branch in asked:
            grad, out, lse = of_branch[branch.number]
            wanted += [(branch.queries, x.flatten(1, 2)) for x in (grad, out)]
            wanted_lse.append((branch.queries, lse.flatten(1, 2).unsqueeze(-1)))
        pending, pending_lse = (rows.fetch(self.wire, each) for each in (wanted, wanted_lse))

        def arrived() -> list[Mix]:
            came = [_as_heads(x) for x in pending()]
            lses = pending_lse()
            pairs = zip(came[::2], came[1::2], strict=True)
            return [Mix(grad, out, lse) for (grad, out), lse in zip(pairs, lses, strict=True)]

        return arrived

    def _backward_of_others(
        self,
        own: Rows,
        of_branch: dict[int, Mix],
        pending: Callable[[], list[Mix]],
        arrived: list[Tensor],
        query_parts: list[RowPart],
        key_parts: list[list[RowPart]],
    ) -> None:
        """Run the backward of rows fetched in the forward; send their gradients back."""
        came = iter(pending())
        made: list[tuple[list[RowPart], rows.Fetch, Tensor]] = []  # the list takes returned parts
        for number in range(self.planned.num_rounds):
            for branch in self._remote(number):
                count = 3 if branch.way == "heads" else 2
                rows_of, arrived = [_as_heads(x) for x in arrived[:count]], arrived[count:]
                sums = [
                    x.new_zeros(x.shape[:2] + x.shape[3:], dtype=wide(x.dtype)) for x in rows_of
                ]
                if branch.way == "heads":
                    mix = next(came)
                    for batch in branch.rounds[0]:
                        grads = self._back(batch, rows_of, rows_of, mix)
                        _add(sums, grads, (batch.query, batch.key, batch.key))
                    sums = [x.to(own[0].dtype) for x in sums]
                    made.append((query_parts, branch.queries, sums.pop(0)))
                else:
                    keys, mix = [own[0], *rows_of], of_branch[branch.number]
                    for batch in branch.rounds[number + 1]:
                        dq, *grads = self._back(batch, own, keys, mix)
                        query_parts.append(RowPart(dq, batch.query_places))
                        _add(sums, grads, (batch.key, batch.key))
                made += zip(key_parts, [branch.keys[number]] * 2, sums, strict=True)
        by_dtype: dict[torch.dtype, list[tuple[list[RowPart], rows.Fetch, Tensor]]] = defaultdict(
            list
        )
        for each in made:
            by_dtype[each[2].dtype].append(each)
        for dtype in sorted(by_dtype, key=str):
            home = rows.give_back(self.wire, [each[1:] for each in by_dtype[dtype]])()
            for (into, wanted, _), x in zip(by_dtype[dtype], home, strict=True):
                into += rows.returned_parts(wanted, x)

    def _back(self, batch: Batch, queries: Rows, keys: Rows, mix: Mix) -> list[Tensor]:
        grad, q, out = (select(x, batch.query) for x in (mix.grad, queries[0], mix.out))
        lse = select(mix.lse.unsqueeze(-1), batch.query).squeeze(-1)
        k, v = (select(x, batch.key) for x in keys[1:])
        grads = attend_backward(grad, q, k, v, out, lse, causal=batch.causal, scale=self.scale)
        sides = (batch.query, batch.key, batch.key)
        sources = (queries[0], keys[1], keys[2])
        return [unselect(x, at, len(of)) for x, at, of in zip(grads, sides, sources, strict=True)]

    def _key_gradient(
        self, own: Rows, by_query: list[RowPart], by_key: list[RowPart], like: Tensor
    ) -> Tensor:
        groups = own[0].shape[2] // like.shape[2]
        if by_query and groups == 1:
            return rows.total(by_query + by_key, like.flatten(1, 2)).view_as(like)
        found = rows.total(by_key, like.flatten(1, 2)).view_as(like)
        if by_query:
            each = rows.total(by_query, own[0].flatten(1, 2)).view_as(own[0])
            found = found + each.unflatten(2, (like.shape[2], groups)).sum(3)
        return found


def _add(sums: Sequence[Tensor], grads: Sequence[Tensor], where: Sequence[Any]) -> None:
    for into, x, at in zip(sums, grads, where, strict=True):
        into.index_add_(1, at.flatten(), x.to(into.dtype))


def _as_heads(x: Tensor) -> Tensor:
    """View fetched rows [B, rows, D] as tokens of one head."""
    return x.unsqueeze(2)
