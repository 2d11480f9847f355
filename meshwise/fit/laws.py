"""Fit the laws of ``prices.laws`` to points, by least relative error. Each takes ascending sizes in
bytes and seconds, and returns the law's parameters; None if the points are too few for it."""

import warnings
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from meshwise.prices.laws import Floats
from meshwise.spec.costs import LawName

Parameters = tuple[float, ...]
MOST_PIECES = 4
_LEAST = 3  # points of a piece


def alpha_beta(x: Floats, t: Floats) -> Parameters:
    """Return alpha and beta >= 0."""
    return _linear(t, np.ones_like(x), x)


def root(x: Floats, t: Floats) -> Parameters | None:
    """Return alpha, gamma and beta >= 0."""
    return _linear(t, np.ones_like(x), np.sqrt(x), x) if len(x) > 2 else None


def _linear(t: Floats, *terms: Floats) -> Parameters:
    """Return the weights >= 0 of ``terms`` whose sum has the least relative error."""
    from scipy.optimize import nnls

    scales = np.asarray([term.max() for term in terms])
    columns = np.stack(terms, axis=1) / scales / t[:, None]
    weights, _ = nnls(columns, np.ones_like(t))
    return tuple((weights / scales).tolist())


def smooth(x: Floats, t: Floats) -> Parameters | None:
    """Return alpha, gamma, q, beta and p of the p-norm, robustly: a point far off counts less.

    Free are log alpha, log gamma, the logit of q, log beta and log (p - 0.3); x is in units of the
    largest. The norm's logarithm is a soft maximum of three lines in log x, whose weights are the
    derivatives."""
    from scipy.optimize import least_squares

    if len(x) < 6:
        return None
    log_x, log_t = np.log(x / x[-1]), np.log(t)

    def told(free: Floats) -> tuple[Floats, Floats, float, float]:
        """Return the three lines, q and p."""
        q, p = 1 / (1 + np.exp(-np.clip(free[3], -30, 30))), 0.3 + np.exp(np.clip(free[4], -5, 4))
        ones = np.ones_like(log_x)
        lines = np.stack([free[0] * ones, free[1] + q * log_x, free[2] + log_x])
        top = lines.max(axis=0)
        weights = np.exp(p * (lines - top))
        return lines, weights, q, p

    def wrong(free: Floats) -> Floats:
        lines, weights, _, p = told(free)
        return np.asarray(lines.max(axis=0) + np.log(weights.sum(axis=0)) / p - log_t)

    def derivatives(free: Floats) -> Floats:
        lines, weights, q, p = told(free)
        norm = lines.max(axis=0) + np.log(weights.sum(axis=0)) / p
        weights = weights / weights.sum(axis=0)
        by_p = ((weights * lines).sum(axis=0) - norm) / p * (p - 0.3)
        by_q = weights[1] * log_x * q * (1 - q)
        return np.stack([*weights, by_q, by_p], axis=1)

    begin = np.asarray([log_t[0], log_t[-1] - 2, log_t[-1], 0.0, 1.0])
    free = least_squares(
        wrong, begin, jac=derivatives, loss="soft_l1", f_scale=0.05, max_nfev=100
    ).x
    *_, q, p = told(free)
    alpha, gamma, beta = np.exp(free[:3])
    return tuple(map(float, (alpha, gamma / x[-1] ** q, q, beta / x[-1], p)))


def pieces(x: Floats, t: Floats) -> Parameters | None:
    """Return alpha, beta and first byte of each regime, between two points. Regimes are the
    contiguous pieces that fit best in all; each further one must pay for its three parameters
    (BIC)."""
    n = len(x)
    if n < 2 * _LEAST:
        return None
    lines = {
        (i, j): _line(x[i:j], t[i:j])
        for i in range(n)
        for j in range(i + _LEAST, n + 1)
    }  # fmt: skip
    # best[j] of k pieces: the squared relative error of the first j points, and the cuts
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}
    found: tuple[float, tuple[int, ...]] = (np.inf, ())
    for k in range(1, MOST_PIECES + 1):
        new: dict[int, tuple[float, tuple[int, ...]]] = {}
        for (i, j), (error, _) in lines.items():
            if i in best and best[i][0] + error < new.get(j, (np.inf, ()))[0]:
                new[j] = (best[i][0] + error, (*best[i][1], i))
        best = new
        if n in best:
            bic = n * np.log(best[n][0] / n + 1e-6) + 3 * k * np.log(n)
            found = min(found, (bic, best[n][1]))
    cuts = (*found[1], n)
    parameters: list[float] = []
    for i, j in pairwise(cuts):
        parameters += [*lines[i, j][1], float(np.sqrt(x[i - 1] * x[i])) if i else 0.0]
    return tuple(parameters)


def _line(x: Floats, t: Floats) -> tuple[float, tuple[float, float]]:
    """Return the squared relative error of the best line with both terms >= 0, and its terms."""
    a, b = 1 / t, x / t
    aa, ab, bb, sa, sb = a @ a, a @ b, b @ b, a.sum(), b.sum()
    det = aa * bb - ab * ab
    alpha, beta = ((bb * sa - ab * sb) / det, (aa * sb - ab * sa) / det) if det > 0 else (0, -1)
    if alpha < 0 or beta < 0:  # on an edge: the better of a constant and a rate
        constant, rate = sa / aa, sb / bb
        flat = ((constant * a - 1) ** 2).sum() < ((rate * b - 1) ** 2).sum()
        alpha, beta = (constant, 0.0) if flat else (0.0, rate)
    error = float(((alpha * a + beta * b - 1) ** 2).sum())
    return error, (float(alpha), float(beta))


def nccl(x: Floats, t: Floats, lines: Sequence[tuple[float, float]]) -> Parameters | None:
    """Return alpha and beta of each of NCCL's choices. ``lines``: seconds before the first byte and
    share of the links' rate that each reaches. One factor scales all seconds, one all shares."""
    from scipy.optimize import least_squares

    if len(x) < 4 or not lines:
        return None
    waits, shares = (np.asarray(column)[:, None] for column in zip(*lines, strict=True))

    def time_s(free: Floats) -> Floats:
        return np.asarray((np.exp(free[0]) * waits + np.exp(free[1]) / shares * x).min(axis=0))

    begin = np.log([t[0] / waits.min(), t[-1] / x[-1]])
    found = least_squares(
        lambda free: np.log(time_s(free) / t), begin, loss="soft_l1", f_scale=0.1, max_nfev=40
    )
    scale, beta = np.exp(found.x)
    return tuple(float(value) for wait, share in lines for value in (scale * wait, beta / share))


def sigmoid(x: Floats, t: Floats, bus: float) -> Parameters | None:
    """Return the parameters of ``prices.laws.sigmoid_s`` as ml_perf_model fits them
    (``get_memory_characteristics``, ``fit_sigmoid_bw_predictor``). ``bus``: bus over algorithm
    bandwidth. None if its method finds none: too few rows, or no convergence.
    """
    from scipy.optimize import OptimizeWarning, curve_fit

    if len(x) < 6:
        return None
    rate = bus * x / t / 1e9  # GB/s
    linear, saturated = turning_points(t, rate)
    log2, log_rate = np.log2(x), np.log10(rate)
    inside = slice(linear, saturated + 1)

    def law(at: Any, height: float, middle: float, steep: float, base: float) -> Any:
        return height / (1 + np.exp(-steep * (at - middle))) + base

    begin = (
        (log2[inside].max(), np.median(log2[inside]), 1, log_rate[inside].min())
        if saturated > linear
        else None
    )
    if begin is None or saturated + 1 - linear < 4:
        return None
    try:
        with np.errstate(all="ignore"), warnings.catch_warnings():
            warnings.simplefilter("ignore", OptimizeWarning)  # its covariance is not used
            shape, _ = curve_fit(law, log2[inside], log_rate[inside], begin, method="dogbox")
    except (RuntimeError, ValueError):
        return None
    ends = (log2[linear], log2[saturated], 1e9 * rate.max(), t[linear - 1])
    return (*map(float, (*ends, *shape)), bus)


def turning_points(t: Floats, rate: Floats) -> tuple[int, int]:
    """Return the rows where times begin to rise and where the rate saturates, by ml_perf_model's
    thresholds of 10 % and 5 %, which depend on how densely sizes were measured."""
    last = len(t) - 1
    rise = (t[2:] - t[:-2]) / (2 * t[1:-1])  # of rows 1 .. last - 1
    linear = next((i - 1 for i in range(5, last) if abs(rise[i - 1]) > 0.1), 4)
    below = [i for i in range(last - 1, 0, -1) if rate[i] < 0.95 * rate.max()]
    return linear, min(below[0] + 2, last) if below else last


def fits(bus: float, lines: Sequence[tuple[float, float]]) -> dict[LawName, Callable[..., Any]]:
    """Return each law's fit. ``lines``: see ``nccl``; empty for what is no collective."""
    return {
        "lines": lambda x, t: (),
        "cubic": lambda x, t: (),
        "alpha_beta": alpha_beta,
        "root": root,
        "smooth": smooth,
        "pieces": pieces,
        "nccl": lambda x, t: nccl(x, t, lines),
        "sigmoid": lambda x, t: sigmoid(x, t, bus),
    }
