"""GEMM, attention and convolution: utilisation of a roofline at every measured shape.

The roofline's rates are the best that any shape of the surface reached. Its floor is the shortest
time of any single-rank operation (the launch). Each shape is left out once and predicted from its
neighbours. The effects of rectangular tiles and wave quantisation stay in the residual, which is
the error of a shape that was not measured.
"""

from typing import Any

import msgspec
import numpy as np

from meshwise.fit.curves import held_out
from meshwise.prices.measured import interpolate_utilisation, roofline_s
from meshwise.spec import HeldOut, Shaped, Surface


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
    shapes = sorted(points)
    measured = [points[shape] for shape in shapes]
    like: Shaped = about["like"]
    named = (dict(zip(dims, shape, strict=True)) for shape in shapes)
    representatives = [msgspec.structs.replace(like, **extents) for extents in named]
    surface = Surface(
        dims=dims,
        shapes=tuple(shapes),
        time_s=tuple(measured),
        floor_s=min(floor_s, *measured),
        flops_per_s=max(op.flops / t for op, t in zip(representatives, measured, strict=True)),
        bytes_per_s=max(
            copy_bytes_per_s,
            *(op.bytes / t for op, t in zip(representatives, measured, strict=True)),
        ),
        held_out=HeldOut(median=0.0, p90=0.0, num_points=0),
        **about,
    )
    rooflines = np.asarray([roofline_s(op, surface) for op in representatives])
    log_utilisation = np.log(rooflines / np.asarray(measured))
    predicted = []
    for i, shape in enumerate(shapes) if len(shapes) > 1 else ():
        others = np.delete(np.asarray(shapes, float), i, axis=0)
        predicted.append(
            rooflines[i] / interpolate_utilisation(shape, others, np.delete(log_utilisation, i))
        )
    error = held_out(predicted, measured if predicted else [])
    return msgspec.structs.replace(surface, held_out=error)
