"""measure import: results of other tools become run directories of our records."""

import hashlib
import importlib.metadata
import logging
from pathlib import Path
from typing import Any

from meshwise import store
from meshwise.probe import importers
from meshwise.spec import Cluster, Device, Tier
from meshwise.verbs import files, job

log = logging.getLogger("meshwise")


def import_files(
    paths: Path | str | tuple[Path | str, ...] | list[Path | str],
    *,
    cluster: Path | str | None = None,
    runs: Path | str = "runs",
) -> list[Path]:
    """One run directory for each file: the text or JSON of nccl-tests, the text of PARAM comms,
    Primus' CSVs, NCCL traces.

    All files are read before the first directory is made. ``cluster``: of the machine that was
    measured; without it, it is made of the devices that the file names. What a file's sizes and
    times mean, and all that is suspicious in it, is logged and stored in the run's provenance.
    """
    several = (paths,) if isinstance(paths, str | Path) else tuple(paths)
    if not several:
        raise ValueError("no file to import; name one or more")
    machine = None if cluster is None else files.take(cluster, Cluster)
    read = [(Path(path), importers.read(path, machine)) for path in several]
    placed = [(path, found, machine or _cluster(found, path)) for path, found in read]
    for path, found, place in placed:
        size = found.world_size or 1
        if size > place.num_devices:
            raise ValueError(
                f"{path.name}: {size} ranks took part, but cluster {place.name!r} has "
                f"{place.num_devices} devices; give the cluster that was measured with --cluster"
            )
    return [_stored(path, found, place, runs) for path, found, place in placed]


def _stored(path: Path, found: importers.Found, cluster: Cluster, runs: Path | str) -> Path:
    run_dir = store.create(
        runs,
        verb="measure",
        slug=f"import-{path.stem}",
        cluster=cluster,
        world_size=found.world_size or 1,
        command=job.command("import_files"),
        provenance=_provenance(path, found),
    )
    for sample in found.samples:
        store.append(run_dir, sample)
    store.finish(run_dir, "complete")
    log.info("%s: %d samples of %s, into %s", path.name, len(found.samples), found.tool, run_dir)
    for warning in found.warnings:
        log.warning("%s: %s", path.name, warning)
    return run_dir


def _provenance(path: Path, found: importers.Found) -> dict[str, Any]:
    """The file's own facts; nothing of this machine, which measured nothing."""
    try:
        version = importlib.metadata.version("meshwise")
    except importlib.metadata.PackageNotFoundError:
        version = None
    return {
        "meshwise": version,
        "nccl": found.facts.get("nccl"),
        "gpus": [{"name": found.device}] * (found.world_size or 1) if found.device else [],
        "imported": {
            "file": path.name,
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
            "tool": found.tool,
            "size_kind": found.size_kind,
            "time_kind": found.time_kind,
            "warnings": list(found.warnings),
            **found.facts,
        },
    }


def _cluster(found: importers.Found, path: Path) -> Cluster:
    """The devices that the file names, with what is known of them by name, and unknown links."""
    from meshwise import machine

    size = found.world_size or 1
    memory_bytes = _memory_bytes(found.device)
    if not found.device or memory_bytes is None:
        what = f"{found.device!r} is not a device known here" if found.device else "names no device"
        raise ValueError(
            f"{path.name}: {what}; give the cluster that was measured with --cluster "
            f"({', '.join(machine.shipped())} are shipped)"
        )
    device = Device(name=found.device, kind="cuda", memory_bytes=memory_bytes)
    per_host, rest = divmod(size, found.num_hosts)
    if rest:
        raise ValueError(f"{path.name}: {found.num_hosts} unequal hosts; give --cluster")
    return Cluster(
        name=f"import-{path.stem}",
        num_hosts=found.num_hosts,
        num_devices_per_host=per_host,
        device=machine.with_peaks(device, None),
        tiers=(Tier(name="unknown", num_devices=size),),
        notes=(f"made of what {path.name} says: links are not known",),
    )


def _memory_bytes(name: str) -> int | None:
    """Of the same device, perhaps by another of its names, in a cluster file that is shipped."""
    import tomllib

    from meshwise import machine

    entry = machine.known_device(name)
    for file in machine.shipped().values():
        device = tomllib.loads(file.read_text())["device"]
        same = entry is not None and device["name"] in entry["names"]
        if same or device["name"] == name:
            return int(device["memory_bytes"])
    return None
