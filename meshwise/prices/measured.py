"""Evaluate fitted prices. In: an operation. Out: its time, with an interval and its tier.

    elementwise   the curve of its kind and direction over bytes read plus written
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
from functools import cached_property
from operator import le
from statistics import fmean
from typing import Protocol

import msgspec
import numpy as np

from meshwise.prices.datasheet import Beside, Datasheet, attainable, words_beside
from meshwise.prices.evaluate import (
    FAR,
    HIDDEN,
    SHARP,
    TOO_NOISY,
    Estimate,
    ShapePlaces,
    apart,
    both_notes,
    from_curve,
    interpolate_utilisation,
    measured_places,
    place,
    roofline_s,
    slower_s,
    times_of,
)
from meshwise.prices.key import Category, How, Key, how, in_step, name_of, op_key, outermost, size
from meshwise.prices.laws import KnotTimes
from meshwise.prices.noted import Noted
from meshwise.spec import (
    Block,
    Case,
    Collective,
    Costs,
    Curve,
    Elementwise,
    Factor,
    HeldOut,
    Op,
    Shaped,
    Sized,
    Surface,
    WideResNet,
)
from meshwise.spec.label import label

MEASURE = "measure it: meshwise measure profile [--resume], then meshwise calibrate"
AS_COPIES = "element-wise work that was not measured itself is priced as copies of as many bytes"
UNPROFILED = {  # and what measures it
    **dict.fromkeys(("h2d", "d2h"), "health"),
    **{kind: f"collectives {kind}" for kind in ("reduce", "gather", "scatter")},
}
MOST_BEYOND = 256  # times the largest measured size
UNSURE_BYTES = 2**26  # below, groups of other sizes tell little

# The relative error that each difference between a category and its stand-in adds. The values of
# storage, scaling, dtype and direction cover 9 of 10 pairs of cases on 4 H200 (stored under
# benchmarks/2026-11-21-operators-4xh200). The others are guesses.
APART = {
    "storage": 0.1, "scaling": 0.1, "dtype": 0.25, "direction": 0.3, "backend": 1.0, "regime": 1.0,
    "in_place": 0.25, "lowering": 0.3, "op": 0.5, "causal": 0.5, "head_dim_v": 0.5, "kv_heads": 0.5,
    "groups": 1.0, "batched": 0.5, "window": 1.0, "group": 1.0, "product": 0.3, "kernel": 0.5,
    "stride": 0.5, "host": 0.5, "update": 0.35,
}  # fmt: skip
# Of collectives: on 4 H200 the smallest take 25 to 28 us in torch and 18 to 19 in nccl-tests, those
# of 4 GiB the same. Equal splits beside none (PARAM, tests/data/param_h200x4): 8 % apart in the
# median, up to 33 % in three of four, in logs with outliers.
COLLECTIVES_APART = {"regime": 0.25, "backend": 0.25, "splits": 0.3}
# differences of blocks, besides tp; only their order matters
BLOCKS_APART = {
    "sequence_parallel": 0.4, "dtype": 0.5, "cp": 0.6, "ep": 0.7, "fp8": 1.0, "sizes": 1.5,
    "form": 2.5,
}  # fmt: skip
DEGREES = {"tp", "sequence_parallel", "cp", "ep"}
KIND = ("op", "model", "direction", "recompute")  # of blocks whose ratios are compared
# What a price by another machine's measurements is less sure. H100 and H200 by each other: 9 of 10
# products are within 14 %, layers 35, large messages 20, small ones 51 (2026-11-28-left-out).
TRANSFERRED = 0.25
# The error, a guess, of layers priced without a measured block, by hosts as usual or eager kernels,
# or of blocks for which the only known ratio stands in.
UNTRIED = HeldOut(median=APART["lowering"], p90=APART["lowering"], num_points=0)
# What layers in fp8 told by layers in bf16 took longer in the one step that was measured: 253 ms of
# 178 (2026-11-28-settled). The errors of their operations come on top.
BY_BF16 = 0.42

Fitted = Curve | Surface | Factor


class Placed(Protocol):
    """An operation in a program (``models.Task``), with its stream and the buffers of its data."""

    @property
    def op(self) -> Op: ...
    @property
    def stream(self) -> str: ...
    @property
    def reads(self) -> tuple[str, ...]: ...
    @property
    def writes(self) -> tuple[str, ...]: ...


class Prices(Noted):
    """Costs, indexed for evaluation. With ``datasheet``, missing prices come from the cluster's
    data sheet."""

    def __init__(self, costs: Costs, *, datasheet: bool = False) -> None:
        super().__init__()
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
        self._cache: dict[tuple[Op, How | None], Estimate] = {}
        self._stand_ins: dict[Category, tuple[Category, float] | None] = {}
        self._places: dict[int, ShapePlaces] = {}

    @property
    def nothing_measured(self) -> bool:
        return not (self.costs.curves or self.costs.surfaces)

    def estimate(self, op: Op, run: How | None = None) -> Estimate:
        """Return the price of an operation on one rank, by default run as in a training step."""
        found = self._cache.get((op, run))
        if found is None:
            found = self._cache[op, run] = self._estimate(op, run)
        if found.note:
            for note in filter(None, found.note.split("; ")):
                self._note(note)
        self._sources.add(found.source)
        return found

    def _estimate(self, op: Op, run: How | None) -> Estimate:
        if not isinstance(op, Shaped | Sized):
            raise ValueError(f"{type(op).__name__} has no price of its own; add up its operations")
        if isinstance(op, Sized) and op.bytes == 0:
            return Estimate(0.0, 0.0, "measured")  # nothing to move
        key = self._key(op, run)
        price = self.known.get(key.category)
        if price is not None:
            return _unsure(self._at(price, op, key, own=True), price)
        near = self._stand_in(op, key.category)
        if near is None:
            return self._unmeasured(key, op)
        other, apart = key._replace(category=near[0]), near[1]
        price = self.known[other.category]
        found = _unsure(self._at(price, op, other, own=False), price)
        said = f"{key.name} was not measured: {other.name} stands in"
        if isinstance(op, Elementwise) and op.kind not in ("copy", "sgd"):
            said = AS_COPIES
        note = f"{said}; {found.note}" if found.note else said
        return Estimate(found.time_s, found.error + apart, "transferred", note)

    def _key(self, op: Op, run: How | None = None) -> Key:
        return op_key(op, run or self.in_step(op), self.costs.cluster)

    def in_step(self, op: Op) -> How:
        """Return how a step of the costs' recipe runs an operation."""
        costs = self.costs
        return in_step(op, costs.cluster, costs.lowering, costs.recipe.attention)

    def _unmeasured(self, key: Key, op: Op) -> Estimate:
        """Price by the data sheet, or raise a ValueError: the price is missing."""
        name = key.name
        if self.datasheet is None:
            raise ValueError(f"no price for {name}; {_measure(op)}; {_lacks(op)}")
        try:
            time_s, error = self.datasheet.time_s(op)
        except ValueError as lacking:
            said = f"no price for {name}; {_measure(op)} ({lacking}); {_lacks(op)}"
            raise ValueError(said) from None
        note = "" if self.nothing_measured else f"{name} was not measured: its data sheet's price"
        if isinstance(op, Collective) and (near := self._of_other_ranks(key.category)):
            time_s = float(slower_s(min(near.time_s), time_s))
            note += f", and the least time of {name_of(near, self.costs.cluster)}"
            note += ", unsure below 64 MiB" if op.size_bytes < UNSURE_BYTES else ""
        return Estimate(time_s, error, "datasheet", note)

    def _of_other_ranks(self, mine: Category) -> Curve | None:
        """Return the curve of the same collective among other ranks over the same outermost links,
        with the number of ranks over these that is nearest to this one's."""
        wanted = dict(mine)
        count, links = outermost(wanted.pop("group"))
        found: list[tuple[float, Curve]] = []
        for category, price in self.known.items():
            words = dict(category)
            theirs = words.pop("group", "")
            if words == wanted and isinstance(price, Curve):
                others, their_links = outermost(theirs)
                if links == their_links:
                    found.append((abs(math.log(count / others)), price))
        return min(found, key=lambda each: each[0])[1] if found else None

    def _too_far(self, op: Collective, where: str, least_s: float) -> Estimate:
        """Price a message too far beyond all knots by the data sheet, at ``least_s`` or more, or
        raise a ValueError."""
        where += " the largest measured size"
        if self.datasheet is not None:
            with contextlib.suppress(ValueError):
                time_s, error = self.datasheet.time_s(op)
                note = f"{where}: its data sheet's price"
                return Estimate(max(time_s, least_s), error, "datasheet", note)
        held = f"{where}, and a price holds for {MOST_BEYOND} x"
        raise ValueError(f"{held}; {_measure(op)}; {_lacks(op)}")

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
            return BLOCKS_APART.get("fp8" if "fp8" in (mine, theirs) else name, math.inf)
        if name == "op" and {mine, theirs} == {"all_to_all", "all_to_all_v"}:
            return COLLECTIVES_APART["splits"]
        if name == "op":
            if (mine, theirs) == ("sgd", "adamw"):
                return APART["update"]
            copies = isinstance(op, Elementwise) and op.kind not in ("h2d", "d2h")
            return APART["op"] if copies and theirs == "copy" else math.inf
        if isinstance(op, Collective) and name in COLLECTIVES_APART:
            return COLLECTIVES_APART[name]
        if name == "backend" and mine and theirs:  # torch's own choice is nearer
            return 2 * APART[name]
        if name == "group":  # as many ranks over the same outermost links
            return APART["group"] if outermost(mine) == outermost(theirs) else math.inf
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
                least_s = float(self._times[id(price)](MOST_BEYOND * price.x_bytes[-1]))
                said = f"{key.name}: {x / price.x_bytes[-1]:.0f} x beyond"
                return self._too_far(op, said, least_s)
            return from_curve(price, self._times[id(price)], key.name, float(x))
        assert isinstance(price, Surface) and isinstance(op, Shaped), price
        dims = tuple(size(op, dim) for dim in price.dims)
        if own and dims in price.shapes:
            return Estimate(price.time_s[price.shapes.index(dims)], price.noise, "measured")
        return self._between(price, op, dims, key.name)

    def _between(self, surface: Surface, op: Shaped, dims: tuple[int, ...], name: str) -> Estimate:
        if id(surface) not in self._places:
            self._places[id(surface)] = measured_places(surface)
        known, at = self._places[id(surface)], place(op, surface.dims)
        distance = apart(np.asarray(at), known.at)
        closest = float(distance.min())
        utilisation = math.exp(interpolate_utilisation(distance, known.log_utilisation))
        error = float(np.interp(closest, HIDDEN, known.errors))
        note = f"{name}: {TOO_NOISY}" if surface.held_out.noisy else ""
        far_off = math.exp(closest) > FAR and float(np.abs(known.at - at).max(axis=1).min())
        if (nearest := math.exp(far_off)) > FAR:
            shape = "x".join(map(str, dims))
            far = f"{name}: the nearest measured shape to {shape} is {nearest:.0f} x away"
            note = both_notes(note, far)
            error *= 1 + math.log(nearest, FAR)
        inside = all(map(le, known.least, at)) and all(map(le, at, known.most))
        peaks = self._peaks(op.dtype, surface.like.dtype) or 1.0
        time_s = roofline_s(op, surface, peaks) / utilisation
        return Estimate(time_s, error, "interpolated" if inside else "extrapolated", note)

    @cached_property
    def beside(self) -> Beside:
        """Speeds of work and data-parallel messages beside each other: of layers as measured, by
        kind of message; else of operations, by class as well; else the figures that come with
        Meshwise."""
        speeds: dict[str, list[tuple[float, float]]] = {}
        for of in self.costs.slowdowns:
            pair = words_beside(of.like.compute, of.like.collective.kind)
            speeds.setdefault(pair, []).append((1 / of.compute, 1 / of.collective))
        means = {
            kind: (fmean(work for work, _ in each), fmean(message for _, message in each))
            for kind, each in speeds.items()
        }
        return msgspec.structs.replace(attainable().beside, measured=means)

    def stretch_of(self, tasks: Sequence[Placed]) -> float:
        """Return by how much the power cap slows products down in long work of these tasks."""
        seconds = {True: 0.0, False: 0.0}
        for task in tasks:
            found = self.estimate(task.op)
            seconds[in_bursts(task.op, found)] += found.time_s
        name = self.costs.cluster.device.name
        return attainable().clocks.stretch(name, seconds[True], seconds[False])

    def host_s(self, block: Block, tasks: Sequence[Placed]) -> float:
        """Return the seconds that a host usually takes to launch a block; 0 on CPUs, which launch
        nothing."""
        if self.costs.cluster.device.kind == "cpu":
            return 0.0
        known = attainable().host
        if self.costs.lowering == "eager":
            return known.launch_s * len(tasks)
        messages = sum(isinstance(task.op, Collective) for task in tasks)
        layer_s = known.forward_s if block.direction == "forward" else known.backward_s
        return layer_s + messages * known.message_s

    def composed_s(self, tasks: Sequence[Placed], stretch: float | None = None) -> float:
        """Return the seconds of tasks one after the other, products slowed down by ``stretch``, by
        default that of these tasks alone. Messages of cp have a stream of their own (``search``
        runs whole programs so)."""
        stretch = stretch or self.stretch_of(tasks)
        now_s = free_s = 0.0
        there: dict[str, float] = {}  # when messages arrive
        for task in tasks:
            found = self.estimate(task.op)
            time_s = found.time_s * (stretch if in_bursts(task.op, found) else 1.0)
            if task.stream == "cp":
                free_s = max(free_s, now_s) + time_s
                there.update(dict.fromkeys(task.writes, free_s))
                continue
            if there:
                now_s = max([now_s, *(there.get(name, 0.0) for name in task.reads)])
            now_s += time_s
        return now_s

    def factor(
        self,
        block: Block,
        tasks: Sequence[Placed],
        stretch: float | None = None,
        hooks_s: float = 0.0,
    ) -> tuple[float, HeldOut | None]:
        """Return the time of a block over ``composed_s`` of its ``tasks``; 1 if none like it was
        measured, or if nothing at all was the ratio of language models' layers elsewhere (images:
        1). A block like none measured takes at least what hosts usually take (``host_s``).
        ``hooks_s``: what the host does more around a block than where it was measured."""
        composed_s = self.composed_s(tasks, stretch)
        host_s = self.host_s(block, tasks) + hooks_s
        if self.datasheet is not None and self.nothing_measured:
            ratio = 1.0 if isinstance(block.model, WideResNet) else self.datasheet.known.block.ratio
            return float(slower_s(host_s, ratio * composed_s)) / composed_s, None
        key = self._key(block)
        found, held_out = self.known.get(key.category), None
        is_own = found is not None
        if isinstance(found, Factor):
            held_out = found.held_out
            if found.transferred_from:
                self._note(f"prices that {_elsewhere(found)}")
                held_out = msgspec.structs.replace(held_out, p90=held_out.p90 + TRANSFERRED)
                self._sources.add("transferred")
        elif near := self._nearest(block, key.category):
            found, held_out = self.known[near[0]], self._spread(near[0])
            if ("dtype", "fp8") in {*key.category} ^ {*near[0]}:
                p90 = max(held_out.p90, BY_BF16)
                held_out = msgspec.structs.replace(held_out, p90=p90, num_points=0)
            self._note(f"no {key.name} was measured; {Key(near[0], {}).name} stands in")
            self._sources.add("transferred")
        else:
            self._note(f"no {block.part} was measured; operations are added up as they are")
            untried = UNTRIED if host_s else None
            return float(slower_s(host_s, composed_s)) / composed_s, untried
        assert isinstance(found, Factor)
        if found.held_out.noisy:
            self._note(f"{name_of(found, self.costs.cluster)}: {TOO_NOISY}")
        ratio = _at_size(found, found.ratio, block)
        host_s, device_s = _at_size(found, found.host_s, block) + hooks_s, ratio * composed_s
        time_s = float(slower_s(host_s, device_s))
        share = (host_s / time_s) ** SHARP  # of the host
        of_host = max(found.host_error, 0.0 if is_own else APART["host"])
        of_host = math.hypot(of_host, hooks_s / host_s if host_s else 0.0)  # some hosts hide them
        error = math.hypot(share * of_host, (1 - share) * found.ratio_error)
        held_out = msgspec.structs.replace(held_out, p90=max(held_out.p90, error))
        return time_s / composed_s, held_out

    def _spread(self, category: Category) -> HeldOut:
        """Return how much ratios of this part, model and direction differ: a stand-in's error."""

        def kind(of: Category) -> list[str]:
            return [word for name, word in of if name in KIND or word == "fp8"]

        alike = [price for other, price in self.known.items() if kind(other) == kind(category)]
        ratios = [ratio for price in alike if isinstance(price, Factor) for ratio in price.ratio]
        if len(ratios) == 1:
            return UNTRIED
        half = (max(ratios) / min(ratios) - 1) / 2
        return HeldOut(median=half, p90=half, num_points=len(ratios))

    def saved_ratio(self, block: Block) -> float | None:
        """Return measured over counted bytes that a block saves for backward, or that it saves
        where other ranks share it; None if neither was measured."""
        category = self._key(block).category
        found = self.known.get(category)
        if found is None and (near := self._nearest(block, category)):
            differ = {name for name, _ in {*category} ^ {*near[0]}}
            found = self.known[near[0]] if differ <= DEGREES else None
        if not isinstance(found, Factor) or not found.saved_ratio:
            return None
        return _at_size(found, found.saved_ratio, block)


def _measure(op: Op) -> str:
    what = UNPROFILED.get(getattr(op, "kind", ""))
    if isinstance(op, Shaped) and op.dtype == "fp8":
        what = f"{type(op).__struct_config__.tag} --dtype fp8"
    calibrate = "then meshwise calibrate RUN..."
    return f"measure it: meshwise measure {what}, {calibrate}" if what else MEASURE


def _lacks(op: Op) -> str:
    lacking = f"what lacks is the case {label(Case(op=op))}, or one near"
    if not isinstance(op, Collective) or op.kind in UNPROFILED:
        return lacking
    kind = op.kind.removesuffix("_v")  # of even splits, which stands in
    return f"{lacking}: measure collectives {kind} --nproc {op.group_size}"


def _elsewhere(price: Fitted) -> str:
    return f"were measured on {price.transferred_from}, and scaled by data sheets"


def _unsure(found: Estimate, price: Fitted) -> Estimate:
    """Widen a price that looks wrong, or that another machine's measurements gave."""
    if price.doubt:
        note = both_notes(found.note, price.doubt)
        found = found._replace(error=max(found.error, 1.0), note=note)
    if not price.transferred_from:
        return found
    note = both_notes(found.note, f"prices that {_elsewhere(price)}")
    return Estimate(found.time_s, found.error + TRANSFERRED, "transferred", note)


def in_bursts(op: Op, estimate: Estimate) -> bool:
    """Whether an operation was priced at clocks that long work does not keep."""
    return isinstance(op, Shaped) and estimate.source != "datasheet"


def _at_size(factor: Factor, values: tuple[float, ...], block: Block) -> float:
    elements = math.log(block.activation_elements)
    return float(np.interp(elements, np.log(factor.activation_elements), values))
