"""Evaluate fitted prices. In: an operation. Out: its time, with an interval and its tier.

    elementwise   the curve of its kind over bytes read plus written
    gemm,         nearest measured utilisations times a roofline (``spec.costs.Surface``)
    attention,
    convolution
    collective    the curve of its kind and links over nccl-tests' size

The price of the operation's category (``key``) is evaluated at its coordinates. A measured shape
returns its measured time. Between points the fitted law holds. Beyond them times rise by the slope
at the curve's end, with a note and a wider interval; collectives up to 256 times the largest. If a
category was not measured, a near one stands in, with a note and a larger error; it is never called
measured. Element-wise kinds without a price count as copies of as many bytes. If nothing stands in,
the data sheet prices the operation if ``Prices`` may use it. Otherwise, or if it has no roofline,
an error names the command.
"""

import contextlib
import math
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from meshwise.prices.datasheet import Datasheet, attainable
from meshwise.prices.key import Category, How, Key, how, in_step, name_of, op_key, size
from meshwise.prices.laws import KnotTimes
from meshwise.spec import (
    TIERS,
    Block,
    Case,
    Collective,
    Costs,
    Curve,
    Elementwise,
    Factor,
    HeldOut,
    Op,
    PriceTier,
    Shaped,
    Sized,
    Surface,
)
from meshwise.spec.label import label

MEASURE = (
    "measure it: meshwise measure profile --resume with the options of the run, then "
    "meshwise calibrate"
)
AS_COPIES = "element-wise work that was not measured itself is priced as copies of as many bytes"
TOO_NOISY = "its curve is too noisy to plan with: half of the points left out were over 50 % off"
MOST_BEYOND = 256  # times the largest measured size
NEIGHBOURS = 4
SHARP = 4  # where two limits are equal, work takes 19 % longer than either
UNSURE_BYTES = 2**26  # below, groups of other sizes tell little
FAR = 4.0  # each such factor beyond the measured range adds the held-out error again

# The relative error that each difference between a category and its stand-in adds. The values of
# storage, scaling, dtype and direction cover 9 of 10 pairs of cases on 4 H200 (stored under
# benchmarks/2026-11-21-operators-4xh200). The others are guesses.
APART = {
    "storage": 0.1, "scaling": 0.1, "dtype": 0.25, "direction": 0.3, "backend": 1.0, "regime": 1.0,
    "in_place": 0.25, "lowering": 0.3, "op": 0.5, "causal": 0.5, "head_dim_v": 0.5, "kv_heads": 0.5,
    "groups": 1.0, "batched": 0.5, "window": 1.0, "group": 1.0, "product": 0.3, "kernel": 0.5,
    "stride": 0.5,
}  # fmt: skip
# Of collectives: on 4 H200 the smallest take 25 to 28 us in torch and 18 to 19 in nccl-tests, those
# of 4 GiB the same. Equal splits beside none (PARAM, tests/data/param_h200x4): 8 % apart in the
# median, up to 33 % in three of four, in logs with outliers.
COLLECTIVES_APART = {"regime": 0.25, "backend": 0.25, "splits": 0.3}
# differences of blocks, besides tp; only their order matters
BLOCKS_APART = {"form": 0.3, "sequence_parallel": 0.4, "dtype": 0.5, "sizes": 1.5}
# The error, a guess, of layers priced without a measured block, by hosts as usual or eager kernels,
# or of blocks for which the only known ratio stands in.
UNTRIED = HeldOut(median=APART["lowering"], p90=APART["lowering"], num_points=0)

Fitted = Curve | Surface | Factor


class Estimate(NamedTuple):
    """A price. ``error``: relative (held-out p90 of a fitted price). ``source``: its tier.
    ``note``: remarks for the user, separated by semicolons."""

    time_s: float
    error: float
    source: PriceTier
    note: str = ""


def roofline_s(op: Shaped, surface: Surface, peaks: float = 1.0) -> float:
    """Return floor + max(FLOPs / rate, bytes / rate), a lower bound up to measurement noise.
    ``peaks``: the peak of the operation's dtype over that of the surface's."""
    rate = surface.flops_per_s * peaks
    return surface.floor_s + max(op.flops / rate, op.bytes / surface.bytes_per_s)


def shape_op(surface: Surface, shape: tuple[int, ...]) -> Shaped:
    """Return the operation of a measured shape."""
    return msgspec.structs.replace(surface.like, **dict(zip(surface.dims, shape, strict=True)))


def interpolate_utilisation(
    dims: tuple[int, ...], shapes: np.ndarray, log_utilisation: np.ndarray
) -> float:
    """Return exp of the nearest shapes' mean log utilisation, weighted by 1/distance^2."""
    distance = np.sqrt(((np.log(shapes) - np.log(np.asarray(dims))) ** 2).sum(axis=1))
    nearest = np.argsort(distance, kind="stable")[:NEIGHBOURS]
    weights = 1 / np.maximum(distance[nearest], 1e-9) ** 2
    return math.exp(float((weights * log_utilisation[nearest]).sum() / weights.sum()))


def times_of(curve: Curve) -> KnotTimes:
    """Return a curve's times, for sizes of any shape. At a knot it is the measured time."""
    law = curve.laws[curve.law]
    return KnotTimes(curve.law, law.parameters, curve.x_bytes, curve.time_s, curve.end_s_per_byte)


class Prices:
    """Costs, indexed for evaluation. With ``datasheet``, missing prices come from the cluster's
    data sheet. ``notes``: the remarks on prices asked for since ``begin``."""

    def __init__(self, costs: Costs, *, datasheet: bool = False) -> None:
        self.costs = costs
        self.datasheet = Datasheet(costs.cluster) if datasheet else None
        self.known: dict[Category, Fitted] = {}
        self._times: dict[int, KnotTimes] = {}
        fitted: list[Fitted] = [*costs.curves, *costs.surfaces, *costs.factors]
        for price in fitted:
            try:
                key = op_key(price.like, how(price), costs.cluster)
            except ValueError:  # a group too large for this cluster, which has fewer hosts
                continue
            if isinstance(price, Curve):
                try:
                    self._times[id(price)] = times_of(price)
                except ValueError as error:
                    raise ValueError(f"{key.name}: {error}") from None
            other = self.known.get(key.category, price)
            if msgspec.structs.replace(other, like=price.like) != price:
                raise ValueError(
                    f"costs: two prices of {key.name}; make them anew of all runs: "
                    f"meshwise calibrate RUN... ({', '.join(costs.runs)})"
                )
            self.known[key.category] = price
        self.notes: dict[str, int] = {}
        self._sources = set[PriceTier]()
        self._cache: dict[tuple[Op, How | None], Estimate] = {}
        self._stand_ins: dict[Category, tuple[Category, float] | None] = {}
        self._logs: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    @property
    def nothing_measured(self) -> bool:
        return not (self.costs.curves or self.costs.surfaces)

    @property
    def tier(self) -> PriceTier:
        """The lowest tier of the prices asked for since ``begin``."""
        return max(self._sources, key=TIERS.index, default=TIERS[0])

    def begin(self) -> None:
        """Forget the notes and tiers of the prices asked for so far."""
        self.notes.clear()
        self._sources.clear()

    def estimate(self, op: Op, run: How | None = None) -> Estimate:
        """Return the price of an operation on one rank, by default run as in a training step."""
        found = self._cache.get((op, run))
        if found is None:
            found = self._cache[op, run] = self._estimate(op, run)
        for note in filter(None, found.note.split("; ")):
            self._note(note)
        self._sources.add(found.source)
        return found

    def _estimate(self, op: Op, run: How | None) -> Estimate:
        if not isinstance(op, Shaped | Sized):
            raise ValueError(f"{type(op).__name__} has no price of its own; add up its operations")
        if isinstance(op, Collective) and op.bytes == 0:
            return Estimate(0.0, 0.0, "measured")  # nothing to move
        key = self._key(op, run)
        price = self.known.get(key.category)
        if price is not None:
            return self._at(price, op, key, own=True)
        near = self._stand_in(op, key.category)
        if near is None:
            return self._unmeasured(key, op)
        other, apart = key._replace(category=near[0]), near[1]
        found = self._at(self.known[other.category], op, other, own=False)
        said = f"{key.name} was not measured: {other.name} stands in"
        if isinstance(op, Elementwise) and op.kind != "copy":
            said = AS_COPIES
        note = f"{said}; {found.note}" if found.note else said
        return Estimate(found.time_s, found.error + apart, "transferred", note)

    def _key(self, op: Op, run: How | None = None) -> Key:
        cluster = self.costs.cluster
        return op_key(op, run or in_step(op, cluster, self.costs.lowering), cluster)

    def _unmeasured(self, key: Key, op: Op) -> Estimate:
        """Price by the data sheet, or raise a ValueError: the price is missing."""
        name = key.name
        if self.datasheet is None:
            raise ValueError(f"no price for {name}; {MEASURE}; {_lacks(op)}")
        try:
            time_s, error = self.datasheet.time_s(op)
        except ValueError as lacking:
            said = f"no price for {name}; {MEASURE} ({lacking}); {_lacks(op)}"
            raise ValueError(said) from None
        note = "" if self.nothing_measured else f"{name} was not measured: its data sheet's price"
        if isinstance(op, Collective) and (near := self._of_other_ranks(key.category)):
            time_s = slower_s(min(near.time_s), time_s)
            note += f", and the least time of {name_of(near, self.costs.cluster)}"
            note += ", unsure below 64 MiB" if op.size_bytes < UNSURE_BYTES else ""
        return Estimate(time_s, error, "datasheet", note)

    def _of_other_ranks(self, mine: Category) -> Curve | None:
        """Return the curve of the same collective among other ranks over the same outermost links,
        with the number of ranks over these that is nearest to this one's."""
        wanted = dict(mine)
        count, links = _outermost(wanted.pop("group"))
        found: list[tuple[float, Curve]] = []
        for category, price in self.known.items():
            words = dict(category)
            theirs = words.pop("group", "")
            if words == wanted and isinstance(price, Curve):
                others, their_links = _outermost(theirs)
                if links == their_links:
                    found.append((abs(math.log(count / others)), price))
        return min(found, key=lambda each: each[0])[1] if found else None

    def _too_far(self, op: Collective, where: str) -> Estimate:
        """Price a message too far beyond all knots by the data sheet, or raise a ValueError."""
        where += " the largest measured size"
        if self.datasheet is not None:
            with contextlib.suppress(ValueError):
                time_s, error = self.datasheet.time_s(op)
                return Estimate(time_s, error, "datasheet", f"{where}: its data sheet's price")
        raise ValueError(f"{where}, and a price holds for {MOST_BEYOND} x; {MEASURE}; {_lacks(op)}")

    def fitted(self, op: Op, run: How | None = None) -> Fitted | None:
        """Return the fitted price that an operation has: its own category's, or a stand-in's."""
        category = self._key(op, run).category
        near = (category, 0.0) if category in self.known else self._stand_in(op, category)
        return near and self.known[near[0]]

    def _stand_in(self, op: Op, category: Category) -> tuple[Category, float] | None:
        if category not in self._stand_ins:
            self._stand_ins[category] = self._nearest(op, category)
        return self._stand_ins[category]

    def _nearest(self, op: Op, category: Category) -> tuple[Category, float] | None:
        """Return the nearest category that may stand in, and the error that this adds."""
        mine, least, found = dict(category), math.inf, category
        for other in self.known:
            theirs = dict(other)
            if theirs.keys() == mine.keys():
                differ = [name for name in mine if mine[name] != theirs[name]]
                apart = sum(self._apart(op, name, mine[name], theirs[name]) for name in differ)
                if apart < least:
                    least, found = apart, other
        return None if least == math.inf else (found, least)

    def _apart(self, op: Op, name: str, mine: str, theirs: str) -> float:
        """Return the distance of two words of a category; infinite if one cannot stand in."""
        if isinstance(op, Block):
            if name == "tp":
                return abs(math.log2(int(mine[2:]) / int(theirs[2:])))
            return BLOCKS_APART.get(name, math.inf)
        if name == "op" and {mine, theirs} == {"all_to_all", "all_to_all_v"}:
            return COLLECTIVES_APART["splits"]
        if name == "op":
            copies = isinstance(op, Elementwise) and op.kind not in ("h2d", "d2h")
            return APART["op"] if copies and theirs == "copy" else math.inf
        if isinstance(op, Collective) and name in COLLECTIVES_APART:
            return COLLECTIVES_APART[name]
        if name == "group":  # as many ranks over the same outermost links
            return APART["group"] if _outermost(mine) == _outermost(theirs) else math.inf
        if name == "dtype" and isinstance(op, Shaped) and self._peaks(mine, theirs) is None:
            return math.inf
        return APART.get(name, math.inf)

    def _peaks(self, dtype: str, other: str) -> float | None:
        """Return the data sheet's peak FLOP/s in a dtype over those in another, or None."""
        known = self.costs.cluster.device.peak_flops
        if dtype == other or {dtype, other} == {"bf16", "fp16"}:
            return 1.0
        return known[dtype] / known[other] if dtype in known and other in known else None

    def _at(self, price: Fitted, op: Op, key: Key, *, own: bool) -> Estimate:
        """Evaluate a price: of the operation's ``own`` category, or of one that stands in."""
        if isinstance(price, Curve):
            (x,) = key.coordinates.values()
            if isinstance(op, Collective) and x > MOST_BEYOND * price.x_bytes[-1]:
                return self._too_far(op, f"{key.name}: {x / price.x_bytes[-1]:.0f} x beyond")
            return _from_curve(price, self._times[id(price)], key.name, float(x))
        assert isinstance(price, Surface) and isinstance(op, Shaped), price
        dims = tuple(size(op, dim) for dim in price.dims)
        if own and dims in price.shapes:
            return Estimate(price.time_s[price.shapes.index(dims)], price.noise, "measured")
        return self._between(price, op, dims, key.name)

    def _between(self, surface: Surface, op: Shaped, dims: tuple[int, ...], name: str) -> Estimate:
        shapes, log_utilisation = self._log_utilisation(surface)
        utilisation = interpolate_utilisation(dims, shapes, log_utilisation)
        error, note = _untested_as_unknown(surface.held_out), ""
        apart = np.abs(np.log(shapes) - np.log(dims))
        nearest = math.exp(float(apart.max(axis=1).min()))
        if nearest > FAR:
            shape = "x".join(map(str, dims))
            note = f"{name}: the nearest measured shape to {shape} is {nearest:.0f} x away"
            error *= 1 + math.log(nearest, FAR)
        outside = bool(np.any((dims > shapes.max(0)) | (dims < shapes.min(0))))
        peaks = self._peaks(op.dtype, surface.like.dtype) or 1.0
        time_s = roofline_s(op, surface, peaks) / utilisation
        return Estimate(time_s, error, "extrapolated" if outside else "interpolated", note)

    def _log_utilisation(self, surface: Surface) -> tuple[np.ndarray, np.ndarray]:
        if id(surface) not in self._logs:
            rooflines = [roofline_s(shape_op(surface, shape), surface) for shape in surface.shapes]
            logs = np.log(np.asarray(rooflines) / np.asarray(surface.time_s))
            self._logs[id(surface)] = (np.asarray(surface.shapes, float), logs)
        return self._logs[id(surface)]

    def _note(self, text: str) -> None:
        self.notes[text] = self.notes.get(text, 0) + 1

    def stretch_of(self, ops: Sequence[Op]) -> float:
        """Return by how much the power cap slows products down in long work of these operations."""
        products_s, others_s = self._bursts(ops)
        name = self.costs.cluster.device.name
        return attainable().clocks.stretch(name, products_s, others_s)

    def host_s(self, block: Block, ops: Sequence[Op]) -> float:
        """Return the seconds that a host usually takes to launch a block; 0 on CPUs, which launch
        nothing."""
        if self.costs.cluster.device.kind == "cpu":
            return 0.0
        known = attainable().host
        if self.costs.lowering == "eager":
            return known.launch_s * len(ops)
        messages = sum(isinstance(op, Collective) for op in ops)
        layer_s = known.forward_s if block.direction == "forward" else known.backward_s
        return layer_s + messages * known.message_s

    def composed_s(self, ops: Sequence[Op], stretch: float | None = None) -> float:
        """Return the seconds of operations one after the other, products slowed down by
        ``stretch``, by default that of these operations alone."""
        products_s, others_s = self._bursts(ops)
        return (stretch or self.stretch_of(ops)) * products_s + others_s

    def _bursts(self, ops: Sequence[Op]) -> tuple[float, float]:
        """Return the seconds of products, as they were measured in bursts, and of other work."""
        seconds = {True: 0.0, False: 0.0}
        for op in ops:
            found = self.estimate(op)
            seconds[in_bursts(op, found)] += found.time_s
        return seconds[True], seconds[False]

    def factor(
        self,
        block: Block,
        ops: Sequence[Op],
        stretch: float | None = None,
        *,
        usual_host: bool = True,
    ) -> tuple[float, HeldOut | None]:
        """Return the time of a block over ``composed_s`` of its operations ``ops``; 1 if none like
        it was measured. If nothing at all was, return the ratio of language models' layers
        elsewhere (images: 1). With ``usual_host`` a block like none measured takes at least what
        hosts usually take (``host_s``)."""
        composed_s = self.composed_s(ops, stretch)
        host_s = self.host_s(block, ops) if usual_host else 0.0
        if self.datasheet is not None and self.nothing_measured:
            ratio = 1.0 if block.form else self.datasheet.known.block.ratio
            return slower_s(host_s, ratio * composed_s) / composed_s, None
        key = self._key(block)
        found, held_out = self.known.get(key.category), None
        if isinstance(found, Factor):
            held_out = found.held_out
        elif near := self._nearest(block, key.category):
            found, held_out = self.known[near[0]], self._spread(near[0])
            self._note(f"no {key.name} was measured; {Key(near[0], {}).name} stands in")
            self._sources.add("transferred")
        else:
            self._note(f"no {block.part} was measured; operations are added up as they are")
            untried = UNTRIED if host_s or self.costs.lowering == "compiled" else None
            return slower_s(host_s, composed_s) / composed_s, untried
        assert isinstance(found, Factor)
        ratio = _at_size(found, found.ratio, block)
        return slower_s(found.host_s, ratio * composed_s) / composed_s, held_out

    def _spread(self, category: Category) -> HeldOut:
        """Return how much ratios of this part, model and direction differ: a stand-in's error."""

        def kind(of: Category) -> list[str]:
            return [word for name, word in of if name in ("op", "model", "direction")]

        alike = [price for other, price in self.known.items() if kind(other) == kind(category)]
        ratios = [ratio for price in alike if isinstance(price, Factor) for ratio in price.ratio]
        if len(ratios) == 1:
            return UNTRIED
        half = (max(ratios) / min(ratios) - 1) / 2
        return HeldOut(median=half, p90=half, num_points=len(ratios))

    def saved_ratio(self, block: Block) -> float:
        """Return measured over counted bytes that a block saves for backward; 1 if not measured."""
        found = self.known.get(self._key(block).category)
        if not isinstance(found, Factor) or not found.saved_ratio:
            return 1.0
        return _at_size(found, found.saved_ratio, block)


def _lacks(op: Op) -> str:
    return f"what lacks is the case {label(Case(op=op))}, or one near it"


def in_bursts(op: Op, estimate: Estimate) -> bool:
    """Whether an operation was priced at clocks that long work does not keep."""
    return isinstance(op, Shaped) and estimate.source != "datasheet"


def slower_s(one_s: float, other_s: float) -> float:
    """Return the seconds of work that has two limits, such as the host's launches and the device:
    the longer of the two, and up to 19 % more where they are near."""
    return float((one_s**SHARP + other_s**SHARP) ** (1 / SHARP))


def other_s(time_s: np.ndarray, one_s: np.ndarray | float) -> np.ndarray:
    """Return the other limit of work that takes ``time_s`` with ``one_s``, as in ``slower_s``; 0 if
    it takes less."""
    left: np.ndarray = np.maximum(time_s**SHARP - one_s**SHARP, 0.0) ** (1 / SHARP)
    return left


def _outermost(group: str) -> tuple[int, str]:
    """Return the ranks of a group over its outermost links, and the name of these."""
    count, _, links = group.rpartition(", ")[2].partition(" (")[0].partition(" by ")
    return int(count or 1), links


def _from_curve(curve: Curve, times: KnotTimes, name: str, x: float) -> Estimate:
    first, last = curve.x_bytes[0], curve.x_bytes[-1]
    note = f"{name}: {TOO_NOISY}" if curve.noisy else ""
    if x in curve.x_bytes and curve.law != "sigmoid":
        return Estimate(curve.time_s[curve.x_bytes.index(x)], curve.noise, "measured", note)
    time_s, error = float(times(x)), _untested_as_unknown(curve.held_out)
    if first < x <= last:
        return Estimate(time_s, error, "interpolated", note)
    if x < first:  # at best in proportion to bytes, as the first two knots tell
        said = f"{name}: {first / x:.1f} x below the smallest measured size"
        return Estimate(time_s, error + _fall(curve, x), "extrapolated", _with(note, said))
    if x > FAR * last:
        note = _with(note, f"{name}: {x / last:.1f} x beyond the largest measured size")
    # errors beyond were tested at about 16 times the last size; nearer, less of them counts
    tested = max(error, _untested_as_unknown(curve.beyond)) * math.log(x / last, 16)
    least, most = (curve.time_s[-1] + rate * (x - last) for rate in curve.end_range_s_per_byte)
    bounds = max(most / time_s, time_s / least) - 1
    return Estimate(time_s, max(error + tested, bounds), "extrapolated", note)


def _fall(curve: Curve, x: float) -> float:
    """Return the factor, less 1, by which a message below all knots may be faster than the first:
    times fall on as between the first two knots, to nothing at worst."""
    sizes, times_s, slope = curve.x_bytes, curve.time_s, 1.0
    if len(sizes) > 1:
        slope = math.log(times_s[1] / times_s[0]) / math.log(sizes[1] / sizes[0])
    fall: float = (sizes[0] / x) ** min(max(slope, 0.0), 1.0)
    return fall - 1


def _with(note: str, more: str) -> str:
    return f"{note}; {more}" if note else more


def _untested_as_unknown(held_out: HeldOut) -> float:
    """Return the error of a price: 100 % if it could not be tested on left-out points."""
    return held_out.p90 if held_out.num_points else 1.0


def _at_size(factor: Factor, values: tuple[float, ...], block: Block) -> float:
    elements = math.log(block.activation_elements)
    return float(np.interp(elements, np.log(factor.activation_elements), values))
