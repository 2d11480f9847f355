"""Fit time against bytes: find the knots, fit every law, use the one that predicts best.

A knot is the median of at least three timings. A point that departs from its neighbours as no link
does is no knot, and is named (``_odd``).

Every law (``prices.laws``) is fitted to every second knot, and to the others, and predicts the
knots left out. The one with the least root mean square of log errors is used; ``cubic`` is, unless
another is better by a seventh.

Beyond the last knot times rise as between the last three. Where times do not yet rise in
proportion to bytes, that slope is too steep as a rule: if the data sheet has a slope, both bound
the interval, and their geometric mean is used. If it has none, the best line through all knots may
be flatter, and the flatter one is used; the interval reaches to the last knot's rate, which is used
if no more than three knots do not rise. The error is tested on shorter curves that end where times
were about as proportional.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from meshwise.fit import laws
from meshwise.prices import Datasheet
from meshwise.prices.evaluate import streams
from meshwise.prices.laws import Floats, KnotTimes, cubic, slopes
from meshwise.prices.uneven import bus_factor
from meshwise.spec import Cluster, Collective, Curve, HeldOut
from meshwise.spec.costs import Law, LawName, NoKnot

LEAST_TIMINGS = 3
BETTER = 6 / 7  # of the error of ``cubic``
ODD = 1.5  # a point is odd if it is off by this factor, and by six times what others are
PROPORTIONAL = 0.95  # log-log slope from which on times count as proportional to bytes
STREAM = 0.05  # error of a rate at 1 GiB for 4 GiB, adamw on 4 profiles (2026-11-28-left-out)
ALIKE = 0.15  # log-log slopes that differ by less are alike
FLAT = 3  # so few knots that do not rise may be noise
FAR = 8.0, 32.0  # bytes over those of the last knot, of points that test the slope beyond it
UNKNOWN = HeldOut(median=0.0, p90=0.0, num_points=0)


def held_out(predicted: Sequence[float], measured: Sequence[float]) -> HeldOut:
    """Return median and p90 of |predicted/measured - 1|. Without points both are 0."""
    if not measured:
        return UNKNOWN
    errors = np.abs(np.asarray(predicted) / np.asarray(measured) - 1)
    return HeldOut(
        median=float(np.median(errors)),
        p90=float(np.quantile(errors, 0.9)),
        num_points=len(measured),
    )


def fit_curve(
    points: dict[int, float],
    about: dict[str, Any],
    cluster: Cluster | None = None,
    few: Sequence[int] = (),
    law: LawName | None = None,
) -> Curve:
    """Fit a curve through ``points`` (bytes -> seconds). ``about``: the fields of its ``Price``.
    ``few``: sizes with fewer than three timings. ``law``: use this one, or else ``cubic``, and fit
    no other."""
    x, t, no_knots = _knots(points, few)
    sheet = Datasheet(cluster.specified) if cluster else None
    like = about["like"]
    bus = bus_factor(like) if isinstance(like, Collective) else 1.0
    lines = sheet.lines(like) if sheet and isinstance(like, Collective) else []
    fits = laws.fits(bus, lines)
    if law:
        fits = {name: fit for name, fit in fits.items() if name in (law, "cubic")}
    predicted = _left_out(x, t, fits)
    found = {
        name: Law(parameters=parameters, held_out=held_out(*predicted.get(name, ([], []))))
        for name, fit in fits.items()
        if (parameters := fit(x, t)) is not None and _works(name, parameters, x, t)
    }
    slope, sheet_error = sheet.s_per_byte(like) if sheet else (0.0, 0.0)
    end, least, most = _end(x, t, slope, sheet_error)
    if sheet and slope and streams(like, t.tolist()):
        end = float((t[-1] - sheet.known.launch.time_s) / x[-1])
        least, most = end / (1 + STREAM), end * (1 + STREAM)
    return Curve(
        law=law if law in found else _best(found, predicted),
        laws=found,
        x_bytes=tuple(x.tolist()),
        time_s=tuple(t.tolist()),
        end_s_per_byte=end,
        end_range_s_per_byte=(least, most),
        beyond=_beyond(x, t),
        no_knots=no_knots,
        **about,
    )


def _knots(
    points: dict[int, float], few: Sequence[int]
) -> tuple[Floats, Floats, tuple[NoKnot, ...]]:
    """Split points into knots and others. At least one knot is left."""
    x, t = (np.asarray(column, float) for column in zip(*sorted(points.items()), strict=True))
    reasons = dict.fromkeys(few, f"fewer than {LEAST_TIMINGS} timings")
    if len(reasons) == len(x):
        reasons = {}  # better a curve of single timings than none
    keep = np.asarray([size not in reasons for size in x])
    few_odd, before = len(x) // 4, keep.copy()
    while (i := _odd(x[keep], t[keep])) is not None:
        at = np.flatnonzero(keep)[i]
        keep[at] = False
        end_s_per_byte = t[keep][-1] / x[keep][-1]
        others = KnotTimes("cubic", (), x[keep], t[keep], end_s_per_byte)(x[at])
        reasons[x[at]] = f"{t[at] / others:.2g} times what the sizes around it say"
        if (before & ~keep).sum() > few_odd:  # no outliers: all of it is like this
            keep = before
            break
    named = tuple(
        NoKnot(x_bytes=size, time_s=time_s, reason=reasons[size])
        for size, time_s in zip(x[~keep].tolist(), t[~keep].tolist(), strict=True)
    )
    return x[keep], t[keep], named


def _odd(x: Floats, t: Floats) -> int | None:
    """Return the row of the worst outlier, if there is one. An outlier makes its neighbours look
    odd too: it is the one without which the others agree best."""
    if len(x) < 4:
        return None
    off = _off(x, t)
    limit = max(np.log(ODD), 6 * 1.4826 * np.median(off[1:-1]))
    odd = np.flatnonzero(off > limit)
    if len(odd):  # a bad end makes the point beside it look odd
        odd = np.union1d(odd, [0] * (1 in odd) + [len(x) - 1] * (len(x) - 2 in odd)).astype(int)
    left = [_off(np.delete(x, i), np.delete(t, i)).sum() for i in odd]
    return int(odd[np.argmin(left)]) if len(odd) else None


def _off(x: Floats, t: Floats) -> Floats:
    """Return the log factor by which each point is off: inside from a curve through the others, at
    both ends from times that are equal, or proportional to bytes, or anything between."""
    log_x, log_t, off = np.log(x), np.log(t), np.zeros(len(x))
    for i in range(1, len(x) - 1):
        others_x, others_t = np.delete(log_x, i), np.delete(log_t, i)
        off[i] = log_t[i] - cubic(log_x[i], others_x, others_t, slopes(others_x, others_t))
    rise, growth = np.diff(log_t), np.diff(log_x)
    off[[0, -1]] = np.maximum(rise - growth, np.maximum(-rise, 0.0))[[0, -1]]
    return np.abs(off)


def _works(name: LawName, parameters: laws.Parameters, x: Floats, t: Floats) -> bool:
    try:
        KnotTimes(name, parameters, x, t)
    except ValueError:
        return False
    return True


def _left_out(
    x: Floats, t: Floats, fits: dict[LawName, Callable[..., Any]]
) -> dict[LawName, tuple[list[float], list[float]]]:
    """Return predicted and measured times of knots left out, for each law that predicts them all.
    Knots beyond the sizes of the others are no test of a law."""
    found: dict[LawName, tuple[list[float], list[float]]] = {}
    for name, fit in fits.items():
        predicted, measured = list[float](), list[float]()
        for phase in (0, 1):
            mine = np.arange(len(x)) % 2 == phase
            if mine.sum() < 2:
                continue
            known_x, known_t = x[mine], t[mine]
            others = ~mine & (x > known_x[0]) & (x < known_x[-1])
            parameters = fit(known_x, known_t)
            if parameters is None or not _works(name, parameters, known_x, known_t):
                break
            predicted += KnotTimes(name, parameters, known_x, known_t)(x[others]).tolist()
            measured += t[others].tolist()
        else:
            found[name] = predicted, measured
    return found


def _best(
    found: dict[LawName, Law], predicted: dict[LawName, tuple[list[float], list[float]]]
) -> LawName:
    errors: dict[LawName, float] = {
        name: float(np.sqrt(np.mean(np.log(np.divide(*predicted[name])) ** 2)))
        for name in found
        if name in predicted and predicted[name][0] and name != "sigmoid"
    }
    if "cubic" not in errors:
        return "cubic"
    best = min(errors, key=errors.__getitem__)
    return best if errors[best] < BETTER * errors["cubic"] else "cubic"


def _slope(x: Floats, t: Floats) -> float:
    """Return seconds a byte between the last three knots, at least 0."""
    first = -min(3, len(x))
    return max(float((t[-1] - t[first]) / (x[-1] - x[first])), 0.0) if len(x) > 1 else 0.0


def _proportional(x: Floats, t: Floats) -> float:
    """Return the log-log slope between the last two knots: 1 if times are proportional to bytes."""
    return float(np.log(t[-1] / t[-2]) / np.log(x[-1] / x[-2])) if len(x) > 1 else 0.0


def _end(x: Floats, t: Floats, sheet: float, error: float) -> tuple[float, float, float]:
    """Return the seconds a byte beyond the last knot, with the least and the most that they may be.
    ``sheet``: those of the data sheet, 0 if unknown, and their relative ``error``."""
    measured = _slope(x, t)
    if _proportional(x, t) >= PROPORTIONAL:
        return measured, measured, measured
    if sheet:
        steep = max(measured, sheet)
        return float(np.sqrt(sheet * steep)), sheet / (1 + error), steep * (1 + error)
    least, last = min(measured, laws.alpha_beta(x, t)[1]), float(t[-1] / x[-1])
    return least if least or len(x) > FLAT else last, least, max(least, last)


def _beyond(x: Floats, t: Floats) -> HeldOut:
    """Test the slope at the end on shorter curves whose ends are about as proportional."""
    predicted, measured, end = list[float](), list[float](), _proportional(x, t)
    for n in range(3, len(x)):
        if abs(_proportional(x[:n], t[:n]) - end) > ALIKE:
            continue
        far = (x >= FAR[0] * x[n - 1]) & (x <= FAR[1] * x[n - 1])
        predicted += (t[n - 1] + _slope(x[:n], t[:n]) * (x[far] - x[n - 1])).tolist()
        measured += t[far].tolist()
    return held_out(predicted, measured)
