"""python -m tests: two streams of tests side by side, since most keep one of two cores busy.

What the first say is printed behind the second. Exit code 1 if one of the two failed.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FIRST = (
    "tests/unit",
    "tests/golden",
    "tests/oracle",
    "tests/dist/test_matrix.py",
    "tests/dist/test_compiled.py",
    "tests/dist/test_checkpoint.py",
    "tests/dist/test_graph_against_torch.py",
    "tests/dist/test_program_collectives.py",
    "tests/dist/test_apply.py",
    "tests/dist/test_engine.py",
    "tests/fuzz",
)


def main() -> int:
    pytest = [sys.executable, "-m", "pytest"]
    with tempfile.TemporaryFile("w+") as said:
        first = subprocess.Popen([*pytest, *FIRST], cwd=ROOT, stdout=said, stderr=said)
        try:
            others = [f"--ignore={path}" for path in FIRST]
            second = subprocess.run([*pytest, *others], cwd=ROOT, check=False)
            first.wait()
        finally:
            first.kill()
            said.seek(0)
            print(said.read())
    return first.returncode or second.returncode


if __name__ == "__main__":
    sys.exit(main())
