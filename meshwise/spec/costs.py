"""Prices as ``calibrate`` writes them to costs.json: fitted curves with their error and range."""

from typing import Literal, get_args

from meshwise.spec.cluster import Cluster
from meshwise.spec.op import Block, Dtype, Lowering, Regime, Shaped, Sized
from meshwise.spec.record import NonNegative, NonNegativeFloat, Positive, PositiveFloat, Record

SCHEMA_VERSION = 2  # 1 did not say how its samples ran, nor of how many keys attention was

# Where a price comes from, the best first. A transferred one is that of another category (dtype,
# regime, mask ...); a datasheet's rests on no measurement of this cluster.
PriceTier = Literal["measured", "interpolated", "extrapolated", "transferred", "datasheet"]
TIERS: tuple[PriceTier, ...] = get_args(PriceTier)


class HeldOut(Record, kw_only=True):
    """Relative error |predicted/measured - 1| on points left out of the fit, one at a time."""

    median: NonNegativeFloat
    p90: NonNegativeFloat
    num_points: NonNegative


def _check_times(record: "Curve | Surface", points: tuple[object, ...]) -> None:
    if len(record.time_s) != len(points):
        record.fail("time_s", f"must hold one time for each of {len(points)} points")
    if not all(time_s > 0 for time_s in record.time_s):
        record.fail("time_s", "every time must be > 0")


class Price(Record, kw_only=True):
    """A price: of which work, run how, from which runs.

    ``like`` is one of the operations that share it; ``prices.key`` says in what others may differ.
    ``noise`` of a usual sample: half the median's interval over the median.
    """

    regime: Regime = "warm"
    lowering: Lowering = "eager"
    backend: str = ""
    noise: NonNegativeFloat = 0.0
    runs: tuple[str, ...]


class Curve(Price, kw_only=True):
    """Time against bytes: measured knots, which are honoured, and a law between and beyond them.

    loglog draws straight lines in log-log; alpha_beta is t = alpha_s + x * beta_s_per_byte, times
    what the knots on both sides differ from it. ``law`` is the one with the smaller held-out error;
    beyond ``x_bytes[-1]``, beta continues from the last knot.
    """

    like: Sized
    law: Literal["loglog", "alpha_beta"]
    x_bytes: tuple[float, ...]
    time_s: tuple[float, ...]
    alpha_s: NonNegativeFloat
    beta_s_per_byte: NonNegativeFloat
    held_out: dict[str, HeldOut]

    def check(self) -> None:
        if self.law == "alpha_beta" and not self.alpha_s + self.beta_s_per_byte:
            self.fail("law", "alpha_beta needs alpha_s or beta_s_per_byte")
        if not self.x_bytes or list(self.x_bytes) != sorted(set(self.x_bytes)):
            self.fail("x_bytes", "must hold sizes, each larger than the one before")
        _check_times(self, self.x_bytes)
        if self.law not in self.held_out:
            self.fail("held_out", f"must hold the error of the law used, {self.law}")


class Surface(Price, kw_only=True):
    """Times of many-dimensional operations: nearest measured utilisation times a roofline.

    roofline = floor_s + max(FLOPs / flops_per_s, bytes / bytes_per_s); utilisation =
    roofline / measured, averaged over the nearest shapes in log space (weights 1/distance^2).
    ``dims`` are fields of ``like``.
    """

    like: Shaped
    dims: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    time_s: tuple[float, ...]
    floor_s: NonNegativeFloat
    flops_per_s: PositiveFloat
    bytes_per_s: PositiveFloat
    held_out: HeldOut

    def check(self) -> None:
        if not set(self.dims) <= set(self.like.__struct_fields__):
            self.fail("dims", f"must be of {', '.join(self.like.__struct_fields__)}")
        if not self.shapes or any(len(shape) != len(self.dims) for shape in self.shapes):
            self.fail("shapes", f"must hold shapes of the {len(self.dims)} dims {self.dims}")
        if not all(extent > 0 for shape in self.shapes for extent in shape):
            self.fail("shapes", "every extent must be > 0")
        _check_times(self, self.shapes)


class Factor(Price, kw_only=True):
    """Measured time of a block over the sum of its operations' prices, and saved bytes likewise.

    Both ratios against ``Block.activation_elements``.
    """

    like: Block
    activation_elements: tuple[float, ...]
    ratio: tuple[float, ...]
    saved_ratio: tuple[float, ...] = ()
    held_out: HeldOut

    def check(self) -> None:
        sizes = self.activation_elements
        if not sizes or list(sizes) != sorted(set(sizes)) or sizes[0] <= 0:
            self.fail("activation_elements", "must hold sizes > 0, each larger than the last")
        for field in ("ratio", "saved_ratio"):
            values = getattr(self, field)
            if (values or field == "ratio") and len(values) != len(sizes):
                self.fail(field, f"must hold one number for each of {len(sizes)} sizes")
            if not all(value > 0 for value in values):
                self.fail(field, "every ratio must be > 0")


class Costs(Record, kw_only=True):
    """Everything ``plan`` needs to know about a cluster's speed.

    Prices are of any dtype and lowering. ``dtype`` and ``lowering`` are those that plans are made
    in unless something else is asked for.
    """

    schema_version: Positive = SCHEMA_VERSION
    cluster: Cluster
    dtype: Dtype
    lowering: Lowering
    world_size: Positive = 1  # ranks that worked at once while this was measured
    curves: tuple[Curve, ...]
    surfaces: tuple[Surface, ...]
    factors: tuple[Factor, ...] = ()
    memory_overhead_bytes: NonNegative = 0  # seen by the device but not by the allocator
    runs: tuple[str, ...]
