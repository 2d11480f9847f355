"""Evaluate a fitted price: a surface's utilisation, a curve between and beyond its knots, and the
law of work with two limits."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from meshwise.prices.key import size
from meshwise.prices.laws import Floats, KnotTimes
from meshwise.prices.waves import padded_width, spent_flops, work_s
from meshwise.spec import (
    Attention,
    Curve,
    Elementwise,
    HeldOut,
    PriceTier,
    Shaped,
    Sized,
    Surface,
)

TOO_NOISY = "too noisy to plan with: half of the points left out were over 50 % off"
NEIGHBOURS = 4
HIDDEN = 0.0, 0.25, 0.5, 1.0, 2.0  # distances between logarithms of sizes
SHARP = 4  # where two limits are equal, work takes 19 % longer than either
FAR = 4.0  # each such factor beyond the measured range adds the held-out error again


class Estimate(NamedTuple):
    """A price. ``error``: relative (held-out p90 of a fitted price). ``source``: its tier.
    ``note``: remarks for the user, separated by semicolons."""

    time_s: float
    error: float
    source: PriceTier
    note: str = ""


def roofline_s(op: Shaped, surface: Surface, peaks: float = 1.0) -> float:
    """Return floor + ``work_s``, a lower bound up to measurement noise.
    ``peaks``: the peak of the operation's dtype over that of the surface's."""
    return surface.floor_s + work_s(op, surface.flops_per_s * peaks, surface.bytes_per_s)


def shape_op(surface: Surface, shape: tuple[int, ...]) -> Shaped:
    """Return the operation of a measured shape."""
    return msgspec.structs.replace(surface.like, **dict(zip(surface.dims, shape, strict=True)))


def place(op: Shaped, dims: tuple[str, ...]) -> tuple[float, ...]:
    """Return the logarithms of what neighbours have alike: an operation's dims; of attention the
    lengths, padded width and FLOPs spent, however batch and heads make them."""
    sizes: list[float] = [size(op, dim) for dim in dims]
    if isinstance(op, Attention):
        sizes = [op.q_len, op.kv_len, padded_width(op), spent_flops(op)]
    return tuple(map(math.log, sizes))


def interpolate_utilisation(distance: Floats, log_utilisation: Floats) -> Floats:
    """Return the mean log utilisation of the nearest neighbours of each row, weighted by
    1/distance^2. ``distance``: a column a neighbour, inf for those that do not count."""
    nearest = np.argsort(distance, axis=-1, kind="stable")[..., :NEIGHBOURS]
    of_nearest = (
        np.take_along_axis(distance, nearest, -1) if distance.ndim > 1 else distance[nearest]
    )
    weights = 1 / np.maximum(of_nearest, 1e-9) ** 2
    return np.asarray((weights * log_utilisation[nearest]).sum(-1) / weights.sum(-1))


def apart(places: Floats, others: Floats) -> Floats:
    """Return the distances of places, a row each, from others, a column each."""
    difference = places[..., None, :] - others
    return np.asarray(np.sqrt(np.einsum("...i,...i", difference, difference)))


def left_out(places: Floats, log_utilisation: Floats, nearer: float = 0.0) -> Floats:
    """Return the predicted over measured time of each shape that is left out, as all within
    ``nearer`` of it. Shapes without others are no test."""
    distance = apart(places, places)
    distance[distance < nearer] = np.inf
    np.fill_diagonal(distance, np.inf)
    tested = np.isfinite(distance).any(axis=1)
    found = interpolate_utilisation(distance[tested], log_utilisation)
    return np.exp(log_utilisation[tested] - found)


class ShapePlaces(NamedTuple):
    """The places of a surface's shapes, the least and the most of each coordinate, their log
    utilisation, and the errors of shapes whose neighbours within each distance of ``HIDDEN`` are
    hidden."""

    at: Floats
    least: list[float]
    most: list[float]
    log_utilisation: Floats
    errors: list[float]


def measured_places(surface: Surface) -> ShapePlaces:
    """Return where a surface was measured."""
    ops = [shape_op(surface, shape) for shape in surface.shapes]
    rooflines = np.asarray([roofline_s(op, surface) for op in ops])
    places = np.asarray([place(op, surface.dims) for op in ops])
    logs, errors = np.log(rooflines / np.asarray(surface.time_s)), list[float]()
    for nearer in HIDDEN:
        off = np.abs(left_out(places, logs, nearer) - 1)
        least = errors[-1] if errors else untested_as_unknown(surface.held_out)
        errors.append(max(least, float(np.quantile(off, 0.9)) if len(off) else least))
    return ShapePlaces(places, places.min(0).tolist(), places.max(0).tolist(), logs, errors)


def times_of(curve: Curve) -> KnotTimes:
    """Return a curve's times, for sizes of any shape. At a knot it is the measured time."""
    law = curve.laws[curve.law]
    return KnotTimes(curve.law, law.parameters, curve.x_bytes, curve.time_s, curve.end_s_per_byte)


def streams(like: Sized, time_s: Sequence[float]) -> bool:
    """Whether a curve ends where memory is the limit: the last size of memory-bound work takes
    twice the least time or more, which is the launch or the host's."""
    return isinstance(like, Elementwise) and time_s[-1] >= 2 * min(time_s)


def from_curve(curve: Curve, times: KnotTimes, name: str, x: float) -> Estimate:
    first, last = curve.x_bytes[0], curve.x_bytes[-1]
    note = f"{name}: {TOO_NOISY}" if curve.held_out.noisy else ""
    if x in curve.x_bytes and curve.law != "sigmoid":
        return Estimate(curve.time_s[curve.x_bytes.index(x)], curve.noise, "measured", note)
    time_s, error = float(times(x)), untested_as_unknown(curve.held_out)
    if first <= x <= last:  # the first only by the sigmoid
        return Estimate(time_s, error, "interpolated", note)
    if x < first:  # at best in proportion to bytes, as the first two knots tell
        said = f"{name}: {first / x:,.1f} x below the smallest measured size"
        return Estimate(time_s, error + _fall(curve, x), "extrapolated", both_notes(note, said))
    if x > FAR * last:
        note = both_notes(note, f"{name}: {x / last:.1f} x beyond the largest measured size")
    # errors beyond were tested at about 16 times the last size; nearer, less of them counts
    tested = max(error, untested_as_unknown(curve.beyond)) * math.log(x / last, 16)
    least, most = (curve.time_s[-1] + rate * (x - last) for rate in curve.end_range_s_per_byte)
    bounds = max(most / time_s, time_s / least) - 1
    if streams(curve.like, curve.time_s):  # what is left out below the end tells of hosts
        return Estimate(time_s, curve.noise + bounds, "extrapolated", note)
    return Estimate(time_s, max(error + tested, bounds), "extrapolated", note)


def _fall(curve: Curve, x: float) -> float:
    """Return the factor, less 1, by which a message below all knots may be faster than the first:
    times fall on as between the first two knots, to nothing at worst."""
    sizes, times_s, slope = curve.x_bytes, curve.time_s, 1.0
    if len(sizes) > 1:
        slope = math.log(times_s[1] / times_s[0]) / math.log(sizes[1] / sizes[0])
    fall: float = (sizes[0] / x) ** min(max(slope, 0.0), 1.0)
    return fall - 1


def untested_as_unknown(held_out: HeldOut) -> float:
    """Return the error of a price: 100 % if it could not be tested on left-out points."""
    return held_out.p90 if held_out.num_points else 1.0


def both_notes(note: str, more: str) -> str:
    return f"{note}; {more}" if note else more


def slower_s(one_s: Any, other_s: Any) -> Any:
    """Return the seconds of work that has two limits, such as the host's launches and the device:
    the longer of the two, and up to 19 % more where they are near."""
    longer_s = np.maximum(one_s, other_s)  # scales both: powers of them overflow, or are 0
    return longer_s * ((one_s / longer_s) ** SHARP + (other_s / longer_s) ** SHARP) ** (1 / SHARP)


def other_s(time_s: Floats, one_s: Floats) -> Floats:
    """Return the other limit of work that takes ``time_s`` with ``one_s``, as in ``slower_s``; 0 if
    it takes less."""
    left: Floats = np.maximum(1 - (one_s / time_s) ** SHARP, 0.0) ** (1 / SHARP)
    return time_s * left
