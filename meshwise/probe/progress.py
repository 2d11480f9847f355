"""Show how far a sweep is and how long it still takes, as rank 0 sees it. No torch.

A terminal gets a bar with the last case, anything else a plain line for each case. Both go to
standard error, because standard output is for documents.
"""

import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from meshwise.probe.cases import effort
from meshwise.spec import Case, Sample
from meshwise.spec.label import label
from meshwise.stats import median_interval
from meshwise.text import plain
from meshwise.units import format_seconds

if TYPE_CHECKING:
    from rich.progress import Progress as Bar


class Pace:
    """Estimates how long a sweep takes, corrected by how long cases of each kind really took."""

    def __init__(
        self, estimate_s: Callable[[Case], float], cases: list[Case], budget_s: float | None
    ) -> None:
        self.estimate_s, self.budget_s = estimate_s, budget_s
        self.started = self.mark = time.monotonic()
        self.waiting: dict[Case, float] = {}
        self.seen: dict[tuple[str, ...], tuple[float, float]] = {}  # kind -> estimated, measured
        self.categories = set[tuple[object, ...]]()
        self.add(cases)

    def add(self, cases: list[Case]) -> None:
        """Add cases that wait."""
        self.waiting |= {case: self.estimate_s(case) for case in cases}

    def next(self, todo: Sequence[Case]) -> int | None:
        """Return the index of the case to measure next (``effort.next_of``), or None if no case
        should end within the budget. The first case always does, so a sweep that is resumed often
        enough finishes."""
        self.mark = time.monotonic()
        if self.budget_s is None or not self.seen:
            return 0
        left_s = self.budget_s - (self.mark - self.started)
        return effort.next_of(todo, self._corrected_s, left_s, self.categories)

    def done(self, case: Case) -> None:
        estimated, measured = self.seen.get(_kind(case), (0.0, 0.0))
        took = time.monotonic() - self.mark
        self.seen[_kind(case)] = (estimated + self.waiting.pop(case), measured + took)
        self.categories.add(effort.category(case))

    def remaining_s(self) -> float:
        """Return the seconds of all waiting cases, or the rest of the budget if that is less."""
        all_s = sum(map(self._corrected_s, self.waiting))
        if self.budget_s is None:
            return all_s
        return max(0.0, min(all_s, self.budget_s - (time.monotonic() - self.started)))

    def _corrected_s(self, case: Case) -> float:
        estimated, measured = self.seen.get(_kind(case), (1.0, 1.0))
        return self.waiting[case] * measured / estimated


def _kind(case: Case) -> tuple[str, ...]:
    """Return the fields that cases share if one's duration predicts another's."""
    fields = (getattr(case.op, field, "") for field in ("kind", "part", "direction"))
    return (type(case.op).__name__, *fields, case.lowering, case.regime, case.backend)


class Progress:
    """Shows the sweep while it is open. Only rank 0's is visible."""

    def __init__(self, total: int, *, visible: bool) -> None:
        self.total, self.visible, self.count = total, visible, 0
        self.bar: Bar | None = None

    def __enter__(self) -> "Progress":
        if self.visible and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
            from rich.progress import Progress as Bar

            text = TextColumn("{task.description}", markup=False)
            # drawn only between cases: a drawing thread would disturb the timing
            self.bar = Bar(
                BarColumn(), MofNCompleteColumn(), text,
                console=Console(stderr=True), transient=True, auto_refresh=False,
            )  # fmt: skip
            self.bar.add_task("", total=self.total)
            self.bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.stop()

    def add(self, count: int) -> None:
        """Add ``count`` cases that follow from the results."""
        self.total += count
        if count and self.visible and self.bar is None:
            print(f"{count} more cases follow from these", file=sys.stderr, flush=True)
        if self.bar is not None:
            self.bar.update(self.bar.task_ids[0], total=self.total)

    def end(self, sample: Sample, remaining_s: float) -> None:
        self.count += 1
        if not self.visible:
            return
        said = plain(f"{label(sample.case)}  {_outcome(sample)}")
        left = f"{remaining_s:.0f} s left"
        if self.bar is None:
            print(f"{self.count}/{self.total}  {said}  ({left})", file=sys.stderr, flush=True)
            return
        if sample.status != "ok":
            self.bar.console.print(said, markup=False, highlight=False)
        self.bar.update(
            self.bar.task_ids[0], completed=self.count, description=f"{left}  {said}", refresh=True
        )


def _outcome(sample: Sample) -> str:
    if sample.status != "ok":
        return f"{sample.status}: {sample.reason}"
    return format_seconds(median_interval(sample.times_s)[0])
