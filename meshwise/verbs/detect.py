"""detect: look at this machine, write cluster.toml."""

from pathlib import Path

from meshwise.launcher import Job
from meshwise.spec import Cluster
from meshwise.verbs import files


def detect(
    *, nproc: int | None = None, peak: str | tuple[str, ...] = (), out: Path | str = "cluster.toml"
) -> Cluster:
    """Detect the cluster this process would run on; write it to ``out``.

    ``nproc``: devices (on a CPU, ranks) to use on each host; all by default. ``peak``: FLOP/s that
    the datasheet does not give, as ``bf16=990e12``; several are allowed.
    """
    cluster = look(nproc, files.several(peak))
    write(out, cluster)
    return cluster


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
