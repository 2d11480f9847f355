"""Fit time against bytes by two laws, and choose the one that predicts left-out points better.

    log-log     straight lines between measured points in log-log space
    alpha-beta  t = alpha + beta * bytes, both >= 0, least relative error (Hockney), times the ratio
                of the points on both sides to this line

Each inner point is left out once. The law with the smaller median error is used.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from meshwise.prices.measured import around_line, interpolate_loglog
from meshwise.spec import Curve, HeldOut


def held_out(predicted: Sequence[float], measured: Sequence[float]) -> HeldOut:
    """Return median and p90 of |predicted/measured - 1|. Without points both are 0."""
    if not measured:
        return HeldOut(median=0.0, p90=0.0, num_points=0)
    errors = np.abs(np.asarray(predicted) / np.asarray(measured) - 1)
    return HeldOut(
        median=float(np.median(errors)),
        p90=float(np.quantile(errors, 0.9)),
        num_points=len(measured),
    )


def alpha_beta(x: np.ndarray, t: np.ndarray) -> tuple[float, float]:
    """Return alpha and beta, by non-negative least squares of (alpha + beta x)/t = 1."""
    from scipy.optimize import nnls

    scale = x.max()
    (alpha, beta), _ = nnls(np.column_stack([1 / t, x / scale / t]), np.ones_like(t))
    return float(alpha), float(beta / scale)


def fit_curve(points: dict[int, float], about: dict[str, Any]) -> Curve:
    """Fit a curve through ``points`` (bytes -> seconds). ``about``: the fields of its ``Price``."""
    x, t = (np.asarray(column, float) for column in zip(*sorted(points.items()), strict=True))
    laws: dict[str, Callable[[np.ndarray, np.ndarray, float], float]] = {
        "loglog": lambda x, t, at: interpolate_loglog(at, x, t),
        "alpha_beta": lambda x, t, at: around_line(at, x, t, alpha_beta(x, t)),
    }
    errors = {}
    for name, law in laws.items():
        inner = range(1, len(x) - 1)
        predicted = [law(np.delete(x, i), np.delete(t, i), float(x[i])) for i in inner]
        errors[name] = held_out(predicted, [float(t[i]) for i in inner])
    best = "alpha_beta" if errors["alpha_beta"].median < errors["loglog"].median else "loglog"
    alpha, beta = alpha_beta(x, t)
    return Curve(
        law=best, x_bytes=tuple(x.tolist()), time_s=tuple(t.tolist()),  # type: ignore[arg-type]
        alpha_s=alpha, beta_s_per_byte=beta, held_out=errors, **about,
    )  # fmt: skip
