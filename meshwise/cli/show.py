"""``meshwise show``."""

import meshwise
from meshwise.cli.options import Json
from meshwise.cli.output import DONE, emit


def show(path: str, *, json: Json = False) -> int:
    """Print any of our files readably.

    Parameters
    ----------
    path
        cluster.toml, costs.json, plan.json, or a run: its directory, run.json or samples.jsonl.
    """
    record = meshwise.show(path)
    from meshwise.pages import show as pages

    emit(record, pages.of(record), json)
    return DONE
