"""Prices as ``calibrate`` writes them to costs.json: fitted curves with their error and range."""

from typing import Literal

from meshwise.spec.cluster import Cluster
from meshwise.spec.op import Dtype
from meshwise.spec.record import NonNegative, NonNegativeFloat, Positive, Record

SCHEMA_VERSION = 1


class HeldOut(Record, kw_only=True):
    """Relative error |predicted/measured - 1| on points left out of the fit, one at a time."""

    median: NonNegativeFloat
    p90: NonNegativeFloat
    num_points: NonNegative


class Curve(Record, kw_only=True):
    """Time against bytes: measured knots for log-log interpolation, alpha-beta beyond them.

    t = alpha_s + x * beta_s_per_byte. ``law`` is the one with the smaller held-out error and is
    used between ``x_bytes[0]`` and ``x_bytes[-1]``; beyond, beta continues from the last knot.
    """

    key: str
    law: Literal["loglog", "alpha_beta"]
    x_bytes: tuple[float, ...]
    time_s: tuple[float, ...]
    alpha_s: NonNegativeFloat
    beta_s_per_byte: NonNegativeFloat
    held_out: dict[str, HeldOut]
    runs: tuple[str, ...]


class Surface(Record, kw_only=True):
    """Times of many-dimensional operations: nearest measured utilisation times a roofline.

    roofline = floor_s + max(FLOPs / flops_per_s, bytes / bytes_per_s); utilisation =
    roofline / measured, averaged over the nearest shapes in log space (weights 1/distance^2).
    """

    key: str
    dims: tuple[str, ...]
    shapes: tuple[tuple[float, ...], ...]
    time_s: tuple[float, ...]
    floor_s: NonNegativeFloat
    flops_per_s: NonNegativeFloat
    bytes_per_s: NonNegativeFloat
    held_out: HeldOut
    runs: tuple[str, ...]


class Factor(Record, kw_only=True):
    """Measured time of a block over the sum of its operations' prices, and saved bytes likewise.

    Both ratios against ``activation_elements`` = microbatch_size * seq_len * hidden.
    """

    key: str
    activation_elements: tuple[float, ...]
    ratio: tuple[float, ...]
    saved_ratio: tuple[float, ...] = ()
    held_out: HeldOut
    runs: tuple[str, ...]


class Costs(Record, kw_only=True):
    """Everything ``plan`` needs to know about a cluster's speed."""

    schema_version: Positive = SCHEMA_VERSION
    cluster: Cluster
    dtype: Dtype
    lowering: Literal["eager", "compiled"]
    world_size: Positive = 1  # ranks that worked at once while this was measured
    curves: tuple[Curve, ...]
    surfaces: tuple[Surface, ...]
    factors: tuple[Factor, ...] = ()
    memory_overhead_bytes: NonNegative = 0  # seen by the device but not by the allocator
    runs: tuple[str, ...]
