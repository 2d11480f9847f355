"""A pattern of attention: its coverage, its cost, what ranks exchange, and who attends whom.

In: a ``Cover``. Out: tables (MB = 1e6 bytes, also for memory). For the operation also a figure: the
whole sequence in blocks, and a few heads token by token. Rows are queries, columns are keys. The
colour is the shortest segment whose branch joins the two. The strength is, in blocks, the root of
the mean multiplicity over heads (so that sparse branches show), and in tokens the number of
branches. Lines are borders of ranks; their numbers are below.
"""

import functools
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from meshwise.attention.cover import Cover, cuts
from meshwise.attention.pattern import Branch, branches
from meshwise.attention.reach import classes
from meshwise.attention.shards import Shards, contiguous
from meshwise.pages import svg
from meshwise.pages.table import ABSENT, Column, Table, columns, filled, listed, share, size
from meshwise.spec.long_attention import LongAttention
from meshwise.units import format_rate

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_RANKS = 16  # in the table of ranks
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
MOST_DRAWN_RANKS = 32  # with more ranks, borders are not drawn


def of(found: Cover) -> list[Table]:
    """Make all tables; warnings come after the summary."""
    alone = len(found.lengths) == 1
    return [
        summary(found),
        *filled(Table("Warnings", ("",), tuple((line,) for line in warnings(found)))),
        *([_branches(found)] if found.op.dilation else []),
        *([] if alone else [_bytes(found)]),
        *([] if alone or len(found.lengths) > MOST_RANKS else [_ranks(found)]),
    ]


def title(op: LongAttention) -> str:
    """Return ``dilated 2048/1 4096/2, offsets mod: 1 x 65,536 tokens, 12 heads x 64, bf16``."""
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
    """Return warnings about properties that a user may not have intended."""
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
    moved: tuple[Column, ...] = (
        ("ranks a segment", lambda row: "local" if row[1].local else str(row[1].ranks)),
        *columns(size, {"gather": lambda row: _most(row[1].local, row[1].gather_bytes)}),
        *columns(size, {"heads": lambda row: _most(row[1].local, row[1].heads_bytes)}),
        *columns(size, {"world": lambda row: _most(row[1].local, row[1].world_bytes)}),
    )
    return listed(
        "Branches",
        enumerate(found.branches),
        ("branch", lambda row: str(row[0])),
        ("segment", lambda row: f"{row[1].segment_length:,}"),
        ("rate", lambda row: str(row[1].dilation_rate)),
        ("of the pairs", lambda row: share(row[1].pairs / found.pairs if found.pairs else 0.0)),
        *(() if alone else moved),
        legend=() if alone else (BYTES,),
    )


def _most(local: bool, moved: tuple[int, ...]) -> int | None:
    return None if local else max(moved)


def _bytes(found: Cover) -> Table:
    mean = sum(found.bound_bytes) / len(found.bound_bytes)
    ways = {"ring": found.dense_ring_bytes, "gather": found.dense_gather_bytes}
    ways["heads (Ulysses)"] = found.dense_heads_bytes
    cheapest = ("each branch by the cheaper of gather and heads", size(found.target_bytes), ABSENT)
    rows = (
        ("owner computes, at least", size(max(found.bound_bytes)), size(mean)),
        *((cheapest,) if found.op.dilation else ()),
        *(
            (f"dense attention, {way}", "not counted" if most is None else size(most), ABSENT)
            for way, most in ways.items()
        ),
    )
    other = "What the branches move" if found.op.dilation else "Heads"
    heads = ("bytes into a rank, forward", "most", "mean")
    return Table("Bytes", heads, rows, (BOUND.format(other),))


def _ranks(found: Cover) -> Table:
    mean = sum(found.rank_pairs) / len(found.rank_pairs)
    return listed(
        "Ranks",
        enumerate(zip(found.lengths, found.rank_pairs, found.bound_bytes, strict=True)),
        ("rank", lambda row: str(row[0])),
        ("tokens", lambda row: f"{row[1][0]:,}"),
        ("work / mean", lambda row: f"{row[1][1] / mean if mean else 0:.3f}"),
        ("owner computes", lambda row: size(row[1][2])),
    )


class Panel(NamedTuple):
    """A panel. ``branch`` [n, n]: the branch that gives the colour, -1 for none. ``strength``: 0 to
    1. ``tokens``: number of tokens shown."""

    name: str
    branch: npt.NDArray[np.int64]
    strength: npt.NDArray[np.float64]
    tokens: int


def panels(op: LongAttention) -> list[Panel]:
    """Return a panel of the whole sequence in blocks, if it is long, then one head of each kind."""
    shown = list(classes(op).values())[:MOST_HEADS]
    found = [_heads(op, min(op.seq_len, MOST_TOKENS), heads) for heads in shown]
    return [_blocks(op), *found] if op.seq_len > MOST_TOKENS else found


def figure(op: LongAttention, shards: Shards) -> svg.Figure:
    """Draw the panels side by side, then a legend."""
    drawn, num_ranks = panels(op), len(shards.intervals)
    where = f"on {num_ranks} ranks" if num_ranks > 1 else "on one rank"
    where += ", zigzag" if op.order == "zigzag" and num_ranks > 1 else ""
    paints = [functools.partial(_paint, panel=each, shards=shards) for each in drawn]
    legend = functools.partial(_legend, op=op, num_ranks=num_ranks)
    caption = f"Who attends whom, {title(op)}, {where}"
    return svg.draw(caption, *paints, legend, width=3 * len(drawn) + 3, height=3.2)


def _blocks(op: LongAttention) -> Panel:
    """Return all heads in blocks. A cell sums, over segments, the product of both blocks' rows."""
    n = min(op.seq_len, MOST_BLOCKS)
    blocks = contiguous(op.seq_len, n)
    lengths = np.array(blocks.lengths, dtype=float)
    total, first = np.zeros((n, n)), np.full((n, n), -1)
    for index, branch in _shortest_last(op):
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
    far = 0.0 if op.window is None else op.window + lengths[0]
    first[_masked(op, n, lengths.min(), far)] = -1
    strength = np.sqrt(np.minimum(1, total / (np.outer(lengths, lengths) * op.heads)))
    return Panel(f"all {op.seq_len:,} tokens, all heads", first, strength, op.seq_len)


def _heads(op: LongAttention, n: int, heads: list[int]) -> Panel:
    """Return the first ``n`` tokens of a head, exactly."""
    count, first, at = np.zeros((n, n)), np.full((n, n), -1), np.arange(n)
    for index, branch in _shortest_last(op):
        kept = at % branch.width % branch.rate == branch.offsets[heads[0]]
        segment = at // branch.width
        joined = np.outer(kept, kept) & (segment[:, None] == segment)
        first[joined] = index
        count += joined
    first[_masked(op, n, 1, (op.window or 1) - 1)] = -1
    name = f"head {heads[0]}, " + ("all tokens" if n == op.seq_len else f"first {n} tokens")
    return Panel(name, first, count / len(branches(op)), n)


def _shortest_last(op: LongAttention) -> list[tuple[int, Branch]]:
    return sorted(enumerate(branches(op)), key=lambda each: -each[1].width)


def _masked(op: LongAttention, n: int, unit: float, far: float) -> npt.NDArray[np.bool_]:
    """Return the cells of ``unit`` tokens that no query sees: later keys, or over ``far`` back."""
    behind = np.subtract.outer(np.arange(n), np.arange(n))
    unseen = np.zeros((n, n), dtype=bool) if not op.causal else behind < 0
    return unseen if op.window is None else unseen | (behind * unit > far)


def _paint(axes: "Axes", panel: Panel, shards: Shards) -> None:
    from matplotlib.colors import to_rgba_array

    colours = to_rgba_array([svg.colour(index) for index in range(panel.branch.max() + 1)] or "w")
    cells = colours[panel.branch]
    cells[..., 3] = np.where(panel.branch < 0, 0, 0.4 + 0.6 * np.minimum(panel.strength, 1))
    end = panel.tokens
    axes.imshow(cells, interpolation="nearest", extent=(0, end, end, 0))
    axes.set(title=panel.name, xlabel="key", ylabel="query", xticks=[], yticks=[])
    axes.grid(visible=False)
    if not 1 < len(shards.intervals) <= MOST_DRAWN_RANKS:
        return
    held = [(a, min(b, end), rank) for rank, own in enumerate(shards.intervals) for a, b in own]
    held = [chunk for chunk in held if chunk[0] < end]
    for border in (b for _, b, _ in held if b < end):
        axes.axvline(border, **svg.DASHED)
        axes.axhline(border, **svg.DASHED)
    middles = [(a + b) / 2 for a, b, _ in held]
    axes.set_xticks(middles, labels=[str(rank) for _, _, rank in held], fontsize=7)
    axes.tick_params(length=0)


def _legend(axes: "Axes", op: LongAttention, num_ranks: int) -> None:
    for index, branch in enumerate(branches(op)):
        name = f"{branch.width:,}, rate {branch.rate}" if op.dilation else "attended"
        axes.plot([], [], "s", color=svg.colour(index), label=name)
    axes.legend(loc="upper left", title="\n".join(_words(op, num_ranks)))
    axes.set_axis_off()


def _words(op: LongAttention, num_ranks: int) -> Iterator[str]:
    if op.dilation:
        yield "Colour: the shortest segment\nthat joins the two; stronger: more often."
    elif op.seq_len > MOST_TOKENS and op.window is not None:
        if op.window >= MOST_TOKENS:
            yield f"The window of {op.window:,} reaches\nbeyond the first {MOST_TOKENS} tokens."
        if op.window < op.seq_len / MOST_BLOCKS:
            block = -(-op.seq_len // MOST_BLOCKS)
            yield f"The window of {op.window:,} is less\nthan a block of {block:,} tokens."
    if 1 < num_ranks <= MOST_DRAWN_RANKS:
        yield "Dashed: borders of ranks;\nbelow: which rank holds what."
