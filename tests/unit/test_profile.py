"""The cases of a profile: what must be there, in which order, under which name."""

import functools
import itertools
import os
import subprocess
import sys
from collections import defaultdict

import msgspec
import pytest

from meshwise.models import block_ops, catalogue, graph, program_of
from meshwise.options.measure import ProfileOptions
from meshwise.prices import op_key
from meshwise.prices.key import How
from meshwise.prices.measured import MOST_BEYOND
from meshwise.probe import progress
from meshwise.probe.cases import effort, profile
from meshwise.probe.cases.scope import Scope
from meshwise.search.space import legal_layouts
from meshwise.spec import (
    DTYPE_BYTES,
    Attention,
    Block,
    Case,
    Cluster,
    Collective,
    Costs,
    Device,
    Elementwise,
    Experts,
    Gemm,
    Layout,
    Model,
    Overlap,
    Sample,
    Shaped,
    Step,
    Tier,
    WideResNet,
    Workload,
)
from meshwise.spec.label import label
from meshwise.verbs.measure import _environment, _within

MODEL = Model(hidden=96, layers=2, heads=6, ffn=384, vocab=1000, max_seq_len=256)


def a_cluster(kind: str, num_devices: int, near: int | None = None) -> Cluster:
    """One host; with ``near``, only that many neighbours share the fast links."""
    tiers = [Tier(name="fast", num_devices=near)] if near else []
    return Cluster(
        name="test",
        num_hosts=1,
        num_devices_per_host=num_devices,
        device=Device(name="device", kind=kind, memory_bytes=2**37),
        tiers=(*tiers, Tier(name="all", num_devices=num_devices)),
    )


def a_profile(kind: str = "cpu", world_size: int = 4, models: tuple[Model, ...] = (MODEL,)):
    gpu = kind == "cuda"
    scope = Scope(a_cluster(kind, world_size), world_size, "bf16" if gpu else "fp32")
    return profile.cases(scope, ProfileOptions(model=models))


PROFILES = [("cpu", 1), ("cpu", 2), ("cpu", 4), ("cpu", 6), ("cuda", 1), ("cuda", 4), ("cuda", 8)]


@pytest.mark.parametrize(("kind", "world_size"), PROFILES)
def test_no_case_comes_twice_and_every_name_is_its_own(kind, world_size):
    found = a_profile(kind, world_size, (MODEL, catalogue.get("gpt-125m"), MODEL))
    assert len({case.id for case in found}) == len(found)
    assert len({label(case) for case in found}) == len(found)
    assert all(case.world_size == world_size for case in found)


@pytest.mark.parametrize(("kind", "world_size"), PROFILES)
def test_a_block_comes_after_all_that_its_price_is_made_of(kind, world_size):
    """Any prefix can be calibrated: products are there, and curves of every communication."""
    measured, curves = set(), set()
    ops = [case.op for case in a_profile(kind, world_size)]
    assert isinstance(ops[0], Elementwise) and ops[0].kind == "copy"
    for op in ops:
        if isinstance(op, Collective):
            curves.add((op.kind, op.group_size))
        elif not isinstance(op, Block):
            measured.add(op)
            continue
        else:
            for part in block_ops(op):
                if isinstance(part, Gemm | Attention):
                    assert part in measured
                elif isinstance(part, Collective):
                    assert (part.kind, part.group_size) in curves


def test_layers_that_share_sequences_are_measured_with_their_messages():
    ops = [case.op for case in a_profile("cuda", 4)]
    degrees = {op.cp for op in ops if isinstance(op, Block) and op.part == "layer"}
    assert degrees == {1, 2, 4}
    over_sequences = {
        op.size_bytes for op in ops if isinstance(op, Collective) and op.kind == "all_to_all"
    }
    assert len(over_sequences) >= 2 * 9  # of two groups


def test_layers_of_experts_are_blocks_over_tp_too():
    experts = msgspec.structs.replace(
        MODEL, experts=Experts(num_experts=4, top_k=2, ffn=192, every=1)
    )
    ops = [case.op for case in a_profile("cuda", 4, (experts,))]
    layers = [op for op in ops if isinstance(op, Block) and op.part == "layer"]
    assert {(op.tp, op.sequence_parallel) for op in layers} == {(1, False), (2, False), (2, True)}
    for op in layers:
        products = {part for part in block_ops(op) if isinstance(part, Shaped)}
        assert products <= {*ops[: ops.index(op)]}


@pytest.mark.parametrize(("kind", "world_size"), PROFILES)
def test_kinds_of_element_wise_work_come_after_what_corrects_them(kind, world_size):
    """All sizes of a kind one after the other: the largest, the least, then those between."""
    ops = [case.op for case in a_profile(kind, world_size)]
    whole = [at for at, op in enumerate(ops) if isinstance(op, Elementwise) and op.rows]
    assert whole == [*range(whole[0], whole[-1] + 1)] and len(whole) >= 30
    assert whole[0] > max(at for at, op in enumerate(ops) if isinstance(op, Block))
    runs = itertools.groupby(ops[whole[0] : whole[-1] + 1], lambda op: (op.kind, op.direction))
    sizes = {key: [op.bytes for op in each] for key, each in runs}
    assert len(sizes) == len({(ops[at].kind, ops[at].direction) for at in whole})
    for first, second, *others in sizes.values():
        assert first > max(others) >= min(others) > second


@pytest.mark.parametrize(("kind", "world_size"), PROFILES)
def test_backward_follows_its_forward(kind, world_size):
    ops = [case.op for case in a_profile(kind, world_size)]
    for at, op in enumerate(ops):
        if isinstance(op, Block) and op.direction == "forward":
            assert ops[at + 1] == msgspec.structs.replace(op, direction="backward")


@pytest.mark.parametrize(("kind", "world_size"), PROFILES)
def test_groups_tile_the_world_and_sizes_divide(kind, world_size):
    found = [case.op for case in a_profile(kind, world_size) if isinstance(case.op, Collective)]
    assert bool(found) == (world_size > 1)
    for op in found:
        assert world_size % (op.group_size * op.group_stride) == 0
        assert op.size_bytes > 0
        assert op.size_bytes % (op.group_size * DTYPE_BYTES[op.dtype]) == 0


def test_degrees_are_those_the_model_allows():
    """6 heads: tp 2 or 6, words need not divide; without a second rank no tp at all."""
    for world_size, expected in ((1, {1}), (4, {1, 2}), (6, {1, 2, 6})):
        found = {case.op.tp for case in a_profile(world_size=world_size) if _is_block(case)}
        assert found == expected
    both = {
        (case.op.part, case.op.sequence_parallel)
        for case in a_profile()
        if _is_block(case) and case.op.tp == 2
    }
    assert both == {("layer", False), ("layer", True), ("head", False), ("head", True)}


def _is_block(case: Case) -> bool:
    return isinstance(case.op, Block)


def test_every_product_of_the_model_is_there():
    """Shapes by hand, for a microbatch of 1: [tokens, out] from [tokens, in], and the gradients."""
    h, ffn, vocab, tokens = 96, 384, 1000, 128
    ops = {case.op for case in a_profile(world_size=1)}
    for n, k in ((3 * h, h), (h, h), (ffn, h), (h, ffn), (vocab, h)):
        assert Gemm(m=tokens, n=n, k=k, dtype="fp32") in ops
        assert Gemm(m=tokens, n=k, k=n, dtype="fp32", trans_b=False) in ops
        assert Gemm(m=n, n=k, k=tokens, dtype="fp32", trans_a=True, trans_b=False) in ops
    for direction in ("forward", "backward"):
        shape = {"batch": 1, "q_len": 128, "kv_len": 128, "heads": 6, "kv_heads": 6}
        assert Attention(**shape, head_dim=16, direction=direction, dtype="fp32") in ops


def test_a_whole_program_has_the_products_of_its_blocks():
    """How a model without blocks is listed, of one that has them."""
    cluster = a_cluster("cpu", 2)
    about = profile.Profile(cluster, 2, "fp32", "eager", profile.SCALES["cpu"])
    for tp in (1, 2):
        parts = ((part, way) for part in ("layer", "head") for way in ("forward", "backward"))
        shape = {"model": MODEL, "microbatch_size": 2, "seq_len": 128, "tp": tp, "dtype": "fp32"}
        blocks = [Block(part=part, direction=way, **shape) for part, way in parts]
        expected = {op for block in blocks for op in block_ops(block)}
        found = list(profile.of_program(about, MODEL, 2, tp))
        assert set(found) == {op for op in expected if isinstance(op, Gemm | Attention)}
    assert list(profile.of_program(about, MODEL, 2, 4)) == []  # 6 heads


def test_equal_pieces_of_two_models_are_measured_once():
    deeper = msgspec.structs.replace(MODEL, name="deeper", layers=40)
    assert a_profile(models=(MODEL, deeper)) == a_profile(models=(MODEL,))


IMAGES = WideResNet(blocks=(2, 3), channels=8, width_factor=2, image_size=32, num_classes=8)


@pytest.mark.parametrize(("kind", "world_size"), PROFILES)
def test_layers_of_images_are_blocks_the_most_frequent_first(kind, world_size):
    """Those of other shapes at one size without tensor parallelism; all behind their products."""
    ops = [case.op for case in a_profile(kind, world_size, (IMAGES,))]
    blocks = [(at, op) for at, op in enumerate(ops) if isinstance(op, Block)]
    alone = {op.form: at for at, op in reversed(blocks) if op.tp == 1}
    assert blocks[0][1].form == "1.rest"
    assert alone.keys() == {"0.first", "0.rest", "1.first", "1.rest"}
    sizes = {op.form: set() for _, op in blocks}
    for at, op in blocks:
        sizes[op.form].add((op.tp, op.microbatch_size))
        assert {part for part in block_ops(op) if isinstance(part, Shaped)} <= {*ops[:at]}
        if op.direction == "forward":
            assert ops[at + 1] == msgspec.structs.replace(op, direction="backward")
    images = profile.SCALES[kind].images
    degrees = {tp for tp in (1, 2, 4, 6, 8) if world_size % tp == 0 and 16 % tp == 0}
    assert sizes.pop("1.rest") >= {(tp, images[0]) for tp in degrees} | {(1, n) for n in images}
    assert set(map(frozenset, sizes.values())) == {frozenset({(1, images[0])})}


def test_layers_run_beside_the_messages_of_their_own_unit():
    ops = [case.op for case in a_profile("cuda", 4) if isinstance(case.op, Overlap)]
    assert [(op.compute.direction, op.collective.kind) for op in ops] == [
        ("forward", "all_gather"), ("backward", "all_gather"), ("backward", "reduce_scatter")
    ]  # fmt: skip
    # a GPT's layer: 12 h^2 weights, 9 h biases and 4 h in its norms, in bf16 and in fp32
    elements = 12 * MODEL.hidden**2 + 13 * MODEL.hidden
    assert [op.collective.size_bytes for op in ops] == [2 * elements, 2 * elements, 4 * elements]
    assert {op.collective.group_size for op in ops} == {4}
    assert not any(isinstance(case.op, Overlap) for case in a_profile("cpu", 4))


def test_experts_over_ranks_are_blocks():
    experts = msgspec.structs.replace(MODEL, experts=Experts(num_experts=4, top_k=2, ffn=192))
    blocks = [case.op for case in a_profile("cuda", 4, (experts,)) if isinstance(case.op, Block)]
    shared = [(op.ep, op.direction) for op in blocks if op.ep > 1]
    assert shared == [(ep, way) for ep in (2, 4) for way in ("forward", "backward")]


def test_regime_and_lowering():
    for case in a_profile("cuda", 4):
        warm = isinstance(case.op, Block | Collective | Overlap)
        assert case.regime == ("warm" if warm else "cold")
        compiled = isinstance(case.op, Block | Overlap)
        assert case.lowering == ("compiled" if compiled else "eager")
    assert {case.regime for case in a_profile("cpu", 4)} == {"warm"}


def test_far_groups_where_they_can_differ():
    def strides(cluster: Cluster, kind: str) -> set[int]:
        found = profile.cases(Scope(cluster, 4, "fp32"), ProfileOptions(model=(MODEL,)))
        ops = (case.op for case in found if isinstance(case.op, Collective))
        return {op.group_stride for op in ops if op.kind == kind and op.group_size == 2}

    assert strides(a_cluster("cpu", 4), "all_gather") == {1}  # the same links, so the same price
    assert strides(a_cluster("cpu", 4), "all_reduce") == {1}
    assert strides(a_cluster("cpu", 4, near=2), "all_gather") == {1, 2}
    assert strides(a_cluster("cpu", 4, near=2), "all_reduce") == {1, 2}


def test_reductions_are_measured_in_the_dtypes_of_a_step():
    """tp adds up activations, data parallelism fp32 gradients; other kinds move bytes."""
    found = {
        (case.op.kind, case.op.dtype)
        for case in a_profile("cuda", 4)
        if isinstance(case.op, Collective)
    }
    for kind in ("all_reduce", "reduce_scatter", "all_gather", "send_recv"):
        dtypes = {dtype for of, dtype in found if of == kind}
        assert dtypes == ({"bf16", "fp32"} if "reduce" in kind else {"bf16"})


@pytest.mark.parametrize(("within", "between"), [("20", "64K"), ("1M", 16), (None, "16")])
def test_messages_are_no_larger_than_asked_within_a_host_and_between(within, between):
    """2 hosts of 2 GPUs: a group with ranks of both is between them."""
    cluster = msgspec.structs.replace(a_cluster("cuda", 4), num_hosts=2, num_devices_per_host=2)
    scope = Scope(cluster, 4, "bf16")
    asked = {"max_comm_size_intra_node": within, "max_comm_size_inter_node": between}
    every = profile.cases(scope, ProfileOptions(model=(MODEL,)))

    def message(case):
        return case.op.collective if isinstance(case.op, Overlap) else case.op

    def fits(op):
        if not isinstance(op, Collective):
            return True
        ranks = range(0, op.group_size * op.group_stride, op.group_stride)
        crosses = len({rank // 2 for rank in ranks}) > 1
        return op.size_bytes <= (2**16 if crosses else 2**20 if within else 2**62)

    found = profile.cases(scope, ProfileOptions(model=(MODEL,), **asked))
    assert found == [case for case in every if fits(message(case))]
    assert len({fits(message(case)) for case in every}) == 2


def test_a_size_that_is_none_is_refused_at_once():
    with pytest.raises(ValueError, match="max_comm_size_inter_node = 'x': is not understood"):
        ProfileOptions(max_comm_size_inter_node="x")


@pytest.mark.parametrize(("efa", "before"), [(False, None), (True, None), (True, "tcp")])
def test_efa_is_asked_of_libfabric_unless_the_user_asks_otherwise(efa, before, monkeypatch):
    monkeypatch.delenv("FI_PROVIDER", raising=False)
    if before:
        monkeypatch.setenv("FI_PROVIDER", before)
    pytest.importorskip("torch")
    from meshwise.probe.sweep import SweepRequest

    asked, request = ProfileOptions(efa=efa), SweepRequest(cases=(), run_dir="")
    with _environment(request, asked):
        assert os.environ.get("FI_PROVIDER") == (before or ("efa" if efa else None))
        assert ("FI_EFA_USE_DEVICE_RDMA" in os.environ) == efa
    assert os.environ.get("FI_PROVIDER") == before


def test_too_large_a_world_is_refused():
    with pytest.raises(ValueError, match=r"world_size = 8.*4 devices; use 1 to 4"):
        profile.cases(Scope(a_cluster("cpu", 4), 8, "fp32"), ProfileOptions(model=(MODEL,)))


LABELS = [
    (Gemm(m=8192, n=2560, k=2560), "gemm 8192x2560x2560 bf16"),
    (Gemm(m=1, n=2, k=3, trans_a=True, trans_b=False), "gemm 1x2x3 bf16 tn"),
    (
        Collective(kind="all_gather", size_bytes=2**24, group_size=4),
        "all_gather 16.0 MiB x4",
    ),
    (
        Collective(kind="all_reduce", size_bytes=512, group_size=2, group_stride=4),
        "all_reduce 512 B x2 stride 4",
    ),
    (
        Attention(batch=8, q_len=1024, kv_len=1024, heads=32, kv_heads=8, head_dim=80),
        "attention b8 s1024 h32/8x80 bf16 causal forward",
    ),
    (Elementwise(kind="copy", read_bytes=2**15, write_bytes=2**15), "copy 64.0 KiB"),
    (Elementwise(kind="gelu", read_bytes=2**15, write_bytes=2**14, direction="backward"),
     "gelu 48.0 KiB backward"),
    (
        Block(
            part="layer", model=MODEL, microbatch_size=8, seq_len=128, tp=2,
            sequence_parallel=True, direction="backward",
        ),
        "layer gpt h96 mb8 tp2+sp backward",
    ),
    (Block(part="head", model=MODEL, microbatch_size=1, seq_len=128), "head gpt h96 mb1 forward"),
    (
        Block(
            part="layer", form="1.first", model=WideResNet(channels=8), microbatch_size=32,
            seq_len=1, tp=2,
        ),
        "layer 1.first wide_resnet c8 mb32 tp2 forward",
    ),
    (
        Step(
            model=catalogue.get("gpt-2.6b"),
            workload=Workload(global_batch_size=32, seq_len=1024),
            layout=Layout(dp=4, zero=3, microbatch_size=8),
        ),
        "step gpt-2.6b dp4 zero3 mb8x1",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("op", "expected"), LABELS)
def test_labels(op, expected):
    assert label(Case(op=op)) == expected
    assert label(Case(op=op, regime="graph")) == f"{expected} graph"


def test_estimates_grow_with_the_work_and_count_compilation_once():
    cluster = a_cluster("cuda", 4)
    small, large = (effort.estimate_s(Case(op=Gemm(m=n, n=n, k=n)), cluster) for n in (1024, 65536))
    assert 0 < small < large
    block = Block(part="layer", model=MODEL, microbatch_size=1, seq_len=128)
    backward = msgspec.structs.replace(block, direction="backward")
    eager, compiled, second = (
        effort.estimate_s(Case(op=op, lowering=lowering), cluster)
        for op, lowering in ((block, "eager"), (block, "compiled"), (backward, "compiled"))
    )
    assert compiled == eager + effort.COMPILE_S
    assert second < effort.COMPILE_S


@pytest.mark.parametrize(("size", "calls"), [(2**26, 20), (2**30, 10), (2**31, 4)])
@pytest.mark.parametrize("regime", ["graph", "pipelined"])
def test_estimates_of_so_many_iterations_count_the_calls_of_each(size, calls, regime):
    """The sweep times as many calls as one; a product is one call."""
    cluster = a_cluster("cuda", 4)
    reduction = Collective(kind="all_reduce", size_bytes=size, group_size=4)
    for op, wanted in ((reduction, calls), (Gemm(m=4096, n=4096, k=4096), 1)):
        once, together = (
            effort.estimate_s(Case(op=op, regime=each), cluster, iterations=3)
            - effort.estimate_s(Case(op=op, regime=each), cluster, iterations=2)
            for each in ("warm", regime)
        )
        assert together / once == pytest.approx(wanted)


def test_pace_corrects_its_estimates_and_keeps_to_the_budget(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    copies = [Case(op=Elementwise(kind="copy", read_bytes=n, write_bytes=n)) for n in (1, 2, 3)]
    gemm = Case(op=Gemm(m=1, n=1, k=1))
    pace = progress.Pace(lambda _: 1.0, [*copies, gemm], budget_s=10.0)
    assert pace.next([*copies, gemm]) == 0
    clock[0] = 6.0  # it took six times its estimate: the other copies will too
    pace.done(copies[0])
    assert pace.remaining_s() == 4.0
    assert pace.next(copies[1:]) is None
    assert pace.next([*copies[1:], gemm]) == 2
    clock[0] = 9.0
    pace.done(gemm)
    assert pace.next(copies[2:]) is None

    clock[0] = 0.0
    unbounded = progress.Pace(lambda _: 1.0, copies, budget_s=None)
    assert unbounded.remaining_s() == 3.0
    assert unbounded.next(copies[2:]) == 0


def test_the_first_case_always_fits():
    case = Case(op=Gemm(m=4096, n=4096, k=4096))
    assert progress.Pace(lambda _: 5.0, [case], budget_s=1e-6).next([case]) == 0


def test_progress_in_a_log_is_one_plain_line_a_case(capsys):
    case = Case(op=Gemm(m=8, n=8, k=8))
    done = Sample(case_id=case.id, case=case, status="ok", times_s=(2e-3,))
    failed = Sample(case_id=case.id, case=case, status="oom", reason="rank 1: out of memory")
    with progress.Progress(3, visible=True) as shown:
        shown.end(done, 61.4)
        shown.end(failed, 0.0)
    with progress.Progress(3, visible=False) as hidden:
        hidden.end(done, 1.0)
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        "1/3  gemm 8x8x8 bf16  2.00 ms  (61 s left)",
        "2/3  gemm 8x8x8 bf16  oom: rank 1: out of memory  (0 s left)",
    ]


def test_listing_cases_needs_no_torch():
    code = "import sys, meshwise.probe.progress; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_case_that_takes_much_of_the_budget_waits_behind_other_categories():
    gemms = [Case(op=Gemm(m=n, n=1, k=1)) for n in (1, 2)]
    sends = [Case(op=Collective(kind=kind, size_bytes=8, group_size=2)) for kind in KINDS[:2]]
    todo, seconds = [*gemms, *sends], dict(zip([*gemms, *sends], (3.0, 1.0, 2.0, 3.0), strict=True))
    following = functools.partial(effort.next_of, todo, seconds.__getitem__)
    assert following(20.0, ()) == 0
    assert following(10.0, ()) == 1  # the smaller product gives a first price
    seen = {effort.category(gemms[0])}
    assert following(10.0, seen) == 2
    assert following(10.0, {*map(effort.category, todo)}) == 0
    assert following(2.5, seen) == 1  # what does not fit is passed over
    assert following(0.5, seen) is None


KINDS = ("all_reduce", "all_gather", "reduce_scatter", "send_recv")


@pytest.mark.parametrize(
    ("kind", "world_size", "name"),
    [
        ("cpu", 2, "gpt-30m"), ("cpu", 4, "gpt-30m"), ("cuda", 2, "llama-3-8b"),
        ("cuda", 4, "gpt-2.6b"), ("cuda", 8, "gpt-2.6b"), ("cuda", 4, "wresnet-1b"),
        ("cuda", 4, "moe-2.4b"),
    ],
)  # fmt: skip
def test_a_third_of_the_effort_prices_all_that_plans_send(kind, world_size, name):
    """By the laws of plans: programs of layouts, each message within 256 times a measured size."""
    cluster, model = a_cluster(kind, world_size), catalogue.find_any(name)
    dtype = "bf16" if kind == "cuda" else "fp32"
    workload = catalogue.default_workload(cluster, model)
    found = profile.cases(Scope(cluster, world_size, dtype), ProfileOptions(model=(model,)))
    about_s = functools.partial(effort.estimate_s, cluster=cluster)
    effort_s = sum(map(about_s, found))
    chosen = [case for case, _ in _within(effort_s / 3, found, about_s)]
    assert len(chosen) < len(found)
    sizes = defaultdict(set)
    for op in (case.op for case in chosen if isinstance(case.op, Collective)):
        sizes[op_key(op, How(), cluster).category].add(op.size_bytes)
    costs = Costs(
        cluster=cluster, dtype=dtype, lowering="eager", world_size=world_size, curves=(),
        surfaces=(), runs=(),
    )  # fmt: skip
    layouts, _ = legal_layouts(model, workload, costs, world_size)
    sent = set()
    for layout in layouts[:: 1 + len(layouts) // 60]:
        inside = msgspec.structs.replace(
            layout, pp=1, schedule="none", stages_per_rank=1, num_microbatches=1, layers=()
        )
        of = graph(model, layout.microbatch_size, workload.seq_len, dtype)
        ops = [task.op for task in program_of(of, inside, dtype).tasks]
        sent |= {op for op in ops if isinstance(op, Collective) and op.group_size > 1}
    assert sent
    for op in sent:
        measured = sizes[op_key(op, How(), cluster).category]
        assert len(measured) >= 2, op
        assert min(measured) / MOST_BEYOND <= op.size_bytes <= MOST_BEYOND * max(measured), op
        assert op.size_bytes <= 32 * max(measured), op


def test_a_whole_profile_of_four_gpus_has_dense_curves_and_takes_six_minutes():
    cluster, model = a_cluster("cuda", 4), catalogue.find_any("gpt-2.6b")
    found = profile.cases(Scope(cluster, 4, "bf16"), ProfileOptions(model=(model,)))
    assert sum(effort.estimate_s(case, cluster) for case in found) <= 360
    sizes, shapes, microbatches = defaultdict(set), defaultdict(set), defaultdict(set)
    for op in (case.op for case in found):
        if isinstance(op, Collective):
            sizes[op_key(op, How(), cluster).category].add(op.size_bytes)
        elif isinstance(op, Attention):
            shapes[op.direction].add(op)
        elif isinstance(op, Block):
            about = (op.part, op.direction, op.tp, op.sequence_parallel)
            microbatches[about].add(op.microbatch_size)
    assert len(sizes) == 16 and min(map(len, sizes.values())) >= 9
    assert min(map(len, shapes.values())) >= 12
    assert len(microbatches) == 20 and min(map(len, microbatches.values())) >= 3
