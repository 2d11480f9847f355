"""The samples of docs/plan.md: each command under "Answers" prints the lines below it."""

import re
import shlex
from pathlib import Path

import pytest

from meshwise.cli import app

CHAPTER = (Path(__file__).parents[2] / "docs/plan.md").read_text()
SAMPLES = re.findall(r"```\nmeshwise (plan .*)\n\n([^`]*)```", CHAPTER)


def test_all_four_are_found():
    assert len(SAMPLES) == 4


@pytest.mark.parametrize(
    ("command", "lines"),
    SAMPLES,
    ids=[re.sub(".* --(why|what|dead).*", r"\1", c) for c, _ in SAMPLES],
)
def test_a_command_prints_its_sample(command, lines, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        app.main(shlex.split(command))
    assert ended.value.code == 0
    rules = re.compile("─+\n| +$", re.MULTILINE)
    assert lines in rules.sub("", capsys.readouterr().out)
