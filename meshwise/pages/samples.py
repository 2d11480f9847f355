"""The tables of a measure run: its state, its results kind by kind, its failures and reasons."""

import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from meshwise import store
from meshwise.pages import collectives, compute, refit, ring, scaling
from meshwise.pages.spread import Reading, reading, readings
from meshwise.pages.table import Table, filled, listed
from meshwise.pages.tables import INTERVAL, rate_unit
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
from meshwise.units import format_rate, format_seconds


def listing(cases: Sequence[tuple[Case, float]], uses: Mapping[str, str] | None = None) -> Table:
    """List the cases of ``measure --dry-run``, and about how long each takes. ``uses``: what each
    is for, by id."""
    uses = uses or {}
    all_s = format_seconds(sum(about_s for _, about_s in cases))
    return listed(
        "Cases, most useful first",
        [(number, *case) for number, case in enumerate(cases, 1)],
        ("", lambda row: row[0]),
        ("case", lambda row: label(row[1])),
        ("regime", lambda row: row[1].regime),
        *((("for", lambda row: uses[row[1].id]),) if uses else ()),
        ("about", lambda row: row[2], format_seconds),
        legend=(f"{len(cases)} cases, about {all_s} in all; nothing was measured.",),
        left=4 if uses else 3,
    )


def document(run_dir: Path, info: RunInfo, samples: Sequence[Sample]) -> dict[str, Any]:
    """Return a measure run for programs: its status, and each case with median and interval."""
    results = [
        {"id": sample.case_id, "case": sample.case, "status": sample.status}
        | (_figures(read) if (read := reading(sample)) else {})
        | {"reason": sample.reason, "metrics": sample.metrics}
        for sample in samples
    ]
    counts = Counter(sample.status for sample in samples)
    return {
        "run_dir": str(run_dir),
        "status": info.status,
        "reason": info.reason,
        "cases": dict(sorted(counts.items())),
        "results": results,
    }


def _figures(one: Reading) -> dict[str, Any]:
    """Return a sample's figures in SI units."""
    found: dict[str, Any] = {
        name: getattr(one, name) for name in ("median_s", "low_s", "high_s", "mean_s")
    }
    found["p95_s"] = float(np.quantile(one.sample.times_s, 0.95))
    found["slowest_rank"] = one.slowest
    if isinstance(one.op, Collective):
        found["size_bytes"] = one.op.size_bytes
        found |= {"algbw_bytes_per_s": one.algbw, "busbw_bytes_per_s": one.op.bytes / one.mean_s}
    elif isinstance(one.op, Resharding):
        found |= refit.figures_of(one.sample)
    elif not isinstance(one.op, Step | Block):
        found |= {"flops_per_s": one.flops_per_s, "bytes_per_s": one.bytes_per_s}
    return found


def run(
    info: RunInfo, samples: Sequence[Sample], *, exact: bool = False, rows: Sequence[Derived] = ()
) -> list[Table]:
    """Show the state of a measure run, then its results, kind by kind, then its failures.

    ``exact``: count attention's FLOPs only over pairs that its mask keeps. ``rows``: the FSDP units
    that each case stands for.
    """
    if "ring" in info.provenance:
        document = ring.document(info.run_id, info, samples)
        return [state(info, samples), *scaling.of_run(document)]
    done = [sample for sample in samples if sample.status == "ok"]
    titles = {Elementwise: "Memory-bound operations", Block: "Blocks", Step: "Steps"}
    return [
        state(info, samples),
        *compute.products(done, info.cluster),
        *compute.products(done, info.cluster, Convolution),
        *compute.attention(done, exact=exact),
        *filled(*(_timed(title, readings(done, kind)) for kind, title in titles.items())),
        *compute.overlaps(done),
        *(collectives.fsdp_tables(rows, samples) if collectives.are_fsdp_units(info) else []),
        *collectives.tables(done, info),
        *refit.tables(done),
        *failed(samples),
    ]


def state(info: RunInfo, samples: Sequence[Sample]) -> Table:
    """Show the facts of a run, one per row: who measured what, and how it ended."""
    counts = Counter(sample.status for sample in samples)
    outcome = ", ".join(f"{count} {status}" for status, count in counts.most_common())
    slowed = _throttled(samples)
    rows = (
        ("status", info.status + (f": {info.reason}" if info.reason else "")),
        ("cases", outcome or "none"),
        ("cluster", f"{info.cluster.name}, {info.world_size} ranks"),
        ("started", info.started + (f", ended {info.ended}" if info.ended else "")),
        ("command", shlex.join(info.command)),
        *_facts(info),
        *([("throttled", slowed)] if slowed else []),
        *([("busy host", info.busy)] if info.busy else []),
    )
    return Table(info.run_id, ("", ""), rows, left=2)


def software(info: RunInfo) -> str:
    """Return the known versions in a run's provenance, and the commit."""
    known = info.provenance
    names = ("meshwise", "torch", "cuda", "nccl", "driver", "python")
    versions = [f"{name} {known[name]}" for name in names if known.get(name)]
    if commit := known.get("git_commit"):
        dirty = " with local changes" if known.get("git_dirty") else ""
        versions.append(f"commit {str(commit)[:12]}{dirty}")
    return ", ".join(versions)


def _facts(info: RunInfo) -> list[tuple[str, str]]:
    """Return the known versions and devices in a run's provenance."""
    known = info.provenance
    gpus = known.get("gpus") or []
    devices = sorted({str(gpu.get("name")) for gpu in gpus}) or [str(known.get("cpu", ""))]
    settings = (known.get("settings") or {}).items()
    found = {
        "software": software(info),
        "device": (f"{len(gpus)} x " if gpus else "") + ", ".join(devices),
        "settings": " ".join(f"{key}={value}" for key, value in settings),
    }
    if source := known.get("imported"):
        meaning = f"size: {source['size_kind']}; time: {source['time_kind']}"
        found["imported"] = f"{source['file']} of {source['tool']}; {meaning}"
        found["suspicious"] = "; ".join(source["warnings"])
    return [(name, text) for name, text in found.items() if text]


def imported(run_dirs: Sequence[Path]) -> list[Table]:
    """Count the samples of each imported file, and list its suspicious points."""
    loaded = [store.load(run_dir)[:2] for run_dir in run_dirs]
    sources = [(info.provenance["imported"], samples) for info, samples in loaded]
    rows = tuple((told["file"], told["tool"], str(len(samples))) for told, samples in sources)
    doubts = tuple((told["file"], doubt) for told, _ in sources for doubt in told["warnings"])
    places = tuple(f"into {run_dir}" for run_dir in run_dirs)
    wrong = [sample for _, samples in sources for sample in samples if sample.status == "error"]
    return [
        Table("Imported", ("file", "of", "samples"), rows, places, left=2),
        *filled(Table("Suspicious", ("file", "what"), doubts, left=2)),
        *failed(wrong),
    ]


def _throttled(samples: Sequence[Sample]) -> str:
    """Count the cases in which a device throttled, and name the reasons."""
    reasons = [
        {reason for device in (*sample.before, *sample.after) for reason in device.throttle}
        for sample in samples
    ]
    count, names = sum(map(bool, reasons)), ", ".join(sorted(set().union(*reasons)))
    return f"in {count} of {len(samples)} cases ({names})" if count else ""


def clocks(samples: Sequence[Sample]) -> str:
    """Show the range of the devices' clocks after cases."""
    states = (device for sample in samples for device in sample.after)
    seen = [state.sm_clock_mhz for state in states if state.sm_clock_mhz is not None]
    ends = " – ".join(map(str, sorted({min(seen), max(seen)}))) if seen else ""
    return f"{ends} MHz" if seen else "not recorded"


def _timed(title: str, found: Sequence[Reading]) -> Table:
    return listed(
        title,
        found,
        ("case", lambda one: label(one.case)),
        ("regime", "case.regime"),
        ("median", "median_s", format_seconds),
        ("interval", "interval"),
        ("times", "num_times"),
        ("rate", _rate),
        ("slowest rank", "slowest"),
        legend=(f"Interval: {INTERVAL}.",),
        left=2,
    )


def _rate(one: Reading) -> str | None:
    if isinstance(one.op, Elementwise):
        return format_rate(one.bytes_per_s, "B/s")
    if isinstance(one.op, Step):
        return format_rate(one.op.tokens / one.median_s, rate_unit(one.op.model))
    return None


def failed(samples: Sequence[Sample]) -> list[Table]:
    """List cases without times, and why."""
    lost = [sample for sample in samples if sample.status != "ok"]
    case = ("case", lambda sample: label(sample.case))
    return filled(
        listed("Not measured", lost, case, ("status", "status"), ("reason", "reason"), left=3)
    )
