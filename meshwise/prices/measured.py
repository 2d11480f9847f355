"""Evaluate fitted prices: an operation in, its time with an interval and its tier out.

    elementwise   the curve of its kind, else of copies, over bytes read plus written
    gemm,         nearest measured utilisations times a roofline (``spec.costs.Surface``)
    attention
    collective    the curve of its kind, group size and tier, over nccl-tests' size

A measured shape returns its measured time. Between points the fitted law; beyond them the
alpha-beta line through the last knot, said so and with a wider interval. What was never measured
is priced by the data sheet where ``Prices`` may do so, else it is an error that names the command
to measure it; what has no roofline is an error always.
"""

import math
from typing import NamedTuple

import msgspec
import numpy as np

from meshwise.prices.datasheet import Datasheet
from meshwise.spec import (
    TIERS,
    Attention,
    Block,
    Cluster,
    Collective,
    Costs,
    Curve,
    Elementwise,
    Factor,
    Gemm,
    HeldOut,
    Model,
    Op,
    PriceTier,
    Surface,
)

MEASURE = "measure it: meshwise measure profile --resume && meshwise calibrate"
TP_DEGREES = tuple(2**power for power in range(8))
NEIGHBOURS = 4
FAR = 4.0  # each such factor beyond the measured range adds the held-out error once more


class Estimate(NamedTuple):
    """``error`` is relative (held-out p90 of a fitted price); ``source`` is its tier, and ``note``
    what a user should know of it."""

    time_s: float
    error: float
    source: PriceTier
    note: str = ""


def gemm_dims(op: Gemm) -> tuple[float, ...]:
    return (op.m, op.n, op.k)


def attention_dims(op: Attention) -> tuple[float, ...]:
    return (op.batch * op.heads, op.q_len, op.head_dim)


def surface_key(op: Gemm | Attention) -> str:
    """Operations with one key share a surface."""
    if isinstance(op, Gemm):
        layout = ("t" if op.trans_a else "n") + ("t" if op.trans_b else "n")
        return f"gemm/{op.dtype}/{layout}"
    return f"attention/{op.dtype}/{op.direction}" + ("/causal" if op.causal else "")


def curve_key(op: Elementwise | Collective, cluster: Cluster) -> str:
    """Operations with one key share a curve; a group's place counts only by its tier."""
    if isinstance(op, Elementwise):
        return f"elementwise/{op.kind}"
    tier = cluster.tier_of(op.group_size, op.group_stride)
    return f"{op.kind}/{tier.name}/{op.group_size}"


def factor_key(block: Block) -> str:
    parallel = f"tp{block.tp}" + ("+sp" if block.sequence_parallel else "")
    return f"{_kind_key(block)}/{parallel}"


def _kind_key(block: Block) -> str:
    family = "" if isinstance(block.model, Model) else f"{block.model.__struct_config__.tag}/"
    experts = "experts/" if block.model.experts else ""
    return f"{family}{experts}{block.part}/{block.direction}"


def roofline_s(op: Gemm | Attention, surface: Surface) -> float:
    """floor + max(FLOPs / rate, bytes / rate): a lower bound up to measurement noise."""
    return surface.floor_s + max(op.flops / surface.flops_per_s, op.bytes / surface.bytes_per_s)


def interpolate_utilisation(
    dims: tuple[float, ...], shapes: np.ndarray, log_utilisation: np.ndarray
) -> float:
    """exp of the mean log utilisation of the nearest shapes, weighted by 1/distance^2."""
    distance = np.sqrt(((np.log(shapes) - np.log(np.asarray(dims))) ** 2).sum(axis=1))
    nearest = np.argsort(distance, kind="stable")[:NEIGHBOURS]
    weights = 1 / np.maximum(distance[nearest], 1e-9) ** 2
    return math.exp(float((weights * log_utilisation[nearest]).sum() / weights.sum()))


def interpolate_loglog(x: float, knots_x: np.ndarray, knots_t: np.ndarray) -> float:
    """Piecewise-linear in log-log between knots; constant before the first."""
    return math.exp(float(np.interp(math.log(x), np.log(knots_x), np.log(knots_t))))


class Prices:
    """Costs indexed for evaluation; with ``datasheet`` what they lack comes from the cluster's data
    sheet. ``notes`` gathers what to know of the prices asked for since ``begin``."""

    def __init__(self, costs: Costs, *, datasheet: bool = False) -> None:
        self.costs = costs
        self.datasheet = Datasheet(costs.cluster) if datasheet else None
        self.curves = {curve.key: curve for curve in costs.curves}
        self.surfaces = {surface.key: surface for surface in costs.surfaces}
        self.factors = {factor.key: factor for factor in costs.factors}
        self.notes: dict[str, int] = {}
        self._sources = set[PriceTier]()
        self._cache: dict[Op, Estimate] = {}
        self._logs: dict[str, tuple[np.ndarray, np.ndarray]] = {}

    @property
    def nothing_measured(self) -> bool:
        return not (self.curves or self.surfaces)

    @property
    def tier(self) -> PriceTier:
        """The lowest of the prices asked for since ``begin``."""
        return max(self._sources, key=TIERS.index, default=TIERS[0])

    def begin(self) -> None:
        """Forget the notes and tiers of the prices asked for so far."""
        self.notes.clear()
        self._sources.clear()

    def estimate(self, op: Op) -> Estimate:
        """Time of one operation on one rank, in seconds."""
        found = self._cache.get(op)
        if found is None:
            found = self._cache[op] = self._estimate(op)
        if found.note:
            self._note(found.note)
        self._sources.add(found.source)
        return found

    def _estimate(self, op: Op) -> Estimate:
        if isinstance(op, Gemm | Attention):
            return self._from_surface(op)
        if isinstance(op, Elementwise):
            curve = self.curves.get(curve_key(op, self.costs.cluster))
            if curve is None:
                curve = self.curves.get("elementwise/copy")
            return self._from_curve(curve, "elementwise/copy", op, float(op.bytes))
        if isinstance(op, Collective):
            if op.group_size == 1 or op.size_bytes == 0:  # nothing to move
                return Estimate(0.0, 0.0, "measured")
            key = curve_key(op, self.costs.cluster)
            return self._from_curve(self.curves.get(key), key, op, float(op.size_bytes))
        raise ValueError(f"{type(op).__name__} has no price of its own; add up its operations")

    def _unmeasured(self, key: str, op: Op) -> Estimate:
        """By the data sheet, or the error of a price that is missing."""
        if self.datasheet is None:
            raise ValueError(f"no price for {key}; {MEASURE}")
        try:
            time_s, error = self.datasheet.time_s(op)
        except ValueError as lacking:
            raise ValueError(f"no price for {key}; {MEASURE} ({lacking})") from None
        note = "" if self.nothing_measured else f"{key} was not measured: its data sheet's price"
        return Estimate(time_s, error, "datasheet", note)

    def _from_curve(self, curve: Curve | None, key: str, op: Op, x: float) -> Estimate:
        if curve is None:
            return self._unmeasured(key, op)
        first, last = curve.x_bytes[0], curve.x_bytes[-1]
        error = _untested_as_unknown(curve.held_out[curve.law])
        if x > last:  # continue the last knot at the fitted rate
            beyond = f"{key}: {x / last:.1f} x beyond the largest measured size"
            slope = curve.beta_s_per_byte or curve.time_s[-1] / last
            error *= 1 + math.log(x / last, FAR)
            return Estimate(
                curve.time_s[-1] + slope * (x - last),
                error,
                "extrapolated",
                beyond if x > FAR * last else "",
            )
        if curve.law == "alpha_beta":
            return Estimate(curve.alpha_s + x * curve.beta_s_per_byte, error, "interpolated")
        time_s = interpolate_loglog(
            max(x, first), np.asarray(curve.x_bytes), np.asarray(curve.time_s)
        )
        return Estimate(time_s, error, "measured" if x in curve.x_bytes else "interpolated")

    def _from_surface(self, op: Gemm | Attention) -> Estimate:
        key = surface_key(op)
        surface = self.surfaces.get(key)
        if surface is None:
            return self._unmeasured(key, op)
        dims = gemm_dims(op) if isinstance(op, Gemm) else attention_dims(op)
        window = op.window if isinstance(op, Attention) else None
        if window is None and dims in surface.shapes:
            time_s = surface.time_s[surface.shapes.index(dims)]
            return Estimate(time_s, surface.noise, "measured")
        full = op if window is None else msgspec.structs.replace(op, window=None)
        shapes, log_utilisation = self._log_utilisation(surface, full)
        utilisation = interpolate_utilisation(dims, shapes, log_utilisation)
        error, note = _untested_as_unknown(surface.held_out), ""
        if window is not None:  # no such surface is fitted
            error = max(error, 1.0)
            note = f"{key}: the rate of attention in full stands in for that with a window"
        outside = np.max(
            np.maximum(np.asarray(dims) / shapes.max(0), shapes.min(0) / np.asarray(dims))
        )
        if outside > FAR:
            note = f"{key}: shape {'x'.join(map(str, dims))} is {outside:.0f} x outside"
            error *= 1 + math.log(outside, FAR)
        source: PriceTier = "extrapolated" if outside > 1 else "interpolated"
        return Estimate(roofline_s(op, surface) / utilisation, error, source, note)

    def _log_utilisation(
        self, surface: Surface, like: Gemm | Attention
    ) -> tuple[np.ndarray, np.ndarray]:
        if surface.key not in self._logs:
            rooflines = [roofline_s(shape_op(like, shape), surface) for shape in surface.shapes]
            logs = np.log(np.asarray(rooflines) / np.asarray(surface.time_s))
            self._logs[surface.key] = (np.asarray(surface.shapes, float), logs)
        return self._logs[surface.key]

    def _note(self, text: str) -> None:
        self.notes[text] = self.notes.get(text, 0) + 1

    def factor(self, block: Block) -> tuple[float, HeldOut | None]:
        """Measured over composed time of a block like this one; 1 when none was measured, and what
        blocks took elsewhere when nothing was."""
        if self.datasheet is not None and self.nothing_measured:
            return self.datasheet.known.block.ratio, None
        found = self.factors.get(factor_key(block))
        if found is None:
            stand_in = self._nearest_factor(block)
            if stand_in is not None:
                return _at_size(stand_in, stand_in.ratio, block), self._spread(block)
            self._note(f"no {block.part} was measured; operations are added up as they are")
            return 1.0, None
        return _at_size(found, found.ratio, block), found.held_out

    def _nearest_factor(self, block: Block) -> Factor | None:
        """The same part and direction at the nearest tp, the same sequence parallelism first."""
        others = [
            msgspec.structs.replace(block, tp=tp, sequence_parallel=sp)
            for tp in sorted(TP_DEGREES, key=lambda tp: abs(math.log(tp / block.tp)))
            for sp in (block.sequence_parallel, not block.sequence_parallel)
            if not (sp and tp == 1)
        ]
        for other in others:
            if factor_key(other) in self.factors:
                stands_in = f"{factor_key(other)} stands in"
                self._note(f"no {factor_key(block)} was measured; {stands_in}")
                return self.factors[factor_key(other)]
        return None

    def _spread(self, block: Block) -> HeldOut:
        """How much the measured ratios of a part and direction differ: the error of a stand-in."""
        kind = f"{_kind_key(block)}/"
        ratios = [r for key, f in self.factors.items() if key.startswith(kind) for r in f.ratio]
        half = (max(ratios) / min(ratios) - 1) / 2
        return HeldOut(median=half, p90=half, num_points=len(ratios))

    def saved_ratio(self, block: Block) -> float:
        """Measured over counted bytes that a block saves for backward; 1 when not measured."""
        found = self.factors.get(factor_key(block))
        return _at_size(found, found.saved_ratio, block) if found and found.saved_ratio else 1.0


def _untested_as_unknown(held_out: HeldOut) -> float:
    """The error of a price; one that could not be tested may be wrong by as much as it is."""
    return held_out.p90 if held_out.num_points else 1.0


def _at_size(factor: Factor, values: tuple[float, ...], block: Block) -> float:
    elements = math.log(block.microbatch_size * block.seq_len * block.model.hidden)
    return float(np.interp(elements, np.log(factor.activation_elements), values))


def shape_op(like: Gemm | Attention, shape: tuple[float, ...]) -> Gemm | Attention:
    """The operation of a stored shape, of the same kind as ``like``."""
    a, b, c = map(int, shape)
    if isinstance(like, Gemm):
        return msgspec.structs.replace(like, m=a, n=b, k=c)
    return msgspec.structs.replace(
        like, batch=1, heads=a, kv_heads=a, q_len=b, kv_len=b, head_dim=c
    )
