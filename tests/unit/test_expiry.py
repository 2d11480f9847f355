"""Prices expire: a warning, once, when what they depend on is no longer as it was measured."""

import importlib.metadata
from pathlib import Path

import msgspec
import pytest

import meshwise
from meshwise import provenance, store
from meshwise.spec import RunInfo
from meshwise.spec.run import changes
from meshwise.verbs import files
from meshwise.verbs.price import price
from tests import sample_records as known

pytestmark = pytest.mark.usefixtures("here")
THEN = {"device": "a CPU", "torch": "2.11.0", "nccl": "2.28.9", "driver": "580.1"}


@pytest.mark.parametrize(
    ("now", "said"),
    [
        ({}, ""),
        (THEN, ""),
        ({"torch": "2.11.0+cu130"}, ""),  # the package's version lacks the build
        ({"torch": "2.12.0+cu130"}, "torch 2.11.0 to 2.12.0+cu130"),
        ({"driver": "590.2", "nccl": "2.29.1"}, "nccl 2.28.9 to 2.29.1, driver 580.1 to 590.2"),
        ({"device": "another"}, "device a CPU to another"),
        ({"python": "3.13"}, ""),
    ],
)
def test_what_changed_is_named_from_what_to_what(now, said):
    assert changes(THEN, now) == said


def test_builds_count_where_both_are_known():
    assert changes({"torch": "2.11.0+cu128"}, {"torch": "2.11.0+cu130"})


def test_the_versions_of_a_machine_are_those_of_its_packages_and_its_devices():
    found = provenance.here("cpu")
    assert found["torch"] == importlib.metadata.version("torch")
    assert found["device"] == provenance.cpu_name() and "driver" not in found
    assert "device" not in provenance.here("cuda")  # none here


def test_a_machine_without_torch_has_no_version_of_it(monkeypatch):
    def absent(package):
        raise importlib.metadata.PackageNotFoundError(package)

    monkeypatch.setattr(importlib.metadata, "version", absent)
    assert provenance.here("cuda").keys() <= {"device", "driver"}


@pytest.fixture
def warned(caplog):
    def warnings() -> list[str]:
        found = [each.message for each in caplog.records if "expired" in each.message]
        caplog.clear()
        return found

    return warnings


@pytest.fixture
def measured(monkeypatch):
    """Prices of CPUS, measured under ``THEN``; this machine is what a test says."""
    run = Path(known.synthetic_run(Path("runs")))
    info = store.read(run / "run.json", RunInfo)
    versions = {name: THEN[name] for name in ("torch", "nccl", "driver")}
    store.write(run / "run.json", msgspec.structs.replace(info, provenance=versions))
    assert meshwise.calibrate().versions == THEN

    def machine(**now) -> None:
        monkeypatch.setattr(provenance, "here", lambda kind: THEN | now)

    machine()
    return machine


def test_on_the_machine_that_was_priced_a_change_is_said_once(measured, warned):
    assert meshwise.plan().versions == THEN and not warned()
    measured(torch="2.12.0", driver="590.2")
    meshwise.plan()
    (said,) = warned()
    assert "torch 2.11.0 to 2.12.0, driver 580.1 to 590.2" in said and "\n" not in said
    assert said.endswith("meshwise measure profile && meshwise calibrate")
    price(what="copy", size="1MiB")
    assert len(warned()) == 1


def test_on_a_laptop_far_away_its_own_versions_do_not_count(measured, warned):
    measured(device="a laptop", torch="1.0")
    meshwise.plan()
    assert not warned()


def test_the_cluster_file_beside_the_prices_counts_anywhere(measured, warned):
    measured(device="a laptop", torch="1.0")
    store.write("cluster.toml", known.CPUS)
    meshwise.plan()
    assert not warned()
    device = msgspec.structs.replace(known.CPUS.device, name="a newer CPU")
    store.write("cluster.toml", msgspec.structs.replace(known.CPUS, device=device))
    meshwise.plan()
    (said,) = warned()
    assert "device a CPU to a newer CPU" in said
    Path("far").mkdir()
    Path("costs.json").rename("far/costs.json")
    meshwise.plan(costs="far/costs.json")  # of another folder, whose cluster nobody described
    assert not warned()


def test_a_broken_cluster_file_beside_them_is_no_news(measured, warned):
    Path("cluster.toml").write_text("[")
    meshwise.plan()
    assert not warned()


def test_a_run_compares_with_the_machine_that_runs(measured, warned, monkeypatch):
    from meshwise import launch

    monkeypatch.setattr(launch, "run", lambda *_, **__: None)
    meshwise.plan()
    meshwise.run(rivals=1)
    assert not warned()
    measured(device="a newer CPU", torch="2.12.0")
    meshwise.run(rivals=1)
    (said,) = warned()
    assert "device a CPU to a newer CPU, torch 2.11.0 to 2.12.0" in said
    plan = msgspec.structs.replace(store.read("plan.json", meshwise.Plan), prediction=None)
    store.write("unpriced.json", plan)
    meshwise.run("unpriced.json")
    assert not warned()


def test_prices_of_before_say_nothing(warned):
    store.write("costs.json", known.COSTS)
    assert files.prices("costs.json") == known.COSTS and not warned()


def test_runs_of_different_versions_are_named_and_the_newest_counts(caplog):
    for day, torch in (("02", "2.11.0"), ("01", "2.10.0")):
        info = known.info(run_id=f"202601{day}T000000-measure-profile-four")
        info = msgspec.structs.replace(
            info, started=f"2026-01-{day}T00:00:00Z", provenance={"torch": torch}
        )
        known.write_run(Path("runs"), info, known.SAMPLES[:4])
    costs = meshwise.calibrate(tuple(store.runs_of("runs")[::-1]))
    assert costs.versions["torch"] == "2.11.0"
    assert "these runs are of different versions: torch 2.10.0 to 2.11.0" in caplog.text


def test_runs_on_hosts_of_other_sizes_make_one_costs_json_and_the_difference_is_said(caplog):
    for day, cores in (("01", 64), ("02", 32)):
        info = known.info(run_id=f"202601{day}T000000-measure-profile-four")
        cluster = msgspec.structs.replace(info.cluster, host_cores=cores, name=f"of-{day}")
        known.write_run(
            Path("runs"),
            msgspec.structs.replace(info, cluster=cluster, started=f"2026-01-{day}T00:00:00Z"),
            known.SAMPLES[:4],
        )
    runs = tuple(store.runs_of("runs"))
    for order in (runs, runs[::-1]):
        costs = meshwise.calibrate(order)
        assert len(costs.runs) == 2 and costs.cluster.host_cores == 32
    assert "no price depends on: host_cores = 64, 32; the newest's count" in caplog.text
