"""Block factors: measured blocks against the sum of their operations' prices.

A layer's measured time is not the sum of its kernels: the host may launch them more slowly than
the device runs them, compilation fuses elementwise work away, the power cap lowers the clocks,
small kernels overlap. With C, the sum of prices at the clocks that the cap leaves
(``Prices.composed_s``),

    T = (host^4 + (ratio C)^4)^(1/4)

where host does not depend on size. For blocks measured at three sizes or more, host is chosen so
that the ratios of all sizes are most alike. Another block takes the ratio of one that differs only
in its degrees; the rest of its time is the host's. A second ratio corrects the bytes that the block
saves for backward: a compiler's partitioner makes its own choice.
"""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import msgspec
import numpy as np

from meshwise.fit.curves import held_out
from meshwise.models import block_tasks, device_of, saved_block_bytes
from meshwise.prices import Prices
from meshwise.prices.evaluate import other_s, slower_s
from meshwise.spec import Block, Factor, Sample

_FEWEST = 3  # sizes that tell the host from the device
_HOSTS = np.append(0.0, np.linspace(0.3, 0.995, 140))  # tried, of the shortest time


class _Sizes(NamedTuple):
    """A block's sizes in elements, ascending, with measured and composed seconds, and the ratio of
    saved bytes."""

    elements: tuple[float, ...]
    time_s: np.ndarray
    composed_s: np.ndarray
    saved: tuple[float, ...]


def fit_factors(
    groups: Sequence[tuple[Sequence[tuple[Sample, float, int]], dict[str, Any]]], prices: Prices
) -> tuple[Factor, ...]:
    """Fit a factor to each group: samples of blocks, each with its expected time and number of
    timings, and the fields of its ``Price``. A block has no factor if one of its operations has no
    price, such as a message that was never measured."""
    sizes, kept = list[_Sizes](), []
    for samples, about in groups:
        with suppress(ValueError):
            sizes.append(_sizes(samples, prices))
            kept.append((samples, about))
    groups = kept
    by_host = prices.costs.cluster.device.kind != "cpu"  # a CPU launches nothing: it computes
    known: dict[Block, float] = {}
    hosts = [0.0] * len(groups)
    for several in (True, False):
        for at, (of, (_, about)) in enumerate(zip(sizes, groups, strict=True)):
            if several != (len(of.elements) >= _FEWEST) or not by_host:
                continue
            alike = _alike(about["like"])
            if several:
                hosts[at] = _host_s(of)
                last = float(other_s(of.time_s, hosts[at])[-1] / of.composed_s[-1])
                known.setdefault(alike, last)
            elif alike in known:
                hosts[at] = float(other_s(of.time_s, known[alike] * of.composed_s).min())
    return tuple(
        _factor(of, host_s, about)
        for of, host_s, (_, about) in zip(sizes, hosts, groups, strict=True)
    )


def _alike(block: Block) -> Block:
    """Return the block without its degrees and its size."""
    return msgspec.structs.replace(
        block, tp=1, sequence_parallel=False, microbatch_size=1, seq_len=1
    )


def _sizes(samples: Sequence[tuple[Sample, float, int]], prices: Prices) -> _Sizes:
    found: dict[float, list[tuple[float, float, float]]] = {}
    for sample, time_s, _ in samples:
        block, device = sample.case.op, device_of(prices.costs.cluster, sample.case.lowering)
        assert isinstance(block, Block)
        kept, counted = sample.metrics.get("saved_bytes"), saved_block_bytes(block, device)
        saved = kept / counted if isinstance(kept, float | int) and kept else 1.0
        composed_s = prices.composed_s(block_tasks(block, device))
        found.setdefault(float(block.activation_elements), []).append((time_s, composed_s, saved))
    x = sorted(found)
    at = np.asarray([np.median(found[size], axis=0) for size in x])
    return _Sizes(tuple(x), at[:, 0], at[:, 1], tuple(at[:, 2].tolist()))


def _host_s(of: _Sizes) -> float:
    hosts = _HOSTS * float(of.time_s.min())
    spread = [float(np.std(np.log(other_s(of.time_s, host) / of.composed_s))) for host in hosts]
    return float(hosts[int(np.argmin(spread))])


def _factor(of: _Sizes, host_s: float, about: dict[str, Any]) -> Factor:
    x, ratio = np.asarray(of.elements), other_s(of.time_s, host_s) / of.composed_s
    inner = range(1, len(x) - 1)
    left_out = [
        float(np.interp(np.log(x[i]), np.log(np.delete(x, i)), np.delete(ratio, i))) for i in inner
    ]
    predicted = [
        slower_s(host_s, each * at) for each, at in zip(left_out, of.composed_s[1:-1], strict=True)
    ]
    return Factor(
        host_s=host_s,
        activation_elements=of.elements,
        ratio=tuple(ratio.tolist()),
        saved_ratio=of.saved,
        held_out=held_out(predicted, of.time_s[1:-1].tolist()),
        **about,
    )
