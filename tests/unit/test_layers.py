"""Imports go downwards only, and planning needs no torch: pyproject.toml has the contracts."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "meshwise"
TORCH_FREE = [
    *("fit", "models", "pages", "prices", "probe/cases", "probe/importers"),
    *("schedule", "search", "spec", "stats", "store", "units"),
]
HEAVY = {"jinja2", "matplotlib", "rich", "scipy", "torch"}  # each import belongs in a function


def python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def modules_of(room: str) -> list[str]:
    path = PACKAGE / room
    files = sorted(path.rglob("*.py")) if path.is_dir() else [path.with_suffix(".py")]
    dotted = [".".join(file.relative_to(ROOT).with_suffix("").parts) for file in files]
    return [name.removesuffix(".__init__") for name in dotted]


def loaded_by(modules: list[str]) -> set[str]:
    """Top-level packages in memory after importing the modules in a fresh interpreter."""
    code = f"import {', '.join(modules)}, sys; print(*{{m.split('.')[0] for m in sys.modules}})"
    return set(python(code).split())


@pytest.mark.skipif(
    importlib.util.find_spec("importlinter") is None, reason="import-linter is not installed"
)
def test_the_import_contracts_hold() -> None:
    command = "from importlinter.cli import lint_imports_command as main; main()"
    done = subprocess.run(
        [sys.executable, "-c", command, "--no-cache"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("room", TORCH_FREE)
def test_a_planning_room_imports_nothing_heavy(room: str) -> None:
    modules = modules_of(room)
    assert modules
    assert not loaded_by(modules) & HEAVY


@pytest.mark.parametrize("module", ["meshwise", "meshwise.cli.app", "meshwise.verbs"])
def test_the_command_line_starts_light(module: str) -> None:
    assert not loaded_by([module]) & {"jinja2", "matplotlib", "scipy", "torch"}


def test_the_loader_sees_what_is_heavy() -> None:
    assert "scipy" in loaded_by(["scipy"])


def test_private_names_of_torch_stand_in_one_module() -> None:
    names = (
        r"torch\._[a-z]", r"distributed(\.\w+)*\._\w", r"from torch.* import _\w", r"\bdist\._\w",
        r"\._local_tensor\b",
    )  # fmt: skip
    private = re.compile("|".join(names))
    found = {path.name for path in PACKAGE.rglob("*.py") if private.search(path.read_text())}
    assert found == {"torch_private.py"}
