"""1,200 damaged inputs end as documented, every kind in its share; ``make fuzz`` runs 100,000."""

import os
import signal
import sys

import pytest

from tests.fuzz import inputs, server
from tests.pace import paced

CASES, SEED = 1200, 1
KINDS = tuple(inputs.kinds())


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A prepared session; what preparing changed here is put back."""
    with pytest.MonkeyPatch.context() as patch:
        from meshwise import launch

        patch.setattr(launch, "start", launch.start)
        yield server.prepare(tmp_path_factory.mktemp("session"))


@pytest.mark.parametrize("kind", KINDS)
def test_damaged_inputs_end_as_documented(kind, place):
    ended = server.run(place, SEED, kind, range(-(-CASES // len(KINDS))))
    wrong = [f"--seed {SEED} --only '{e.kind}/{e.number}': {e.wrong}" for e in ended if e.wrong]
    assert not wrong, "\npython -m tests.fuzz ".join(["", *wrong])


def test_undamaged_inputs_are_read(place, monkeypatch):
    """Some command of each kind goes through, or as far as where it would start ranks."""
    assert len(KINDS) >= 18
    monkeypatch.setattr(server, "mutant", lambda data, form, rng: data)
    ended = {kind: server.run(place, SEED, kind, range(4)) for kind in KINDS}
    assert not [kind for kind, all_of in ended.items() if all(e.code == 2 for e in all_of)]
    assert not [e for all_of in ended.values() for e in all_of if e.wrong]


def _raises(*_):
    raise ZeroDivisionError


def _hangs(*_):
    while True:
        pass


def _sleeps(*_):
    signal.pause()


def _eats(*_):
    return len(bytearray(b"x") * (server.MEMORY_BYTES + 2**26)) and 0


def _says(text, code=0):
    def says(*_):
        print(text, file=sys.stderr)
        sys.exit(code)

    return says


@pytest.mark.parametrize(
    ("fault", "wrong"),
    [
        (_raises, "a traceback"),
        (_hangs, "CPU s"),
        (_sleeps, "still ran after"),
        (_eats, "MiB"),
        (_says("\x1b[31mred"), "prints the control character"),
        (_says("error: " + "x" * 400, 2), "more than one line or 300 characters"),
        (_says("error: a\nerror: b", 2), "more than one line or 300 characters"),
        (_says("", 2), "exit code 2 without a reason"),
        (_says("", 1), "exit code 1"),
        (lambda *_: os.kill(os.getpid(), signal.SIGSEGV), "exit code -11"),
        (lambda *_: os._exit(0), "ended its process"),
    ],
)
def test_what_a_case_may_not_do_is_found_in_it_alone(fault, wrong, place, monkeypatch):
    """The second of three cases does it; the others, before and behind it, are as without."""
    from meshwise.cli import app

    monkeypatch.setattr(server, "CPU_S", 3)
    monkeypatch.setattr(server, "WALL_S", paced(8 if fault is _sleeps else 20))
    cases = [(b"", ["detect", name]) for name in ("a", "b", "c")]
    monkeypatch.setattr(server, "case", lambda seed, kind, number: cases[number])
    real = app.main
    monkeypatch.setattr(
        app, "main", lambda words: fault() if words[-1] == "b" else real(["run", "--list-suites"])
    )
    first, second, third = server.run(place, 0, "sizes", range(3))
    assert wrong in second.wrong
    assert (first.wrong, first.code, third.wrong, third.code) == ("", 0, "", 0)


def test_a_case_finds_what_the_first_found(place, monkeypatch):
    """What a case writes, deletes and sets is undone before the next."""
    from meshwise.cli import app

    def leaves(_):
        print(sorted(os.listdir()), os.environ.get("LEFT"), os.getcwd())
        os.environ["LEFT"] = "1"
        os.remove("plan.json")
        os.makedirs("new/folder")
        os.chdir("new")

    monkeypatch.setattr(app, "main", leaves)
    first, second = server.run(place, 0, "sizes", range(2))
    assert "plan.json" in first.said
    assert first.said == second.said
