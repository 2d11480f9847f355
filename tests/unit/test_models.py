"""The operation graph against closed forms: parameters, FLOPs, saved bytes, Megatron's traffic."""

from collections import Counter

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwise import models
from meshwise.models import catalogue, placement
from meshwise.spec import (
    Block,
    Collective,
    Cuts,
    Elementwise,
    Experts,
    Gemm,
    LayerKind,
    Layout,
    Model,
    Workload,
    stages_of,
)
from meshwise.spec.plan import layout_of

TINY = Model(hidden=32, layers=3, heads=4, ffn=128, vocab=64, max_seq_len=16)


@pytest.mark.parametrize("name", catalogue.names())
def test_parameters(name):
    model = catalogue.get(name)
    h, layers = model.hidden, model.layers
    exact = layers * (12 * h**2 + 13 * h) + 2 * h + (model.vocab + model.max_seq_len) * h
    assert models.num_parameters(model) == exact


@pytest.mark.parametrize(  # PFLOP of a step of 1024 x 1024 tokens: Alpa's own formula, its table
    ("name", "petaflops"),
    [("gpt-125m", 0.9005), ("gpt-350m", 2.5465), ("gpt-2.6b", 17.7131), ("gpt-76b", 486.2040)],
)
def test_flops_of_alpas_table(name, petaflops):
    workload = Workload(global_batch_size=1024, seq_len=1024)
    flops = models.step_flops(catalogue.get(name), workload, "alpa")
    assert flops / 1e15 == pytest.approx(petaflops, abs=5e-5)


def test_flops_of_the_graph_are_the_flops_of_the_convention():
    """Products of the graph = torchtitan's count, less the biases and norms it multiplies by 6."""
    model = catalogue.get("gpt-125m")
    batch, seq = 2, 512
    tasks = models.program_of(
        models.graph(model, batch, seq, "fp32"), Layout(microbatch_size=batch), "fp32"
    ).tasks
    gemms = sum(task.op.flops for task in tasks if isinstance(task.op, Gemm))
    small = models.num_parameters(model) - model.max_seq_len * model.hidden
    small -= 12 * model.layers * model.hidden**2 + model.vocab * model.hidden
    counted = models.step_flops(model, Workload(global_batch_size=batch, seq_len=seq))
    attention = 12 * model.layers * model.hidden * seq * batch * seq
    assert gemms == counted - attention - 6 * small * batch * seq


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_saved_activations_of_a_layer(dtype):
    """x, norm, qkv (3), attention, x, norm, up (4), gelu (4): 16 sbh elements, and small ones."""
    b, s, h, a = 4, 16, TINY.hidden, TINY.heads
    size = 4 if dtype == "fp32" else 2
    stats, lse = 2 * (2 * b * s * 4), b * a * s * 4
    per_layer = 16 * b * s * h * size + stats + lse
    saved = models.saved_activation_bytes(TINY, b, s, dtype)
    # the first layer's input is written by the embedding, the last layer's output read by the head
    assert saved["layer"] == TINY.layers * per_layer
    assert saved["embed"] == b * s * h * size
    assert saved["head"] == b * s * (h * size + 8) + b * s * TINY.vocab * 4


def kinds(tasks):
    return Counter(task.op.kind for task in tasks if isinstance(task.op, Collective))


@pytest.mark.parametrize(
    ("sequence_parallel", "direction", "expected"),
    [
        (False, "forward", {"all_reduce": 2}),
        (False, "backward", {"all_reduce": 2}),
        (True, "forward", {"all_gather": 2, "reduce_scatter": 2}),
        (True, "backward", {"all_gather": 2, "reduce_scatter": 2}),
    ],
)
def test_megatrons_collectives_follow(sequence_parallel, direction, expected):
    """arXiv:1909.08053 and 2205.05198: two all-reduces a direction, or the pair under SP."""
    block = Block(
        part="layer", model=msgspec.structs.replace(TINY, layers=1), microbatch_size=2,
        seq_len=8, tp=2, sequence_parallel=sequence_parallel, direction=direction,
    )  # fmt: skip
    tasks = models.block_tasks(block)
    large = [t for t in tasks if not isinstance(t.op, Collective) or t.op.size_bytes > 2 * 32 * 4]
    assert kinds(large) == expected
    for task in large:
        if isinstance(task.op, Collective):
            assert task.op.size_bytes == 2 * 8 * 32 * 2  # the whole residual stream, bf16


@settings(deadline=None)
@given(
    tp=st.sampled_from([1, 2, 4]),
    sequence_parallel=st.booleans(),
    batch=st.integers(1, 3),
    seq=st.sampled_from([4, 8, 16]),
)
def test_tensor_parallelism_conserves_flops(tp, sequence_parallel, batch, seq):
    whole = models.graph(TINY, batch, seq, "fp32")
    layout = Layout(tp=tp, sequence_parallel=sequence_parallel and tp > 1, microbatch_size=batch)
    one = models.program_of(whole, Layout(microbatch_size=batch), "fp32").tasks
    shard = models.program_of(whole, layout, "fp32").tasks
    assert sum(t.op.flops for t in shard) * tp == sum(t.op.flops for t in one)


@settings(deadline=None)
@given(
    zero=st.integers(0, 3), dp=st.sampled_from([2, 4]), tp=st.sampled_from([1, 2]),
    num_microbatches=st.integers(1, 3), dtype=st.sampled_from(["fp32", "bf16"]),
)  # fmt: skip
def test_traffic_of_data_parallelism(zero, dp, tp, num_microbatches, dtype):
    """ZeRO paper (arXiv:1910.02054): gathers and reductions per step, in bytes of the model."""
    layout = Layout(dp=dp, tp=tp, zero=zero, num_microbatches=num_microbatches)
    program = models.program_of(models.graph(TINY, 1, 8, dtype), layout, dtype)
    moved: Counter[str] = Counter()
    for task in program.tasks:
        if task.stream == "dp":
            assert task.op.group_size == dp and task.op.group_stride == tp
            moved[task.op.kind] += task.op.size_bytes
    elements = program.resident_bytes["parameters"] // 4 * (dp if zero else 1)
    size = 4 if dtype == "fp32" else 2
    per_step = elements * 4
    if zero == 0:
        assert moved == {"all_reduce": per_step}
    else:
        reductions = num_microbatches if zero >= 2 else 1
        assert moved["reduce_scatter"] == pytest.approx(per_step * reductions, rel=0.01)
        if zero < 3:
            assert moved["all_gather"] == pytest.approx(elements * size, rel=0.01)
        else:  # twice, but the root unit (embedding, norm, head) stays from forward to backward
            root = (64 // tp + 16 + 2) * 32
            twice = (2 * elements - root) * size * num_microbatches
            assert moved["all_gather"] == pytest.approx(twice, rel=0.01)


def test_memory_traffic_of_the_optimizer():
    program = models.program_of(models.graph(TINY, 1, 8, "bf16"), Layout(), "bf16")
    (adamw,) = [
        t.op for t in program.tasks if isinstance(t.op, Elementwise) and t.op.kind == "adamw"
    ]
    assert adamw.bytes == 28 * models.num_parameters(TINY)


def test_every_read_was_written_before():
    layout = Layout(dp=2, tp=2, zero=3, sequence_parallel=True, num_microbatches=2)
    program = models.program_of(models.graph(TINY, 1, 8, "bf16"), layout, "bf16")
    written: set[str] = set()
    for task in program.tasks:
        assert written.issuperset(task.reads), task
        assert set(task.writes) <= program.buffers.keys()
        written |= set(task.writes)


SP = {"tp": 2, "sequence_parallel": True}
GOLDEN = {  # tasks, FLOPs, bytes moved, buffers, their bytes; taken before stages could be cut,
    # those of +sp and dp3 when their collectives became those of a real step (tests/dist);
    # gradients in fp32 add up where they are made
    ("fp32", Layout()): (100, 1910784, 2523460, 123, 304164),
    ("bf16", Layout(num_microbatches=2)): (222, 3821568, 3689992, 266, 887688),
    ("fp32", Layout(dp=2, num_microbatches=2)): (214, 3821568, 4721032, 258, 1097160),
    ("bf16", Layout(dp=4, zero=1, num_microbatches=3, microbatch_size=2)): (
        330, 11464704, 4037084, 395, 1212716,
    ),
    ("bf16", Layout(dp=2, zero=2, tp=2, num_microbatches=2)): (
        260, 1910784, 1409368, 308, 536264,
    ),
    ("bf16", Layout(dp=2, zero=3, num_microbatches=2, **SP, tp_sums="first")): (
        338, 1910784, 1672584, 356, 767688,
    ),
    ("fp32", Layout(**SP | {"tp": 4}, tp_sums="first")): (158, 477696, 915092, 166, 241940),
    ("fp32", Layout(dp=3, zero=3, tp=2)): (139, 955392, 1487084, 162, 637172),
}  # fmt: skip


@pytest.mark.parametrize(("dtype", "layout"), GOLDEN, ids=lambda x: getattr(x, "name", x))
def test_a_whole_model_is_what_it_was(dtype, layout):
    program = models.program_of(models.graph(TINY, layout.microbatch_size, 8, dtype), layout, dtype)
    sizes = [buffer.num_bytes for buffer in program.buffers.values()]
    flops, moved = (sum(getattr(t.op, of) for t in program.tasks) for of in ("flops", "bytes"))
    counted = (len(program.tasks), flops, moved, len(sizes), sum(sizes))
    assert counted == GOLDEN[dtype, layout]


def stages(model, counts, dtype="fp32", **options):
    """Graphs of a model's stages with ``counts`` layers."""
    last = len(counts) - 1
    return [
        models.graph(
            model, 1, 8, dtype, layers=(LayerKind(),) * n, first=i == 0, last=i == last, **options
        )
        for i, n in enumerate(counts)
    ]


def run(graph, layout=Layout(), dtype="fp32", **options):  # noqa: B008
    return models.program_of(graph, layout, dtype, **options)


@settings(deadline=None)
@given(counts=st.lists(st.integers(1, 3), min_size=1, max_size=4), tp=st.sampled_from([1, 2]))
def test_stages_add_up_to_the_model(counts, tp):
    model = msgspec.structs.replace(TINY, layers=sum(counts))
    layout = Layout(tp=tp)
    programs = [run(graph, layout) for graph in stages(model, counts)]
    whole = run(models.graph(model, 1, 8, "fp32"), layout)
    copy = 0 if len(counts) == 1 else 4 * model.vocab * model.hidden // tp  # of the tied weight
    parameters = [program.resident_bytes["parameters"] for program in programs]
    assert sum(parameters) == whole.resident_bytes["parameters"] + copy
    flops = [task.op.flops for program in programs for task in program.tasks]
    assert sum(flops) == sum(task.op.flops for task in whole.tasks)


def test_equal_stages_are_one_graph():
    first, one, other, last = stages(msgspec.structs.replace(TINY, layers=8), [2, 2, 2, 2])
    assert one is other
    tied = [[t.name for t in g.parameters() if "vocab" in t.dims] for g in (first, one, last)]
    assert tied == [["embed.weight"], [], ["head.weight"]]


def of_phase(program, phase):
    return [task for task in program.tasks if task.phase == phase]


REDONE = {
    "none": [],
    "selective": ["gelu", "norm2", "norm1"],  # each as it is needed
    "full": ["norm1", "qkv", "attention", "out", "add1", "norm2", "up", "gelu"],
}


@pytest.mark.parametrize("word", REDONE)
def test_what_is_recomputed(word):
    """full: all of the layer but its last product and sum; backward is what it always was."""
    program = run(models.graph(TINY, 1, 8, "fp32", recompute=(word, "none", word)))
    redone = of_phase(program, "recompute")
    assert [task.name for task in redone] == [
        f"layers.{i}.{name}.again" for i in (2, 0) for name in REDONE[word]
    ]
    forward = {task.name: task.op for task in of_phase(program, "forward")}
    assert all(task.op == forward[task.name.removesuffix(".again")] for task in redone)
    plain = run(models.graph(TINY, 1, 8, "fp32"))
    for phase in ("forward", "backward"):
        mine, same = ([(t.name, t.op) for t in of_phase(p, phase)] for p in (program, plain))
        assert mine == same


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_saved_activations_of_a_recomputed_layer(dtype):
    """Selective: x, qkv (3), attention, x, up (4): 10 sbh elements. Full: x."""
    b, s, h, a = 4, 16, TINY.hidden, TINY.heads
    size = 4 if dtype == "fp32" else 2
    saved = models.saved_activation_bytes(TINY, b, s, dtype, ("full", "selective", "full"))
    # a layer's output, saved as the next one's input, is counted with the layer that wrote it
    assert saved["layer"] == (3 + 9) * b * s * h * size + b * a * s * 4
    none = models.saved_activation_bytes(TINY, b, s, dtype)
    assert saved["embed"] == none["embed"] and saved["head"] == none["head"]


@pytest.mark.parametrize(
    ("word", "sequence_parallel", "expected"),
    [
        ("selective", False, {}),
        ("selective", True, {"all_gather": 2}),  # before qkv and up, as in forward
        ("full", False, {"all_reduce": 1}),  # after out; that after down is not needed
        ("full", True, {"all_gather": 2, "reduce_scatter": 1}),
    ],
)
def test_recomputed_collectives(word, sequence_parallel, expected):
    graph = models.graph(TINY, 2, 8, "bf16", recompute=(word, "none", "none"))
    layout = Layout(tp=2, sequence_parallel=sequence_parallel, microbatch_size=2)
    program = run(graph, layout, "bf16")
    assert kinds(of_phase(program, "recompute")) == expected
    plain = run(models.graph(TINY, 2, 8, "bf16"), layout, "bf16")
    assert kinds(of_phase(program, "backward")) == kinds(of_phase(plain, "backward"))


LAYOUTS = [
    Layout(num_microbatches=2),
    Layout(dp=4, replicas=2, zero=1, num_microbatches=2),
    Layout(dp=2, tp=2, zero=3, sequence_parallel=True, num_microbatches=2),
]


@pytest.mark.parametrize("word", REDONE)
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
@pytest.mark.parametrize("counts", [[3], [1, 1, 1]])
def test_a_backward_in_two_parts(counts, layout, word):
    """I and W do what B does, and W is the gradients of weights alone; but all of B in a first
    stage, which sends no gradient on."""
    for graph in stages(TINY, counts, "bf16", recompute=(word,) * counts[0]):
        whole, split = (run(graph, layout, "bf16", split=split) for split in (False, True))
        for program, cycle in ((whole, "FB"), (split, "FIW")):
            assert [a.kind for a in program.actions] == list(cycle * 2)
            edges = [a.start for a in program.actions] + [program.actions[-1].stop]
            assert [a.stop for a in program.actions] == edges[1:] and edges[0] == 0
            rest = program.tasks[edges[-1] :]
            sums = [f"sums.{name}" for name in ("copy_in", "all_reduce", "copy_out")]
            assert [t.name for t in rest] == [*sums * (layout.tp > 1), "grad_norm", "adamw"]

        def work(program):
            """All but gathers, which FSDP2 needs not do for W, nor in parts for I."""
            return Counter((t.name, t.op, t.phase) for t in program.tasks if t.part != "dp")

        assert work(split) == work(whole)
        early, late = (
            [split.tasks[i] for a in split.actions if a.kind == kind for i in range(*a[2:])]
            for kind in "IW"
        )
        assert bool(early) == ("tokens" not in graph.tensors)
        if not early:
            continue
        computed = [t for t in late if not isinstance(t.op, Collective)]
        assert {split.buffers[name].role for t in computed for name in t.writes} <= {
            "gradient", "communication",
        }  # fmt: skip
        products, of_weights = (
            [t for t in some if isinstance(t.op, Gemm) and t.phase != "recompute"]
            for some in (split.tasks, computed)
        )
        assert len(products) == 3 * len(of_weights)


def test_a_split_backward_reduces_after_the_last_weight():
    layout = Layout(dp=2, zero=3, num_microbatches=2)
    program = run(stages(TINY, [1, 2], "bf16")[1], layout, "bf16", split=True)
    for action in program.actions:
        names = [task.op.kind for task in program.tasks[action.start : action.stop]
                 if isinstance(task.op, Collective)]  # fmt: skip
        # the root stays gathered from forward to backward
        expected = {
            "F": ["all_gather"] * 3, "I": ["all_gather"] * 2, "W": ["reduce_scatter"] * 3,
        }  # fmt: skip
        assert names == expected[action.kind]


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("word", REDONE)
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_what_a_stage_receives_lives_from_its_action_on(layout, word, split):
    graph = stages(TINY, [1, 1, 1], "bf16", recompute=(word,))[1]
    program = run(graph, layout, "bf16", split=split)
    arrives = {}  # buffer -> task
    for action in program.actions:
        name = {"F": "stage.in", "B": "d.layers.0.add2.y", "I": "d.layers.0.add2.y"}
        if action.kind in name:
            arrives[f"{name[action.kind]}#{action.microbatch}"] = action.start
    written: set[str] = set()
    for index, task in enumerate(program.tasks):
        here = {name for name, start in arrives.items() if start == index}
        assert (written | here).issuperset(task.reads), task
        assert here <= set(task.writes)
        written |= set(task.writes)
    # half of the positions under sequence parallelism, as the stage before leaves them
    tp = layout.tp if layout.sequence_parallel else 1
    assert {program.buffers[name].num_bytes for name in arrives} == {8 * 32 * 2 // tp}
    (grad,) = [t for t in program.tasks if t.name == "layers.0.norm1.grad" and "#0" in t.writes[0]]
    assert "stage.in#0" in grad.reads
    returned = [t for t in program.tasks if t.name == "layers.0.norm1.accumulate.stage.in"]
    assert len(returned) == 2  # the gradient of the input, in each microbatch


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_traffic_of_replicas(zero):
    """HSDP: ZeRO over dp / replicas ranks, then an all-reduce of each shard over the replicas."""
    layout = Layout(dp=8, replicas=2, tp=2, zero=zero, num_microbatches=3)
    within = Layout(dp=4, tp=2, zero=zero, num_microbatches=3)
    graph = models.graph(TINY, 1, 8, "bf16")
    program, without = run(graph, layout, "bf16"), run(graph, within, "bf16")
    assert program.resident_bytes == without.resident_bytes
    across = [t for t in program.tasks if t.stream == "dp" and t.op.kind == "all_reduce"]
    assert [t for t in program.tasks if t not in across] == list(without.tasks)
    shards = {}
    for task in program.tasks:
        if task.stream == "dp" and task.op.kind == "reduce_scatter":
            shards[task.writes] = -(-task.op.size_bytes // 4)
    assert len(across) == 4 * (1 if zero == 1 else 3)  # units, microbatches
    for task in across:
        assert (task.op.group_size, task.op.group_stride) == (2, 2 * 4)
        assert task.op.dtype == "fp32" and task.op.size_bytes == shards[task.reads]
        assert task.reads == task.writes  # in place


def test_impossible_degrees_are_named():
    assert placement.obstacle(TINY, 8, Layout(tp=4)) is None
    assert placement.obstacle(TINY, 8, Layout(tp=3)) == "tp = 3: must divide heads = 4"
    reason = placement.obstacle(TINY, 6, Layout(tp=4, sequence_parallel=True))
    assert reason == "tp = 4: must divide seq_len / cp = 6"


WHOLE_EXPERTS = Cuts(experts="experts")


def test_tp_ranks_hold_different_experts_where_tokens_are_cut():
    moe = msgspec.structs.replace(TINY, experts=Experts(num_experts=8, top_k=2, ffn=64))
    both = Layout(dp=4, ep=4, tp=2, sequence_parallel=True, cuts=WHOLE_EXPERTS)
    assert placement.obstacle(moe, 8, both) is None
    refused = {
        "ep \\* tp = 16: must divide experts.num_experts = 8": {"tp": 4},
        "tokens of their own; cut the stream": {"sequence_parallel": False},
    }
    for reason, fields in refused.items():
        with pytest.raises(ValueError, match=reason):
            layout = msgspec.structs.replace(both, **fields)
            placement.check(moe, Workload(global_batch_size=4, seq_len=8), layout)
    dense = Layout(tp=2, sequence_parallel=True, cuts=WHOLE_EXPERTS)
    assert "the model has no experts" in (placement.obstacle(TINY, 8, dense) or "")


def test_rows_of_whole_experts_travel_without_a_gather():
    """Counted by hand: batch * seq / tp tokens go to top_k experts of ep * tp neighbouring ranks,
    and around the experts nothing else is moved."""
    moe = msgspec.structs.replace(TINY, experts=Experts(num_experts=8, top_k=2, ffn=64))
    layout = Layout(dp=2, ep=2, tp=2, sequence_parallel=True, cuts=WHOLE_EXPERTS, microbatch_size=2)
    tasks = models.program_of(models.graph(moe, 2, 8, "fp32"), layout, "fp32").tasks
    sent = [t.op for t in tasks if isinstance(t.op, Collective) and t.op.kind == "all_to_all"]
    rows = [op for op in sent if op.dtype == "fp32"]
    assert len(rows) == 4 * 3  # dispatch and combine, forward and backward, of three layers
    assert {(op.size_bytes, op.group_size, op.group_stride) for op in rows} == {
        (2 * 8 // 2 * 2 * 32 * 4, 4, 1)
    }
    around = ("router", "experts", "norm2")
    tp = [t for t in tasks if isinstance(t.op, Collective) and t.stream == "compute"]
    moved = {t.op.kind for t in tp if any(f".{word}" in t.name for word in around)}
    assert moved == {"all_to_all", "all_reduce"}  # rows, and loads and gradients of the router
    (placed,) = {str(stage.placements["experts"]) for stage in stages_of(layout, moe)}
    assert placed == str({"batch": ("dp",), "seq": ("tp",), "experts": ("ep", "tp")})
    assert layout_of(stages_of(layout, moe), layout) == layout
    plain = msgspec.structs.replace(layout, cuts=Cuts())
    assert layout_of(stages_of(layout, moe), plain).of_stage(0).placed.experts == "experts"
    grouped = [t.op for t in tasks if isinstance(t.op, Gemm) and t.op.groups > 1]
    assert {(op.groups, 64 in (op.m, op.n, op.k)) for op in grouped} == {(2, True)}  # of all ffn


LIMITED = msgspec.structs.replace(
    TINY,
    experts=Experts(num_experts=8, top_k=2, ffn=64, capacity_factor=1.3, group_size=16),
)


def test_places_of_experts_by_hand():
    """An expert's share of 16 tokens to 2 of 8 experts is 4, 1.3 of it 5. 3 groups a rank."""
    assert LIMITED.experts.capacity == 5
    layout = Layout(dp=2, ep=2, microbatch_size=6)
    tasks = models.program_of(models.graph(LIMITED, 6, 8, "bf16"), layout, "bf16").tasks
    rows = 8 * 3 * 5  # this rank's places with all experts, or two ranks' with its four
    products = [t.op for t in tasks if isinstance(t.op, Gemm) and t.op.groups > 1]
    assert all(op.batched and op.groups == 4 for op in products)
    forward = Gemm(m=rows, n=64, k=32, groups=4, batched=True)
    weights = Gemm(m=64, n=32, k=rows, groups=4, batched=True, trans_a=True, trans_b=False)
    assert {forward, weights} <= set(products) and len(products) == 3 * 2 * 3
    sent = [t.op for t in tasks if isinstance(t.op, Collective) and t.op.kind == "all_to_all"]
    assert {op.size_bytes for op in sent} == {rows * 32 * 2}  # no counts of rows
    assert len(sent) == 3 * 4 and not any("pad" in t.name for t in tasks if "experts" in t.name)
    assert models.num_parameters(LIMITED) == models.num_parameters(
        msgspec.structs.replace(LIMITED, experts=Experts(num_experts=8, top_k=2, ffn=64))
    )


@pytest.mark.parametrize(
    ("layout", "reason"),
    [
        (Layout(microbatch_size=2), None),
        (Layout(microbatch_size=3), "microbatch_size = 3: each rank has 24 tokens in a row, which"),
        (Layout(tp=2, sequence_parallel=True, microbatch_size=2), None),
        (Layout(tp=2, cuts=Cuts(stream="batch", experts="batch"), microbatch_size=4), None),
        (
            Layout(tp=2, cuts=Cuts(stream="batch", experts="batch"), microbatch_size=2),
            "microbatch_size = 2: each rank has 8 tokens in a row",
        ),
        (
            Layout(tp=2, sequence_parallel=True, cuts=WHOLE_EXPERTS, microbatch_size=8),
            "tp = 2: each rank has 4 tokens of a sequence in a row, which experts.group_size = 16",
        ),
        (Layout(cp=2, microbatch_size=8), "cp = 2: each rank has 2 tokens of a sequence in a row"),
    ],
)
def test_a_rank_has_whole_groups_of_tokens(layout, reason):
    found = placement.obstacle(LIMITED, 8, layout)
    assert found is None if reason is None else found.startswith(reason)


def test_groups_need_a_capacity_and_the_other_way_round():
    with pytest.raises(ValueError, match=r"Experts.group_size = None: must be given with capacity"):
        Experts(num_experts=8, top_k=2, ffn=64, capacity_factor=1.0)
    with pytest.raises(ValueError, match=r"Experts.capacity_factor = None: must be given with"):
        Experts(num_experts=8, top_k=2, ffn=64, group_size=16)
    few, many = ({"capacity_factor": factor, "group_size": 16} for factor in (0.01, 1e300))
    assert Experts(num_experts=8, top_k=2, ffn=64, **few).capacity == 1
    assert Experts(num_experts=8, top_k=2, ffn=64, **many).capacity == 16  # nobody comes twice


def test_catalogue_suggests_the_nearest_name():
    with pytest.raises(ValueError, match=r"did you mean gpt-2.6b\?"):
        catalogue.get("gpt2.6b")


def test_too_long_a_sequence_is_refused():
    with pytest.raises(ValueError, match="seq_len = 32"):
        models.graph(TINY, 1, 32, "fp32")


def test_a_compiled_layer_does_not_save_what_it_computes_again_element_by_element():
    llama = catalogue.find("llama-3-8b")
    block = models.blocks_of(llama, 8192, Layout(microbatch_size=1), "bf16")[
        ("layer", ""), "backward"
    ]
    whole, kept = (models.saved_block_bytes(block, compiled=way) for way in (False, True))
    silu = 2 * 8192 * llama.ffn  # the gate behind its activation
    assert silu <= whole - kept <= 1.05 * silu
    assert kept == pytest.approx(1_148_256_272, rel=0.01)  # by torch on an H200: block saved_bytes
    gpt = catalogue.find("gpt-2.6b")
    block = models.blocks_of(gpt, 1024, Layout(microbatch_size=4), "bf16")[
        ("layer", ""), "backward"
    ]
    whole, kept = (models.saved_block_bytes(block, compiled=way) for way in (False, True))
    assert 0.999 * whole <= kept <= whole  # products read what gelu and norms leave
