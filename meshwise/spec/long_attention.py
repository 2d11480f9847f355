"""Attention over sequences that several ranks share: dense, or dilated as in LongNet.

Dilated attention (Ding et al. 2023, arXiv 2307.02486): branch i cuts the sequence into segments of
w_i tokens and keeps every r_i-th row of each segment, from an offset s that depends on the head. In
every branch that keeps it, a query attends the kept keys of its own segment. The branches are mixed
by their softmax denominators. That equals one softmax over the multiset of all these keys:

    head h is kept at p by branch i  iff  (p mod w_i) mod r_i = s_i(h)
    M[h,p,x] = number of branches that keep h at p and at x, in one segment (x <= p if causal)
    out[h,p] = sum_x M exp(a(p,x)) v_x / sum_x M exp(a(p,x)),   a = q.k / sqrt(head_dim)

A row that no branch keeps is dead: its out is 0 and its log-sum-exp -inf.
"""

from typing import Literal

from meshwise.spec.op import DTYPE_BYTES, Direction, Dtype
from meshwise.spec.record import Count, Exact, Length

Way = Literal["auto", "ring", "gather", "heads", "ring_heads"]
WAYS: tuple[Way, ...] = ("auto", "ring", "gather", "heads", "ring_heads")


class Dilation(Exact, kw_only=True):
    """The rows that each head keeps, in each branch.

    ``offsets``: ``mod``: s = h mod r (the paper's). ``block``: s = h // ceil(heads / r)
    (torchscale's). ``group``: the heads are divided among the branches and s = branch mod r
    (fkodom's); if they do not divide evenly, the last branches get one more. ``offset_heads``: h
    counts query heads, or key-value heads; then query heads that share keys also share rows.
    ``mixture``: ``exact`` differentiates through the mix; ``detached`` keeps the weights of the
    branches constant in the backward (torchscale's).
    """

    segment_lengths: tuple[Length, ...]
    dilation_rates: tuple[Length, ...]
    offsets: Literal["mod", "block", "group"] = "mod"
    offset_heads: Literal["query", "kv"] = "query"
    mixture: Literal["exact", "detached"] = "exact"

    def check(self) -> None:
        if not self.segment_lengths:
            self.fail("segment_lengths", "give one segment length and one dilation rate a branch")
        if len(self.segment_lengths) != len(self.dilation_rates):
            self.fail(
                "dilation_rates", f"must be as many as segment_lengths, {self.segment_lengths}"
            )

    @property
    def num_branches(self) -> int:
        return len(self.segment_lengths)


class LongAttention(Exact, kw_only=True, tag_field="op", tag="long_attention"):
    """One attention over ``seq_len`` tokens in all, shared by the ranks of a case.

    ``window``: the most keys that a query sees, its own included; causal only. ``direction``:
    backward means a forward and its backward. ``way``: how ranks exchange keys. ``ring`` passes K
    and V round, ``gather`` all-gathers them, ``heads`` exchanges tokens for heads (Ulysses), and
    ``ring_heads`` does so in groups of ranks and passes K and V round among the groups. ``order``:
    the tokens that a rank holds; zigzag gives rank r chunks r and 2n-1-r of 2n.
    """

    batch: Count
    seq_len: Length
    heads: Count
    kv_heads: Count
    head_dim: Length
    causal: bool = False
    window: Length | None = None
    dilation: Dilation | None = None
    direction: Direction = "forward"
    dtype: Dtype = "bf16"
    way: Way = "auto"
    order: Literal["contiguous", "zigzag"] = "contiguous"

    def check(self) -> None:
        if self.heads % self.kv_heads:
            self.fail("kv_heads", f"must divide heads = {self.heads}")
        if self.window is not None and not self.causal:
            self.fail("window", "only causal attention has a window; set causal")
        if self.dilation and self.window is not None:
            self.fail("window", "a dilated attention has segments, no window")
        if self.dilation and self.order != "contiguous":
            self.fail("order", "dilated attention is for contiguous shards: its segments are local")

    @property
    def flops(self) -> int:
        """FLOPs of two products over all attended pairs, with their multiplicity, 2 FLOPs per
        multiply-add. A backward adds 2.5 times as many."""
        forward = 4 * self.batch * self.pairs * self.head_dim
        return forward if self.direction == "forward" else forward * 7 // 2

    @property
    def row_bytes(self) -> int:
        """Bytes of one token of one head, in all sequences."""
        return self.batch * self.head_dim * DTYPE_BYTES[self.dtype]

    @property
    def wide_row_bytes(self) -> int:
        """Bytes of such a row in the dtype in which gradients are summed, at least fp32."""
        return self.batch * self.head_dim * max(4, DTYPE_BYTES[self.dtype])

    @property
    def lse_bytes(self) -> int:
        """Bytes of the log-sum-exp of such a row."""
        return self.batch * max(4, DTYPE_BYTES[self.dtype])

    @property
    def pairs(self) -> int:
        """Exact number of attended pairs of query and key in one sequence, over all heads."""
        if self.dilation:
            return dilated_pairs(
                self.dilation, self.heads, self.kv_heads, self.seq_len, self.causal
            )
        n = self.seq_len
        if not self.causal:
            return self.heads * n * n
        most = min(n, self.window or n)
        return self.heads * (most * (most + 1) // 2 + (n - most) * most)

    @property
    def bytes(self) -> int:
        """Bytes to read q, k and v and to write out, once each. A backward counts three times
        as many."""
        rows = 2 * self.heads + 2 * self.kv_heads
        passes = 1 if self.direction == "forward" else 3
        return passes * self.seq_len * rows * self.row_bytes


def offsets(dilation: Dilation, branch: int, heads: int, kv_heads: int) -> list[int | None]:
    """Return s of every query head in a branch; None if the branch does not use the head."""
    rate = dilation.dilation_rates[branch]
    counted = heads if dilation.offset_heads == "query" else kv_heads
    if dilation.offsets == "group":
        first, last = group(dilation, branch, counted)
        of = [branch % rate if first <= h < last else None for h in range(counted)]
    elif dilation.offsets == "block":
        of = [h // -(-counted // rate) for h in range(counted)]
    else:
        of = [h % rate for h in range(counted)]
    return [of[h * counted // heads] for h in range(heads)]


def group(dilation: Dilation, branch: int, heads: int) -> tuple[int, int]:
    """Return the heads [first, last) of a branch in group mode. The last branches get one more if
    heads are left over."""
    each, odd = divmod(heads, dilation.num_branches)
    short = dilation.num_branches - odd  # branches without an odd head
    first = each * branch + max(0, branch - short)
    return first, first + each + (branch >= short)


def dilated_pairs(dilation: Dilation, heads: int, kv_heads: int, seq_len: int, causal: bool) -> int:
    """Count attended pairs of query and key over all heads, with multiplicity."""
    total = 0
    for branch, (width, rate) in enumerate(
        zip(dilation.segment_lengths, dilation.dilation_rates, strict=True)
    ):
        full, rest = divmod(seq_len, min(width, seq_len))
        for offset in offsets(dilation, branch, heads, kv_heads):
            for length, times in ((min(width, seq_len), full), (rest, 1)):
                rows = 0 if offset is None else len(range(offset, length, rate))
                total += times * (rows * (rows + 1) // 2 if causal else rows * rows)
    return total
