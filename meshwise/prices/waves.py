"""The FLOPs that a GPU spends on products and attention, whose tiles are not always full.

A product's tiles are 128 rows, columns and steps of k. Grouped products count as they are.

A kernel takes 128 queries of a head at a time, against blocks of 128 keys; a causal tile stops at
its diagonal, and to begin and end a tile takes as long as a block. Heads are padded to 64 or 128
columns, and the softmax takes as long as ``SOFTMAX`` more. A multiprocessor that is free takes the
next tile, and the last to end sets the time: 8 heads of 1,024 tokens take as long as 16.
"""

import heapq
import math
from functools import lru_cache

from meshwise.spec import Attention, Gemm, Shaped

MULTIPROCESSORS = 132  # of an H100 or H200
HOPPER = ("NVIDIA H100", "NVIDIA H200")  # devices with so many
TILE = 128
WIDE = 128  # columns of a head that needs no padding
SOFTMAX: dict[str, int] = {"forward": 120, "backward": 80}  # columns
START = 3  # blocks, until the first tiles are under way
MANY = 32 * MULTIPROCESSORS  # tiles: how the last ones end hardly counts


def padded_width(op: Attention) -> int:
    """Return the width of a head as kernels compute it; the mean of both if V has its own."""
    return sum(-(-width // 64) * 32 for width in (op.head_dim, op.value_dim))


def spent_flops(op: Shaped) -> float:
    """Return the FLOPs that a device could do while an operation runs: ``op.flops``, but of
    attention by its tiles. ``SOFTMAX`` and ``START`` were fitted to an H200 (docs/calibrate.md)."""
    if isinstance(op, Gemm) and op.groups == 1:
        return 2.0 * math.prod(-(-extent // TILE) * TILE for extent in (op.m, op.n, op.k))
    if not isinstance(op, Attention):
        return float(op.flops)
    steps = _steps(op.batch * op.heads, op.q_len, op.kv_len, op.window or op.kv_len, op.causal)
    softmax = SOFTMAX[op.direction]
    columns = WIDE * (padded_width(op) + softmax) / (WIDE + softmax)
    forward = 4 * TILE**2 * columns * MULTIPROCESSORS * (START + steps)
    return forward if op.direction == "forward" else 2.5 * forward


def work_s(op: Shaped, flops_per_s: float, bytes_per_s: float) -> float:
    """Return max(FLOPs spent / rate, bytes / rate), or the sum of both for attention's backward,
    which reads and writes much before and after its tiles; of products, where one half hides the
    other, the root of the sum of squares."""
    both = spent_flops(op) / flops_per_s, op.bytes / bytes_per_s
    if isinstance(op, Gemm) and op.groups == 1:
        return math.hypot(*both)
    backward = isinstance(op, Attention) and op.direction == "backward"
    return sum(both) if backward else max(both)


@lru_cache(2**14)
def _steps(heads: int, q_len: int, kv_len: int, window: int, causal: bool) -> float:
    """Return the blocks of keys that the last multiprocessor to end has computed."""
    lengths, alike = [], 1 + q_len // MANY // TILE  # of long sequences one tile stands for several
    for first in range(0, q_len, TILE * alike):
        last = min(kv_len, max(0, kv_len - q_len) + first + TILE) if causal else kv_len
        seen = last - max(0, last - window - TILE if causal else 0)
        lengths.append(1 + -(-seen // TILE))
    total = heads * alike * sum(lengths) / MULTIPROCESSORS
    if heads * len(lengths) * alike > MANY:
        return total + max(lengths) / 2
    busy = [0] * MULTIPROCESSORS
    for length in heads * lengths:
        heapq.heapreplace(busy, busy[0] + length)
    return max(busy)
