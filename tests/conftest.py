"""``golden(name, text)``: the text is the file tests/golden/name, or --update-golden writes it.
``here``: a working directory of the test's own, on a machine without GPUs, under no launcher."""

import logging
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("any machine", deadline=None)  # a loaded one is slow, not wrong
settings.load_profile("any machine")

GOLDEN = Path(__file__).parent / "golden"
WHOLE = Path(__file__).parent / "whole.txt"


def pytest_configure() -> None:
    """Take signals as a terminal's program does: a shell's background job ignores Ctrl-C."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) == signal.SIG_IGN:
            is_int = number == signal.SIGINT
            signal.signal(number, signal.default_int_handler if is_int else signal.SIG_DFL)


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    names = {line for line in WHOLE.read_text().splitlines() if not line.startswith("#")}
    for item in items:
        name = item.nodeid.rpartition("/")[2]
        if name in names:
            item.add_marker(pytest.mark.whole)
            names.remove(name)
    if any("::" in arg for arg in config.args):
        return  # a part of a file
    files = {item.path for item in items}
    for name in sorted(names):
        if files >= {*WHOLE.parent.rglob(name.partition("::")[0])}:
            items.append(NoTest.from_parent(items[0].session, name=name))


class NoTest(pytest.Item):
    """A name of tests/whole.txt that is no test: it fails, so that every runner shows it."""

    def runtest(self) -> None:
        pytest.fail(f"tests/whole.txt: {self.name} is no test; leave it out", pytrace=False)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write tests/golden anew")


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    def check(name: str, text: str) -> None:
        path = GOLDEN / name
        if request.config.getoption("--update-golden"):
            path.write_text(text)
        assert path.exists(), f"{path} is missing; run pytest with --update-golden"
        assert text == path.read_text(), f"{path} differs; if that is meant, use --update-golden"

    return check


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(logging.getLogger("meshwise"), "handlers", [])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
