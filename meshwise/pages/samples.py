"""Tables of measured samples, one for each kind of operation, with nccl-tests' columns."""

from collections import Counter
from collections.abc import Sequence

from meshwise.pages.table import Table
from meshwise.pages.tables import ABSENT, INTERVAL, interval
from meshwise.spec import (
    Attention,
    Block,
    Case,
    Collective,
    Elementwise,
    Gemm,
    RunInfo,
    Sample,
    Step,
)
from meshwise.spec.label import label
from meshwise.stats import median_interval
from meshwise.units import format_bytes, format_rate, format_seconds

BUS_LEGEND = (
    "algbw = size/time. busbw = algbw x what each rank must send: 2(n-1)/n for all_reduce, (n-1)/n "
    "for all_gather, reduce_scatter and all_to_all, 1 otherwise, so that it compares with a link."
)


def listing(cases: Sequence[tuple[Case, float]]) -> Table:
    """What ``measure --dry-run`` would time, and about how long each takes."""
    rows = tuple(
        (str(number), label(case), case.regime, format_seconds(about_s))
        for number, (case, about_s) in enumerate(cases, 1)
    )
    all_s = sum(about_s for _, about_s in cases)
    legend = f"{len(cases)} cases, about {format_seconds(all_s)} in all; nothing was measured."
    return Table("Cases, most useful first", ("", "case", "regime", "about"), rows, (legend,), 3)


def run(info: RunInfo, samples: Sequence[Sample]) -> list[Table]:
    """A measure run: its state, then what it measured, kind by kind, then what failed."""
    kinds: tuple[tuple[str, tuple[type, ...]], ...] = (
        ("Matrix products and attention", (Gemm, Attention)),
        ("Memory-bound operations", (Elementwise,)),
        ("Blocks", (Block,)),
        ("Steps", (Step,)),
    )
    done = [sample for sample in samples if sample.status == "ok"]
    tables = [state(info, samples)]
    for title, types in kinds:
        chosen = [sample for sample in done if isinstance(sample.case.op, types)]
        if chosen:
            tables.append(_timed(title, chosen))
    if any(isinstance(sample.case.op, Collective) for sample in done):
        tables.append(_collectives(done))
    return tables + failed(samples)


def state(info: RunInfo, samples: Sequence[Sample]) -> Table:
    """One line a fact: who measured what, and how it ended."""
    counts = Counter(sample.status for sample in samples)
    outcome = ", ".join(f"{count} {status}" for status, count in counts.most_common())
    rows = (
        ("status", info.status + (f": {info.reason}" if info.reason else "")),
        ("cases", outcome or "none"),
        ("cluster", f"{info.cluster.name}, {info.world_size} ranks"),
        ("started", info.started + (f", ended {info.ended}" if info.ended else "")),
        ("command", " ".join(info.command)),
        *((name, text) for name, text in facts(info)),
        *((("throttled", throttled(samples)),) if throttled(samples) else ()),
    )
    return Table(info.run_id, ("", ""), rows, left=2)


def facts(info: RunInfo) -> list[tuple[str, str]]:
    """Versions and devices of a run's provenance, where they were found."""
    known = info.provenance
    commit = known.get("git_commit")
    versions = [
        f"{name} {known[name]}"
        for name in ("meshwise", "torch", "cuda", "nccl", "driver", "python")
        if known.get(name)
    ]
    if commit:
        dirty = " with local changes" if known.get("git_dirty") else ""
        versions.append(f"commit {str(commit)[:12]}{dirty}")
    gpus = known.get("gpus") or []
    devices = sorted({str(gpu.get("name")) for gpu in gpus}) or [str(known.get("cpu", ""))]
    count = f"{len(gpus)} x " if gpus else ""
    found = [("software", ", ".join(versions)), ("device", count + ", ".join(devices))]
    settings = known.get("settings") or {}
    found.append(("settings", " ".join(f"{key}={value}" for key, value in settings.items())))
    return [(name, text) for name, text in found if text]


def throttled(samples: Sequence[Sample]) -> str:
    """In how many cases a device slowed itself down, and why."""
    reasons = [
        {reason for device in (*sample.before, *sample.after) for reason in device.throttle}
        for sample in samples
    ]
    count = sum(map(bool, reasons))
    names = ", ".join(sorted(set().union(*reasons)))
    return f"in {count} of {len(samples)} cases ({names})" if count else ""


def clocks(samples: Sequence[Sample]) -> str:
    """The range of the devices' clocks while cases ran."""
    seen = [
        device.sm_clock_mhz
        for sample in samples
        for device in sample.after
        if device.sm_clock_mhz is not None
    ]
    return f"{min(seen)} – {max(seen)} MHz" if seen else "not recorded"


def _timed(title: str, samples: Sequence[Sample]) -> Table:
    rows = []
    for sample in samples:
        middle, low, high = median_interval(sample.times_s)
        rows.append(
            (
                label(sample.case),
                sample.case.regime,
                format_seconds(middle),
                interval(low, high),
                str(len(sample.times_s)),
                _rate(sample, middle),
                _slowest(sample),
            )
        )
    columns = ("case", "regime", "median", "interval", "times", "rate", "slowest rank")
    return Table(title, columns, tuple(rows), (f"Interval: {INTERVAL}.",), left=2)


def _rate(sample: Sample, time_s: float) -> str:
    op = sample.case.op
    if isinstance(op, Gemm | Attention):
        return format_rate(op.flops / time_s, "FLOP/s")
    if isinstance(op, Elementwise):
        return format_rate(op.bytes / time_s, "B/s")
    if isinstance(op, Step):
        return format_rate(op.workload.tokens / time_s, "token/s")
    return ABSENT


def _slowest(sample: Sample) -> str:
    """The rank with the largest median, and by how much it exceeds the fastest."""
    if len(sample.rank_times_s) < 2:
        return ABSENT
    medians = [median_interval(times)[0] for times in sample.rank_times_s]
    slowest = max(medians)
    return f"{medians.index(slowest)} (+{100 * (slowest / min(medians) - 1):.0f} %)"


def _collectives(samples: Sequence[Sample]) -> Table:
    rows = []
    for sample in samples:
        op = sample.case.op
        if not isinstance(op, Collective):
            continue
        middle, low, high = median_interval(sample.times_s)
        group = f"{op.group_size}" + (f" every {op.group_stride}" if op.group_stride > 1 else "")
        rows.append(
            (
                op.kind,
                op.dtype,
                group,
                format_bytes(op.size_bytes),
                format_seconds(middle),
                interval(low, high),
                format_rate(op.size_bytes / middle, "B/s"),
                format_rate(op.bytes / middle, "B/s"),
                _slowest(sample),
            )
        )
    columns = (
        "collective", "dtype", "group", "size", "median", "interval", "algbw", "busbw",
        "slowest rank",
    )  # fmt: skip
    rows.sort(key=lambda row: (row[0], row[2]))
    legend = (f"Interval: {INTERVAL}.", BUS_LEGEND)
    return Table("Collectives", columns, tuple(rows), legend, left=3)


def failed(samples: Sequence[Sample]) -> list[Table]:
    """Cases without times, and why."""
    rows = tuple((label(s.case), s.status, s.reason) for s in samples if s.status != "ok")
    return [Table("Not measured", ("case", "status", "reason"), rows, left=3)] if rows else []
