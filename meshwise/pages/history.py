"""Follow cases over many runs. In: runs. Out: a series of each case, where its level changed.

A run is one launch and one point, its median. ``stats.changes`` finds the changes.
"""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from meshwise import stats
from meshwise.files import write_whole
from meshwise.pages import conditions, html, svg
from meshwise.pages.conditions import Launch
from meshwise.pages.table import Table, columns, listed, percent
from meshwise.spec import Case, Record
from meshwise.spec.label import label
from meshwise.spec.record import NonNegative, Positive, PositiveFloat
from meshwise.units import format_seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes

POINTS = "A point is a run: its median and its 95 % interval. Lines are medians of a level."
_MOST_DRAWN = 24


class LevelChange(Record, kw_only=True):
    """A new level. ``at``: place in the series' times. ``before_s``, ``after_s``: medians of the
    levels before and after it."""

    at: Positive
    run: str
    before_s: PositiveFloat
    after_s: PositiveFloat
    ratio: PositiveFloat


class CaseSeries(Record, kw_only=True):
    """A case over runs. ``runs``: places in the history's runs, of those that finished the case.
    ``low_s``, ``high_s``: 95 % interval of each median."""

    case: Case
    runs: tuple[NonNegative, ...]
    times_s: tuple[PositiveFloat, ...]
    low_s: tuple[PositiveFloat, ...]
    high_s: tuple[PositiveFloat, ...]
    changes: tuple[LevelChange, ...] = ()


class History(Record, kw_only=True):
    """All series over ``runs``, oldest first. ``notes``: where machine, versions or settings
    changed."""

    runs: tuple[str, ...]
    started: tuple[str, ...]
    threshold: PositiveFloat
    notes: tuple[str, ...] = ()
    series: tuple[CaseSeries, ...]


def history(launches: Sequence[Launch], *, threshold: float = stats.THRESHOLD) -> History:
    """Follow every case that several runs finished. ValueError if there is none."""
    ordered = sorted(launches, key=lambda one: (one[0].started, one[0].run_id))
    found: dict[str, list[tuple[int, Case, tuple[float, ...]]]] = {}
    for place, (_, samples) in enumerate(ordered):
        for one in samples:
            if one.status == "ok":
                entry = (place, one.case, one.times_s)
                found.setdefault(f"{one.case_id} {one.method_version}", []).append(entry)
    names = tuple(info.run_id for info, _ in ordered)
    series = tuple(_series(of, names, threshold) for of in found.values() if len(of) > 1)
    if not series:
        raise ValueError("history: no case was finished by two runs; name runs of one measurement")
    return History(
        runs=names,
        started=tuple(info.started for info, _ in ordered),
        threshold=threshold,
        notes=tuple(_notes(ordered)),
        series=series,
    )


def _series(
    of: Sequence[tuple[int, Case, tuple[float, ...]]], names: Sequence[str], threshold: float
) -> CaseSeries:
    medians, low, high = zip(*(stats.median_interval(times) for _, _, times in of), strict=True)
    places = stats.changes(medians, threshold=threshold)
    edges = [0, *places, len(of)]
    levels = [stats.median_interval(medians[i:j])[0] for i, j in pairwise(edges)]
    return CaseSeries(
        case=of[-1][1],
        runs=tuple(place for place, _, _ in of),
        times_s=medians,
        low_s=low,
        high_s=high,
        changes=tuple(
            LevelChange(at=at, run=names[of[at][0]], before_s=old, after_s=new, ratio=new / old)
            for at, old, new in zip(places, levels, levels[1:], strict=False)
        ),
    )


def _notes(ordered: Sequence[Launch]) -> list[str]:
    """Say at which runs machine, versions or settings changed."""
    pairs = pairwise(ordered)
    told = ((new[0], conditions.unlike(old[0], new[0])) for old, new in pairs)
    return [f"{info.run_id}: {what}" for info, what in told if what]


def tables(found: History) -> list[Table]:
    """Show the changes, then every series."""
    every = [(of, change) for of in found.series for change in of.changes]
    notes = [Table("Warnings", (), (), legend=found.notes)] if found.notes else []
    changed = listed(
        f"{len(every)} changes in {len(found.series)} cases over {len(found.runs)} runs",
        every,
        ("case", lambda one: label(one[0].case)),
        ("from this run on", lambda one: one[1].run),
        ("before", lambda one: format_seconds(one[1].before_s)),
        ("after", lambda one: format_seconds(one[1].after_s)),
        ("change", lambda one: percent(one[1].ratio - 1, sign=True)),
        legend=(
            "A change: a split of the series so large in fewer than 1 % of random orders of its "
            f"values, and by more than {100 * found.threshold:g} %. It needs 11 runs or more.",
        ),
        left=2,
    )
    listing = listed(
        "Every case",
        found.series,
        ("case", lambda one: label(one.case)),
        ("runs", lambda one: len(one.times_s)),
        ("first", lambda one: format_seconds(one.times_s[0])),
        ("last", lambda one: format_seconds(one.times_s[-1])),
        ("last/first", lambda one: f"{one.times_s[-1] / one.times_s[0]:.3f}"),
        ("changes", lambda one: len(one.changes)),
        legend=("Medians of a run.",),
    )
    return [*notes, changed, listing]


def figure(found: History) -> svg.Figure:
    """Draw each case over the runs, those that changed most first: medians with their intervals,
    levels as lines, changes dashed."""
    ordered = sorted(found.series, key=lambda one: -_most(one))[:_MOST_DRAWN]
    left = len(found.series) - len(ordered)
    more = f" {left} cases that changed less are not drawn." if left else ""
    caption = f"Time of each case over {len(found.runs)} runs, oldest first.{more}"
    columns = min(2, len(ordered))
    rows = -(-len(ordered) // columns)
    paints = [_paint(one, len(found.runs)) for one in ordered]
    return svg.draw(caption, *paints, columns=columns, width=4.4 * columns, height=2.2 * rows)


def _most(one: CaseSeries) -> float:
    return max((abs(change.ratio - 1) for change in one.changes), default=0.0)


def _paint(one: CaseSeries, num_runs: int) -> svg.Paint:
    def paint(axes: "Axes") -> None:
        pairs = zip(one.times_s, one.low_s, one.high_s, strict=True)
        errors = [[t - low, high - t] for t, low, high in pairs]
        axes.errorbar(
            one.runs, one.times_s, yerr=list(zip(*errors, strict=True)), fmt="o",
            color=svg.colour(0), elinewidth=0.8,
        )  # fmt: skip
        edges = [0, *(change.at for change in one.changes), len(one.runs)]
        for begin, end in pairwise(edges):
            level = stats.median_interval(one.times_s[begin:end])[0]
            axes.plot((one.runs[begin], one.runs[end - 1]), (level, level), color=svg.colour(1))
        for change in one.changes:
            axes.axvline(one.runs[change.at] - 0.5, **svg.DASHED)
            axes.annotate(
                percent(change.ratio - 1, sign=True), (one.runs[change.at], 1.0),
                xycoords=("data", "axes fraction"), va="top", fontsize=8,
            )  # fmt: skip
        top = max(one.high_s)
        axes.set(title=label(one.case), xlim=(-0.5, num_runs - 0.5), ylim=(0, 1.1 * top))
        svg.linear_ticks(axes.yaxis, 1.1 * top, format_seconds, 1000)
        axes.set_xticks(range(0, num_runs, max(1, -(-num_runs // 10))))

    return paint


def write(path: Path | str, found: History) -> None:
    """Write the page, or the figure alone if the file's name ends in .svg."""
    if Path(path).suffix == ".svg":
        svg.write(path, figure(found))
    else:
        write_whole(path, page(found))


def page(found: History) -> str:
    """Make the page: the figure, the changes, every case."""
    shown = tables(found)[bool(found.notes) :]
    section = html.PageSection("Every case", found.notes, (figure(found),), tuple(shown))
    runs = list(zip(found.runs, found.started, strict=True))
    heads = {"": lambda one: one[0], "run": lambda one: one[1][0], "started": lambda one: one[1][1]}
    listing = listed("Runs", enumerate(runs), *columns(str, heads), left=3)
    sections = [section, html.PageSection("Runs", folded=(listing,))]
    span = f"{found.started[0]} to {found.started[-1]}"
    return html.render("History", span, sections, (POINTS,))
