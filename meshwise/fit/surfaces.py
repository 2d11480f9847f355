"""GEMM, attention and convolution: utilisation of a roofline at every measured shape.

The roofline's rates are the best that any shape of the surface reached. Its floor is the shortest
time of any single-rank operation (the launch). Each shape is left out once and predicted from its
neighbours. The effects of rectangular tiles and wave quantisation stay in the residual, which is
the error of a shape that was not measured. Shapes whose utilisation is 30 times the median, or a
30th of it, are left out and named, unless they are more than a quarter of at least four.
"""

from typing import Any

import msgspec
import numpy as np

from meshwise.fit.curves import held_out
from meshwise.prices.evaluate import left_out, place, roofline_s, shape_op
from meshwise.prices.laws import Floats
from meshwise.prices.waves import spent_flops
from meshwise.spec import HeldOut, Shaped, Surface

ODD = 30.0  # a utilisation further from the median by this factor is no measurement


def fit_surface(
    dims: tuple[str, ...],
    points: dict[tuple[int, ...], float],
    about: dict[str, Any],
    *,
    floor_s: float,
    copy_bytes_per_s: float,
) -> Surface:
    """Fit a surface through ``points`` (extents of ``dims`` -> seconds). ``about``: the fields of
    its ``Price``."""
    surface, log_utilisation = _through(points, dims, about, floor_s, copy_bytes_per_s)
    off = np.exp(np.abs(log_utilisation - np.median(log_utilisation)))
    odd = {shape for shape, factor in zip(surface.shapes, off, strict=True) if factor > ODD}
    if 0 < len(odd) <= len(points) // 4:
        kept = {shape: time_s for shape, time_s in points.items() if shape not in odd}
        surface, log_utilisation = _through(kept, dims, about, floor_s, copy_bytes_per_s)
        said = f"{ODD:g} times the median utilisation or more, or a {ODD:g}th or less"
        named = tuple(f"{'x'.join(map(str, shape))} ({said})" for shape in sorted(odd))
        surface = msgspec.structs.replace(surface, no_shapes=named)
    places = np.asarray([place(shape_op(surface, shape), dims) for shape in surface.shapes])
    ratios = left_out(places, log_utilisation).tolist()
    error = held_out(ratios, [1.0] * len(ratios))
    return msgspec.structs.replace(surface, held_out=error)


def _through(
    points: dict[tuple[int, ...], float],
    dims: tuple[str, ...],
    about: dict[str, Any],
    floor_s: float,
    copy_bytes_per_s: float,
) -> tuple[Surface, Floats]:
    """Return a surface through points, not yet tested, and the logarithm of their utilisation."""
    shapes = sorted(points)
    measured = [points[shape] for shape in shapes]
    like: Shaped = about["like"]
    named = (dict(zip(dims, shape, strict=True)) for shape in shapes)
    ops = [msgspec.structs.replace(like, **extents) for extents in named]
    rates = [op.bytes / t for op, t in zip(ops, measured, strict=True)]
    surface = Surface(
        dims=dims,
        shapes=tuple(shapes),
        time_s=tuple(measured),
        floor_s=min(floor_s, *measured),
        flops_per_s=max(spent_flops(op) / t for op, t in zip(ops, measured, strict=True)),
        bytes_per_s=max(copy_bytes_per_s, *rates),
        held_out=HeldOut(median=0.0, p90=0.0, num_points=0),
        **about,
    )
    rooflines = np.asarray([roofline_s(op, surface) for op in ops])
    return surface, np.log(rooflines / np.asarray(measured))
