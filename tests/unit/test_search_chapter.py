"""The figures of docs/search.md: its example worked out anew, by recursion and by the search."""

import itertools
import re
import runpy
from pathlib import Path

import pytest

import meshwise
from meshwise import search
from meshwise.search import inter_op_stages
from meshwise.search.inter_op import divide
from meshwise.search.inter_op_stages import frames
from meshwise.search.intra_op_parts import PartTable
from meshwise.search.pipeline import course
from meshwise.search.predict import staged
from meshwise.spec import Layout

ROOT = Path(__file__).parents[2]
CHAPTER = (ROOT / "docs/search.md").read_text()
PROSE = " ".join(CHAPTER.split())
DRAWN = runpy.run_path(str(ROOT / "tools/search_pictures.py"))
EXAMPLE, WORKLOAD, TOLD, CHOSEN = (DRAWN[of] for of in ("EXAMPLE", "WORKLOAD", "TOLD", "CHOSEN"))
LAST = (3, 2)  # of endings: from the fourth layer, on two devices
WHOLE = (0, 3)
MIB = 2**20


@pytest.fixture(scope="module")
def prices():
    return DRAWN["prices_of_example"]()


@pytest.fixture(scope="module")
def frame(prices):
    return DRAWN["frame_of_example"](prices)


@pytest.fixture(scope="module")
def endings(frame):
    return DRAWN["endings"](frame.ways, frame.table, frame.problems[0])


def ms(time_s):
    return f"{1e3 * time_s:.1f} ms"


def test_the_plan_is_the_one_shown(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sizes = "hidden=1024, layers=4, heads=16, ffn=4096, vocab=51200"
    asked = 'cluster="p3.16xlarge", gpus=3, global_batch_size=16, seq_len=1024'
    assert f'model = meshwise.Model(name="small", {sizes})\n' in CHAPTER
    assert f"meshwise.plan(model, {asked})\n" in CHAPTER
    where = {"cluster": "p3.16xlarge", "gpus": 3, "global_batch_size": 16, "seq_len": 1024}
    plan = meshwise.plan(EXAMPLE, **where)
    first, *others = [(plan.layout, plan.prediction, False)] + [
        (of.layout, of.prediction, of.ties) for of in plan.runners_up
    ]
    for layout, prediction, ties in (first, *others[:2]):
        step, word = ms(prediction.step_time_s), "ties" if ties else ""
        assert f"| `{layout.name}` | {step} | {word} |" in CHAPTER
    uniform, prediction, _ = next(of for of in others if not of[0].meshes)
    assert f"`{uniform.name}`, {1e3 * prediction.step_time_s:.0f} ms" in PROSE


def test_microbatches_are_those_named(prices):
    rows = [of.rows for of in frames(EXAMPLE, WORKLOAD, prices, DRAWN["DEVICES"])]
    assert "microbatches of {}, {}, {}, {} and {} sequences".format(*sorted(rows)) in PROSE


def test_the_head_is_as_heavy_as_said(frame):
    """On one device; a stage of the fourth layer with it beside one of the second."""
    pace_s, kind = frame.table.pace_s[frame.table.devices == 1][0], frame.table.kind
    layer_s, with_head_s = pace_s[kind[1, 2]], pace_s[kind[3, 4]]
    assert f"as heavy as {(with_head_s - layer_s) / layer_s:.1f} layers" in PROSE


def test_the_table_is_that_of_plain_recursion(frame, endings, prices):
    """Which drops nothing; and the table's first two are simulated the other way round."""
    problem, every = frame.problems[0], endings[WHOLE]
    found = divide(frame.table, problem)
    assert found[0].time_s == pytest.approx(min(each.time_s for each in every), rel=1e-12)
    layouts = [inter_op_stages._layout(of, frame.ways, problem, frame.rows) for of in found]
    assert layouts[:2] == [TOLD, CHOSEN]
    for layout, division in zip(layouts[:3], found, strict=False):
        step = ms(search.predict(EXAMPLE, WORKLOAD, layout, prices).step_time_s)
        assert f"| `{layout.name}` | {ms(division.time_s)} | {step} |" in CHAPTER
    behind = [of for (start, used), of in endings.items() if start > 0 < used < 3]
    kept = sum(len(DRAWN["unbeaten"](of)) for of in behind)
    assert f"There are {len(every)} pipelines" in PROSE
    assert f"Of {sum(map(len, behind))} endings {kept} are kept, and five" in PROSE
    assert len(found) == 5


def test_the_sums_are_those_written_out(frame, endings):
    """By the formulas of the chapter, from the entries of the table."""
    table, last = frame.table, min(endings[LAST], key=lambda each: each.time_s)
    whole = min(endings[WHOLE], key=lambda each: each.time_s)
    assert whole.stages[1:] == last.stages

    def entry(stage, hop_s):
        layout, start, stop = stage
        at = frame.ways.index(layout), table.kind[start, stop]
        return table.once_s[at] + hop_s, table.pace_s[at] + hop_s, table.late_s[at]

    hop_s = table.hops_s[frame.ways.index(whole.stages[0][0]), 0]
    (once, pace, late), (once_1, pace_1, late_1) = (
        entry(last.stages[0], 0),
        entry(whole.stages[0], hop_s),
    )
    busy = once + 3 * pace
    busy_1 = once_1 + max(busy, 3 * pace_1 + once - pace_1 / 3)
    step = max(busy + late + once_1 / 3, busy_1 + late_1, busy_1 + last.tied_s)
    assert [whole.busy_s, whole.time_s] == pytest.approx([busy_1, step])
    shown = [
        once, once, 3, pace, busy, busy, late, busy + late,
        once_1, once, once_1 + once, once_1, busy, 3, pace_1, once, pace_1, 3, busy_1,
        busy + late, once_1, 3, busy_1, late_1, step, step, busy_1, last.tied_s, step,
    ]  # fmt: skip
    block = CHAPTER.split("```\nlayer 4 ")[1].split("```")[0].replace("layers 1 to 3", "")
    numbers = [float(of) for of in re.findall(r"(?<!\w)\d+(?:\.\d+)?", block)]
    assert numbers == [round(1e3 * of, 2) if of != 3 else 3 for of in shown]
    assert f"{1e3 * pace_1:.2f} beside {1e3 * pace:.2f}" in PROSE


def test_the_pause_is_as_long_as_said(prices):
    """The first rank pauses before its last backward."""
    spans = course(*staged(EXAMPLE, WORKLOAD, TOLD, prices)).spans[0]
    pause_s = spans[-1].start_s - spans[-2].end_s
    assert f"waits {ms(pause_s)} for its last gradient" in PROSE


def test_the_parts_are_those_of_their_table(prices):
    """Every choice of the second stage, added up and compared with what the search takes."""
    layout = Layout(
        pp=2, schedule="1f1b", meshes=((1, 1), (1, 2)), microbatch_size=4, num_microbatches=4
    )
    table, choices = PartTable(EXAMPLE, WORKLOAD.seq_len, layout, prices, rank=1), []
    (streams, *_), edges = table.graph

    def of_step(cost):
        return 1e3 * cost[0]

    for at, stream in enumerate(table.streams):
        parts = [edges[0, part][at] for part in (1, 2)]
        more = [
            ", ".join([f"{of_step(of[0]):.0f}", *(f"{of_step(each):+.2f}" for each in of[1:])])
            for of in parts
        ]
        plain = streams[at]
        assert f"| {stream} | {of_step(plain):.2f} | {more[0]} | {more[1]} |" in CHAPTER
        words = [next(iter(each.values())) for part in table.parts for each in part]
        for i, j in itertools.product(*[range(len(of)) for of in parts]):
            cost = plain + parts[0][i] + parts[1][j]
            size = (cost[1] + plain[2]) / MIB
            choices.append((of_step(cost), size, stream, words[i], words[len(parts[0]) + j]))
    assert f"Of these {len(choices)} choices two labels are left" in PROSE
    kept = [of for of in choices if not any(o[0] <= of[0] and o[1] < of[1] for o in choices)]
    kept = [of for of in kept if not any(o[0] < of[0] and o[1] <= of[1] for o in choices)]
    assert {of[3:] for of in kept} == {("heads", "ffn")}
    assert {of[2] for of in kept} == {"whole", "seq", "batch"}  # the last as seq, to the byte
    shown = {f"{time:.2f} ms in {size:,.0f} MiB" for time, size, *_ in kept}
    assert len(shown) == 2 and all(each in PROSE for each in shown)
    (_, large), (_, small) = sorted((of[0], of[1]) for of in kept)[:2]
    assert f"by up to {large - small:.0f} MiB" in PROSE
    beside = prices.costs.memory_overhead_bytes
    for limit, stream in ((large, "whole"), (large - 1, "seq")):
        cuts, _ = table.best(beside + limit * MIB + 1)
        assert (cuts.stream, cuts.attention, cuts.feed_forward) == (stream, "heads", "ffn")


STORED = {  # what the chapter says, and what the records say
    "2026-11-28-regret": ("**Regret 0.0 % and 0.1 %**", "eleven plans", "second of ten"),
    "2026-11-27-validate": ("115 pairs", "59", "57"),
    "2026-11-28-planning": ("gpt-2.6b 1.6,\nllama-3-70b 4.9",),
    "2026-11-28-published": ("All 33 + 21 are legal, and none beats our best",),
}


@pytest.mark.parametrize("folder", STORED)
def test_stored_figures_are_in_the_records_linked(folder):
    records = (ROOT / "benchmarks" / folder / "README.md").read_text()
    assert f"(../benchmarks/{folder}/README.md)" in CHAPTER
    assert all(text in records for text in STORED[folder])


def test_links_lead_somewhere():
    links = re.findall(r"\]\(([^)#]+)", CHAPTER)
    assert len(links) > 20
    assert all((ROOT / "docs" / link).exists() for link in links)
