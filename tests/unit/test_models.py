"""The operation graph against closed forms: parameters, FLOPs, saved bytes, Megatron's traffic."""

from collections import Counter

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwise import models
from meshwise.models import catalogue
from meshwise.spec import Block, Collective, Elementwise, Gemm, Layout, Model, Workload

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
    tasks = models.apply(
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


@given(
    tp=st.sampled_from([1, 2, 4]),
    sequence_parallel=st.booleans(),
    batch=st.integers(1, 3),
    seq=st.sampled_from([4, 8, 16]),
)
def test_tensor_parallelism_conserves_flops(tp, sequence_parallel, batch, seq):
    whole = models.graph(TINY, batch, seq, "fp32")
    layout = Layout(tp=tp, sequence_parallel=sequence_parallel and tp > 1, microbatch_size=batch)
    one = models.apply(whole, Layout(microbatch_size=batch), "fp32").tasks
    shard = models.apply(whole, layout, "fp32").tasks
    assert sum(t.op.flops for t in shard) * tp == sum(t.op.flops for t in one)


@given(
    zero=st.integers(0, 3), dp=st.sampled_from([2, 4]), tp=st.sampled_from([1, 2]),
    num_microbatches=st.integers(1, 3), dtype=st.sampled_from(["fp32", "bf16"]),
)  # fmt: skip
def test_traffic_of_data_parallelism(zero, dp, tp, num_microbatches, dtype):
    """ZeRO paper (arXiv:1910.02054): gathers and reductions per step, in bytes of the model."""
    layout = Layout(dp=dp, tp=tp, zero=zero, num_microbatches=num_microbatches)
    program = models.apply(models.graph(TINY, 1, 8, dtype), layout, dtype)
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
    program = models.apply(models.graph(TINY, 1, 8, "bf16"), Layout(), "bf16")
    (adamw,) = [
        t.op for t in program.tasks if isinstance(t.op, Elementwise) and t.op.kind == "adamw"
    ]
    assert adamw.bytes == 28 * models.num_parameters(TINY)


def test_every_read_was_written_before():
    layout = Layout(dp=2, tp=2, zero=3, sequence_parallel=True, num_microbatches=2)
    program = models.apply(models.graph(TINY, 1, 8, "bf16"), layout, "bf16")
    written: set[str] = set()
    for task in program.tasks:
        assert written.issuperset(task.reads), task
        assert set(task.writes) <= program.buffers.keys()
        written |= set(task.writes)


def test_impossible_degrees_are_named():
    sizes = models.graph(TINY, 1, 8, "fp32").sizes
    assert models.check_divides(sizes, Layout(tp=4), 8) is None
    assert models.check_divides(sizes, Layout(tp=3), 8) == "tp = 3 does not divide vocab = 64"
    reason = models.check_divides(sizes, Layout(tp=4, sequence_parallel=True), 6)
    assert reason == "tp = 4 does not divide seq = 6"


def test_catalogue_suggests_the_nearest_name():
    with pytest.raises(ValueError, match=r"did you mean gpt-2.6b\?"):
        catalogue.get("gpt2.6b")


def test_too_long_a_sequence_is_refused():
    with pytest.raises(ValueError, match="seq_len = 32"):
        models.graph(TINY, 1, 32, "fp32")
