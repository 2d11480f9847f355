"""GEMM and attention: utilisation of a roofline at every measured shape.

The roofline's rates are the best that any shape of the surface reached, its floor the shortest
time of any single-rank operation (the launch). Each shape is left out once and predicted from
its neighbours; rectangular tiles and wave quantisation stay in the residual, which is the
honest error of a shape that was not measured.
"""

import msgspec
import numpy as np

from meshwise.fit.curves import held_out
from meshwise.prices import (
    attention_dims,
    gemm_dims,
    interpolate_utilisation,
    roofline_s,
    shape_op,
)
from meshwise.spec import Attention, Gemm, HeldOut, Surface

DIMS = {"gemm": ("m", "n", "k"), "attention": ("batch*heads", "seq_len", "head_dim")}


def fit_surface(
    key: str,
    ops: list[Gemm | Attention],
    times_s: list[float],
    *,
    floor_s: float,
    copy_bytes_per_s: float,
    noise: float,
    runs: tuple[str, ...],
) -> Surface:
    """A surface through measured shapes; a shape measured twice keeps the median."""
    by_shape: dict[tuple[float, ...], list[float]] = {}
    for op, time_s in zip(ops, times_s, strict=True):
        dims = gemm_dims(op) if isinstance(op, Gemm) else attention_dims(op)
        by_shape.setdefault(dims, []).append(time_s)
    shapes = sorted(by_shape)
    measured = [float(np.median(by_shape[shape])) for shape in shapes]
    representatives = [shape_op(ops[0], shape) for shape in shapes]
    surface = Surface(
        key=key,
        dims=DIMS[key.split("/")[0]],
        shapes=tuple(shapes),
        time_s=tuple(measured),
        floor_s=min(floor_s, *measured),
        flops_per_s=max(op.flops / t for op, t in zip(representatives, measured, strict=True)),
        bytes_per_s=max(
            copy_bytes_per_s,
            *(op.bytes / t for op, t in zip(representatives, measured, strict=True)),
        ),
        noise=noise,
        held_out=HeldOut(median=0.0, p90=0.0, num_points=0),
        runs=runs,
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
