"""A run directory: ``run.json`` (one ``RunInfo``) and ``samples.jsonl`` (one ``Sample`` a line)."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from meshwise.spec.cluster import Cluster
from meshwise.spec.layout import Layout, Workload
from meshwise.spec.long_attention import LongAttention
from meshwise.spec.model import AnyModel
from meshwise.spec.op import Dtype, Lowering, Op, Regime
from meshwise.spec.plan import Plan
from meshwise.spec.recipe import Recipe
from meshwise.spec.record import NonNegative, Positive, Record, digest
from meshwise.spec.refit import Resharding

SCHEMA_VERSION = 1
MOST_S = 1e12  # of a time; products and powers of such times are still numbers


class Step(Record, kw_only=True, tag_field="op", tag="step"):
    """The work that ``run`` measures: a whole training step under a layout, a forward pass, or the
    decoding of ``new_tokens`` after the workload's sequences."""

    model: AnyModel
    workload: Workload
    layout: Layout
    dtype: Dtype = "bf16"
    recipe: Recipe = Recipe()
    mode: Literal["train", "infer", "decode"] = "train"
    new_tokens: NonNegative = 0

    @property
    def tokens(self) -> int:
        """Tokens or images in the timed work. Decoding times one token per sequence."""
        return self.workload.global_batch_size if self.mode == "decode" else self.workload.tokens


class Case(Record, kw_only=True):
    """A case: what is timed, and how. Cases with different regimes are never averaged into one.

    ``regime``: cold (L2 flushed, buffers rotated), warm (same buffers), graph (CUDA graph
    replay), blocking (the host waits for each call), pipelined (many calls in a row, one time for
    all), sustained (for seconds without a pause, at the clocks that the power cap allows).
    ``lowering``: eager or compiled code. ``backend``: whose code, if it is not torch's own choice:
    an attention kernel, a library of collectives, a way of moving weights. ``world_size``: ranks
    that worked at once.
    """

    op: Op | Step | Resharding | LongAttention
    regime: Regime = "warm"
    lowering: Lowering = "eager"
    backend: str = ""
    world_size: Positive = 1

    @property
    def id(self) -> str:
        return digest(self)


def case_of(plan: Plan, mode: Literal["train", "infer", "decode"], *, new_tokens: int = 0) -> Case:
    """Return the case that ``run`` measures for a plan."""
    op = Step(
        model=plan.model,
        workload=plan.workload,
        layout=plan.layout,
        dtype=plan.dtype,
        recipe=plan.recipe,
        mode=mode,
        new_tokens=new_tokens,
    )
    return Case(op=op, lowering=plan.lowering, world_size=plan.layout.num_devices)


class StepLine(Record, kw_only=True):
    """A line of ``steps.jsonl``: a timed training step, written as soon as its time is known.
    ``time_s``: on rank 0's clock. ``loss``: of rank 0's rows; None if another stage computes it or
    it is not finite."""

    step: NonNegative
    time_s: float
    loss: float | None = None


class Derived(NamedTuple):
    """A case and its origin. ``name``: name of the product or exchange (``qkv``)."""

    model: str
    microbatch_size: int
    seq_len: int
    hidden: int
    top_k: int
    name: str
    case: Case


class DeviceState(Record, kw_only=True):
    """Clocks and health of one device at one moment. A field that the device lacks is None."""

    rank: NonNegative = 0
    sm_clock_mhz: int | None = None
    memory_clock_mhz: int | None = None
    power_w: float | None = None
    temperature_c: int | None = None
    throttle: tuple[str, ...] = ()


class Sample(Record, kw_only=True):
    """The outcome of one case. A failure is data (``oom``, ``skipped``, ``error``, ``hung``), never
    a zero.

    ``times_s``: per iteration, the largest over ranks. ``rank_times_s[rank][iteration]``: each
    rank's own. ``metrics``: other measured values by name (``saved_bytes``, ``peak_bytes``).
    """

    case_id: str
    case: Case
    status: Literal["ok", "oom", "skipped", "error", "hung"]
    reason: str = ""
    times_s: tuple[float, ...] = ()
    rank_times_s: tuple[tuple[float, ...], ...] = ()
    metrics: dict[str, float | tuple[float, ...]] = {}
    before: tuple[DeviceState, ...] = ()
    after: tuple[DeviceState, ...] = ()
    method_version: Positive = 1

    @property
    def num_wrong(self) -> float:
        """Wrong elements in a collective's result, summed over the checks that ran."""
        found = [self.metrics.get(name, 0.0) for name in ("wrong", "wrong_as_timed")]
        return sum(sum(value) if isinstance(value, tuple) else value for value in found)

    def check(self) -> None:
        if self.status == "ok" and not self.times_s:
            self.fail("times_s", "an ok sample must hold at least one time")
        if self.status == "ok" and not all(self.rank_times_s):
            self.fail("rank_times_s", "every rank must hold at least one time")
        saved = self.metrics.get("saved_bytes", 0.0)
        if isinstance(saved, float) and saved < 0:
            self.fail("metrics", "saved_bytes must be >= 0")
        if self.status == "ok" and self.num_wrong:
            self.fail("metrics", "a sample with wrong elements is an error and not ok")
        for field, rows in (("times_s", (self.times_s,)), ("rank_times_s", self.rank_times_s)):
            for time_s in (time_s for times_s in rows for time_s in times_s):
                if not 1 / MOST_S <= time_s <= MOST_S:
                    fix = f"every time must be > 0 and finite, {1 / MOST_S:g} to {MOST_S:g} s"
                    self.fail(field, f"{fix}, and one is {time_s:g}")
        if self.status != "ok" and not self.reason:
            self.fail("reason", f"a sample with status {self.status} must say why")


class _Gpu(msgspec.Struct):
    name: str | None = None


class _Imported(msgspec.Struct):
    file: str
    tool: str
    size_kind: str
    time_kind: str
    warnings: tuple[str, ...]


class _Ring(msgspec.Struct):
    batch_size: Positive
    embed_dim: Positive
    num_heads: Positive
    num_kv_heads: Positive | None
    segment_lengths: tuple[Positive, ...]
    dilation_rates: tuple[Positive, ...]
    dtype: Literal["fp16", "bf16", "fp32", "fp64"]
    causal: bool
    dense: bool
    forward_only: bool


class _Known(msgspec.Struct):
    """The part of a provenance that code reads; the rest is only stored."""

    gpus: tuple[_Gpu, ...] | None = None
    settings: dict[str, str] | None = None
    imported: _Imported | None = None
    ring: _Ring | None = None
    cases: str | None = None
    host_load: float | None = None
    host_cores: int | None = None


FAILED = ("oom", "error", "hung")  # skipped is no failure: the case does not apply here


def ending(samples: Sequence[Sample]) -> tuple[Literal["complete", "partial"], str]:
    """Return the status of a run that tried all its cases, and the reason if some failed."""
    failed = Counter(sample.status for sample in samples if sample.status in FAILED)
    if not failed:
        return "complete", ""
    told = ", ".join(f"{count} {status}" for status, count in sorted(failed.items()))
    return "partial", f"{failed.total()} of {len(samples)} cases failed: {told}"


def changes(before: Mapping[str, str], now: Mapping[str, str]) -> str:
    """Say which versions differ, as ``torch 2.11.0 to 2.12.0``; "" if none of those known to both
    does. The build of a version (``+cu130``) counts if both have one."""

    def differs(one: str, other: str) -> bool:
        both = "+" in one and "+" in other
        return one != other if both else one.split("+")[0] != other.split("+")[0]

    shared = [name for name in before if name in now]
    found = [name for name in shared if differs(before[name], now[name])]
    return ", ".join(f"{name} {before[name]} to {now[name]}" for name in found)


class RunInfo(Record, kw_only=True):
    """A run: who measured what, where. Written before the first sample, so that a failure keeps it.

    ``status``: complete (every case that applies to this machine was measured), partial (some
    failed or the budget was spent), interrupted (from outside) or failed (the ranks or the verb).
    """

    schema_version: Positive = SCHEMA_VERSION
    run_id: str
    verb: str
    command: tuple[str, ...]
    status: Literal["running", "complete", "partial", "interrupted", "failed"] = "running"
    reason: str = ""
    started: str
    ended: str = ""
    world_size: Positive
    cluster: Cluster
    plan: Plan | None = None
    provenance: dict[str, Any] = msgspec.field(default_factory=dict[str, Any])

    @property
    def busy(self) -> str:
        """The load of the host when the run began, if other work kept a quarter of it busy."""
        load, cores = (self.provenance.get(name) for name in ("host_load", "host_cores"))
        if load is None or not cores or load <= cores / 4:
            return ""
        return f"{load:g} processes at work on {cores} cores before it began"

    @property
    def versions(self) -> dict[str, str]:
        """Versions that the prices of this run depend on: device, torch, nccl, driver, if known."""
        known = {name: self.provenance.get(name) for name in ("torch", "nccl", "driver")}
        found = {"device": self.cluster.device.name} | known
        return {name: str(version) for name, version in found.items() if version}

    def check(self) -> None:
        try:
            msgspec.convert(self.provenance, _Known)
        except msgspec.ValidationError as error:
            reason, _, field = str(error).rstrip("`").partition(" - at `$")
            raise ValueError(f"RunInfo.provenance{field}: {reason}") from None


class Baseline(Record, kw_only=True):
    """A name for launches, in ``runs/.baselines/<name>.json``. ``runs``: their directories, as seen
    from ``runs/``."""

    schema_version: Positive = SCHEMA_VERSION
    saved: str
    runs: tuple[str, ...]
