"""Price operations that were never measured, by the data sheet of the cluster.

    product, attention,
    convolution           launch + max(FLOPs / (share * peak), bytes / (share * memory rate))
    elementwise           launch + bytes / (share * memory rate)
    collective            launch + min over protocols of base + steps * hop + bytes / (share * rate)

Peaks and rates are the cluster's. Shares, launches and hops come from ``data/attainable.toml``,
which names a source for each. On H100 and H200 the FLOPs of attention are those that its tiles
spend, and its backward takes the sum of both terms (``waves``). On other devices attention over n
tokens reaches n / (n + half_len) of its share, and sqrt(head_dim / 128) of that if heads are
narrower than 128.

Collectives are rings; all-reduces between hosts may be trees. With n ranks, r of them on each of k
hosts, a ring takes n - 1 steps, k - 1 of them through the network. An all-reduce takes twice as
many. Each of the r ranks on a host sends through its own share of the host's network, so a rank's
``Collective.bytes`` flow at

    rate = min(share * links, r * share * network)

In an all-to-all a rank sends (n - r) / n of its bytes to other hosts, through its own share alone.

Trees are NCCL's hierarchical algorithm, for all-reduces alone. A tree sums over the r ranks of each
host, then over hosts by two binary trees with half of the bytes each, and goes back: 2 (r - 1)
steps inside a host and 2 log2(k) between hosts. Its parts overlap, so that S bytes take

    max(2 (r - 1) / r * S / (share * links), min(2, k / 2) * S / (r * share * network))

Of two hosts each sends S bytes; of many a host sends 2 S, to the one above and the two below it.
"""

import math
from functools import cache, cached_property

import msgspec

from meshwise import files, store
from meshwise.prices.waves import HOPPER, WIDE, work_s
from meshwise.spec import (
    Attention,
    Block,
    Cluster,
    Collective,
    Convolution,
    Costs,
    Elementwise,
    Op,
    Record,
    Shaped,
    Sized,
    Spread,
    Tier,
)
from meshwise.spec.cluster import MEASURED
from meshwise.spec.op import Dtype
from meshwise.spec.record import NonNegative, NonNegativeFloat, PositiveFloat

_FILE = "attainable.toml"


class PeakShare(Record, kw_only=True):
    """The share of a peak that work reaches. ``devices``: shares of devices by name; others reach
    ``share``. Attention of n tokens reaches n / (n + ``half_len``) of it; where its tiles are known
    (``waves``), it is ``tiles`` of the FLOPs that these spend. ``error`` is relative."""

    share: PositiveFloat
    half_len: NonNegativeFloat = 0.0
    tiles: PositiveFloat | None = None
    devices: dict[str, PositiveFloat] = {}
    error: NonNegativeFloat
    source: str

    def on(self, device: str) -> float:
        return self.devices.get(device, self.share)


class HostLink(PeakShare, kw_only=True):
    """The rate of a GPU's link to its host, each way, of which ``share`` is reached; ``devices``
    have their own shares, because their links are of older generations."""

    bytes_per_s: PositiveFloat


class Protocol(Record, kw_only=True):
    """Seconds before the first byte and of each step, and the share of the links' rate reached."""

    name: str
    base_s: PositiveFloat
    link_s: PositiveFloat
    network_s: PositiveFloat
    share: PositiveFloat
    tree: bool = False


class Launch(Record, kw_only=True):
    time_s: PositiveFloat
    source: str


class Together(Record, kw_only=True):
    """Time of a block over the sum of its operations' times."""

    ratio: PositiveFloat
    source: str


class Beside(Record, kw_only=True):
    """Speeds of work and of a data-parallel collective while both run, each over its speed alone.
    ``products`` (attention and convolutions, too) and ``memory``-bound work: beside the collective.
    ``collective``: beside these. ``messages``: of both, if the work is another message; if that
    leaves its host of ``host_ranks`` devices, ``network``.
    ``measured``: of other work, and of the collective, by ``words_beside``."""

    products: PositiveFloat
    memory: PositiveFloat
    messages: PositiveFloat
    collective: PositiveFloat
    source: str
    network: PositiveFloat = 1.0
    host_ranks: NonNegative = 0
    measured: dict[str, tuple[PositiveFloat, PositiveFloat]] = {}

    def speed(self, op: Op, kind: str) -> tuple[float, float]:
        """Return the speeds of an operation and of the collective of a kind that runs beside it."""
        if isinstance(op, Collective):
            leaves = 0 < self.host_ranks <= (op.group_size - 1) * op.group_stride
            return (self.network, self.network) if leaves else (self.messages, self.messages)
        for pair in (kind, words_beside(op, kind)) if self.measured else ():
            if pair in self.measured:
                return self.measured[pair]
        return self.products if isinstance(op, Shaped) else self.memory, self.collective

    @property
    def fastest(self) -> tuple[float, float]:
        """Return the highest speed of work that is no message, and of a collective beside it."""
        usual = (max(self.products, self.memory), self.collective)
        work, collective = zip(usual, *self.measured.values(), strict=True)
        return max(work), max(collective)


def words_beside(op: Op, kind: str) -> str:
    """Return the name of a class of operation beside a kind of collective: ``gemm all_gather``, or
    ``all_gather`` alone for layers, which stand for all classes."""
    return kind if isinstance(op, Block) else f"{type(op).__name__.lower()} {kind}"


class Clocks(Record, kw_only=True):
    """The slowdown of products once the power cap has lowered the clocks.

    ``sustained``: seconds of products in a row for long, over their seconds in a burst, by device;
    1 for others. ``other_power``: the power of other work, of the cap.
    """

    sustained: dict[str, PositiveFloat]
    other_power: PositiveFloat
    source: str

    def stretch(self, device: str, products_s: float, others_s: float) -> float:
        """Return by how much products are slowed down in work of so many seconds, each at full
        clocks. Power falls with the cube of the clock, so that products which take s times as long
        draw 1 / s^3 of w, their power at full clocks over the cap. The mean power is the cap:

            (w / s^3) s products_s + other_power others_s = s products_s + others_s

        Products alone take ``sustained`` times as long, so w = sustained^3.
        """
        power = self.sustained.get(device, 1.0) ** 3
        spare = (1 - self.other_power) * others_s / products_s if products_s else math.inf
        if power <= 1 + spare:
            return 1.0
        s = 1.0
        for _ in range(6):  # Newton, from below: the left side is convex
            s += (power / s**2 - s - spare) / (2 * power / s**3 + 1)
        return s


class Host(Record, kw_only=True):
    """Seconds that the host takes to launch an operation that is not compiled; a compiled layer,
    forward or backward; more for each message in such a layer; and for FSDP2's gather of a layer's
    weights, and reduction of its gradients."""

    launch_s: PositiveFloat
    forward_s: PositiveFloat
    backward_s: PositiveFloat
    message_s: PositiveFloat
    gather_s: PositiveFloat
    reduce_s: PositiveFloat
    source: str


class Overhead(Record, kw_only=True):
    """Memory that is used on a device outside the allocator; and ``reserve``, what torch's
    allocator keeps while there is room, over its peak: low, usual and high."""

    num_bytes: NonNegative
    source: str
    reserve: tuple[PositiveFloat, PositiveFloat, PositiveFloat]
    reserve_source: str


class UsualSpread(Spread, kw_only=True):
    """The spread of ranks of which none was measured."""

    source: str


class UsualFailures(Record, kw_only=True):
    """Seconds between failures of one device with its share of the host, bytes a second that a host
    writes to storage, and seconds from a failure to training again."""

    device_s: PositiveFloat
    host_bytes_per_s: PositiveFloat
    restart_s: PositiveFloat
    source: str


class Attainable(Record, kw_only=True):
    """The content of ``data/attainable.toml``."""

    launch: Launch
    gemm: PeakShare
    convolution: PeakShare
    attention_forward: PeakShare
    attention_backward: PeakShare
    memory: PeakShare
    links: PeakShare
    network: PeakShare
    protocols: tuple[Protocol, ...]
    block: Together
    beside: Beside
    copies: PeakShare
    pcie: HostLink
    clocks: Clocks
    host: Host
    overhead: Overhead
    spread: UsualSpread
    failures: UsualFailures


@cache
def attainable() -> Attainable:
    """Return the figures that come with Meshwise."""
    return store.convert(files.own_data(_FILE), Attainable, _FILE)


class Datasheet:
    """Rooflines of a cluster's operations. A missing field raises a ValueError that names it."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster, self.known = cluster, attainable()

    def time_s(self, op: Op) -> tuple[float, float]:
        """Return the seconds of an operation on one rank, and their relative error."""
        if isinstance(op, Collective):
            return self._collective_s(op)
        if isinstance(op, Elementwise):
            if op.kind in ("h2d", "d2h"):
                if self.cluster.device.kind == "cpu":
                    raise ValueError(f"a data sheet of CPUs has no rate of {op.kind}")
                name, pcie = self.cluster.device.name, self.known.pcie
                rate = pcie.bytes_per_s * pcie.on(name)
                return self.known.launch.time_s + op.read_bytes / rate, pcie.error
            return self.known.launch.time_s + op.bytes / self._memory, self.known.memory.error
        if not isinstance(op, Shaped):
            raise ValueError(f"{type(op).__name__} has no price of its own")
        share = self.known.gemm
        if isinstance(op, Convolution):
            share = self.known.convolution
        if isinstance(op, Attention):
            forward = op.direction == "forward"
            share = self.known.attention_forward if forward else self.known.attention_backward
        peak = self.cluster.device.peak_flops.get(op.dtype)
        if peak is None:
            raise ValueError(self._lacks(f"device.peak_flops of {op.dtype}"))
        name, reached = self.cluster.device.name, 1.0
        if share.tiles and name.startswith(HOPPER):
            time_s = work_s(op, peak * share.tiles, self._memory)
            return self.known.launch.time_s + time_s, share.error
        if isinstance(op, Attention):
            reached = op.q_len / (op.q_len + share.half_len)
            reached *= math.sqrt(min(op.head_dim, WIDE) / WIDE)
        rate = peak * share.on(name) * reached
        return self.known.launch.time_s + max(op.flops / rate, op.bytes / self._memory), share.error

    @cached_property
    def _memory(self) -> float:
        rate, share = self.cluster.device.peak_memory_bytes_per_s, self.known.memory
        if rate is None:
            raise ValueError(self._lacks("device.peak_memory_bytes_per_s"))
        return rate * share.on(self.cluster.device.name)

    def _lacks(self, field: str) -> str:
        return f"cluster {self.cluster.name!r} does not say {field}, so there is no roofline either"

    def _collective_s(self, op: Collective) -> tuple[float, float]:
        if self.cluster.device.kind != "cuda":
            raise ValueError("no data sheet has rates between CPU ranks")
        n, (inside, hosts) = op.group_size, self._hosts(op)
        if hosts == 1:
            tier = self.cluster.tier_of(n, op.group_stride)
            return self._fastest(op, n, 1, self._rate(tier, self.known.links), op.bytes)
        network = self._rate(self.cluster.tier_of(n, op.group_stride), self.known.network)
        if op.kind in ("all_to_all", "all_to_all_v"):
            return self._fastest(op, inside, hosts, network, op.size_bytes * (n - inside) / n)
        rate = inside * network
        if inside > 1:
            links = self.cluster.tier_of(inside, op.group_stride)
            rate = min(rate, self._rate(links, self.known.links))
        return self._fastest(op, inside, hosts, rate, op.bytes)

    def _rate(self, tier: Tier, share: PeakShare) -> float:
        if tier.bytes_per_s is None:
            raise ValueError(self._lacks(f"bytes_per_s of tier {tier.name!r}"))
        if tier.source == MEASURED:  # by messages that all devices sent at once
            return tier.bytes_per_s
        return tier.bytes_per_s * share.on(self.cluster.device.name)

    def _fastest(
        self, op: Collective, inside: int, hosts: int, rate: float, wire_bytes: float
    ) -> tuple[float, float]:
        """Price by the fastest protocol. ``inside``: ranks per host. ``wire_bytes``: of a rank."""
        lines = self._lines(op, inside, hosts)
        error = self.known.links.error if hosts == 1 else self.known.network.error
        time_s = min(wait_s + wire_bytes / (rate * share) for wait_s, share in lines)
        return self.known.launch.time_s + time_s, error

    def _lines(self, op: Collective, inside: int, hosts: int) -> list[tuple[float, float]]:
        """Return seconds before the first byte, and the share of the rate, of each protocol."""
        there_and_back, found = 2 if op.kind == "all_reduce" else 1, []
        late_s = self._late_s(op, inside)
        for of in self.known.protocols:
            if of.tree and (op.kind != "all_reduce" or hosts == 1):
                continue
            crossings = math.log2(hosts) if of.tree else hosts - 1
            steps = inside - 1 if of.tree else op.group_size - hosts
            hops_s = steps * of.link_s + crossings * (of.network_s + late_s)
            share = of.share * self._tree_over_ring(op, inside, hosts) if of.tree else of.share
            found.append((of.base_s + there_and_back * hops_s, share))
        return found

    def _late_s(self, op: Collective, inside: int) -> float:
        """Return what a small message between hosts was measured to take longer than NCCL's figures
        say, which are of InfiniBand; compared with one inside a host, if that was measured, too."""
        far = self.cluster.tier_of(op.group_size, op.group_stride).latency_s
        near = self.cluster.tier_of(inside, op.group_stride).latency_s if inside > 1 else None
        if far is None:
            return 0.0
        quick = min(self.known.protocols, key=lambda of: of.base_s + of.network_s)
        start_s = self.known.launch.time_s + quick.base_s + quick.link_s if near is None else near
        return max(0.0, far - start_s - (quick.network_s - quick.link_s))

    def _tree_over_ring(self, op: Collective, inside: int, hosts: int) -> float:
        """Return the speed of a tree's bytes over that of a ring's; 1 if no rate is known."""
        tiers = [self.cluster.tier_of(n, op.group_stride) for n in (op.group_size, inside)]
        if None in (tier.bytes_per_s for tier in tiers):
            return 1.0
        network = inside * self._rate(tiers[0], self.known.network)
        links = self._rate(tiers[1], self.known.links) if inside > 1 else math.inf
        around, within = (2 * (n - 1) / n for n in (op.group_size, inside))
        return around / min(links, network) / max(within / links, min(2, hosts / 2) / network)

    def lines(self, op: Collective) -> list[tuple[float, float]]:
        """Return what NCCL chooses from: for each algorithm and protocol the seconds before the
        first byte, and its share of the links' rate. Nothing for CPU ranks, which use gloo."""
        if self.cluster.device.kind != "cuda":
            return []
        return self._lines(op, *self._hosts(op))

    def s_per_byte(self, op: Sized) -> tuple[float, float]:
        """Return the seconds that a byte more takes in a large message, and their relative error;
        0 seconds if no rate is known."""
        try:
            (small, _), (large, error) = (self.time_s(of_bytes(op, 2**n)) for n in (40, 41))
        except ValueError:
            return 0.0, 0.0
        return (large - small) / 2**40, error

    def _hosts(self, op: Collective) -> tuple[int, int]:
        """Return how many ranks of a group are on each host, and on how many hosts they are."""
        n, host = op.group_size, self.cluster.num_devices_per_host
        if (n - 1) * op.group_stride < host:
            return n, 1
        inside = min(n, max(1, host // op.group_stride))
        return inside, -(-n // inside)


def of_bytes(op: Sized, num_bytes: int) -> Sized:
    """Return such an operation of so many bytes: nccl-tests' size, or those read and written."""
    if isinstance(op, Elementwise):
        half = num_bytes // 2
        return msgspec.structs.replace(op, read_bytes=half, write_bytes=num_bytes - half)
    kind = "all_to_all" if op.kind == "all_to_all_v" else op.kind
    return msgspec.structs.replace(op, kind=kind, size_bytes=num_bytes, splits=())


def unmeasured(cluster: Cluster) -> Costs:
    """Return the costs of a cluster without measurements, in its 16-bit dtype."""
    dtypes: tuple[Dtype, ...] = ("bf16", "fp16")
    known = [dtype for dtype in dtypes if dtype in cluster.device.peak_flops]
    if not known:
        raise ValueError(
            f"cluster {cluster.name!r} does not say device.peak_flops of bf16 or fp16, so nothing "
            "can be planned without a measurement; give one, or measure: meshwise measure profile"
        )
    return Costs(
        cluster=cluster,
        dtype=known[0],
        lowering=cluster.device.lowering,
        world_size=cluster.num_devices,
        curves=(),
        surfaces=(),
        memory_overhead_bytes=attainable().overhead.num_bytes,
        runs=(),
    )


def on_hosts(cluster: Cluster, num_hosts: int, like: Cluster | None = None) -> Cluster:
    """Return ``num_hosts`` hosts of ``cluster``, linked as in ``like`` or by default as before."""
    if num_hosts < 1:
        raise ValueError(f"hosts = {num_hosts}: must be >= 1")
    host, size = cluster.num_devices_per_host, num_hosts * cluster.num_devices_per_host
    inside = tuple(tier for tier in cluster.tiers if tier.num_devices <= host)
    outside = tuple(tier for tier in (like or cluster).tiers if tier.num_devices > host)
    if num_hosts > 1 and not outside:
        raise ValueError(
            f"hosts = {num_hosts}: cluster {cluster.name!r} says nothing of the links between "
            "hosts; add a tier that reaches them to its [[tiers]] (name, num_devices, "
            "bytes_per_s), or name a cluster that has one, for example --cluster h100-hgx"
        )
    if outside and outside[-1].num_devices < size:
        last = msgspec.structs.replace(outside[-1], num_devices=size)
        outside = (*outside[:-1], last)
    return msgspec.structs.replace(cluster, num_hosts=num_hosts, tiers=(*inside, *outside))
