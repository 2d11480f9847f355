"""Tables against golden files, the page against what it promises, numbers against hand counts."""

import functools
import io
import re
import shlex
import statistics
import xml.etree.ElementTree as ET
from html.parser import HTMLParser

import msgspec
import pytest

import meshwise
from meshwise import search
from meshwise.pages import (
    answers,
    health,
    html,
    prices,
    samples,
    show,
    steps,
    svg,
    table,
    tables,
)
from meshwise.pages.html import Contents
from meshwise.pages.steps import result
from meshwise.prices import unmeasured
from meshwise.spec import Collective, Elementwise, Layout, Removal, Workload
from meshwise.spec.checkpoint import Checkpoint, Stored, Whole
from meshwise.spec.phases import Phases, RankPhases
from tests import sample_records as known

STEPS_S = [0.0100, 0.0102, 0.0104, 0.0106, 0.0108, 0.0110, 0.0112]


def rendered(shown) -> str:
    stream = io.StringIO()
    table.write(shown, stream)
    return stream.getvalue()


def results():
    """The plan within its interval, its rival outside, a third that ran out of memory."""
    good, rival = known.plan(), known.plan(known.RIVAL, 0.008)
    step = known.step_sample(good, STEPS_S, peak_bytes=float(4.1 * 2**30), check_loss_error=2e-6)
    slow = known.step_sample(rival, [0.0125] * 6, peak_bytes=float(2**30))
    oom = msgspec.structs.replace(
        known.step_sample(good, [1.0]), status="oom", times_s=(), reason="CUDA out of memory"
    )
    return (
        result(known.info("run", good, "run-1"), [step]),
        result(known.info("run", rival, "run-2"), [slow]),
        result(known.info("run", good, "run-3"), [oom]),
    )


TABLES = {
    "cluster": lambda: tables.cluster(known.CLUSTER),
    "costs": lambda: prices.of(known.COSTS),
    "plan": lambda: tables.plan(known.plan()),
    "answers": lambda: answers.of(known.answered()),
    "steps": lambda: steps.tables(results()),
    "run": lambda: samples.run(known.info(), known.SAMPLES),
    "cases": lambda: [samples.listing([(s.case, 0.25) for s in known.SAMPLES])],
}


@pytest.mark.parametrize("name", TABLES)
def test_a_table_is_as_recorded(name, golden):
    golden(f"{name}.txt", rendered(TABLES[name]()))


class Terminal(io.StringIO):
    def isatty(self):
        return True


def on_terminal(columns, tables, monkeypatch):
    for key, value in {"COLUMNS": str(columns), "TERM": "xterm"}.items():
        monkeypatch.setenv(key, value)
    terminal = Terminal()
    table.write(tables, terminal)
    return re.sub(r"\x1b\[[\d;]*m", "", terminal.getvalue())


@pytest.mark.parametrize("columns", [50, 80])
@pytest.mark.parametrize("name", TABLES)
def test_tables_fit_a_terminal(monkeypatch, name, columns):
    """Whole: every cell is there, in pieces where it is of words."""
    for one in TABLES[name]():
        text = on_terminal(columns, [one], monkeypatch)
        assert max(map(len, text.splitlines())) <= columns, text
        for row in one.rows:
            for cell in row[one.left :]:
                assert cell in text
            for word in " ".join(row[: one.left]).split():
                assert word in text or len(word) > 12, word


def test_on_a_narrow_terminal_a_wide_table_is_read_row_by_row(monkeypatch):
    rows = (("1", "dp8 zero2 mb8x1", "22.8 ms", "2.87 M"), ("2", "dp4 tp2", "23.0 ms", "2.85 M"))
    wide = table.Table("Layouts", ("", "layout", "step of the model", "tokens/s"), rows, left=2)
    text = on_terminal(50, [wide], monkeypatch)
    assert (
        text
        == """\
Layouts
1
layout              dp8 zero2 mb8x1
step of the model   22.8 ms
tokens/s            2.87 M

2
layout              dp4 tp2
step of the model   23.0 ms
tokens/s            2.85 M

"""
    )
    assert "layout            step" in on_terminal(table.NARROW, [wide], monkeypatch)


@pytest.mark.parametrize("name", TABLES)
def test_a_table_fits_a_log_without_colour(name, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "")
    text = rendered(TABLES[name]())
    assert max(map(len, text.splitlines())) <= table.WIDTH
    assert "\x1b" not in text


def test_predicted_beside_measured_by_hand():
    good, rival, failed = results()
    assert good.time.measured == statistics.median(STEPS_S)
    assert good.time.error == pytest.approx(0.010 / 0.0106 - 1)
    assert good.time.within and not rival.time.within
    assert good.mean_s == pytest.approx(statistics.mean(STEPS_S))
    assert good.std_s == pytest.approx(statistics.stdev(STEPS_S))
    # torchtitan's count, by hand: 4 layers of 12h^2 + 13h, final norm, tied embedding 1024 x 1024
    parameters = 4 * (12 * 1024**2 + 13 * 1024) + 2 * 1024 + 1024 * 1024
    flops = 8 * 512 * (6 * parameters + 12 * 4 * 1024 * 512)
    assert good.num_parameters == parameters + 1024 * 1024  # and the positions
    assert good.flops_per_device_per_s == pytest.approx(flops / 0.0106 / 4)
    assert good.mfu == pytest.approx(flops / 0.0106 / 4 / 1e15)
    assert good.memory.error == pytest.approx(4 / 4.1 - 1)
    assert failed.time is None and failed.reason == "CUDA out of memory"


def test_without_a_known_peak_there_is_no_mfu():
    plan = known.plan()
    device = msgspec.structs.replace(known.CLUSTER.device, peak_flops={}, kind="cpu")
    cluster = msgspec.structs.replace(known.CLUSTER, device=device)
    plan = msgspec.structs.replace(plan, cluster=cluster)
    found = result(known.info("run", plan), [known.step_sample(plan, STEPS_S, peak_bytes=1.0)])
    assert found.mfu is None
    assert found.memory_kind == "high-water mark of tensor bytes"


def test_images_are_not_called_tokens():
    """In the plan, its page before and after it ran, and what show lists; JSON keys stay."""
    model, size = known.IMAGES, Workload(global_batch_size=8, seq_len=1)
    layout = Layout(dp=4, microbatch_size=2)
    plan = search.given(model, size, unmeasured(known.CLUSTER), layout)
    step = known.step_sample(plan, STEPS_S)
    info = known.info("run", plan)
    ran = result(info, [step])
    assert ran.tokens_per_s == pytest.approx(8 / 0.0106)
    shown = [tables.plan(plan), steps.tables([ran]), samples.run(info, [step])]
    for text in [
        *map(rendered, shown[:2]),
        *(html.page(Contents(plan, None, x, ())) for x in ((), (ran,))),
    ]:
        assert "images/s" in text and "convolutions and the head" in text
        assert "token" not in text
    assert "755 images/s" in rendered(shown[2]) and "token" not in rendered(shown[2])


def full() -> Contents:
    return Contents(
        plan=known.plan(),
        costs=known.COSTS,
        results=results(),
        runs=((known.info(), known.SAMPLES),),
    )


PAGES = {
    "everything": full,
    "only a plan": lambda: Contents(known.plan(), None, (), ()),
    "only prices": lambda: Contents(None, known.COSTS, (), ()),
    "only runs": lambda: Contents(None, None, results(), ((known.info(), known.SAMPLES),)),
    "only a failed run": lambda: Contents(known.plan(), None, results()[2:], ()),
}


@functools.cache
def page(name: str) -> str:
    return html.page(PAGES[name]())


class Tags(HTMLParser):
    """Every element is closed in order; collects ids and attributes that could load something."""

    VOID = ("meta", "br", "img", "link", "input", "hr")

    def __init__(self):
        super().__init__()
        self.open, self.ids, self.references, self.tags = [], [], [], []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        if tag not in self.VOID:
            self.open.append(tag)
        for name, value in attributes:
            if name == "id":
                self.ids.append(value)
            if name in ("src", "href", "xlink:href", "data", "action"):
                self.references.append(value)

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


@pytest.mark.parametrize("name", PAGES)
def test_the_page_is_whole_and_self_contained(name):
    text = page(name)
    tags = Tags()
    tags.feed(text)
    assert tags.open == []
    assert not {"link", "img", "iframe"} & set(tags.tags)
    assert tags.tags.count("script") == 1
    assert "http" not in text and "@import" not in text
    assert all(reference.startswith("#") for reference in tags.references)
    assert len(tags.ids) == len(set(tags.ids))
    targets = set(re.findall(r"url\(#([^)]*)\)", text)) | {r[1:] for r in tags.references}
    assert targets <= set(tags.ids)


def test_the_page_shows_every_part():
    text = page("everything")
    for word in (
        "all_gather", "all_reduce", "products", "memory", "blocks", "the interval told",
        "dp4 zero2 mb2x1", "tp = 3 does not divide heads = 16", "rank 0 needs 3.1 GiB more",
        "torch 2.11.0", "1980", "power cap", "CUDA out of memory", "busbw", "torchtitan",
        "backward bf16 tp1", "3.4 %",
    ):  # fmt: skip
        assert word.lower() in text.lower(), word
    # intervals, phases; memory, frontier; three of single prices, two collectives; links
    assert text.count("<svg") == 2 + 2 + 3 + 2 + 1


def test_what_is_missing_is_a_sentence():
    assert "meshwise run" in page("only a plan")
    assert "meshwise calibrate" in page("only a plan")
    assert "meshwise plan" in page("only prices")


def test_names_are_text_and_never_markup():
    nasty = "<script>alert('$x$')</script>&"
    plan = known.plan()
    model = msgspec.structs.replace(plan.model, name=nasty)
    tier = msgspec.structs.replace(known.CLUSTER.tiers[0], name=nasty)
    cluster = msgspec.structs.replace(known.CLUSTER, name=nasty, tiers=(tier,))
    curve = known.curve(Collective(kind="all_gather", size_bytes=8, group_size=4), 1e-5, 1e9)
    costs = msgspec.structs.replace(known.COSTS, cluster=cluster, curves=(curve,))
    plan = msgspec.structs.replace(plan, model=model, cluster=cluster)
    done = result(known.info("run", plan), [known.step_sample(plan, STEPS_S, peak_bytes=1e9)])
    text = html.page(Contents(plan, costs, (done,), ()))
    assert text.count("<script") == 1
    assert text.count("&lt;script&gt;") >= 3


def test_a_figure_is_well_formed_and_takes_its_colours_from_the_page():
    def paint(axes):
        axes.plot([1, 2], [3, 4], color=svg.colour(3), label="a $b & <c>")
        axes.legend()

    found = svg.draw('a "figure"', paint)
    ET.fromstring(found.svg.replace("xlink:href", "href"))
    assert "var(--s3)" in found.svg and "var(--ink)" in found.svg
    assert not re.search(r"#0[0-9a-f]{5}\b", found.svg)
    assert "a $b &amp; &lt;c&gt;" in found.svg
    assert found == svg.draw('a "figure"', paint)  # the same bytes every time


def test_warnings_keep_the_farthest_size_of_each_price():
    beyond = "x beyond the largest measured size"
    notes = (f"a/4: 5.0 {beyond}", "other", f"b/2: 6.5 {beyond}", f"a/4: 12.0 {beyond}", "other")
    (shown,) = tables.warnings(notes)
    assert shown.rows == ((f"a/4: 12.0 {beyond}",), ("other",), (f"b/2: 6.5 {beyond}",))
    assert tables.warnings(()) == []
    text = page("only a plan")
    assert "Warnings" not in text and "measure profile; --resume" in text
    section = text[text.index('<section id="the-plan">') :]
    assert section.index("4.8 x beyond") < section.index("<table")


def test_layouts_that_all_fit_and_layouts_that_are_the_same():
    same = Removal(constraint="zero 1 is zero 2 when there is one microbatch", count=3)
    plan = msgspec.structs.replace(known.plan(), nearest_infeasible=None, removed=(same,))
    text = rendered(tables.plan(plan))
    assert "All fit in memory." in text and "Nearest" not in text
    assert "same program as another layout: zero 1 is zero 2" in text


def test_prices_that_were_not_measured_are_not_numbers():
    curve = msgspec.structs.replace(
        known.COSTS.curves[0], law="lines", end_s_per_byte=0.0, end_range_s_per_byte=(0.0, 0.0)
    )
    bare = msgspec.structs.replace(known.COSTS, factors=(), curves=(curve,))
    curves, _, _, blocks = prices.of(bare)
    assert curves.rows[0][5] == "–"
    assert rendered([blocks]) == ("No block was measured; plans add operations up as they are.\n\n")
    assert "No block was measured" in html.page(Contents(None, bare, (), ()))


def test_an_interval_from_nothing_on_has_no_unit_of_its_own():
    assert table.interval(0.0, 3.44) == "0 – 3.44 s"
    assert table.interval(0.868, 2.69) == "868 ms – 2.69 s"


def test_a_machine_without_a_specification_has_rates_alone():
    info = msgspec.structs.replace(known.info(), cluster=known.CPUS, world_size=2)
    copy = Elementwise(kind="copy", read_bytes=2**20, write_bytes=2**20)
    rates = health.tables(info, [known.sample(copy, [1e-3] * 8, ranks=2)])[-1]
    assert rates.title == "Rates"
    assert rates.columns == ("", "slowest", "at", "median", "baseline", "time")
    # read and written as the case is named: 2 MiB in 1 ms on the slower rank
    assert rates.rows[0][:3] == ("copy 2.0 MiB", "2.10 GB/s", "rank 1")
    assert all("specification" not in line for line in rates.legend)


def test_any_record_can_be_shown():
    plan = known.plan()
    ran = show.StoredRun(
        info=known.info("run", plan), samples=(known.step_sample(plan, STEPS_S, peak_bytes=1.0),)
    )
    measured = show.StoredRun(info=known.info(), samples=known.SAMPLES)
    for record in (known.CLUSTER, known.COSTS, plan, ran, measured):
        assert rendered(show.of(record))


def test_phases_of_every_rank_and_their_ends():
    times_s = dict.fromkeys(("bubble_s", "other_s", "communication_s"), 0.0)
    ranks = tuple(
        RankPhases(rank=rank, forward_s=0.001 * (rank + 1), backward_s=0.005 - 0.001 * rank,
                   optimizer_s=0.001, exposed_communication_s=0.003, **times_s)
        for rank in range(3)
    )  # fmt: skip
    (shown,) = show.of(Phases(step_s=0.010, profiled_step_s=0.012, ranks=ranks))
    assert "10.0 ms" in shown.title and "12.0 ms under the profiler" in shown.title
    assert [row[0] for row in shown.rows] == ["0", "1", "2", "least", "most"]
    assert shown.rows[3][:3] == ("least", "1.00 ms", "3.00 ms")
    assert shown.rows[4][:3] == ("most", "3.00 ms", "5.00 ms")


CHECKPOINT = Checkpoint(
    step=8, seed=3, layout="dp2 zero2 mb1x1", optimizer="AdamW", model=known.MODEL,
    workload=Workload(global_batch_size=2, seq_len=32), data="step-8-bd407210",
    files={
        "a.safetensors": Stored(bytes=2**30, hashes="0" * 16),
        "b.safetensors": Stored(bytes=2**29, hashes="1" * 16),
    },
    tensors={
        "head.weight": Whole(shape=(100, 20), dtype="float32"),
        "head.bias": Whole(shape=(100,), dtype="float32"),
        "optimizer.exp_avg.head.weight": Whole(shape=(100, 20), dtype="float32"),
    },
    numbers={},
)  # fmt: skip


def test_a_checkpoint_is_told_from_its_json(tmp_path):
    path = tmp_path / "checkpoint.json"
    path.write_bytes(msgspec.json.encode(CHECKPOINT.sealed()))
    (shown,) = show.of(meshwise.show(path))
    told = dict(shown.rows)
    assert told["next step"] == "8" and told["batch"] == "2 x 32, seed 3"
    assert told["weights"] == "2100 elements in 2 tensors"
    assert told["optimizer state"] == "1 tensors"
    assert told["files"] == "2 in step-8-bd407210/, 1.5 GiB"
    _, damaged = show.of(meshwise.show(tmp_path))
    assert [row[:2] for row in damaged.rows] == [
        ("a.safetensors", "does not exist"),
        ("b.safetensors", "does not exist"),
    ]


def test_a_trace_is_not_shown_but_named(tmp_path):
    (tmp_path / "timeline.json").write_text('{"traceEvents": []}')
    with pytest.raises(ValueError, match=r"is a trace; open it at ui\.perfetto\.dev"):
        meshwise.show(tmp_path / "timeline.json")


def typed(*words, **changes):
    info = known.info("run", known.plan())
    return msgspec.structs.replace(info, command=("meshwise", "run", *words), **changes)


def test_a_run_shows_its_command_as_a_shell_takes_it():
    layout = '{"dp": 2}'
    shown = dict(samples.state(typed("--layout", layout), []).rows)["command"]
    assert shlex.split(shown) == ["meshwise", "run", "--layout", layout]
