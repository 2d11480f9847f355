"""Tables of what stages hand on: clusters, prices, plans, steps, comparisons. Records in."""

import re
from collections.abc import Callable, Sequence

from meshwise.pages.steps import CONVENTION
from meshwise.pages.table import Table
from meshwise.prices import name_of
from meshwise.spec import (
    AnyModel,
    Candidate,
    Cluster,
    Costs,
    HeldOut,
    Plan,
    WideResNet,
    Workload,
)
from meshwise.units import format_bytes, format_count, format_rate, format_seconds

ABSENT = "–"
INTERVAL = "95 % interval of the median, were times independent; of fewer than 6 values the range"
MFU_LEGEND = (
    f"FLOP/s and MFU count FLOPs as {CONVENTION} does: 6 per parameter and token without embedding "
    "lookups, plus 12 x layers x hidden x seq a token, attention not halved."
)

LAYOUT_LEGEND = (
    "pp: pipeline ranks x stages on each, and their schedule; dp, tp: data and tensor parallel "
    "degrees; dp/n: n replicas of the shards; +sp: sequence parallel; zero: what dp shards; mb: "
    "microbatch size x count; selective, full: what backward computes again, full:n in n layers of "
    "a stage."
)
PARTS_LEGEND = (
    "Memory: parts are what is alive at the peak; zero 0 runs as FSDP2 on a (dp, 1) mesh, so it "
    "holds a gathered copy too."
)
PEAK_NOTE = "memory peaks on "


def percent(value: float | None, sign: bool = False) -> str:
    if value is None:
        return ABSENT
    return f"{100 * value:{'+' if sign else ''}.1f} %"


def interval(low: float, high: float, show: Callable[[float], str] = format_seconds) -> str:
    """``1.20 – 1.31 ms``: the unit once where both ends share it, one number where they agree."""
    first, last = show(low), show(high)
    if first == last:
        return last
    (number, unit), (_, last_unit) = first.split(), last.split()
    return f"{number if unit == last_unit else first} – {last}"


def cluster(described: Cluster) -> list[Table]:
    """The machine, its links, and what is not known of it."""
    device = described.device
    peaks = ", ".join(
        f"{dtype} {format_rate(rate, 'FLOP/s')}" for dtype, rate in device.peak_flops.items()
    )
    memory_rate = device.peak_memory_bytes_per_s
    rows = [
        ("devices", f"{described.num_hosts} x {described.num_devices_per_host} {device.name}"),
        ("memory of each", format_bytes(device.memory_bytes)),
        ("datasheet peaks", peaks or "not known"),
        ("memory bandwidth", format_rate(memory_rate, "B/s") if memory_rate else "not known"),
        ("back end", described.backend),
    ]
    if described.host_cores:
        rows.append(("cores of a host", str(described.host_cores)))
    tiers = tuple(
        (
            tier.name,
            tier.source or "rate not known",
            str(tier.num_devices),
            format_rate(tier.bytes_per_s, "B/s") if tier.bytes_per_s else ABSENT,
        )
        for tier in described.tiers
    )
    return [
        Table(f"Cluster {described.name}", ("", ""), tuple(rows), left=2),
        Table(
            "Links, innermost first",
            ("tier", "source", "reaches devices", "each way"),
            tiers,
            described.notes,
            left=2,
        ),
    ]


def costs(prices: Costs) -> list[Table]:
    """Every price with its error on points that were left out of the fit."""
    curves = tuple(
        (
            name_of(curve, prices.cluster),
            {"loglog": "log-log", "alpha_beta": "alpha-beta"}[curve.law],
            str(len(curve.x_bytes)),
            f"{format_bytes(curve.x_bytes[0])} – {format_bytes(curve.x_bytes[-1])}",
            format_seconds(curve.alpha_s) if curve.alpha_s else ABSENT,
            format_rate(1 / curve.beta_s_per_byte, "B/s") if curve.beta_s_per_byte else ABSENT,
            *_held_out(curve.held_out[curve.law]),
        )
        for curve in prices.curves
    )
    surfaces = tuple(
        (
            name_of(surface, prices.cluster),
            str(len(surface.shapes)),
            format_seconds(surface.floor_s),
            format_rate(surface.flops_per_s, "FLOP/s"),
            *_held_out(surface.held_out),
        )
        for surface in prices.surfaces
    )
    factors = tuple(
        (
            name_of(factor, prices.cluster),
            str(len(factor.ratio)),
            _range(factor.ratio),
            _range(factor.saved_ratio),
            *_held_out(factor.held_out),
        )
        for factor in prices.factors
    )
    error = ("median error", "p90 error")
    return [
        Table(
            "Time against bytes",
            ("price", "law", "points", "measured sizes", "alpha", "1/beta", *error),
            curves,
            (
                "Errors are |predicted/measured - 1| on points left out of the fit, one at a time.",
                "t = alpha + bytes x beta, bent through the measured points; log-log interpolates "
                "between them. A collective has so many ranks within each tier of links, its bytes "
                "are nccl-tests' size.",
            ),
            left=2,
        ),
        Table(
            "Matrix products and attention",
            ("price", "shapes", "floor", "best rate", *error),
            surfaces,
            ("A shape that was not measured takes the utilisation of its nearest neighbours.",),
        ),
        Table(
            "Blocks: measured time over the sum of their operations' prices",
            ("block", "sizes", "time ratio", "saved bytes ratio", *error),
            factors,
            ("The ratio corrects every plan that holds the block.",),
        )
        if factors
        else Table("No block was measured; plans add operations up as they are.", (), ()),
    ]


def _range(ratios: tuple[float, ...]) -> str:
    ends = dict.fromkeys(f"{end(ratios):.2f}" for end in (min, max)) if ratios else (ABSENT,)
    return " – ".join(ends)


def _held_out(error: HeldOut) -> tuple[str, str]:
    if not error.num_points:
        return ABSENT, ABSENT
    return percent(error.median), percent(error.p90)


def _last_row(candidates: Sequence[Candidate]) -> tuple[str, ...]:
    """Why a pipeline stands behind layouts that are none: how long it waits."""
    *others, last = candidates
    if last.layout.pp == 1 or not others or any(c.layout.pp > 1 for c in others):
        return ()
    bubble_s = sum(p.value for p in last.prediction.time_parts if p.name == "pipeline bubble")
    share = percent(bubble_s / last.prediction.step_time_s)
    waits = f"the rank that ends last waits {share} of it"
    return (f"Last row: the fastest pipeline, to compare with; {waits}.",)


def plan(chosen: Plan) -> list[Table]:
    """The best layouts, what the constraints removed, the nearest that does not fit; of a plan
    without a prediction its layout alone."""
    if chosen.prediction is None:
        alone = (chosen.layout.name, str(chosen.layout.num_devices), chosen.recipe.optimizer)
        columns, said = ("layout", "devices", "optimizer"), "It was given, not priced."
        return [Table(headline(chosen), columns, (alone,), (said, LAYOUT_LEGEND), left=1)]
    best = Candidate(layout=chosen.layout, prediction=chosen.prediction)
    candidates = (best, *chosen.runners_up)
    legend = (*_last_row(candidates), LAYOUT_LEGEND, MFU_LEGEND)
    ranked = _ranked(f"{headline(chosen)}{_tier(chosen)}", candidates, legend)
    return [
        ranked,
        *warnings(chosen.prediction.notes),
        *([_removed(chosen)] if chosen.removed else []),
        parts(chosen),
        *stages(chosen),
    ]


def warnings(notes: Sequence[str]) -> list[Table]:
    """What the prediction rests on beyond the measurement; of one price only the farthest size."""
    farthest: dict[str, tuple[float, str]] = {}
    for note in notes:
        if note.startswith(PEAK_NOTE):
            continue
        match = re.fullmatch(r"(.*): ([\d.]+) x beyond the largest measured size", note)
        key, factor = (match[1], float(match[2])) if match else (note, 0.0)
        if key not in farthest or factor > farthest[key][0]:
            farthest[key] = factor, note
    rows = tuple((note,) for _, note in farthest.values())
    more = "measure more: meshwise measure profile --resume"
    of_prices = any("`meshwise run`" not in note for (note,) in rows)
    return [Table("Warnings", ("",), rows, (more,) if of_prices else ())] if rows else []


def layouts(plans: Sequence[Plan], legend: tuple[str, ...]) -> Table:
    """What plans predict; each has a prediction."""
    chosen = [
        Candidate(layout=plan.layout, prediction=plan.prediction)
        for plan in plans
        if plan.prediction is not None
    ]
    return _ranked(headline(plans[0]), chosen, legend)


_TIERS = {
    "measured": "every price measured",
    "interpolated": "prices measured or interpolated",
    "extrapolated": "some prices extrapolated beyond what was measured",
    "transferred": "some prices are of similar operations",
    "datasheet": "some prices from data sheets",
}


def _tier(chosen: Plan) -> str:
    """What its prices rest on, the lowest tier of them."""
    if chosen.prediction is None or chosen.prediction.tier is None:
        return ""
    if chosen.prediction.tier == "datasheet" and not chosen.runs:
        return "; priced by data sheets, nothing was measured"
    return f"; {_TIERS[chosen.prediction.tier]}"


def headline(chosen: Plan) -> str:
    """What runs where."""
    return (
        f"{chosen.model.name or 'model'} on {chosen.layout.num_devices} devices of "
        f"{chosen.cluster.name}: batch {batch(chosen.model, chosen.workload)}, "
        f"{chosen.dtype}, {chosen.lowering}"
    )


def batch(model: AnyModel, workload: Workload) -> str:
    """``8 x 512`` sequences and tokens, ``32 x 224 x 224`` images."""
    size = workload.global_batch_size
    if isinstance(model, WideResNet):
        return f"{size} x {model.image_size} x {model.image_size}"
    return f"{size} x {workload.seq_len}"


def _ranked(title: str, candidates: Sequence[Candidate], legend: tuple[str, ...]) -> Table:
    rows = tuple(
        (
            str(rank),
            candidate.layout.name,
            format_seconds(candidate.prediction.step_time_s),
            interval(candidate.prediction.low_s, candidate.prediction.high_s),
            format_count(candidate.prediction.tokens_per_s),
            format_rate(candidate.prediction.flops_per_device_per_s, "FLOP/s"),
            percent(candidate.prediction.mfu),
            format_bytes(candidate.prediction.peak_memory_bytes),
        )
        for rank, candidate in enumerate(candidates, 1)
    )
    columns = ("", "layout", "step", "interval", "tokens/s", "FLOP/s a device", "MFU", "memory")
    return Table(title, columns, rows, legend, left=2)


def _removed(chosen: Plan) -> Table:
    rows = tuple((str(removal.count), _why(removal.constraint)) for removal in chosen.removed)
    kept = chosen.num_considered - sum(removal.count for removal in chosen.removed)
    near = chosen.nearest_infeasible
    legend = (
        f"{kept} layouts were left and ranked.",
        f"Nearest that does not fit: {near.layout.name}; {near.reason}."
        if near
        else "All fit in memory.",
    )
    title = f"Of {chosen.num_considered} layouts, removed by"
    return Table(title, ("layouts", "constraint"), rows, legend, left=2)


def _why(constraint: str) -> str:
    """Layouts dropped as duplicates broke no constraint: the row says so first."""
    duplicate = constraint.startswith("zero 1 is zero 2")
    return f"same program as another layout: {constraint}" if duplicate else constraint


def stages(chosen: Plan) -> list[Table]:
    """What each stage of a pipeline holds, and how long a microbatch takes there."""
    times = chosen.prediction.stage_times if chosen.prediction else ()
    if not times:
        return []
    busy = [0.0] * chosen.layout.pp
    for stage, of_stage in zip(chosen.stages, times, strict=True):
        busy[stage.pipeline_rank] += of_stage.forward_s + of_stage.backward_s + of_stage.weights_s
    rows = tuple(
        (
            str(number),
            f"pp {stage.pipeline_rank}",
            f"{stage.first_layer} to {stage.last_layer - 1}"
            + (" + embedding" if number == 0 else "")
            + (" + head" if number == len(times) - 1 else ""),
            f"dp{stage.dp} tp{stage.tp}",
            format_seconds(of_stage.forward_s),
            format_seconds(of_stage.backward_s + of_stage.weights_s),
            percent(busy[stage.pipeline_rank] / max(busy)),
        )
        for number, (stage, of_stage) in enumerate(zip(chosen.stages, times, strict=True))
    )
    columns = ("stage", "rank", "layers", "mesh", "forward", "backward", "of the busiest rank")
    legend = (
        "Forward and backward of one microbatch; last column: a rank's work on a microbatch, all "
        "its stages, against the rank that has most. What is short of 100 % waits: uneven stages "
        "rather than the schedule.",
    )
    return [Table(f"Stages of {chosen.layout.name}", columns, rows, legend, left=4)]


def parts(chosen: Plan) -> Table:
    """Where the best layout spends a step and its memory."""
    prediction = chosen.prediction
    assert prediction is not None
    rows = [
        (
            "time",
            part.name,
            format_seconds(part.value),
            percent(part.value / prediction.step_time_s),
        )
        for part in prediction.time_parts
    ] + [
        (
            "memory",
            part.name,
            format_bytes(part.value),
            percent(part.value / prediction.peak_memory_bytes),
        )
        for part in prediction.memory_parts
    ]
    title = f"Predicted parts of {chosen.layout.name}"
    peak = [f"The {note}." for note in prediction.notes if note.startswith(PEAK_NOTE)]
    columns = ("of", "part", "amount", "share")
    return Table(title, columns, tuple(rows), (*peak, PARTS_LEGEND), left=2)
