"""The words of a report: its first screen, and the warnings above its tables."""

import re
from pathlib import Path

import msgspec
import pytest

import meshwise
from meshwise import store
from meshwise.pages import collectives, figures, html, svg, verdict
from meshwise.pages.steps import result
from meshwise.pages.verdict import Contents
from meshwise.spec import Case, Collective, DeviceState, Layout, Sample
from meshwise.spec.phases import PhaseSpan
from meshwise.spec.plan import StageTimes
from tests import sample_records as known

PAGES = Path(html.__file__).parent
STEADY = [1 + 0.001 * (i % 5) for i in range(30)]  # nearly independent of one another


def ran(plan, run_id, step_s, **changes):
    """A run whose steps take about ``step_s``."""
    info = msgspec.structs.replace(known.info("run", plan, run_id), **changes)
    return info, (known.step_sample(plan, [step_s * each for each in STEADY]),)


def contents(*runs, plan=None, costs=None) -> Contents:
    results = tuple(result(info, list(samples)) for info, samples in runs if info.plan)
    return Contents(plan or known.plan(), costs, results, runs)


def said(shown: Contents) -> dict[str, verdict.Answer]:
    return {one.question: one for one in verdict.answers(shown, verdict.problems(shown))}


def sure(rival_s: float, chosen_s: float = 0.010) -> verdict.Answer:
    chosen = ran(known.plan(), "chosen", chosen_s)
    rival = ran(known.plan(known.RIVAL, 0.012), "rival", rival_s)
    return said(contents(chosen, rival))["How sure is that?"]


@pytest.mark.parametrize(
    ("rival_s", "words", "tone"),
    [
        (0.020, "Of 2 layouts that ran, it won against 1.", "good"),
        (0.012, "Of 2 layouts that ran, it cannot be told apart from 1 (more", "unsure"),
        (0.005, f"It LOST: {known.RIVAL.name} ran 50.0 % faster.", "bad"),
    ],
)
def test_the_chosen_plan_wins_ties_or_loses(rival_s, words, tone):
    answer = sure(rival_s)
    assert words in answer.said[0] and answer.tone == tone


def test_a_step_is_inside_or_outside_the_interval_told():
    """0.009 to 0.011 s was told."""
    assert "inside the interval told before, 9.00 – 11.0 ms" in sure(0.012).said[0]
    outside = sure(0.02, chosen_s=0.013)
    assert "OUTSIDE the interval" in outside.said[0] and outside.tone == "unsure"
    assert "0 of 2 measured steps are inside their intervals" in outside.said[1]


def test_a_plan_that_has_not_run_says_so_with_its_interval():
    answer = said(contents())["How sure is that?"]
    assert "It has not been run" in answer.said[0] and "9.00 – 11.0 ms (±10.0 %)" in answer.said[0]


def test_a_plan_made_anew_after_its_run_is_told_apart():
    again = contents(ran(known.plan(step_time_s=0.0101), "chosen", 0.010))
    assert "plan.json was made anew since" in " ".join(said(again)["How sure is that?"].said)


def wrong(*runs) -> str:
    return " ".join(said(contents(*runs))["What is wrong here?"].said)


def test_a_busy_host_and_lowered_clocks_are_named():
    busy = known.PROVENANCE | {"host_load": 40.0, "host_cores": 64}
    text = wrong(ran(known.plan(), "chosen", 0.010, provenance=busy))
    assert (
        "The host was busy in 1 of 1 run: 40 processes at work on 64 cores before it began" in text
    )
    info, (sample,) = ran(known.plan(), "hot", 0.010)
    hot = DeviceState(rank=0, throttle=("hardware thermal slowdown", "power cap"))
    slowed = msgspec.structs.replace(sample, after=(hot,))
    assert "Clocks were lowered in 1 cases of hot: hardware thermal slowdown." in wrong(
        (info, (slowed,))
    )
    assert "lowered" not in wrong((info, (sample,)))  # at the power cap a GPU works as intended


def test_runs_that_ended_early_or_under_other_versions_are_named():
    text = wrong(ran(known.plan(), "early", 0.010, status="interrupted", reason="Ctrl-C"))
    assert "early is interrupted: Ctrl-C." in text
    newer = known.PROVENANCE | {"torch": "2.12.0"}
    text = wrong(ran(known.plan(), "a", 0.010), ran(known.plan(), "b", 0.010, provenance=newer))
    assert "Runs differ in their versions: torch 2.11.0 to 2.12.0." in text


def links(slow: tuple[int, int]) -> tuple:
    """Sends between all pairs of four ranks; one takes twice the time."""
    pairs = [(a, b) for a in range(4) for b in range(4) if a != b]
    samples = []
    for pair in pairs:
        op = Collective(kind="send", size_bytes=2**26, group_size=2, ranks=pair)
        time_s = 4e-4 if pair == slow else 2e-4
        case = Case(op=op, world_size=4)
        times = tuple(time_s * each for each in STEADY)
        samples.append(Sample(case_id=case.id, case=case, status="ok", times_s=times))
    return known.info(run_id="links"), tuple(samples)


def test_a_slow_link_is_named():
    text = wrong(links((2, 1)))
    assert "Slow link from rank 2 to 1: +100.0 % time." in text and text.count("Slow link") == 1


def test_the_first_screen_names_date_machine_software_and_command():
    facts = dict(verdict.facts(contents(ran(known.plan(), "chosen", 0.010))))
    assert facts["measured"] == "2026-01-01 00:00 UTC, 1 run"
    assert facts["machine"] == "4 x Accelerator X"
    assert "torch 2.11.0" in facts["software"] and facts["command"] == "meshwise run"


def test_answers_facts_and_links_come_before_the_first_figure():
    text = html.page(contents(ran(known.plan(), "chosen", 0.02)))
    first = text[: text.index("<section")]
    for word in (
        "What is this cluster?",
        "OUTSIDE",
        "torch 2.11.0",
        "2026-01-01",
        'href="#the-plan"',
    ):
        assert word in first
    targets = set(re.findall(r'id="([^"]+)"', text))
    assert set(re.findall(r'href="#([^"]+)"', first)) <= targets
    section = text[text.index('<section id="predicted-beside-measured">') :]
    assert section.index("1 of 1 measured steps are outside") < section.index("<table")


def luminance(colour: str) -> float:
    """Relative luminance (WCAG 2.2)."""
    digits = colour[1:] if len(colour) == 7 else "".join(2 * each for each in colour[1:])
    parts = [int(digits[at : at + 2], 16) / 255 for at in (0, 2, 4)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("theme", [0, 1])
def test_text_stands_out_from_its_ground_in_both_themes(theme):
    template = (PAGES / "report.html.j2").read_text() + svg.THEMES
    found = re.findall(r"--(\w+): light-dark\((#\w+), (#\w+)\)", template)
    colours = {name: luminance(both[theme]) for name, *both in found}

    def contrast(one: str, other: str) -> float:
        low, high = sorted((colours[one], colours[other]))
        return (high + 0.05) / (low + 0.05)

    for ground in ("paper", "card"):
        assert min(contrast(text, ground) for text in ("ink", "muted", "s0")) >= 4.5
    marks = {name: contrast(name, "paper") for name in colours if re.fullmatch(r"s\d", name)}
    assert min(marks.values()) >= 3, marks


def test_the_script_is_small():
    assert len((PAGES / "report.js").read_bytes()) <= 3 * 1024


def titles(figure: svg.Figure) -> list[str]:
    """Return the texts that a figure shows under the mouse."""
    return re.findall(r"<title>([^<]+)</title>", figure.svg)


def test_every_layout_of_the_frontier_is_named_where_the_mouse_is():
    shown = contents(ran(known.plan(), "chosen", 0.0104))
    drawn = figures.pareto(shown.plan, shown.results)
    assert drawn is not None
    plan = known.plan()
    assert f"{plan.layout.name}: predicted 10.0 ms, 4.0 GiB" in titles(drawn)
    assert f"{known.RIVAL.name}: predicted 12.0 ms, 3.0 GiB" in titles(drawn)


def test_a_step_outside_its_interval_is_red():
    inside, outside = (contents(ran(known.plan(), "a", s)).results for s in (0.0104, 0.02))
    drawn = [figures.against(found) for found in (inside, outside)]
    assert all(one is not None for one in drawn)
    assert "var(--s8)" not in drawn[0].svg and "var(--s8)" in drawn[1].svg
    assert "predicted 10.0 ms (9.00 – 11.0 ms), measured 20.0 ms" in titles(drawn[1])[0]


def test_phases_of_a_prediction_add_up_to_its_step():
    told = known.plan().prediction
    phases = figures.phases_of(told.time_parts)
    assert sum(phases.values()) == pytest.approx(told.step_time_s)
    assert phases["backward"] == pytest.approx(0.006) and phases["forward"] == pytest.approx(0.003)


@pytest.mark.parametrize(
    ("part", "phase"),
    [
        ("tensor-parallel communication", "exposed"), ("recompute layer", "backward"),
        ("data-parallel communication (exposed)", "exposed"), ("pipeline bubble", "bubble"),
        ("work slowed down by data-parallel communication", "other"),
        ("copies of weights and gradients", "other"), ("pipeline transfer", "exposed"),
    ],
)  # fmt: skip
def test_each_part_of_a_step_has_its_phase(part, phase):
    one = msgspec.structs.replace(known.plan().prediction.time_parts[0], name=part)
    assert figures.phases_of([one])[phase] == one.value


def test_the_map_of_links_rings_the_slow_one():
    info, samples = links((2, 1))
    sent = collectives.series(samples)
    odd = collectives.odd_pairs(sent)
    assert list(odd) == [(2, 1)]
    (rates,) = collectives.pair_rates(sent).values()
    drawn = figures.links(info.cluster, rates, odd)
    ringed = re.findall(r"<title>([^<]+)</title>(?:(?!<title>).)*var\(--s8\)", drawn.svg, re.DOTALL)
    assert ringed == ["2 to 1: 167"]
    told = figures.links(info.cluster, {}, ())
    assert set(titles(told)) == {f"{a} to {b}: 450" for a in range(4) for b in range(4) if a != b}


def test_a_measured_pipeline_is_drawn_below_the_predicted_one():
    plan = known.plan(Layout(pp=2, schedule="1f1b", microbatch_size=1, num_microbatches=8))
    times = (StageTimes(forward_s=1e-3, backward_s=2e-3, weights_s=0),) * 2
    told = msgspec.structs.replace(plan.prediction, stage_times=times)
    plan = msgspec.structs.replace(plan, prediction=told)
    spans = [
        PhaseSpan(
            rank=rank, stream="compute", name=f"{kind} {rank}.{number}",
            start_s=at, end_s=at + 0.002,
        )
        for rank in (0, 1)
        for number in range(8)
        for kind, at in (("F", 0.005 * number), ("B", 0.005 * number + 0.0025))
    ]  # fmt: skip
    drawn = figures.pipeline(plan, spans)
    assert ">predicted<" in drawn.svg and ">measured<" in drawn.svg
    said = titles(drawn)
    assert said.count("pp 0, forward of stage 0: 1.00 ms each") == 1
    assert said.count("pp 0, forward of stage 0: 2.00 ms each") == 1
    alone = figures.pipeline(plan)
    assert ">measured<" not in alone.svg and len(titles(alone)) == 4


def test_a_page_of_very_many_rows_shows_the_first_of_each_table_and_says_so():
    run = links((2, 1))
    samples = [
        known.sample(Collective(kind="all_reduce", size_bytes=8 * (at + 1), group_size=4), STEADY)
        for at in range(3000)
    ]
    text = html.page(contents((run[0], tuple(samples))))
    most = re.findall(r"The first (\d+) of 3,000 rows; `meshwise show` prints a run.+?s all", text)
    assert most and max(map(int, most)) < text.count("<tr>") < 2100


def test_figures_of_the_page_are_files_by_their_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    store.write("plan.json", known.plan())
    meshwise.report(figures=["phases.svg", "deep/links.png", "frontier.pdf"])
    assert "<text" in Path("phases.svg").read_text()
    assert Path("deep/links.png").read_bytes()[:4] == b"\x89PNG"
    assert Path("frontier.pdf").read_bytes()[:4] == b"%PDF"
    with pytest.raises(ValueError, match=r"'x.png': the page has no 'x'; it has phases, memory,"):
        meshwise.report(figures=["links.svg", "x.png"])
    assert not Path("links.svg").exists()
    with pytest.raises(ValueError, match=r"let its name end in .svg, .png or .pdf"):
        meshwise.report(figures=["links.gif"])
