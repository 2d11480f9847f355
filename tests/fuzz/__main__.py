"""python -m tests.fuzz --cases N [--jobs J] [--seed S] [--out FILE.json] [--only KIND/NUMBER]

Runs N cases, spread evenly over all kinds, and writes what came of them. Exit code 1 if any case
did what it may not. ``--only`` runs one case again and shows all that it said.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from tests.fuzz import inputs, server

MOST_SHOWN = 200
BATCH = 100
_place: server.Place


def _start(folder: Path) -> None:
    """One worker's session."""
    global _place
    _place = server.prepare(folder / str(os.getpid()))


def _some(seed: int, kind: str, numbers: range) -> list[server.Ended]:
    return server.run(_place, seed, kind, numbers)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz")
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only")
    given = parser.parse_args()
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="fuzz-") as name:
        if given.only:
            return _again(Path(name), given.seed, *given.only.rsplit("/", 1))
        found = _all(Path(name), given.cases, given.jobs, given.seed)
    told = _summary(found, given.seed) | {"wall_s": round(time.monotonic() - start, 1)}
    text = json.dumps(told, indent=1)
    if given.out:
        given.out.write_text(text + "\n")
    print(text if len(text) < 20_000 else text[:20_000] + "\n...")
    return bool(told["failures"])


def _again(folder: Path, seed: int, kind: str, number: str) -> int:
    _start(folder)
    (ended,) = server.run(_place, seed, kind, [int(number)])
    data, _ = server.case(seed, kind, int(number))
    print(data[:4000], ended.command, ended.said, ended._replace(said=""), sep="\n")
    return bool(ended.wrong)


def _all(folder: Path, cases: int, jobs: int, seed: int) -> list[server.Ended]:
    names = list(inputs.kinds())
    share, rest = divmod(cases, len(names))
    batches = [
        (seed, name, range(start, min(start + BATCH, share + (place < rest))))
        for place, name in enumerate(names)
        for start in range(0, share + (place < rest), BATCH)
    ]
    found = []
    with ProcessPoolExecutor(jobs, initializer=_start, initargs=(folder,)) as pool:
        for done in pool.map(_some, *zip(*batches, strict=True)):
            found += [e if e.wrong else e._replace(said="") for e in done]
            print(f"\r{len(found)} of {cases}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return found


def _summary(found: list[server.Ended], seed: int) -> dict[str, Any]:
    kinds = {}
    for name in inputs.kinds():
        mine = [ended for ended in found if ended.kind == name]
        kinds[name] = {
            "cases": len(mine),
            "exit codes": dict(Counter(str(ended.code) for ended in mine)),
            "CPU s": round(sum(e.cpu_s for e in mine), 2),
            "most CPU s": round(max((e.cpu_s for e in mine), default=0), 2),
            "most MiB": round(max((e.memory_bytes for e in mine), default=0) / 2**20),
        }
    wrong = [ended for ended in found if ended.wrong]
    return {
        "seed": seed,
        "cases": len(found),
        "kinds": kinds,
        "failures": len(wrong),
        "by fault": dict(Counter(ended.wrong for ended in wrong)),
        "failed": [
            {
                "again": f"python -m tests.fuzz --seed {seed} --only '{e.kind}/{e.number}'",
                "command": " ".join(e.command)[:300],
                "wrong": e.wrong,
                "said": e.said.strip()[-400:],
            }
            for e in wrong[:MOST_SHOWN]
        ],
    }


if __name__ == "__main__":
    sys.exit(main())
