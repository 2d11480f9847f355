"""Where does each millisecond of a 2.6B Llama step on FSDP2 go, and how fast can stock torch be?

    PYTHONPATH=. torchrun --nproc-per-node 4 benchmarks/2026-11-21-llama-2.6b-fsdp4/step.py --out X

Out: ``X/records.jsonl``: one ``run``, the rates of the ``products``, per ``variant`` its error
against the oracle and every step's time on every rank, per variant the ``table`` of one step.
Without a GPU the same flow runs in fp32 on a tiny model, less the tables.

All variants are built and checked first and their steps interleaved, because the cards drift.
What every rank fails is a record; a rank that fails by itself ends the run at the groups' timeout.
"""

import argparse
import functools
import gc
import itertools
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import breakdown
import llama
import msgspec
import torch
import torch._dynamo
import torch.distributed as dist
import torch.nn.functional as F
from llama import Llama, Shape
from products import rates
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from meshwise import provenance, ranks, timing
from meshwise.stats import median_interval

FULL = Shape(hidden=2560, layers=32, heads=32, ffn=6912, vocab=51200, seq=1024, rows=8)
TINY = Shape(hidden=64, layers=2, heads=4, ffn=192, vocab=256, seq=32, rows=2)
PEAK_FLOPS = 989e12  # dense bf16, data sheet
TIMEOUT_S = 90.0
TIMED, ROUNDS = 4, 5  # steps timed in a row after one untimed, and how often
ALLOWED = {  # relative errors; of bf16's gradients, as multiples of what plain eager bf16 errs by
    "fp32": {"loss": 1e-5, "gradients": 1e-5, "norm": 1e-5, "loss_after": 1e-5},
    "bf16": {"loss": 1e-3, "gradients": 1.25, "norm": 1e-2, "loss_after": 1e-2},
}
Batch = tuple[Tensor, Tensor]  # tokens and targets


@dataclass(frozen=True)
class Variant:
    name: str
    zero: int = 2  # 3: gathered again for backward; 2: kept till then
    joined: bool = True  # q, k, v as one product, gate and up as one
    rope: str = "real"  # or flip; or torchtitan's complex one, for which inductor has no code
    attention: str = "cudnn"  # or flash
    reduce: str = "fp32"  # or bf16, which adds up less exactly
    max_ctas: int = 0  # blocks that NCCL may occupy; 0: its own choice
    rooted: bool = False  # embedding, last norm and head in the root unit, as the engine has them
    clip: str = "own"  # or torch's, over DTensors
    alone: bool = False  # no communication: a bf16 model, and AdamW on one rank's share


JOINED = Variant("joined")
TITAN = Variant("titan", zero=3, joined=False, rope="complex", clip="torch")
ZERO2 = Variant("zero2", joined=False)
VARIANTS = (  # of the second run
    TITAN,
    JOINED,
    ZERO2,
    replace(ZERO2, name="zero2-alone", alone=True),
    replace(ZERO2, name="zero2-ctas16", max_ctas=16),
    replace(ZERO2, name="zero2-bf16", reduce="bf16"),
    replace(ZERO2, name="zero2-flip", rope="flip"),
)
MORE = (  # of the first run, by --only
    replace(TITAN, name="zero3", rope="real", clip="own"),
    replace(JOINED, name="alone", alone=True),
    replace(JOINED, name="ctas8", max_ctas=8),
    replace(JOINED, name="bf16-reduce", reduce="bf16"),
    replace(JOINED, name="rooted", rooted=True),
    replace(JOINED, name="flash", attention="flash"),
)


@dataclass
class Job:
    """A variant that has been built."""

    variant: Variant
    model: Llama
    loss: Callable[[Tensor, Tensor], Tensor]
    update: Callable[[], Tensor]  # clips and steps; returns the norm of the gradients
    marker: Tensor
    found: dict[str, Any] = field(default_factory=dict)
    rank_times_s: list[list[float]] = field(default_factory=list)
    states: list[Any] = field(default_factory=list)

    def step(self, batch: Batch, inspect: Callable[[], None] | None = None) -> tuple[Tensor, ...]:
        """This rank's loss, and the norm."""
        breakdown.mark(self.marker)
        loss = self.loss(self.model(batch[0]), batch[1])
        breakdown.mark(self.marker)
        loss.backward()
        breakdown.mark(self.marker)
        if inspect is not None:
            inspect()
        norm = self.update()
        breakdown.mark(self.marker)
        return loss.detach(), norm


# ---------------------------------------------------------------- building a variant


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(0, 1))


def build(variant: Variant, shape: Shape, me: ranks.Ranks, dtype: str, backend: str) -> Job:
    attention = variant.attention if me.device.type == "cuda" else "flash"
    model = llama.create(shape, me.device, variant.joined, variant.rope, attention)
    for layer in model.layers:
        layer.compile(backend=backend, fullgraph=True, dynamic=False)
    loss = torch.compile(cross_entropy, backend=backend, fullgraph=True, dynamic=False)
    if variant.alone:
        update = share_update(model, me.world_size)
        if dtype == "bf16":
            model.bfloat16()
            llama.set_table(model, shape, me.device, variant.rope)  # back in fp32
    else:
        shard(model, variant, me, dtype)
        update = whole_update(model, variant)
    return Job(variant, model, loss, update, torch.ones((), dtype=torch.int32, device=me.device))


def shard(model: Llama, variant: Variant, me: ranks.Ranks, dtype: str) -> None:
    policy = MixedPrecisionPolicy()
    if dtype == "bf16":
        reduce = torch.bfloat16 if variant.reduce == "bf16" else torch.float32
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce)
    group = everyone(me.backend, variant.max_ctas)
    mesh = DeviceMesh.from_group(group, me.device.type, mesh_dim_names=("dp",))
    unit = functools.partial(fully_shard, mesh=mesh, mp_policy=policy)
    for layer in model.layers:
        unit(layer, reshard_after_forward=variant.zero == 3)
    if not variant.rooted:
        unit(model.embed, reshard_after_forward=variant.zero == 3)
        unit([model.norm, model.head], reshard_after_forward=False)
    unit(model, reshard_after_forward=False)


@functools.cache
def everyone(backend: str, max_ctas: int) -> dist.ProcessGroup:
    """NCCL's blocks can only be limited where a group is made."""
    options = None
    if max_ctas and backend == "nccl":
        options = dist.ProcessGroupNCCL.Options()
        options.config.max_ctas = max_ctas
    timeout = timedelta(seconds=TIMEOUT_S)
    return dist.new_group(backend=backend, pg_options=options, timeout=timeout)


def whole_update(model: Llama, variant: Variant) -> Callable[[], Tensor]:
    parameters = list(model.parameters())
    adamw = torch.optim.AdamW(parameters, fused=True, **llama.ADAMW)

    def update() -> Tensor:
        if variant.clip == "own":
            norm = clip([p.grad.to_local() for p in parameters], alone=False)
        else:  # as torchtitan
            norm = nn.utils.get_total_norm([p.grad for p in parameters], foreach=True)
            norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
            nn.utils.clip_grads_with_norm_(parameters, 1.0, norm, foreach=True)
        adamw.step()
        adamw.zero_grad()
        return norm

    return update


def clip(shards: Sequence[Tensor], *, alone: bool) -> Tensor:
    """Scale to a norm of at most 1 over all ranks; on shards, and the host waits for nothing."""
    total = nn.utils.get_total_norm(shards, foreach=True).square()
    if not alone:
        dist.all_reduce(total)
    norm = total.sqrt()
    torch._foreach_mul_(shards, (1.0 / (norm + 1e-6)).clamp(max=1.0))  # no public name
    return norm


def share_update(model: Llama, num_ranks: int) -> Callable[[], Tensor]:
    """What the optimizer computes on one of the ranks, with gradients that stay the same."""
    masters = []
    for parameter in model.parameters():
        share = parameter.detach().flatten()[: parameter.numel() // num_ranks]
        masters.append(nn.Parameter(share.clone()))
        masters[-1].grad = 1e-5 * torch.randn_like(share)
    adamw = torch.optim.AdamW(masters, fused=True, **llama.ADAMW)

    def update() -> Tensor:
        norm = clip([master.grad for master in masters], alone=True)
        adamw.step()
        model.zero_grad()
        return norm

    return update


# ---------------------------------------------------------------- is it right, how fast is it?


def gradient_error(model: Llama, right: llama.Expected) -> float:
    difference = square = 0.0
    for name, gradient in llama.gradients(model, right.gradients):
        expected = right.gradients[name]
        difference += float((gradient - expected).square().sum())
        square += float(expected.square().sum())
    return (difference / square) ** 0.5


def allow(
    dtype: str, shape: Shape, me: ranks.Ranks, batch: Batch, right: llama.Expected
) -> dict[str, float]:
    """The largest errors that are right. What bf16 does to gradients depends on the model, so the
    yardstick is measured: the same model in plain eager bf16, averaged over ranks in fp32."""
    allowed = dict(ALLOWED[dtype])
    if dtype == "bf16":
        model = llama.create(shape, me.device, joined=False, rope="real", attention="flash")
        model.bfloat16()
        llama.set_table(model, shape, me.device, "real")  # back in fp32
        cross_entropy(model(batch[0]), batch[1]).backward()
        allowed["gradients"] *= gradient_error(model, right)
    return allowed


def check(job: Job, batch: Batch, right: llama.Expected, allowed: dict[str, float]) -> None:
    """Two steps on one batch against the oracle."""
    errors = job.found["errors"] = {}

    def relative(name: str, value: Tensor, expected: float) -> None:
        errors[name] = abs(float(value) - expected) / abs(expected)

    def compare_gradients() -> None:
        errors["gradients"] = gradient_error(job.model, right)

    loss, norm = job.step(batch, compare_gradients)
    relative("loss", llama.averaged(loss), right.loss)
    if not job.variant.alone:  # whose optimizer updates other parameters
        relative("norm", norm, right.norm)
        relative("loss_after", llama.averaged(job.step(batch)[0]), right.loss_after)
    job.found["wrong"] = [name for name, e in errors.items() if not e <= allowed[name]]


def time_block(job: Job, me: ranks.Ranks, batches: Sequence[Batch]) -> None:
    """One untimed and ``TIMED`` timed steps back to back; clocks and power while they run."""
    mark, elapsed_s = timing.clock(me.device)
    on_cuda = me.device.type == "cuda"
    held = torch.cuda.memory_allocated() if on_cuda else 0
    retries = _alloc_retries()
    if on_cuda:
        torch.cuda.reset_peak_memory_stats()
    gc.disable()
    marks = []
    for index in range(1 + TIMED):
        job.step(batches[index % len(batches)])
        marks.append(mark())
    state = msgspec.to_builtins(provenance.device_state(me))  # the device is still at work
    me.synchronize("timed steps")
    gc.enable()
    if on_cuda:
        used = torch.cuda.max_memory_allocated() - held
        job.found["peak_bytes"] = job.found["state_bytes"] + used
        job.found["alloc_retries"] = job.found.get("alloc_retries", 0) + _alloc_retries() - retries
    replies = me.gather(([elapsed_s(a, b) for a, b in itertools.pairwise(marks)], state))
    job.rank_times_s = job.rank_times_s or [[] for _ in replies]
    for own, (times_s, _) in zip(job.rank_times_s, replies, strict=True):
        own.extend(times_s)
    job.states.append([state for _, state in replies])


def _alloc_retries() -> int:
    """How often the allocator had to hand its cache back, which waits for the device."""
    return torch.cuda.memory_stats()["num_alloc_retries"] if torch.cuda.is_available() else 0


def profile_steps(job: Job, me: ranks.Ranks, batches: Sequence[Batch]) -> dict[str, Any] | None:
    """The table of the last step on rank 0; None elsewhere, and without a GPU."""
    if me.device.type != "cuda":
        return None
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for batch in batches:
            job.step(batch)
        me.synchronize("profiled steps")
    if me.rank != 0:
        return None
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return breakdown.table(json.loads(path.read_text())["traceEvents"])


# ---------------------------------------------------------------- the run


class Log:
    """Rank 0's records, each on disk at once, and lines for whoever waits."""

    def __init__(self, me: ranks.Ranks, out: Path, seconds: float) -> None:
        self.me, self.path, self.seconds = me, out / "records.jsonl", seconds
        self.started = time.perf_counter()
        if me.rank == 0:
            out.mkdir(parents=True, exist_ok=True)
            self.path.write_bytes(b"")

    def write(self, record: str, **fields: Any) -> None:
        if self.me.rank == 0:
            with self.path.open("ab") as file:
                file.write(msgspec.json.encode({"record": record, **fields}) + b"\n")

    def say(self, text: str) -> None:
        if self.me.rank == 0:
            print(f"{time.perf_counter() - self.started:6.1f} s  {text}", flush=True)

    def is_late(self, part: float = 1.0) -> bool:
        """By rank 0's clock, so that all ranks decide alike."""
        spent_s = self.me.gather(time.perf_counter() - self.started)[0]
        return bool(spent_s > part * self.seconds)

    def attempt(self, name: str, what: str, work: Callable[[], Any]) -> tuple[Any, str]:
        """The result, or why not: the same reason on all ranks."""
        self.me.at(f"{name}, {what}")
        result, reason = None, ""
        try:
            result = work()
        except Exception as error:
            reason = f"{what}: {type(error).__name__}: {str(error)[:500]}"
        reasons = [text for text in self.me.gather(reason) if text]
        if reasons:
            self.say(f"{name}: {reasons[0][:300]}")
        return result, reasons[0] if reasons else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default="", help="variants, separated by commas")
    parser.add_argument("--seconds", type=float, default=150.0, help="start no work after these")
    parser.add_argument("--backend", help="of torch.compile")
    parser.add_argument("--dtype", choices=ALLOWED, help="of the computation")
    options = parser.parse_args()
    by_name = {variant.name: variant for variant in VARIANTS + MORE}
    variants = [by_name[name] for name in options.only.split(",")] if options.only else VARIANTS
    torch._dynamo.config.recompile_limit = 64  # all variants share Layer.forward
    me = ranks.join(TIMEOUT_S)
    on_cuda = me.device.type == "cuda"
    shape = FULL if on_cuda else TINY
    dtype = options.dtype or ("bf16" if on_cuda else "fp32")
    backend = options.backend or ("inductor" if on_cuda else "aot_eager")
    log = Log(me, options.out, options.seconds)
    facts = {"shape": shape._asdict(), "dtype": dtype, "step_flops_of_a_rank": shape.flops}
    states = timing.device_states(me)
    log.write("run", command=sys.argv, provenance=provenance.collect(), before=states, facts=facts)

    batches = draw(shape, me)
    right = llama.expect(shape, me.device, batches[0])
    log.say(f"oracle: loss {right.loss:.4f}, norm {right.norm:.4f}, then {right.loss_after:.4f}")
    allowed = allow(dtype, shape, me, batches[0], right)
    free(on_cuda)
    log.write("allowed", errors=allowed)
    log.say(f"allowed errors: {allowed}")
    floors = {}
    for joined in sorted({variant.joined for variant in variants}):
        floors[joined] = rates(shape, joined, me, seconds=2.0 if on_cuda else 0.05)
        log.write("products", joined=joined, **floors[joined])
        sustained_ms, burst_ms = (1e3 * floors[joined][f"{x}_s"] for x in ("sustained", "burst"))
        log.say(f"products, {joined=}: {sustained_ms:.0f} ms sustained, {burst_ms:.0f} in bursts")
    free(on_cuda)
    jobs, known = [], (right, allowed)
    for variant in variants:
        job, reason = None, "no time left to build it"
        if not log.is_late(0.6):
            work = functools.partial(prepare, variant, shape, me, batches[0], known, dtype, backend)
            job, reason = log.attempt(variant.name, "building", work)
        if reason:
            log.write("variant", variant=variant, status="error", reason=reason)
            continue
        log.say(f"{variant.name}: {job.found}")
        jobs.append(job)
    del right, known
    free(on_cuda)
    measure(jobs, log, shape, floors, batches)
    log.write("end", after=timing.device_states(me), seconds=time.perf_counter() - log.started)
    me.leave()


def free(on_cuda: bool) -> None:
    gc.collect()
    if on_cuda:
        torch.cuda.empty_cache()


def draw(shape: Shape, me: ranks.Ranks) -> list[Batch]:
    seed = torch.Generator(me.device).manual_seed(1 + me.rank)
    size = (4, shape.rows, shape.seq + 1)
    tokens = torch.randint(shape.vocab, size, device=me.device, generator=seed)
    return [(part[:, :-1].contiguous(), part[:, 1:].contiguous()) for part in tokens]


def prepare(
    variant: Variant,
    shape: Shape,
    me: ranks.Ranks,
    batch: Batch,
    known: tuple[llama.Expected, dict[str, float]],
    dtype: str,
    backend: str,
) -> Job:
    """Build, compile by the first step, and check."""
    began, on_cuda = time.perf_counter(), me.device.type == "cuda"
    before_bytes = torch.cuda.memory_allocated() if on_cuda else 0
    job = build(variant, shape, me, dtype, backend)
    check(job, batch, *known)
    me.synchronize("the check")
    job.found["state_bytes"] = torch.cuda.memory_allocated() - before_bytes if on_cuda else 0
    job.found["built_s"] = round(time.perf_counter() - began, 1)
    return job


def measure(jobs: list[Job], log: Log, shape: Shape, floors: Any, batches: list[Batch]) -> None:
    """Steps of all variants in turn, then one profiled step of each."""
    failed: dict[str, str] = {}
    for job in jobs * ROUNDS:
        name = job.variant.name
        if name not in failed and not log.is_late(0.9):
            work = functools.partial(time_block, job, log.me, batches)
            if reason := log.attempt(name, "timing", work)[1]:
                failed[name] = reason
    medians_s = {}
    for job in jobs:
        name, variant = job.variant.name, job.variant
        times_s = [max(step) for step in zip(*job.rank_times_s, strict=True)]
        if name in failed or not times_s:
            log.write(
                "variant", variant=variant, status="error", reason=failed.get(name, "no time")
            )
            continue
        medians_s[name], low_s, high_s = median_interval(times_s)
        log.write(
            "variant",
            variant=variant,
            status="wrong" if job.found["wrong"] else "ok",
            median_s=medians_s[name],
            interval_s=(low_s, high_s),
            mfu=shape.flops / medians_s[name] / PEAK_FLOPS,
            floor_s=floors[variant.joined]["sustained_s"],
            floor_fraction=floors[variant.joined]["sustained_s"] / medians_s[name],
            found=job.found,
            rank_times_s=job.rank_times_s,
            states=job.states,
        )
        log.say(
            f"{name:12} {1e3 * medians_s[name]:6.1f} ms ({1e3 * low_s:.1f}-{1e3 * high_s:.1f}), "
            f"MFU {shape.flops / medians_s[name] / PEAK_FLOPS:.1%}, {len(times_s)} steps"
            + (f"; WRONG: {job.found['wrong']}" if job.found["wrong"] else "")
        )
    log.say(f"{'profiled, ms':12} {'step':>6} " + breakdown.HEADER)
    for job in jobs:
        name = job.variant.name
        if name in medians_s and not log.is_late():
            work = functools.partial(profile_steps, job, log.me, batches)
            table, reason = log.attempt(name, "profiling", work)
            log.write("table", variant=name, reason=reason, table=table)
            if table:
                log.say(f"{name:12} {table['step_ms']:6.1f} " + breakdown.line(table))


if __name__ == "__main__":
    main()
