"""What a run leaves beside its samples, as tables: ``phases.json`` and ``checkpoint.json``."""

from collections.abc import Mapping
from math import prod
from typing import Any

from meshwise.pages.ran import PHASE_NAMES, SCALED_LEGEND
from meshwise.pages.table import Table
from meshwise.spec.phases import ADDENDS, Phases
from meshwise.units import format_bytes, format_count, format_seconds

PHASES_LEGEND = (
    "The parts of a rank add up to the step. Exposed: moments when a collective runs and no "
    "computation does; communication: all of it, beside computation too; bubble: waiting for a "
    "neighbour in the pipeline."
)


def phases(found: Phases) -> Table:
    """A row for each rank, then the least and the most of them."""
    names = (*ADDENDS, "communication_s")
    times = [[float(getattr(rank, name)) for name in names] for rank in found.ranks]
    ends = [
        ("least", map(min, zip(*times, strict=True))),
        ("most", map(max, zip(*times, strict=True))),
    ]
    rows = [(str(rank.rank), row) for rank, row in zip(found.ranks, times, strict=True)]
    step, slower = format_seconds(found.step_s), format_seconds(found.profiled_step_s)
    return Table(
        f"Where the time of a step of {step} goes ({slower} under the profiler)",
        ("rank", *PHASE_NAMES, "communication"),
        tuple((said, *map(format_seconds, row)) for said, row in (*rows, *ends)),
        (PHASES_LEGEND, SCALED_LEGEND),
    )


def checkpoint(found: Mapping[str, Any]) -> Table:
    """Of the plain JSON: its record is of a room that needs torch."""
    tensors: Mapping[str, Any] = found["tensors"]
    weights = {n: whole for n, whole in tensors.items() if not n.startswith("optimizer.")}
    elements = sum(prod(whole["shape"]) for whole in weights.values())
    model, workload = found["model"], found["workload"]
    sizes = f"{workload['global_batch_size']} x {workload['seq_len']}"
    rows = (
        ("next step", str(found["step"])),
        ("model", f"{model.get('name') or 'model'} ({model['family']})"),
        ("batch", f"{sizes}, seed {found['seed']}"),
        ("saved under", f"{found['layout']}, {found['optimizer']}"),
        ("weights", f"{format_count(elements)} elements in {len(weights)} tensors"),
        ("optimizer state", f"{len(tensors) - len(weights)} tensors"),
        ("files", f"{len(found['files'])} in {found['data']}/, "
         f"{format_bytes(sum(found['files'].values()))}"),
    )  # fmt: skip
    return Table("Checkpoint", ("", ""), rows, ("It can be resumed under any layout.",), left=2)
