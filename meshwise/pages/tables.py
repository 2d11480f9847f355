"""Tables of the records that stages exchange: clusters and plans (prices: ``pages.prices``)."""

import re
from collections.abc import Sequence

from meshwise.models import num_parameters
from meshwise.pages.table import Table, filled, flops, interval, listed, percent
from meshwise.prices.datasheet import attainable
from meshwise.spec import (
    AnyModel,
    Candidate,
    Cluster,
    Plan,
    WideResNet,
    Workload,
)
from meshwise.units import format_bytes, format_count, format_rate, format_seconds

CONVENTION = "torchtitan"
INTERVAL = "95 % interval of the median, for independent times; the range if fewer than 6 values"
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
    "degrees; meshes: dp x tp of each pipeline rank; dp/n: n replicas of the shards; +sp: sequence "
    "parallel; cuts: which dim tp divides, if not as usual; sums: when gradients of weights that "
    "tp repeats are summed over tp; ways: what each stage, or all stages of a rank, has otherwise, "
    "one / the next; layers: of each stage, 2x14 is 2 in each of 14; zero: what dp shards; mb: "
    "microbatch size x count; selective, full: what is computed again, full:n in n layers a stage."
)
PARTS_LEGEND = (
    "Time: of the rank that ends last, whose bubble includes waiting for slower stages. Memory: of "
    "what is alive at the peak."
)
GATHERED_LEGEND = "zero 0 runs as FSDP2 on a (dp, 1) mesh, so it holds a gathered copy too."
DRY_RUN_LEGEND = (
    "Batch: microbatches x the sequences or images of one on all data ranks. "
    "Layers: those of each stage."
)
NOTHING = "Nothing was run."
WARNINGS = "Warnings"
PEAK_NOTE = "memory peaks on "
UNSURE = "prices that they do not share may be off by more than the difference"
SHARED = (
    "No row ties with 1: intervals overlap, but rows share most errors of prices, and those that "
    "they do not share are smaller than the difference."
)


TIERS = {
    "measured": "every price measured",
    "interpolated": "prices measured or interpolated",
    "extrapolated": "some prices extrapolated beyond what was measured",
    "transferred": "some prices come from similar operations",
    "datasheet": "some prices from data sheets",
}


def cluster(described: Cluster) -> list[Table]:
    """Describe the machine, its links, and what is unknown about it."""
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
        ("tier", "name"),
        ("source", lambda tier: tier.source or "rate not known"),
        ("reaches devices", "num_devices"),
        ("each way", "bytes_per_s", lambda rate: format_rate(rate, "B/s")),
        ("latency", "latency_s", format_seconds),
        legend=described.notes,
        left=2,
    )
    return [Table(f"Cluster {described.name}", ("", ""), tuple(rows), left=2), links]


def plan(chosen: Plan) -> list[Table]:
    """Show the best layouts, how many the constraints removed, and the nearest that does not fit.
    For a plan without a prediction show only the layout."""
    told = chosen.prediction
    if told is None:
        alone = (chosen.layout.name, str(chosen.layout.num_devices), chosen.recipe.optimizer)
        columns = ("layout", "devices", "optimizer")
        unpriced = ("It was given, not priced.", LAYOUT_LEGEND)
        return [Table(headline(chosen), columns, (alone,), unpriced)]
    tier = f"; {TIERS[told.tier]}" if told.tier else ""
    if told.tier == "datasheet" and not chosen.runs:
        tier = "; priced by data sheets, nothing was measured"
    candidates = (Candidate(layout=chosen.layout, prediction=told), *chosen.runners_up)
    said = (
        *_slowest(chosen), *_last_row(candidates), *_tight(chosen, candidates),
        *_ties(chosen, candidates), *_loaded(chosen),
    )  # fmt: skip
    legend = (*said, LAYOUT_LEGEND, flop_legend(chosen.model))
    return [
        _ranked(headline(chosen) + tier, chosen.model, candidates, legend),
        *warnings(told.notes),
        *filled(_removed(chosen)),
        parts(chosen),
        *_stages(chosen),
    ]


def _slowest(chosen: Plan) -> tuple[str, ...]:
    """Say how long the first row takes, where it waits for the slowest of several ranks."""
    told = chosen.prediction
    if told is None or told.p50_s is None or told.p95_s is None:
        return ()
    p50, p95, ranks = *map(format_seconds, (told.p50_s, told.p95_s)), chosen.layout.num_devices
    return (f"Row 1, with the slowest of {ranks} rank(s): p50 {p50}, p95 {p95} a step.",)


def _tight(chosen: Plan, candidates: Sequence[Candidate]) -> tuple[str, ...]:
    """Name the rows that may not fit: the interval of their memory ends above the limit."""
    limit = chosen.cluster.usable_bytes
    rows = [
        str(row)
        for row, candidate in enumerate(candidates, 1)
        if candidate.prediction.peak_memory_bytes <= limit < candidate.prediction.memory_high_bytes
    ]
    size = format_bytes(limit)
    where = f"row{'s' if len(rows) > 1 else ''} {', '.join(rows)}"
    said = f"Tight: the interval of the memory ends above {size} in {where}."
    return (said,) if rows else ()


def _ties(chosen: Plan, candidates: Sequence[Candidate]) -> tuple[str, ...]:
    """Name the rows whose difference to the first may be nothing but errors of prices, and the
    command that runs them; `run` refuses plans in fp16."""
    first, *others = candidates
    rows = [str(row) for row, other in enumerate(others, 2) if other.ties]
    if rows:
        tie = f"Rows {', '.join(rows)} tie" if len(rows) > 1 else f"Row {rows[0]} ties"
        runs = f"meshwise run --rivals {len(rows)} runs {'them' if len(rows) > 1 else 'it'} too"
        return (f"{tie} with 1: {UNSURE}{f'; {runs}' * (chosen.dtype != 'fp16')}.",)
    told = first.prediction
    overlap = any(other.prediction.low_s <= told.high_s for other in others)
    return (SHARED,) * (overlap and bool(told.errors))


def _loaded(chosen: Plan) -> tuple[str, ...]:
    """Say which load of the experts the plan assumes, if it is not an equal share."""
    experts = None if isinstance(chosen.model, WideResNet) else chosen.model.experts
    if experts is None or experts.load == "mean":
        return ()
    load = experts.load if isinstance(experts.load, str) else f"{experts.load:g}"
    rows = {"p95": "the 95th percentile of rows"}.get(load, f"{load} times the mean rows")
    return (f"Expert load {load}: the fullest rank's experts get {rows}.",)


def _last_row(candidates: Sequence[Candidate]) -> tuple[str, ...]:
    """Explain a pipeline that ranks last after other layouts: how long it waits."""
    *others, last = candidates
    if last.layout.pp == 1 or not others or any(c.layout.pp > 1 for c in others):
        return ()
    bubble_s = sum(p.value for p in last.prediction.time_parts if p.name == "pipeline bubble")
    share = percent(bubble_s / last.prediction.step_time_s)
    waits = f"the rank that ends last waits {share} of it"
    return (f"Last row: the fastest pipeline, to compare with; {waits}.",)


def warned(notes: Sequence[str]) -> list[str]:
    """Return the prediction's warnings; of extrapolated sizes only each price's farthest."""
    farthest: dict[str, tuple[float, str]] = {}
    for note in notes:
        if not note.startswith(PEAK_NOTE):
            match = re.fullmatch(r"(.*): ([\d.]+) x beyond the largest measured size", note)
            key, factor = (match[1], float(match[2])) if match else (note, 0.0)
            if key not in farthest or factor > farthest[key][0]:
                farthest[key] = factor, note
    return [note for _, note in farthest.values()]


def warnings(notes: Sequence[str]) -> list[Table]:
    """List the prediction's warnings."""
    rows = tuple((note,) for note in warned(notes))
    more = "measure more: meshwise measure profile; --resume with the same options goes on with one"
    of_prices = any("`meshwise run`" not in note for (note,) in rows)
    return filled(Table(WARNINGS, ("",), rows, (more,) if of_prices else ()))


def dry_run(plans: Sequence[Plan]) -> list[Table]:
    """Show the plans' predictions, if they were priced, and the step of each."""
    title, model = headline(plans[0]), plans[0].model
    priced = [
        Candidate(layout=plan.layout, prediction=plan.prediction)
        for plan in plans
        if plan.prediction is not None
    ]
    steps = listed(
        "Steps" if priced else title,
        plans,
        ("layout", "layout.name"),
        ("devices", "layout.num_devices"),
        ("parameters", lambda plan: format_count(num_parameters(plan.model))),
        ("batch", _microbatches),
        ("each", _sample),
        ("layers", _layers),
        ("optimizer", "recipe.optimizer"),
        legend=(DRY_RUN_LEGEND, NOTHING),
    )
    return [*([_ranked(title, model, priced, ())] if priced else []), steps]


def _microbatches(plan: Plan) -> str:
    count, rows = plan.layout.num_microbatches, plan.layout.microbatch_rows
    return f"{count} x {rows} = {plan.workload.global_batch_size}"


def _sample(plan: Plan) -> str:
    if isinstance(plan.model, WideResNet):
        return f"{plan.model.image_size} x {plan.model.image_size}"
    return f"{plan.workload.seq_len} tokens"


def _layers(plan: Plan) -> str:
    """Show the layers of each stage: ``32``, ``8 + 8 + 16`` or ``3 x 8``."""
    counts = [len(stage) for stage in plan.layout.stage_layers(plan.model.layers)]
    equal = len(set(counts)) == 1 and len(counts) > 2
    return f"{len(counts)} x {counts[0]}" if equal else " + ".join(map(str, counts))


def in_full(plan: Plan, mode: str = "train") -> Table:
    """Show workload, layout, stages and, for training, the recipe."""
    size = plan.workload
    of = "images" if isinstance(plan.model, WideResNet) else f"sequences of {size.seq_len} tokens"
    rows = [("workload", f"{size.global_batch_size} {of} in a batch"), ("layout", plan.layout.name)]
    for number, stage in enumerate(plan.stages):
        held = f"layers {stage.first_layer} to {stage.last_layer - 1}"
        mesh = f"dp{stage.dp} cp{stage.cp} tp{stage.tp} ep{stage.ep}"
        rows.append((f"stage {number}", f"{held} on pipeline rank {stage.pipeline_rank}: {mesh}"))
    if mode == "train":
        said = {name: getattr(plan.recipe, name) for name in plan.recipe.__struct_fields__}
        switch = {True: "on", False: "off"}
        words = (
            f"{name} {switch[value] if isinstance(value, bool) else value}"
            for name, value in said.items()
        )
        rows.append(("recipe", ", ".join(words)))
    return Table(headline(plan), ("", ""), tuple(rows), (LAYOUT_LEGEND,), left=2)


def headline(chosen: Plan) -> str:
    """Name model, machine and batch in a line."""
    return (
        f"{chosen.model.name or 'model'} on {chosen.layout.num_devices} devices of "
        f"{chosen.cluster.name}: batch {batch(chosen.model, chosen.workload)}, "
        f"{chosen.dtype}, {chosen.lowering}"
    )


def batch(model: AnyModel, workload: Workload) -> str:
    """Show sequences and tokens, ``8 x 512``, or images, ``32 x 224 x 224``."""
    size = workload.global_batch_size
    if isinstance(model, WideResNet):
        return f"{size} x {model.image_size} x {model.image_size}"
    return f"{size} x {workload.seq_len}"


def rate_unit(model: AnyModel) -> str:
    """Name the unit of ``tokens_per_s``."""
    return "images/s" if isinstance(model, WideResNet) else "tokens/s"


def flop_legend(model: AnyModel, mode: str = "train") -> str:
    """Return the legend that says how FLOP/s are counted."""
    if isinstance(model, WideResNet):
        return IMAGES_LEGEND
    return MFU_LEGEND if mode == "train" else FORWARD_LEGEND


def _ranked(
    title: str, model: AnyModel, candidates: Sequence[Candidate], legend: tuple[str, ...]
) -> Table:
    return listed(
        title,
        [(rank, c.layout.name, c.prediction) for rank, c in enumerate(candidates, 1)],
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
        f"Of {chosen.num_considered:,} layouts, counted with each way to recompute, removed by",
        chosen.removed,
        ("layouts", lambda row: f"{row.count:,}"),
        ("constraint", "constraint", _why),
        legend=(f"{kept:,} layouts were left and ranked.", misses),
        left=2,
    )


def _why(constraint: str) -> str:
    """Name the constraint. Duplicates break no constraint, so the row says first what they are."""
    duplicate = constraint.startswith("zero 1 is zero 2")
    return f"same program as another layout: {constraint}" if duplicate else constraint


def _stages(chosen: Plan) -> list[Table]:
    """Show the layers of each pipeline stage, and the time of a microbatch in it."""
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
            + " + embedding" * (number == 0)
            + " + head" * (number == len(times) - 1),
            f"dp{stage.dp} " + f"cp{stage.cp} " * (stage.cp > 1) + f"tp{stage.tp}",
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


def _reserve(chosen: Plan) -> list[str]:
    """Say what a GPU's driver will show beside the predicted peak."""
    device, told, known = chosen.cluster.device, chosen.prediction, attainable().overhead
    if told is None or device.kind == "cpu":
        return []
    peak, *_ = told.allocated_bytes
    least, usual, most = (
        format_bytes(min(peak * times + known.num_bytes, device.memory_bytes))
        for times in known.reserve
    )
    return [
        f"A GPU will show {usual} in use ({least} to {most}): the allocator keeps what it frees."
    ]


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
    said = [f"The {note}." for note in told.notes if note.startswith(PEAK_NOTE)]
    columns = ("of", "part", "amount", "share")
    if chosen.graphs > 1:
        said.append(f"A rank compiles {chosen.graphs} kinds of layers.")
    said += _reserve(chosen)
    copies = (GATHERED_LEGEND,) * (not chosen.layout.zero and chosen.layout.data_ranks > 1)
    return Table(title, columns, tuple(rows), (*said, PARTS_LEGEND, *copies), left=2)
