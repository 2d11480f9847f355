"""report: write one self-contained page of the existing runs, prices and plan; or pictures, a text
and a page of how ring attention scales; or pictures of collectives' bandwidth and its fits."""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from meshwise import store
from meshwise.files import write_whole
from meshwise.pages import svg
from meshwise.pages.html import page, sections_of
from meshwise.pages.steps import result
from meshwise.pages.verdict import Contents
from meshwise.spec import Costs, Plan, RunInfo
from meshwise.spec.costs import LawName
from meshwise.spec.phases import Phases
from meshwise.verbs import files

if TYPE_CHECKING:
    from meshwise.fit.uneven import Judged
    from meshwise.pages.scaling import Scaling

log = logging.getLogger("meshwise")

T = TypeVar("T", Costs, Plan)


def report(
    *named: Path | str,
    runs: Path | str = "runs",
    costs: Path | str = "costs.json",
    plan: Path | str = "plan.json",
    out: Path | str = "report.html",
    figures: Sequence[Path | str] = (),
) -> Path:
    """Write the page and return its path. ``named``: runs to show, besides those of the plan and of
    the prices; other runs are left out. The page has a sentence for each missing part. If
    everything is missing, a ValueError names the verb to begin with. ``figures``: files to write
    of figures of the page, each by its name: ``intervals.png``, ``phases.pdf``, ``links.svg``."""
    return write(gather(runs, costs, plan, named), out, figures)


def gather(
    runs: Path | str, costs: Path | str, plan: Path | str, named: tuple[Path | str, ...] = ()
) -> Contents:
    """Gather the prices, the plan, the runs of its model on its cluster, the runs that the prices
    were fitted from, and those named. If none is named and there is no plan, take all runs of
    plans; without prices, take all measurements."""
    prices, chosen = _found(costs, Costs), _found(plan, Plan)
    asked = {Path(path).resolve() for path in named}
    paths = {path.resolve(): path for path in (*store.runs_of(runs), *map(Path, named))}
    infos = {path: store.read(path / "run.json", RunInfo) for path in paths.values()}
    if prices is None and chosen is None and not infos:
        raise ValueError(
            f"nothing to report: {costs}, {plan} and any run under {runs} are missing; "
            "begin with `meshwise measure profile`"
        )
    measured, ran, others = [], [], []
    for path, info in infos.items():
        wanted = path.resolve() in asked
        if info.plan is not None:
            same = chosen and (chosen.model, chosen.cluster) == (info.plan.model, info.cluster)
            if wanted or (same if chosen else not asked):
                ran.append(files.load(path))
        elif info.verb != "measure":
            continue
        elif wanted or (info.run_id in prices.runs if prices else not asked):
            measured.append(files.load(path))
        else:
            others.append(str(path))
    if others and not asked:
        log.info("not shown unless named, as no price rests on them: %s", ", ".join(others))
    return Contents(
        plan=chosen,
        costs=prices,
        results=tuple(result(info, samples) for info, samples in ran),
        runs=tuple((info, tuple(samples)) for info, samples in (*measured, *ran)),
        spans={
            info.run_id: store.read(path / "phases.json", Phases).spans
            for path, info in infos.items()
            if info.plan is not None and (path / "phases.json").exists()
        },
    )


def write(contents: Contents, out: Path | str, figures: Sequence[Path | str] = ()) -> Path:
    """Write the page, and figures of it, and return its path."""
    sections = sections_of(contents)
    drawn = {figure.name: figure for section in sections for figure in section.figures}
    for path in figures:
        if (name := Path(path).stem) not in drawn:
            known = ", ".join(drawn) or "none"
            raise ValueError(f"figure = {str(path)!r}: the page has no {name!r}; it has {known}")
    for path in figures:
        svg.write(path, drawn[Path(path).stem])
    return write_whole(Path(out), page(contents, sections).encode())


def scaling(results_dir: Path | str, output_dir: Path | str | None = None) -> list[Path]:
    """Draw the results of `measure ring` in a folder. Write pictures, a text and a page to
    ``output_dir``, by default the same folder; return the paths. ValueError without results."""
    from meshwise.pages.scaling import read

    return write_scaling(read(results_dir), output_dir or results_dir)


def write_scaling(found: "Scaling", output_dir: Path | str) -> list[Path]:
    """Write the pictures, the text and the page of loaded results."""
    from meshwise.pages import scaling_figures
    from meshwise.pages.scaling import text

    contents: dict[str, bytes | str] = {
        name: scaling_figures.png(name, found) for name in scaling_figures.FILES
    }
    contents["scaling_analysis_report.txt"] = text(found)
    contents["scaling.html"] = scaling_figures.page(found)
    return [write_whole(Path(output_dir) / name, content) for name, content in contents.items()]


class Bandwidth(NamedTuple):
    """Curves of collectives and, by each rule, uneven exchanges; ``paths``: the pictures."""

    costs: Costs
    judged: "list[Judged]"
    paths: list[Path]


def bandwidth(
    *run: Path | str, output_dir: Path | str = ".", law: LawName | None = None
) -> Bandwidth:
    """Do what ml_perf_model's comm_bench.ipynb does with the collectives of runs, measured or
    imported, of one cluster: draw time and bandwidth, fit curves, predict uneven all-to-alls from
    even ones by each rule. Pictures are written to ``output_dir`` (``pages.bandwidth.pictures``).
    ``law``: fit this one, as the notebook ``sigmoid``. ValueError without runs or collectives."""
    from meshwise.fit.uneven import judge
    from meshwise.pages.bandwidth import pictures

    if not run:
        raise ValueError("run: no run is named; give runs of collectives, or of imported logs")
    loaded = [files.load(path) for path in run]
    for imported in filter(None, (info.provenance.get("imported") for info, _ in loaded)):
        for warning in imported["warnings"]:
            log.warning("%s: %s", imported["file"], warning)
    costs, judged = judge(loaded, law)
    drawn, folder = pictures(costs, judged), Path(output_dir)
    return Bandwidth(costs, judged, [write_whole(folder / n, drawn[n]) for n in drawn])


def _found(path: Path | str, kind: type[T]) -> T | None:
    return files.take(path, kind) if Path(path).exists() else None
