"""detect: look at this machine, write cluster.toml."""

import logging
from pathlib import Path

from meshwise import store
from meshwise.spec import Cluster
from meshwise.verbs import files, job

log = logging.getLogger("meshwise")


def detect(
    *, nproc: int | None = None, peak: str | tuple[str, ...] = (), out: Path | str = "cluster.toml"
) -> Cluster:
    """The cluster this process would run on, written to ``out``.

    ``nproc``: devices (on a CPU, ranks) to use of each host; all by default. ``peak``: FLOP/s that
    the datasheet does not give, as ``bf16=990e12``; several are allowed.
    """
    cluster = look(nproc, files.several(peak))
    if job.leads():
        store.write(out, cluster)
        log.info("wrote %s", out)
    return cluster


def look(nproc: int | None = None, peak: tuple[str, ...] = ()) -> Cluster:
    """The same without writing a file."""
    from meshwise.machine import detect_cluster

    return detect_cluster(nproc=nproc, peaks=dict(map(_peak, peak)))


def _peak(text: str) -> tuple[str, float]:
    dtype, _, rate = text.partition("=")
    try:
        return dtype.strip(), float(rate)
    except ValueError:
        raise ValueError(f"peak = {text!r}: write dtype=FLOP/s, as in bf16=990e12") from None
