"""``meshwise report``."""

from typing import Annotated

from cyclopts import Parameter

from meshwise.cli.options import Json, Runs
from meshwise.cli.output import DONE, emit, say


def report(
    *run: str,
    runs: Runs = "runs",
    costs: str = "costs.json",
    plan: str = "plan.json",
    out: str = "report.html",
    scaling: Annotated[str | None, Parameter(name=("--scaling", "--results-dir"))] = None,
    output_dir: str | None = None,
    json: Json = False,
) -> int:
    """Write one self-contained page of what was measured, priced, planned and run.

    With --scaling instead: how ring attention scales, as pictures, a text and a page.

    Parameters
    ----------
    run
        The only run directories to show, beside the runs of the plan and those that the prices
        rest on. Without them and without prices, all that was measured.
    costs
        Prices to show.
    plan
        The plan to show, with the runs of its model on its cluster.
    out
        The file to write.
    scaling
        The folder of a scaling benchmark, `measure ring`'s --output_dir.
    output_dir
        With --scaling: where to write; by default the same folder.
    """
    if scaling is not None:
        return _scaling(scaling, output_dir, json)
    if output_dir is not None:
        raise ValueError(f"output_dir = {output_dir!r}: is of --scaling; otherwise give --out")
    from meshwise.pages import steps
    from meshwise.verbs.report import gather, write

    contents = gather(runs, costs, plan, run)
    path = write(contents, out)
    emit({"path": str(path), "results": contents.results}, steps.tables(contents.results), json)
    if not json:
        say(str(path))
    return DONE


def _scaling(results_dir: str, output_dir: str | None, json: bool) -> int:
    from meshwise.pages.scaling import conclusions, read, tables
    from meshwise.verbs.report import write_scaling

    found = read(results_dir)
    paths = list(map(str, write_scaling(found, output_dir or results_dir)))
    said = conclusions(found)
    rows = [row._asdict() for row in found.rows]
    document = {"paths": paths, "conclusions": said, "rows": rows}
    emit(document, tables(found), json)
    if not json:
        say(*(f"- {line}" for line in said), *paths)
    return DONE
