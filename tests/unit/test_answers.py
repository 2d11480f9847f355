"""The answers of meshwise plan: why not another layout, which rows tie. No torch."""

import itertools
import json
import math
import re
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

import meshwise
from meshwise import search, store
from meshwise.cli import app
from meshwise.models import catalogue, num_parameters
from meshwise.pages import answers as pages
from meshwise.pages import html, tables
from meshwise.pages.html import Contents
from meshwise.prices import times_of, unmeasured
from meshwise.search.find import NoLayout
from meshwise.search.sizes import counts
from meshwise.search.what_if import changes, halved
from meshwise.spec import (
    Candidate,
    Cluster,
    Collective,
    DeviceCount,
    Layout,
    Plan,
    WhyNot,
    Workload,
)
from meshwise.spec.costs import HeldOut, Law
from meshwise.verbs import files
from tests import sample_records as known

EXACT = HeldOut(median=0.0, p90=0.0, num_points=5)
SMALL = {"cluster": "h100-hgx", "global_batch_size": 32, "seq_len": 256, "top": 3}
WORDS = "--cluster h100-hgx --global-batch-size 32 --seq-len 256"
NAMED = Layout(dp=2, tp=4, microbatch_size=16)
PIPELINE = Layout(pp=4, dp=2, schedule="1f1b", microbatch_size=4, num_microbatches=4)


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def known_gpt():
    return catalogue.find_any("gpt-125m")


def main(arguments):
    with pytest.raises(SystemExit) as ended:
        app.main(arguments)
    return ended.value.code


def oneline(printed):
    return " ".join(printed.split())


def text(found):
    return json.dumps(found, ensure_ascii=False)


def on_sheets(**changes):
    """Prices of an H100 host by its data sheet, its device changed."""
    cluster = files.take("h100-hgx", Cluster)
    device = replace(cluster.device, **changes)
    return unmeasured(replace(cluster, device=device))


@pytest.mark.parametrize("named", [NAMED, PIPELINE, Layout(dp=8, zero=3, microbatch_size=4)])
def test_differences_of_parts_add_up_to_that_of_the_steps(named):
    plan = meshwise.plan("gpt-125m", why_not=named, **SMALL)
    (why,) = plan.answers.why_not
    alone = meshwise.plan("gpt-125m", layout=named, out="alone.json", **SMALL).prediction
    told = plan.prediction
    assert why.step_time_s == alone.step_time_s and not why.obstacle and not why.misfit
    due = alone.step_time_s - told.step_time_s
    assert math.fsum(of.more for of in why.time) == pytest.approx(due, rel=1e-9)
    due = alone.peak_memory_bytes - told.peak_memory_bytes
    assert math.fsum(of.more for of in why.memory) == pytest.approx(due, rel=1e-9, abs=1e-3)
    for parts, chosen, other in (
        (why.time, told.time_parts, alone.time_parts),
        (why.memory, told.memory_parts, alone.memory_parts),
    ):
        assert {of.part: of.chosen for of in parts if of.chosen} == {
            p.name: p.value for p in chosen
        }
        assert {of.part: of.named for of in parts if of.named} == {p.name: p.value for p in other}
        sizes = [abs(of.more) for of in parts]
        assert sizes == sorted(sizes, reverse=True)


def test_the_command_line_shows_and_keeps_why_not(capsys):
    words = ["plan", "gpt-125m", *WORDS.split()]
    Path("other.json").write_text('{"dp": 3}')
    why = ["--why-not", '{"dp": 2, "tp": 4, "microbatch_size": 16}', "--why-not", "other.json"]
    assert main([*words, *why]) == 0
    out = capsys.readouterr().out
    assert "Why not dp2 tp4 mb16x1" in out and "Why not dp3 mb1x1" in out
    assert re.search(
        r"mb16x1 loses [\d.]+ ms, [\d.]+ ms of them tensor-parallel communication", oneline(out)
    )
    assert "cannot be planned: it is for 3 devices, and the plan for 8" in out
    kept = store.read("plan.json", Plan)
    assert [why.layout for why in kept.answers.why_not] == [NAMED, Layout(dp=3)]
    assert main(["show", "plan.json"]) == 0 and "Why not dp2 tp4 mb16x1" in capsys.readouterr().out
    assert main([*words, *why, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)["answers"]["why_not"]
    assert document[0]["time"][0].keys() == {"part", "chosen", "named"}
    assert document[1]["obstacle"]


@pytest.mark.parametrize(
    ("named", "reason"),
    [
        (Layout(dp=8), r"is 8, and global_batch_size is 32"),
        (Layout(dp=4, microbatch_size=8), r"it is for 4 devices, and the plan for 8"),
        (Layout(tp=8, microbatch_size=32), "Layout.tp = 8: must divide heads = 12"),
        (
            Layout(pp=2, tp=4, schedule="zbv", stages_per_rank=2, num_microbatches=32),
            "zbv splits the backward, which compiled code cannot",
        ),
    ],
)  # fmt: skip
def test_a_layout_that_cannot_be_says_why(named, reason):
    plan = meshwise.plan("gpt-125m", why_not=(named,), **SMALL)
    (why,) = plan.answers.why_not
    assert reason in why.obstacle and not why.time
    assert why.obstacle in text(pages.of(plan))


def test_a_layout_that_does_not_fit_names_rank_bytes_and_part():
    """The limit lies one byte below what the layout needs, and the chosen plan fits."""
    named = Layout(dp=8, microbatch_size=4)
    plan = meshwise.plan("gpt-125m", layout=named, **SMALL)
    costs = on_sheets()
    needed = plan.prediction.peak_memory_bytes
    memory = int(needed) - 2**20 + costs.cluster.reserved_bytes
    costs = on_sheets(memory_bytes=memory)
    small = search.find(plan.model, plan.workload, costs, num_devices=8, top=1)
    why = search.why_not(small, costs, named)
    assert why.missing_bytes == pytest.approx(needed - costs.cluster.usable_bytes)
    largest = max(plan.prediction.memory_parts, key=lambda part: part.value).name
    assert why.misfit.startswith(f"rank 0 needs 1.0 MiB more; its largest part is {largest}")
    shown = replace(small, answers=meshwise.Answers(why_not=(why,)))
    assert "It does not fit: rank 0" in text(pages.of(shown))


def test_what_the_search_leaves_out_and_what_it_did_not_try():
    gpipe = replace(PIPELINE, schedule="gpipe")
    plan = meshwise.plan("gpt-125m", why_not=(gpipe,), **SMALL)
    assert "The search does not try it: gpipe is 1f1b with more memory." in text(pages.of(plan))
    slow = meshwise.plan("gpt-125m", layout=NAMED, why_not=(plan.layout, NAMED), **SMALL)
    better, same = pages.of(slow)
    assert re.search(
        r"gains [\d.]+ ms, [\d.]+ ms of them tensor-parallel communication", text(better)
    )
    assert "did not try it" not in text(better)  # there was no search
    assert same.legend[0] == "It is the chosen plan."


def test_what_lies_outside_the_space_is_said_to():
    named = Layout(dp=8, zero=2, microbatch_size=4)
    plan = meshwise.plan("gpt-125m", why_not=(named,), space=("zero-3",), **SMALL)
    said = text(pages.of(plan))
    assert "The search does not try it: it is outside the space asked for." in said


def test_a_layout_that_is_no_layout_is_refused_before_the_search():
    with pytest.raises(ValueError, match=r"why_not: .*tq"):
        meshwise.plan("gpt-125m", why_not='{"tq": 8}', **SMALL)
    assert not Path("plan.json").exists()


def told(step_time_s, **errors):
    plan = meshwise.plan("gpt-125m", layout=NAMED, **SMALL)
    return replace(plan.prediction, step_time_s=step_time_s, errors=errors)


def test_only_errors_that_plans_do_not_share_make_ties():
    """Both multiply as much; one sends 3 ms more by prices of 40 %, and copies 2 ms more of 20 %:
    hypot(1.2, 0.4) ms."""
    first = told(0.100, Gemm={"forward": 0.03}, Collective={"dp": 0.0004})
    other = told(
        0.101, Gemm={"forward": 0.03}, Collective={"dp": 0.0016}, Elementwise={"copies": 0.0004}
    )
    assert first.difference_error_s(other) == pytest.approx(math.hypot(0.0012, 0.0004))
    assert other.ties(first) and first.ties(other)
    assert not replace(other, step_time_s=0.1013).ties(first)
    # of another part, prices of one group may be off in either direction
    moved = replace(other, errors={**other.errors, "Collective": {"tp": 0.0016}})
    assert first.difference_error_s(moved) == pytest.approx(math.hypot(0.002, 0.0004))
    assert not replace(other, errors={}).ties(first)


def test_errors_add_up_to_the_interval():
    for layout in (NAMED, PIPELINE):
        found = meshwise.plan("gpt-125m", layout=layout, **SMALL).prediction
        of_groups = [math.fsum(of.values()) for of in found.errors.values()]
        assert math.hypot(*of_groups) == pytest.approx(found.high_s - found.step_time_s)


def test_the_table_names_ties():
    plan = meshwise.plan("gpt-30m", **SMALL)
    assert [one.ties for one in plan.runners_up] == [
        one.prediction.ties(plan.prediction) for one in plan.runners_up
    ]

    def with_rows(*ties, low_s=0.0):
        rows = tuple(
            Candidate(layout=NAMED, prediction=replace(plan.prediction, low_s=low_s), ties=tie)
            for tie in ties
        )
        return text(tables.plan(replace(plan, runners_up=rows)))

    assert "Rows 2, 3 tie with 1: prices that they do not share" in with_rows(True, True, False)
    assert "difference; meshwise run --rivals 2 runs them too." in with_rows(True, False, True)
    assert "Row 2 ties with 1" in with_rows(True, False)
    plan = replace(plan, dtype="fp16")  # `run` refuses it
    assert "more than the difference." in with_rows(True) and "--rivals" not in with_rows(True)
    assert tables.SHARED in with_rows(False)
    apart = with_rows(False, low_s=plan.prediction.high_s * 2)
    assert not re.search(r"\bties?\b", apart)


def test_the_report_shows_answers():
    plan = meshwise.plan("gpt-125m", why_not=NAMED, watts=700.0, **SMALL)
    page = html.page(Contents(plan, None, (), ()))
    assert "Why not dp2 tp4 mb16x1" in page and "What training takes on 8 device(s)" in page


def two_small_hosts():
    """Two hosts of two H100, by their data sheet."""
    cluster = files.take("h100-hgx", Cluster)
    inside, network = cluster.tiers
    tiers = (
        replace(inside, num_devices=2),
        replace(network, num_devices=4),
    )
    return replace(cluster, name="mine", num_hosts=2, num_devices_per_host=2, tiers=tiers)


def with_rates(cluster, inside=1, network=1):
    tiers = [
        replace(tier, bytes_per_s=tier.bytes_per_s * factor)
        for tier, factor in zip(cluster.tiers, (inside, network), strict=True)
    ]
    return replace(cluster, tiers=tuple(tiers))


def test_what_if_equals_a_search_on_the_changed_cluster():
    cluster = two_small_hosts()
    store.write("mine.toml", cluster)
    asked = SMALL | {"cluster": "mine.toml"}
    plan = meshwise.plan("gpt-125m", what_if=True, **asked)
    assert plan == replace(
        meshwise.plan("gpt-125m", out="plain.json", **asked), answers=plan.answers
    )
    device = replace(cluster.device, memory_bytes=cluster.device.memory_bytes + 10_000_000_000)
    changed = {
        "10 GB more memory a device": replace(cluster, device=device),
        "twice the network between hosts": with_rates(cluster, network=2),
        "twice the links within a host": with_rates(cluster, inside=2),
        "twice the batch": cluster,
    }
    assert [one.change for one in plan.answers.what_if] == list(changed)
    for one in plan.answers.what_if:
        store.write("changed.toml", changed[one.change])
        batch = 64 if "batch" in one.change else 32
        more = asked | {"cluster": "changed.toml", "global_batch_size": batch}
        fresh = meshwise.plan("gpt-125m", out="fresh.json", **more)
        assert one.layout == fresh.layout
        assert one.step_time_s == fresh.prediction.step_time_s
        ratio = fresh.prediction.tokens_per_s / plan.prediction.tokens_per_s
        assert one.faster == pytest.approx(ratio)
    shown = text(pages.of(plan))
    assert "twice the network between hosts: the data sheet's rate is doubled." in shown


def test_links_that_no_device_uses_are_not_changed():
    one = meshwise.plan("gpt-30m", gpus=1, what_if=True, **SMALL)
    assert [of.change for of in one.answers.what_if] == [
        "10 GB more memory a device", "twice the batch",
    ]  # fmt: skip


def test_faster_links_leave_the_launch_of_measured_collectives():
    """20 us of launch stay, and the rest is halved, also beyond the largest size; of other links
    nothing changes."""
    sent = {"kind": "all_reduce", "size_bytes": 2**20, "group_size": 2}
    inside, across = (
        known.curve(Collective(**sent, group_stride=stride), 20e-6, 100e9) for stride in (1, 2)
    )
    costs = replace(unmeasured(two_small_hosts()), curves=(inside, across))
    plan = search.given(known.MODEL, known.WORKLOAD, costs, Layout(dp=4, microbatch_size=2))
    found = {change.name: change for change in changes(plan, costs)}
    changed = found["twice the network between hosts"]
    assert changed.costs.curves[0] == inside
    assert changed.note.startswith("1 measured curves take half of what they took beyond")
    launch_s = across.time_s[0]
    old, new = times_of(across), times_of(changed.costs.curves[1])
    for x in (*across.x_bytes, 16 * across.x_bytes[-1]):
        assert new(x) - launch_s == pytest.approx((old(x) - launch_s) / 2)
    assert found["twice the links within a host"].costs.curves[1] == across


def test_a_sigmoid_is_halved_through_its_knots():
    law = Law(parameters=(10.0, 20.0, 1e11, 2e-5, 1.0, 15.0, 1.0, 1.0, 1.0), held_out=EXACT)
    like = Collective(kind="all_reduce", size_bytes=2**20, group_size=2)
    curve = replace(known.curve(like, 20e-6, 100e9), law="sigmoid", laws={"sigmoid": law})
    half = halved(curve)
    assert half.held_out == EXACT
    assert times_of(half)(curve.x_bytes[-1]) == pytest.approx(half.time_s[-1])


def test_a_change_that_leaves_no_layout_says_why(monkeypatch):
    plan = meshwise.plan("gpt-30m", **SMALL)

    def none(*_, **__):
        raise NoLayout("no layout of 8 devices is legal: none")

    monkeypatch.setattr(sys.modules["meshwise.search.what_if"], "find", none)
    found = search.what_if(plan, on_sheets(), top=1)
    assert {(one.layout, one.note) for one in found} == {
        (None, "no layout of 8 devices is legal: none")
    }
    shown = replace(plan, answers=meshwise.Answers(what_if=found))
    assert "twice the batch: no layout of 8 devices is legal" in text(pages.of(shown))


def test_what_if_needs_a_search():
    with pytest.raises(ValueError, match="what_if: it searches, and a layout is given"):
        meshwise.plan("gpt-125m", layout=NAMED, what_if=True, **SMALL)


def of_hosts(num_hosts, per_host, memory_bytes=80 * 2**30):
    """H100 hosts of another size, whose devices have other memory, in mine.toml."""
    cluster = files.take("h100-hgx", Cluster)
    tiers = [
        replace(tier, num_devices=reach)
        for tier, reach in zip(cluster.tiers, (per_host, num_hosts * per_host), strict=True)
    ]
    device = replace(cluster.device, memory_bytes=memory_bytes)
    made = replace(
        cluster, name="mine", num_hosts=num_hosts, num_devices_per_host=per_host, device=device,
        tiers=tuple(tiers),
    )  # fmt: skip
    store.write("mine.toml", made)
    return made


def test_counts_divide_a_host_or_are_whole_hosts():
    assert counts(of_hosts(3, 6)) == [1, 2, 3, 6, 12, 18]
    assert counts(of_hosts(2, 8)) == [1, 2, 4, 8, 16]


@pytest.mark.parametrize("gib", [3.4, 3.8, 4.6, 6, 40])
def test_the_fewest_devices_by_brute_force(gib):
    cluster = of_hosts(2, 4, int(gib * 2**30))
    asked = SMALL | {"cluster": "mine.toml"}
    alone, lacking = {}, {}
    for count in (1, 2, 4, 8):
        try:
            alone[count] = meshwise.plan("gpt-125m", gpus=count, out="one.json", **asked)
        except ValueError as error:
            lacking[count] = str(error)
            assert "fits" in lacking[count]
    if not alone:
        with pytest.raises(
            ValueError,
            match=r"gpt-125m cannot be .* 8 device\(s\) of cluster 'mine': .*; give more hosts",
        ):
            meshwise.plan("gpt-125m", fewest=True, **asked)
        return
    plan = meshwise.plan("gpt-125m", fewest=True, **asked)
    due = min(alone)
    assert plan == replace(alone[due], answers=plan.answers)
    *less, last = plan.answers.sizes
    assert [size.num_devices for size in less] == [count for count in (1, 2, 4, 8) if count < due]
    states = 12 * num_parameters(plan.model)
    for size in less:  # those that states alone rule out were not searched
        ruled_out = states > size.num_devices * cluster.usable_bytes
        assert ("parameters and moments" in size.note) == ruled_out
        assert ruled_out or lacking[size.num_devices].startswith(f"{size.note}; give more devices")
    assert last.layout == plan.layout and last.step_time_s == plan.prediction.step_time_s
    shown = text(pages.of(plan))
    assert f'"{due} <", "{plan.layout.name}"' in shown and all(one.note in shown for one in less)


def test_the_cheapest_count_that_meets_a_deadline():
    of_hosts(2, 4)
    asked = SMALL | {"cluster": "mine.toml"}
    tokens = 10e9
    alone = {
        count: meshwise.plan("gpt-125m", gpus=count, out="one.json", **asked)
        for count in (1, 2, 4, 8)
    }
    seconds = {n: tokens / 32 / 256 * plan.prediction.p50_s for n, plan in alone.items()}
    for deadline in (1.01 * seconds[1], 1.01 * seconds[4], 1.01 * seconds[8]):
        plan = meshwise.plan("gpt-125m", deadline=deadline, tokens="10B", **asked)
        in_time = [count for count in seconds if seconds[count] <= deadline]
        due = min(in_time, key=lambda count: count * seconds[count])
        assert plan == replace(alone[due], answers=plan.answers)
        assert [size.num_devices for size in plan.answers.sizes] == [1, 2, 4, 8]
        shown = text(pages.of(plan))
        assert "10.0 B tokens take" in shown and "it is met as predicted, not surely" in shown
    least = min(seconds, key=seconds.get)
    with pytest.raises(ValueError, match=f"10.0 B tokens take .* on {least} device"):
        meshwise.plan("gpt-125m", deadline=0.9 * seconds[least], tokens="10B", **asked)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fewest": True, "gpus": 4}, "gpus = 4: --fewest chooses how many"),
        ({"fewest": True, "layout": NAMED}, "fewest: it searches, and a layout is given"),
        ({"deadline": "10d"}, "deadline = '10d': say for how many tokens, as --tokens 300B"),
        ({"deadline": "10d", "tokens": "1B", "gpus": 8}, "gpus = 8: --deadline chooses how many"),
        (
            {"deadline": "10d", "tokens": "1B", "fewest": True},
            "--deadline and --fewest both choose",
        ),
        (
            {"deadline": "soon", "tokens": "1B"},
            "deadline = 'soon' is not|'soon': is not understood",
        ),
        ({"tokens": "many"}, "tokens = 'many': is not understood; write it like 300B or 15T"),
        ({"tokens": 0}, "tokens = 0: must be > 0, as 300B"),
        ({"watts": -700.0}, "watts = -700.0: must be > 0"),
        ({"price_per_gpu_hour": 0}, "price_per_gpu_hour = 0: must be > 0"),
    ],
)
def test_options_that_cannot_be_are_refused_by_name(options, message):
    with pytest.raises(ValueError, match=message):
        meshwise.plan("gpt-125m", **options, **SMALL)


def test_money_and_energy_by_hand():
    """8 devices at 2.50 dollars an hour and 700 W."""
    asked = {"tokens": "300B", "price_per_gpu_hour": 2.5, "watts": 700}
    plan = meshwise.plan("gpt-125m", **asked, **SMALL)
    some, whole = plan.answers.bills
    rate = 32 * 256 / plan.prediction.p50_s
    assert some.tokens == 1e6 and some.seconds == pytest.approx(1e6 / rate)
    assert whole.device_hours == pytest.approx(8 * 300e9 / rate / 3600)
    assert whole.dollars == pytest.approx(2.5 * 8 * 300e9 / rate / 3600)
    assert whole.kwh == pytest.approx(0.7 * 8 * 300e9 / rate / 3600)
    shown = text(pages.of(plan))
    assert "What training takes on 8 device(s)" in shown and "300 B" in shown and "kWh" in shown


def test_no_rate_is_invented():
    assert meshwise.plan("gpt-125m", **SMALL).answers == meshwise.Answers()
    (some,) = meshwise.plan("gpt-125m", watts=700.0, **SMALL).answers.bills
    assert some.dollars is None and some.kwh > 0


TRACED = {
    "1f1b": Layout(
        pp=2, dp=2, tp=2, schedule="1f1b", zero=2, microbatch_size=4, num_microbatches=4
    ),
    "interleaved": Layout(
        pp=2, dp=4, schedule="interleaved_1f1b", stages_per_rank=2, microbatch_size=2,
        num_microbatches=4,
    ),
    "no pipeline": Layout(dp=8, zero=3, num_microbatches=4),
}  # fmt: skip


@pytest.mark.parametrize("layout", TRACED.values(), ids=TRACED)
def test_the_trace_is_one_that_perfetto_opens(layout):
    """The rules of the Trace Event Format: complete events have name, ph, ts, dur, pid and tid;
    metadata names every process and thread; slices of a thread do not overlap."""
    plan = meshwise.plan("gpt-125m", layout=layout, trace="t.json", **SMALL)
    document = json.loads(Path("t.json").read_text())
    assert document["displayTimeUnit"] == "ms"
    names = [event for event in document["traceEvents"] if event["ph"] == "M"]
    slices = [event for event in document["traceEvents"] if event["ph"] == "X"]
    assert len(names) + len(slices) == len(document["traceEvents"])
    threads = {}
    for event in slices:
        assert event.keys() == {"name", "cat", "ph", "pid", "tid", "ts", "dur", "args"}
        assert isinstance(event["name"], str) and event["ts"] >= 0 and event["dur"] > 0
        assert isinstance(event["pid"], int) and isinstance(event["tid"], int)
        threads.setdefault((event["pid"], event["tid"]), []).append(event)
    for mine in threads.values():
        ends = [event["ts"] + event["dur"] for event in mine]
        starts = [event["ts"] for event in mine]
        assert all(end <= start + 1e-6 for end, start in zip(ends, starts[1:], strict=False))
    named = {(one["pid"], one["tid"]) for one in names if one["name"] == "thread_name"}
    assert named == threads.keys()
    assert {one["pid"] for one in names if one["name"] == "process_name"} == set(range(layout.pp))
    end = max(event["ts"] + event["dur"] for event in slices)
    assert end / 1e6 == pytest.approx(plan.prediction.step_time_s, rel=1e-9)


@pytest.mark.parametrize("layout", TRACED.values(), ids=TRACED)
def test_drawn_actions_wait_for_their_messages(layout):
    plan = search.given(
        known_gpt(), Workload(global_batch_size=32, seq_len=256), on_sheets(), layout
    )
    drawn = search.spans(plan, on_sheets())
    action = re.compile(r"([FB]) (\d+)\.(\d+)")
    actions = {
        (kind, int(stage), int(number)): (one.start_s, one.end_s)
        for one in drawn
        if one.stream == "compute" and (found := action.fullmatch(one.name))
        for kind, stage, number in [found.groups()]
    }
    every = itertools.product("FB", range(layout.num_stages), range(layout.num_microbatches))
    assert actions.keys() == set(every)
    sent = 0
    for one in drawn:
        if found := re.fullmatch(r"([FB]) (\d+)\.(\d+) to stage (\d+)", one.name):
            kind, stage, number, there = found[1], *map(int, found.groups()[1:])
            assert one.start_s == actions[kind, stage, number][1]
            assert one.end_s <= actions[kind, there, number][0] + 1e-9
            sent += 1
    across = layout.num_stages - 1
    assert sent == 2 * across * layout.num_microbatches
    parts = {part.name: part.value for part in plan.prediction.time_parts}
    ends = {}
    for one in drawn:
        ends[one.rank] = max(ends.get(one.rank, 0.0), one.end_s)
    last = max(ends, key=ends.get)
    exposed = [one for one in drawn if one.rank == last and "-parallel comm" in one.name]
    told = sum(size for name, size in parts.items() if "-parallel communication" in name
               and not name.startswith("work slowed"))  # fmt: skip
    assert sum(one.end_s - one.start_s for one in exposed) == pytest.approx(told)


def test_answers_that_say_half_are_refused():
    with pytest.raises(ValueError, match=r"WhyNot.time = \(\): a layout without an obstacle"):
        WhyNot(layout=NAMED)
    with pytest.raises(ValueError, match=r"DeviceCount.step_time_s = 0.0: must be > 0 where"):
        DeviceCount(num_devices=8, layout=NAMED)


def test_of_several_batches_the_one_with_most_tokens_a_second_is_planned(capsys):
    """Against a plan of each batch alone; 7 sequences fit no layout of 8 devices in this space."""
    asked = {"cluster": "h100-hgx", "seq_len": 256, "top": 2, "space": ("dp=8",)}
    alone = {
        size: meshwise.plan("gpt-125m", global_batch_size=size, **asked) for size in (16, 64, 32)
    }
    rates = {size: plan.prediction.tokens_per_s for size, plan in alone.items()}
    best = max(rates, key=rates.__getitem__)
    plan = meshwise.plan("gpt-125m", global_batch_size="16,64,7,32,16", **asked)
    assert plan.layout == alone[best].layout and plan.workload.global_batch_size == best
    *found, none = plan.answers.batches
    assert [int(one.change) for one in found] == sorted(rates, key=lambda size: -rates[size])
    for one in found:
        size = int(one.change)
        assert one.layout == alone[size].layout and one.tokens_per_s == rates[size]
        assert one.faster == pytest.approx(rates[size] / rates[best])
    assert none.change == "7" and none.layout is None and "no layout of 8 devices" in none.note
    assert store.read("plan.json", Plan) == plan
    words = f"plan gpt-125m {WORDS} --space dp=8 --top 2".replace("32", "16,64")
    assert main(words.split()) == 0
    assert "How large a batch" in capsys.readouterr().out
    with pytest.raises(NoLayout, match=r"batch of 7: no layout .*; batch of 9: no layout"):
        meshwise.plan("gpt-125m", global_batch_size="7,9", **asked)


@pytest.mark.parametrize(
    ("batch", "options", "message"),
    [
        ("16,x", {}, "global_batch_size = '16,x': 'x' must be a number of sequences >= 1, as 512"),
        ("16,0", {}, "'0' must be a number of sequences"),
        (-1, {}, "'-1' must be a number of sequences"),
        ("16,32", {"fewest": True}, "'16,32': several are searched .* or leave --fewest out"),
        ("16,32", {"layout": NAMED}, "several are searched .* or leave --layout out"),
    ],
)
def test_batches_that_cannot_be_compared_are_refused(batch, options, message):
    with pytest.raises(ValueError, match=message):
        meshwise.plan("gpt-125m", cluster="h100-hgx", global_batch_size=batch, **options)
