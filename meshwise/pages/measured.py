"""The operations of a health run: on every GPU, by every link, or of all ranks together.

Samples in; out one ``Measured`` an operation, with the times of each GPU or pair and the rate that
the datasheet gives it.
"""

from collections.abc import Iterable
from typing import Literal, NamedTuple

from meshwise.spec import (
    Cluster,
    Collective,
    DeviceState,
    Elementwise,
    Gemm,
    Regime,
    RunInfo,
    Sample,
    Tier,
)
from meshwise.spec.label import label
from meshwise.units import format_bytes, format_rate, format_seconds

Kind = Literal["gpu", "host", "link", "group"]
Key = tuple[int, ...]  # (rank,), (from, to), or () for all ranks together
_KINDS: tuple[Kind, ...] = ("gpu", "host", "link", "group")
_SMALL_BYTES = 2**16  # of smaller messages the time is told, not the rate


class Measured(NamedTuple):
    """One operation: on every GPU, from every rank to others by one tier, or of all together.

    ``spec`` is its rate on the datasheet, ``reach`` the devices among which its links are.
    """

    name: str
    kind: Kind
    op: Gemm | Elementwise | Collective
    spec: float | None
    reach: int
    regime: Regime
    times_s: dict[Key, tuple[float, ...]]
    states: tuple[DeviceState, ...]

    def rate(self, time_s: float) -> float | None:
        """FLOP/s, bytes/s, of a collective busbw; None where the launch is all that counts."""
        op = self.op
        if isinstance(op, Collective) and op.size_bytes < _SMALL_BYTES:
            return None
        if isinstance(op, Elementwise) and op.kind != "copy":
            return op.read_bytes / time_s  # what crosses the host's link, once
        return (op.flops or op.bytes) / time_s

    def show(self, time_s: float) -> str:
        rate = self.rate(time_s)
        return format_seconds(time_s) if rate is None else self.show_rate(rate)

    def show_rate(self, rate: float) -> str:
        return format_rate(rate, "FLOP/s" if isinstance(self.op, Gemm) else "B/s")


def measured(info: RunInfo, samples: Iterable[Sample]) -> list[Measured]:
    """The finished cases of a health run: devices, copies from the host, links, collectives."""
    found: dict[str, Measured] = {}
    for sample in samples:
        one = _measured(info.cluster, sample) if sample.status == "ok" else None
        if one is not None:
            found.setdefault(one.name, one).times_s.update(one.times_s)
    return sorted(found.values(), key=lambda one: _KINDS.index(one.kind))


def _measured(cluster: Cluster, sample: Sample) -> Measured | None:
    op, reach = sample.case.op, 1
    kind: Kind = "gpu"
    times: dict[Key, tuple[float, ...]] = {(r,): t for r, t in enumerate(sample.rank_times_s)}
    if isinstance(op, Gemm):
        name, spec = label(sample.case), cluster.device.peak_flops.get(op.dtype)
    elif isinstance(op, Elementwise):
        name = label(sample.case)
        kind = "host" if op.kind in ("h2d", "d2h") else "gpu"
        spec = cluster.device.peak_memory_bytes_per_s if op.kind == "copy" else None
    elif isinstance(op, Collective):
        kind = "link" if op.kind == "send" and len(op.ranks) == 2 else "group"
        tier = _tier(cluster, op.ranks or range(op.group_size))
        name = f"{op.kind} {format_bytes(op.size_bytes)}"
        name += f" by {tier.name}" if kind == "link" else ""
        times = {op.ranks if kind == "link" else (): sample.times_s}
        spec = tier.bytes_per_s if op.size_bytes >= _SMALL_BYTES else None
        reach = tier.num_devices
    else:
        return None
    return Measured(name, kind, op, spec, reach, sample.case.regime, times, sample.after)


def _tier(cluster: Cluster, ranks: Iterable[int]) -> Tier:
    """The innermost tier that ``ranks`` lie within; tiers reach all devices, so there is one."""
    each = list(ranks)
    inside = (t for t in cluster.tiers if len({r // t.num_devices for r in each}) == 1)
    return next(inside, cluster.tiers[-1])


def device(info: RunInfo) -> str:
    """The word for a rank."""
    return "GPU" if info.cluster.device.kind == "cuda" else "rank"


def where(info: RunInfo, key: Key) -> str:
    return " -> ".join(f"{device(info)} {rank}" for rank in key) or f"all {device(info)}s"
