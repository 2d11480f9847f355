"""Make tables of any record that Meshwise writes."""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, get_args

from meshwise.pages import answers, health, models, prices, samples, steps, tables
from meshwise.pages.table import Table, filled, grouped, listed, size, span
from meshwise.spec import (
    AnyModel,
    Case,
    Cluster,
    Costs,
    Plan,
    Record,
    RunInfo,
    Sample,
    StepLine,
)
from meshwise.spec.checkpoint import Damage, Verified
from meshwise.spec.label import label
from meshwise.spec.phases import ADDENDS, Phases
from meshwise.spec.trace import TraceCheck, TraceLine
from meshwise.units import format_bytes, format_count, format_seconds

MOST_DAMAGE = 20  # lines
MOST_DIFFERENCES = 3  # sentences
PER_STEP = "{:.4g}"
PHASES_LEGEND = (
    "The parts of a rank add up to the step. Exposed: moments when a collective runs and no "
    "computation does; communication: all of it, beside computation too; bubble: waiting for a "
    "neighbour in the pipeline."
)
TRACE_LEGEND = (
    "Elements: what a rank sends to a gather or keeps of a scatter, else the whole message. Size: "
    "nccl-tests', the whole message. Calls "
    "a step: of each rank; where ranks differ, the fewest and the most."
)

WITHIN = {  # what a price's error is, by its tier
    "measured": "how far repeated measurements differ",
    "interpolated": "9 of 10 points that the fit left out are within",
    "extrapolated": "as interpolated, and more the farther it is from what was measured",
    "transferred": "the error of the similar operation, and a guess for what differs",
    "datasheet": "how far such prices were off where they could be compared",
}


class StoredRun(Record, kw_only=True):
    """A run directory as one document."""

    info: RunInfo
    samples: tuple[Sample, ...]


class StoredSteps(Record, kw_only=True):
    """The finished steps of a training, also of one that was interrupted."""

    run_id: str
    steps: tuple[StepLine, ...]


Shown = Cluster | Costs | Plan | StoredRun | StoredSteps | Phases | TraceCheck | Verified | AnyModel


def of(record: Shown) -> list[Table]:
    """Return the tables of a record."""
    if not isinstance(record, StoredRun):
        return _TABLES[type(record)](record)
    info, measured = record.info, record.samples
    state = samples.state(info, measured)
    if "-measure-health-" in info.run_id:  # nothing else tells it apart
        return [state, *health.tables(info, measured)]
    if info.plan is None:
        return samples.run(info, measured)
    return [state, *steps.tables([steps.result(info, list(measured))])]


def training(found: StoredSteps) -> Table:
    """Show each step's time and loss."""
    return listed(
        f"Steps of {found.run_id}",
        found.steps,
        ("step", "step"),
        ("time", "time_s", format_seconds),
        ("loss", "loss", "{:.4f}".format),
        legend=("On rank 0's clock, of rank 0's rows.",),
    )


def phases(found: Phases) -> Table:
    """Show each rank, then the least and the most of all ranks."""
    names = (*ADDENDS, "communication_s")
    rows = [(str(r.rank), [float(getattr(r, name)) for name in names]) for r in found.ranks]
    columns = list(zip(*(times for _, times in rows), strict=True))
    rows += [("least", list(map(min, columns))), ("most", list(map(max, columns)))]
    step, slower = format_seconds(found.step_s), format_seconds(found.profiled_step_s)
    return Table(
        f"Where the time of a step of {step} goes ({slower} under the profiler)",
        ("rank", *steps.PHASE_NAMES, "communication"),
        tuple((said, *map(format_seconds, row)) for said, row in rows),
        (PHASES_LEGEND, steps.SCALED_LEGEND),
    )


def checkpoint(found: Verified) -> list[Table]:
    """Describe a checkpoint; then list damage, if there is any."""
    saved = found.checkpoint
    weights = {n: whole for n, whole in saved.tensors.items() if not n.startswith("optimizer.")}
    elements = sum(prod(whole.shape) for whole in weights.values())
    workload, family = saved.workload, type(saved.model).__struct_config__.tag
    size = format_bytes(sum(stored.bytes for stored in saved.files.values()))
    legend = "It can be resumed under any layout."
    if found.damage:
        state, legend = "damaged", "A run that reads what is damaged is refused."
    elif found.verified_bytes:
        state = f"all {format_bytes(found.verified_bytes)} as saved"
    else:
        state = saved.note or "data not compared; show the folder to verify them"
    rows = (
        ("next step", str(saved.step)),
        ("model", f"{saved.model.name or 'model'} ({family})"),
        ("batch", f"{workload.global_batch_size} x {workload.seq_len}, seed {saved.seed}"),
        ("saved under", f"{saved.layout}, {saved.optimizer}"),
        ("weights", f"{format_count(elements)} elements in {len(weights)} tensors"),
        ("optimizer state", f"{len(saved.tensors) - len(weights)} tensors"),
        ("files", f"{len(saved.files)} in {saved.data}/, {size}"),
        ("state", state),
    )
    table = Table("Checkpoint", ("", ""), rows, (legend,), left=2)
    return [table, *filled(_damage(found.damage))]


def _damage(found: Sequence[Damage]) -> Table:
    fix = "Copy these files again, or resume from the folder of an earlier checkpoint."
    more = len(found) - MOST_DAMAGE

    def names(one: Damage) -> str:
        others = len(one.tensors) - 1
        return "".join(one.tensors[:1]) + (f" and {others} more" if others > 0 else "")

    return listed(
        "Damaged",
        found[:MOST_DAMAGE],
        ("file", "file"),
        ("is", "reason"),
        ("bytes", lambda one: f"{one.offset} to {one.offset + one.bytes}" if one.bytes else ""),
        ("tensors", names),
        legend=(fix, f"And {more} more; --json has all.") if more > 0 else (fix,),
        left=4,
    )


def trace(check: TraceCheck, title: str = "Plan against trace") -> list[Table]:
    """Show a step's bytes by kind of message, then each message, the most bytes a step first."""
    return [*filled(_bytes(check)), _messages(check, title)]


def _bytes(check: TraceCheck) -> Table:
    sized = [line for line in check.lines if line.size_bytes]
    rows = [
        (*key, [(line, line.size_bytes, _of_step(line, check)) for line in of])
        for key, of in grouped(sized, lambda line: (line.kind, line.num_ranks)).items()
    ]
    return listed(
        "Bytes a step of all messages of a kind",
        rows,
        ("collective", lambda row: row[0]),
        ("ranks", lambda row: row[1] or "?"),
        ("planned", lambda row: sum(of * line.planned for line, of, _ in row[2]), size),
        ("traced", lambda row: sum(of * n for _, of, n in row[2]), size),
        ("as planned", lambda row: sum(of * n for line, of, n in row[2] if _agrees(line)), size),
    )


def _agrees(line: TraceLine) -> bool:
    return line.verdict == "as planned"


def _messages(check: TraceCheck, title: str) -> Table:
    steps = f"{check.steps} step{'s' * (check.steps > 1)}"
    outcome = {
        True: f"The trace of {steps} is as planned.",
        False: f"The trace of {steps} is NOT as planned.",
        None: f"Traced: {steps}.",
    }[check.agrees]
    return listed(
        title,
        sorted(check.lines, key=lambda line: -line.size_bytes * _most(line, check)),
        ("unit", lambda line: line.units or "?"),
        ("collective", "kind"),
        ("dtype", "dtype"),
        ("ranks", lambda line: line.num_ranks or "?"),
        ("elements", "elements", "{:,}".format),
        ("size", lambda line: line.size_bytes or None, size),
        ("planned a step", "planned", PER_STEP.format),
        (
            "traced a step",
            lambda line: span((n / check.steps for n in line.traced or (0,)), PER_STEP.format),
        ),
        ("verdict", "verdict"),
        legend=(outcome, *_differences(check), *check.notes, TRACE_LEGEND),
        left=3,
    )


def _most(line: TraceLine, check: TraceCheck) -> float:
    return max(line.planned, _of_step(line, check))


def _of_step(line: TraceLine, check: TraceCheck) -> float:
    """Return how often the mean rank sends a message in a step of the trace."""
    return sum(line.traced) / max(len(line.traced), 1) / check.steps


def _differences(check: TraceCheck) -> list[str]:
    """Say in words where the most bytes differ."""
    apart = [
        (abs(traced - line.planned) * line.size_bytes, traced, line)
        for line in check.lines
        if line.verdict in ("missing", "too few", "too many", "not planned")
        for traced in [_of_step(line, check)]
    ]
    return [
        f"{line.kind} {line.dtype} of {size(line.size_bytes)}, {line.num_ranks or '?'} ranks: the "
        f"trace has {PER_STEP.format(traced)} a step, planned are {PER_STEP.format(line.planned)}."
        for _, traced, line in sorted(apart, key=lambda one: -one[0])[:MOST_DIFFERENCES]
    ]


_TABLES: dict[type, Callable[[Any], list[Table]]] = {
    Verified: checkpoint,
    StoredSteps: lambda found: [training(found)],
    **dict.fromkeys(get_args(AnyModel), models.of),
    Phases: lambda found: [phases(found)],
    TraceCheck: trace,
    Cluster: tables.cluster,
    Costs: prices.of,
    Plan: lambda chosen: [*tables.plan(chosen), *answers.of(chosen)],
}


def price(found: Sequence[Any]) -> Table:
    """Show the prices of operations (``verbs.price.Priced``)."""
    return listed(
        "Prices",
        found,
        ("price", "name"),
        ("operation", lambda one: label(Case(op=one.op))),
        ("time", "time_s", format_seconds),
        ("from", "low_s", format_seconds),
        ("to", "high_s", format_seconds),
        ("tier", "tier"),
        ("rests on", "rests_on"),
        legend=("from: time / (1 + error), to: time x (1 + error).",
                *(f"{tier}: {said}." for tier, said in WITHIN.items()
                  if any(one.tier == tier for one in found)),
                *(note for one in found for note in one.notes)),
        left=2,
    )  # fmt: skip
