"""Tables of what stages hand on: clusters, prices, plans, steps, comparisons. Records in."""

import re
from collections.abc import Sequence

from meshwise.models import num_parameters
from meshwise.pages.table import Table, filled, flops, interval, listed, percent, shown, span
from meshwise.prices import name_of
from meshwise.spec import AnyModel, Candidate, Cluster, Costs, HeldOut, Plan, WideResNet, Workload
from meshwise.units import format_bytes, format_count, format_rate, format_seconds

CONVENTION = "torchtitan"
INTERVAL = "95 % interval of the median, were times independent; of fewer than 6 values the range"
MFU_LEGEND = (
    f"FLOP/s and MFU count FLOPs as {CONVENTION} does: 6 per parameter and token without embedding "
    "lookups, plus 12 x layers x hidden x seq a token, attention not halved."
)
IMAGES_LEGEND = (
    "FLOP/s and MFU count two for each multiplication of the convolutions and the head, three "
    "times for a training step."
)
FORWARD_LEGEND = (
    f"FLOP/s and MFU count a forward pass, a third of {CONVENTION}'s step: 2 per parameter and "
    "token without embedding lookups, plus 4 x layers x hidden x seq a token, attention not halved."
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
DRY_RUN_LEGEND = (
    "Batch: microbatches x the sequences or images of one on all data ranks. "
    "Stages: layers of each."
)
NOTHING = "Nothing was run."
PEAK_NOTE = "memory peaks on "


def cluster(described: Cluster) -> list[Table]:
    """The machine, its links, and what is not known of it."""
    device = described.device
    peaks = ", ".join(f"{dtype} {flops(rate)}" for dtype, rate in device.peak_flops.items())
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
    links = listed(
        "Links, innermost first",
        described.tiers,
        ("tier", lambda tier: tier.name),
        ("source", lambda tier: tier.source or "rate not known"),
        ("reaches devices", lambda tier: str(tier.num_devices)),
        ("each way", lambda tier: shown(tier.bytes_per_s, lambda rate: format_rate(rate, "B/s"))),
        legend=described.notes,
        left=2,
    )
    return [Table(f"Cluster {described.name}", ("", ""), tuple(rows), left=2), links]


def costs(prices: Costs) -> list[Table]:
    """Every price with its error on points that were left out of the fit."""
    curves = listed(
        "Time against bytes",
        prices.curves,
        ("price", lambda curve: name_of(curve, prices.cluster)),
        ("law", lambda curve: {"loglog": "log-log", "alpha_beta": "alpha-beta"}[curve.law]),
        ("points", lambda curve: str(len(curve.x_bytes))),
        ("measured sizes", lambda curve: span(curve.x_bytes, format_bytes)),
        ("alpha", lambda curve: shown(curve.alpha_s or None, format_seconds)),
        (
            "1/beta",
            lambda curve: shown(
                curve.beta_s_per_byte or None, lambda beta: format_rate(1 / beta, "B/s")
            ),
        ),
        ("median error", lambda curve: _error(curve.held_out[curve.law], "median")),
        ("p90 error", lambda curve: _error(curve.held_out[curve.law], "p90")),
        legend=(
            "Errors are |predicted/measured - 1| on points left out of the fit, one at a time.",
            "t = alpha + bytes x beta, bent through the measured points; log-log interpolates "
            "between them. A collective has so many ranks within each tier of links, its bytes "
            "are nccl-tests' size.",
        ),
        left=2,
    )
    surfaces = listed(
        "Matrix products and attention",
        prices.surfaces,
        ("price", lambda surface: name_of(surface, prices.cluster)),
        ("shapes", lambda surface: str(len(surface.shapes))),
        ("floor", lambda surface: format_seconds(surface.floor_s)),
        ("best rate", lambda surface: flops(surface.flops_per_s)),
        ("median error", lambda surface: _error(surface.held_out, "median")),
        ("p90 error", lambda surface: _error(surface.held_out, "p90")),
        legend=("A shape that was not measured takes the utilisation of its nearest neighbours.",),
    )
    factors = listed(
        "Blocks: measured time over the sum of their operations' prices",
        prices.factors,
        ("block", lambda factor: name_of(factor, prices.cluster)),
        ("sizes", lambda factor: str(len(factor.ratio))),
        ("time ratio", lambda factor: span(factor.ratio, "{:.2f}".format)),
        ("saved bytes ratio", lambda factor: span(factor.saved_ratio, "{:.2f}".format)),
        ("median error", lambda factor: _error(factor.held_out, "median")),
        ("p90 error", lambda factor: _error(factor.held_out, "p90")),
        legend=("The ratio corrects every plan that holds the block.",),
    )
    none = Table("No block was measured; plans add operations up as they are.", (), ())
    return [curves, surfaces, factors if prices.factors else none]


def _error(held_out: HeldOut, which: str) -> str:
    return percent(getattr(held_out, which) if held_out.num_points else None)


def _last_row(candidates: Sequence[Candidate]) -> tuple[str, ...]:
    """Explain a pipeline ranked behind other layouts: how long it waits."""
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
        return [Table(headline(chosen), columns, (alone,), (said, LAYOUT_LEGEND))]
    best = Candidate(layout=chosen.layout, prediction=chosen.prediction)
    candidates = (best, *chosen.runners_up)
    legend = (*_last_row(candidates), LAYOUT_LEGEND, flop_legend(chosen.model))
    return [
        _ranked(f"{headline(chosen)}{_tier(chosen)}", chosen.model, candidates, legend),
        *warnings(chosen.prediction.notes),
        *filled(_removed(chosen)),
        parts(chosen),
        *stages(chosen),
    ]


def warnings(notes: Sequence[str]) -> list[Table]:
    """List what the prediction extrapolates; for each price only the size farthest out."""
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
    return filled(Table("Warnings", ("",), rows, (more,) if of_prices else ()))


def layouts(plans: Sequence[Plan], legend: tuple[str, ...]) -> Table:
    """Show the predictions of plans; each has one."""
    chosen = [
        Candidate(layout=plan.layout, prediction=plan.prediction)
        for plan in plans
        if plan.prediction is not None
    ]
    return _ranked(headline(plans[0]), plans[0].model, chosen, legend)


_TIERS = {
    "measured": "every price measured",
    "interpolated": "prices measured or interpolated",
    "extrapolated": "some prices extrapolated beyond what was measured",
    "transferred": "some prices are of similar operations",
    "datasheet": "some prices from data sheets",
}


def _tier(chosen: Plan) -> str:
    """Name the lowest tier among the plan's prices."""
    if chosen.prediction is None or chosen.prediction.tier is None:
        return ""
    if chosen.prediction.tier == "datasheet" and not chosen.runs:
        return "; priced by data sheets, nothing was measured"
    return f"; {_TIERS[chosen.prediction.tier]}"


def dry_run(plans: Sequence[Plan]) -> Table:
    """Show the step of each plan; for plans with prices, what they predict."""
    if all(plan.prediction is not None for plan in plans):
        return layouts(plans, (NOTHING,))
    return listed(
        headline(plans[0]),
        plans,
        ("layout", lambda plan: plan.layout.name),
        ("devices", lambda plan: str(plan.layout.num_devices)),
        ("parameters", lambda plan: format_count(num_parameters(plan.model))),
        ("batch", _microbatches),
        ("each", _sample),
        ("stages", _layers),
        ("optimizer", lambda plan: plan.recipe.optimizer),
        legend=(DRY_RUN_LEGEND, NOTHING),
    )


def _microbatches(plan: Plan) -> str:
    count, rows = plan.layout.num_microbatches, plan.layout.microbatch_rows
    return f"{count} x {rows} = {plan.workload.global_batch_size}"


def _sample(plan: Plan) -> str:
    if isinstance(plan.model, WideResNet):
        return f"{plan.model.image_size} x {plan.model.image_size}"
    return f"{plan.workload.seq_len} tokens"


def _layers(plan: Plan) -> str:
    """``3 x 8`` or ``8 + 8 + 16``; of one stage the number alone."""
    counts = [len(stage) for stage in plan.layout.stage_layers(plan.model.layers)]
    equal = len(set(counts)) == 1 and len(counts) > 2
    return f"{len(counts)} x {counts[0]}" if equal else " + ".join(map(str, counts))


def in_full(plan: Plan, mode: str = "train") -> Table:
    """Workload, layout, stages and, of training, the recipe."""
    size, is_image = plan.workload, isinstance(plan.model, WideResNet)
    of = "images" if is_image else f"sequences of {size.seq_len} tokens"
    rows = [
        ("workload", f"{size.global_batch_size} {of} in a batch"),
        ("layout", plan.layout.name),
    ]
    for number, stage in enumerate(plan.stages):
        held = f"layers {stage.first_layer} to {stage.last_layer - 1}"
        mesh = f"dp{stage.dp} cp{stage.cp} tp{stage.tp} ep{stage.ep}"
        rows.append((f"stage {number}", f"{held} on pipeline rank {stage.pipeline_rank}: {mesh}"))
    if mode == "train":
        said = {name: getattr(plan.recipe, name) for name in plan.recipe.__struct_fields__}
        words = (f"{name} {_switch(value)}" for name, value in said.items())
        rows.append(("recipe", ", ".join(words)))
    return Table(headline(plan), ("", ""), tuple(rows), (LAYOUT_LEGEND,), left=2)


def _switch(value: object) -> str:
    return str(value) if not isinstance(value, bool) else "on" if value else "off"


def headline(chosen: Plan) -> str:
    """Name model, machine and batch in a line."""
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


def rate_unit(model: AnyModel) -> str:
    """Name the unit of ``tokens_per_s``."""
    return "images/s" if isinstance(model, WideResNet) else "tokens/s"


def flop_legend(model: AnyModel, mode: str = "train") -> str:
    """Say what FLOP/s count."""
    if isinstance(model, WideResNet):
        return IMAGES_LEGEND
    return MFU_LEGEND if mode == "train" else FORWARD_LEGEND


def _ranked(
    title: str, model: AnyModel, candidates: Sequence[Candidate], legend: tuple[str, ...]
) -> Table:
    return listed(
        title,
        [(str(rank), c.layout.name, c.prediction) for rank, c in enumerate(candidates, 1)],
        ("", lambda row: row[0]),
        ("layout", lambda row: row[1]),
        ("step", lambda row: format_seconds(row[2].step_time_s)),
        ("interval", lambda row: interval(row[2].low_s, row[2].high_s)),
        (rate_unit(model), lambda row: format_count(row[2].tokens_per_s)),
        ("FLOP/s a device", lambda row: flops(row[2].flops_per_device_per_s)),
        ("MFU", lambda row: percent(row[2].mfu)),
        ("memory", lambda row: format_bytes(row[2].peak_memory_bytes)),
        legend=legend,
        left=2,
    )


def _removed(chosen: Plan) -> Table:
    kept = chosen.num_considered - sum(removal.count for removal in chosen.removed)
    near = chosen.nearest_infeasible
    misses = "All fit in memory."
    if near:
        misses = f"Nearest that does not fit: {near.layout.name}; {near.reason}."
    return listed(
        f"Of {chosen.num_considered} layouts, removed by",
        chosen.removed,
        ("layouts", lambda removal: str(removal.count)),
        ("constraint", lambda removal: _why(removal.constraint)),
        legend=(f"{kept} layouts were left and ranked.", misses),
        left=2,
    )


def _why(constraint: str) -> str:
    """Layouts dropped as duplicates broke no constraint: the row says so first."""
    duplicate = constraint.startswith("zero 1 is zero 2")
    return f"same program as another layout: {constraint}" if duplicate else constraint


def stages(chosen: Plan) -> list[Table]:
    """Show the layers of each pipeline stage, and how long a microbatch takes there."""
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
    """Show the parts of the best layout's step and memory."""
    told = chosen.prediction
    assert told is not None
    rows = [
        (of, part.name, show(part.value), percent(part.value / whole))
        for of, found, show, whole in (
            ("time", told.time_parts, format_seconds, told.step_time_s),
            ("memory", told.memory_parts, format_bytes, told.peak_memory_bytes),
        )
        for part in found
    ]
    title = f"Predicted parts of {chosen.layout.name}"
    peak = [f"The {note}." for note in told.notes if note.startswith(PEAK_NOTE)]
    columns = ("of", "part", "amount", "share")
    return Table(title, columns, tuple(rows), (*peak, PARTS_LEGEND), left=2)
