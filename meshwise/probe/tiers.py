"""Measure the links of a cluster, tier by tier: rate and latency of messages between devices.

In: a ``TiersRequest``. Out: the cluster with measured tiers, in the file that the request names.
All devices send at once, and receive as much: in the innermost tier each to its neighbour, in the
others to the device in the same place of the next group, as of the next host. A time is that of the
slowest rank, so every device reaches the rate.
"""

from collections.abc import Iterator
from functools import partial
from statistics import median

import msgspec

from meshwise import store
from meshwise.probe.sweep import Bench, measure_case
from meshwise.ranks import Ranks
from meshwise.spec import Case, Cluster, Collective, Record, Tier
from meshwise.spec.cluster import MEASURED
from meshwise.units import format_bytes

SMALL_BYTES = 8  # takes the latency
LARGE_BYTES = {  # reach the rate; a smaller one is for a device with little free memory
    "cuda": (2**28, 2**25),
    "cpu": (2**24,),
}
ITERATIONS = 7


class TiersRequest(Record, kw_only=True):
    """The cluster, of a rank on each device, and the file to write. Only rank 0's counts."""

    cluster: Cluster
    out: str


def measure_ranks(ranks: Ranks, request: bytes) -> None:
    """Measure the request. Every rank must call this."""
    asked = msgspec.json.decode(request, type=TiersRequest)
    cluster, bench = asked.cluster, Bench(ranks, iterations=ITERATIONS)
    found = {tier.name: tier for tier in cluster.tiers}
    for tier, size, stride in rings(cluster):
        time_s = partial(_time_s, bench, tier.name, size, stride)
        large = LARGE_BYTES[cluster.device.kind]
        rates = (num_bytes / known for num_bytes in large if (known := time_s(num_bytes)))
        found[tier.name] = msgspec.structs.replace(
            tier,
            latency_s=time_s(SMALL_BYTES),
            bytes_per_s=next(rates, None),
            source=MEASURED,
            sheet_bytes_per_s=tier.bytes_per_s,
        )
    if ranks.rank == 0:
        tiers = tuple(found.values())
        store.write(asked.out, msgspec.structs.replace(cluster, tiers=tiers))


def rings(cluster: Cluster) -> Iterator[tuple[Tier, int, int]]:
    """Yield each tier with the size of the rings whose messages cross it, and how far apart their
    ranks are. A tier whose groups are not whole multiples of those inside it is left out, as is one
    that connects nothing more."""
    inside = 1
    for tier in cluster.tiers:
        size, rest = divmod(tier.num_devices, inside)
        if size > 1 and not rest and cluster.num_devices % tier.num_devices == 0:
            yield tier, size, inside
        inside = tier.num_devices


def _time_s(bench: Bench, tier: str, size: int, stride: int, num_bytes: int) -> float | None:
    """Return the seconds of a message to the next rank of each ring; None if it does not fit."""
    op = Collective(
        kind="send_recv", size_bytes=num_bytes, group_size=size, group_stride=stride, dtype="fp32"
    )
    bench.ranks.at(what := f"messages of {format_bytes(num_bytes)} by {tier}")
    sample = measure_case(bench, Case(op=op, world_size=bench.ranks.world_size)).sample
    if sample.status not in ("ok", "oom"):
        raise ValueError(f"{what}: {sample.reason}")
    return median(sample.times_s) if sample.times_s else None
