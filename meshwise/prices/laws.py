"""Laws of time against bytes: x in bytes, results in seconds, parameters in these units.

    lines       straight lines between knots in log-log space
    cubic       monotone cubics between them (Fritsch, Carlson 1980), smooth at the knots
    alpha_beta  alpha + beta x (Hockney 1994)
    root        alpha + gamma sqrt(x) + beta x
    smooth      (alpha^p + (gamma x^q)^p + (beta x)^p)^(1/p)
    pieces      alpha + beta x in each regime, from its first byte on: alpha, beta, start, ...
    nccl        the fastest of NCCL's algorithms and protocols: alpha, beta of each
    sigmoid     ml_perf_model's bandwidth model, with its jumps at both turning points

Between knots a law is corrected by its ratio to them, so that it is exact there; ``lines`` and
``cubic`` are nothing but such a correction. Between two knots times rise or fall throughout. The
sigmoid is left as its authors wrote it.
"""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from meshwise.spec.costs import LawName

PER_OCTAVE = 64  # of tables; straight lines in log-log between
Floats = npt.NDArray[np.float64]


def law_s(name: LawName, parameters: Sequence[float], x: Floats) -> Floats:
    """Return a law's times, not corrected; 1 for ``lines`` and ``cubic``, which have no law."""
    if name in ("lines", "cubic"):
        return np.ones_like(x)
    if name == "alpha_beta":
        alpha, beta = parameters
        return alpha + beta * x
    if name == "root":
        alpha, gamma, beta = parameters
        return alpha + gamma * np.sqrt(x) + beta * x
    if name == "smooth":
        return smooth_s(parameters, x)
    if name == "sigmoid":
        return sigmoid_s(parameters, x)
    table = np.reshape(np.asarray(parameters), (-1, 3 if name == "pieces" else 2))
    if name == "nccl":
        return np.asarray((table[:, :1] + table[:, 1:] * x).min(axis=0))
    at = np.maximum(np.searchsorted(table[:, 2], x, side="right") - 1, 0)
    return np.asarray(table[at, 0] + table[at, 1] * x)


def smooth_s(parameters: Sequence[float], x: Floats) -> Floats:
    """Return the p-norm of a floor, a power of x and a rate; ``parameters``: alpha, gamma, q, beta,
    p. It approaches alpha for small and beta x for large messages."""
    alpha, gamma, q, beta, p = parameters
    parts = np.stack([np.full_like(x, alpha), gamma * x**q, beta * x])
    largest = parts.max(axis=0)  # scales the parts: powers of microseconds underflow
    return np.asarray(largest * ((parts / largest) ** p).sum(axis=0) ** (1 / p))


def sigmoid_s(parameters: Sequence[float], x: Floats) -> Floats:
    """Return times of ml_perf_model's ``predict_data_movement_time``, in seconds instead of us.

    Up to 2^ln_p bytes the overhead; up to 2^sats_p bytes over a rate whose logarithm is a sigmoid
    of log2 x, without the overhead; beyond, bytes over the largest rate, plus the overhead.
    ``parameters``: ln_p, sats_p, largest bus bandwidth (B/s), overhead (s), L, x0, k, b of the
    sigmoid (log10 of GB/s), bus over algorithm bandwidth.
    """
    ln_p, sats_p, max_rate, overhead_s, height, middle, steep, base, bus = parameters
    log2 = np.log2(x)
    with np.errstate(over="ignore"):  # far below the middle the sigmoid is 0
        rate = 1e9 * 10 ** (height / (1 + np.exp(-steep * (log2 - middle))) + base)
    beyond = x * bus / max_rate + overhead_s
    return np.where(log2 <= ln_p, overhead_s, np.where(log2 <= sats_p, x * bus / rate, beyond))


def slopes(x: Floats, y: Floats) -> Floats:
    """Return the derivatives of monotone cubics through points: inside, weighted harmonic means of
    the slopes on both sides, 0 where they differ in sign; at the ends, three-point formulas."""
    if len(x) < 3:
        return np.full(len(x), (y[-1] - y[0]) / (x[-1] - x[0]) if len(x) == 2 else 0.0)
    h, rise = np.diff(x), np.diff(y) / np.diff(x)
    before, after = rise[:-1], rise[1:]
    w1, w2 = 2 * h[1:] + h[:-1], h[1:] + 2 * h[:-1]
    with np.errstate(divide="ignore", invalid="ignore"):
        inner = (w1 + w2) / (w1 / before + w2 / after)
    inner = np.where(before * after > 0, inner, 0.0)
    ends = (_at_end(h[0], h[1], rise[0], rise[1]), _at_end(h[-1], h[-2], rise[-1], rise[-2]))
    return np.concatenate([ends[:1], inner, ends[1:]])


def _at_end(h0: float, h1: float, rise0: float, rise1: float) -> float:
    slope = ((2 * h0 + h1) * rise0 - h0 * rise1) / (h0 + h1)
    if slope * rise0 <= 0:
        return 0.0
    return 3 * rise0 if rise0 * rise1 <= 0 and abs(slope) > 3 * abs(rise0) else slope


def cubic(at: Any, x: Floats, y: Floats, derivatives: Floats) -> Any:
    """Evaluate cubics with these values and derivatives at their ends, between x[0] and x[-1]."""
    i = np.minimum(np.searchsorted(x, at, side="right"), len(x) - 1) - 1
    h = x[i + 1] - x[i]
    s = (at - x[i]) / h
    low, high = y[i], y[i + 1]
    return (
        low
        + s * s * (3 - 2 * s) * (high - low)
        + s * (1 - s) * h * ((1 - s) * derivatives[i] - s * derivatives[i + 1])
    )


class KnotTimes:
    """Times by a law that is corrected to be exact at knots, tabulated once for fast lookups.

    Before the first knot its time holds. Beyond the last one times rise by ``end_s_per_byte``.
    """

    def __init__(
        self,
        name: LawName,
        parameters: Sequence[float],
        x: Sequence[float] | Floats,
        time_s: Sequence[float] | Floats,
        end_s_per_byte: float = 0.0,
    ) -> None:
        self.name, self.parameters, self.end = name, tuple(parameters), end_s_per_byte
        knots, time_s = np.asarray(x, float), np.asarray(time_s, float)
        self.first, self.last = knots[0], knots[-1]
        log_knots = np.log(knots)
        with np.errstate(all="ignore"):  # checked below
            log_ratio = np.log(time_s / law_s(name, self.parameters, knots))
        octaves = (log_knots[-1] - log_knots[0]) / math.log(2)
        fine = np.linspace(log_knots[0], log_knots[-1], 1 + math.ceil(PER_OCTAVE * octaves))
        self.log_x = log_knots if name == "lines" else np.union1d(log_knots, fine)
        if name == "cubic" and len(knots) > 1:
            log_ratio = cubic(self.log_x, log_knots, log_ratio, slopes(log_knots, log_ratio))
        else:
            log_ratio = np.interp(self.log_x, log_knots, log_ratio)
        with np.errstate(all="ignore"):
            law = law_s(name, self.parameters, np.exp(self.log_x))
            self.log_time = log_ratio + np.log(law)
        if not np.isfinite(self.log_time).all():
            raise ValueError(f"law {name}: its parameters {self.parameters} give times <= 0")
        self._straighten(np.searchsorted(self.log_x, log_knots), np.log(time_s))

    def _straighten(self, rows: npt.NDArray[np.int64], log_times: Floats) -> None:
        """Keep times between two knots within theirs, and monotone. ``rows``: those of the knots,
        of log times ``log_times``."""
        for i, (first, last) in enumerate(pairwise(rows)):
            low, high = sorted(log_times[i : i + 2])
            turn = np.maximum if log_times[i + 1] >= log_times[i] else np.minimum
            between = np.clip(self.log_time[first : last + 1], low, high)
            self.log_time[first : last + 1] = turn.accumulate(between)
        self.log_time[rows] = log_times

    def __call__(self, x: Any) -> Any:
        """Return the times of ``x`` bytes, of any shape."""
        if self.name == "sigmoid":
            return sigmoid_s(self.parameters, np.asarray(x, float))
        within = np.minimum(np.maximum(x, self.first), self.last)
        times_s = np.exp(np.interp(np.log(within), self.log_x, self.log_time))
        return times_s + self.end * (np.maximum(x, self.last) - self.last)
