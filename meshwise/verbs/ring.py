"""measure ring: attention of long sequences over rings of ranks; time, scaling and a check.

One job of ranks measures all lengths and ring sizes into one run directory; in mode ``all`` there
is a job for each ring size. ``output_dir`` gets the results as the source's JSON, with a copy
``latest.json``.
"""

import json
import logging
import os
import re
import time
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from meshwise.files import parse_json, read_bytes, write_whole
from meshwise.launch import scratch
from meshwise.launcher import Job
from meshwise.options import keywords
from meshwise.options.ring import RingOptions
from meshwise.pages import ring as page
from meshwise.patience import Patience
from meshwise.prices import Prices
from meshwise.probe.cases import ring as cases
from meshwise.spec import Cluster, Costs, Sample
from meshwise.spec.label import label
from meshwise.verbs import files, measure, world
from meshwise.verbs.recording import Recording

if TYPE_CHECKING:
    from meshwise.probe.ring import RingRequest

log = logging.getLogger("meshwise")

OUTPUT_DIR = "benchmark_results/ring_v2_collective"
MOST_TOKENS = 1024  # limit of a check, as its oracle holds every pair of tokens


class Asked(NamedTuple):
    """The rows to measure, and the machine."""

    options: RingOptions
    chosen: cases.RingSettings
    machine: Cluster
    world_size: int
    costs: Costs | None

    @property
    def rows(self) -> list[cases.RingSweep]:
        return cases.rows(self.chosen, self.world_size, self.machine.device.kind)

    @property
    def prices(self) -> Prices | None:
        return None if self.costs is None else Prices(self.costs)


class Measured(NamedTuple):
    """``document``: the JSON. With ``no_save``, ``run_dir`` is None; ``files`` has traces only."""

    document: dict[str, Any]
    run_dir: Path | None
    files: tuple[Path, ...]


@keywords(RingOptions)
def asked(ring: RingOptions) -> Asked:
    """Complete the options with the environment's and the machine's."""
    machine, size = measure.place(ring.cluster, ring.nproc, keep=not ring.dry_run)
    if ring.mode == "large" and ring.nproc is None and not Job.here().launched:
        size = min(size, cases.LARGE_RANKS)
    chosen = cases.settings(ring.settings(), os.environ, ring.mode, machine.device.kind)
    prices = None if ring.costs is None else files.take(ring.costs, Costs)
    return Asked(ring, chosen, machine, size, prices)


def measure_ring(what: Asked) -> Measured:
    """Measure every row. With ``profile`` each rank writes a Chrome trace of the first row to
    ``output_dir`` (default: OUTPUT_DIR, else benchmark_results/ring_v2_collective)."""
    ring, save, job = what.options, not what.options.no_save, Job.here()
    world.check_machine(what.machine, what.world_size)
    if job.launched and what.chosen.own_world:
        raise ValueError("mode = 'all': starts jobs of its own; leave it out under a launcher")
    folder = Path(ring.output_dir or os.environ.get("OUTPUT_DIR") or OUTPUT_DIR)
    trace = str(folder / f"trace_{time.strftime('%Y%m%d_%H%M%S')}") if ring.profile else ""
    if ring.profile or (save and job.leads):
        files.check_writable([folder], "output_dir")
    with scratch.folder() as unsaved:
        recording = Recording.begin(
            ring.runs if save else unsaved, "measure", f"ring-{what.machine.name}", what.machine,
            what.world_size, ring=msgspec.to_builtins(what.chosen),
        )  # fmt: skip
        try:
            _measure_all(what, recording, trace)
        finally:
            found, written = _document(recording), list[Path]()
            if save and found["results"]:
                written = _write(folder, found)
    traces = sorted(folder.glob(f"{Path(trace).name}_rank*.json")) if trace else []
    return Measured(found, recording.path if save else None, (*written, *traces))


def forecast(what: Asked) -> list[dict[str, Any]]:
    """List the rows that would be measured, without torch: the way of exchange, the bytes moved."""
    prices, found = what.prices, []
    for row in what.rows:
        op, size = _op(row), row.case.world_size
        one: dict[str, Any] = {
            "seq_length": op.seq_len, "ring_size": size, "world_size": row.world_size,
            "status": "skipped" if row.reason else "planned", "reason": row.reason,
        }  # fmt: skip
        if not row.reason:
            figures, strategy = cases.known(op, size, prices)
            one |= {
                "strategy": strategy,
                "flops_per_rank": op.flops / size,
                **{
                    name: int(max(figures[name])) for name in ("planned_bytes", "owner_bound_bytes")
                },
                "case": row.case,
            }
        found.append(one)
    return found


def verify_ring(what: Asked) -> tuple[list[dict[str, Any]], list[str]]:
    """Check every ring size that the ranks can form; return the checks and notes on them. CPUs use
    float64. Long sequences are scaled down, since the oracle holds every pair of tokens."""
    from meshwise import launch
    from meshwise.probe.ring_verify import VerifyRequest

    sizes, unfit = _formed(what)
    world.check_machine(what.machine, what.world_size)
    small, factor = cases.scaled(what.chosen, MOST_TOKENS)
    (seq_len,) = small.seq_lengths
    op = small.op(seq_len)
    if what.machine.device.kind == "cpu":
        op = msgspec.structs.replace(op, dtype="fp64")
    notes = [f"{seq_len} tokens, batch {op.batch}, {op.dtype}."]
    if factor > 1:
        notes.append(f"Lengths are 1/{factor} of what was asked: the oracle holds all pairs.")
    notes += [f"Not checked: {reason}." for reason in unfit]
    with scratch.folder() as folder:
        request = VerifyRequest(
            op=op, ring_sizes=sizes,
            file=str(folder / "checks.json"), kernel=what.rows[0].case.backend,
            costs=what.costs,
        )  # fmt: skip
        launch.run(
            "meshwise.probe.ring_verify:verify_ranks", request,
            nproc=what.world_size, patience=what.options.patience,
        )  # fmt: skip
        leads = Job.here().leads
        return parse_json(read_bytes(request.file), "the checks") if leads else [], notes


def _formed(what: Asked) -> tuple[tuple[int, ...], list[str]]:
    """Return the ring sizes that the ranks can form, and why they cannot form the others."""
    sizes = sorted(set(what.chosen.ring_sizes))
    why = {size: cases.unfit(size, what.world_size, what.world_size) for size in sizes}
    unfit = [reason for reason in why.values() if reason]
    if len(unfit) == len(sizes):
        raise ValueError(
            f"ring_sizes = {what.chosen.ring_sizes}: nothing to check, {', '.join(unfit)}"
        )
    return tuple(size for size in sizes if not why[size]), unfit


def _op(row: cases.RingSweep) -> Any:
    return row.case.op


def _measure_all(what: Asked, recording: Recording, trace: str) -> None:
    """Record the rows that cannot be measured, then start one job for each world size."""
    rows, prices = what.rows, what.prices
    for row in rows:
        if row.reason:
            _fail(recording, row, "skipped", row.reason)
    todo = sorted((row for row in rows if not row.reason), key=lambda row: row.world_size)
    with recording.watched(f"what was measured is in {recording.path}"):
        for world_size, group in groupby(todo, key=lambda row: row.world_size):
            log.info("rings in a world of %d, into %s", world_size, recording.path)
            for request in _requests(list(group), what, prices, recording, trace):
                _launch(request, world_size, recording, what.options.patience)
    recording.finish()


def _requests(
    rows: Sequence[cases.RingSweep],
    what: Asked,
    prices: Prices | None,
    recording: Recording,
    trace: str,
) -> Iterator["RingRequest"]:
    """Yield requests until no row is left. If we start the ranks and a job dies, the next request
    has the rows after the one it died in."""
    from meshwise.probe.ring import RingRequest

    job = recording.job
    known = {
        row.case.id: cases.known(_op(row), row.case.world_size, prices) if job.leads else ({}, "")
        for row in rows
    }
    while True:
        done = recording.samples()
        left = [row for row in rows if row.case.id not in done]
        if not left:
            return
        yield RingRequest(
            cases=tuple(row.case for row in left),
            known=tuple(known[row.case.id] for row in left),
            run_dir=str(recording.path),
            warmup=what.chosen.warmup_runs,
            iterations=what.chosen.benchmark_runs,
            costs=what.costs,
            trace="" if any(sample.status == "ok" for sample in done.values()) else trace,
        )
        if job.launched:
            return


def _launch(
    request: "RingRequest", world_size: int, recording: Recording, patience: Patience
) -> None:
    """Run one job. If it dies, record the row it died in as an error, unless it is recorded."""
    from meshwise import launch
    from meshwise.probe.request import CURRENT

    before = recording.samples()
    try:
        launch.run(
            "meshwise.probe.ring:measure_ranks", request, nproc=world_size, patience=patience
        )
    except launch.RanksFailed as failed:
        after = recording.samples()
        (recording.path / CURRENT).unlink(missing_ok=True)
        new = [sample for case_id, sample in after.items() if case_id not in before]
        left = [case for case in request.cases if case.id not in after]
        if left and not (new and _ended_job(new[-1], failed)):
            row = cases.RingSweep(left.pop(0), world_size, "")
            _fail(recording, row, "hung" if failed.hung else "error", str(failed))
        if recording.job.launched:
            raise
        then = "the ranks are started again for other cases" if left else "no case is left"
        log.warning("%s; %s", failed, then)


def _fail(recording: Recording, row: cases.RingSweep, status: Any, reason: str) -> None:
    recording.append_failed(row.case, status, reason, world_size=float(row.world_size))


def _ended_job(last: Sample, failed: Exception) -> bool:
    """Whether this row already records why the job died."""
    named = re.search(re.escape(label(last.case)) + r"(?!\d)", str(failed))
    return last.status in ("oom", "error") and named is not None


def _document(recording: Recording) -> dict[str, Any]:
    if not recording.leads:
        return {"results": []}
    info, samples = files.load(recording.path)
    found = page.document(str(recording.path), info, samples)
    found["results"].sort(key=lambda row: (row["seq_length"], row["ring_size"]))
    return found


def _write(folder: Path, found: dict[str, Any]) -> list[Path]:
    """Write the JSON and its copy latest.json."""
    text = json.dumps(found, indent=1, allow_nan=False) + "\n"
    paths = [folder / page.file_name(found), folder / "latest.json"]
    return [write_whole(path, text) for path in paths]
