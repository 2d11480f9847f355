"""Triton kernels for a step of one token, which reads each weight, key and value once.

``linear``: x W^T + b for one row. A library's matrix product reads W at half to nine tenths of the
memory bandwidth here. This kernel streams rows of W and sums in fp32. ``attend``: attention of one
token's query heads over the tokens so far. The keys are cut into pieces, so that few heads fill
the device ("split-KV": Dao et al., Flash-Decoding, 2023). Each piece gives its softmax's sum, its
largest score and its weighted values, and a second kernel joins them.
"""

import math

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

_ROWS, _COLUMNS = 2, 2048  # rows and columns of W that a program reads at once
_KEYS, _PIECES = 64, 64  # keys that a program reads at once, and most programs of a head
_LEAST = 16  # fewest rows and columns of a tensor-core product


@triton.jit  # type: ignore[untyped-decorator]
def _multiply(  # type: ignore[no-untyped-def]
    x, weight, out, n, K: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in tl.static_range(0, K, COLUMNS):
        column = first + tl.arange(0, COLUMNS)
        inside = (row[:, None] < n) & (column < K)[None, :]
        at = row[:, None].to(tl.int64) * K + column[None, :]
        numbers = tl.load(x + column, mask=column < K, other=0.0).to(tl.float32)
        weights = tl.load(weight + at, mask=inside, other=0.0, eviction_policy="evict_first")
        sums += numbers[None, :] * weights.to(tl.float32)
    tl.store(out + row, tl.sum(sums, 1), mask=row < n)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x[..., K], W[N, K], b[N] -> [..., N]. More than one row goes to the library."""
    n, k = weight.shape
    if x.numel() > k:
        return F.linear(x, weight, bias)
    out = x.new_empty(*x.shape[:-1], n)
    columns = min(_COLUMNS, triton.next_power_of_2(k))
    _multiply[(triton.cdiv(n, _ROWS),)](
        x.contiguous(), weight, out, n, K=k, ROWS=_ROWS, COLUMNS=columns, num_warps=4
    )
    return out if bias is None else out + bias


@triton.jit  # type: ignore[untyped-decorator]
def _attend_piece(  # type: ignore[no-untyped-def]
    q, keys, values, position, sums, most, weighted, tokens, pieces, SCALE: tl.constexpr,
    KV_HEADS: tl.constexpr, SHARING: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
    ROWS: tl.constexpr, WIDTH: tl.constexpr, WIDTH_V: tl.constexpr, KEYS: tl.constexpr,
    BLOCKS: tl.constexpr,
):  # fmt: skip
    group, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    head = group // KV_HEADS * tokens * KV_HEADS + group % KV_HEADS  # row of the first token
    row, column, column_v = tl.arange(0, ROWS), tl.arange(0, WIDTH), tl.arange(0, WIDTH_V)
    mine = q + (group * SHARING + row[:, None]) * D + column[None, :]
    queries = tl.load(mine, mask=(row[:, None] < SHARING) & (column[None, :] < D), other=0.0)
    last = tl.load(position)
    top = tl.full((ROWS,), -1e30, tl.float32)  # finite: a piece may lie past the position
    total = tl.zeros((ROWS,), tl.float32)
    mix = tl.zeros((ROWS, WIDTH_V), tl.float32)
    for block in range(BLOCKS):
        key = (piece * BLOCKS + block) * KEYS + tl.arange(0, KEYS)
        seen = key <= last
        at = (head + key.to(tl.int64) * KV_HEADS)[:, None]
        there = seen[:, None] & (column[None, :] < D)
        found_k = tl.load(keys + at * D + column[None, :], mask=there, other=0.0)
        scores = tl.dot(queries, tl.trans(found_k), input_precision="ieee") * SCALE
        scores = tl.where(seen[None, :], scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        shares, faded = tl.exp(scores - higher[:, None]), tl.exp(top - higher)
        there_v = seen[:, None] & (column_v[None, :] < DV)
        found_v = tl.load(values + at * DV + column_v[None, :], mask=there_v, other=0.0)
        part = tl.dot(shares.to(found_v.dtype), found_v, input_precision="ieee")
        top, total = higher, total * faded + tl.sum(shares, 1)
        mix = mix * faded[:, None] + part
    out = (group * pieces + piece) * SHARING + row
    tl.store(sums + out, total, mask=row < SHARING)
    tl.store(most + out, top, mask=row < SHARING)
    inside = (row[:, None] < SHARING) & (column_v[None, :] < DV)
    tl.store(weighted + out[:, None] * DV + column_v[None, :], mix, mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _join(  # type: ignore[no-untyped-def]
    sums, most, weighted, out, pieces, SHARING: tl.constexpr, DV: tl.constexpr,
    WIDTH_V: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    group, row = tl.program_id(0).to(tl.int64), tl.program_id(1)
    piece, column = tl.arange(0, PIECES), tl.arange(0, WIDTH_V)
    at = (group * pieces + piece) * SHARING + row
    top = tl.load(most + at, mask=piece < pieces, other=-1e30)
    share = tl.exp(top - tl.max(top, 0))
    total = tl.sum(share * tl.load(sums + at, mask=piece < pieces, other=0.0), 0)
    inside = (piece[:, None] < pieces) & (column[None, :] < DV)
    parts = tl.load(weighted + at[:, None] * DV + column[None, :], mask=inside, other=0.0)
    result = tl.sum(share[:, None] * parts, 0) / total
    tl.store(out + (group * SHARING + row) * DV + column, result, mask=column < DV)


def attend(q: Tensor, keys: Tensor, values: Tensor, at: Tensor, length: int) -> Tensor:
    """Attend for one token: q[b,1,heads,D] at position ``at`` [1] < ``length``, over
    keys[b,tokens,kv_heads,D] and values[b,tokens,kv_heads,DV] -> [b,1,heads,DV]."""
    (batch, tokens, kv_heads, dim), width = keys.shape, values.shape[3]
    heads = q.shape[2]
    sharing, groups = heads // kv_heads, batch * kv_heads
    blocks = triton.cdiv(length, _KEYS * _PIECES)  # blocks of a piece
    pieces = triton.cdiv(length, _KEYS * blocks)
    sums, most = (
        torch.empty(groups, pieces, sharing, dtype=torch.float32, device=q.device) for _ in range(2)
    )
    weighted = torch.empty(groups, pieces, sharing, width, dtype=torch.float32, device=q.device)
    out = q.new_empty(batch, 1, heads, width)
    padded = triton.next_power_of_2(width)
    _attend_piece[(groups, pieces)](
        q.contiguous(), keys, values, at, sums, most, weighted, tokens, pieces,
        SCALE=1 / math.sqrt(dim), KV_HEADS=kv_heads, SHARING=sharing, D=dim, DV=width,
        ROWS=max(_LEAST, triton.next_power_of_2(sharing)),
        WIDTH=max(_LEAST, triton.next_power_of_2(dim)), WIDTH_V=max(_LEAST, padded), KEYS=_KEYS,
        BLOCKS=blocks,
    )  # fmt: skip
    _join[(groups, sharing)](
        sums, most, weighted, out, pieces, SHARING=sharing, DV=width, WIDTH_V=padded,
        PIECES=triton.next_power_of_2(pieces),
    )  # fmt: skip
    return out
