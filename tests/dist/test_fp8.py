"""Products in fp8: what is cast, with which scale, that a model still learns, and that plans count
what runs."""

from collections import Counter

import msgspec
import pytest
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.autograd import grad
from torch.utils._python_dispatch import TorchDispatchMode

from meshwise import fit, ranks, search, store
from meshwise.fit.calibrate import expected_s
from meshwise.models import block_ops, blocks_of, graph, program_of, saved_block_bytes
from meshwise.nn import build
from meshwise.nn.stage import cross_entropy
from meshwise.options.measure import ProfileOptions
from meshwise.parallel import fp8
from meshwise.prices import Prices
from meshwise.probe.block import Blocks
from meshwise.probe.cases import profile
from meshwise.probe.cases.scope import Scope
from meshwise.probe.request import SweepRequest
from meshwise.probe.sweep import measure_ranks
from meshwise.spec import (
    Case,
    Cluster,
    Decoder,
    Device,
    Experts,
    Gemm,
    Layout,
    Model,
    Recipe,
    Workload,
    layer_kinds,
)

MODEL = Decoder(
    hidden=64, layers=2, heads=4, kv_heads=2, head_dim=16, ffn=96, vocab=64, max_seq_len=32
)


def rounded(x, kind):
    """x as fp8 with one scale for all has it, in float64."""
    limit = torch.finfo(kind).max
    scale = x.abs().max().double() / limit
    return (x.double() / scale).float().to(kind).double() * scale


@pytest.fixture
def operands():
    torch.manual_seed(3)
    x = (torch.randn(32, 64) * 3).bfloat16().requires_grad_()
    weight = nn.Linear(64, 48, bias=True).bfloat16()
    return x, weight


def test_the_three_products_are_of_rounded_operands(operands):
    x, linear = operands
    fp8.use_fp8(linear)
    y = linear(x)
    dy = torch.randn_like(y)
    y.backward(dy)
    e4m3, e5m2 = torch.float8_e4m3fn, torch.float8_e5m2
    rx, rw, rdy = (
        rounded(x.detach(), e4m3),
        rounded(linear.weight.detach(), e4m3),
        rounded(dy, e5m2),
    )
    wanted = {
        "y": (y, rx @ rw.T + linear.bias.double()),
        "dx": (x.grad, rdy @ rw),
        "dw": (linear.weight.grad, rdy.T @ rx),
    }
    for name, (found, exact) in wanted.items():
        error = (found.double() - exact).norm() / exact.norm()
        assert error < 5e-3, name  # of bf16 results
        plain = {"y": x @ linear.weight.T + linear.bias, "dx": dy @ linear.weight, "dw": dy.T @ x}
        assert not torch.equal(found, plain[name]), name  # nothing was cast


def test_a_model_learns_as_in_bf16():
    losses = {}
    tokens = torch.randint(64, (4, 17), generator=torch.Generator().manual_seed(1))
    for kind in ("bf16", "fp8"):
        model = build(MODEL)
        model.init_weights(0)
        model.bfloat16()
        if kind == "fp8":
            for layer in model.layers.values():
                fp8.use_fp8(layer)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        losses[kind] = []
        for _ in range(12):
            loss = cross_entropy(model(tokens[:, :-1]), tokens[:, 1:])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses[kind].append(loss.item())
    assert losses["fp8"][-1] < 0.8 * losses["fp8"][0]
    assert losses["fp8"][-1] == pytest.approx(losses["bf16"][-1], rel=0.05)


def test_a_number_of_tokens_that_the_kernels_refuse_is_named(operands):
    x, linear = operands
    fp8.use_fp8(linear)
    with pytest.raises(ValueError, match="20 tokens on a rank: fp8 needs a multiple of 16"):
        linear(x[:20])


def test_fp8_under_tensor_parallelism_is_refused(plan_of):
    workload = Workload(global_batch_size=1, seq_len=16)
    plan = plan_of(MODEL, workload, Layout(), dtype="bf16")
    assert msgspec.structs.replace(plan, recipe=Recipe(fp8=True)).recipe.fp8
    plan = plan_of(MODEL, workload, Layout(tp=2), dtype="bf16")
    with pytest.raises(ValueError, match=r"Plan.recipe.*whole weights; use tp 1"):
        msgspec.structs.replace(plan, recipe=Recipe(fp8=True)).check()


class Calls(TorchDispatchMode):
    """Counts calls of kernels, and keeps the shapes of products."""

    def __init__(self):
        super().__init__()
        self.products, self.kernels = Counter(), Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        self.kernels[name] += 1
        if name == "_scaled_mm":
            (m, k), (_, n) = args[0].shape, args[1].shape
            self.products[m, n, k] += 1
        return func(*args, **(kwargs or {}))


def planned(model, lowering):
    step = graph(model, 2, 16, "bf16", layers=layer_kinds(model, 16, range(1)), fp8=lowering)
    tasks = program_of(step, Layout(microbatch_size=2), "bf16").tasks
    ops = [task.op for task in tasks if isinstance(task.op, Gemm) and task.op.dtype == "fp8"]
    names = Counter(t.name.rsplit(".", 1)[-1] for t in tasks if {"a", "b"} & {*t.name.split(".")})
    return Counter((op.m, op.n, op.k) for op in ops), names


def layer_of(model):
    whole = build(model)
    whole.init_weights(0)
    layer = whole.bfloat16().layers["0"]
    fp8.use_fp8(layer)
    x = torch.randn(2, 16, model.hidden).bfloat16().requires_grad_()
    return layer, x


FAMILIES = [
    MODEL,
    Model(hidden=64, layers=1, heads=4, ffn=96, vocab=64, max_seq_len=32),
    msgspec.structs.replace(MODEL, ffn=100, qkv_bias=True),
    msgspec.structs.replace(MODEL, experts=Experts(num_experts=4, top_k=2, ffn=32, shared_ffn=32)),
]


def test_compiled_layers_have_the_gradients_of_eager_ones():
    """They were 0 of all weights with torch 2.11, where products were written to a given result."""
    layer, x = layer_of(MODEL)
    named, dy = {"x": x, **dict(layer.named_parameters())}, torch.randn(x.shape).bfloat16()
    found = []
    torch._dynamo.reset()
    for compute in (layer, torch.compile(layer, backend="aot_eager", fullgraph=True)):
        found.append(dict(zip(named, grad(compute(x), [*named.values()], dy), strict=True)))
    eager, compiled = found
    for name, gradient in eager.items():
        assert gradient.norm() > 0
        torch.testing.assert_close(compiled[name], gradient, rtol=0.02, atol=0.02, msg=name)


@pytest.mark.parametrize("model", FAMILIES, ids=["llama", "gpt", "unaligned", "experts"])
def test_plans_count_the_kernels_that_run(model):
    """Return what fp8 adds to a layer's forward and backward, beside the same layer in bf16."""
    found, (products, names) = {}, planned(model, "eager")
    for kind in (None, "fp8"):
        layer, x = layer_of(model)
        for module in layer.modules() if kind is None else ():
            module.__class__ = nn.Linear if type(module) is fp8.Linear else module.__class__
        with Calls() as found[kind]:
            layer(x).backward(torch.ones_like(x))  # of a sum it would not be contiguous
    assert found["fp8"].products == products and not found[None].products
    more = found["fp8"].kernels - found[None].kernels
    operands = 2 * sum(products.values())
    assert more["abs"] == more["amax"] == names["abs"] == names["amax"] == operands
    assert more["clone"] == names["copy"] == operands // 2
    assert more["div"] == names["scale"] + names["divide"] == 2 * operands
    assert more["clamp"] == names["least"] + names["clamp"] == 2 * operands
    assert more["_to_copy"] == names["float"] + names["wide"] + names["cast"] == 3 * operands


def test_plans_count_what_the_compiler_leaves():
    """The number of products and casts, and within a tenth the bytes that backward keeps: torch's
    partitioner casts attention's result for backward in forward, and keeps the cast, too."""
    seen, saved = Counter(), list[int]()

    def compiler(module, inputs):
        *_, ends = module.graph.nodes
        kept = [of for of in ends.args[0][1:] if of is not None and of.op != "placeholder"]
        saved.append(sum(of.meta["val"].nbytes for of in kept))
        calls = [node.target for node in module.graph.nodes if node.op == "call_function"]
        seen.update(getattr(call, "overloadpacket", call).__name__ for call in calls)
        return make_boxed_func(module.forward)

    partition = min_cut_rematerialization_partition
    backend = aot_autograd(fw_compiler=compiler, bw_compiler=compiler, partition_fn=partition)
    torch._dynamo.reset()
    layer, x = layer_of(MODEL)
    torch.compile(layer, backend=backend, fullgraph=True, dynamic=False)(x).sum().backward()
    products, names = planned(MODEL, "compiled")
    assert seen["_scaled_mm"] == sum(products.values()) == 21
    assert seen["amax"] == names["amax"] == 36
    block = blocks_of(MODEL, 16, Layout(microbatch_size=2), "bf16")[("layer", ""), "forward"]
    counted = saved_block_bytes(msgspec.structs.replace(block, dtype="fp8"), compiled=True)
    assert saved[0] + x.nbytes == pytest.approx(counted, rel=0.1)


def blocks_in(dtype):
    """The layer of ``MODEL``, two sequences of 16, by direction."""
    blocks = blocks_of(MODEL, 16, Layout(microbatch_size=2), "bf16").items()
    return {
        way: msgspec.structs.replace(block, dtype=dtype)
        for (piece, way), block in blocks
        if piece == ("layer", "")
    }


def test_a_block_in_fp8_runs_the_products_of_a_plan():
    built, alone = Blocks(ranks.alone()), {}
    for dtype in ("bf16", "fp8"):
        products = Counter()
        for block in blocks_in(dtype).values():
            work = built.build(Case(op=block))
            work.prepare()
            with Calls() as calls:
                work.calls[0]()
            products += calls.products
        alone[dtype] = products
        assert {p.dtype for p in built.held[1].module.parameters()} == {torch.bfloat16}
    assert not alone["bf16"]
    assert alone["fp8"] == planned(MODEL, "eager")[0]
    counted = saved_block_bytes(blocks_in("fp8")["forward"], "cpu")
    tables = 2 * 16 * MODEL.head_dim // 2 * 4  # of rotary embeddings, which all layers share
    assert 0 <= work.metrics()["saved_bytes"] - tables - counted <= 8


def test_a_layer_measured_on_a_cpu_has_its_time_in_plans(tmp_path):
    """A profile by the recipe: the layer at one size, what it consists of, and two copies."""
    cluster = Cluster(
        name="test", num_hosts=1, num_devices_per_host=1, tiers=(),
        device=Device(name="cpu", kind="cpu", memory_bytes=2**33),
    )  # fmt: skip
    asked = ProfileOptions(model=(MODEL,), recipe=Recipe(fp8=True), seq_len=16)
    blocks = {dtype: blocks_in(dtype) for dtype in ("bf16", "fp8")}
    both = [block for of in blocks.values() for block in of.values()]
    wanted = {*both, *(op for block in both for op in block_ops(block))}
    found = profile.cases(Scope(cluster, 1, "bf16"), asked)
    cases = [case for case in found if case.op in wanted]
    cases += [case for case in found if getattr(case.op, "kind", "") == "copy"][:2]
    assert {*both} <= {case.op for case in cases}
    run_dir = store.create(
        tmp_path, verb="measure", slug="profile", cluster=cluster, world_size=1,
        command=("test",), provenance={},
    )  # fmt: skip
    request = SweepRequest(cases=tuple(cases), run_dir=str(run_dir), iterations=5)
    measure_ranks(ranks.alone(), msgspec.json.encode(request))
    info, samples, _ = store.load(run_dir)
    assert {sample.status for sample in samples} == {"ok"}
    costs = fit.calibrate([(info, samples)])
    assert costs.dtype == "bf16"
    measured = {sample.case.op: expected_s(sample) for sample in samples}
    for dtype in blocks:
        prices = Prices(msgspec.structs.replace(costs, recipe=Recipe(fp8=dtype == "fp8")))
        told = search.predict(
            msgspec.structs.replace(MODEL, layers=3), Workload(global_batch_size=2, seq_len=16),
            Layout(microbatch_size=2), prices,
        )  # fmt: skip
        parts = {part.name: part.value for part in told.time_parts}
        for way, block in blocks[dtype].items():
            assert parts[f"{way} layer"] == pytest.approx(3 * measured[block], rel=1e-6)
        assert not [note for note in told.notes if note.startswith("no layer")]
