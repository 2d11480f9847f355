"""``meshwise calibrate``."""

import meshwise
from meshwise.cli.options import Json, Runs
from meshwise.cli.output import DONE, emit


def calibrate(*run: str, runs: Runs = "runs", out: str = "costs.json", json: Json = False) -> int:
    """Fit prices to measurements, with their error on points left out. Writes costs.json.

    Parameters
    ----------
    run
        Run directories of measure; by default the newest.
    out
        The file to write.
    """
    costs = meshwise.calibrate(run, runs=runs, out=out)
    from meshwise.pages import tables

    emit(costs, tables.costs(costs), json)
    return DONE
