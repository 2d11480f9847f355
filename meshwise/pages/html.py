"""Make the report. In: runs, prices and a plan. Out: one self-contained page.

The first screen answers in words (``verdict``); sections with figures and tables follow, each below
what is wrong in it. The page has one style sheet, one short script and no address. Without the
script all of it can be read. Names from files are escaped. If a part is missing, a sentence names
the verb to run.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from meshwise.pages import (
    answers,
    collectives,
    figures,
    operators,
    prices,
    samples,
    show,
    steps,
    svg,
    tables,
    verdict,
)
from meshwise.pages.table import Table, interval, percent
from meshwise.pages.verdict import Concern, Contents
from meshwise.text import plain
from meshwise.units import format_bytes, format_seconds

SOURCES = "Where the numbers come from"
MOST_ROWS, LEAST_ROWS = 2_000, 20  # of all folded tables, of each
MOST_SAID = 5  # problems on the first screen; each is in its section, too


class PageSection(NamedTuple):
    """A section: warnings, sentences, figures, tables. ``folded`` tables are shown on demand."""

    title: str
    sentences: tuple[str, ...] = ()
    figures: tuple[svg.Figure, ...] = ()
    tables: tuple[Table, ...] = ()
    folded: tuple[Table, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """The section's name in links."""
        return re.sub(r"[^a-z0-9]+", "-", self.title.lower()).strip("-")


class Headline(NamedTuple):
    name: str
    value: str
    note: str


class FirstScreen(NamedTuple):
    """Numbers, answers in words, and facts (date, machine, software, command)."""

    headlines: tuple[Headline, ...] = ()
    answers: tuple[verdict.Answer, ...] = ()
    facts: tuple[tuple[str, str], ...] = ()


def _drawn(**figures: svg.Figure | None) -> tuple[svg.Figure, ...]:
    """Name the figures, and drop missing ones."""
    return tuple(one._replace(name=name) for name, one in figures.items() if one is not None)


ERRORS = (
    "Error is predicted/measured - 1: +5 % means the prediction was 5 % too high.",
    "The interval of a prediction carries the error that its prices made on points left out of "
    "the fit. * marks a measurement outside it.",
)


def sections_of(contents: Contents) -> list[PageSection]:
    """Make the sections of a page."""
    found = verdict.problems(contents)
    told = [*_story(contents, found), *_clusters(contents), *_measured(contents, found)]
    return [*told, _provenance(contents)]


def page(contents: Contents, sections: Sequence[PageSection] | None = None) -> str:
    """Make the whole document. ``sections``: as ``sections_of`` made them."""
    found = verdict.problems(contents)
    sections = sections or sections_of(contents)
    first = FirstScreen(
        headlines=tuple(_headlines(contents)),
        answers=tuple(map(_shortened, verdict.answers(contents, found))),
        facts=tuple(verdict.facts(contents)),
    )
    return render(_title(contents), _subtitle(contents), sections, _legend(contents), first)


def _shortened(answer: verdict.Answer) -> verdict.Answer:
    """Leave what a first screen holds, and say how much more there is."""
    more = len(answer.said) - MOST_SAID
    if more < 2:
        return answer
    rest = f"And {more} more, above the tables they concern."
    return answer._replace(said=(*answer.said[:MOST_SAID], rest))


def _of(found: Iterable[Concern], *where: str) -> tuple[str, ...]:
    """Return the problems that concern these places."""
    return tuple(dict.fromkeys(one.what for one in found if one.where in where))


def _within(sections: Sequence[PageSection]) -> list[PageSection]:
    """Cut folded tables so that a page of very many samples can still be opened."""
    folded = [table for section in sections for table in section.folded]
    most = max(LEAST_ROWS, MOST_ROWS // max(1, len(folded)))
    if sum(len(table.rows) for table in folded) <= MOST_ROWS:
        return list(sections)
    return [
        one._replace(folded=tuple(_cut(table, most) for table in one.folded)) for one in sections
    ]


def _cut(table: Table, most: int) -> Table:
    if len(table.rows) <= most:
        return table
    said = f"The first {most} of {len(table.rows):,} rows; `meshwise show` prints a run's all."
    return table._replace(rows=table.rows[:most], legend=(said, *table.legend))


def render(
    title: str,
    subtitle: str,
    sections: Sequence[PageSection],
    legend: Sequence[str],
    first: FirstScreen | None = None,
) -> str:
    """Make one self-contained page of these parts."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    parts = {"title": title, "subtitle": subtitle, "first": first or FirstScreen()}
    template = environment.get_template("report.html.j2")
    text = template.render(parts, sections=_within(sections), legend=legend, colours=svg.THEMES)
    return plain(text, keep="\n")


def _is_priced(contents: Contents) -> bool:
    """Return whether there are prices, or a plan with a predicted step."""
    plans = [contents.plan, *(result.plan for result in contents.results)]
    return contents.costs is not None or any(p is not None and p.prediction for p in plans)


def _legend(contents: Contents) -> list[str]:
    """Explain the words and units of the page."""
    counted = [(r.plan.model, r.mode) for r in contents.results if r.time]
    if not counted and contents.plan is not None:
        counted = [(contents.plan.model, "train")]
    return [
        *(ERRORS if _is_priced(contents) else ()),
        collectives.BUS_LEGEND,
        *(dict.fromkeys(tables.flop_legend(*each) for each in counted) or (tables.MFU_LEGEND,)),
        "MFU is FLOP/s over the datasheet's dense peak; left out where the peak is not known.",
        "GB = 1e9 bytes, GiB = 2^30 bytes.",
    ]


def _title(contents: Contents) -> str:
    plan = contents.plan or (contents.results[0].plan if contents.results else None)
    if plan is not None:
        return f"{plan.model.name or 'model'} on {plan.cluster.name}"
    if contents.costs is not None:
        return contents.costs.cluster.name
    names = list(dict.fromkeys(info.cluster.name for info, _ in contents.runs))
    return ", ".join(names) if len(names) < 4 else f"{len(names)} clusters"


def _subtitle(contents: Contents) -> str:
    """Return a line that says how far the page goes: measured, priced, planned, run."""
    if contents.results:
        return "predicted beside measured" if _is_priced(contents) else "what was run"
    if contents.plan is not None:
        return "what was planned"
    return "what was measured" if contents.costs is None else "what was measured and priced"


def _headlines(contents: Contents) -> list[Headline]:
    """Show the plan, and the measurements of its last run, or of the only run."""
    runs = contents.results
    plan = contents.plan or (runs[0].plan if len(runs) == 1 else None)
    if plan is None:
        return []
    told, layout = plan.prediction, plan.layout
    mine = runs if told is None else [run for run in runs if run.plan.layout == layout]
    result = mine[-1] if mine and (told or len(runs) == 1) else None
    if told is None:
        shown = [Headline("layout", layout.name, "given, not priced")]
    else:
        step = format_seconds(told.step_time_s)
        shown = [
            Headline("best layout", layout.name, f"of {plan.num_considered:,} considered"),
            Headline("predicted step", step, interval(told.low_s, told.high_s)),
        ]
    if result is not None and result.time is not None:
        one = {"train": "measured step", "infer": "latency of a batch", "decode": "time of a token"}
        note = steps.spread(result) if told is None else _error(result.time, format_seconds)
        shown.append(Headline(one[result.mode], format_seconds(result.time.measured), note))
        if result.memory is not None:
            note = "peak of one device" if told is None else _error(result.memory, format_bytes)
            shown.append(Headline("measured memory", format_bytes(result.memory.measured), note))
    elif told is not None:
        memory = format_bytes(told.peak_memory_bytes)
        shown.append(Headline("predicted memory", memory, "peak of one device"))
    return shown


def _error(outcome: steps.MeasuredQuantity, show: Callable[[float], str]) -> str:
    """Say what was told before the run, and how far off that was."""
    if outcome.predicted is None:
        return "not predicted"
    return f"told {show(outcome.predicted)}: error {percent(outcome.error, sign=True)}"


def _story(contents: Contents, found: Sequence[Concern]) -> list[PageSection]:
    """Make the sections outcome, plan and prices, if there is content for any of them."""
    if contents.plan is None and contents.costs is None and not contents.results:
        return []
    ran = (result.run_id for result in contents.results)
    sections = [
        _outcome(contents)._replace(warnings=_of(found, "results", *ran)),
        _plan(contents)._replace(warnings=_of(found, "plan")),
    ]
    if not _is_priced(contents):
        return sections
    of = ("prices", *contents.costs.runs) if contents.costs else ()
    return [*sections, _prices(contents)._replace(warnings=_of(found, *of))]


def _clusters(contents: Contents) -> list[PageSection]:
    """Make a section for the clusters: their devices, their links, and the rates of pairs."""
    described, drawn = list[Table](), list[svg.Figure]()
    for cluster in contents.clusters[:4]:
        described += tables.cluster(cluster)
        sent = collectives.sends(
            sample for info, of in contents.runs if info.cluster.name == cluster.name
            for sample in of
        )  # fmt: skip
        rates = collectives.pair_rates(sent)
        largest = rates[max(rates, key=lambda of: of[1])] if rates else {}
        drawn += _drawn(links=figures.links(cluster, largest, collectives.odd_pairs(sent)))
    return [PageSection("The cluster", figures=tuple(drawn), tables=tuple(described))]


def _outcome(contents: Contents) -> PageSection:
    title = "Predicted beside measured"
    if not contents.results:
        return PageSection(title, ("No plan has been run yet; `meshwise run` does.",))
    if not any(r.time and r.time.predicted for r in contents.results):
        title = "What was measured"
    times = {info.run_id: verdict.step_times(measured) for info, measured in contents.runs}
    drawn = _drawn(
        intervals=figures.against(contents.results),
        phases=figures.breakdown(contents.plan, contents.results),
        steps=figures.series(contents.results, times),
    )
    return PageSection(title, figures=drawn, tables=tuple(steps.tables(contents.results)))


def _plan(contents: Contents) -> PageSection:
    title, plan = "The plan", contents.plan
    shown = _drawn(
        phases=None if contents.results else figures.breakdown(plan, ()),
        memory=figures.memory(plan, contents.results),
        frontier=figures.pareto(plan, contents.results),
        **_pipelines(contents),
    )
    if plan is None and contents.results:
        once = dict.fromkeys(tables.in_full(each.plan, each.mode) for each in contents.results)
        return PageSection("The plan that ran", figures=shown, tables=tuple(once))
    if plan is None:
        return PageSection(title, ("There is no plan; `meshwise plan` makes one.",), shown)
    if plan.prediction is None:
        return PageSection(title, figures=shown, tables=(tables.in_full(plan),))
    found = tables.plan(plan)
    warned = [one for one in found if one.title == tables.WARNINGS]
    *candidates, parts = (one for one in found if one not in warned)
    listed, fixes = (*candidates, *answers.of(plan)), [line for w in warned for line in w.legend]
    return PageSection(title, tuple(fixes), shown, listed, (parts,))


def _pipelines(contents: Contents) -> dict[str, svg.Figure | None]:
    """Draw the pipelines that were profiled, the predicted step above the measured one; else the
    plan's."""
    ran = {
        f"pipeline-{number}": figures.pipeline(one.plan, contents.spans[one.run_id])
        for number, one in enumerate(contents.results, 1)
        if one.run_id in contents.spans
    }
    return ran if any(ran.values()) else {"pipeline": figures.pipeline(contents.plan)}


def _prices(contents: Contents) -> PageSection:
    title, costs = "What the prices rest on", contents.costs
    if costs is None:
        return PageSection(title, ("There are no prices; `meshwise calibrate` makes them.",))
    drawn = _drawn(
        roofline=figures.rates(costs),
        memory_bound=figures.memory_bound(costs),
        blocks=figures.blocks(costs),
        **figures.collectives(costs),
    )
    return PageSection(
        title,
        (f"Measured in {', '.join(costs.runs)}: {costs.dtype}, {costs.lowering}.",),
        drawn,
        folded=tuple(prices.of(costs)),
    )


def _measured(contents: Contents, found: Sequence[Concern]) -> list[PageSection]:
    """Make a section of operators for each measure run that no price comes from."""
    priced = contents.costs.runs if contents.costs is not None else ()
    sections = []
    for info, measured in contents.runs:
        if info.verb == "measure" and info.run_id not in priced:
            drawn = _drawn(**dict(operators.figures(info, measured)))
            _, *shown = show.of(show.StoredRun(info=info, samples=measured))
            title, warnings = f"Measured: {info.run_id}", _of(found, info.run_id)
            sections.append(
                PageSection(title, figures=drawn, folded=tuple(shown), warnings=warnings)
            )
    return sections


def _provenance(contents: Contents) -> PageSection:
    if not contents.runs:
        said = "The run directories are not here, so only the prices are shown."
        return PageSection(SOURCES, (said,))
    facts = []
    for info, measured in contents.runs:
        table = samples.state(info, measured)
        row = ("clocks", samples.clocks(measured))
        facts.append(table._replace(rows=(*table.rows, row)))
    return PageSection(SOURCES, tables=tuple(facts[:1]), folded=tuple(facts[1:]))
