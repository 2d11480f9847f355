"""The table of plan against trace."""

from meshwise.pages.table import Table
from meshwise.spec.trace import TraceCheck, TraceLine

LEGEND = (
    "Elements: what a rank sends to a gather or keeps of a scatter, else the whole message. Calls "
    "a step: of each rank; where ranks differ, the fewest and the most."
)


def table(check: TraceCheck, title: str) -> Table:
    """A row for each kind and size of message, those of the plan first."""
    columns = (
        "unit", "collective", "dtype", "ranks", "elements", "planned a step", "traced a step",
        "verdict",
    )  # fmt: skip
    rows = tuple(_row(line, check.steps) for line in check.lines)
    outcome = {
        True: f"The trace of {check.steps} steps is as planned.",
        False: f"The trace of {check.steps} steps is NOT as planned.",
        None: f"{check.steps} steps were traced.",
    }[check.agrees]
    return Table(title, columns, rows, (outcome, *check.notes, LEGEND), left=3)


def _row(line: TraceLine, steps: int) -> tuple[str, ...]:
    least, most = min(line.traced, default=0), max(line.traced, default=0)
    traced = _per_step(least, steps)
    if most != least:
        traced += f" – {_per_step(most, steps)}"
    return (
        line.units or "?",
        line.kind,
        line.dtype,
        str(line.num_ranks or "?"),
        f"{line.elements:,}",
        str(line.planned),
        traced,
        line.verdict,
    )


def _per_step(count: int, steps: int) -> str:
    return f"{count / steps:.4g}"
