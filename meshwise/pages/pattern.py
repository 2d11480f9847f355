"""Tables of a pattern of attention: what it covers, what it costs, what ranks must exchange.

A ``Cover`` in. MB = 1e6 bytes, of memory too.
"""

from meshwise.attention.cover import Cover
from meshwise.pages.table import ABSENT, Table, filled, share, size
from meshwise.spec.long_attention import LongAttention
from meshwise.units import format_rate

MOST_RANKS = 16  # of the table of ranks
FLOPS = "FLOPs: two products of every attended pair with its multiplicity, a multiply-add is 2."
BYTES = (
    "Bytes reach a rank in the forward, of the rank with most. Gather, or a ring: K and V that its "
    "queries attend. Heads: the ranks of a segment exchange tokens for whole heads; out "
    "and log-sum-exp go back. World: all ranks gather all rows."
)
BOUND = (
    "Owner computes: K and V that must come if each rank computes its own queries. {} may be less: "
    "by heads queries travel."
)


def of(found: Cover) -> list[Table]:
    """Everything, warnings after the summary."""
    alone = len(found.lengths) == 1
    return [
        summary(found),
        *filled(Table("Warnings", ("",), tuple((line,) for line in warnings(found)))),
        *([_branches(found)] if found.op.dilation else []),
        *([] if alone else [_bytes(found)]),
        *([] if alone or len(found.lengths) > MOST_RANKS else [_ranks(found)]),
    ]


def title(op: LongAttention) -> str:
    """``dilated, 2048/1 4096/2, offsets mod: 1 x 65,536 tokens, 12 heads x 64, bf16, causal``."""
    heads = f"{op.heads} heads" if op.heads == op.kv_heads else f"{op.heads}/{op.kv_heads} heads"
    kind = "dense"
    if op.dilation:
        told = zip(op.dilation.segment_lengths, op.dilation.dilation_rates, strict=True)
        kind = f"dilated {' '.join(f'{w}/{r}' for w, r in told)}, offsets {op.dilation.offsets}"
        if op.heads != op.kv_heads:
            kind += f" of {op.dilation.offset_heads} heads"
    last = ", causal" if op.causal else ""
    last += f", window {op.window:,}" if op.window is not None else ""
    return f"{kind}: {op.batch} x {op.seq_len:,} tokens, {heads} x {op.head_dim}, {op.dtype}{last}"


def summary(found: Cover) -> Table:
    seen, op, num_ranks = found.seen, found.op, len(found.lengths)
    possible = "the causal ones" if op.causal else "all"
    counted = "" if seen.exact else f", from a sample of {seen.num_rows:,} rows"
    rows = [
        ("rows alive", _alive(found)),
        ("keys a row sees", f"{seen.least:,} to {seen.most:,}, mean {seen.mean:,.1f}{counted}"),
        ("pairs joined", f"{share(seen.share)} of {possible}{counted}"),
        (
            "multiplicity",
            f"mean {seen.mean_multiplicity:.3g}, most {seen.max_multiplicity}{counted}",
        ),
        (f"layers until all know all{' before' if op.causal else ''}", _path(found)),
        (
            "FLOPs",
            f"{format_rate(found.flops, 'FLOP')} {op.direction}, {share(found.share_of_dense)} of "
            "dense attention's",
        ),
    ]
    each = "" if num_ranks == 1 else f"of each of {num_ranks} ranks, at most "
    rows += [
        ("K and V", each + size(max(found.kv_bytes))),
        ("out", each + size(max(found.out_bytes))),
    ]
    if num_ranks > 1:
        uneven = f"most {found.imbalance:.3g} x the mean" if found.imbalance > 1.0005 else "equal"
        rows.append(("work of ranks, own queries", uneven))
    legend = (
        "A row is a query of a head. Multiplicity: branches that join a pair, of joined ones.",
        FLOPS,
    )
    return Table(title(op).capitalize(), ("", ""), tuple(rows), legend, left=2)


def _alive(found: Cover) -> str:
    rows = found.rows
    if not rows.dead:
        return "all"
    total = found.op.seq_len * found.op.heads
    return (
        f"{share(rows.alive_share)}; {rows.dead:,} of {total:,} are dead, most in head "
        f"{rows.worst_head}: {rows.worst_head_dead:,}"
    )


def _path(found: Cover) -> str:
    path = found.path
    if path.kind == "never":
        if path.final_share is None:
            return "never"
        layers = "1 layer" if path.final_layers == 1 else f"{path.final_layers} layers"
        return f"never; {share(path.final_share)} of the pairs after {layers}"
    if path.layers is None:
        return "not known: more tokens than are searched, and segments do not grow by one factor"
    return f"{'' if path.kind == 'exact' else path.kind + ' '}{path.layers}"


def warnings(found: Cover) -> list[str]:
    """Warn in words of what a user may not have meant."""
    op, path = found.op, found.path
    told = []
    if found.rows.first_dead:
        row, head = found.rows.first_dead
        told.append(
            f"row {row} of head {head} is kept by no branch: its out is 0. A branch of rate 1 "
            "keeps every row."
        )
    if found.rows.lost_token is not None:
        told.append(f"token {found.rows.lost_token} is kept by no head at all")
    if path.wall is not None:
        told.append(f"tokens before and after {path.wall} never meet: no segment crosses it")
    if path.gap is not None and path.gap != path.wall:
        told.append(
            f"token {path.gap} never knows of token {path.gap - 1}: no segment of rate 1 holds both"
        )
    told += _warnings_of_branches(found)
    if op.dilation and op.kv_heads < op.heads and op.dilation.offset_heads == "query":
        told.append(
            "query heads that share keys keep different rows, so that more K and V travel; "
            "--offset-heads kv lets them keep the same"
        )
    return told


def _warnings_of_branches(found: Cover) -> list[str]:
    dilation, op = found.op.dilation, found.op
    if dilation is None:
        return []
    counted = op.heads if dilation.offset_heads == "query" else op.kv_heads
    sparse, long, told = [], [], []
    for index, branch in enumerate(found.branches):
        width = branch.segment_length
        if dilation.offsets != "group" and min(branch.dilation_rate, width) > counted:
            sparse.append(str(index))
        if not branch.local and width > min(found.lengths):
            long.append(str(index))
        elif not branch.local:
            told.append(
                f"branch {index}: segments of {width} are not aligned with the shards, so that "
                f"ranks exchange; shards of a multiple of {width} tokens would need nothing"
            )
    if long:
        told.append(f"{_named(long)}: segments are longer than a shard, so that ranks exchange")
    if sparse:
        told.append(
            f"{_named(sparse)}: the rate is more than the {counted} heads, and as many phases as "
            "it exceeds them are kept by none"
        )
    return told


def _named(indices: list[str]) -> str:
    return f"branch{'es' if len(indices) > 1 else ''} {', '.join(indices)}"


def _branches(found: Cover) -> Table:
    alone = len(found.lengths) == 1
    rows = []
    for index, branch in enumerate(found.branches):
        cells = [
            str(index),
            f"{branch.segment_length:,}",
            str(branch.dilation_rate),
            share(branch.pairs / found.pairs if found.pairs else 0.0),
        ]
        if not alone:
            sizes = (branch.gather_bytes, branch.heads_bytes, branch.world_bytes)
            moved = [ABSENT if branch.local else size(max(each)) for each in sizes]
            cells += ["local" if branch.local else str(branch.ranks), *moved]
        rows.append(tuple(cells))
    columns = ("branch", "segment", "rate", "of the pairs")
    more = ("ranks a segment", "gather", "heads", "world")
    legend = () if alone else (BYTES,)
    return Table("Branches", columns if alone else columns + more, tuple(rows), legend)


def _bytes(found: Cover) -> Table:
    mean = sum(found.bound_bytes) / len(found.bound_bytes)
    ways = {"ring": found.dense_ring_bytes, "gather": found.dense_gather_bytes}
    ways["heads (Ulysses)"] = found.dense_heads_bytes
    cheapest = "each branch by the cheaper of gather and heads" if found.op.dilation else ""
    rows = [
        ("owner computes, at least", size(max(found.bound_bytes)), size(mean)),
        *([(cheapest, size(found.target_bytes), ABSENT)] if cheapest else []),
        *(
            (f"dense attention, {way}", size(most) if most is not None else "not counted", ABSENT)
            for way, most in ways.items()
        ),
    ]
    columns = ("bytes into a rank, forward", "most", "mean")
    other = "What the branches move" if found.op.dilation else "Heads"
    return Table("Bytes", columns, tuple(rows), (BOUND.format(other),))


def _ranks(found: Cover) -> Table:
    mean = sum(found.rank_pairs) / len(found.rank_pairs)
    rows = tuple(
        (str(rank), f"{length:,}", f"{pairs / mean if mean else 0:.3f}", size(bound))
        for rank, (length, pairs, bound) in enumerate(
            zip(found.lengths, found.rank_pairs, found.bound_bytes, strict=True)
        )
    )
    return Table("Ranks", ("rank", "tokens", "work / mean", "owner computes"), rows)
