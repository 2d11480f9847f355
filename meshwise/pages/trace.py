"""The table of plan against trace."""

from meshwise.pages.table import Table, listed
from meshwise.spec.trace import TraceCheck, TraceLine

LEGEND = (
    "Elements: what a rank sends to a gather or keeps of a scatter, else the whole message. Calls "
    "a step: of each rank; where ranks differ, the fewest and the most."
)


def table(check: TraceCheck, title: str) -> Table:
    """A row for each kind and size of message, those of the plan first."""

    def traced(line: TraceLine) -> str:
        least, most = min(line.traced, default=0), max(line.traced, default=0)
        ends = dict.fromkeys(f"{count / check.steps:.4g}" for count in (least, most))
        return " – ".join(ends)

    outcome = {
        True: f"The trace of {check.steps} steps is as planned.",
        False: f"The trace of {check.steps} steps is NOT as planned.",
        None: f"{check.steps} steps were traced.",
    }[check.agrees]
    return listed(
        title,
        check.lines,
        ("unit", lambda line: line.units or "?"),
        ("collective", lambda line: line.kind),
        ("dtype", lambda line: line.dtype),
        ("ranks", lambda line: str(line.num_ranks or "?")),
        ("elements", lambda line: f"{line.elements:,}"),
        ("planned a step", lambda line: str(line.planned)),
        ("traced a step", traced),
        ("verdict", lambda line: line.verdict),
        legend=(outcome, *check.notes, LEGEND),
        left=3,
    )
