"""show: any file of ours in, its record out; the command line prints it as tables."""

from pathlib import Path
from typing import Any

from meshwise import store
from meshwise.pages.show import Run
from meshwise.spec import Cluster, Costs, Plan
from meshwise.verbs import files

KINDS = "cluster.toml, costs.json, plan.json, a run directory, run.json or samples.jsonl"


def show(path: Path | str) -> Cluster | Costs | Plan | Run:
    """The record in ``path``: cluster.toml, costs.json, plan.json or a run (its directory,
    run.json or samples.jsonl). Files are told apart by what they hold, not by their name."""
    path = Path(path)
    if path.name in ("run.json", "samples.jsonl"):
        path = path.parent
    if not path.exists():
        raise ValueError(f"{path} does not exist; show can read {KINDS}")
    if (path / "run.json").exists():
        info, samples = files.load(path)
        return Run(info=info, samples=tuple(samples))
    fields: dict[str, Any] = {}
    if path.suffix in (".toml", ".json"):
        fields = store.read(path, dict)
    if "tiers" in fields:
        return store.read(path, Cluster)
    if "surfaces" in fields:
        return store.read(path, Costs)
    if "prediction" in fields:
        return store.read(path, Plan)
    raise ValueError(f"{path} is none of our files; show can read {KINDS}")
