"""``meshwise report``."""

from meshwise.cli.options import Json, Runs
from meshwise.cli.output import DONE, emit


def report(
    *run: str,
    runs: Runs = "runs",
    costs: str = "costs.json",
    plan: str = "plan.json",
    out: str = "report.html",
    json: Json = False,
) -> int:
    """Write one self-contained page of what was measured, priced, planned and run.

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
    """
    from meshwise.pages import tables
    from meshwise.verbs.report import gather, write

    contents = gather(runs, costs, plan, run)
    path = write(contents, out)
    emit({"path": str(path), "results": contents.results}, tables.steps(contents.results), json)
    if not json:
        print(path)
    return DONE
