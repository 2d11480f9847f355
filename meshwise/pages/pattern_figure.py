"""Draw who attends whom: the whole sequence in blocks, and a few heads token by token.

A query's row, a key's column. Colour: the shortest segment whose branch joins the two. Strength: in
the blocks the mean multiplicity over heads (its root, so that sparse branches show), in the tokens
the number of branches. Lines: borders of ranks, whose numbers stand below.
"""

import html
import math
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from meshwise.attention.cover import cuts
from meshwise.attention.pattern import branches
from meshwise.attention.reach import classes
from meshwise.attention.shards import Shards, contiguous
from meshwise.pages import svg
from meshwise.pages.pattern import title
from meshwise.spec.long_attention import LongAttention

MOST_BLOCKS = 64
MOST_TOKENS = 48
MOST_HEADS = 3
MOST_RANKS = 32  # whose borders are drawn

_SIDE, _GAP, _TOP, _LEFT = 250, 34, 34, 34
_NARROWEST = 440  # has room for a sentence
_LEVELS = 6  # of strength


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
    """Cells of a row that touch are one rectangle."""
    found = []
    for y, row in enumerate(cells):
        edges = np.flatnonzero(np.diff(np.concatenate([[0], row.astype(int), [0]])))
        found += [f"M{a} {y}h{b - a}v1h{a - b}z" for a, b in edges.reshape(-1, 2).tolist()]
    return "".join(found)


def _borders(shards: Shards, tokens: int) -> str:
    if not 1 < len(shards.intervals) <= MOST_RANKS:
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
    if 1 < ranks <= MOST_RANKS:
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
