"""``meshwise detect``."""

import meshwise
from meshwise.cli.options import Json
from meshwise.cli.output import DONE, emit


def detect(
    *,
    nproc: int | None = None,
    peak: tuple[str, ...] = (),
    out: str = "cluster.toml",
    json: Json = False,
) -> int:
    """Look at this machine: devices, memory, links, datasheet peaks. Writes cluster.toml.

    Parameters
    ----------
    nproc
        Devices of each host to use: all GPUs, or 4 ranks on a CPU, by default.
    peak
        FLOP/s that no datasheet gives, as bf16=990e12; may be repeated.
    out
        The file to write.
    """
    cluster = meshwise.detect(nproc=nproc, peak=peak, out=out)
    from meshwise.pages import tables

    emit(cluster, tables.cluster(cluster), json)
    return DONE
