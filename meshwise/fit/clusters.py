"""Compares the clusters of runs that are to make one costs.json.

Prices depend on the device and its data sheet, the number and size of hosts, and the tiers; those
of CPUs also on the host's cores. They do not depend on memory, on what ``detect`` measured of
links, nor on what a file is called.
"""

import re
from collections.abc import Sequence

import msgspec

from meshwise.files import leaves
from meshwise.spec import Cluster

_WORDS = re.compile(r"name|notes.*|.*source")
_BESIDE = ("host_memory_bytes", "host_cores", "reserved_bytes", "device.memory_bytes")


def unlike(clusters: Sequence[Cluster]) -> tuple[list[str], list[str]]:
    """Return the fields in which clusters differ, each with its values (``host_cores = 64, 32``):
    those that prices depend on, and the others. Names, notes, sources and measured rates are left
    out."""
    rows = [dict(leaves(msgspec.to_builtins(cluster.specified))) for cluster in clusters]
    counts, beside = list[str](), list[str]()
    for field in dict.fromkeys(field for row in rows for field in row):
        values = dict.fromkeys(str(row.get(field, "absent")) for row in rows)
        if len(values) == 1 or _WORDS.fullmatch(field):
            continue
        of_cpus = field == "host_cores" and clusters[0].device.kind == "cpu"
        into = beside if field in _BESIDE and not of_cpus else counts
        into.append(f"{field} = {', '.join(values)}")
    return counts, beside


def refuse_unlike(clusters: Sequence[Cluster]) -> None:
    """Raise a ValueError if clusters differ in what prices depend on."""
    if differing := unlike(clusters)[0]:
        told = "; ".join(differing)
        raise ValueError(f"the runs come from different clusters: {told}; name those of one")
