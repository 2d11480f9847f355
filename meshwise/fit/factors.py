"""Block factors: measured blocks against the sum of their operations' prices.

A layer's measured time is not the sum of its kernels: the host may launch them more slowly than
the device runs them, compilation fuses elementwise work away, the power cap lowers the clocks,
small kernels overlap. With C, the sum of prices at the clocks that the cap leaves
(``Prices.composed_s``),

    T = (host^4 + (ratio C)^4)^(1/4)

Of measured blocks the likeliest host and ratio are taken. Errors are normal in logarithms: T is
some 5 % off, the host some 70 % from that of usual hosts, the ratio 30 % from 1, or 10 % from that
of a block which differs only in its degrees. At each size, what T still differs by is put to the
device as far as the device takes T, and to the host for the rest. So a measured size has its
measured time, and a size at which the host takes longer changes no price of larger ones. A second
ratio corrects the bytes that the block saves for backward: a compiler's partitioner makes its own
choice.
"""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import msgspec
import numpy as np

from meshwise.fit.curves import held_out
from meshwise.models import block_tasks, device_of, saved_block_bytes
from meshwise.prices import Prices
from meshwise.prices.evaluate import SHARP, other_s, slower_s
from meshwise.spec import Block, Factor, Sample

# standard deviations of logarithms
_OF_TIME, _OF_LAUNCH, _OF_HOST, _OF_RATIO, _BY_DEGREE = 0.05, 0.25, 0.7, 0.3, 0.1
_TRIED = np.linspace(-2.5, 2.5, 201)  # logarithms of hosts and ratios over the usual
_NORMAL_P90 = 1.645
_MOST = 0.9  # of a measured time by the host alone: the device takes some of it


class _Sizes(NamedTuple):
    """A block's sizes in elements, ascending, with measured and composed seconds, and the ratio of
    saved bytes."""

    elements: np.ndarray
    time_s: np.ndarray
    composed_s: np.ndarray
    saved: np.ndarray


class _Limits(NamedTuple):
    """Limits of a block: the host's seconds, and the device's ratio, with relative errors."""

    host_s: float
    ratio: float
    host_error: float
    ratio_error: float


class _Usual(NamedTuple):
    """Expectations of a block: the seconds of usual hosts (0: it launches nothing, as on CPUs),
    and the ratio of one that differs only in its degrees, if there is one."""

    host_s: float
    ratio: float | None


def fit_factors(
    groups: Sequence[tuple[Sequence[tuple[Sample, float, int]], dict[str, Any]]], prices: Prices
) -> tuple[Factor, ...]:
    """Fit a factor to each group: samples of blocks, each with its expected time and number of
    timings, and the fields of its ``Price``. A block has no factor if one of its operations has no
    price, such as a message that was never measured."""
    kept = []
    for samples, about in groups:
        with suppress(ValueError):
            kept.append((_sizes(samples, prices), about))
    known, found = dict[Block, float](), dict[int, Factor]()
    for at in sorted(range(len(kept)), key=lambda at: kept[at][1]["like"].layout.num_devices):
        of, about = kept[at]
        alike = _alike(about["like"])
        usual = _Usual(usual_host_s(about["like"], prices), known.get(alike))
        limits = _limits(of, usual)
        known.setdefault(alike, limits.ratio)
        found[at] = _factor(of, usual, limits, about)
    return tuple(found[at] for at in range(len(kept)))


def usual_host_s(block: Block, prices: Prices) -> float:
    """Return the seconds that hosts usually take to launch a block."""
    lowering = prices.costs.lowering
    device = device_of(prices.costs.cluster, lowering)
    return prices.host_s(block, block_tasks(block, device, lowering))


def _alike(block: Block) -> Block:
    """Return the block without its degrees and its size."""
    return msgspec.structs.replace(
        block, tp=1, sequence_parallel=False, cp=1, ep=1, microbatch_size=1, seq_len=1
    )


def _sizes(samples: Sequence[tuple[Sample, float, int]], prices: Prices) -> _Sizes:
    found: dict[float, list[tuple[float, float, float]]] = {}
    for sample, time_s, _ in samples:
        block, lowering = sample.case.op, sample.case.lowering
        device = device_of(prices.costs.cluster, lowering)
        assert isinstance(block, Block)
        kept, counted = sample.metrics.get("saved_bytes"), saved_block_bytes(block, device)
        saved = kept / counted if isinstance(kept, float | int) and kept else 1.0
        composed_s = prices.composed_s(block_tasks(block, device, lowering))
        found.setdefault(float(block.activation_elements), []).append((time_s, composed_s, saved))
    x = sorted(found)
    return _Sizes(np.asarray(x), *np.asarray([np.median(found[size], axis=0) for size in x]).T)


def _limits(of: _Sizes, usual: _Usual) -> _Limits:
    """Return the likeliest limits of a block, and how much others as likely differ."""
    ratios = (usual.ratio or 1.0) * np.exp(_TRIED)
    hosts = (usual.host_s * np.exp(_TRIED) if usual.host_s else np.zeros(1))[:, None]
    unlikely = (_TRIED / (_BY_DEGREE if usual.ratio else _OF_RATIO)) ** 2
    if usual.host_s:
        unlikely = unlikely + ((_TRIED / _OF_HOST) ** 2)[:, None]
    for time_s, composed_s in zip(of.time_s, of.composed_s, strict=True):
        expected_s = slower_s(hosts, ratios * composed_s)
        deviation = _deviation(hosts, expected_s)
        unlikely = unlikely + (np.log(time_s / expected_s) / deviation) ** 2 + 2 * np.log(deviation)
    unlikely = np.broadcast_to(unlikely, (len(hosts), len(ratios)))
    host, ratio = np.unravel_index(int(np.argmin(unlikely)), unlikely.shape)
    weights = np.exp((unlikely.min() - unlikely) / 2)
    return _Limits(
        float(hosts[host, 0]), float(ratios[ratio]), _p90(weights.sum(1)), _p90(weights.sum(0))
    )


def _deviation(host_s: np.ndarray | float, expected_s: np.ndarray) -> np.ndarray:
    """Return the standard deviation of a time's logarithm: large where the host takes most."""
    return np.hypot(_OF_TIME, _OF_LAUNCH * (host_s / expected_s) ** SHARP)


def _p90(weights: np.ndarray) -> float:
    """Return the error that 9 of 10 values stay below, of logarithms as tried with ``weights``."""
    if len(weights) == 1:
        return 0.0
    mean = np.average(_TRIED, weights=weights)
    return float(_NORMAL_P90 * np.sqrt(np.average((_TRIED - mean) ** 2, weights=weights)))


def _at_sizes(of: _Sizes, limits: _Limits) -> tuple[np.ndarray, np.ndarray]:
    """Return the host's seconds and the ratio at each size, so that both give its time."""
    device_s = limits.ratio * of.composed_s
    apart_s = other_s(of.time_s, np.minimum(limits.host_s, _MOST * of.time_s))
    share = (_OF_TIME / _deviation(limits.host_s, slower_s(limits.host_s, device_s))) ** 2
    device_s = np.minimum(device_s * (apart_s / device_s) ** share, of.time_s)
    return other_s(of.time_s, device_s), device_s / of.composed_s


def _factor(of: _Sizes, usual: _Usual, limits: _Limits, about: dict[str, Any]) -> Factor:
    x = np.log(of.elements)
    hosts, ratios = _at_sizes(of, limits)
    predicted = []
    for i in range(1, len(x) - 1):
        rest = _Sizes(*(np.delete(values, i) for values in of))
        found = _at_sizes(rest, _limits(rest, usual))
        host_s, ratio = (float(np.interp(x[i], np.log(rest.elements), each)) for each in found)
        predicted.append(float(slower_s(host_s, ratio * of.composed_s[i])))
    return Factor(
        activation_elements=tuple(of.elements.tolist()),
        host_s=tuple(hosts.tolist()),
        ratio=tuple(ratios.tolist()),
        host_error=limits.host_error,
        ratio_error=limits.ratio_error,
        saved_ratio=tuple(of.saved.tolist()),
        held_out=held_out(predicted, of.time_s[1:-1].tolist()),
        **about,
    )
