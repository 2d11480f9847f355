"""The tables of a measure run: its state, what was measured kind by kind, what was not and why."""

import shlex
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np

from meshwise import store
from meshwise.pages import collectives, compute, fsdp, refit, ring, ring_rows
from meshwise.pages.spread import slowest
from meshwise.pages.table import Table, filled, listed
from meshwise.pages.tables import ABSENT, INTERVAL, interval
from meshwise.spec import (
    Block,
    Case,
    Collective,
    Convolution,
    Derived,
    Elementwise,
    Resharding,
    RunInfo,
    Sample,
    Step,
)
from meshwise.spec.label import label
from meshwise.stats import median_interval
from meshwise.units import format_rate, format_seconds


def listing(cases: Sequence[tuple[Case, float]]) -> Table:
    """The cases that ``measure --dry-run`` lists, and about how long each takes."""
    rows = tuple(
        (str(number), label(case), case.regime, format_seconds(about_s))
        for number, (case, about_s) in enumerate(cases, 1)
    )
    all_s = sum(about_s for _, about_s in cases)
    legend = f"{len(cases)} cases, about {format_seconds(all_s)} in all; nothing was measured."
    return Table("Cases, most useful first", ("", "case", "regime", "about"), rows, (legend,), 3)


def document(run_dir: Path, info: RunInfo, samples: Sequence[Sample]) -> dict[str, Any]:
    """A measure run for programs: how it ended, and of every case its median with interval."""
    statuses = [sample.status for sample in samples]
    results: list[dict[str, Any]] = []
    for sample in samples:
        one: dict[str, Any] = {"id": sample.case_id, "case": sample.case, "status": sample.status}
        if sample.times_s:
            one |= _figures(sample)
        results.append(one | {"reason": sample.reason, "metrics": sample.metrics})
    return {
        "run_dir": str(run_dir),
        "status": info.status,
        "reason": info.reason,
        "cases": {status: statuses.count(status) for status in sorted(set(statuses))},
        "results": results,
    }


def _figures(sample: Sample) -> dict[str, float | str]:
    """A sample's figures in SI units. Bandwidths of collectives are of the mean, as
    nccl-tests has them, other rates of the median."""
    op, times_s = sample.case.op, sample.times_s
    middle_s, low_s, high_s = median_interval(times_s)
    mean_s = mean(times_s)
    shown: dict[str, float | str] = {
        "median_s": middle_s,
        "low_s": low_s,
        "high_s": high_s,
        "mean_s": mean_s,
        "p95_s": float(np.quantile(times_s, 0.95)),
        "slowest_rank": slowest(sample),
    }
    if isinstance(op, Collective):
        shown["size_bytes"] = op.size_bytes
        shown["algbw_bytes_per_s"] = op.size_bytes / mean_s
        shown["busbw_bytes_per_s"] = op.bytes / mean_s
    elif isinstance(op, Resharding):
        shown |= refit.figures_of(sample)
    elif not isinstance(op, Step | Block):
        shown["flops_per_s"] = op.flops / middle_s
        shown["bytes_per_s"] = op.bytes / middle_s
    return shown


def run(
    info: RunInfo, samples: Sequence[Sample], *, exact: bool = False, rows: Sequence[Derived] = ()
) -> list[Table]:
    """A measure run: its state, then what it measured, kind by kind, then what failed.

    ``exact`` counts attention's FLOPs by the pairs that its mask leaves; ``rows`` say which of
    FSDP's units the cases are of.
    """
    if "ring" in info.provenance:
        return [state(info, samples), *ring.tables(ring_rows.document(info.run_id, info, samples))]
    done = [sample for sample in samples if sample.status == "ok"]
    tables = [state(info, samples)]
    tables += compute.products(done, info.cluster)
    tables += compute.products(done, info.cluster, Convolution)
    tables += compute.attention(done, exact=exact)
    tables += filled(
        _timed("Memory-bound operations", done, Elementwise),
        _timed("Blocks", done, Block),
        _timed("Steps", done, Step),
    )
    tables += compute.overlaps(done)
    if collectives.are_fsdp_units(info):
        tables += fsdp.tables(rows, samples)
    tables += collectives.tables(done, info)
    tables += refit.tables(done)
    return tables + failed(samples)


def state(info: RunInfo, samples: Sequence[Sample]) -> Table:
    """One line a fact: who measured what, and how it ended."""
    counts = Counter(sample.status for sample in samples)
    outcome = ", ".join(f"{count} {status}" for status, count in counts.most_common())
    slowed = throttled(samples)
    rows = (
        ("status", info.status + (f": {info.reason}" if info.reason else "")),
        ("cases", outcome or "none"),
        ("cluster", f"{info.cluster.name}, {info.world_size} ranks"),
        ("started", info.started + (f", ended {info.ended}" if info.ended else "")),
        ("command", shlex.join(info.command)),
        *facts(info),
        *([("throttled", slowed)] if slowed else []),
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
    if source := known.get("imported"):
        meaning = f"size: {source['size_kind']}; time: {source['time_kind']}"
        found.append(("imported", f"{source['file']} of {source['tool']}; {meaning}"))
        found.append(("suspicious", "; ".join(source["warnings"])))
    return [(name, text) for name, text in found if text]


def imported(run_dirs: Sequence[Path]) -> list[Table]:
    """The samples of each imported file, and what looked suspicious in it."""
    rows, doubts, places = [], [], []
    wrong: list[Sample] = []
    for run_dir in run_dirs:
        info, samples, _ = store.load(run_dir)
        source = info.provenance["imported"]
        rows.append((source["file"], source["tool"], str(len(samples))))
        places.append(f"into {run_dir}")
        doubts += [(source["file"], warning) for warning in source["warnings"]]
        wrong += [sample for sample in samples if sample.status == "error"]
    files = Table("Imported", ("file", "of", "samples"), tuple(rows), tuple(places), left=2)
    suspicious = Table("Suspicious", ("file", "what"), tuple(doubts), left=2)
    return [files, *filled(suspicious), *failed(wrong)]


def throttled(samples: Sequence[Sample]) -> str:
    """Count the cases in which a device slowed itself down, with the reasons."""
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


def _timed(title: str, samples: Sequence[Sample], kind: type) -> Table:
    """A row for each sample of a kind of operation, with its median and the interval."""
    return listed(
        title,
        [(s, *median_interval(s.times_s)) for s in samples if isinstance(s.case.op, kind)],
        ("case", lambda row: label(row[0].case)),
        ("regime", lambda row: row[0].case.regime),
        ("median", lambda row: format_seconds(row[1])),
        ("interval", lambda row: interval(row[2], row[3])),
        ("times", lambda row: str(len(row[0].times_s))),
        ("rate", lambda row: _rate(row[0], row[1])),
        ("slowest rank", lambda row: slowest(row[0])),
        legend=(f"Interval: {INTERVAL}.",),
        left=2,
    )


def _rate(sample: Sample, time_s: float) -> str:
    op = sample.case.op
    if isinstance(op, Elementwise):
        return format_rate(op.bytes / time_s, "B/s")
    if isinstance(op, Step):
        return format_rate(op.workload.tokens / time_s, "token/s")
    return ABSENT


def failed(samples: Sequence[Sample]) -> list[Table]:
    """Cases without times, and why."""
    rows = tuple((label(s.case), s.status, s.reason) for s in samples if s.status != "ok")
    return filled(Table("Not measured", ("case", "status", "reason"), rows, left=3))
