"""docs/notebook.ipynb: its code cells run as one script, in a process and a folder of their own."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOK = ROOT / "docs" / "notebook.ipynb"


@pytest.fixture(scope="module")
def cells():
    notebook = json.loads(NOTEBOOK.read_text())
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    return notebook["cells"]


@pytest.fixture(scope="module")
def ran(cells, tmp_path_factory):
    """The folder in which it ran, and what it printed."""
    folder = tmp_path_factory.mktemp("notebook")
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    (folder / "script.py").write_text("\n\n".join(code))
    done = subprocess.run(
        [sys.executable, "script.py"],
        cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder, done.stdout


def test_it_holds_no_outputs_and_names_no_path_of_a_machine(cells):
    assert all(cell["outputs"] == [] for cell in cells if cell["cell_type"] == "code")
    assert NOTEBOOK.stat().st_size < 300 * 2**10 and "/home" not in NOTEBOOK.read_text()
    assert len({cell["id"] for cell in cells}) == len(cells)


def test_it_writes_the_pictures(ran):
    folder, said = ran
    for name in ("latency_bw.png", "fits.png", "a2a.png", "a2a.pdf"):
        content = (folder / name).read_bytes()
        assert content.startswith(b"%PDF" if name.endswith("pdf") else b"\x89PNG")
        assert len(content) > 10_000 and said.count(f"wrote {name}\n") == 1


def test_it_prints_the_figures_that_its_text_promises(ran):
    _, said = ran
    for row in (  # bytes by rule, worked out by hand in the reference
        "2048,1-1-1-1,64 524288 524288 393216 786432",
        "2048,2-3-3-5,64 2621440 1703936 1966080 3014656",
        "256,1-1-1-2,32 65536 40960 49152 73728",
        "4096,13-0-0-0,128 27262976 6815744 20447232 20447232",
    ):
        assert row in re.sub(" +", " ", said)
    assert "batch = 2050: is not divisible by 4 ranks" in said
    for rule in ("busiest", "sum", "max_of_max", "max_of_sum"):
        assert re.search(rf"^{rule} +predicted 9\d\.\d us, measured 91\.0 us$", said, re.MULTILINE)
    errors = dict(re.findall(r"^(\w+) +GMAE +([0-9.]+)%", said, re.MULTILINE))
    assert min(errors, key=lambda rule: float(errors[rule])) == "sum"  # ranks share one memory
    assert "all_to_all_v 4 by shared memory blocking" in said
