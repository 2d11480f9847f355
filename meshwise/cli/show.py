"""``meshwise show``."""

import meshwise
from meshwise.cli.options import Json
from meshwise.cli.output import DONE, emit


def show(
    path: str, *, node: str | None = None, costs: str = "costs.json", json: Json = False
) -> int:
    """Print any of our files readably.

    Parameters
    ----------
    path
        cluster.toml, costs.json, plan.json, or a run: its directory, run.json or samples.jsonl.
    node
        Of a plan: follow this operation of the model, as layers.0.up, to its price and its share.
    costs
        With --node: the prices that the plan was made from.
    """
    if node is not None:
        from meshwise.verbs.show import follow, followed

        tasks = follow(path, node, costs)
        emit(tasks, [followed(tasks)], json)
        return DONE
    record = meshwise.show(path)
    from meshwise.pages import show as pages

    emit(record, pages.of(record), json)
    return DONE
