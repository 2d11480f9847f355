"""Where the time goes, what is not finite, and what waits on the host: of real steps on gloo ranks,
and of timelines made by hand."""

import dataclasses
import itertools

import msgspec
import pytest
import torch

from meshwise.engine import data, nonfinite, phases, step
from meshwise.parallel import mesh, offload
from meshwise.spec import Layout, Model, Plan, Workload, rank_of
from meshwise.spec.phases import ADDENDS

MODEL = Model(hidden=16, layers=4, heads=4, ffn=32, vocab=101, max_seq_len=8)
WORKLOAD = Workload(global_batch_size=8, seq_len=8)
STEPS = 3

SHARDED = Layout(dp=2, zero=3, microbatch_size=2, num_microbatches=2, recompute="full")
SPLIT = Layout(tp=2, sequence_parallel=True, microbatch_size=8, recompute="selective")
PIPED = Layout(pp=2, schedule="1f1b", microbatch_size=2, num_microbatches=4)
LOOPED = Layout(
    pp=2, schedule="zbv", stages_per_rank=2, microbatch_size=2, num_microbatches=4
)  # fmt: skip


def training_of(ranks, plan):
    plan = msgspec.json.decode(plan, type=Plan)
    place = mesh.build(plan.layout, "cpu")
    rows = step.rows(plan.layout, ranks.rank)
    batches = data.batches(plan.model, plan.workload, steps=STEPS, seed=0, file=None, rows=rows)
    return step.prepare(plan, place, batches, ranks.device, dtype="fp32", seed=0)


def encoded(plan_of, layout):
    return msgspec.json.encode(plan_of(MODEL, WORKLOAD, layout)).decode()


def weights(training):
    whole = [p.detach() for p in training.parameters()]
    local = [t.to_local() if hasattr(t, "to_local") else t for t in whole]
    return [t.flatten().tolist() for t in local]


def measured(ranks, plan):
    """The phases, this rank's row, and whether they trained as two ordinary steps do."""
    training, twin = training_of(ranks, plan), training_of(ranks, plan)
    found = phases.measure(ranks, training, 1)
    for _ in range(2):
        step.run(twin, 1)
    row = [f"{a.kind} {a.stage}.{a.microbatch}" for a in training.pipeline.row]
    return [msgspec.to_builtins(found), row, weights(training) == weights(twin)]


@pytest.mark.dist
@pytest.mark.parametrize("layout", [SHARDED, SPLIT, PIPED, LOOPED], ids=lambda layout: layout.name)
def test_phases_add_up_to_the_step_on_every_rank(gloo_ranks, plan_of, layout):
    replies = gloo_ranks(2, measured, plan=encoded(plan_of, layout))
    found = replies[0][0]
    assert found == replies[1][0] and all(same for *_, same in replies)
    for rank, of_rank in enumerate(found["ranks"]):
        assert of_rank["rank"] == rank
        assert sum(of_rank[name] for name in ADDENDS) == pytest.approx(found["step_s"], rel=1e-9)
        assert min(of_rank[name] for name in ("forward_s", "backward_s", "optimizer_s")) > 0
        assert (of_rank["bubble_s"] > 0) == (layout.pp > 1)
        assert of_rank["communication_s"] > 0
        assert max(of_rank["communication_s"], of_rank["forward_s"]) < found["step_s"]
        spans = [s for s in found["spans"] if s["rank"] == rank and s["stream"] == "compute"]
        did = [s["name"] for s in spans if s["name"] not in ("exchange", "clip", "optimizer")]
        assert list(dict.fromkeys(did)) == replies[rank][1]
        ordered = sorted(spans, key=lambda s: s["start_s"])
        assert all(a["end_s"] <= b["start_s"] for a, b in itertools.pairwise(ordered))
        assert ordered[-1]["name"] == "optimizer" and ordered[-1]["end_s"] <= found["step_s"]
        messages = [s for s in found["spans"] if s["rank"] == rank and s["stream"] == "messages"]
        assert bool(messages) == (layout.pp > 1)


def test_time_is_attributed_as_drawn():
    """Forward 1-4, waits 4-5, backward 5-6.5, exchanges 6.5-7 (the last rank from 6.8 on), clips
    7-9 (the last rank from 8 on), ends at 9.5. Communicates 2-3.5, of which it computes 2-3;
    4.2-4.6, while it waits; 7.5-9."""
    marked = phases.Marked(
        ["F 0.0", "wait", "B 0.0", "exchange", "clip", "optimizer", "end"],
        [1.0, 4.0, 5.0, 6.5, 7.0, 9.0, 9.5],
    )
    named = [phases.NamedSpan("x", *at) for at in ((2.0, 3.5), (4.2, 4.6), (7.5, 9.0))]
    trace = phases.Trace(marked.starts, [(1.0, 3.0), (5.0, 7.5)], named, [])
    drawn = {"step_s": 10.0, "latest": {"exchange": 6.8, "clip": 8.0}}
    attributed = phases.attributed(1, marked, trace, **drawn, piped=True)
    expected = {
        "rank": 1,
        "forward_s": 2.5,
        "backward_s": 1.5,
        "optimizer_s": 0.5 + 0.5,
        "exposed_communication_s": 0.5 + 0.2 + 1.0,
        "bubble_s": 1.0 + 0.3 + 0.5 + 0.5,
        "other_s": 1.0,
        "communication_s": 1.5 + 0.4 + 1.5,
    }
    assert msgspec.structs.asdict(attributed) == pytest.approx(expected)
    alone = phases.attributed(1, marked, trace, **drawn, piped=False)
    assert alone.exposed_communication_s == pytest.approx(2.5)
    assert alone.other_s == pytest.approx(1.5)


def event(name, start_s, length_s, category="kernel", **arguments):
    return {
        "ph": "X", "cat": category, "name": name, "ts": start_s * 1e6, "dur": length_s * 1e6,
        "tid": 7, "args": arguments,
    }  # fmt: skip


def test_a_gpu_trace_is_sorted_into_marks_computation_and_traffic():
    send_receive = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"
    events = [
        {"ph": "M", "name": "process_name"},
        event("at::cuda::(anonymous namespace)::spin_kernel(long)", 0, 1e-6),
        event("aten::mm", 0, 9, "cpu_op"),
        event("sm90_xmma_gemm_bf16", 1, 2),
        event("Memcpy DtoD (Device -> Device)", 3, 1, "gpu_memcpy"),
        event("Memcpy HtoD (Pinned -> Device)", 5, 1, "gpu_memcpy"),
        event("ncclDevKernel_AllGather_RING_LL", 2, 2, **{"Collective name": "_allgather_base"}),
        event(send_receive, 4, 1, **{"Collective name": "all_to_allv"}),
        event(send_receive, 6, 1, **{"Collective name": "recv"}),
        event("at::cuda::(anonymous namespace)::spin_kernel(long)", 8, 1e-6),
    ]
    trace = phases.read(events, "cuda", piped=True)
    assert trace.marks == [0, 8] and trace.compute == [(1, 4)]
    assert trace.communication == [("allgather_base", 2, 4), ("all_to_allv", 4, 5)]
    assert trace.messages == [("recv", 6, 7)]
    assert phases.read(events, "cuda", piped=False).messages == []


def test_a_cpu_trace_is_sorted_by_thread_and_name(tmp_path):
    """What torch really writes, and beside it a thread of gloo."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        with torch.profiler.record_function(phases.MARK):
            pass
        torch.ones(300, 300) @ torch.ones(300, 300)
        with torch.profiler.record_function(phases.MARK):
            pass
    path = tmp_path / "trace.json"
    profiler.export_chrome_trace(str(path))
    events = msgspec.json.decode(path.read_bytes())["traceEvents"]
    end_s = max(e["ts"] + e.get("dur", 0) for e in events if "ts" in e) / 1e6
    gloo = [event("gloo:all_reduce", end_s, 1), event("gloo:recv", end_s, 1)]
    gloo += [event("aten::add", end_s, 1, "cpu_op")]
    trace = phases.read([*events, *gloo], "cpu", piped=True)
    first_s, last_s = trace.marks
    assert trace.compute and all(first_s <= a < b <= last_s for a, b in trace.compute)
    assert [name for name, *_ in trace.communication] == ["all_reduce"]
    assert [name for name, *_ in trace.messages] == ["recv"]


def parameter(training, name):
    """A local part of it, where this rank has the parameter."""
    for stage in training.pipeline.stages.values():
        found = dict(stage.module.named_parameters()).get(name)
        if found is not None:
            return found.to_local() if hasattr(found, "to_local") else found.detach()
    return torch.empty(0)


def looked(ranks, plan):
    """What is found in a sound model, with an infinite gradient, with weights so large that sums of
    products are infinite, and with an infinite weight."""
    training = training_of(ranks, plan)
    sound = nonfinite.first_module(ranks, training, 0)

    def steep(logits, targets):
        value = training.loss(logits, targets)
        return value + (value - value.detach()).sqrt()  # adds 0, and its gradient is infinite

    gradient = nonfinite.first_module(ranks, dataclasses.replace(training, loss=steep), 0)
    before = weights(training)
    weight = parameter(training, "layers.2.mlp.up.weight")
    with torch.no_grad():
        weight.fill_(3e38)
    output = nonfinite.first_module(ranks, training, 0)
    with torch.no_grad():
        weight.view(-1)[:1] = float("inf")
    value = nonfinite.first_module(ranks, training, 0)
    gradients = [p.grad for p in training.parameters() if p.grad is not None]
    return [sound, gradient, output, value, len(before), len(gradients)]


@pytest.mark.dist
@pytest.mark.parametrize(
    ("layout", "stage", "last"),
    [(SHARDED, 0, 0), (SPLIT, 0, 0), (PIPED, 1, 1), (LOOPED, 2, 3)],
    ids=["sharded", "split", "piped", "looped"],
)
def test_the_first_module_that_is_not_finite_is_named(gloo_ranks, plan_of, layout, stage, last):
    replies = gloo_ranks(2, looked, plan=encoded(plan_of, layout))
    for sound, gradient, output, value, _, left in replies:
        assert sound is None and left == 0
        assert output.startswith(f"the output of layers.2.mlp.up (stage {stage}, microbatch 0, ")
        assert value.startswith(
            f"the value before the step of layers.2.mlp.up.weight (stage {stage}, "
        )
        expected = f"the gradient of head.projection (stage {last}, microbatch 0, "
        assert gradient.startswith(expected)
    assert replies[0][:4] == replies[1][:4]


def trained(ranks, plan):
    """Whether two steps give the same losses and weights when activations wait on the host; which
    layers' copies go there; how often a layer's tensors come back."""
    alone, moving = training_of(ranks, plan), training_of(ranks, plan)
    running, marks, sent, losses, fetches = [], [], set(), [], 0
    copy, fetch = offload._SavedByCall.copy, offload._SavedByCall.fetch

    def copied(self, *to):
        if marks[-1].startswith("F"):
            sent.add(running[-1])
        return copy(self, *to)

    def fetched(self):
        nonlocal fetches
        fetches += not self.device
        fetch(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(offload, "MIN_BYTES", 1)
        patch.setattr(offload._SavedByCall, "copy", copied)
        patch.setattr(offload._SavedByCall, "fetch", fetched)
        for stage in moving.pipeline.stages.values():
            offload.offload_saved(stage.module)
            for name, layer in stage.module.layers.items():
                layer.register_forward_pre_hook(lambda *_, name=name: running.append(int(name)))
        for index in range(2):
            losses.append([step.run(alone, index), step.run(moving, index, marks.append)])
    same = all(torch.equal(*each) for each in losses) and weights(alone) == weights(moving)
    return [same, sorted(sent), fetches]


@pytest.mark.dist
@pytest.mark.parametrize(
    "layout",
    [SHARDED, PIPED, *(pytest.param(each, marks=pytest.mark.whole) for each in (SPLIT, LOOPED))],
    ids=lambda layout: layout.name,
)
def test_offload_changes_no_bit_and_leaves_the_last_layer_of_each_stage(
    gloo_ranks, plan_of, layout
):
    deep = msgspec.structs.replace(MODEL, layers=8)
    plan = msgspec.json.encode(plan_of(deep, WORKLOAD, layout)).decode()
    stages = layout.stage_layers(deep.layers)
    for rank, found in enumerate(gloo_ranks(2, trained, plan=plan)):
        mine = [
            layers
            for stage, layers in enumerate(stages)
            if rank_of(layout.schedule, stage, layout.pp) == layout.pipeline_rank_of(rank)
        ]
        sent = sorted(layer for layers in mine for layer in layers[:-1])
        assert found == [True, sent, 2 * layout.num_microbatches * len(sent)]
