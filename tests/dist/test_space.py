"""The planner and the executor know the same layouts: of random ones each is refused by both with
one reason, or runs with the weights and the collectives that the program has.

Layouts are within one pipeline rank: dp with ZeRO and replicas, cp, tp with cuts, ep, recompute.
The other ranks are not there: the collectives of torch's fake group return at once.
"""

import random
from collections import Counter
from math import prod

import msgspec
import pytest
import torch
import torch.distributed as dist
from msgspec.structs import replace

from meshwise import models
from meshwise.engine import data as engine_data
from meshwise.engine import step
from meshwise.models import placement
from meshwise.models.placement import ROWS
from meshwise.models.shard import shard
from meshwise.nn.stage import causal
from meshwise.parallel import apply, mesh, pipeline, tensor
from meshwise.parallel.mesh import share
from meshwise.search.space import check
from meshwise.spec import Cuts, Layout, Plan, Recipe, Workload, stages_of
from tests.dist.test_program_collectives import EXPERTS, FAMILIES, IMAGES, Recorded, programmed

pytestmark = pytest.mark.dist

SEQ_LENS = [16, 16, 16, 12, 10, 15]  # the last by not every cp, or not then by tp
ODD = {
    "wide gpt": replace(FAMILIES["gpt"], heads=8, vocab=101, ffn=96),
    "one kv head": replace(FAMILIES["llama"], kv_heads=1, vocab=50, ffn=60),
    "two kv heads": replace(FAMILIES["qwen"], kv_heads=2, tied=True),
    "normed over all": replace(FAMILIES["qwen"], qk_norm_over="projection"),
    "windows by layer": replace(FAMILIES["gemma"], layers=4, full_layers=(1, 3)),
}
PICTURES = {"images": IMAGES, "wider images": replace(IMAGES, blocks=(1, 2, 1), channels=12)}
MODELS = FAMILIES | ODD | PICTURES
WORDS = {name: list(kind.__args__) for name, kind in Cuts.__annotations__.items()}
DATA = [(1, 0, 1), (2, 0, 1), (2, 2, 1), (2, 3, 1), (4, 3, 1), (2, 1, 2), (4, 1, 2), (4, 3, 2)]


def drawn(chance):
    """A model's name, the length of its sequences and a layout, often one that cannot be."""
    while True:
        name, tp = chance.choice(list(MODELS)), chance.choice([1, 2, 2, 3, 4, 4, 8])
        if chance.random() < 0.1:
            name = chance.choice(list(PICTURES))
        is_image, cuts = name in PICTURES, Cuts()
        if tp > 1 and chance.random() < (0.1 if is_image else 0.8):
            some = {room: chance.choice(words) for room, words in WORDS.items()}
            if some["experts"] == "experts" and chance.random() < 0.8:  # else it is refused
                name, some["stream"] = chance.choice(list(EXPERTS)), chance.choice(ROWS)
            if chance.random() < 0.7:  # a tied weight is cut once, or not at all
                some["head"] = "vocab" if some["embed"] == "vocab" else some["embed"]
            cuts = Cuts(**some)
        dp, zero, replicas = chance.choice(DATA)
        cp = chance.choice([1] * 9 + [2] if is_image else [1, 1, 1, 2, 2, 4])
        try:
            return name, chance.choice(SEQ_LENS), Layout(
                dp=dp, cp=cp, tp=tp, ep=chance.choice([1, 1, dp * cp // replicas]),
                zero=zero, replicas=replicas, cuts=cuts,
                tp_sums=chance.choice(["first", "last", "together"] if tp > 1 else ["last"]),
                microbatch_size=chance.choice([1, 2, 4]), num_microbatches=chance.choice([1, 2]),
                sequence_parallel=cuts == Cuts() and tp > 1
                and chance.random() < (0.1 if is_image else 0.5),
                recompute=chance.choice(["none", "selective", "full"]),
            )  # fmt: skip
        except ValueError:
            continue


class Apart(Recorded):
    """Recorded among ranks that are not there. Torch's fake group refuses to receive where nothing
    is sent, which others do: it is told to send as much."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.name().startswith("c10d::alltoall_base_") and not args[1].numel():
            args = (args[0], args[0], args[2], args[3], args[3], *args[5:])
        return super().__torch_dispatch__(func, types, args, kwargs)


def begin(size):
    """This process is the first of so many ranks, of which no other is. DTensor's caches know
    groups by name, and a mesh may equal an earlier layout's, whose groups are gone: empty them."""
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache
    from torch.testing._internal.distributed.fake_pg import FakeStore

    _clear_sharding_prop_cache()
    dist.destroy_process_group()
    dist.init_process_group("fake", rank=0, world_size=size, store=FakeStore())


def compared(ranks, plan, seed, count):
    """Of each of ``count`` random layouts: what differs. Every second has experts with a capacity,
    if any."""
    plan, chance, found = msgspec.json.decode(plan, type=Plan), random.Random(seed), []
    for number in range(count):
        name, seq_len, layout = drawn(chance)
        model = MODELS[name]
        if name in EXPERTS and number % 2:
            limited = replace(model.experts, capacity_factor=1.0, group_size=4)
            name, model = f"{name} with capacity", replace(model, experts=limited)
        dtype = chance.choice(["fp32", "bf16"])
        workload = Workload(
            global_batch_size=layout.microbatch_rows * layout.num_microbatches,
            seq_len=1 if name in PICTURES else seq_len,
        )
        changed = replace(
            plan, model=model, workload=workload, dtype=dtype, layout=layout,
            stages=stages_of(layout, model), recipe=Recipe(routing="balanced"),
        )  # fmt: skip
        found.append([f"{name} {workload.seq_len} {dtype} {layout.name}", *outcome(changed)])
    return found


def outcome(plan):
    """Whether a layout is refused, and what the executor does that the planner does not expect."""
    model, layout, workload = plan.model, plan.layout, plan.workload
    reason = placement.obstacle(model, workload.seq_len, layout)
    begin(layout.num_devices)
    place = mesh.build(layout, "cpu")
    if reason is not None:
        refusals = [lambda: prepared(plan, place), lambda: check(model, workload, layout)]
        return True, *[str(error) for error in map(refused, refusals) if reason not in error]
    return False, *differences(plan, place)


def refused(call):
    try:
        call()
    except ValueError as error:
        return str(error)
    return "not refused"


def prepared(plan, place):
    batch = engine_data.batches(
        plan.model, plan.workload, steps=1, seed=0, file=None, rows=step.rows(plan.layout, 0)
    )
    return step.prepare(plan, place, batch, torch.device("cpu"), dtype=plan.dtype, seed=0)


def differences(plan, place):
    model, layout, rows = plan.model, plan.layout, plan.layout.microbatch_size
    words, seq_len = layout.recomputed(model.layers), plan.workload.seq_len
    graph = models.graph(model, rows, seq_len, plan.dtype, recompute=words)
    due = Counter(map(prod, shard(graph, layout.tp, layout.placed, layout.ep).shapes.values()))
    cut = step.on_meta(model, None, plan.recipe, causal)
    tensor.cut_model(cut, place)
    here = Counter(share(weight).numel() for weight in cut.parameters())
    if here != due:
        yield f"weights: {here - due} here, {due - here} planned"
    training = prepared(plan, place)
    batch = [each[0].split(rows) for each in (training.inputs, training.targets)]
    with Apart() as recorded, apply.loss_context(layout):
        pipeline.run(training.pipeline, *batch, training.loss)
    calls, due = Counter(recorded.calls), programmed(model, layout, plan.dtype, seq_len=seq_len)
    if calls != due:
        yield f"collectives: {calls - due} here, {due - calls} planned"


@pytest.mark.parametrize(
    "count",
    [60, pytest.param(400, marks=pytest.mark.whole), pytest.param(2000, marks=pytest.mark.whole)],
)
def test_planner_and_executor_know_the_same_layouts(gloo_ranks, plan_of, count):
    plan = plan_of(FAMILIES["gpt"], Workload(global_batch_size=128, seq_len=16), Layout(dp=128))
    text = msgspec.json.encode(plan).decode()
    found = []
    for seed in range(0, count, 100):
        some = min(100, count - seed)
        found += gloo_ranks(1, compared, plan=text, seed=seed, count=some)[0]
    wrong = [(name, *told) for name, _, *told in found if told]
    assert not wrong, "\n".join(map(str, [len(wrong), *wrong]))
    ran = " ".join(name for name, is_refused, *_ in found if not is_refused)
    assert all(
        word in ran
        for word in ("images", " cp2", " cp4", "/2", " ep2", "sums:first", "sums:together")
    ), ran
    refusals = sum(is_refused for _, is_refused, *_ in found)
    assert 0.1 < refusals / len(found) < 0.9, refusals
