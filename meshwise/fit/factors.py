"""What composition misses: measured blocks against the sum of their operations' prices.

A layer in the clock is not the sum of its kernels: eager mode adds host gaps, compilation fuses
elementwise work away, small kernels overlap. The ratio measured / composed, by part, direction,
tensor-parallel degree and size, carries all of that into a plan. The same with the bytes that
the block saved for backward, since a compiler's partitioner chooses its own.
"""

import numpy as np

from meshwise.fit.curves import held_out
from meshwise.models import block_ops, saved_block_bytes
from meshwise.prices import Prices, factor_key
from meshwise.spec import Block, Factor, Sample


def fit_factors(
    samples: list[tuple[Sample, float]], prices: Prices, run: tuple[str, ...]
) -> tuple[Factor, ...]:
    """One factor for every kind of block among ``samples`` (each with its expected time)."""
    groups: dict[str, dict[float, list[tuple[float, float]]]] = {}
    for sample, time_s in samples:
        block = sample.case.op
        assert isinstance(block, Block)
        composed = sum(prices.estimate(op).time_s for op in block_ops(block))
        saved = sample.metrics.get("saved_bytes")
        counted = saved_block_bytes(block)
        saved_ratio = saved / counted if isinstance(saved, float | int) and saved else 1.0
        size = float(block.microbatch_size * block.seq_len * block.model.hidden)
        sizes = groups.setdefault(factor_key(block), {})
        sizes.setdefault(size, []).append((time_s / composed, saved_ratio))
    return tuple(_factor(key, sizes, run) for key, sizes in sorted(groups.items()))


def _factor(
    key: str, sizes: dict[float, list[tuple[float, float]]], runs: tuple[str, ...]
) -> Factor:
    x = sorted(sizes)
    ratio, saved = (
        [float(np.median([pair[which] for pair in sizes[size]])) for size in x] for which in (0, 1)
    )
    inner = range(1, len(x) - 1)
    predicted = [
        float(np.interp(np.log(x[i]), np.log(np.delete(x, i)), np.delete(ratio, i))) for i in inner
    ]
    return Factor(
        key=key,
        activation_elements=tuple(x),
        ratio=tuple(ratio),
        saved_ratio=tuple(saved),
        held_out=held_out(predicted, ratio[1:-1]),
        runs=runs,
    )
