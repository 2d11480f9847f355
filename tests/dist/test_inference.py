"""Forward passes of every layout give what the plain module gives, and their times add up.

The oracle is the plain module on the whole global batch.
"""

import json
import zlib
from unittest import mock

import msgspec
import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from meshwise import timeline
from meshwise.engine import data, frame, infer, step
from meshwise.engine.frame import RunRequest
from meshwise.nn import build, initial
from meshwise.options.run import Course
from meshwise.parallel import mesh
from meshwise.spec import (
    Decoder,
    Experts,
    Layout,
    Model,
    Plan,
    WideResNet,
    Workload,
)
from tests.dist.matrix import by_aot

WORKLOAD = Workload(global_batch_size=8, seq_len=8)
IMAGES = Workload(global_batch_size=8, seq_len=1)
SEED = 2
SIZES = {"hidden": 32, "layers": 4, "heads": 4, "ffn": 48, "vocab": 101, "max_seq_len": 12}
GQA = SIZES | {"kv_heads": 1, "head_dim": 8}
MODELS = {
    "gpt": Model(**SIZES),
    "gpt-experts": Model(**SIZES, experts=Experts(num_experts=4, top_k=2, ffn=24, every=2)),
    "llama": Decoder(**GQA),
    "experts": Decoder(**GQA, experts=Experts(num_experts=4, top_k=2, ffn=24, shared_ffn=16)),
    "images": WideResNet(
        blocks=(1, 2, 1), channels=4, width_factor=2, image_size=16, num_classes=10
    ),
}


def piped(schedule="1f1b", pp=2, dp=1, stages_per_rank=1, **changes):
    return Layout(
        pp=pp,
        dp=dp,
        schedule=schedule,
        stages_per_rank=stages_per_rank,
        num_microbatches=4,
        microbatch_size=2 // dp,
        **changes,
    )


LAYOUTS = {
    1: [Layout(microbatch_size=4, num_microbatches=2)],
    2: [
        Layout(dp=2, zero=3, microbatch_size=4),
        Layout(dp=2, ep=2, microbatch_size=2, num_microbatches=2),
        Layout(cp=2, microbatch_size=8),
        Layout(tp=2, microbatch_size=8),
        Layout(tp=2, microbatch_size=4, num_microbatches=2, sequence_parallel=True),
        piped("gpipe", layers=(1, 3)),
        piped("looped_bfs", stages_per_rank=2),
        piped("zbv", stages_per_rank=2),
        piped("dualpipev", stages_per_rank=2),
    ],
    4: [
        piped(tp=2, sequence_parallel=True),
        piped(dp=2, ep=2),
        piped(pp=4),
        piped(pp=3, meshes=((1, 1), (1, 2), (1, 1)), layers=(1, 2, 1)),
        piped(meshes=((2, 1), (1, 2))),
    ],
}


def is_for(layout, model):
    moe = isinstance(model, Model | Decoder) and model.experts is not None
    images = isinstance(model, WideResNet)
    return (layout.ep == 1 or moe) and not (images and (layout.cp > 1 or layout.sequence_parallel))


def strong_weights():
    """With usual ones a tiny model hardly sees other tokens than the last."""
    strong, draw = initial.WEIGHT._replace(std=0.1), initial.draw

    def drawn(start, *rest):
        return draw(strong if start == initial.WEIGHT else start, *rest)

    return mock.patch.object(initial, "draw", drawn)


def set_statistics(module):
    """Running statistics as after a training: numbers that the buffer's name gives."""
    for name, buffer in module.named_buffers():
        if "running" not in name:
            continue
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        value = torch.rand(buffer.shape, generator=generator)
        value += 0.5 if "var" in name else -0.5  # larger means leave ReLU nothing but zeros
        if isinstance(buffer, DTensor):
            value = distribute_tensor(
                value, buffer.device_mesh, buffer.placements, src_data_rank=None
            )
        buffer.copy_(value)


def workload(model):
    return IMAGES if isinstance(model, WideResNet) else WORKLOAD


def batches(model, rows=slice(None)):
    return data.batches(model, workload(model), steps=2, seed=SEED, file=None, rows=rows)


def plain(model):
    """Logits [batches, rows, ...]."""
    module = build(model).eval()
    with strong_weights(), torch.no_grad():
        module.init_weights(SEED)
        set_statistics(module)
        logits = [module(torch.from_numpy(batch)) for batch in batches(model).inputs]
    assert all(one.std(0).min() > 0 for one in logits)  # rows differ
    return torch.stack(logits)


def errors(ranks, plans):
    """Of each plan the largest difference of this rank's logits from the oracle's, over the
    largest logit, and which rows they are."""
    torch.set_num_threads(1)
    plans, found = msgspec.json.decode(plans, type=list[Plan]), []
    reference = plain(plans[0].model)
    for plan in plans:
        place = mesh.build(plan.layout, "cpu")
        rows = step.rows(plan.layout, ranks.rank)
        mine = batches(plan.model, rows)
        with strong_weights():
            inference = infer.prepare(plan, place, mine, ranks.device, dtype="fp32", seed=SEED)
        for stage in inference.pipeline.stages.values():
            assert not any(p.requires_grad for p in stage.module.parameters())
            with torch.no_grad():
                set_statistics(stage.module)
        worst, seen = torch.zeros(()), []
        for index in range(2):
            results = [
                r.full_tensor() if isinstance(r, DTensor) else r
                for r in infer.run(inference, index)
            ]
            if results:
                seen = rows.tolist()
                wanted = reference[index][rows]
                at = step.positions(plan.workload.seq_len, place)
                wanted = wanted if at is None else wanted[:, at]
                logits = torch.cat(results)
                assert logits.shape == wanted.shape
                error = (logits - wanted).abs().max() / wanted.abs().max()
                worst = torch.maximum(worst, error)  # NaN stays, unlike in max()
        found.append([worst.item(), seen])
    return found


@pytest.mark.dist
@pytest.mark.parametrize(
    ("name", "size"),
    [
        pytest.param(name, size, marks=[pytest.mark.whole] * (size > 2 and name != "experts"))
        for name in MODELS
        for size in LAYOUTS
    ],
)
def test_logits_are_those_of_the_plain_module(gloo_ranks, plan_of, name, size):
    model = MODELS[name]
    layouts = [layout for layout in LAYOUTS[size] if is_for(layout, model)]
    plans = [plan_of(model, workload(model), layout) for layout in layouts]
    found = gloo_ranks(size, errors, plans=msgspec.json.encode(plans).decode())
    for layout, of_ranks in zip(layouts, zip(*found, strict=True), strict=True):
        assert all(worst <= 1e-5 for worst, _ in of_ranks), layout.name
        rows = [row for _, seen in of_ranks for row in seen]
        assert set(rows) == set(range(8)), layout.name


def errors_compiled(ranks, plans):
    with mock.patch.object(nn.Module, "compile", by_aot):
        return errors(ranks, plans)


@pytest.mark.dist
def test_layers_of_many_kinds_are_compiled(gloo_ranks, plan_of):
    """torch refuses to compile one function more than eight times."""
    model = WideResNet(blocks=(2,) * 5, channels=4, width_factor=2, image_size=64, num_classes=10)
    plan = plan_of(model, IMAGES, Layout(microbatch_size=8), lowering="compiled")
    plans = msgspec.json.encode([plan]).decode()
    (((worst, _),),) = gloo_ranks(1, errors_compiled, plans=plans)
    assert worst <= 1e-5


def sample(ranks, request):
    ordered = msgspec.json.decode(request, type=RunRequest)
    return msgspec.to_builtins(infer.measure(ranks, ordered))


@pytest.fixture
def request_of(plan_of, tmp_path):
    def build(**changes):
        plan = plan_of(MODELS["gpt"], WORKLOAD, piped())
        asked = Course(mode="infer", steps=3, warmup=1, **changes)
        ordered = RunRequest(plan=plan, run_dir=str(tmp_path), asked=asked)
        return msgspec.json.encode(ordered).decode()

    return build


@pytest.mark.dist
def test_a_run_is_one_sample_and_a_trace(gloo_ranks, request_of, tmp_path):
    found, other = gloo_ranks(2, sample, request=request_of(in_flight=2))
    assert found == other
    assert (found["status"], found["case"]["op"]["mode"]) == ("ok", "infer")
    metrics, of_ranks = found["metrics"], found["rank_times_s"]
    assert found["times_s"] == [max(pair) for pair in zip(*of_ranks, strict=True)]
    assert len(found["times_s"]) == 3
    assert metrics["samples_per_s"] == pytest.approx(8 / metrics["streamed_s"])
    assert metrics["tokens_per_s"] == pytest.approx(64 / metrics["streamed_s"])
    layer = (32 * 96 + 96) + (32 * 32 + 32) + (32 * 48 + 48) + (48 * 32 + 32) + 4 * 32
    ends = 101 * 32 + 12 * 32, 101 * 32 + 2 * 32
    assert metrics["stage_weight_bytes"] == [4 * (2 * layer + end) for end in ends]
    for weight_bytes, peak_bytes in zip(
        metrics["stage_weight_bytes"], metrics["stage_peak_bytes"], strict=True
    ):
        assert weight_bytes < peak_bytes <= metrics["peak_bytes"] < 4 * weight_bytes
    for stage_s, own in zip(metrics["stage_s"], of_ranks, strict=True):
        assert 0 < stage_s <= max(own)  # its own work is a part of what its rank did
    (path,) = tmp_path.glob("trace-*.json")
    events = json.loads(path.read_text())["traceEvents"]
    work = [event for event in events if event["ph"] == "X"]
    assert len(work) == 3 * 2 * 4  # batches, stages, microbatches
    assert {(event["pid"], event["tid"]) for event in work} == {(0, 0), (1, 1)}
    for pid in (0, 1):  # one track: nothing overlaps
        track = sorted((e["ts"], e["dur"]) for e in work if e["pid"] == pid)
        ends_us = [start + long for start, long in track]
        assert all(end <= start for end, (start, _) in zip(ends_us, track[1:], strict=False))


@pytest.mark.dist
def test_the_drivers_time_is_of_the_whole_loop(gloo_ranks, request_of):
    found = gloo_ranks(2, sample, request=request_of(driver_time=True))[0]
    assert found["times_s"] == [found["metrics"]["streamed_s"]]
    assert found["rank_times_s"] == []
    assert len(found["metrics"]["stage_s"]) == 2


def appended(ranks, request):
    frame.run_ranks(ranks, request.encode())


@pytest.mark.dist
def test_rank_0_alone_writes(gloo_ranks, request_of, tmp_path):
    (tmp_path / "samples.jsonl").touch()
    gloo_ranks(2, appended, request=request_of())
    assert len((tmp_path / "samples.jsonl").read_text().splitlines()) == 1


def test_a_trace_names_ranks_and_pipeline_ranks():
    layout = piped(meshes=((2, 1), (1, 1)))
    span = infer.BatchSpan(rank=2, stage=1, batch=5, microbatch=3, start_s=1e-3, end_s=3e-3)
    *named, found = timeline.trace(layout, [span.named])["traceEvents"]
    assert (found["ph"], found["pid"], found["cat"]) == ("X", 1, "forward")
    assert (found["ts"], found["dur"]) == pytest.approx((1000, 2000))
    assert found["args"] == {"rank": 2, "stage": 1, "microbatch": 3, "batch": 5}
    assert [(e["pid"], e["args"]["name"]) for e in named] == [
        (0, "pipeline rank 0"),
        (1, "pipeline rank 1"),
        (1, "rank 2 compute"),
    ]


def test_other_number_formats_are_refused(plan_of):
    plan = plan_of(MODELS["gpt"], WORKLOAD, Layout(microbatch_size=8))
    with pytest.raises(ValueError, match="dtype = 'fp16': inference runs in fp32 or bf16"):
        infer.prepare(plan, None, None, torch.device("cpu"), dtype="fp16", seed=0)
