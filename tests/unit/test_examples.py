"""The examples that need no ranks run as their first lines say."""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def said(name: str, here: Path) -> str:
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / name], cwd=here, capture_output=True, text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_plan_from_data_sheets_says_how_sure_it_is(tmp_path):
    told = said("plan_from_data_sheets.py", tmp_path)
    step_s, low_s, high_s = map(float, re.findall(r"(\d+\.\d\d) (?:s a|to|s\n)", told)[:3])
    assert low_s < step_s < high_s
    assert re.search(
        r"dp2 tp8\+sp mb1x64 takes \d+\.\d\d s longer, mostly:\n  tensor-parallel", told
    )


def test_a_price_of_stored_runs_has_its_error(tmp_path):
    told = said("ask_a_price.py", tmp_path)
    assert "all_to_all: 16 knots" in told and "points that it had not seen" in told
    assert (tmp_path / "prices.json").exists()
