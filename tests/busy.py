"""python -m tests.busy [N]: tests of launches, ranks, jobs and faults beside N busy processes.

A deadline that is right on an idle machine alone fails here. N is 40; each file has a pytest of its
own, all at once. Prints each file's outcome; exit code 1 if one failed.
"""

import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FILES = (
    "tests/dist/test_faults.py",
    "tests/dist/test_launch_faults.py",
    "tests/dist/test_listening.py",
    "tests/dist/test_meeting.py",
    "tests/dist/test_refit_faults.py",
    "tests/dist/test_two_jobs.py",
    "tests/dist/test_verbs.py",
    "tests/unit/test_launch_folders.py",
)
BUSY = "import os; parent = os.getppid()\nwhile os.getppid() == parent: pass"


def main(num_busy: int) -> int:
    began = time.monotonic()
    busy = [subprocess.Popen([sys.executable, "-S", "-c", BUSY]) for _ in range(num_busy)]
    try:
        running = {
            file: subprocess.Popen(
                [sys.executable, "-m", "pytest", file],
                cwd=ROOT,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for file in FILES
        }
        failed = 0
        for file, process in running.items():
            told = process.communicate()[0]
            failed |= process.returncode != 0
            last = told if process.returncode else told.splitlines()[-1]
            print(f"{file} after {time.monotonic() - began:.0f} s: {last}", flush=True)
    finally:
        for process in busy:
            process.kill()
            process.wait()
    return failed


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 40))
