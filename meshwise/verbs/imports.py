"""measure import: turn results of other tools into run directories of our records."""

import hashlib
import importlib.metadata
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from meshwise import store
from meshwise.files import parse_toml, read_bytes
from meshwise.probe import importers
from meshwise.spec import Cluster, Device, Tier, ending
from meshwise.verbs import files, recording

log = logging.getLogger("meshwise")


def import_files(
    paths: Path | str | tuple[Path | str, ...] | list[Path | str],
    *,
    cluster: Path | str | None = None,
    runs: Path | str = "runs",
) -> list[Path]:
    """Make one run directory for each file: the text or JSON of nccl-tests, the text of PARAM
    comms, Primus' CSVs, NCCL traces.

    All files are read before the first directory is made. Readable files are stored and logged; one
    ValueError at the end names the others. ``cluster``: the measured machine, by default made from
    the devices that the file names. Anything suspicious is logged. The run's provenance keeps it,
    and what the file's sizes and times mean.
    """
    several = (paths,) if isinstance(paths, str | Path) else tuple(paths)
    if not several:
        raise ValueError("no file to import; name one or more")
    machine = None if cluster is None else files.take(cluster, Cluster)
    good, refused = [], {}
    for given in several:
        try:
            good.append((given, *_read(Path(given), machine)))
        except ValueError as error:
            refused[str(given)] = str(error)
    run_dirs = [
        _stored(Path(given), found, place, runs, _command(given, several))
        for given, found, place in good
    ]
    if refused:
        raise ValueError(_refusal(refused, len(run_dirs)))
    return run_dirs


def _read(path: Path, machine: Cluster | None) -> tuple[importers.Found, Cluster]:
    """Read a file's contents, and the cluster it was measured on."""
    found = importers.read(path, machine)
    place = machine or _cluster(found, path)
    size = found.world_size or 1
    if size > place.num_devices:
        raise ValueError(
            f"{path.name}: {size} ranks took part, but cluster {place.name!r} has "
            f"{place.num_devices} devices; give the cluster that was measured with --cluster"
        )
    return found._replace(warnings=(*found.warnings, *_other_devices(found.device, place))), place


def _other_devices(name: str, cluster: Cluster) -> Iterator[str]:
    """Warn of a log whose devices have another peak than the cluster's, by their data sheets."""
    from meshwise.machine import known_device

    logged, described = known_device(name), known_device(cluster.device.name)
    if logged and described and logged["peak_flops"] != described["peak_flops"]:
        yield (
            f"was measured on {name}, and cluster {cluster.name!r} has {cluster.device.name}; "
            "prices for another machine: calibrate --transfer-from"
        )


def _refusal(refused: dict[str, str], num_stored: int) -> str:
    """Return all reasons in one line; files refused for the same reason are listed together."""
    if len(refused) == 1 and not num_stored:
        (path, reason), *_ = refused.items()
        return reason if Path(path).name in reason else f"{path}: {reason}"
    by_reason: dict[str, list[str]] = {}
    for path, reason in refused.items():
        plain = reason.removeprefix(f"{Path(path).name}: ").removeprefix(f"{path} ")
        by_reason.setdefault(plain, []).append(path)
    told = "; ".join(f"{', '.join(paths)}: {reason}" for reason, paths in by_reason.items())
    rest = f"the other {num_stored} are stored" if num_stored else "nothing is stored"
    return f"{len(refused)} of {len(refused) + num_stored} files refused, {rest}: {told}"


def _command(given: Path | str, several: tuple[Path | str, ...]) -> tuple[str, ...]:
    """Return the words that the user typed, without the other files."""
    typed = recording.command("import_files")
    others = {str(path) for path in several} - {str(given)}
    return (*typed[:3], *(word for word in typed[3:] if word not in others))


def _stored(
    path: Path, found: importers.Found, cluster: Cluster, runs: Path | str, command: tuple[str, ...]
) -> Path:
    run_dir = store.create(
        runs,
        verb="measure",
        slug=f"import-{path.stem}",
        cluster=cluster,
        world_size=found.world_size or 1,
        command=command,
        provenance=_provenance(path, found),
    )
    for sample in found.samples:
        store.append(run_dir, sample)
    store.finish(run_dir, *ending(found.samples))
    log.info("%s: %d samples of %s, into %s", path.name, len(found.samples), found.tool, run_dir)
    for warning in found.warnings:
        log.warning("%s: %s", path.name, warning)
    return run_dir


def _provenance(path: Path, found: importers.Found) -> dict[str, Any]:
    """Return the file's facts. This machine measured nothing, so its own facts are left out."""
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
            "sha256": hashlib.sha256(read_bytes(path, at_most=importers.MOST_BYTES)).hexdigest(),
            "tool": found.tool,
            "size_kind": found.size_kind,
            "time_kind": found.time_kind,
            "warnings": list(found.warnings),
            **found.facts,
        },
    }


def _cluster(found: importers.Found, path: Path) -> Cluster:
    """Make a cluster from the devices that the file names, with their known data and unknown links.
    A trace has no times, so its device does not matter: take one host of unknown devices."""
    from meshwise import machine

    size, num_hosts = found.world_size or 1, found.num_hosts
    device = Device(name="unknown", kind="cuda", memory_bytes=1)
    note = (
        f"{path.name} says how many ranks there were: hosts, devices and memory (1 byte here) are "
        "not known"
    )
    if found.device or any(sample.status != "skipped" for sample in found.samples):
        memory_bytes = _memory_bytes(found.device)
        if not found.device or memory_bytes is None:
            what = f"{found.device!r} is not a device known here"
            raise ValueError(
                f"{path.name}: {what if found.device else 'names no device'}; give the cluster "
                f"that was measured with --cluster ({', '.join(machine.shipped())} are shipped)"
            )
        device = Device(name=found.device, kind="cuda", memory_bytes=memory_bytes)
        device = machine.with_peaks(device, None)
        note = f"made of what {path.name} says: links are not known"
        if size % num_hosts:
            raise ValueError(f"{path.name}: {num_hosts} unequal hosts; give --cluster")
    else:
        num_hosts = 1
    return Cluster(
        name=f"import-{path.stem}",
        num_hosts=num_hosts,
        num_devices_per_host=size // num_hosts,
        device=device,
        tiers=(Tier(name="unknown", num_devices=size),),
        notes=(note,),
    )


def _memory_bytes(name: str) -> int | None:
    """Return a device's memory from the shipped cluster files, by any of its names."""
    from meshwise import machine

    entry = machine.known_device(name)
    for known, file in machine.shipped().items():
        device = parse_toml(file.read_bytes(), known)["device"]
        same = entry is not None and device["name"] in entry["names"]
        if same or device["name"] == name:
            return int(device["memory_bytes"])
    return None
