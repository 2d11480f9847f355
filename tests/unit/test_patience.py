"""How long ranks wait: as the user says, else longer where the machine has more to do."""

import os
import re

import pytest

from meshwise import patience
from meshwise.patience import Patience, parsed


@pytest.fixture
def machine(monkeypatch):
    """``machine(cores, waited, runnable)``: what the kernel says; ``waited``: how often as long as
    it ran this process waited for a core."""

    def of(cores, waited, runnable):
        told = {
            "/proc/loadavg": f"532.00 532.00 532.00 {runnable}/999 4242\n",
            "/proc/self/schedstat": f"2000000000 {int(waited * 2e9)} 17\n",
        }

        class Told(type(patience.Path())):
            def read_text(self, *_):
                return told.get(str(self), "")

        monkeypatch.setattr(patience, "Path", Told)
        monkeypatch.setattr(os, "cpu_count", lambda: cores)
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))

    return of


@pytest.mark.parametrize(
    ("cores", "waited", "runnable", "ranks", "expected"),
    [
        (8, 0.0, 1, 4, (30.0, 600.0)),  # every rank has a core, whatever the load averages say
        (2, 0.0, 1, 8, (120.0, 2400.0)),  # four take turns
        (2, 3.0, 3, 2, (120.0, 2400.0)),  # beside other programs
        (2, 0.0, 42, 2, (600.0, 12_000.0)),  # that have just begun, and are more than 20 a core
        (64, 0.0, 64, 8, (30.0, 600.0)),
    ],
)
def test_limits_grow_where_processes_take_turns(machine, cores, waited, runnable, ranks, expected):
    machine(cores, waited, runnable)
    assert Patience().limits(ranks) == expected


def test_what_is_said_holds_on_any_machine(machine):
    machine(2, 50.0, 100)
    assert parsed("45s", "2m").limits(8) == (45.0, 120.0)
    assert parsed(None, 7).limits() == (600.0, 7.0)


@pytest.mark.parametrize("given", ["0s", "-1s", "inf", "nan", "soon", 0, 1e300])
@pytest.mark.parametrize("name", ["timeout", "setup_timeout"])
def test_what_is_no_time_is_refused_by_name(name, given):
    with pytest.raises(ValueError, match=re.escape(f"{name} = {given!r}: ")):
        parsed(**{"timeout": None, "setup_timeout": None, name: given})


def test_a_machine_that_does_not_tell_its_load_has_none(monkeypatch):
    def silent(*_):
        raise OSError("no such file")

    monkeypatch.setattr(patience.Path, "read_text", silent)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    assert Patience().limits(2) == (30.0, 600.0)
    assert Patience().limits(4) == (60.0, 1200.0)


@pytest.mark.parametrize(
    "files",
    [
        {"cpu.max": "150000 100000\n"},
        {"cpu/cpu.cfs_quota_us": "150000\n", "cpu/cpu.cfs_period_us": "100000\n"},
        {"cpu.max": "", "cpu/cpu.cfs_quota_us": "75000", "cpu/cpu.cfs_period_us": "50000"},
    ],
)
def test_a_container_of_fewer_cores_than_its_host_is_patient(files, machine, monkeypatch):
    machine(64, 0.0, 1)
    loads = patience.Path

    class Told(type(loads())):
        def read_text(self, *_):
            name = str(self).removeprefix("/sys/fs/cgroup/")
            if name == str(self):
                return loads(self).read_text()
            if name not in files:
                raise FileNotFoundError(name)
            return files[name]

    monkeypatch.setattr(patience, "Path", Told)
    assert Patience().limits(6) == (120.0, 2400.0)


@pytest.mark.parametrize("said", ["max 100000", "-1 100000", "0 0", "x", "1 2 3"])
def test_a_quota_that_limits_nothing_changes_nothing(said, monkeypatch):
    def read_text(path, *_):
        return said if "cgroup" in str(path) else ""

    monkeypatch.setattr(patience.Path, "read_text", read_text)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
    assert Patience().limits(4) == (30.0, 600.0)
