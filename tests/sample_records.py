"""Small records made by hand, for tables and pages that must not change, and a synthetic
measurement whose law is known, for verbs that need a whole one. No torch."""

import msgspec

from meshwise import store
from meshwise.models import block_ops
from meshwise.models.catalogue import get
from meshwise.options.measure import ProfileOptions
from meshwise.prices import Prices
from meshwise.probe.cases import profile
from meshwise.probe.cases.scope import Scope
from meshwise.spec import (
    Answers,
    Attention,
    Bill,
    Block,
    Candidate,
    Case,
    Cluster,
    Collective,
    Costs,
    Curve,
    Decoder,
    Device,
    DeviceCount,
    DeviceState,
    Difference,
    Elementwise,
    Experts,
    Factor,
    Gemm,
    Goodput,
    HeldOut,
    Infeasible,
    Layout,
    Model,
    Part,
    Plan,
    Prediction,
    Removal,
    RunInfo,
    Sample,
    Step,
    Surface,
    Tier,
    Varying,
    WhatIf,
    WhyNot,
    WideResNet,
    Workload,
    stages_of,
)
from meshwise.spec.costs import Law

CLUSTER = Cluster(
    name="four",
    num_hosts=1,
    num_devices_per_host=4,
    device=Device(
        name="Accelerator X",
        kind="cuda",
        memory_bytes=80 * 2**30,
        peak_flops={"bf16": 1e15},
        peak_memory_bytes_per_s=4e12,
        peak_source="a datasheet",
    ),
    tiers=(Tier(name="nvlink", num_devices=4, bytes_per_s=4.5e11, source="18 links of 25 GB/s"),),
    host_cores=64,
    notes=("made by hand",),
)
MODEL = Model(name="gpt-small", hidden=1024, layers=4, heads=16, ffn=4096, vocab=1024)
WORKLOAD = Workload(global_batch_size=8, seq_len=512)
LAYOUT = Layout(dp=4, zero=2, microbatch_size=2)
RIVAL = Layout(dp=2, tp=2, sequence_parallel=True, zero=3, microbatch_size=4)
MEASURE_RUN = "20260101T000000-measure-profile-four"

# One of each other family, small enough to train in a test.
_SIZES = {"hidden": 64, "layers": 4, "heads": 8, "ffn": 96, "vocab": 100, "max_seq_len": 64}
LLAMA = Decoder(name="small", **_SIZES, kv_heads=2, head_dim=8)
MOE = Model(name="moe", **_SIZES, experts=Experts(num_experts=4, top_k=2, ffn=96, every=2))
IMAGES = WideResNet(name="images", blocks=(1, 1), channels=8, image_size=32, num_classes=10)


def prediction(step_time_s: float, peak_memory_bytes: float) -> Prediction:
    """10 % of interval; parts of 60, 30 and 10 %."""
    return Prediction(
        step_time_s=step_time_s,
        p50_s=1.02 * step_time_s,
        p95_s=1.03 * step_time_s,
        low_s=0.9 * step_time_s,
        high_s=1.1 * step_time_s,
        time_parts=_parts(step_time_s, "backward layer", "forward layer", "optimizer"),
        peak_memory_bytes=peak_memory_bytes,
        memory_low_bytes=0.95 * peak_memory_bytes,
        memory_high_bytes=1.05 * peak_memory_bytes,
        memory_parts=_parts(peak_memory_bytes, "optimizer state", "parameters", "activations"),
        tokens_per_s=WORKLOAD.tokens / step_time_s,
        flops_per_device_per_s=1e14 * 0.010 / step_time_s,
        mfu=0.1 * 0.010 / step_time_s,
        notes=("all_reduce bf16 in place 4 by nvlink: 4.8 x beyond the largest measured size",),
    )


def _parts(whole: float, *names: str) -> tuple[Part, ...]:
    shares = zip(names, (0.6, 0.3, 0.1), strict=True)
    return tuple(
        Part(name=name, value=whole * s, low=0.9 * whole * s, high=1.1 * whole * s)
        for name, s in shares
    )


def plan(layout: Layout = LAYOUT, step_time_s: float = 0.010) -> Plan:
    """A plan with RIVAL behind it."""
    rows = layout.microbatch_rows * layout.num_microbatches
    return Plan(
        model=MODEL,
        workload=msgspec.structs.replace(WORKLOAD, global_batch_size=rows),
        cluster=CLUSTER,
        dtype="bf16",
        lowering="eager",
        layout=layout,
        stages=stages_of(layout, MODEL),
        prediction=prediction(step_time_s, 4 * 2**30),
        runners_up=(Candidate(layout=RIVAL, prediction=prediction(0.012, 3 * 2**30)),),
        removed=(
            Removal(constraint="tp = 3 does not divide heads = 16", count=7),
            Removal(constraint="memory: more than 80.0 GiB a device", count=2),
        ),
        nearest_infeasible=Infeasible(
            layout=Layout(dp=4, microbatch_size=2),
            missing_bytes=3.1 * 2**30,
            reason="rank 0 needs 3.1 GiB more; its largest part is activations "
            "(60.0 GiB of 83.1 GiB)",
        ),
        num_considered=11,
        runs=(MEASURE_RUN,),
    )


def answered() -> Plan:
    """The plan with an answer of every kind."""
    part_of = (("tensor-parallel communication", 0.0, 0.0016), ("backward layer", 0.006, 0.0064))
    slower = WhyNot(
        layout=RIVAL, step_time_s=0.012, error_s=0.0005, untried="it is made by hand",
        time=tuple(Difference(part=name, chosen=a, named=b) for name, a, b in part_of),
        memory=(Difference(part="activations", chosen=2.0**30, named=2.0**29),),
    )  # fmt: skip
    large = msgspec.structs.replace(
        slower, layout=Layout(dp=4, microbatch_size=2), untried="", error_s=0.003,
        misfit="rank 0 needs 3.1 GiB more; its largest part is activations (60 GiB of 83 GiB)",
    )  # fmt: skip
    illegal = WhyNot(layout=Layout(dp=3), obstacle="it is for 3 devices, and the plan for 4")
    answers = Answers(
        why_not=(slower, large, illegal),
        what_if=(
            WhatIf(change="10 GB more memory a device", layout=LAYOUT, step_time_s=0.01,
                   tokens_per_s=409600, faster=1.0),
            WhatIf(change="twice the links within a host", note="the data sheet's rate is doubled",
                   layout=RIVAL, step_time_s=0.008, tokens_per_s=512000, faster=1.25),
            WhatIf(change="twice the batch", note="no layout of 4 devices is legal"),
        ),
        sizes=(
            DeviceCount(num_devices=1, note="parameters and moments are too many"),
            DeviceCount(num_devices=2, layout=Layout(dp=2, microbatch_size=4), step_time_s=0.021,
                        high_s=0.025, p50_s=0.0212, goodput=0.951),
            DeviceCount(num_devices=4, layout=LAYOUT, step_time_s=0.010, high_s=0.011,
                        p50_s=0.0102, goodput=0.931),
        ),
        varying=(Varying(what="lengths of sequences, padded", p50_s=0.0042, p95_s=0.0051),),
        tokens=300e9,
        deadline_s=10 * 86400.0,
        goodput=Goodput(share=0.931, failure_s=11160.0, checkpoint_s=20.0, each_s=660.0,
                        restart_s=600.0),
        bills=(
            Bill(tokens=1e6, seconds=2.675, device_hours=0.002972, dollars=0.00743, kwh=0.00208),
            Bill(tokens=300e9, seconds=802430.5, device_hours=891.6, dollars=2229.0, kwh=624.1),
        ),
    )  # fmt: skip
    return msgspec.structs.replace(plan(), answers=answers)


GOOD = HeldOut(median=0.012, p90=0.034, num_points=9)
POOR = HeldOut(median=0.21, p90=0.55, num_points=4)
_RUNS = (MEASURE_RUN,)


def curve(like, floor_s: float, bytes_per_s: float, **run) -> Curve:  # type: ignore[no-untyped-def]
    """Four points of an exact alpha-beta law."""
    x = tuple(2.0**power for power in (12, 18, 24, 30))
    return Curve(
        like=like,
        law="alpha_beta",
        laws={
            "alpha_beta": Law(parameters=(floor_s, 1 / bytes_per_s), held_out=GOOD),
            "lines": Law(held_out=POOR),
        },
        x_bytes=x,
        time_s=tuple(floor_s + size / bytes_per_s for size in x),
        end_s_per_byte=1 / bytes_per_s,
        end_range_s_per_byte=(1 / bytes_per_s, 1 / bytes_per_s),
        beyond=GOOD,
        runs=_RUNS,
        **run,
    )


COPY = Elementwise(kind="copy", read_bytes=2**20, write_bytes=2**20)
HEADS = {"batch": 2, "heads": 16, "kv_heads": 16, "head_dim": 64}
BLOCK = Block(part="layer", model=MODEL, microbatch_size=2, seq_len=512)
COSTS = Costs(
    cluster=CLUSTER,
    dtype="bf16",
    lowering="eager",
    curves=(
        curve(Collective(kind="all_gather", size_bytes=8, group_size=2), 20e-6, 300e9),
        curve(Collective(kind="all_gather", size_bytes=8, group_size=4), 25e-6, 280e9),
        curve(
            Collective(kind="all_reduce", size_bytes=8, group_size=4, in_place=True), 30e-6, 200e9
        ),
        curve(COPY, 3e-6, 3.5e12, regime="cold"),
    ),
    surfaces=(
        Surface(
            like=Attention(q_len=512, kv_len=512, **HEADS),
            regime="cold",
            dims=("kv_heads", "batch", "q_len", "kv_len", "heads", "head_dim"),
            shapes=((16, 2, 512, 512, 16, 64), (16, 2, 2048, 2048, 16, 64)),
            time_s=(30e-6, 150e-6),
            floor_s=3e-6,
            flops_per_s=3e14,
            bytes_per_s=3.5e12,
            held_out=POOR,
            runs=_RUNS,
        ),
        Surface(
            like=Gemm(m=256, n=256, k=256),
            regime="cold",
            dims=("m", "n", "k"),
            shapes=((256, 256, 256), (1024, 4096, 1024), (8192, 8192, 8192)),
            time_s=(5e-6, 20e-6, 1.4e-3),
            floor_s=3e-6,
            flops_per_s=7.8e14,
            bytes_per_s=3.5e12,
            held_out=GOOD,
            runs=_RUNS,
        ),
    ),
    factors=(
        Factor(
            like=msgspec.structs.replace(BLOCK, direction="backward"),
            activation_elements=(5e5, 4e6),
            host_s=(3e-4, 4e-4),
            ratio=(1.4, 1.1),
            saved_ratio=(0.98, 1.0),
            held_out=GOOD,
            runs=_RUNS,
        ),
        Factor(
            like=msgspec.structs.replace(BLOCK, tp=2, sequence_parallel=True),
            activation_elements=(5e5,),
            host_s=(0.0,),
            ratio=(1.6,),
            held_out=HeldOut(median=0.0, p90=0.0, num_points=0),
            runs=_RUNS,
        ),
    ),
    runs=_RUNS,
)

PROVENANCE = {
    "meshwise": "0.1.0",
    "torch": "2.11.0",
    "cuda": "12.8",
    "nccl": "2.28.9",
    "python": "3.12.1",
    "git_commit": "0123456789abcdef",
    "git_dirty": False,
    "gpus": [{"name": "Accelerator X", "uuid_hash": "00"}] * 4,
    "settings": {"NCCL_NVLS_ENABLE": "0"},
}


def info(verb: str = "measure", chosen: Plan | None = None, run_id: str = MEASURE_RUN) -> RunInfo:
    return RunInfo(
        run_id=run_id,
        verb=verb,
        command=("meshwise", verb),
        status="complete",
        started="2026-01-01T00:00:00Z",
        ended="2026-01-01T00:01:00Z",
        world_size=4,
        cluster=CLUSTER,
        plan=chosen,
        provenance=PROVENANCE,
    )


def sample(op, times_s, *, regime="warm", ranks=4, method_version=1, **metrics) -> Sample:  # type: ignore[no-untyped-def]
    """An ok sample whose rank 1 was a tenth slower than the others."""
    case = Case(op=op, regime=regime, world_size=4)
    state = DeviceState(rank=0, sm_clock_mhz=1980, throttle=("power cap",))
    return Sample(
        case_id=case.id,
        case=case,
        status="ok",
        times_s=tuple(times_s),
        rank_times_s=tuple(
            tuple(t if rank == 1 else t / 1.1 for t in times_s) for rank in range(ranks)
        ),
        metrics=metrics,
        after=(state,),
        method_version=method_version,
    )


def failed(op, status: str, reason: str) -> Sample:  # type: ignore[no-untyped-def]
    case = Case(op=op, world_size=4)
    return Sample(case_id=case.id, case=case, status=status, reason=reason)  # type: ignore[arg-type]


GEMM = Gemm(m=1024, n=4096, k=1024)
SAMPLES = (
    sample(GEMM, [20e-6, 21e-6, 22e-6] * 4, regime="cold"),
    sample(Elementwise(kind="copy", read_bytes=2**20, write_bytes=2**20), [4e-6] * 8),
    sample(Collective(kind="all_reduce", size_bytes=2**24, group_size=4), [110e-6] * 8),
    sample(
        Collective(kind="all_gather", size_bytes=2**24, group_size=2, group_stride=2), [80e-6] * 8
    ),
    sample(Block(part="layer", model=MODEL, microbatch_size=2, seq_len=512), [1e-3] * 8),
    failed(Gemm(m=10**6, n=10**6, k=10**6), "oom", "rank 0: tried to allocate 2 TiB"),
)


def step_sample(chosen: Plan, times_s, **metrics) -> Sample:  # type: ignore[no-untyped-def]
    op = Step(
        model=chosen.model, workload=chosen.workload, layout=chosen.layout, dtype=chosen.dtype
    )
    return sample(op, times_s, **metrics)


def write_run(runs, run_info: RunInfo, samples) -> str:  # type: ignore[no-untyped-def]
    """A run directory on disk."""
    run_dir = runs / run_info.run_id
    store.write(run_dir / "run.json", run_info)
    for one in samples:
        store.append(run_dir, one)
    return str(run_dir)


CPUS = Cluster(
    name="two-cpus",
    num_hosts=1,
    num_devices_per_host=2,
    device=Device(name="a CPU", kind="cpu", memory_bytes=8 * 2**30),
    tiers=(Tier(name="shared memory", num_devices=2),),
)


def law_s(op) -> float:  # type: ignore[no-untyped-def]
    """Seconds of an operation on CPUS: launch and rate; blocks a tenth slower than their sum."""
    if isinstance(op, Block):
        return 1.1 * sum(map(law_s, block_ops(op)))
    if isinstance(op, Collective):
        return 1e-3 + op.bytes / 1e9
    return 1e-5 + op.flops / 5e10 + op.bytes / 1e10


def synthetic_run(runs) -> str:  # type: ignore[no-untyped-def]
    """A complete profile of CPUS for gpt-30m, as ``measure`` would leave it."""
    cases = profile.cases(Scope(CPUS, 2, "fp32"), ProfileOptions(model=(get("gpt-30m"),)))
    measured = RunInfo(
        run_id="20260101T000000-measure-profile-two-cpus",
        verb="measure",
        command=("meshwise", "measure"),
        status="complete",
        started="2026-01-01T00:00:00Z",
        world_size=2,
        cluster=CPUS,
    )
    samples = [
        Sample(case_id=case.id, case=case, status="ok", times_s=(law_s(case.op),) * 3)
        for case in cases
    ]
    return write_run(runs, measured, samples)


def priced(**rates: float) -> Prices:
    """Prices of four ranks: ``all_to_all=1e9`` means that many bytes a second."""
    curves = [
        curve(Collective(kind=kind, size_bytes=8, group_size=4), 1e-6, rate)  # type: ignore[arg-type]
        for kind, rate in rates.items()
    ]
    return Prices(msgspec.structs.replace(COSTS, curves=tuple(curves)))
