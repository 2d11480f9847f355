"""Every command that docs/coming-from.md names is one that the command line takes."""

import re
import shlex
from pathlib import Path

import pytest

from meshwise.cli import app

CHAPTER = Path(__file__).resolve().parents[2] / "docs" / "coming-from.md"
COMMANDS = re.findall(r"`meshwise (.+?)`", CHAPTER.read_text())


def test_the_chapter_names_every_verb_that_replaces_a_tool():
    assert {command.split()[0] for command in COMMANDS} >= {
        "measure", "calibrate", "plan", "run", "refit", "report", "show",
    }  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_parses(command):
    words = [word for word in shlex.split(command) if word != "--launcher" and word != "slurm"]
    function, *_ = app._app().parse_args(words, exit_on_error=False, print_error=False)
    assert function.__module__.startswith("meshwise.cli")
