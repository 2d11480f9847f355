"""Tables of what a run leaves beside its samples: ``phases.json`` and ``checkpoint.json``."""

from collections.abc import Sequence
from math import prod

from meshwise.pages.ran import PHASE_NAMES, SCALED_LEGEND
from meshwise.pages.table import Table, filled
from meshwise.spec.checkpoint import Damage, Verified
from meshwise.spec.phases import ADDENDS, Phases
from meshwise.units import format_bytes, format_count, format_seconds

MOST_DAMAGE = 20  # lines
PHASES_LEGEND = (
    "The parts of a rank add up to the step. Exposed: moments when a collective runs and no "
    "computation does; communication: all of it, beside computation too; bubble: waiting for a "
    "neighbour in the pipeline."
)


def phases(found: Phases) -> Table:
    """A row for each rank, then the least and the most of them."""
    names = (*ADDENDS, "communication_s")
    rows = [(str(r.rank), [float(getattr(r, name)) for name in names]) for r in found.ranks]
    columns = list(zip(*(times for _, times in rows), strict=True))
    rows += [("least", list(map(min, columns))), ("most", list(map(max, columns)))]
    step, slower = format_seconds(found.step_s), format_seconds(found.profiled_step_s)
    return Table(
        f"Where the time of a step of {step} goes ({slower} under the profiler)",
        ("rank", *PHASE_NAMES, "communication"),
        tuple((said, *map(format_seconds, row)) for said, row in rows),
        (PHASES_LEGEND, SCALED_LEGEND),
    )


def checkpoint(found: Verified) -> list[Table]:
    """Describe a checkpoint; then list what is damaged, if anything is."""
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
    rows = [(one.file, one.reason, _place(one), _names(one.tensors)) for one in found[:MOST_DAMAGE]]
    fix = "Copy these files again, or resume from the folder of an earlier checkpoint."
    more = len(found) - len(rows)
    legend = (fix, f"And {more} more; --json has all.") if more else (fix,)
    return Table("Damaged", ("file", "is", "bytes", "tensors"), tuple(rows), legend, left=4)


def _place(one: Damage) -> str:
    return f"{one.offset} to {one.offset + one.bytes}" if one.bytes else ""


def _names(tensors: Sequence[str]) -> str:
    more = f" and {len(tensors) - 1} more" if len(tensors) > 1 else ""
    return f"{tensors[0]}{more}" if tensors else ""
