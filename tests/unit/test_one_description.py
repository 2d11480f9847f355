"""A model's products, weights and bytes are described once, by its forward graph.

Each test gives a model the graph of a wider one and asks everything that Meshwise says of a model.
Every answer must be that of the wider model: whoever works sizes out from the record's fields is
found out. Which layouts may be, names and positions are the record's; nothing here widens them.
"""

import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from meshwise import models, search
from meshwise.models import catalogue, counts, decoder, families, fsdp, hugging_face
from meshwise.options.measure import (
    AttentionOptions,
    CollectivesOptions,
    FsdpOptions,
    GemmOptions,
    OverlapOptions,
)
from meshwise.pages import tables
from meshwise.prices import Prices, unmeasured
from meshwise.probe.cases import attention, collectives, gemm, overlap
from meshwise.probe.cases import fsdp as fsdp_cases
from meshwise.probe.cases.scope import Scope
from meshwise.reshard.holdings import buffers, holdings
from meshwise.spec import (
    Block,
    Cluster,
    Layout,
    Model,
    Recipe,
    Resharding,
    WeightLayout,
    WideResNet,
    Workload,
    layer_kinds,
)
from meshwise.verbs import files, forecast, given

CONFIGS = Path(__file__).parents[1] / "data" / "hugging_face"
NAMES = [
    "gpt-30m", "gpt-125m", "gpt-1.3b", "gpt-39b", "moe-380m", "moe-2.4b", "moe-27b",
    "llama-2-7b", "llama-2-70b", "llama-3-8b", "llama-3.1-405b", "mixtral-8x7b",
    "deepseek-v2-lite", "deepseek-v2", "deepseek-v3", "qwen3-235b-a22b",
]  # fmt: skip
WITH_CAPACITY = "moe-2.4b with capacity"
READ = ["gemma-2b", "qwen2.5-0.5b", "qwen3-0.6b", "qwen1.5-moe-a2.7b"]
NOT_SIZES = ("op", "plan_took_s")  # the model itself, and how long planning took
ROWS, SEQ_LEN, LAYERS = 2, 64, 4
CLUSTER = files.take("h100-hgx", Cluster)
SCOPE = Scope(CLUSTER, 2, "bf16")
LAYOUTS = [
    Layout(microbatch_size=2, num_microbatches=2),
    Layout(dp=2, zero=3, tp=2, sequence_parallel=True, microbatch_size=2),
    Layout(tp=2, pp=2, schedule="1f1b", microbatch_size=2, num_microbatches=2, recompute="full"),
]


def model_of(name):
    whole = hugging_face.read_config(CONFIGS / f"{name}.json") if name in READ else None
    model = whole or catalogue.find(name.removesuffix(" with capacity"))
    if name == WITH_CAPACITY:
        limited = replace(model.experts, capacity_factor=1.0, group_size=SEQ_LEN)
        model = replace(model, experts=limited)
    return replace(model, name="it", layers=LAYERS)


def wider(model):
    """Twice as wide in all that a graph has a size of; every degree that divided still does."""
    if isinstance(model, WideResNet):
        return replace(model, channels=2 * model.channels, num_classes=2 * model.num_classes)
    change = {name: 2 * getattr(model, name) for name in ("hidden", "heads", "ffn", "vocab")}
    if moe := model.experts:
        sizes = ("num_experts", "top_k", "ffn", "shared_ffn")
        change["experts"] = replace(moe, **{name: 2 * getattr(moe, name) for name in sizes})
    if not isinstance(model, Model):
        if model.kv_heads > 1:  # one stays one: that tp ranks repeat it, placement decides
            change["kv_heads"] = 2 * model.kv_heads
        if mla := model.mla:
            sizes = ("kv_lora_rank", "v_head_dim")
            change["mla"] = replace(mla, **{name: 2 * getattr(mla, name) for name in sizes})
    return replace(model, **change)


def measured(kind, options, **given):
    """List what ``measure KIND --model`` times."""
    return lambda model: [
        (row.name, row.case) for row in kind.derived(SCOPE, options(model=(model,), **given))
    ]


def planned_as(layout):
    """Predict as ``plan --layout`` does by data sheets: times, memory, FLOPs."""
    rows = layout.microbatch_rows * layout.num_microbatches
    workload = Workload(global_batch_size=rows, seq_len=SEQ_LEN)
    costs = unmeasured(CLUSTER)
    return lambda model: search.given(model, workload, costs, layout).prediction


def found(model):
    workload = Workload(global_batch_size=8, seq_len=SEQ_LEN)
    plan = search.find(model, workload, unmeasured(CLUSTER), num_devices=4, top=3)
    return plan.prediction, plan.runners_up


def dry_run(model):
    workload = Workload(global_batch_size=2, seq_len=SEQ_LEN)
    layout = Layout(tp=2, microbatch_size=2)
    plan = given.build(model, workload, layout, CLUSTER, dtype="bf16", lowering="eager",
        recipe=Recipe(),
    )  # fmt: skip
    (steps,) = tables.dry_run([plan])
    return steps


def refit_bytes(model):
    """Count the bytes that each rank holds and that a refit moves."""
    source, destination = WeightLayout(tp=2, dp=2, fsdp=2), WeightLayout(tp=1)
    op = Resharding(model=model, source=source, destination=destination, cap_bytes=2**32)
    links = forecast.links(CLUSTER)
    held = holdings(model, source)
    said = forecast.forecast(op, 4, links)
    fields = {name: getattr(said, name) for name in said.__struct_fields__}
    numbers = {name: value for name, value in fields.items() if name not in NOT_SIZES}
    return [buffers(held, rank) for rank in range(4)], numbers


def blocks(model):
    return [
        (models.block_ops(block), models.saved_block_bytes(block))
        for block in (
            Block(
                part=part, model=replace(model, layers=1), microbatch_size=ROWS, seq_len=SEQ_LEN,
                tp=2, direction=direction,
            )
            for part in ("layer", "head") for direction in ("forward", "backward")
        )
    ]  # fmt: skip


def flops(model):
    workload = Workload(global_batch_size=ROWS, seq_len=SEQ_LEN)
    return [counts.step_flops(model, workload, word) for word in ("torchtitan", "megatron")]


ANSWERS = {
    "measure gemm": measured(gemm, GemmOptions),
    "measure attention": measured(attention, AttentionOptions),
    "measure collectives": measured(collectives, CollectivesOptions, seq_len=SEQ_LEN),
    "measure fsdp": measured(fsdp_cases, FsdpOptions),
    "measure overlap": lambda model: overlap.cases(
        SCOPE, OverlapOptions(model=(model,), seq_len=SEQ_LEN)
    ),
    "measure block": lambda model: blocks(model) if isinstance(model, Model) else None,
    **{f"plan {layout.name}": planned_as(layout) for layout in LAYOUTS},
    "run --dry-run": dry_run,
    "refit": refit_bytes,
    "weights": decoder.weights,
    "parameters": models.num_parameters,
    "FSDP units": fsdp.units,
    "FLOPs": flops,
    "saved bytes": lambda model: models.saved_activation_bytes(model, ROWS, SEQ_LEN, "bf16"),
    "stream": lambda model: models.stream_shape(model, ROWS, SEQ_LEN, 1),
}


@pytest.fixture
def as_wide(monkeypatch):
    """Answer a question as if the model's graph were that of a wider one."""
    plain = families.forward

    def forward(model, *sizes, **options):
        return plain(wider(model), *sizes, **options)

    def asked(question, model):
        forget()
        with monkeypatch.context() as changed:
            changed.setattr(families, "forward", forward)
            answer = question(model)
        forget()
        return answer

    return asked


def forget():
    """Drop what is remembered of any graph."""
    for module in [sys.modules[name] for name in sys.modules if name.startswith("meshwise.")]:
        for value in vars(module).values():
            if hasattr(value, "cache_clear"):
                value.cache_clear()


def elsewhere(asked, model, as_wide):
    """Which of the questions are answered from anything but the graph."""
    found = []
    for name in asked:
        question = ANSWERS[name]
        narrow, wide = question(model), question(wider(model))
        assert narrow != wide or narrow is None, f"{name} does not see that a model is wider"
        if as_wide(question, model) != wide:
            found.append(name)
    return found


@pytest.mark.parametrize("name", [*NAMES, *READ, WITH_CAPACITY])
def test_every_answer_is_read_off_the_graph(name, as_wide):
    assert elsewhere(ANSWERS, model_of(name), as_wide) == []


@pytest.mark.parametrize("name", ["gpt-oss-120b", "llama-4-maverick"])
def test_models_that_are_only_listed_are_too(name, as_wide):
    asked = ("measure gemm", "measure attention", "measure collectives", "measure fsdp", "weights")
    assert elsewhere(asked, catalogue.find(name), as_wide) == []


@pytest.mark.parametrize("name", ["wresnet-250m", "wresnet-6.8b"])
def test_images_are_too(name, as_wide):
    asked = ("weights", "parameters", "FSDP units", "FLOPs", "saved bytes", "stream")
    assert elsewhere(asked, catalogue.find_any(name), as_wide) == []


@pytest.mark.parametrize("name", ["gpt-125m", "llama-3-8b"])
def test_the_search_reads_the_graph(name, as_wide):
    model = model_of(name)
    assert as_wide(found, model) == found(wider(model)) != found(model)


def followed(name, layout):
    """The tasks of the first layer of a model in a layout, and each one's price by data sheets."""
    model, prices = catalogue.find(name), Prices(unmeasured(CLUSTER), datasheet=True)
    kinds = layer_kinds(model, 8192)[:1]
    graph = models.graph(model, 1, 8192, "bf16", layers=kinds, first=False, last=False)
    for task in models.program_of(graph, layout, "bf16").tasks:
        yield task.name.removeprefix("layers.0."), task.op, prices.estimate(task.op).time_s


def test_the_page_follows_these_operations():
    page = (Path(__file__).parents[2] / "docs" / "architecture.md").read_text()
    start = page.index("## Follow one operation")
    walk = " ".join(page[start : page.index("## Libraries")].split())
    layout = Layout(dp=4, tp=2, sequence_parallel=True, zero=3)
    said = []
    for name, degrees, timed, sent in (
        ("llama-3-8b", layout, ("gate", "down"), ("all_gather", "reduce_scatter")),
        ("mixtral-8x7b", replace(layout, ep=4), ("experts.gate_up",), ("all_gather",)),
    ):
        assert f"`{degrees.name.removesuffix(' mb1x1')}`" in walk
        for task, op, time_s in followed(name, degrees):
            if task in timed:
                said.append(f"{op.m} x {op.n} x {op.k}")
            if task in (*sent, "gate.all_gather", "experts.dispatch.all_to_all"):
                said.append(f"{op.size_bytes:,} B")
            if task in ("gate", "silu", "gate.all_gather", "experts.gate_up",
                        "experts.dispatch.all_to_all"):  # fmt: skip
                said.append(f"{time_s * 1e6:,.0f} µs")
    workload = Workload(global_batch_size=4, seq_len=8192)
    model, costs = catalogue.find("llama-3-8b"), unmeasured(CLUSTER)
    step = search.given(model, workload, costs, layout).prediction
    said.append(f"{step.step_time_s * 1e3:.0f} ms")
    assert len(said) > 12 and [words for words in said if words not in walk] == []
