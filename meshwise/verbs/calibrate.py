"""calibrate: samples of measure runs in, prices out (costs.json)."""

import logging
from collections.abc import Sequence
from pathlib import Path

import msgspec

from meshwise import store
from meshwise.prices import TOO_NOISY, name_of
from meshwise.prices.datasheet import attainable
from meshwise.prices.measured import Fitted
from meshwise.spec import Block, Cluster, Collective, Costs, RunInfo, Sample
from meshwise.spec.costs import LawName
from meshwise.spec.label import label
from meshwise.spec.run import changes
from meshwise.verbs import files

log = logging.getLogger("meshwise")


def calibrate(
    run: Path | str | tuple[Path | str, ...] = (),
    *,
    law: LawName | None = None,
    transfer_from: Path | str | tuple[Path | str, ...] = (),
    cluster: Path | str | None = None,
    runs: Path | str = "runs",
    out: Path | str = "costs.json",
) -> Costs:
    """Fit prices to the samples of ``run`` (run directories), by default the newest run of
    ``measure profile`` that has samples. ``law``: use this law for every curve (``prices.laws``)
    instead of the one that predicts best.

    ``transfer_from``: runs of another machine, for what ``run`` lacks, or for a whole ``cluster``
    of which nothing was measured. They are scaled by data sheets (``fit.transfer``).
    """
    from meshwise import fit

    elsewhere = files.several(transfer_from)
    if cluster is not None and (run or not elsewhere):
        fix = "leave it out, RUN says the cluster" if run else "add --transfer-from RUN"
        raise ValueError(f"cluster = {str(cluster)!r}: {fix}")
    loaded = [] if elsewhere and not run else _loaded(_chosen(run, runs))
    costs = fit.calibrate(loaded, law) if loaded else None
    if elsewhere:
        target = costs.cluster if costs else files.take(cluster or "cluster.toml", Cluster)
        others = fit.transfer(_loaded([Path(path) for path in elsewhere]), target, law)
        costs = fit.completed(costs, others) if costs else others
    assert costs is not None
    laws = [(name_of(curve, costs.cluster), curve.law) for curve in costs.curves]
    others_law = [name for name, used in laws if used != law]
    if law is not None and others_law:
        if len(others_law) == len(laws):
            raise ValueError(f"law = {law!r}: cannot be fitted to any curve of these runs")
        log.warning("%s cannot be fitted to %s; these have another law", law, ", ".join(others_law))
    if not (costs.curves or costs.surfaces or costs.factors or costs.slowdowns):
        raise ValueError(
            "these runs hold no sample that prices rest on; name runs of measure profile (or of "
            "gemm, collectives, import) whose samples are ok: meshwise show runs/<id> lists them"
        )
    if lacking := _lacking(loaded):
        log.warning("%s", lacking)
    early = sum(fit.ended_first(one) for _, samples in loaded for one in samples)
    if early:
        log.warning("%d overlaps are in no price: one side ended long before the other", early)
    for doubt in fit.doubts(costs):
        log.warning("%s", doubt)
    prices: list[Fitted] = [*costs.curves, *costs.surfaces, *costs.factors]
    for price in prices:
        if price.held_out.noisy:
            busy = "; ".join(sorted({info.busy for info, _ in loaded} - {""})) or "no other load"
            log.warning("%s: %s (%s)", name_of(price, costs.cluster), TOO_NOISY, busy)
    if costs.cluster.device.kind == "cuda":
        outside = attainable().overhead.num_bytes
        costs = msgspec.structs.replace(costs, memory_overhead_bytes=outside)
    store.write(out, costs)
    log.info("wrote %s", out)
    return costs


def _chosen(run: Path | str | tuple[Path | str, ...], runs: Path | str) -> list[Path]:
    """Return the runs that were named, or the newest profile with samples."""
    if chosen := [Path(path) for path in files.several(run)]:
        return chosen
    imported = store.runs_of(runs, "measure-import")
    if imported and not store.runs_of(runs, "measure-profile"):
        raise ValueError(
            f"no measure profile run under {runs}; for prices of imported logs name their runs: "
            f"meshwise calibrate {runs}/*-measure-import-*"
        )
    newest = store.newest(runs, "measure-profile")
    begun = [path for path in store.runs_of(runs, "measure-profile") if store.load(path)[1]]
    chosen = [begun[-1] if begun else newest]
    files.announce(chosen[0], "the newest run")
    if chosen[0] != newest:
        log.warning("%s is newer but holds no samples", newest)
    return chosen


def _loaded(paths: Sequence[Path]) -> list[tuple[RunInfo, list[Sample]]]:
    """Read runs, each once. Warn of mixed versions and hosts, and of samples that are errors."""
    from meshwise import fit

    found = {info.run_id: (info, samples) for info, samples in map(files.load, paths)}
    if len(found) < len(paths):
        log.warning("a run that is named twice, or a copy of it, counts once")
    loaded = list(found.values())
    versions = [info.versions for info, _ in sorted(loaded, key=lambda of: of[0].started)]
    for mixed in dict.fromkeys(changes(versions[0], later) for later in versions[1:]):
        if mixed:
            log.warning("these runs are of different versions: %s", mixed)
    if beside := fit.unlike([info.cluster for info, _ in loaded])[1]:
        told = "; ".join(beside)
        log.warning("these hosts differ in what no price depends on: %s; the newest's count", told)
    for sample in (sample for _, samples in loaded for sample in samples):
        if sample.status == "error":
            log.warning("refused, an error: %s: %s", label(sample.case), sample.reason)
    return loaded


def _lacking(loaded: Sequence[tuple[RunInfo, Sequence[Sample]]]) -> str:
    """Say what a profile did not measure: collectives between ranks, or blocks; "" if neither."""
    profiles = [info for info, _ in loaded if "-measure-profile-" in info.run_id]
    ops = [one.case.op for _, samples in loaded for one in samples if one.status == "ok"]
    several = any(info.world_size > 1 for info in profiles)
    found = []
    if several and not any(isinstance(op, Collective) for op in ops):
        found.append("no collective was measured: plans over several ranks lack prices")
    if profiles and not any(isinstance(op, Block) for op in ops):
        found.append("no block was measured: layers are added up as they are")
    return "; ".join([*found, "meshwise measure profile --resume goes on"]) if found else ""
