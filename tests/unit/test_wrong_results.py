"""A result that a check found wrong: no verb takes the case for measured. Ranks are replaced;
tests/dist/test_probe.py has real ones whose collectives are wrong."""

import json
from pathlib import Path

import msgspec
import pytest

import meshwise
from meshwise import store
from meshwise.cli import app
from meshwise.spec import (
    Case,
    Collective,
    LongAttention,
    RunInfo,
    Sample,
    Step,
    case_of,
    ending,
)
from tests import sample_records as known

pytest.importorskip("torch")
pytestmark = pytest.mark.usefixtures("here")
RING = ("sent_bytes", "received_bytes", "collectives", "planned_bytes", "owner_bound_bytes")
HEADER = """\
# Collective test starting: all_reduce_perf
# nThread 1 nGpus 2 minBytes 8 maxBytes 8 step: 2(factor) warmup iters: 1 iters: 20 graph: 0
#  Rank  0 Group  0 Pid 7 on host device  0 [0000:00:06] NVIDIA H200
#  Rank  1 Group  0 Pid 7 on host device  1 [0000:00:07] NVIDIA H200
# size count type redop root time algbw busbw #wrong
"""


def call(line: str) -> int:
    """The exit code of ``meshwise LINE``."""
    with pytest.raises(SystemExit) as ended:
        app.main(line.split())
    return ended.value.code


def wrong(sample: Sample) -> Sample:
    return Sample(
        case_id=sample.case_id, case=sample.case, status="error",
        reason="wrong elements: 7 on rank 1", metrics={"wrong": 7.0},
    )  # fmt: skip


@pytest.mark.parametrize(("bad", "code"), [(0, 0), (3, 4)])
def test_wrong_elements_of_an_imported_file_are_an_error_and_exit_code_4(bad, code, capsys):
    rows = f" 1024 256 float sum -1 10.24 0.10 0.10 0\n 2048 512 float sum -1 11.0 0.1 0.1 {bad}\n"
    Path("log.txt").write_text(HEADER + rows)
    assert call("measure import log.txt") == code
    assert ("3 wrong elements" in capsys.readouterr().out) == bool(bad)


def test_calibrate_refuses_the_sample_and_says_so(caplog):
    known.synthetic_run(Path("runs"))
    run_dir = store.newest("runs", "measure-profile")
    *_, last = [s for s in store.load(run_dir)[1] if isinstance(s.case.op, Collective)]
    good = meshwise.calibrate()
    store.append(run_dir, wrong(last))
    costs = meshwise.calibrate()
    (said,) = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert said.startswith("refused, an error: ") and "wrong elements: 7 on rank 1" in said
    points = [sum(len(curve.x_bytes) for curve in each.curves) for each in (costs, good)]
    assert points[0] == points[1] - 1


def test_a_line_of_before_that_says_ok_and_wrong_is_left_out_and_said():
    """Wrong elements once were a number beside the times of an ok sample."""
    known.synthetic_run(Path("runs"))
    run_dir = store.newest("runs", "measure-profile")
    lines = (run_dir / "samples.jsonl").read_text().splitlines()
    old = json.loads(lines[-1])
    old["metrics"] = {"wrong": 7.0}
    (run_dir / "samples.jsonl").write_text("\n".join([*lines[:-1], json.dumps(old)]) + "\n")
    _, samples, warnings = store.load(run_dir)
    assert len(samples) == len(lines) - 1 and "wrong elements" in warnings[0]


def ended(statuses: list[str]) -> tuple[str, str]:
    case = Case(op=known.GEMM)
    return ending([
        Sample(case_id=case.id, case=case, status=status, reason="why", times_s=(1.0,))
        for status in statuses
    ])  # fmt: skip


def test_a_run_is_complete_if_its_cases_are():
    assert ended([]) == ended(["ok", "skipped"]) == ("complete", "")
    found = ended(["ok", "oom", "hung", "error", "error"])
    assert found == ("partial", "4 of 5 cases failed: 2 error, 1 hung, 1 oom")


@pytest.mark.parametrize(
    "verb",
    ["refit --scenario tp2-tp1 --hidden-size 64 --num-layers 1",
     "measure ring 2 --seq_lengths 64 --ring_sizes 1 2 --num_heads 4 --embed_dim 32",
     "run --model gpt-30m --steps 1 --nproc 1"],
)  # fmt: skip
@pytest.mark.parametrize("status", ["error", "ok"])
def test_no_verb_calls_a_run_complete_whose_case_failed(verb, status, monkeypatch):
    from meshwise import launch

    def run(target, request, **_):
        cases = getattr(request, "cases", None) or [getattr(request, "case", None)]
        cases = [case_of(request.plan, "train")] if cases == [None] else cases
        for case in cases:
            sample = Sample(case_id=case.id, case=case, status="ok", times_s=(1e-3,) * 3)
            if isinstance(case.op, Step):
                sample = known.step_sample(request.plan, [0.5], peak_bytes=1e9)
            if isinstance(case.op, LongAttention):
                metrics = dict.fromkeys(RING, (0.0,) * 2)
                metrics |= {"forward_rank_times_s": (1e-4,) * 3, "rank_pairs": (1.0,)}
                sample = msgspec.structs.replace(
                    sample, metrics=metrics, rank_times_s=(sample.times_s,), reason="local"
                )
            store.append(request.run_dir, sample if status == "ok" else wrong(sample))

    monkeypatch.setattr(launch, "run", run)
    store.write("cluster.toml", known.CPUS)
    assert call(verb) == (4 if status == "error" else 0)
    (run_dir,) = store.runs_of("runs")
    info = store.read(run_dir / "run.json", RunInfo)
    ends = "failed" if verb.startswith("run") else "partial"  # a run has one case
    assert info.status == (ends if status == "error" else "complete"), info.reason
    assert bool(info.reason) == (status == "error")


def test_a_run_with_a_wrong_result_ends_in_exit_code_4(monkeypatch, capsys):
    from meshwise import launch

    def run(target, request, **_):
        for number, case in enumerate(request.cases):
            sample = Sample(case_id=case.id, case=case, status="ok", times_s=(1e-3,) * 3)
            store.append(request.run_dir, wrong(sample) if number == 0 else sample)

    monkeypatch.setattr(launch, "run", run)
    store.write("cluster.toml", known.CPUS)
    assert call("measure collectives all_reduce --sizes 1K..4K:x2 --as-measured") == 4
    assert "wrong elements: 7 on rank 1" in capsys.readouterr().out
    assert call("measure health") == 4
    assert "wrong result" in capsys.readouterr().out
