"""detect: look at this machine, or at all hosts of a launcher's ranks; write cluster.toml."""

import socket
import tempfile
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from meshwise.launcher import Job
from meshwise.patience import Patience, parsed
from meshwise.spec import Cluster
from meshwise.verbs import files


def detect(
    *,
    nproc: int | None = None,
    peak: str | tuple[str, ...] = (),
    out: Path | str = "cluster.toml",
    measure: bool | None = None,
    timeout: str | float | None = None,
    setup_timeout: str | float | None = None,
) -> Cluster:
    """Detect the cluster this process would run on; write it to ``out``. Several hosts must be
    equal; a ValueError names those that are not.

    ``nproc``: devices (on a CPU, ranks) to use on each host; all by default. ``peak``: FLOP/s that
    the datasheet does not give, as ``bf16=990e12``; several are allowed. ``measure``: measure rate
    and latency of the links, by a rank on each device; by default if a launcher started ranks. Only
    rank 0 returns and writes what they measure. ``timeout`` and ``setup_timeout``: how long ranks
    wait for each other, as for ``measure``.
    """
    cluster, job = look(nproc, files.several(peak)), Job.here()
    waits = parsed(timeout, setup_timeout)
    if cluster.num_hosts > 1:
        from meshwise import ranks

        joined = ranks.join(waits.timeout_s, setup_s=waits.setup_s)
        told = joined.gather((socket.gethostname(), _facts(cluster)))
        joined.leave()
        refuse_unlike(told)
    if job.launched if measure is None else measure:
        cluster = _measured(cluster, waits)
    write(out, cluster)
    return cluster


def _measured(cluster: Cluster, patience: Patience) -> Cluster:
    """Return the cluster with its links measured; on ranks other than the first, as it was."""
    if cluster.num_devices == 1:
        return cluster
    from meshwise import launch, store
    from meshwise.probe.tiers import TiersRequest

    target, leads = "meshwise.probe.tiers:measure_ranks", Job.here().leads
    with tempfile.TemporaryDirectory() as folder:
        request = TiersRequest(cluster=cluster, out=f"{folder}/cluster.json")
        launch.run(target, request, nproc=cluster.num_devices, patience=patience)
        return store.read(request.out, Cluster) if leads else cluster


def _facts(cluster: Cluster) -> str:
    """Say what a host has, as far as hosts must be equal."""
    device, (*inside, _) = cluster.device, cluster.tiers
    links = ", ".join(f"{tier.name} of {tier.num_devices}" for tier in inside)
    gib = device.memory_bytes / 2**30
    memory = f" of {gib:.0f} GiB" if device.kind == "cuda" else ""
    return f"{cluster.num_devices_per_host} x {device.name}{memory}, {links or 'no links'}"


def refuse_unlike(told: Iterable[tuple[str, str]]) -> None:
    """Raise a ValueError that names the hosts which are unlike most. ``told``: of every rank, its
    host's name and what that has."""
    alike = defaultdict[str, dict[str, None]](dict)
    for host, facts in told:
        alike[facts][host] = None
    usual, *odd = sorted(alike, key=lambda facts: -len(alike[facts]))
    if odd:
        raise ValueError(
            f"{', '.join(alike[odd[0]])}: {odd[0]}; but {', '.join(alike[usual])}: {usual}; plans "
            "are for equal hosts, so leave the odd ones out"
        )


def write(out: Path | str, cluster: Cluster) -> None:
    if Job.here().leads:
        files.replace(out, cluster)


def look(
    nproc: int | None = None, peak: tuple[str, ...] = (), *, at_least: int | None = None
) -> Cluster:
    """Detect without writing a file; ``at_least``: see ``machine.detect_cluster``."""
    from meshwise.machine import detect_cluster

    return detect_cluster(nproc=nproc, peaks=dict(map(_peak, peak)), at_least=at_least)


def _peak(text: str) -> tuple[str, float]:
    dtype, _, rate = text.partition("=")
    try:
        return dtype.strip(), float(rate)
    except ValueError:
        raise ValueError(f"peak = {text!r}: write dtype=FLOP/s, as in bf16=990e12") from None
