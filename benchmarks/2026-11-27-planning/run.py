"""Time `meshwise plan` as a user waits for it: python run.py OUT.json, on an idle machine.

Each command runs five times in turn with the others, in a new process and an empty folder.
"""

import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

SHAPE = "--seq-len 8192 --global-batch-size 512"
COMMANDS = [
    f"llama-3-70b --cluster h100-hgx --hosts 8 {SHAPE}",
    f"llama-3-8b --cluster h100-hgx --hosts 1 {SHAPE}",
    f"llama-3.1-405b --cluster h100-hgx --hosts 64 {SHAPE}",
    f"mixtral-8x7b --cluster h200-hgx --hosts 4 {SHAPE}",
    "gpt-39b --cluster p3.16xlarge --hosts 8 --global-batch-size 1024 --seq-len 1024",
    "wresnet-4b --cluster p3.16xlarge --hosts 4 --global-batch-size 1536",
]


def seconds(command: str) -> float:
    with tempfile.TemporaryDirectory() as folder:
        begin = time.perf_counter()
        subprocess.run(
            [sys.executable, "-m", "meshwise", "plan", *command.split()],
            cwd=folder, check=True, capture_output=True,
        )  # fmt: skip
        return time.perf_counter() - begin


def main() -> None:
    times: dict[str, list[float]] = {command: [] for command in COMMANDS}
    for turn in range(5):
        for command, found in times.items():
            found.append(seconds(command))
            print(f"{turn} {found[-1]:6.2f} s  {command}", flush=True)
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
    ).stdout.strip()
    model = next(
        (line.split(": ")[1] for line in Path("/proc/cpuinfo").read_text().splitlines()
         if line.startswith("model name")), platform.processor(),
    )  # fmt: skip
    machine = {"cpu": model, "cores": os.cpu_count(), "python": platform.python_version()}
    packages = {name: version(name) for name in ("numpy", "scipy", "msgspec")}
    document = machine | packages | {"commit": commit, "times_s": times}
    Path(sys.argv[1]).write_text(json.dumps(document, indent=1) + "\n")
    for command, found in times.items():
        middle = statistics.median(found)
        print(f"{middle:6.2f} s ({min(found):.2f} to {max(found):.2f})  plan {command}")


if __name__ == "__main__":
    main()
