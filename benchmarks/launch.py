"""Launch overhead: plain torchrun of an all-reduce beside the same by our launchers.

    python benchmarks/launch.py FOLDER TURNS

Two ranks on this host, gloo, one number. Each turn starts every command once, one after the other,
and times it from its start to its end. `ours` joins and leaves as all our ranks do. Ray is a
cluster that runs already, or one started for the command; without the package its rows are left
out. Below, one case of `measure` by each launcher: there the ranks do the same to the letter.
FOLDER gets turns.jsonl; a table of all turns in it is printed.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

ME, RANKS = str(Path(__file__).resolve()), 2
TORCHRUN = ["-m", "torch.distributed.run", "--nproc-per-node", str(RANKS)]
MEASURE = ["-m", "meshwise", "measure", "collectives", "all_reduce", "--sizes", "4KiB",
           "--as-measured"]  # fmt: skip
ON_RAY = ["--launcher", "ray", "--nproc-per-node", str(RANKS)]


def plain() -> None:
    """Be a rank as torchrun's users write it."""
    from torch import distributed as dist

    dist.init_process_group("gloo")
    _reduce()
    dist.destroy_process_group()


def all_reduce(ranks: Any, request: bytes) -> None:
    """Be the target of our launcher."""
    _reduce()


def _reduce() -> None:
    import torch
    from torch import distributed as dist

    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == RANKS


def ours() -> None:
    """Start the ranks as the verbs do."""
    import msgspec

    from meshwise.launch import local
    from meshwise.launch.order import WorkOrder

    order = WorkOrder(target="launch:all_reduce", request=msgspec.Raw(b"{}"), threads=1)
    local.start(order, RANKS, worker=(ME, "worker"))


def commands(folder: Path, address: str | None) -> dict[str, list[str]]:
    """Return the words after the interpreter, by the name of the row."""
    found = {
        "torchrun": [*TORCHRUN, ME, "plain"],
        "ours": [ME, "ours"],
        "measure: torchrun": [*TORCHRUN, *MEASURE],
        "measure: ours": [*MEASURE, "--nproc", str(RANKS)],
    }
    if address is not None:
        rank = folder / "rank"  # stands for the interpreter of the ranks
        rank.write_text(f"#!/bin/sh\nexec {sys.executable} {ME} plain\n")
        rank.chmod(0o755)
        there = ["--address", address]
        found |= {
            "Ray": [*MEASURE[:3], *ON_RAY, *there, "--python", str(rank)],
            "Ray, started for it": [*MEASURE[:3], *ON_RAY, "--python", str(rank)],
            "measure: Ray": [*MEASURE, *ON_RAY, *there],
        }
    return found


def cluster() -> str | None:
    """Start a Ray that only this host reaches; return its address, None without the package."""
    if find_spec("ray") is None:
        return None
    os.environ |= {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_USAGE_STATS_ENABLED": "0"}
    import ray

    ray.init(address="local", num_cpus=RANKS, include_dashboard=False, log_to_driver=False,
             object_store_memory=100 << 20)  # fmt: skip
    return str(ray.get_runtime_context().gcs_address)


def main(folder: Path, turns: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch, (folder / "turns.jsonl").open("a") as file:
        todo = commands(Path(scratch), cluster())
        for turn in range(turns):
            for name, words in todo.items():
                begun = time.monotonic()
                subprocess.run([sys.executable, *words], cwd=scratch, check=True,
                               capture_output=True)  # fmt: skip
                row = {"turn": turn, "name": name, "wall_s": round(time.monotonic() - begun, 3)}
                print(json.dumps(row), file=file, flush=True)
    table([json.loads(line) for line in (folder / "turns.jsonl").read_text().splitlines()])


def table(rows: list[dict[str, Any]]) -> None:
    print("| | median | least to most | over torchrun in the same turn | |\n|---|---|---|---|---|")
    took: dict[str, list[float]] = {}
    for row in rows:
        took.setdefault(row["name"], []).append(row["wall_s"])
    for name, times_s in took.items():
        base = "measure: torchrun" if name.startswith("measure") else "torchrun"
        over_s = [time_s - other_s for time_s, other_s in zip(times_s, took[base], strict=True)]
        over = " | " if name == base else _spread(over_s, "+")
        print(f"| {name} | {_spread(times_s, '')} | {over} |")


def _spread(times_s: list[float], sign: str) -> str:
    low, middle, high = (f"{f(times_s):{sign}.2f}" for f in (min, median, max))
    return f"{middle} s | {low} to {high}"


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["plain"]:
            plain()
        case ["ours"]:
            ours()
        case ["worker", order, parent]:
            from meshwise.launch import worker

            worker.main(order, parent, "launch")
        case [folder, turns]:
            main(Path(folder), int(turns))
        case _:
            sys.exit(__doc__)
