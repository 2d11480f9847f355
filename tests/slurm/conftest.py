"""``slurm``: two nodes of a real Slurm on this machine, one cluster for all tests."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.slurm import nodes

Meshwise = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The environment of Slurm's commands."""
    if missing := nodes.missing():
        pytest.skip(f"{', '.join(missing)} not installed; make test-slurm installs them")
    with nodes.cluster(tmp_path_factory.mktemp("slurm"), ("n1", "n2")) as conf:
        clean = {name: text for name, text in os.environ.items() if not name.startswith("SLURM")}
        yield clean | {"SLURM_CONF": str(conf), "CUDA_VISIBLE_DEVICES": ""}


@pytest.fixture
def meshwise(slurm: dict[str, str], tmp_path: Path) -> Meshwise:
    """Run ``meshwise WORDS`` in a folder of the test's own."""

    def run(*words: str, before: tuple[str, ...] = (), **environment: str):
        return subprocess.run(
            [*before, sys.executable, "-m", "meshwise", *words],
            cwd=tmp_path, env=slurm | environment, capture_output=True, text=True, timeout=900,
            check=False,
        )  # fmt: skip

    return run
