"""Block factors: measured blocks against the sum of their operations' prices.

A layer's measured time is not the sum of its kernels: eager mode adds host gaps, compilation fuses
elementwise work away, small kernels overlap. The ratio measured / composed, by part, direction,
tensor-parallel degree and size, carries all of that into a plan. A second ratio does the same for
the bytes that the block saves for backward: a compiler's partitioner makes its own choice.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from meshwise.fit.curves import held_out
from meshwise.models import block_ops, device_of, saved_block_bytes
from meshwise.prices import Prices
from meshwise.spec import Block, Factor, Sample


def fit_factor(
    samples: Sequence[tuple[Sample, float, int]], prices: Prices, about: dict[str, Any]
) -> Factor:
    """Fit the factor of ``samples`` of blocks, each with its expected time and number of timings.
    ``about``: the fields of its ``Price``."""
    sizes: dict[float, list[tuple[float, float]]] = {}
    for sample, time_s, _ in samples:
        block, device = sample.case.op, device_of(prices.costs.cluster, sample.case.lowering)
        assert isinstance(block, Block)
        composed = sum(prices.estimate(op).time_s for op in block_ops(block, device))
        kept, counted = sample.metrics.get("saved_bytes"), saved_block_bytes(block, device)
        saved_ratio = kept / counted if isinstance(kept, float | int) and kept else 1.0
        at = sizes.setdefault(float(block.activation_elements), [])
        at.append((time_s / composed, saved_ratio))
    x = sorted(sizes)
    ratio, saved = (
        [float(np.median([pair[which] for pair in sizes[size]])) for size in x] for which in (0, 1)
    )
    inner = range(1, len(x) - 1)
    predicted = [
        float(np.interp(np.log(x[i]), np.log(np.delete(x, i)), np.delete(ratio, i))) for i in inner
    ]
    return Factor(
        activation_elements=tuple(x),
        ratio=tuple(ratio),
        saved_ratio=tuple(saved),
        held_out=held_out(predicted, ratio[1:-1]),
        **about,
    )
