"""A pattern of attention: what it covers, costs and makes ranks exchange; and who attends whom.

In: a ``Cover``. Out: tables; MB = 1e6 bytes, of memory too. And of the operation a figure: the
whole sequence in blocks, and a few heads token by token. A query's row, a key's column. Colour: the
shortest segment whose branch joins the two. Strength: in the blocks the mean multiplicity over
heads (its root, so that sparse branches show), in the tokens the number of branches. Lines: borders
of ranks, whose numbers stand below.
"""

import html
import math
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from meshwise.attention.cover import Cover, cuts
from meshwise.attention.pattern import branches
from meshwise.attention.reach import classes
from meshwise.attention.shards import Shards, contiguous
from meshwise.pages import svg
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
MOST_BLOCKS = 64
MOST_TOKENS = 48
MOST_HEADS = 3
MOST_DRAWN_RANKS = 32  # whose borders are drawn

_SIDE, _GAP, _TOP, _LEFT = 250, 34, 34, 34
_NARROWEST = 440  # has room for a sentence
_LEVELS = 6  # of strength


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


class Panel(NamedTuple):
    """``branch`` [n, n]: the one that gives the colour, -1 for none; ``strength`` 0 to 1.
    ``tokens``: how many the panel shows."""

    name: str
    branch: npt.NDArray[np.int64]
    strength: npt.NDArray[np.float64]
    tokens: int


def figure(op: LongAttention, shards: Shards) -> svg.Figure:
    """Panels side by side, with a legend."""
    shown = list(classes(op).values())[:MOST_HEADS]
    panels = [_heads(op, min(op.seq_len, MOST_TOKENS), heads) for heads in shown]
    if op.seq_len > MOST_TOKENS:
        panels.insert(0, _blocks(op))
    num_ranks = len(shards.intervals)
    where = f"on {num_ranks} ranks" if num_ranks > 1 else "on one rank"
    where += ", zigzag" if op.order == "zigzag" and num_ranks > 1 else ""
    caption = f"Who attends whom, {title(op)}, {where}"
    drawn = "".join(
        f'<g transform="translate({_LEFT + i * (_SIDE + _GAP)},{_TOP})">{_panel(each, shards)}</g>'
        for i, each in enumerate(panels)
    )
    width = max(_NARROWEST, _LEFT + len(panels) * (_SIDE + _GAP))
    legend, rows = _legend(op, width, num_ranks)
    height = _TOP + _SIDE + 30 + 18 * rows
    return svg.Figure(
        f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{html.escape(caption)}" '
        f'font-family="sans-serif" font-size="11">{drawn}'
        f'<g transform="translate({_LEFT},{_TOP + _SIDE + 30})">{legend}</g></svg>',
        caption,
        wide=True,
    )


def _blocks(op: LongAttention) -> Panel:
    """All heads, the sequence in ``MOST_BLOCKS`` blocks: sum over segments of the rows of both."""
    n = min(op.seq_len, MOST_BLOCKS)
    blocks = contiguous(op.seq_len, n)
    lengths = np.array(blocks.lengths, dtype=float)
    possible = np.outer(lengths, lengths) * op.heads
    total, first = np.zeros((n, n)), np.full((n, n), -1)
    order = sorted(enumerate(branches(op)), key=lambda each: -each[1].width)
    for index, branch in order:  # the shortest segment last
        pieces = cuts(branch.width, blocks)
        joined = np.zeros((n, n))
        whole = pieces.num_ranks == 1  # inside one block
        column = np.unique(pieces.low[~whole], return_inverse=True)[1]
        for offset, num_heads in Counter(branch.offsets).items():
            if offset is None:
                continue
            before, to, _ = pieces.kept(offset, branch.rate)
            rows = (to - before).astype(float)
            np.add.at(joined, (pieces.rank[whole],) * 2, num_heads * rows[whole] ** 2)
            held = np.zeros((n, int(column.max(initial=-1)) + 1))
            held[pieces.rank[~whole], column] = rows[~whole]
            joined += num_heads * held @ held.T
        first[joined > 0] = index
        total += joined
    if op.causal:
        first[np.triu_indices(n, 1)] = -1
    if op.window is not None:
        far = np.subtract.outer(np.arange(n), np.arange(n)) * lengths.min() > op.window + lengths[0]
        first[far] = -1
    name = f"all {op.seq_len:,} tokens, all heads"
    return Panel(name, first, np.sqrt(np.minimum(1, total / possible)), op.seq_len)


def _heads(op: LongAttention, n: int, heads: list[int]) -> Panel:
    """The first ``n`` tokens of a head, exact."""
    count, first = np.zeros((n, n)), np.full((n, n), -1)
    at = np.arange(n)
    found = branches(op)
    for index, branch in sorted(enumerate(found), key=lambda each: -each[1].width):
        kept = at % branch.width % branch.rate == branch.offsets[heads[0]]
        segment = at // branch.width
        joined = np.outer(kept, kept) & (segment[:, None] == segment)
        first[joined] = index
        count += joined
    if op.causal:
        first[np.triu_indices(n, 1)] = -1
    if op.window is not None:
        first[np.subtract.outer(at, at) >= op.window] = -1
    name = f"head {heads[0]}, " + ("all tokens" if n == op.seq_len else f"first {n} tokens")
    return Panel(name, first, count / len(found), n)


def _panel(panel: Panel, shards: Shards) -> str:
    n = len(panel.branch)
    level = np.ceil(_LEVELS * np.clip(panel.strength, 1e-9, 1)).astype(int)
    cells = []
    for index in sorted(set(panel.branch[panel.branch >= 0].tolist())):
        for strength in range(1, _LEVELS + 1):
            path = _runs((panel.branch == index) & (level == strength))
            if path:
                opacity = 0.4 + 0.6 * strength / _LEVELS
                cells.append(f'<path d="{path}" fill="{_fill(index)}" opacity="{opacity:.3g}"/>')
    scale = _SIDE / n
    return (
        f'<text y="-20" fill="var(--ink)" font-weight="bold">{html.escape(panel.name)}</text>'
        f'<text y="-6" fill="var(--muted)">key &#8594;</text>'
        f'<text transform="translate(-8,42) rotate(-90)" fill="var(--muted)">&#8592; query</text>'
        f'<g transform="scale({scale:.5g})" shape-rendering="crispEdges">{"".join(cells)}</g>'
        f'{_borders(shards, panel.tokens)}<rect width="{_SIDE}" height="{_SIDE}" fill="none" '
        'stroke="var(--muted)"/>'
    )


def _runs(cells: npt.NDArray[np.bool_]) -> str:
    """Draw cells as rectangles; those of a row that touch are one."""
    found = []
    for y, row in enumerate(cells):
        edges = np.flatnonzero(np.diff(np.concatenate([[0], row.astype(int), [0]])))
        found += [f"M{a} {y}h{b - a}v1h{a - b}z" for a, b in edges.reshape(-1, 2).tolist()]
    return "".join(found)


def _borders(shards: Shards, tokens: int) -> str:
    if not 1 < len(shards.intervals) <= MOST_DRAWN_RANKS:
        return ""
    stops = {b for own in shards.intervals for _, b in own if 0 < b < tokens}
    at = [f"{_SIDE * stop / tokens:.2f}" for stop in sorted(stops)]
    path = "".join(f"M{x} 0V{_SIDE}M0 {x}H{_SIDE}" for x in at)
    numbers = []
    for rank, own in enumerate(shards.intervals):
        for a, b in own:
            left, right = _SIDE * a / tokens, _SIDE * min(b, tokens) / tokens
            if right - left >= 5.2 * len(str(rank)):
                middle = (left + right) / 2
                numbers.append(f'<text x="{middle:.2f}" y="{_SIDE + 10}">{rank}</text>')
    return (
        f'<path d="{path}" stroke="var(--ink)" stroke-width="0.7" stroke-dasharray="3 2"/>'
        f'<g fill="var(--muted)" font-size="9" text-anchor="middle">{"".join(numbers)}</g>'
    )


def _legend(op: LongAttention, width: int, ranks: int) -> tuple[str, int]:
    """Colours of branches, and how many lines that takes."""
    each = 165
    a_line = max(1, math.floor((width - _LEFT) / each))
    found = []
    for index, branch in enumerate(branches(op)):
        name = f"{branch.width:,}, rate {branch.rate}" if op.dilation else "attended"
        x, y = index % a_line * each, index // a_line * 18
        found.append(
            f'<rect x="{x}" y="{y - 9}" width="10" height="10" fill="{_fill(index)}"/>'
            f'<text x="{x + 15}" y="{y}" fill="var(--ink)">{name}</text>'
        )
    lines = math.ceil(len(found) / a_line)
    says = [*_words(op)]
    if 1 < ranks <= MOST_DRAWN_RANKS:
        says.append("Dashed: borders of ranks; below: which rank holds what.")
    said = "".join(
        f'<text y="{18 * (lines + i)}" fill="var(--muted)">{line}</text>'
        for i, line in enumerate(says)
    )
    return "".join(found) + said, lines + len(says)


def _words(op: LongAttention) -> Iterator[str]:
    if op.dilation:
        yield "Colour: the shortest segment that joins the two; stronger: more often."
    elif op.seq_len > MOST_TOKENS and op.window is not None:
        if op.window >= MOST_TOKENS:
            yield f"The window of {op.window:,} reaches beyond the first {MOST_TOKENS} tokens."
        if op.window < op.seq_len / MOST_BLOCKS:
            block = -(-op.seq_len // MOST_BLOCKS)
            yield f"The window of {op.window:,} is less than a block of {block:,} tokens."


def _fill(index: int) -> str:
    return f"var(--s{index % 10})"
