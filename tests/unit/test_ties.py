"""plan --measure-ties: which layouts run, and how they rank afterwards. Runs are made up here."""

import io
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import torch

import meshwise
from meshwise import search, store
from meshwise.launch import RanksFailed
from meshwise.options.plan import PlanOptions
from meshwise.pages import answers, table
from meshwise.spec import Candidate, Layout, Plan
from meshwise.verbs import ties
from tests import sample_records as known

FIRST, SECOND, THIRD, FAR = (
    Layout(dp=dp, tp=4 // dp, zero=zero, microbatch_size=8 // dp)
    for dp, zero in ((4, 2), (2, 2), (1, 0), (4, 3))
)


def plan():
    """Four layouts, told to take 1.0, 1.1, 1.2 and 1.3 s; the last does not tie with the first."""
    others = ((SECOND, 1.1, True), (THIRD, 1.2, True), (FAR, 1.3, False))
    return msgspec.structs.replace(
        known.plan(FIRST, 1.0),
        runners_up=tuple(
            Candidate(layout=layout, prediction=known.prediction(told_s, 1e9), ties=ties)
            for layout, told_s, ties in others
        ),
    )


@pytest.fixture
def ran(tmp_path, monkeypatch):
    """What each layout takes [s], or why it fails; the layouts that ran are kept in order."""
    monkeypatch.chdir(tmp_path)
    takes, order, now = {}, [], [0.0]

    def run(path, *, steps, warmup):
        layout = store.read(path, Plan).layout
        order.append(layout)
        now[0] += 40
        if isinstance(takes[layout], str):
            raise RanksFailed(takes[layout])
        return [Path(layout.name)]

    def load(run_dir):
        layout = next(one for one in order if one.name == run_dir.name)
        times_s = (takes[layout], 9.0, takes[layout] / 2, takes[layout])
        return None, [SimpleNamespace(status="ok", reason="", times_s=times_s)], None

    monkeypatch.setattr(ties, "run", run)
    monkeypatch.setattr(ties.store, "load", load)
    monkeypatch.setattr(ties, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return takes, order


def test_what_ties_runs_and_ranks_by_what_it_took(ran):
    takes, order = ran
    takes |= {FIRST: 1.5, SECOND: 1.2, THIRD: 1.8}
    found = ties.measured(plan(), 300.0, "plan.json")
    assert order == [FIRST, SECOND, THIRD]
    # the last did not run: 1.3 s, and the others took 1.5 times as long as told, in the median
    assert [found.layout, *[each.layout for each in found.runners_up]] == [
        SECOND, FIRST, THIRD, FAR
    ]  # fmt: skip
    assert found.prediction.step_time_s == 1.1  # what was told stays
    assert not any(each.ties for each in found.runners_up)
    assert [tie.measured_s for tie in found.answers.ties] == [1.5, 1.2, 1.8]
    stream = io.StringIO()
    table.write(answers.of(found), stream)
    assert "-33.3 %" in stream.getvalue() and "1.50 s" in stream.getvalue()


def test_the_time_bounds_what_runs_but_two_always_do(ran):
    takes, order = ran
    takes |= {FIRST: 2.0, SECOND: 2.3, THIRD: 0.1}
    found = ties.measured(plan(), 100.0, "plan.json")
    assert order == [FIRST, SECOND]  # each took 40 s
    # 2.045 times as long as told: THIRD is expected to take 2.45 s, not 1.2
    assert [found.layout, *[each.layout for each in found.runners_up]] == [
        FIRST, SECOND, THIRD, FAR
    ]  # fmt: skip


def test_what_fails_is_no_candidate(ran):
    takes, _ = ran
    takes |= {FIRST: "out of memory", SECOND: 1.2, THIRD: 1.3}
    found = ties.measured(plan(), 300.0, "plan.json")
    assert found.layout == SECOND
    assert FIRST not in [each.layout for each in found.runners_up]
    assert found.answers.ties[0].note == "out of memory"
    takes |= dict.fromkeys([SECOND, THIRD], "no such device")
    with pytest.raises(ValueError, match="no layout ran: out of memory"):
        ties.measured(plan(), 300.0, "plan.json")


def test_nothing_runs_where_nothing_ties(ran):
    alone = msgspec.structs.replace(plan(), runners_up=plan().runners_up[2:])
    found = ties.measured(alone, 300.0, "plan.json")
    assert ran[1] == [] and found.layout == FIRST and found.runners_up == alone.runners_up


@pytest.mark.parametrize(
    ("cluster", "options", "reason"),
    [
        ("h100-hgx", {}, "describes 'NVIDIA H100 80GB HBM3', but here is"),
        ("h100-hgx", {"fewest": True}, "describes 'NVIDIA H100 80GB HBM3', but here is"),
        ("h100-hgx", {"hosts": 2}, "nproc = 16: a host of 'h100-hgx' has 8 devices"),
    ],
)
def test_ties_of_another_machine_are_refused_before_the_search(
    tmp_path, monkeypatch, cluster, options, reason
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(search, "find", None)  # not called
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    Path("plan.json").write_text("kept")
    with pytest.raises(ValueError, match=f"measure_ties: runs layouts on .*{reason}.* or leave"):
        meshwise.plan("gpt-125m", cluster=cluster, measure_ties="10s", **options)
    assert Path("plan.json").read_text() == "kept" and len([*tmp_path.iterdir()]) == 1


def test_a_given_layout_ties_with_nothing():
    with pytest.raises(ValueError, match="measure_ties: it searches, and a layout is given"):
        PlanOptions(measure_ties="10s", layout="{}")
