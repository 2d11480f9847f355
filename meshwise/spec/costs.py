"""Prices as ``calibrate`` writes them to costs.json: fitted curves with their error and range."""

from typing import Annotated, Literal, get_args

from msgspec import Meta

from meshwise.spec.cluster import Cluster
from meshwise.spec.op import Block, Dtype, Lowering, Overlap, Regime, Shaped, Sized
from meshwise.spec.recipe import Recipe
from meshwise.spec.record import (
    Count,
    NonNegative,
    NonNegativeFloat,
    Positive,
    PositiveFloat,
    Record,
)

NOISY = 0.5  # median held-out error of what is too noisy to plan with
# numbers of parameters of laws; -3: any multiple of 3
_PARAMETERS = {"lines": 0, "cubic": 0, "alpha_beta": 2, "root": 3, "smooth": 5, "sigmoid": 9,
               "pieces": -3, "nccl": -2}  # fmt: skip
SCHEMA_VERSION = 5  # 1 lacked how samples ran, 2 most laws, 3 and 4 hosts of layers, by size

# Sources of a price, the best first. A transferred price is another category's (dtype, regime,
# mask ...). A datasheet price uses no measurement of this cluster.
PriceTier = Literal["measured", "interpolated", "extrapolated", "transferred", "datasheet"]
TIERS: tuple[PriceTier, ...] = get_args(PriceTier)


class HeldOut(Record, kw_only=True):
    """Relative error |predicted/measured - 1| at points left out of the fit."""

    median: NonNegativeFloat
    p90: NonNegativeFloat
    num_points: NonNegative

    @property
    def noisy(self) -> bool:
        """Whether what has this error is too noisy to plan with."""
        return self.num_points > 0 and self.median > NOISY


def _check_times(record: "Curve | Surface", points: tuple[object, ...]) -> None:
    if len(record.time_s) != len(points):
        record.fail("time_s", f"must hold one time for each of {len(points)} points")
    if not all(time_s > 0 for time_s in record.time_s):
        record.fail("time_s", "every time must be > 0")


class Price(Record, kw_only=True):
    """The price of some work: how the work ran, and the measurement runs it comes from.

    ``like``: one of the operations that share the price; ``prices.key`` says how others may differ.
    ``noise``: of a typical sample, half the median's interval over the median, or |mean/median - 1|
    if that is more; of single timings, which have none, the median error of points left out (100 %
    if none could be).
    ``transferred_from``: the device that was measured instead (``fit.transfer``), if one was.
    ``doubt``: why all of it looks wrong (``fit.doubts``); it is then 100 % unsure.
    """

    regime: Regime = "warm"
    lowering: Lowering = "eager"
    backend: str = ""
    noise: NonNegativeFloat = 0.0
    runs: tuple[str, ...]
    transferred_from: str = ""
    doubt: str = ""


LawName = Literal["lines", "cubic", "alpha_beta", "root", "smooth", "pieces", "nccl", "sigmoid"]
SizeRule = Literal["busiest", "sum", "max_of_max", "max_of_sum"]  # ``prices.uneven``


class Law(Record, kw_only=True):
    """A law of time against bytes (``prices.laws``), fitted to a curve's knots. ``held_out``: at
    every second knot, predicted from the others."""

    parameters: tuple[float, ...] = ()
    held_out: HeldOut


class NoKnot(Record, kw_only=True):
    """A measured point that a curve leaves out, and the ``reason``."""

    x_bytes: PositiveFloat
    time_s: PositiveFloat
    reason: str


class Curve(Price, kw_only=True):
    """Time against bytes: exact at the measured knots, and a law between and beyond them.

    ``law``: the one of ``laws`` in use, by default the one with the least held-out error. Beyond
    the last knot times rise by ``end_s_per_byte``; ``end_range_s_per_byte`` is the least and the
    most that this may be, ``beyond`` its error at points about 16 times beyond shorter curves.
    """

    like: Sized
    law: LawName
    laws: dict[LawName, Law]
    x_bytes: tuple[float, ...]
    time_s: tuple[float, ...]
    end_s_per_byte: NonNegativeFloat
    end_range_s_per_byte: tuple[NonNegativeFloat, NonNegativeFloat]
    beyond: HeldOut
    no_knots: tuple[NoKnot, ...] = ()

    @property
    def held_out(self) -> HeldOut:
        """The error of the law in use."""
        return self.laws[self.law].held_out

    def check(self) -> None:
        if not self.x_bytes or list(self.x_bytes) != sorted(set(self.x_bytes)):
            self.fail("x_bytes", "must hold sizes, each larger than the one before")
        if self.x_bytes[0] <= 0:
            self.fail("x_bytes", "every size must be > 0")
        least, most = self.end_range_s_per_byte
        if not least <= self.end_s_per_byte <= most:
            self.fail("end_s_per_byte", "must be within end_range_s_per_byte")
        _check_times(self, self.x_bytes)
        if self.law not in self.laws:
            self.fail("law", f"must be one of laws: {', '.join(self.laws)}")
        for name, law in self.laws.items():
            count, each = len(law.parameters), _PARAMETERS[name]
            if (not count or count % each) if each < 0 else count != each:
                self.fail("laws", f"{name} cannot have {count} parameters")
            if name == "smooth" and law.parameters[-1] <= 0:
                self.fail("laws", "the last parameter of smooth must be > 0")
            starts = law.parameters[2::3] if name == "pieces" else ()
            if list(starts) != sorted(starts):
                self.fail("laws", "the regimes of pieces must ascend")


class Surface(Price, kw_only=True):
    """Times of operations with several dims: a roofline over the nearest measured utilisation.

    roofline = floor_s + max(FLOPs / flops_per_s, bytes / bytes_per_s); utilisation =
    roofline / measured, averaged over the nearest shapes in log space (weights 1/distance^2).
    ``dims``: fields of ``like``. ``no_shapes``: measured shapes left out, each with the reason.
    """

    like: Shaped
    dims: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    time_s: tuple[float, ...]
    floor_s: NonNegativeFloat
    flops_per_s: PositiveFloat
    bytes_per_s: PositiveFloat
    held_out: HeldOut
    no_shapes: tuple[str, ...] = ()

    def check(self) -> None:
        if not set(self.dims) <= set(self.like.__struct_fields__):
            self.fail("dims", f"must be of {', '.join(self.like.__struct_fields__)}")
        if not self.shapes or any(len(shape) != len(self.dims) for shape in self.shapes):
            self.fail("shapes", f"must hold shapes of the {len(self.dims)} dims {self.dims}")
        if not all(extent > 0 for shape in self.shapes for extent in shape):
            self.fail("shapes", "every extent must be > 0")
        _check_times(self, self.shapes)


class Factor(Price, kw_only=True):
    """Corrects the sum of a block's operations' prices, products slowed down by the power cap: to
    ``ratio`` times the sum, and no less than the ``host_s`` that the host takes to launch it
    (``prices.evaluate.slower_s``). ``saved_ratio``: measured over counted saved bytes. They are by
    ``Block.activation_elements``. Errors are relative: what other limits, as likely, differ by."""

    like: Block
    activation_elements: tuple[float, ...]
    host_s: tuple[NonNegativeFloat, ...]
    ratio: tuple[float, ...]
    host_error: NonNegativeFloat = 0.0
    ratio_error: NonNegativeFloat = 0.0
    saved_ratio: tuple[float, ...] = ()
    held_out: HeldOut

    def check(self) -> None:
        sizes = self.activation_elements
        if not sizes or list(sizes) != sorted(set(sizes)) or sizes[0] <= 0:
            self.fail("activation_elements", "must hold sizes > 0, each larger than the last")
        for field in ("host_s", "ratio", "saved_ratio"):
            values = getattr(self, field)
            if (values or field != "saved_ratio") and len(values) != len(sizes):
                self.fail(field, f"must hold one number for each of {len(sizes)} sizes")
            if field != "host_s" and not all(value > 0 for value in values):
                self.fail(field, "every ratio must be > 0")


class Slowdown(Price, kw_only=True):
    """The times of work and of a collective beside each other, each over its time alone. Work of
    one type (a block, say) and direction shares one."""

    like: Overlap
    compute: PositiveFloat
    collective: PositiveFloat


class Spread(Record, kw_only=True):
    """Differences between equal ranks, as standard deviations of logarithms of times: those that
    last as long as the ranks work, and those of single calls of a layer, which pass."""

    lasting: Annotated[float, Meta(ge=0, le=10)]
    passing: Annotated[float, Meta(ge=0, le=10)]


# fields of a recipe that change a step, and that no prediction knows
UNPRICED = ("prefetch", "async_tp")
NO_PRICE = "plans do not price it yet; meshwise run --model ... --recipe runs it without a price"


class Costs(Record, kw_only=True):
    """Everything that ``plan`` needs to know about a cluster's speed.

    Prices may be of any dtype and lowering. ``dtype``, ``lowering`` and ``recipe``: those of plans.
    """

    schema_version: Positive = SCHEMA_VERSION
    cluster: Cluster
    dtype: Dtype
    lowering: Lowering
    recipe: Recipe = Recipe()
    world_size: Count = 1  # ranks that worked at once during the measurement
    curves: tuple[Curve, ...]
    surfaces: tuple[Surface, ...]
    factors: tuple[Factor, ...] = ()
    slowdowns: tuple[Slowdown, ...] = ()
    spread: Spread | None = None  # None: not measured
    memory_overhead_bytes: NonNegative = 0  # seen by the device but not by the allocator
    runs: tuple[str, ...]
    versions: dict[str, str] = {}  # of device, torch, nccl and driver when it was measured

    def check(self) -> None:
        recipe, usual = self.recipe, Recipe()
        odd = [name for name in UNPRICED if getattr(recipe, name) != getattr(usual, name)]
        odd += ["routing"] * (recipe.routing == "skewed")
        odd += ["fp32_precision"] * (self.dtype == "fp32" and recipe.fp32_precision == "tf32")
        if odd:
            said = ", ".join(f"recipe.{name} = {getattr(recipe, name)}" for name in odd)
            raise ValueError(f"{said}: {NO_PRICE}")
        if recipe.fp8 and self.dtype != "bf16":
            raise ValueError("recipe.fp8 = True: it casts products of bf16; plan in dtype bf16")
        measured = any(getattr(surface.like, "dtype", "") == "fp8" for surface in self.surfaces)
        if recipe.fp8 and not measured and "fp8" not in self.cluster.device.peak_flops:
            raise ValueError(
                f"recipe.fp8 = True: cluster {self.cluster.name!r} does not say device.peak_flops "
                "of fp8; use false, or add it if the device has such products"
            )
        for name in ("weights", "reduce") if self.dtype != "bf16" else ():
            if getattr(recipe, name) == "bf16":
                raise ValueError(f"recipe.{name} = bf16: it is for plans of dtype bf16; use fp32")
