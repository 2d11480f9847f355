"""Fit costs.json to the samples of one or more runs: curves, surfaces, block factors, slowdowns.

Samples of one category (``prices.key``) make one price. It never mixes regimes, dtypes or
lowerings."""

import math
from collections import Counter
from statistics import median
from typing import Any, NamedTuple, TypeVar

import msgspec

from meshwise.fit.clusters import refuse_unlike
from meshwise.fit.curves import LEAST_TIMINGS, fit_curve
from meshwise.fit.doubts import doubted
from meshwise.fit.factors import fit_factors
from meshwise.fit.slowdowns import fit_slowdowns
from meshwise.fit.spread import fit_spread
from meshwise.fit.surfaces import fit_surface
from meshwise.prices import Prices
from meshwise.prices.key import Category, Key, how, op_key
from meshwise.spec import (
    Attention,
    Block,
    Collective,
    Costs,
    Curve,
    RunInfo,
    Sample,
    Shaped,
    Sized,
    Surface,
)
from meshwise.spec.costs import LawName
from meshwise.spec.op import Dtype
from meshwise.stats import median_interval, tamed_mean

Word = TypeVar("Word", bound=str)
Fitted = TypeVar("Fitted", Curve, Surface)


class _Timed(NamedTuple):
    """A sample, the seconds to expect, and of how many timings at least; a row of a log sums up a
    loop."""

    sample: Sample
    time_s: float
    timings: int


def calibrate(runs: list[tuple[RunInfo, list[Sample]]], law: LawName | None = None) -> Costs:
    """Return the costs fitted to the ok samples of runs of alike clusters, for the newest of these.
    ``law``: use this one for every curve that it can be fitted to."""
    refuse_unlike([info.cluster for info, _ in runs])
    info, run_ids = runs[0][0], tuple(info.run_id for info, _ in runs)
    newest = max((info for info, _ in runs), key=lambda info: info.started)
    timed = [
        _Timed(
            sample,
            expected_s(sample),
            LEAST_TIMINGS if "imported" in info.provenance else len(sample.times_s),
        )
        for info, samples in runs
        for sample in samples
        if sample.status == "ok" and _has_price(sample.case.op)
    ]
    versions = {each.sample.method_version for each in timed}
    if len(versions) > 1:
        raise ValueError(
            f"the samples were timed by methods {sorted(versions)}; calibrate runs of one method"
        )
    groups = _groups(info, timed, run_ids)
    curves = tuple(
        _with_noise(
            fit_curve(
                {x: time_s for (x,), time_s in each.points.items()},
                each.about,
                info.cluster,
                few=[x for (x,), count in each.timings.items() if count < LEAST_TIMINGS],
                law=law,
            ),
            each,
        )
        for each in groups
        if isinstance(each.about["like"], Sized)
    )
    copies = [each for each in curves if getattr(each.like, "kind", "") == "copy"]
    shaped = [each for each in groups if isinstance(each.about["like"], Shaped)]
    blocks = [each for each in groups if isinstance(each.about["like"], Block)]
    peaks = info.cluster.device.peak_flops
    usual: Dtype = "bf16" if "bf16" in peaks else "fp16" if "fp16" in peaks else "fp32"
    everything = [sample for _, samples in runs for sample in samples]
    products = [op.dtype for each in timed if isinstance(op := each.sample.case.op, Shaped)]
    costs = Costs(
        cluster=newest.cluster,
        dtype=_most_common([of for of in products if of != "fp8"], usual),
        lowering=_most_common(
            [one.sample.case.lowering for each in blocks for one in each.timed],
            info.cluster.device.lowering,
        ),
        world_size=info.world_size,
        curves=curves,
        surfaces=tuple(_with_noise(_surface(each, copies), each) for each in shaped),
        slowdowns=fit_slowdowns(everything, run_ids),
        spread=fit_spread(everything, info.world_size),
        runs=run_ids,
        versions=newest.versions,
    )
    factors = fit_factors([(each.timed, each.about) for each in blocks], Prices(costs))
    return doubted(msgspec.structs.replace(costs, factors=factors))


def _has_price(op: object) -> bool:
    nothing_moves = isinstance(op, Sized) and op.bytes == 0
    return isinstance(op, Shaped | Sized | Block) and not nothing_moves


def expected_s(sample: Sample) -> float:
    """Return the seconds that one more such operation adds to a long sum: the slowest rank's mean,
    without the pull of single outliers.

    Ranks that communicate wait for each other in every iteration: take the mean of the largest
    times. Ranks that do not communicate wait only at the end: take the largest of the means. Of
    attention on a GPU (cold) take medians: hosts launch it late at times, its backward most, which
    leaves a gap that a step does not have as long as its host is ahead.
    """
    op = sample.case.op
    waits = isinstance(op, Collective) or (isinstance(op, Block) and op.is_shared)
    if waits:
        return tamed_mean(sample.times_s)
    late = isinstance(op, Attention) and sample.case.regime == "cold"
    alone = median if late else tamed_mean
    return max(float(alone(times_s)) for times_s in sample.rank_times_s or (sample.times_s,))


def _most_common(values: list[Word], default: Word) -> Word:
    return Counter(values).most_common(1)[0][0] if values else default


class _Grouped(NamedTuple):
    """Samples of one category, medians by coordinates, and fields of their price (``about``)."""

    timed: list[_Timed]
    dims: tuple[str, ...]
    points: dict[tuple[int, ...], float]
    timings: dict[tuple[int, ...], int]
    about: dict[str, Any]

    @property
    def is_single(self) -> bool:
        """Whether all samples are single timings, as rows of logs are."""
        return all(len(each.sample.times_s) == 1 for each in self.timed)


def _groups(info: RunInfo, timed: list[_Timed], runs: tuple[str, ...]) -> list[_Grouped]:
    """Group samples by category, in the order of the categories' names."""
    members: dict[Category, list[tuple[Key, _Timed]]] = {}
    for each in timed:
        case = each.sample.case
        key = op_key(case.op, how(case), info.cluster)  # type: ignore[arg-type]
        members.setdefault(key.category, []).append((key, each))
    found = []
    for same in sorted(members.values(), key=lambda same: same[0][0].name):
        points: dict[tuple[int, ...], list[float]] = {}
        timings = Counter[tuple[int, ...]]()
        for key, each in same:
            at = tuple(key.coordinates.values())
            points.setdefault(at, []).append(each.time_s)
            timings[at] += each.timings
        key, first = same[0]
        repeated = [each for _, each in same if len(each.sample.times_s) > 1]
        intervals = [(each.time_s, *median_interval(each.sample.times_s)) for each in repeated]
        halves = [
            max((high - low) / 2 / middle, abs(mean / middle - 1))
            for mean, middle, low, high in intervals
        ]
        about = {
            **how(first.sample.case)._asdict(),
            "like": first.sample.case.op,
            "noise": median(halves or [0.0]),  # see _with_noise
            "runs": runs,
        }
        medians = {at: median(times) for at, times in points.items()}
        of = [each for _, each in same]
        found.append(_Grouped(of, tuple(key.coordinates), medians, timings, about))
    return found


def _surface(of: _Grouped, copies: list[Curve]) -> Surface:
    """Fit a surface. Floor and memory rate are those of copies, of its regime if there are any.
    Without copies they are the surface's own best."""
    alike = [copy for copy in copies if copy.regime == of.about["regime"]] or copies
    return fit_surface(
        of.dims,
        of.points,
        of.about,
        floor_s=min((min(copy.time_s) for copy in alike), default=math.inf),
        copy_bytes_per_s=max(
            (x / t for copy in alike for x, t in zip(copy.x_bytes, copy.time_s, strict=True)),
            default=0.0,
        ),
    )


def _with_noise(price: Fitted, of: _Grouped) -> Fitted:
    """Give a price of single timings the scatter of its points as noise: the median error of those
    left out, or 100 % if none can be."""
    if not of.is_single:
        return price
    tested = price.held_out.median if price.held_out.num_points else 1.0
    return msgspec.structs.replace(price, noise=tested)
