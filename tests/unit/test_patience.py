"""How long ranks wait: as the user says, else longer where the machine has more to do."""

import os
import re

import pytest

from meshwise import patience
from meshwise.patience import Patience, parsed


@pytest.fixture
def machine(monkeypatch):
    """``machine(cores, load, runnable)``: what the kernel says."""

    def of(cores, load, runnable):
        class Told(type(patience.Path())):
            def read_text(self, *_):
                return f"{load} 0.00 0.00 {runnable}/999 4242\n"

        monkeypatch.setattr(patience, "Path", Told)
        monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))
        monkeypatch.setattr(os, "cpu_count", lambda: cores)
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))

    return of


@pytest.mark.parametrize(
    ("cores", "load", "runnable", "ranks", "expected"),
    [
        (8, 0.5, 1, 4, (30.0, 600.0)),  # every rank has a core
        (2, 0.5, 1, 8, (120.0, 2400.0)),  # four take turns
        (2, 8.0, 3, 2, (120.0, 2400.0)),  # beside other programs
        (2, 0.1, 42, 2, (600.0, 12_000.0)),  # that have just begun, and are more than 20 a core
        (64, 64.0, 3, 8, (30.0, 600.0)),
    ],
)
def test_limits_grow_where_processes_take_turns(machine, cores, load, runnable, ranks, expected):
    machine(cores, load, runnable)
    assert Patience().limits(ranks) == expected


def test_what_is_said_holds_on_any_machine(machine):
    machine(2, 100.0, 100)
    assert parsed("45s", "2m").limits(8) == (45.0, 120.0)
    assert parsed(None, 7).limits() == (600.0, 7.0)


@pytest.mark.parametrize("given", ["0s", "-1s", "inf", "nan", "soon", 0, 1e300])
@pytest.mark.parametrize("name", ["timeout", "setup_timeout"])
def test_what_is_no_time_is_refused_by_name(name, given):
    with pytest.raises(ValueError, match=re.escape(f"{name} = {given!r}: ")):
        parsed(**{"timeout": None, "setup_timeout": None, name: given})
