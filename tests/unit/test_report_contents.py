"""Which runs ``report`` puts on its page, and what the page says of them."""

from pathlib import Path

import pytest

import meshwise
from meshwise import store
from meshwise.pages import show
from meshwise.spec import Case, Collective, Gemm, Sample
from meshwise.verbs.report import gather
from tests import sample_records as known

COLLECTIVES, HEALTH = "20260102T000000-measure-collectives-four", "20260103T000000-measure-health-x"
RING = Collective(kind="all_gather", size_bytes=2**20, group_size=4)


@pytest.fixture(autouse=True)
def runs(tmp_path, monkeypatch) -> Path:
    """The run that the known prices rest on, and one of collectives."""
    monkeypatch.chdir(tmp_path)
    known.write_run(Path("runs"), known.info(run_id=known.MEASURE_RUN), known.SAMPLES)
    known.write_run(Path("runs"), known.info(run_id=COLLECTIVES), [measured(RING)])
    return tmp_path / "runs"


def measured(op) -> Sample:
    case = Case(op=op, world_size=4)
    times_s = (1e-3, 2e-3)
    return Sample(
        case_id=case.id, case=case, status="ok", times_s=times_s, rank_times_s=(times_s,) * 4
    )


def ids(*named) -> list[str]:
    contents = gather("runs", "costs.json", "plan.json", named)
    return [info.run_id for info, _ in contents.runs]


def test_without_prices_all_that_was_measured_is_shown():
    assert ids() == [known.MEASURE_RUN, COLLECTIVES]


def test_beside_prices_a_run_that_they_do_not_rest_on_is_shown_when_named(caplog):
    store.write("costs.json", known.COSTS)
    caplog.set_level("INFO", "meshwise")
    assert ids() == [known.MEASURE_RUN]
    assert f"not shown unless named, as no price rests on them: runs/{COLLECTIVES}" in caplog.text
    assert ids(f"runs/{COLLECTIVES}") == [known.MEASURE_RUN, COLLECTIVES]


def test_named_runs_are_the_only_ones_shown_beside_those_of_prices_and_plan():
    known.write_run(Path("runs"), known.info("run", known.plan(), "step"), [])
    assert ids() == [known.MEASURE_RUN, COLLECTIVES, "step"]
    assert ids(f"runs/{COLLECTIVES}") == [COLLECTIVES]
    assert ids("runs/step") == ["step"]
    store.write("plan.json", known.plan())
    assert ids(f"runs/{COLLECTIVES}") == [COLLECTIVES, "step"]


def test_a_run_named_by_another_path_is_shown_once(runs):
    store.write("costs.json", known.COSTS)
    assert ids(runs / COLLECTIVES, f"./runs/{COLLECTIVES}").count(COLLECTIVES) == 1


def test_a_name_that_is_no_run_is_refused():
    with pytest.raises(ValueError, match=r"runs/nothing/run.json does not exist"):
        meshwise.report("runs/nothing")


def test_a_page_of_measurements_alone_does_not_speak_of_plans():
    text = meshwise.report(f"runs/{COLLECTIVES}").read_text()
    assert f"Measured: {COLLECTIVES}" in text and "1048576" in text
    assert "no plan" not in text.lower() and "no prices" not in text.lower()


def test_a_page_is_titled_by_what_it_shows():
    head = "<small>Meshwise report: "
    text = meshwise.report(f"runs/{COLLECTIVES}").read_text()
    assert f"<h1>four{head}what was measured</small>" in text
    store.write("costs.json", known.COSTS)
    assert f"{head}what was measured and priced</small>" in meshwise.report().read_text()
    store.write("plan.json", known.plan())
    assert f"{head}what was planned</small>" in meshwise.report().read_text()
    step = known.step_sample(known.plan(), [0.01] * 5)
    known.write_run(Path("runs"), known.info("run", known.plan(), "step"), [step])
    assert f"{head}predicted beside measured</small>" in meshwise.report().read_text()


def test_a_health_run_is_shown_with_its_verdict():
    """Rank 2 takes 1.5 times as long as the others for the same product."""
    case = Case(op=Gemm(m=8192, n=8192, k=8192), world_size=4)
    rank_times_s = tuple((1.5e-3 if rank == 2 else 1e-3,) * 40 for rank in range(4))
    slow = Sample(
        case_id=case.id, case=case, status="ok", times_s=rank_times_s[2], rank_times_s=rank_times_s
    )
    run = known.write_run(Path("runs"), known.info(run_id=HEALTH), [slow])
    titles = [table.title for table in show.of(meshwise.show(run))]
    assert titles[:2] == [HEALTH, "Health of four: 1 fault"]
    assert "Health of four: 1 fault" in meshwise.report(run).read_text()
