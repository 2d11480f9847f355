"""python -m tests.faults --count 200 [--jobs J] [--seed S] [--out FOLDER] [--scale X]

Strikes jobs of gloo ranks with signals and checks how they end (``trial``). Every result is a line
of FOLDER/faults.jsonl as soon as it is known; started again, it goes on with the others.
``--scale`` stretches times and deadlines on a slow machine.
"""

import argparse
import json
import os
import shutil
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from tempfile import mkdtemp

from tests.faults.trial import trial


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults")
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 4) // 4))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--out", type=Path, default=Path("faults"))
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    path = given.out / "faults.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    done = {result["number"]: result for result in map(json.loads, lines)}
    todo = [number for number in range(given.count) if number not in done]
    folder = Path(mkdtemp(prefix="faults-"))
    with ThreadPoolExecutor(given.jobs) as pool, path.open("a") as file:
        started = [pool.submit(trial, given.seed, n, folder / str(n), given.scale) for n in todo]
        for ended in as_completed(started):
            result = ended.result()
            done[result["number"]] = result
            file.write(json.dumps(result) + "\n")
            file.flush()
            print(f"{len(done)} of {given.count}", result["wrong"] or "", file=sys.stderr)
    shutil.rmtree(folder, ignore_errors=True)
    wrong = [result for result in done.values() if result["wrong"]]
    for result in wrong:
        print(json.dumps(result))
    struck = sum(result["struck"] for result in done.values())
    by = Counter(f"{r['signal']} {r['whom'].split()[0]}" for r in done.values() if r["struck"])
    longest = max((r["took_s"] for r in done.values()), default=0)
    print(
        f"{len(done)} trials, {struck} struck {dict(by)}, longest {longest} s, wrong {len(wrong)}"
    )
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
