"""Samples of one or more runs in, costs.json out: curves, surfaces, then block factors."""

from collections import Counter
from statistics import mean, median
from typing import TypeVar

import msgspec

from meshwise.fit.curves import fit_curve
from meshwise.fit.factors import fit_factors
from meshwise.fit.surfaces import fit_surface
from meshwise.prices import Prices, curve_key, surface_key
from meshwise.spec import (
    Attention,
    Block,
    Case,
    Collective,
    Costs,
    Curve,
    Elementwise,
    Gemm,
    Overlap,
    RunInfo,
    Sample,
    Surface,
    digest,
)
from meshwise.stats import median_interval

Kind = TypeVar("Kind", Gemm, Elementwise, Collective)
Word = TypeVar("Word", bound=str)
Timed = list[tuple[Sample, float]]


def calibrate(runs: list[tuple[RunInfo, list[Sample]]]) -> Costs:
    """Prices from the ok samples of ``runs``, which must be of one cluster."""
    if len({digest(info.cluster) for info, _ in runs}) > 1:
        raise ValueError("the runs are of different clusters; calibrate each cluster by itself")
    info = runs[0][0]
    run_ids = tuple(info.run_id for info, _ in runs)
    timed = [
        (sample, expected_s(sample))
        for _, samples in runs
        for sample in samples
        if sample.status == "ok" and _is_priced(sample.case)
    ]
    versions = {sample.method_version for sample, _ in timed}
    if len(versions) > 1:
        raise ValueError(
            f"the samples were timed by methods {sorted(versions)}; calibrate runs of one method"
        )
    copies = [op for op, _ in _ops(timed, Elementwise) if op.kind == "copy"]
    if not copies:
        raise ValueError(
            f"{run_ids[-1]} holds no finished copy, on which every price rests; "
            "measure longer: meshwise measure profile --resume"
        )
    curves = _curves(info, timed, run_ids)
    surfaces = _surfaces(timed, curves, run_ids)
    blocks = [(sample, time_s) for sample, time_s in timed if isinstance(sample.case.op, Block)]
    costs = Costs(
        cluster=info.cluster,
        dtype=_most_common([op.dtype for op, _ in _ops(timed, Gemm)], "fp32"),
        lowering=_most_common([sample.case.lowering for sample, _ in blocks], "eager"),
        world_size=info.world_size,
        curves=curves,
        surfaces=surfaces,
        runs=run_ids,
    )
    return msgspec.structs.replace(costs, factors=fit_factors(blocks, Prices(costs), run_ids))


def _is_priced(case: Case) -> bool:
    """Whether plans hold such work, done so: torch's own choice of kernels, eagerly called."""
    op = case.op
    if case.backend or case.regime not in ("cold", "warm"):
        return False
    if isinstance(op, Gemm):
        return op.groups == 1
    if isinstance(op, Attention):
        return op.head_dim_v is None and op.window is None
    if isinstance(op, Collective):
        return not op.ranks and not op.splits
    return not isinstance(op, Overlap)


def expected_s(sample: Sample) -> float:
    """What one more such operation adds to a long sum: the mean, at the slowest rank.

    Ranks that communicate wait for each other each time, so there it is the mean of the largest;
    ranks that do not wait only at the end, so there it is the largest of the means.
    """
    op = sample.case.op
    waits = isinstance(op, Collective) or (isinstance(op, Block) and op.tp > 1)
    if waits or not sample.rank_times_s:
        return mean(sample.times_s)
    return max(map(mean, sample.rank_times_s))


def _ops(timed: Timed, kind: type[Kind]) -> list[tuple[Kind, float]]:
    return [(sample.case.op, t) for sample, t in timed if isinstance(sample.case.op, kind)]


def _most_common(values: list[Word], default: Word) -> Word:
    return Counter(values).most_common(1)[0][0] if values else default


def _curves(info: RunInfo, timed: Timed, runs: tuple[str, ...]) -> tuple[Curve, ...]:
    points: dict[str, dict[float, list[float]]] = {}
    for op, time_s in _ops(timed, Elementwise):
        by_size = points.setdefault(curve_key(op, info.cluster), {})
        by_size.setdefault(float(op.bytes), []).append(time_s)
    for group, time_s in _ops(timed, Collective):
        by_size = points.setdefault(curve_key(group, info.cluster), {})
        by_size.setdefault(float(group.size_bytes), []).append(time_s)
    return tuple(
        fit_curve(key, {x: median(times) for x, times in sizes.items()}, runs)
        for key, sizes in sorted(points.items())
    )


def _surfaces(
    timed: Timed, curves: tuple[Curve, ...], runs: tuple[str, ...]
) -> tuple[Surface, ...]:
    groups: dict[str, tuple[list[Gemm | Attention], list[float]]] = {}
    noise: dict[str, list[float]] = {}
    for sample, time_s in timed:
        op = sample.case.op
        if isinstance(op, Gemm | Attention):
            ops, times = groups.setdefault(surface_key(op), ([], []))
            ops.append(op)
            times.append(time_s)
            middle, low, high = median_interval(sample.times_s)
            noise.setdefault(surface_key(op), []).append((high - low) / 2 / middle)
    copy = next(curve for curve in curves if curve.key == "elementwise/copy")
    rate = max(x / t for x, t in zip(copy.x_bytes, copy.time_s, strict=True))
    return tuple(
        fit_surface(
            key,
            ops,
            times,
            floor_s=min(copy.time_s),
            copy_bytes_per_s=rate,
            noise=median(noise[key]),
            runs=runs,
        )
        for key, (ops, times) in sorted(groups.items())
    )
