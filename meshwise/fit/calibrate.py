"""Fit costs.json to the samples of one or more runs: curves, surfaces, then block factors.

Samples of one category (``prices.key``) make one price. It never mixes regimes, dtypes or
lowerings."""

from collections import Counter
from statistics import mean, median
from typing import Any, NamedTuple, TypeVar

import msgspec

from meshwise.fit.curves import fit_curve
from meshwise.fit.factors import fit_factor
from meshwise.fit.surfaces import fit_surface
from meshwise.prices import Prices
from meshwise.prices.key import Category, Key, how, op_key
from meshwise.spec import (
    Block,
    Collective,
    Costs,
    Curve,
    RunInfo,
    Sample,
    Shaped,
    Sized,
    Surface,
    digest,
)
from meshwise.stats import median_interval

Word = TypeVar("Word", bound=str)
Timed = list[tuple[Sample, float]]


def calibrate(runs: list[tuple[RunInfo, list[Sample]]]) -> Costs:
    """Return the costs fitted to the ok samples of ``runs``, which must be of one cluster."""
    if len({digest(info.cluster) for info, _ in runs}) > 1:
        raise ValueError("the runs come from different clusters; calibrate each cluster by itself")
    info = runs[0][0]
    run_ids = tuple(info.run_id for info, _ in runs)
    timed = [
        (sample, expected_s(sample))
        for _, samples in runs
        for sample in samples
        if sample.status == "ok" and _has_price(sample.case.op)
    ]
    versions = {sample.method_version for sample, _ in timed}
    if len(versions) > 1:
        raise ValueError(
            f"the samples were timed by methods {sorted(versions)}; calibrate runs of one method"
        )
    groups = _groups(info, timed, run_ids)
    sized = [each for each in groups if isinstance(each.about["like"], Sized)]
    curves = tuple(fit_curve({x: t for (x,), t in of.points.items()}, of.about) for of in sized)
    copies = [each for each in curves if getattr(each.like, "kind", "") == "copy"]
    if not copies:
        raise ValueError(
            f"{run_ids[-1]} holds no finished copy, on which every price rests; "
            "measure longer: meshwise measure profile --resume"
        )
    shaped = [each for each in groups if isinstance(each.about["like"], Shaped)]
    blocks = [each for each in groups if isinstance(each.about["like"], Block)]
    products = [sample.case.op.dtype for sample, _ in timed if isinstance(sample.case.op, Shaped)]
    costs = Costs(
        cluster=info.cluster,
        dtype=_most_common(products, "fp32"),
        lowering=_most_common(
            [sample.case.lowering for each in blocks for sample, _ in each.timed],
            info.cluster.device.lowering,
        ),
        world_size=info.world_size,
        curves=curves,
        surfaces=tuple(_surface(each, copies) for each in shaped),
        runs=run_ids,
    )
    prices = Prices(costs)
    factors = tuple(fit_factor(each.timed, prices, each.about) for each in blocks)
    return msgspec.structs.replace(costs, factors=factors)


def _has_price(op: object) -> bool:
    nothing_moves = isinstance(op, Collective) and (op.group_size == 1 or op.size_bytes == 0)
    return isinstance(op, Shaped | Sized | Block) and not nothing_moves


def expected_s(sample: Sample) -> float:
    """Return the seconds that one more such operation adds to a long sum: the slowest rank's mean.

    Ranks that communicate wait for each other in every iteration: take the mean of the largest
    times. Ranks that do not communicate wait only at the end: take the largest of the means.
    """
    op = sample.case.op
    waits = isinstance(op, Collective) or (isinstance(op, Block) and op.tp > 1)
    if waits or not sample.rank_times_s:
        return mean(sample.times_s)
    return max(map(mean, sample.rank_times_s))


def _most_common(values: list[Word], default: Word) -> Word:
    return Counter(values).most_common(1)[0][0] if values else default


class _Grouped(NamedTuple):
    """Samples of one category, medians by coordinates, and fields of their price (``about``)."""

    timed: Timed
    dims: tuple[str, ...]
    points: dict[tuple[int, ...], float]
    about: dict[str, Any]


def _groups(info: RunInfo, timed: Timed, runs: tuple[str, ...]) -> list[_Grouped]:
    """Group samples by category, in the order of the categories' names."""
    members: dict[Category, list[tuple[Key, Sample, float]]] = {}
    for sample, time_s in timed:
        key = op_key(sample.case.op, how(sample.case), info.cluster)  # type: ignore[arg-type]
        members.setdefault(key.category, []).append((key, sample, time_s))
    found = []
    for same in sorted(members.values(), key=lambda same: same[0][0].name):
        points: dict[tuple[int, ...], list[float]] = {}
        for key, _, time_s in same:
            points.setdefault(tuple(key.coordinates.values()), []).append(time_s)
        key, first, _ = same[0]
        intervals = [median_interval(sample.times_s) for _, sample, _ in same]
        about = {
            **how(first.case)._asdict(),
            "like": first.case.op,
            "noise": median((high - low) / 2 / middle for middle, low, high in intervals),
            "runs": runs,
        }
        medians = {at: median(times) for at, times in points.items()}
        found.append(_Grouped([each[1:] for each in same], tuple(key.coordinates), medians, about))
    return found


def _surface(of: _Grouped, copies: list[Curve]) -> Surface:
    """Fit a surface. Floor and memory rate are those of copies, of its regime if there are any."""
    alike = [copy for copy in copies if copy.regime == of.about["regime"]] or copies
    return fit_surface(
        of.dims,
        of.points,
        of.about,
        floor_s=min(min(copy.time_s) for copy in alike),
        copy_bytes_per_s=max(
            x / t for copy in alike for x, t in zip(copy.x_bytes, copy.time_s, strict=True)
        ),
    )
