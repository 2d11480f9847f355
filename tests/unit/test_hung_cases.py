"""Cases in which a rank does not arrive: recorded as hung, the ranks started again for the others,
until three in a row. The start of ranks is replaced; tests/dist/test_faults.py stops a real one."""

from pathlib import Path

import pytest

import meshwise
from meshwise import store
from meshwise.spec import RunInfo, Sample
from tests import sample_records as known

pytest.importorskip("torch")
pytestmark = pytest.mark.usefixtures("here")
ABSENT = "rank 0: TimeoutError: rank 1 (in case x) had not arrived at a collective after 4 s"


class TestHung:
    """Ranks that wait for one that does not come; ``hangs`` says in which cases."""

    @pytest.fixture
    def measured(self, here, monkeypatch):
        from meshwise import launch

        def run(target, request, **_):
            starts.append(request)
            for case in request.cases:
                if case.id in request.skip:
                    continue
                store.write(Path(request.run_dir, "current.json"), case)
                if case in hangs:
                    raise launch.RanksFailed(ABSENT)
                done = Sample(case_id=case.id, case=case, status="ok", times_s=(1e-3,) * 3)
                store.append(request.run_dir, done)
                Path(request.run_dir, "current.json").unlink()
            store.finish(request.run_dir, "complete")

        starts, hangs = [], set()
        monkeypatch.setattr(launch, "run", run)
        store.write("cluster.toml", known.CPUS)
        options = {"kinds": ("all_reduce",), "sizes": "1K..64K:x2", "follow": False}
        self.cases = [case for case, _ in meshwise.measure("collectives", dry_run=True, **options)]
        self.measure = lambda **more: meshwise.measure("collectives", **options, **more)
        self.starts, self.hangs = starts, hangs

    def statuses(self) -> list[str]:
        _, samples, _ = store.load(store.newest("runs", "measure-collectives"))
        return [sample.status for sample in samples]

    def info(self) -> RunInfo:
        return store.read(store.newest("runs", "measure-collectives") / "run.json", RunInfo)

    def test_cases_are_recorded_and_the_ranks_started_again(self, measured):
        self.hangs |= {self.cases[1], self.cases[2], self.cases[4], self.cases[6]}
        run_dir = self.measure()
        assert self.statuses() == ["ok", "hung", "hung", "ok", "hung", "ok", "hung"]
        found = self.info().status, self.info().reason
        assert found == ("partial", "4 of 7 cases failed: 4 hung")
        assert [len(request.skip) for request in self.starts] == [0, 2, 3, 5]
        _, samples, _ = store.load(run_dir)
        assert samples[1].reason == ABSENT and not samples[1].times_s

    def test_what_hung_is_measured_again_as_often_as_asked(self, measured, monkeypatch):
        from meshwise.options.measure import ProfileOptions

        monkeypatch.setattr("meshwise.probe.cases.profile.cases", lambda *_: self.cases)
        self.hangs |= {self.cases[1], self.cases[4]}
        meshwise.measure(ProfileOptions(max_fail_retry=2))
        _, samples, _ = store.load(store.newest("runs", "measure-profile"))
        assert [s.status for s in samples].count("hung") == 2
        skipped = [len(request.skip) for request in self.starts]
        assert skipped == [0, 2, 5, *[5, 6] * 2]
        self.hangs.clear()
        meshwise.measure(ProfileOptions(max_fail_retry=1))
        assert [len(request.skip) for request in self.starts[7:]] == [0]

    def test_three_in_a_row_end_the_run(self, measured):
        from meshwise import launch

        self.hangs |= set(self.cases[2:])
        with pytest.raises(launch.RanksFailed, match=r"rank 1 \(in case x\) had not arrived"):
            self.measure()
        assert self.statuses() == ["ok", "ok", "hung", "hung", "hung"]
        assert (self.info().status, self.info().reason) == ("failed", ABSENT)
        assert len(self.starts) == 3

    def test_ranks_that_died_are_not_started_again(self, measured, monkeypatch):
        from meshwise import launch

        def run(target, request, **_):
            store.write(Path(request.run_dir, "current.json"), request.cases[0])
            raise launch.RanksFailed("rank 1 died of SIGKILL during case x")

        monkeypatch.setattr(launch, "run", run)
        with pytest.raises(launch.RanksFailed, match="SIGKILL"):
            self.measure()
        assert self.statuses() == [] and self.info().status == "failed"

    def test_under_a_launcher_the_run_ends_and_resume_passes_the_case_over(
        self, measured, monkeypatch
    ):
        from meshwise import launch

        self.hangs.add(self.cases[1])
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setenv("WORLD_SIZE", "2")
        with pytest.raises(launch.RanksFailed):
            self.measure()
        assert self.statuses() == ["ok"] and len(self.starts) == 1
        self.measure(resume=True)
        assert self.statuses() == ["ok", "hung", *["ok"] * 5]
        assert self.starts[1].skip == tuple(sorted(case.id for case in self.cases[:2]))

    def test_a_case_that_failed_before_can_hang(self, measured):
        self.measure()
        run_dir, case = store.newest("runs", "measure-collectives"), self.cases[3]
        error = Sample(case_id=case.id, case=case, status="error", reason="a hiccup")
        store.append(run_dir, error)
        self.hangs.add(case)
        self.measure(resume=True)
        assert self.statuses() == ["ok", "ok", "ok", "hung", "ok", "ok", "ok"]
        assert len(self.starts) == 2

    def test_the_command_line_says_so_with_exit_code_4(self, measured, capsys):
        from meshwise.cli import app

        self.hangs.add(self.cases[0])
        with pytest.raises(SystemExit) as ended:
            app.main(
                ["measure", "collectives", "all_reduce", "--sizes", "1K..64K:x2", "--as-measured"]
            )
        assert ended.value.code == 4
        out, err = capsys.readouterr()
        assert "hung" in out and "had not arrived" in out
        assert f"{ABSENT}; the ranks are started again for the other cases" in err
