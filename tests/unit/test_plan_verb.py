"""meshwise plan: which prices it takes, what it says of them, what it refuses. No torch."""

import json
import math
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest

import meshwise
from meshwise import machine, search, store
from meshwise.cli import app
from meshwise.models import catalogue, graph, program_of
from meshwise.models.families.experts import arriving
from meshwise.models.families.experts import sizes as experts_of
from meshwise.pages import tables
from meshwise.prices import Prices, on_hosts, unmeasured
from meshwise.search.find import _plainest_first
from meshwise.search.simulate import Peak
from meshwise.spec import (
    Candidate,
    Cluster,
    Collective,
    Costs,
    Curve,
    Cuts,
    LayerKind,
    Layout,
    Plan,
    Recipe,
    Workload,
)
from meshwise.spec import plan as spec_plan
from meshwise.spec.costs import HeldOut, Law
from meshwise.spec.layout import Way
from meshwise.verbs import files, run, show
from tests import sample_records as known

SMALL = {"global_batch_size": 32, "seq_len": 256, "top": 2}


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def main(arguments):
    with pytest.raises(SystemExit) as ended:
        app.main(arguments)
    return ended.value.code


EXACT = HeldOut(median=0.0, p90=0.0, num_points=5)
INSIDE = Collective(kind="all_reduce", size_bytes=2**20, group_size=8, dtype="fp32", in_place=True)


def measured():
    """Costs of an H100 host on which nothing but one collective was measured: 1 second each."""
    costs = unmeasured(files.take("h100-hgx", Cluster))
    curve = Curve(
        like=INSIDE, law="lines", x_bytes=(1.0, 2.0**40), time_s=(1.0, 1.0),
        laws={"lines": Law(held_out=EXACT)}, beyond=EXACT,
        end_s_per_byte=0.0, end_range_s_per_byte=(0.0, 0.0), runs=("made",),
    )  # fmt: skip
    return msgspec.structs.replace(costs, curves=(curve,), runs=("made",))


def test_a_cluster_that_was_not_measured(capsys):
    size = "--global-batch-size 32 --seq-len 256 --top 2"
    arguments = f"plan gpt-125m --cluster h100-hgx --hosts 2 {size}".split()
    assert main(arguments) == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert first == (
        "gpt-125m on 16 devices of h100-hgx: batch 32 x 256, bf16, compiled; priced by data "
        "sheets, nothing was measured"
    )
    assert main([*arguments, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["prediction"]["tier"] == "datasheet" and document["runs"] == []
    plan = store.read("plan.json", Plan)
    assert plan.cluster.num_hosts == 2 and plan.cluster.name == "h100-hgx"
    rows = show.follow("plan.json", "layers.0.up")
    assert {row.source for row in rows} == {"datasheet"}


def test_a_cluster_of_your_own():
    text = Path(str(machine.shipped()["h100-hgx"])).read_text()
    Path("mine.toml").write_text(text.replace('name = "h100-hgx"', 'name = "mine"'))
    plan = meshwise.plan("gpt-30m", cluster="mine.toml", gpus=4, **SMALL)
    assert plan.cluster.name == "mine" and plan.layout.num_devices == 4


def test_a_measured_host_serves_many():
    store.write("costs.json", measured())
    plan = meshwise.plan("gpt-125m", hosts=4, **SMALL)
    assert plan.cluster.num_devices == 32 == plan.layout.num_devices and plan.runs == ("made",)
    assert tables.plan(plan)[0].title.endswith("; some prices from data sheets")
    prices = Prices(store.read("costs.json", Costs), datasheet=True)
    assert prices.estimate(INSIDE).time_s == 1.0
    assert any("was not measured: its data sheet's price" in n for n in plan.prediction.notes)
    # a cluster of the same host says what lies between
    bare = msgspec.structs.replace(measured(), cluster=msgspec.structs.replace(
        measured().cluster, tiers=measured().cluster.tiers[:1]
    ))  # fmt: skip
    store.write("costs.json", bare)
    with pytest.raises(ValueError, match="hosts = 4: cluster 'h100-hgx' says nothing of the links"):
        meshwise.plan("gpt-125m", hosts=4, **SMALL)
    both = meshwise.plan("gpt-125m", hosts=4, costs="costs.json", cluster="h100-hgx", **SMALL)
    assert both.prediction == plan.prediction


def test_data_sheets_beside_costs_are_said(caplog):
    caplog.set_level("INFO", "meshwise")
    store.write("costs.json", measured())
    plan = meshwise.plan("gpt-30m", cluster="h200-hgx", **SMALL)
    assert plan.cluster.name == "h200-hgx" and plan.runs == ()
    assert "costs.json is not read beside --cluster, unless --costs names it" in caplog.text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {},
            r"costs.json does not exist; `meshwise calibrate` writes it, or .* --cluster \(a file",
        ),
        ({"cluster": "h100"}, "h100 does not exist; `meshwise detect` writes it"),
        ({"cluster": "h100-hgx", "hosts": 0}, "hosts = 0: must be >= 1"),
        ({"cluster": "h100-hgx", "hosts": 2**30}, "num_devices = 8589934592: must be <= 1048576"),
        (
            {"cluster": "h100-hgx", "gpus": 16},
            r"gpus = 16: .* has 8 devices; .*more hosts with --hosts 2",
        ),
        ({"cluster": "h100-hgx", "measured_only": True}, "measured_only: nothing was measured of"),
        ({"cluster": "h200-hgx", "costs": "c.json"}, "device.name is NVIDIA H200, but the costs"),
        ({"costs": "c.json", "measured_only": True}, "no price for .*; measure it: meshwise meas"),
        ({"cluster": "h100-hgx", "layout": '{"dp": 8, "tq": 1}'}, "layout: .*tq"),
    ],
)
def test_refused_with_the_field_and_the_fix(options, message):
    store.write("c.json", measured())
    with pytest.raises(ValueError, match=message):
        meshwise.plan("gpt-30m", **options, **SMALL)
    assert not Path("plan.json").exists()


def test_the_same_layout_as_run_takes():
    text = '{"dp": 8, "zero": 3, "num_microbatches": 4}'
    plan = meshwise.plan("gpt-30m", cluster="h100-hgx", layout=text, **SMALL)
    assert plan.layout == Layout(dp=8, zero=3, num_microbatches=4)
    assert plan.prediction.tier == "datasheet"


@pytest.mark.parametrize(
    ("tier", "words"),
    [
        ("measured", "; every price measured"),
        ("interpolated", "; prices measured or interpolated"),
        ("extrapolated", "; some prices extrapolated beyond what was measured"),
        (None, ""),
    ],
)
def test_the_first_line_names_the_lowest_tier(tier, words):
    plan = meshwise.plan("gpt-30m", cluster="h100-hgx", **SMALL)
    prediction = msgspec.structs.replace(plan.prediction, tier=tier)
    said = msgspec.structs.replace(plan, prediction=prediction, runs=("made",))
    assert tables.plan(said)[0].title == f"{tables.headline(said)}{words}"


def test_fp16_is_said_to_be_refused(capsys):
    arguments = "plan gpt-125m --cluster p3.16xlarge --global-batch-size 32 --seq-len 256"
    assert main(arguments.split()) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "fp16, compiled; priced by data sheets" in out
    assert "`meshwise run` refuses this plan" in out and "measure more" not in out
    from meshwise.verbs import given

    with pytest.raises(ValueError, match=r"Plan.dtype = 'fp16': training runs in fp32 or bf16"):
        given.check(store.read("plan.json", Plan))


def test_the_plan_of_a_data_sheet_is_the_searchs():
    costs = unmeasured(files.take("h100-hgx", Cluster))
    plan = meshwise.plan("gpt-125m", cluster="h100-hgx", **SMALL)
    assert plan == search.find(plan.model, plan.workload, costs, num_devices=8, top=2)


PIPELINE = '{"pp": 2, "tp": 4, "schedule": "1f1b", "microbatch_size": 4, "num_microbatches": 4, %s}'


def _given(tmp_path, words, **more):
    options = {"cluster": "h100-hgx", "hosts": 1, "global_batch_size": 16} | more
    return meshwise.plan("gpt-125m", layout=PIPELINE % words, out=tmp_path / "plan.json", **options)


def test_one_program_in_two_words_has_one_price(tmp_path):
    """A boundary carries what the streams of both its stages leave, however that was written."""
    short = _given(tmp_path, '"sequence_parallel": true').prediction
    cut = _given(tmp_path, '"cuts": {"stream": "seq"}').prediction
    whole = '{"cuts": {"stream": "whole"}}'
    back = _given(tmp_path, f'"sequence_parallel": true, "ways": [{whole}, {whole}]').prediction
    plain = _given(tmp_path, '"cuts": {"stream": "whole"}').prediction
    assert (short.step_time_s, short.peak_memory_bytes) == (cut.step_time_s, cut.peak_memory_bytes)
    assert (back.step_time_s, back.peak_memory_bytes) == (
        plain.step_time_s,
        plain.peak_memory_bytes,
    )


def test_a_whole_embedding_is_exchanged_whole(tmp_path):
    cut, whole = (
        _given(tmp_path, f'"cuts": {{"embed": "{word}", "head": "{word}"}}')
        for word in ("vocab", "whole")
    )
    (small,), (large,) = (
        [part.value for part in of.prediction.time_parts if part.name == "tied embedding exchange"]
        for of in (cut, whole)
    )
    assert large > 2 * small


def test_a_layout_of_other_devices_than_asked(tmp_path):
    with pytest.raises(ValueError, match="gpus = 4: the layout is for 8 devices"):
        _given(tmp_path, '"zero": 0', gpus=4)


def test_a_plan_edited_by_hand_keeps_no_prediction(tmp_path):
    """The prediction was of the layout before."""
    _given(tmp_path, '"zero": 0')
    path = tmp_path / "plan.json"
    data = json.loads(path.read_text())
    for stage in data["stages"]:
        stage["recompute"] = ["full"] * len(stage["recompute"])
    path.write_text(json.dumps(data))
    edited = store.read(path, Plan)
    assert edited.layout.ways and edited.prediction is None


def test_a_given_layout_that_does_not_fit_is_said_to(tmp_path, caplog):
    """One byte short, too: two sizes would look alike."""
    asked = {"layout": '{"dp": 8}', "global_batch_size": 8, "out": tmp_path / "plan.json"}
    told = meshwise.plan("gpt-125m", cluster="h100-hgx", **asked).prediction
    assert "does not fit" not in caplog.text
    cluster = files.take("h100-hgx", Cluster)
    size = math.ceil(told.peak_memory_bytes) - 1 + cluster.reserved_bytes
    device = msgspec.structs.replace(cluster.device, memory_bytes=size)
    small = msgspec.structs.replace(cluster, device=device)
    store.write(tmp_path / "costs.json", unmeasured(small))
    meshwise.plan("gpt-125m", costs=tmp_path / "costs.json", **asked)
    largest = max(told.memory_parts, key=lambda part: part.value)
    said = f"does not fit: rank 0 needs 1 B more; its largest part is {largest.name} ("
    assert said in caplog.text


def test_what_rounding_leaves_of_nothing_is_no_part(monkeypatch):
    """A one-layer model showed -0 B of activations."""
    predicting = sys.modules["meshwise.search.predict"]
    peak = Peak(2.0, {"activations": -1e-8, "gradients": 2.0, "images": 1e-8})
    monkeypatch.setattr(predicting, "memory_of", lambda *of: (0, peak))
    plan = meshwise.plan("gpt-125m", cluster="h100-hgx", layout=Layout(dp=8), seq_len=1024)
    assert [(part.name, part.value) for part in plan.prediction.memory_parts] == [("gradients", 2)]


def test_where_no_layout_is_legal_the_nearest_numbers_of_devices_are_given():
    """GPT-125M has 12 heads: tp alone runs on 6 of 7 devices; of 8, dp takes the batch of 8."""
    asked = {"cluster": "h100-hgx", "global_batch_size": 8, "space": ("uniform", "pp=1")}
    with pytest.raises(search.NoLayout, match=r"no layout of 7 .*; give --gpus 6 or 8$"):
        meshwise.plan("gpt-125m", gpus=7, **asked)
    with pytest.raises(search.NoLayout, match=r"\(\d+\)$"):
        meshwise.plan("gpt-125m", gpus=7, **asked | {"space": ("pp=1", "dp=7")})


def test_of_layouts_as_fast_as_one_another_the_plainest_is_first():
    """Times a thousandth apart are the same; two thousandths are not."""
    plain, two, pipe = (
        Layout(dp=4), Layout(dp=2, tp=2), Layout(pp=2, tp=2, schedule="1f1b", num_microbatches=2)
    )  # fmt: skip
    cut = Layout(tp=4, cuts=Cuts(stream="batch", attention="batch", feed_forward="batch"))
    meshes = Layout(pp=2, meshes=((2, 1), (1, 2)), schedule="1f1b", microbatch_size=2)

    def ranked(**times):
        named = {"plain": plain, "two": two, "pipe": pipe, "cut": cut, "meshes": meshes}
        kept = [
            Candidate(layout=named[name], prediction=known.prediction(time_s, 1e9))
            for name, time_s in times.items()
        ]
        return [of.layout for of in _plainest_first(kept)]

    assert ranked(cut=1.0, meshes=1.0, pipe=1.0, two=1.0005, plain=1.0009) == [
        plain, pipe, two, meshes, cut
    ]  # fmt: skip
    assert ranked(cut=1.0, plain=1.002, two=1.001) == [two, cut, plain]


def _edited(path, **changes):
    """Change fields of the first stage of a plan, and read it."""
    data = json.loads(path.read_text())
    data["stages"][0] |= changes
    path.write_text(json.dumps(data))
    return store.read(path, Plan)


@pytest.mark.parametrize(
    ("axes", "ways", "message"),
    [
        ({"tp": 4}, (Way(zero=3), Way()), "stage 0 has no shards"),
        ({"tp": 4}, (Way(), Way(replicas=2)), "stage 1 has no shards"),
        ({"dp": 4}, (Way(cuts=Cuts(stream="seq")), Way()), "stage 0 has cuts, and tp"),
    ],
)
def test_ways_that_change_nothing_are_refused(axes, ways, message):
    with pytest.raises(ValueError, match=message):
        Layout(pp=2, schedule="1f1b", num_microbatches=4, ways=ways, **axes)


def test_a_stage_that_cannot_be_is_named_by_its_fields(tmp_path):
    _given(tmp_path, '"zero": 0')
    with pytest.raises(ValueError, match=r"\(devices of stage 0\)"):
        _edited(tmp_path / "plan.json", devices=[0, 1, 2, 7])
    _given(tmp_path, '"zero": 0')
    with pytest.raises(ValueError, match="stage 0 has no shards"):
        _edited(tmp_path / "plan.json", zero=3)


def test_a_stage_without_tp_has_no_cuts_in_its_name(tmp_path):
    layout = '{"pp": 2, "dp": 4, "schedule": "1f1b", "num_microbatches": 4}'
    out = tmp_path / "plan.json"
    meshwise.plan("gpt-125m", cluster="h100-hgx", layout=layout, out=out)
    assert _edited(out, zero=1).layout.name == "pp2 1f1b dp4 ways zero1/same mb1x4"


def test_a_given_layout_says_the_batch_and_the_lowering(tmp_path, caplog):
    caplog.set_level("INFO", "meshwise")
    layout = (
        '{"pp": 2, "dp": 4, "schedule": "zbv", "stages_per_rank": 2, "microbatch_size": 2, '
        '"num_microbatches": 8}'
    )
    out = tmp_path / "plan.json"
    plan = meshwise.plan("gpt-125m", cluster="h100-hgx", layout=layout, out=out)
    assert plan.workload.global_batch_size == 64 and plan.lowering == "eager"
    assert "zbv splits each backward in two, so the plan is eager" in caplog.text


def test_what_experts_exchange_is_called_so(tmp_path):
    layout = '{"dp": 8, "ep": 8, "zero": 3}'
    plan = meshwise.plan("mixtral-8x7b", cluster="h100-hgx", layout=layout, out=tmp_path / "p.json")
    parts = {part.name: part.value for part in plan.prediction.time_parts}
    assert parts["expert-parallel communication"] > 0
    assert "tensor-parallel communication" not in parts


def test_parts_of_the_memory_add_up_to_it(tmp_path):
    told = _given(tmp_path, '"zero": 0').prediction
    assert sum(part.value for part in told.memory_parts) == pytest.approx(told.peak_memory_bytes)


def test_a_name_and_an_option_that_nobody_knows(tmp_path):
    with pytest.raises(ValueError, match="these come with Meshwise: b200-hgx, "):
        meshwise.plan("gpt-125m", cluster="h100")
    with pytest.raises(TypeError, match=r"^plan\(\) got an unexpected keyword argument 'gpu'"):
        meshwise.plan("gpt-125m", gpu=4)
    with pytest.raises(ValueError, match="or for more hosts with --hosts 3"):
        meshwise.plan("gpt-125m", cluster="h100-hgx", gpus=24)


def test_rows_that_may_not_fit_are_named(tmp_path):
    plan = _given(tmp_path, '"zero": 0')
    assert "Tight" not in str(tables.plan(plan))
    device = msgspec.structs.replace(
        plan.cluster.device, memory_bytes=int(plan.prediction.peak_memory_bytes) + 1
    )
    cluster = msgspec.structs.replace(plan.cluster, device=device, reserved_bytes=0)
    assert "in row 1." in str(tables.plan(msgspec.structs.replace(plan, cluster=cluster)))


def test_a_plan_counts_what_its_ranks_compile(tmp_path, monkeypatch):
    recomputed = _given(tmp_path, '"recompute": "full", "recompute_layers": 2')
    assert recomputed.graphs == 2 and "compiles 2 kinds of layers" in str(tables.plan(recomputed))
    assert _given(tmp_path, '"zero": 0').graphs == 1
    eager = msgspec.structs.replace(recomputed, lowering="eager")
    assert eager.graphs == 0
    monkeypatch.setattr(spec_plan, "MOST_GRAPHS", 1)
    with pytest.raises(ValueError, match="2 kinds of layers to compile, and torch takes 1"):
        _given(tmp_path, '"recompute": "full", "recompute_layers": 2')


def test_the_busiest_experts_may_be_planned_for(tmp_path):
    """p95 against choices drawn at random, and what it does to a plan."""
    sizes = {"batch": 1, "seq": 512, "top_k": 2, "choices": 16, "experts": 2}
    drawn = np.random.default_rng(0).binomial(8 * 1024, 1 / 8, size=100_000)
    assert arriving(sizes) == 1024
    assert abs(arriving(sizes | {"p95": 1}) - np.percentile(drawn, 95)) <= 2
    assert arriving(sizes | {"p95": 1, "experts": 16}) == 1024  # all are here

    def told(layout, load):
        return meshwise.plan(
            "mixtral-8x7b", cluster="h100-hgx", seq_len=512, layout=layout, expert_load=load,
            out=tmp_path / "plan.json",
        ).prediction  # fmt: skip

    for layout in (
        '{"dp": 8, "ep": 8, "zero": 3}',
        '{"tp": 8, "sequence_parallel": true, "cuts": {"experts": "experts"}}',
    ):
        mean, p95 = (told(layout, load) for load in ("mean", "p95"))
        assert mean.step_time_s < p95.step_time_s < 1.2 * mean.step_time_s
        assert mean.peak_memory_bytes <= p95.peak_memory_bytes
        parts = [{part.name: part.value for part in of.time_parts} for of in (mean, p95)]
        sent = "expert-parallel communication"
        assert parts[0][sent] < parts[1][sent]
    assert _buffers("mean") < _buffers("p95")
    same = '{"dp": 8, "zero": 3}'
    assert told(same, "mean") == told(same, "p95")
    with pytest.raises(ValueError, match="expert_load = 'p95': llama-3-8b has no experts"):
        meshwise.plan("llama-3-8b", cluster="h100-hgx", expert_load="p95")


def test_the_fullest_rank_s_experts_have_so_many_times_the_mean(tmp_path):
    """By hand: Mixtral's 8 experts on 8 ranks, 512 tokens each, 2 experts a token: 1,024 rows a
    rank in the mean, 1,434 with 1.4 times as many, and at most the 8,192 of all."""
    sizes = {"batch": 1, "seq": 512, "top_k": 2, "choices": 8, "experts": 1}
    for load, rows in ((1.0, 1024), (1.4, 1434), (8, 8192)):
        experts = msgspec.structs.replace(catalogue.find_any("mixtral-8x7b").experts, load=load)
        model = msgspec.structs.replace(catalogue.find_any("mixtral-8x7b"), experts=experts)
        found = experts_of(model, 1, 512)
        assert arriving(found | sizes) == rows
    assert arriving({**sizes, "per_mille": 9000}) == 8192
    assert arriving({**sizes, "experts": 8, "per_mille": 1400}) == 1024  # all are here
    assert _buffers("mean") == _buffers(1.0) < _buffers(1.4) < _buffers(2.0)

    def told(load):
        return meshwise.plan(
            "mixtral-8x7b", cluster="h100-hgx", seq_len=512, expert_load=load,
            layout='{"dp": 8, "ep": 8, "zero": 3}', out=tmp_path / "plan.json",
        ).prediction  # fmt: skip

    mean, even, some, twice = (told(load) for load in ("mean", "1", "1.4", 2.0))
    sent = "expert-parallel communication"
    assert mean.step_time_s == pytest.approx(even.step_time_s)
    assert mean.step_time_s < some.step_time_s < twice.step_time_s
    parts = [{part.name: part.value for part in of.time_parts} for of in (mean, some, twice)]
    assert parts[0][sent] < parts[1][sent] < parts[2][sent]
    assert store.read(tmp_path / "plan.json", Plan).model.experts.load == 2.0
    for load in ("0.9", "inf", "many", "nan"):
        with pytest.raises(ValueError, match=f"expert_load = '{load}': must be mean, p95, or >= 1"):
            told(load)
    with pytest.raises(ValueError, match=r"Experts.load = 9.0: must be mean, p95, or 1 to num_exp"):
        told(9)


def _buffers(load: str | float) -> int:
    """Bytes of all buffers of a rank with one of eight shares of the experts."""
    model = catalogue.find_any("mixtral-8x7b")
    experts = msgspec.structs.replace(model.experts, load=load)
    layer = graph(msgspec.structs.replace(model, layers=1, experts=experts), 1, 512, "bf16")
    program = program_of(layer, Layout(dp=8, ep=8, zero=3), "bf16")
    return sum(buffer.num_bytes for buffer in program.buffers.values())


def test_a_plan_of_version_2_that_contradicts_itself_is_refused_so(tmp_path):
    _given(tmp_path, '"zero": 0')
    path = tmp_path / "plan.json"
    data = json.loads(path.read_text()) | {"schema_version": 2}
    for stage in data["stages"]:
        del stage["placements"]
    path.write_text(json.dumps(data))
    assert store.read(path, Plan).schema_version == 3
    data["stages"][0]["tp"] = 2
    path.write_text(json.dumps(data))
    with pytest.raises(ValueError, match="stages are not those of its layout; plan anew"):
        store.read(path, Plan)


def test_tiers_have_names_of_their_own():
    cluster = files.take("h100-hgx", Cluster)
    twice = [msgspec.structs.replace(tier, name="links") for tier in on_hosts(cluster, 2).tiers]
    with pytest.raises(ValueError, match="every tier needs a name of its own"):
        msgspec.structs.replace(on_hosts(cluster, 2), tiers=tuple(twice))


def test_another_plan_is_kept_beside_the_new_one(tmp_path):
    _given(tmp_path, '"zero": 0')
    before = (tmp_path / "plan.json").read_bytes()
    _given(tmp_path, '"zero": 0')
    assert not (tmp_path / "plan.json.bak").exists()
    _given(tmp_path, '"recompute": "full"')
    assert (tmp_path / "plan.json.bak").read_bytes() == before


def test_rivals_are_other_layouts_first():
    chosen = known.plan()
    told = chosen.prediction
    layouts = [
        msgspec.structs.replace(chosen.layout, microbatch_size=1, num_microbatches=2),
        known.RIVAL,
        msgspec.structs.replace(chosen.layout, recompute="full"),
    ]
    runners_up = tuple(Candidate(layout=layout, prediction=told) for layout in layouts)
    planned = msgspec.structs.replace(chosen, runners_up=runners_up)
    names = [rival.layout.name for rival in run._rivals(planned, 3)]
    assert names == [layouts[at].name for at in (1, 0, 2)]
    tied = (*runners_up[:2], msgspec.structs.replace(runners_up[2], ties=True))
    planned = msgspec.structs.replace(chosen, runners_up=tied)
    assert [rival.layout for rival in run._rivals(planned, 1)] == [layouts[2]]


def test_small_layers_wait_for_fsdp_on_the_host():
    """Each of 24 layers and 8 microbatches launches 0.6 ms forward and 1.2 ms backward, and 1.2 ms
    for a reduction, 0.6 ms for each gather; the device needs less."""
    prices = Prices(unmeasured(files.take("h100-hgx", Cluster)), datasheet=True)
    model, work = catalogue.find("gpt-350m"), Workload(global_batch_size=16, seq_len=128)

    def step_s(**how):
        layout = Layout(dp=2, microbatch_size=1, num_microbatches=8, **how)
        return search.predict(model, work, layout, prices).step_time_s

    for zero, launches_s in ((0, 1.8e-3), (2, 3.0e-3), (3, 4.2e-3)):
        assert step_s(zero=zero) == pytest.approx(24 * 8 * launches_s, rel=0.2)


BF16 = '{"weights": "bf16", "reduce": "bf16", "learning_rate": 0.001}'


def test_a_recipe_is_planned_for_and_travels():
    """All state, 12 bytes of a parameter in fp32, is 6 in bf16, and gradients are sent sooner."""
    layout = Layout(dp=8, zero=3, microbatch_size=4)
    of = {"cluster": "h100-hgx", "layout": layout, "global_batch_size": 32, "seq_len": 256}
    usual, narrow = meshwise.plan("gpt-125m", **of), meshwise.plan("gpt-125m", recipe=BF16, **of)
    assert usual.recipe == Recipe()
    assert narrow.recipe == Recipe(weights="bf16", reduce="bf16", learning_rate=0.001)
    before, after = [
        {part.name: part.value for part in plan.prediction.memory_parts} for plan in (usual, narrow)
    ]
    for name in ("parameters", "optimizer state"):
        assert after[name] == before[name] / 2, name
    assert narrow.prediction.step_time_s < usual.prediction.step_time_s


@pytest.mark.parametrize(
    ("weights", "reduce"), [("bf16", "bf16"), ("bf16", "fp32"), ("fp32", "bf16")]
)
def test_what_data_parallelism_sends_has_the_recipes_dtype(weights, reduce):
    layer = graph(catalogue.find("gpt-125m"), 1, 64, "bf16", layers=(LayerKind(),))
    layout, recipe = Layout(dp=8, zero=3), Recipe(weights=weights, reduce=reduce)
    usual, program = (
        program_of(layer, layout, "bf16"),
        program_of(layer, layout, "bf16", recipe=recipe),
    )
    sent = {task.name: task.op for task in program.tasks if isinstance(task.op, Collective)}
    for op in (task for task in usual.tasks if isinstance(task.op, Collective)):
        narrower = 2 if reduce == "bf16" and op.op.kind == "reduce_scatter" else 1
        assert sent[op.name].size_bytes == op.op.size_bytes / narrower
    assert {op.dtype for op in sent.values() if op.kind == "reduce_scatter"} == {reduce}
    moved, state = [
        next(task.op.bytes for task in each.tasks if task.name == "adamw")
        for each in (program, usual)
    ]
    assert moved == state / (2 if weights == "bf16" else 1)


@pytest.mark.parametrize("reduce", ["fp32", "bf16"])
def test_a_search_keeps_to_the_recipe(reduce):
    """What it found is priced with the recipe, as each layout alone is, and by why-not."""
    cluster = files.take("h100-hgx", Cluster)
    device = msgspec.structs.replace(cluster.device, memory_bytes=6 * 10**9)
    costs = unmeasured(msgspec.structs.replace(cluster, device=device))
    costs = msgspec.structs.replace(costs, recipe=Recipe(weights="bf16", reduce=reduce))
    model, workload = catalogue.find("gpt-1.3b"), Workload(global_batch_size=32, seq_len=256)
    plan = search.find(model, workload, costs, num_devices=8, top=3)
    assert plan.recipe == costs.recipe
    for each in (plan, *plan.runners_up):
        assert each.prediction == search.predict(
            model, workload, each.layout, Prices(costs, datasheet=True)
        )
        assert each.prediction.peak_memory_bytes <= costs.cluster.usable_bytes
        assert each.prediction.step_time_s >= plan.prediction.step_time_s
    (other,) = plan.runners_up[:1]
    told = search.why_not(plan, costs, other.layout)
    assert told.step_time_s == other.prediction.step_time_s and not told.misfit


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        (
            '{"async_tp": true}',
            "recipe.async_tp = True: plans do not price it yet; meshwise run --mo",
        ),
        (
            '{"prefetch": 2, "async_tp": true}',
            "recipe.prefetch = 2, recipe.async_tp = True: plans do",
        ),
        ('{"prefetch": 2}', "recipe.prefetch = 2: plans do not"),
        ('{"routing": "skewed"}', "recipe.routing = skewed: plans do not"),
        ('{"weights": "int8"}', "weights = 'int8'"),
    ],
)
def test_what_no_plan_prices_is_refused_by_name(recipe, message):
    with pytest.raises(ValueError, match=message):
        meshwise.plan("gpt-125m", cluster="h100-hgx", recipe=recipe, **SMALL)


def test_masters_of_bf16_are_refused_for_other_dtypes():
    with pytest.raises(ValueError, match=r"recipe\.weights = bf16: it is for plans of dtype"):
        meshwise.plan("gpt-125m", cluster="p3.16xlarge", recipe=BF16, **SMALL)


def test_the_fewest_devices_hold_the_recipes_state():
    of = {"cluster": "h100-hgx", "hosts": 1, "fewest": True, **SMALL}
    usual, narrow = meshwise.plan("gpt-6.7b", **of), meshwise.plan("gpt-6.7b", recipe=BF16, **of)
    assert narrow.layout.num_devices < usual.layout.num_devices
