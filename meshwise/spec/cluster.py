"""The cluster: devices, the tiers of links between them, datasheet peaks (cluster.toml)."""

from typing import Literal

from msgspec.structs import replace

from meshwise.spec.op import Lowering
from meshwise.spec.record import Count, NonNegative, Positive, PositiveFloat, Record

SCHEMA_VERSION = 1
MEASURED = "measured"


class Device(Record, kw_only=True):
    """One accelerator, or one CPU rank. An unknown peak is absent, never invented."""

    name: str
    kind: Literal["cuda", "cpu"]
    memory_bytes: Positive
    peak_flops: dict[str, PositiveFloat] = {}
    peak_memory_bytes_per_s: PositiveFloat | None = None
    peak_source: str = ""

    @property
    def lowering(self) -> Lowering:
        """The default lowering of models on this device."""
        return "compiled" if self.kind == "cuda" else "eager"


class Tier(Record, kw_only=True):
    """Links that connect ``num_devices`` neighbouring devices. Tiers are listed innermost first.

    ``bytes_per_s``: the rate of one device in one direction, of the data sheet unless ``source`` is
    "measured"; None if unknown. ``latency_s``: of a message of a few bytes. ``sheet_bytes_per_s``:
    the data sheet's rate, where another was measured.
    """

    name: str
    num_devices: Count
    bytes_per_s: PositiveFloat | None = None
    latency_s: PositiveFloat | None = None
    source: str = ""
    sheet_bytes_per_s: PositiveFloat | None = None

    @property
    def specified_bytes_per_s(self) -> float | None:
        """The data sheet's rate; None if unknown."""
        return self.sheet_bytes_per_s if self.source == MEASURED else self.bytes_per_s


class Cluster(Record, kw_only=True):
    """``num_hosts`` equal hosts of ``num_devices_per_host`` devices; ranks fill host after host."""

    schema_version: Positive = SCHEMA_VERSION
    name: str
    num_hosts: Count
    num_devices_per_host: Count
    device: Device
    tiers: tuple[Tier, ...]
    host_memory_bytes: Positive | None = None
    host_cores: Count | None = None
    notes: tuple[str, ...] = ()
    reserved_bytes: NonNegative = 0  # memory on each device that a program cannot use

    @property
    def specified(self) -> "Cluster":
        """The cluster without what was measured of its links."""
        tiers = [
            replace(tier, bytes_per_s=tier.specified_bytes_per_s, latency_s=None,
                    source="", sheet_bytes_per_s=None)
            for tier in self.tiers
        ]  # fmt: skip
        return replace(self, tiers=tuple(tiers))

    @property
    def num_devices(self) -> int:
        return self.num_hosts * self.num_devices_per_host

    @property
    def usable_bytes(self) -> int:
        """Memory of one device that a program can use."""
        return self.device.memory_bytes - self.reserved_bytes

    @property
    def backend(self) -> str:
        return "nccl" if self.device.kind == "cuda" else "gloo"

    def check(self) -> None:
        if self.usable_bytes <= 0:
            self.fail(
                "reserved_bytes", f"must be below device.memory_bytes, {self.device.memory_bytes}"
            )
        reach = [tier.num_devices for tier in self.tiers]
        if reach != sorted(set(reach)):
            self.fail("tiers", "list tiers from the smallest reach to the largest")
        if len({tier.name for tier in self.tiers}) < len(reach):
            self.fail("tiers", "every tier needs a name of its own")
        if self.num_devices > 1 and (not reach or reach[-1] < self.num_devices):
            of = reach[-1] if reach else 0
            self.fail("tiers", f"reach {of} devices; the last must reach all {self.num_devices}")

    def tier_of(self, group_size: int, group_stride: int) -> Tier:
        """Return the innermost tier that connects ranks 0, stride, 2*stride, ... of a group."""
        span = (group_size - 1) * group_stride + 1
        for tier in self.tiers:
            if span <= tier.num_devices:
                return tier
        raise ValueError(
            f"a group of {group_size} ranks {group_stride} apart spans {span} devices, but cluster "
            f"{self.name!r} has {self.num_devices}; plan for fewer or describe a larger cluster"
        )
