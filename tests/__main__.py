"""python -m tests: the tests that need one core, beside those of several processes.

Together they keep two cores busy. What the first say is printed behind the second. Exit code 1 if
one of the two failed.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FIRST = ("tests/unit", "tests/golden", "tests/fuzz")


def main() -> int:
    pytest = [sys.executable, "-m", "pytest"]
    with tempfile.TemporaryFile("w+") as said:
        first = subprocess.Popen([*pytest, *FIRST], cwd=ROOT, stdout=said, stderr=said)
        try:
            others = [f"--ignore={folder}" for folder in FIRST]
            second = subprocess.run([*pytest, *others], cwd=ROOT, check=False)
            first.wait()
        finally:
            first.kill()
            said.seek(0)
            print(said.read())
    return first.returncode or second.returncode


if __name__ == "__main__":
    sys.exit(main())
