"""Comparisons of launches, baselines and histories: the verdicts of cases whose answer is known,
what warns, what is caught, what is said. The statistics are in test_stats."""

import io
import json
import re
from pathlib import Path

import msgspec
import numpy as np
import pytest

import meshwise
from meshwise import store
from meshwise.cli import app
from meshwise.pages import compare, history, table
from meshwise.spec import Case, DeviceState, Gemm
from meshwise.verbs import compare as verb
from tests import sample_records as known

OTHER = Gemm(m=8, n=8, k=8)
CHAPTER = (Path(__file__).parents[2] / "docs/compare.md").read_text()
LATER = {"torch": "2.12.0", "host_load": 3.0, "host_cores": 4}


def launch(factor=1.0, *, ops=(known.GEMM,), number=0, changes=None, provenance=None, **sample):
    """A run whose cases take about ``factor`` ms; its number makes it differ by up to 0.2 %."""
    own = factor * 1e-3 * (1 + 5e-4 * (number % 4))
    times = [own * (1 + 1e-3 * (i % 3)) for i in range(9)]
    info = known.info(run_id=f"2026010{number // 10}T0000{number % 10:02}-measure-gemm-x")
    info = msgspec.structs.replace(info, started=info.run_id[:15], **(changes or {}))
    info = msgspec.structs.replace(info, provenance=info.provenance | (provenance or {}))
    return info, [known.sample(op, times, **sample) for op in ops]


def launches(factor=1.0, n=6, **how):
    return [launch(factor, number=number, **how) for number in range(n)]


def compared(a, b, **options):
    return compare.compare(("a", a), ("b", b), **options)


def rendered(shown) -> str:
    stream = io.StringIO()
    table.write(shown, stream)
    return stream.getvalue()


def shown_comparison():
    a, b = launches(ops=(known.GEMM, OTHER)), launches(1.1, provenance=LATER)
    for (_, old), (_, new) in zip(a, b, strict=True):
        new.append(old[1])
        for side in (old, new):
            side.append(known.sample(known.SAMPLES[2].case.op, [1e-4] * 8))
    sides = ("main (6 launches)", a), ("runs (6 launches)", b)
    return compare.compare(*sides, fail_if=["slower>5%", "faster>50%"])


def test_the_tables_are_as_recorded_and_as_the_chapter_shows(golden):
    text = rendered(compare.tables(shown_comparison()))
    golden("compare.txt", text)
    assert f"```\n{text.strip()}\n```" in CHAPTER


def test_the_markdown_is_as_recorded(golden):
    golden("compare.md", table.markdown(compare.tables(shown_comparison())) + "\n")


def test_markdown_keeps_names_text():
    hostile = table.Table("a|b", ("`x`",), (("<img src=x>\n| c",),), ("*not bold*",))
    assert table.markdown([hostile]).splitlines() == [
        r"**a\|b**", "", r"| \`x\` |", "| :-- |", r"| \<img src=x\> \| c |", "", r"- \*not bold\*",
    ]  # fmt: skip


class TestVerdicts:
    def test_launches_of_two_sides(self):
        found = compared(launches(), launches(1.1, n=7))
        (case,) = found.cases
        assert case.verdict == "slower" and case.ratio == found.ratio == pytest.approx(
            1.1, rel=1e-3
        )
        assert (case.a_launches, case.b_launches) == (6, 7) and found.warnings == ()
        assert compared(launches(1.1), launches()).cases[0].verdict == "faster"
        assert compared(launches(), launches()).cases[0].verdict == "same"

    def test_one_launch_is_told_and_unclear_unless_far_off(self):
        found = compared(launches(n=1), launches(1.1, n=1))
        assert found.cases[0].verdict == "unclear" and "one launch" in found.warnings[0]
        assert compared(launches(n=1), launches(2.0, n=1)).cases[0].verdict == "slower"
        assert "few launches, a 2 and b 6" in compared(launches(n=2), launches()).warnings[0]

    def test_means_of_all_and_of_each_kind(self):
        a, b = launches(ops=(known.GEMM, OTHER)), launches(ops=(known.GEMM, OTHER))
        for (_, old), (_, new) in zip(a, b, strict=True):
            old.append(known.sample(known.SAMPLES[2].case.op, [1e-4] * 8))
            new.append(known.sample(known.SAMPLES[2].case.op, [8e-4] * 8))
        found = compared(a, b)
        assert found.ratio == pytest.approx(2.0)
        assert [(g.kind, g.num_cases) for g in found.groups] == [("gemm", 2), ("all_reduce", 1)]
        assert found.groups[1].ratio == pytest.approx(8.0)

    def test_a_case_that_some_launches_lack(self):
        a, b = launches(ops=(known.GEMM, OTHER)), launches()
        b[2][1].append(known.sample(OTHER, [1e-3] * 8))
        found = compared(a, b)
        assert [(c.a_launches, c.b_launches) for c in found.cases] == [(6, 6), (6, 1)]
        assert found.missing == 0 and compared(a, launches()).missing == 1

    def test_the_threshold(self):
        assert compared(launches(), launches(1.02)).cases[0].verdict == "slower"
        assert compared(launches(), launches(1.02), threshold=0.05).cases[0].verdict == "same"

    def test_other_methods_and_regimes_are_refused_unless_forced(self):
        with pytest.raises(ValueError, match=r"method 1 and b by method 2.*--force"):
            compared(launches(), launches(method_version=2))
        with pytest.raises(ValueError, match="method 1 and 2 and b by method 1"):
            compared([*launches(), launch(method_version=2)], launches())
        found = compared(launches(), launches(method_version=2), force=True)
        assert found.cases[0].verdict == "same" and found.warnings == (
            "timing methods differ: 1 and 2",
        )
        with pytest.raises(ValueError, match=r"measured cold and b warm.*--force"):
            compared(launches(regime="cold"), launches())
        assert compared(launches(regime="cold"), launches(), force=True).ratio == 1

    def test_nothing_in_common(self):
        with pytest.raises(ValueError, match="share no case"):
            compared(launches(), launches(ops=(OTHER,)))


class TestLayouts:
    def steps(self, plan, **changes):
        info = msgspec.structs.replace(known.info("run", plan), **changes)
        return [(info, [known.step_sample(plan, [0.01] * 8)])] * 2

    def test_steps_of_two_layouts_of_one_model(self):
        a, b = self.steps(known.plan()), self.steps(known.plan(known.RIVAL))
        found = compared(a, b)
        assert found.cases[0].a_layout == known.LAYOUT and found.missing == 0
        shown = rendered(compare.tables(found))
        assert known.RIVAL.name in shown and f"(a: {known.LAYOUT.name})" in shown
        same = compared(a, a)
        assert same.cases[0].a_layout is None and "(a: " not in rendered(compare.tables(same))
        other = msgspec.structs.replace(known.CLUSTER, name="another")
        with pytest.raises(ValueError, match="share no case"):
            compared(a, self.steps(known.plan(known.RIVAL), cluster=other))

    @pytest.mark.parametrize(
        "other",
        [
            {"model": msgspec.structs.replace(known.MODEL, layers=5)},
            {"workload": msgspec.structs.replace(known.WORKLOAD, seq_len=256)},
            {"dtype": "fp32"},
        ],
    )
    def test_steps_that_differ_in_more_are_refused(self, other):
        (info, (step,)), _ = self.steps(known.plan())
        op = msgspec.structs.replace(step.case.op, layout=known.RIVAL, **other)
        with pytest.raises(ValueError, match="share no case"):
            compared([(info, [step])], [(info, [known.sample(op, [0.01] * 8)])])


class TestGates:
    @pytest.mark.parametrize(
        ("gates", "fails"),
        [
            (["slower>5%"], True), (["slower > 120 %"], False), (["faster>1%"], False), ([], False),
            (["faster>1%", "slower>5%"], True),
        ],
    )  # fmt: skip
    def test_any_of_several(self, gates, fails):
        assert bool(compared(launches(), launches(2.0), fail_if=gates).failed) == fails

    def test_faster(self):
        assert compared(launches(2.0), launches(), fail_if=["faster>40%"]).failed
        assert not compared(launches(2.0), launches(), fail_if=["faster>60%"]).failed

    @pytest.mark.parametrize("gate", ["slower", "slower>5", "__import__('os')", "worse>5%"])
    def test_one_that_is_not_understood(self, gate):
        with pytest.raises(ValueError, match="write it like 'slower>5%'"):
            compared(launches(), launches(), fail_if=[gate])

    def test_what_broke_in_one_launch(self):
        a, b = launches(ops=(known.GEMM, OTHER)), launches(ops=(known.GEMM, OTHER))
        case = Case(op=OTHER, world_size=4)
        b[3][1][1] = msgspec.structs.replace(
            b[3][1][1], status="oom", reason="large", times_s=(), rank_times_s=()
        )
        assert compared(a, b, fail_if=["slower>5%"]).failed == (case.id,)
        assert compared(a, a, fail_if=["slower>5%"]).failed == ()


class TestWarnings:
    @pytest.mark.parametrize(
        ("provenance", "said"),
        [
            ({"torch": "2.12.0"}, "conditions differ: torch 2.11.0 to 2.12.0"),
            ({"nccl": "2.29.0", "driver": "1"}, "conditions differ: nccl 2.28.9 to 2.29.0"),
            ({"cpu": "another"}, None),
            ({"settings": {}}, "conditions differ: settings of NCCL_NVLS_ENABLE"),
            ({"gpus": [{"uuid_hash": "01"}] * 4}, "conditions differ: other GPUs"),
            ({"host_load": 8.0, "host_cores": 8},
             "b: host busy in 6 of 6 launches: 8 processes at work on 8 cores before it began"),
        ],
    )  # fmt: skip
    def test_of_provenance(self, provenance, said):
        found = compared(launches(), launches(provenance=provenance)).warnings
        assert found == ((said,) if said else ())

    def test_of_another_machine_also_within_a_side(self):
        device = msgspec.structs.replace(known.CLUSTER.device, name="Accelerator Y")
        tier = msgspec.structs.replace(known.CLUSTER.tiers[0], num_devices=8)
        cluster = msgspec.structs.replace(
            known.CLUSTER, device=device, num_hosts=2, tiers=(*known.CLUSTER.tiers[:-1], tier)
        )
        other = launch(number=9, changes={"cluster": cluster})
        said = "conditions differ: device Accelerator X to Accelerator Y, hosts 1 to 2"
        assert compared([*launches(), other], launches()).warnings == (said,)

    def test_of_clocks_and_throttling(self):
        b = launches()
        slow = DeviceState(sm_clock_mhz=1800, throttle=("hardware slowdown",))
        for _, samples in b:
            samples[0] = msgspec.structs.replace(samples[0], after=(slow,))
        assert compared(launches(), b).warnings == (
            "clocks differ: a 1980 MHz, b 1800 MHz, medians after the cases",
            "b: throttled in 6 of 6 launches: hardware slowdown",
        )
        for _, samples in b:
            samples[0] = msgspec.structs.replace(samples[0], after=())
        assert compared(launches(), b).warnings == ("clocks were recorded on one side only",)

    def test_they_stand_above_the_table(self):
        shown = rendered(compare.tables(shown_comparison()))
        assert shown.index("torch 2.11.0 to 2.12.0") < shown.index("99 % interval")


@pytest.fixture
def stored(here):
    """Six runs, then six slower ones."""
    for number in range(12):
        info, samples = launch(1.0 if number < 6 else 1.1, number=number)
        known.write_run(Path("runs"), info, samples)
    return [path.name for path in store.runs_of("runs")]


def call(*words: str) -> int:
    with pytest.raises(SystemExit) as stop:
        app.main(list(words))
    return int(stop.value.code)


class TestSides:
    def test_every_way_to_name_launches(self, stored):
        old, new = ([f"runs/{name}" for name in names] for names in (stored[:6], stored[6:]))
        ways = (
            (old, new), (",".join(old), ", ".join(new)), (tuple(map(Path, old)), new),
            ("runs/20260100T*-[a-z]*", new),
        )  # fmt: skip
        for a, b in ways[:3]:
            assert meshwise.compare(a, b).cases[0].verdict == "slower"
        assert len(verb.launches("runs")) == len(verb.launches("runs/*")) == 12
        assert verb.launches(f"{old[0]}/samples.jsonl") == [Path(old[0])]
        assert len(verb.launches([old[0], old[0], f"./{old[0]}"])) == 1

    def test_a_baseline_by_name(self, stored, capsys):
        assert call("compare", "--save", "main", *(f"runs/{name}" for name in stored[:6])) == 0
        assert capsys.readouterr().out == "runs/.baselines/main.json\n"
        kept = json.loads(Path("runs/.baselines/main.json").read_text())
        assert kept["schema_version"] == 1 and kept["runs"] == stored[:6]
        assert call("compare", "main", "--fail-if", "slower>5%,faster>5%") == 3  # what is newer
        assert "b = runs (6 launches)" in capsys.readouterr().out
        assert call("compare", "main", *(f"runs/{name}" for name in stored[6:])) == 0
        assert "main (6 launches)" in capsys.readouterr().out
        Path("runs").rename("kept")
        assert call("compare", "main", "--runs", "kept", "--fail-if", "slower>20%") == 0
        assert call("compare", "main", "kept/none", "--runs", "kept") == 2
        assert "baselines here: main" in capsys.readouterr().err

    @pytest.mark.parametrize("name", ["", "../x", "a,b", "a/b", "-x", "x" * 101])
    def test_a_name_that_is_none(self, stored, name):
        with pytest.raises(ValueError, match="save = "):
            verb.save(name, "runs")

    @pytest.mark.parametrize(
        ("words", "said"),
        [
            ("", "no run is named"), ("--save x", "no run is named"),
            ("runs/* runs/a runs/b", "put commas between the launches"),
            ("runs", "no run under runs is newer"),
            ("runs runs --threshold 0", "--threshold = '0': must be a share, as 2% or 0.02"),
            ("runs runs --threshold nan", "--threshold = 'nan': must be a share"),
            ("runs runs --out x.svg", "only --history draws"),
            ("runs --history --fail-if slower>5%", "compare nothing"),
            ("runs runs --md --json", "leave one of them out"),
            ("runs/a*,runs", "runs/a* is not a run directory"),
        ],
    )  # fmt: skip
    def test_what_is_refused(self, stored, words, said, capsys):
        assert call("compare", *words.split()) == 2
        assert said in capsys.readouterr().err

    def test_a_caught_gate_is_exit_code_3(self, stored, capsys):
        sides = ["runs/2026010*T000[0]0[0-5]*", ",".join(f"runs/{name}" for name in stored[6:])]
        assert call("compare", *sides, "--fail-if", "slower>5%") == 3
        assert call("compare", *sides, "--fail-if", "slower>5%", "--fail-if", "faster>1%") == 3
        assert call("compare", *sides, "--fail-if", "slower>30%") == 0
        assert call("compare", *sides, "--md") == 0
        assert "| :-- | :-- | --: |" in capsys.readouterr().out
        assert call("compare", *sides, "--json") == 0
        found = msgspec.json.decode(capsys.readouterr().out, type=compare.Comparison)
        assert found.cases[0].verdict == "slower"


class TestHistory:
    def runs(self, here):
        rng = np.random.default_rng(8)
        for number in range(30):
            factor = (1.08 if number >= 18 else 1.0) * float(np.exp(0.003 * rng.standard_normal()))
            torch = {"torch": "2.12.0"} if number >= 18 else {}
            known.write_run(
                Path("runs"),
                *launch(factor, number=number, ops=(known.GEMM, OTHER), provenance=torch),
            )

    def test_a_change_is_found_said_and_drawn(self, here, capsys):
        self.runs(here)
        names = [path.name for path in store.runs_of("runs")]
        assert call("compare", "--history", "--out", "history.html") == 0
        out = capsys.readouterr().out
        assert out.index("torch 2.11.0 to 2.12.0") < out.index("2 changes in 2 cases over 30 runs")
        assert out.count(names[18]) >= 3 and re.search(r"\+[78]\.\d %", out)
        page = Path("history.html").read_text()
        assert "<svg" in page and "<script src" not in page and names[18] in page
        assert call("compare", "--history", "runs/*", "--out", "history.svg") == 0
        assert Path("history.svg").read_text().startswith("<svg")
        capsys.readouterr()
        assert call("compare", "--history", *(f"runs/{name}" for name in names[:18]), "--json") == 0
        found = msgspec.json.decode(capsys.readouterr().out, type=history.History)
        assert [one.changes for one in found.series] == [(), ()] and found.runs == tuple(names[:18])

    def test_the_order_is_that_of_time(self):
        found = history.history(list(reversed(launches(n=4))))
        assert list(found.runs) == sorted(found.runs) and found.notes == ()

    def test_one_run_has_none(self):
        with pytest.raises(ValueError, match="no case was finished by two runs"):
            history.history(launches(n=1))
