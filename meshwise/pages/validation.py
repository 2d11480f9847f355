"""Show new predictions beside what stored runs measured, the worst first.

error = predicted / measured - 1, as in ``pages.steps``
half-width = (high - low) / 2 / predicted, of a prediction's interval
"""

from collections.abc import Sequence
from statistics import fmean, median
from typing import Any

from meshwise import stats
from meshwise.pages.steps import MeasuredQuantity
from meshwise.pages.table import Table, filled, grouped, interval, listed, percent
from meshwise.spec import PriceTier, Record
from meshwise.units import format_seconds

LEGEND = (
    "error = predicted/measured - 1. * marks a measurement outside the interval; + prices that the "
    "plan was not made with: other measurements of the machine. Memory: peak of a device, GiB."
)


class Checked(Record, kw_only=True):
    """A run that was predicted anew. ``path``: of its directory. ``prices``: the measurements used;
    ``changed``: versions that changed between them and the run (``spec.run.changes``). ``busy``:
    the load of the host when the run began."""

    path: str
    run_id: str
    machine: str
    prices: tuple[str, ...]
    changed: str = ""
    busy: str = ""


class CheckedRun(Checked, kw_only=True):
    """A training. ``time``: seconds of a step; ``memory``: peak bytes of a device, None if not
    measured. ``own``: whether its plan was made with these prices. ``tier``: their lowest."""

    model: str
    layout: str
    time: MeasuredQuantity
    memory: MeasuredQuantity | None = None
    tier: PriceTier | None = None
    own: bool


class CheckedSamples(Checked, kw_only=True):
    """One kind of operation in a run of ``measure``, priced by other runs. ``mean_error`` and
    ``worst_error``: of |error| over ``num_samples``; ``worst``: the label of the latter.
    ``num_inside``: samples within their price's interval. ``num_unpriced``: others, which have no
    price of their own category."""

    kind: str
    num_samples: int
    num_inside: int
    num_unpriced: int = 0
    mean_error: float
    worst_error: float
    worst: str


class NotChecked(Record, kw_only=True):
    """A run that was not predicted anew, and why."""

    path: str
    reason: str


class Summary(Record, kw_only=True):
    """Figures over trainings: mean and largest |error|, the number inside the intervals with the
    95 % interval of their share (Clopper-Pearson, runs taken as independent), the median half-width
    of the intervals, and |error| of memory, None if no run measured it."""

    num_runs: int
    mean_error: float
    worst_error: float
    num_inside: int
    inside_low: float
    inside_high: float
    half_width: float
    memory_mean_error: float | None = None
    memory_worst_error: float | None = None


class Validation(Record, kw_only=True):
    """The findings of ``validate``. ``summary``: of all trainings, ``own``: of those predicted by
    the measurements of their plan; None without any."""

    summary: Summary | None = None
    own: Summary | None = None
    runs: tuple[CheckedRun, ...] = ()
    samples: tuple[CheckedSamples, ...] = ()
    not_checked: tuple[NotChecked, ...] = ()


def validation(
    runs: Sequence[CheckedRun], samples: Sequence[CheckedSamples], lost: Sequence[NotChecked]
) -> Validation:
    """Sort what was found, the worst first, and add it up."""
    return Validation(
        summary=_summary(runs),
        own=_summary([run for run in runs if run.own]),
        runs=tuple(sorted(runs, key=lambda run: -_off(run.time))),
        samples=tuple(sorted(samples, key=lambda one: -one.mean_error)),
        not_checked=tuple(lost),
    )


def _summary(runs: Sequence[CheckedRun]) -> Summary | None:
    if not runs:
        return None
    errors = [_off(run.time) for run in runs]
    memory = [_off(run.memory) for run in runs if run.memory is not None]
    times: list[Any] = [run.time for run in runs]
    inside = sum(time.within for time in times)
    low, high = stats.share_interval(inside, len(runs))
    return Summary(
        num_runs=len(runs),
        mean_error=fmean(errors),
        worst_error=max(errors),
        num_inside=inside,
        inside_low=low,
        inside_high=high,
        half_width=median((time.high - time.low) / 2 / time.predicted for time in times),
        memory_mean_error=fmean(memory) if memory else None,
        memory_worst_error=max(memory, default=None),
    )


def _off(quantity: MeasuredQuantity) -> float:
    return abs(quantity.error or 0.0)


def tables(found: Validation) -> list[Table]:
    """Show the trainings with their summaries, then operations, then what was not checked."""
    told = _words(found.summary, "") + _words(found.own, "By the measurements of their own plans, ")
    runs = listed(
        "Trainings, predicted anew",
        found.runs,
        ("run", _when),
        ("model", "model"),
        ("layout", "layout"),
        ("machine", "machine"),
        ("predicted", lambda run: format_seconds(run.time.predicted) + " +" * (not run.own)),
        ("interval", lambda run: interval(run.time.low, run.time.high)),
        ("measured", lambda run: format_seconds(run.time.measured) + " *" * (not run.time.within)),
        ("error", "time.error", lambda error: percent(error, sign=True)),
        ("memory", "memory", lambda m: f"{m.predicted / 2**30:.1f} / {m.measured / 2**30:.1f}"),
        ("error", "memory.error", lambda error: percent(error, sign=True)),
        legend=(LEGEND, *told),
        left=4,
    )
    every: list[Checked] = [*found.runs, *found.samples]
    marks = [(one, f"since its prices: {one.changed}") for one in every if one.changed]
    marks += [(one, one.busy) for one in every if one.busy]
    samples = listed(
        "Operations, priced by other runs",
        found.samples,
        ("run", _when),
        ("kind", "kind"),
        ("machine", "machine"),
        ("worst", "worst"),
        ("samples", "num_samples"),
        ("mean error", "mean_error", percent),
        ("largest", "worst_error", percent),
        ("inside", lambda one: percent(one.num_inside / one.num_samples)),
        ("no price", "num_unpriced"),
        left=4,
    )
    lost = listed(
        "Not predicted",
        grouped(found.not_checked, lambda one: one.reason).values(),
        ("why", lambda same: same[0].reason),
        ("runs", len),
        ("the first", lambda same: same[0].path),
        legend=tuple(dict.fromkeys(f"{_when(one)}: {said}" for one, said in marks)),
        left=3,
    )
    return [*filled(runs, samples), *([lost] if lost.rows or lost.legend else [])]


def _when(one: Checked) -> str:
    """Name a run by its time, and say if its host was busy."""
    return one.run_id.split("-")[0][4:] + " busy" * bool(one.busy)


def _words(told: Summary | None, of: str) -> tuple[str, ...]:
    if told is None:
        return ()
    share = percent(told.num_inside / told.num_runs)
    time = (
        f"{of}{told.num_runs} runs: mean |error| {percent(told.mean_error)}, worst "
        f"{percent(told.worst_error)}; {told.num_inside} inside their interval ({share}; 95 % "
        f"interval {percent(told.inside_low)} to {percent(told.inside_high)}); median half-width "
        f"{percent(told.half_width)}."
    )
    mean, worst = percent(told.memory_mean_error), percent(told.memory_worst_error)
    return time, f"Memory: mean |error| {mean}, worst {worst}."
