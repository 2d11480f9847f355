"""Make tables of any record that Meshwise writes."""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

from meshwise.pages import health, samples, steps, tables
from meshwise.pages.table import Table, filled, listed, span
from meshwise.spec import Case, Cluster, Costs, Plan, Record, RunInfo, Sample
from meshwise.spec.checkpoint import Damage, Verified
from meshwise.spec.label import label
from meshwise.spec.phases import ADDENDS, Phases
from meshwise.spec.trace import TraceCheck
from meshwise.units import format_bytes, format_count, format_seconds

MOST_DAMAGE = 20  # lines
PHASES_LEGEND = (
    "The parts of a rank add up to the step. Exposed: moments when a collective runs and no "
    "computation does; communication: all of it, beside computation too; bubble: waiting for a "
    "neighbour in the pipeline."
)
TRACE_LEGEND = (
    "Elements: what a rank sends to a gather or keeps of a scatter, else the whole message. Calls "
    "a step: of each rank; where ranks differ, the fewest and the most."
)


class StoredRun(Record, kw_only=True):
    """A run directory as one document."""

    info: RunInfo
    samples: tuple[Sample, ...]


Shown = Cluster | Costs | Plan | StoredRun | Phases | TraceCheck | Verified


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


def trace(check: TraceCheck, title: str = "Plan against trace") -> Table:
    """Show each kind and size of message, those of the plan first."""
    outcome = {
        True: f"The trace of {check.steps} steps is as planned.",
        False: f"The trace of {check.steps} steps is NOT as planned.",
        None: f"{check.steps} steps were traced.",
    }[check.agrees]
    per_step = "{:.4g}".format
    return listed(
        title,
        check.lines,
        ("unit", lambda line: line.units or "?"),
        ("collective", "kind"),
        ("dtype", "dtype"),
        ("ranks", lambda line: line.num_ranks or "?"),
        ("elements", "elements", "{:,}".format),
        ("planned a step", "planned"),
        (
            "traced a step",
            lambda line: span((n / check.steps for n in line.traced or (0,)), per_step),
        ),
        ("verdict", "verdict"),
        legend=(outcome, *check.notes, TRACE_LEGEND),
        left=3,
    )


_TABLES: dict[type, Callable[[Any], list[Table]]] = {
    Verified: checkpoint,
    Phases: lambda found: [phases(found)],
    TraceCheck: lambda found: [trace(found)],
    Cluster: tables.cluster,
    Costs: tables.costs,
    Plan: tables.plan,
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
        legend=("from, to: time / and x (1 + error); of a fitted price 9 of 10 points are within.",
                *(note for one in found for note in one.notes)),
        left=2,
    )  # fmt: skip
