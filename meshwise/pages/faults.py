"""Find faults of a machine and their places. In: a health run. Out: findings.

A GPU or a link is slow if all quarters of its times exceed those of its peers by more than a
limit. The limit is the larger of six robust sigma of the peers' quarters (``pages.outliers``) and
a floor:

    8 %   products and copies in memory: chips of one host differ by 5 % (by chance, sigma 2 %)
    15 %  messages between pairs, and the two directions of one pair: healthy pairs of H200 reach
          366 to 394 GB/s, a pair that goes through the host 20 to 50
    60 %  copies from and to the host: far sockets are slower, half the lanes take twice as long
A case is worse than a baseline if it takes 3 % more time (pairs: 8 %), or more if noise is larger.
The limit is 25 % below 50 us, where launches differ between processes, and for copies from and to
the host, whose pinned memory may be on either socket. No device reaches the full specification, see
``_LEAST``. A GPU at its power cap works as intended; any other reason to lower its clock is a
fault. CPU ranks share cores and memory: there are no links to judge, and worse means 2 x the time.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from meshwise.pages import outliers
from meshwise.pages.outliers import Slow
from meshwise.pages.table import grouped
from meshwise.spec import (
    Cluster,
    Collective,
    DeviceState,
    Elementwise,
    Gemm,
    Regime,
    RunInfo,
    Sample,
)
from meshwise.spec.label import label
from meshwise.spec.run import FAILED
from meshwise.units import format_bytes, format_rate, format_seconds

Kind = Literal["gpu", "host", "link", "group"]
Key = tuple[int, ...]  # (rank,), (from, to), or () for all ranks together
_SMALL_BYTES = 2**16  # smaller messages are shown as times, not rates
_FLOOR: dict[Kind, float] = {"gpu": 0.08, "host": 0.60, "link": 0.15}
# Shares of the specification below which a rate is a fault. Sustained products reach 0.5 to 0.8,
# copies 0.85, links through a switch 0.7 to 0.9 (in a mesh of n GPUs a pair has only 1/(n-1) of a
# GPU's links), collectives on PCIe half.
_LEAST: dict[Kind, float] = {"gpu": 0.4, "link": 0.5, "group": 0.33}
_PAST_FLOOR: dict[Kind, float] = {"gpu": 0.03, "host": 0.25, "link": 0.08, "group": 0.03}
_LAUNCH_PAST_FLOOR, _CPU_PAST_FLOOR = 0.25, 1.0
_LAUNCH_S = 50e-6
_MOST_NAMES = 3


class HealthCase(NamedTuple):
    """One operation: on every GPU, between pairs of ranks over one tier, or of all ranks together.

    ``spec``: its rate on the datasheet. ``reach``: number of devices that its links connect.
    """

    name: str
    kind: Kind
    op: Gemm | Elementwise | Collective
    spec: float | None
    reach: int
    regime: Regime
    times_s: dict[Key, tuple[float, ...]]
    states: tuple[DeviceState, ...]

    @property
    def medians_s(self) -> dict[Key, float]:
        return {key: median(series) for key, series in self.times_s.items()}

    def rate(self, time_s: float) -> float | None:
        """Return FLOP/s, bytes/s, or a collective's busbw; None if only the launch counts."""
        op = self.op
        if isinstance(op, Collective) and op.size_bytes < _SMALL_BYTES:
            return None
        if isinstance(op, Elementwise) and op.kind != "copy":
            return op.read_bytes / time_s  # bytes over the host's link, once
        return (op.flops or op.bytes) / time_s

    def show(self, time_s: float) -> str:
        rate = self.rate(time_s)
        return format_seconds(time_s) if rate is None else self.show_rate(rate)

    def show_rate(self, rate: float) -> str:
        return format_rate(rate, "FLOP/s" if isinstance(self.op, Gemm) else "B/s")


def measured(info: RunInfo, samples: Iterable[Sample]) -> list[HealthCase]:
    """Return the finished cases of a health run: devices, copies from the host, links, groups."""
    found: dict[str, HealthCase] = {}
    for sample in samples:
        if sample.status == "ok" and (one := _measured(info.cluster, sample)):
            found.setdefault(one.name, one).times_s.update(one.times_s)
    return sorted(found.values(), key=lambda one: get_args(Kind).index(one.kind))


def _measured(cluster: Cluster, sample: Sample) -> HealthCase | None:
    op, reach = sample.case.op, 1
    kind: Kind = "gpu"
    name, spec = label(sample.case), None
    times: dict[Key, tuple[float, ...]] = {(r,): t for r, t in enumerate(sample.rank_times_s)}
    if isinstance(op, Gemm):
        spec = cluster.device.peak_flops.get(op.dtype)
    elif isinstance(op, Elementwise):
        kind = "host" if op.kind in ("h2d", "d2h") else "gpu"
        spec = cluster.device.peak_memory_bytes_per_s if op.kind == "copy" else None
    elif isinstance(op, Collective):
        kind = "link" if op.kind == "send" and len(op.ranks) == 2 else "group"
        ranks = op.ranks or range(op.group_size)
        # the innermost tier that holds all ranks; the last tier reaches all devices
        inside = (t for t in cluster.tiers if len({r // t.num_devices for r in ranks}) == 1)
        tier = next(inside, cluster.tiers[-1])
        name = f"{op.kind} {format_bytes(op.size_bytes)}"
        name += f" by {tier.name}" if kind == "link" else ""
        times = {op.ranks if kind == "link" else (): sample.times_s}
        spec = tier.specified_bytes_per_s if op.size_bytes >= _SMALL_BYTES else None
        reach = tier.num_devices
    else:
        return None
    return HealthCase(name, kind, op, spec, reach, sample.case.regime, times, sample.after)


def device(info: RunInfo) -> str:
    """Return the word for a rank."""
    return "GPU" if info.cluster.device.kind == "cuda" else "rank"


def where(info: RunInfo, key: Key) -> str:
    return " -> ".join(f"{device(info)} {rank}" for rank in key) or f"all {device(info)}s"


class HealthFinding(NamedTuple):
    """``where``: "GPU 2", "GPU 0 -> GPU 3", "GPU 0 <-> GPU 3". ``evidence``: numbers with units."""

    what: Literal[
        "slow gpu", "slow link", "asymmetric pair", "throttling", "below specification",
        "worse than baseline", "busbw above link", "wrong result", "failed", "incomplete",
    ]  # fmt: skip
    where: str
    evidence: str
    severity: Literal["fault", "note"] = "fault"


def verdict(found: Iterable[HealthFinding]) -> str:
    """Count faults, not notes: ``healthy``, ``1 fault``, ``2 faults``."""
    count = sum(finding.severity == "fault" for finding in found)
    return f"{count} fault{'s' if count > 1 else ''}" if count else "healthy"


def findings(
    info: RunInfo, samples: Sequence[Sample], baseline: Sequence[Sample] | None = None
) -> list[HealthFinding]:
    """Return the findings, faults first. ``baseline``: the samples of one or several earlier runs.

    Raises a ValueError if the baseline shares no case with this run.
    """
    on_gpus = info.cluster.device.kind == "cuda"
    ours = [one for one in measured(info, samples) if on_gpus or one.kind == "gpu"]
    found = [*_failed(info, samples), *_throttling(info, samples)]
    accused: set[tuple[Kind, Key]] = set()
    for one in ours:
        if one.kind in _FLOOR:
            alike = one.kind != "host"  # there are near and far sockets
            slow = outliers.than_peers(one.times_s, _FLOOR[one.kind], alike=alike)
            found += (_links if one.kind == "link" else _devices)(info, one, slow)
            # with more than two, the peers have shown which is slow: report it once
            accused |= {(one.kind, key) for key in slow if len(one.times_s) > 2}
    past = [measured(info, run) for run in runs(samples, baseline)] if baseline else []
    for one in ours:
        unnamed = {k: t for k, t in one.times_s.items() if (one.kind, k) not in accused}
        more = [*_below(info, one, unnamed), *_worse(info, one, unnamed, past)]
        if one.kind == "group" and any(finding.severity == "fault" for finding in found):
            more = [finding._replace(severity="note") for finding in more]  # a consequence
        found += more + _above(info, one)
    # one row per fault, with all of its evidence
    same = grouped(found, lambda each: (each.what, each.where, each.severity)).values()
    joined = [each[0]._replace(evidence="; ".join(f.evidence for f in each)) for each in same]
    return sorted(joined, key=lambda finding: finding.severity)


def _failed(info: RunInfo, samples: Sequence[Sample]) -> list[HealthFinding]:
    found = []
    for sample in samples:
        if sample.status in FAILED:
            op = sample.case.op
            place = where(info, op.ranks if isinstance(op, Collective) else ())
            text = f"{label(sample.case)}: {sample.status}: {sample.reason}"
            what: Any = "wrong result" if sample.num_wrong else "failed"
            found.append(HealthFinding(what, place, text))
    everywhere = where(info, ())
    if not any(sample.status == "ok" for sample in samples):
        found.append(HealthFinding("failed", everywhere, "nothing was measured"))
    if info.status in ("partial", "interrupted", "failed"):
        text = f"{info.status}: {info.reason}"
        found.append(HealthFinding("incomplete", everywhere, text, "note"))
    return found


def _throttling(info: RunInfo, samples: Sequence[Sample]) -> list[HealthFinding]:
    every = [state for sample in samples for state in (*sample.before, *sample.after)]
    found = []
    for rank, states in sorted(grouped(every, lambda state: state.rank).items()):
        throttled = [state for state in states if set(state.throttle) - {"power cap"}]
        if throttled:
            reasons = sorted({word for s in throttled for word in s.throttle} - {"power cap"})
            text = f"{', '.join(reasons)} at {len(throttled)} of {len(states)} readings"
            hottest = max((s.temperature_c or 0 for s in throttled), default=0)
            slowest = min((s.sm_clock_mhz for s in throttled if s.sm_clock_mhz), default=0)
            text += f", {slowest} MHz" if slowest else ""
            text += f", {hottest} °C" if hottest else ""
            found.append(HealthFinding("throttling", where(info, (rank,)), text))
    return found


def _devices(info: RunInfo, one: HealthCase, slow: Mapping[Key, Slow]) -> list[HealthFinding]:
    """Find slow devices. With only two, either may be the slow one."""
    found = []
    clocks = {(s.rank,): s.sm_clock_mhz for s in one.states if s.sm_clock_mhz}
    for key, by in slow.items():
        text, place = _against(one, key, by, "the others"), where(info, key)
        others = [clock for other, clock in clocks.items() if other != key]
        if key in clocks and others and isinstance(one.op, Gemm):
            text += f", at {clocks[key]} MHz, the others {median(others):.0f} MHz"
        if len(one.times_s) == 2:
            text = f"{place}: {text}; of two, only the specification or a baseline tells which"
            place = ", ".join(where(info, either) for either in one.times_s)
        if one.kind == "host":
            found.append(HealthFinding("slow link", f"{place} <-> host", text))
        else:
            found.append(HealthFinding("slow gpu", place, text))
    return found


def _links(info: RunInfo, one: HealthCase, slow: Mapping[Key, Slow]) -> list[HealthFinding]:
    """Find slow links: all of one GPU, both directions of a pair, or one direction."""
    found, left = [], set(slow)
    every = np.array([outliers.quarters(series) for series in one.times_s.values()])
    noise = outliers.PEER_SIGMAS * outliers.scatter(every) if len(every) > 2 else 0.0
    for rank in sorted({rank for key in one.times_s for rank in key}):
        mine = [key for key in one.times_s if rank in key]
        if len({other for key in mine for other in key}) > 2 and slow.keys() >= set(mine):
            worst = max(mine, key=lambda key: slow[key].excess)
            text = f"{where(info, worst)}: {_against(one, worst, slow[worst], 'the other pairs')}"
            found.append(HealthFinding("slow link", f"{where(info, (rank,))} <-> all others", text))
            left -= set(mine)
    for key in one.times_s:
        back, place = key[::-1], where(info, key)
        text = _against(one, key, slow[key], "the other pairs") if key in left else ""
        both = {way: one.times_s[way] for way in (key, back) if way in one.times_s}
        slower = outliers.than_peers(both, max(_FLOOR["link"], noise)).get(key)
        if key in left and back in left:
            if key < back:
                text += f"; {one.show(one.medians_s[back])} the other way"
                found.append(HealthFinding("slow link", place.replace("->", "<->"), text))
        elif slower and back not in slow:
            text = _against(one, key, slower, "the other way")
            found.append(HealthFinding("asymmetric pair", place, text))
        elif text:
            found.append(HealthFinding("slow link", place, text))
    return found


def _below(info: RunInfo, one: HealthCase, keys: Iterable[Key]) -> list[HealthFinding]:
    """Find devices and links far below the specification."""
    if one.spec is None or one.kind not in _LEAST:
        return []
    rates = {key: one.rate(time_s) or 0.0 for key, time_s in one.medians_s.items()}
    least = _LEAST[one.kind]
    if one.kind == "link" and max(rates.values()) < least * one.spec:
        least /= max(one.reach - 1, 1)  # all pairs are slow: assume a mesh without a switch
    bad = sorted((rates[key], key) for key in keys if rates[key] < least * one.spec)
    if not bad:
        return []
    rate, worst = bad[0]
    text = (
        f"{one.name}: {one.show(one.medians_s[worst])} is {100 * rate / one.spec:.0f} % of "
        f"{one.show_rate(one.spec)}, at least {100 * least:.0f} % is expected"
    )
    places = _places(info, [key for _, key in bad], one)
    return [HealthFinding("below specification", places, text)]


def _worse(
    info: RunInfo,
    one: HealthCase,
    times: Mapping[Key, Sequence[float]],
    past: list[list[HealthCase]],
) -> list[HealthFinding]:
    """Find devices and links slower than in the baseline."""
    same = [earlier for run in past for earlier in run if earlier.name == one.name]
    if not same or not times:
        return []
    shortest_s = min(time_s for earlier in same for time_s in earlier.medians_s.values())
    floor = _LAUNCH_PAST_FLOOR if shortest_s < _LAUNCH_S else _PAST_FLOOR[one.kind]
    if info.cluster.device.kind == "cpu":
        floor = _CPU_PAST_FLOOR
    slow = outliers.than_before(times, [earlier.times_s for earlier in same], floor)
    if not slow:
        return []
    order = sorted(slow, key=lambda key: -slow[key].excess)
    than = "the baseline" if len(same) == 1 else f"the median of {len(same)} baselines"
    text = _against(one, order[0], slow[order[0]], than)
    return [HealthFinding("worse than baseline", _places(info, order, one), text)]


def _above(info: RunInfo, one: HealthCase) -> list[HealthFinding]:
    """Explain a busbw above the link's rate: busbw assumes a ring's traffic.

    If the switch reduces (NVLS), a GPU sends (n+1)/n of the message. Over k hosts, by a tree or in
    levels, a network card carries (k-1)/(n-1) of busbw.
    """
    op, n = one.op, info.world_size
    if one.spec is None or not isinstance(op, Collective):
        return []
    busbw = max(one.rate(time_s) or 0.0 for time_s in one.medians_s.values())
    if busbw <= one.spec:
        return []
    hosts = -(-n // info.cluster.num_devices_per_host)
    wire, why = busbw, ""
    if op.kind == "all_reduce" and hosts == 1:
        wire = busbw / op.bus_factor * (n + 1) / n
        why = "reduced in the switch (NVLS), a GPU sends algbw (n+1)/n"
    elif one.kind == "group" and hosts > 1:
        wire = busbw * (hosts - 1) / (n - 1)
        why = "by a tree, or in levels, a network card carries busbw (k-1)/(n-1)"
    text = f"{one.name}: busbw {one.show_rate(busbw)} is above {one.show_rate(one.spec)}"
    if why and wire <= one.spec:
        text += f", since it counts the traffic of a ring; {why} = {one.show_rate(wire)}"
    else:
        text += ": no algorithm explains that; correct the link's rate in the cluster file"
    return [HealthFinding("busbw above link", where(info, ()), text, "note")]


def _against(one: HealthCase, key: Key, slow: Slow, what: str) -> str:
    return (
        f"{one.name}: {one.show(one.medians_s[key])}, {what} {one.show(slow.reference_s)} "
        f"({100 * slow.excess:+.0f} % time, limit {100 * slow.limit:.0f} %)"
    )


def _places(info: RunInfo, keys: Sequence[Key], one: HealthCase) -> str:
    """Name places, the worst first; if there are many, count them."""
    if len(keys) <= _MOST_NAMES:
        return ", ".join(where(info, key) for key in keys)
    things = "pairs" if one.kind == "link" else f"{device(info)}s"
    return f"{len(keys)} of {len(one.times_s)} {things}"


def runs(samples: Sequence[Sample], baseline: Iterable[Sample]) -> list[list[Sample]]:
    """Split the baseline's samples by run. In one run each case comes once."""
    methods = {s.case_id: s.method_version for s in samples if s.status == "ok"}
    runs: list[list[Sample]] = []
    count = Counter[str]()
    for sample in baseline:
        if sample.status == "ok" and methods.get(sample.case_id) == sample.method_version:
            if count[sample.case_id] == len(runs):
                runs.append([])
            runs[count[sample.case_id]].append(sample)
            count[sample.case_id] += 1
    if methods and not runs:
        raise ValueError(
            "the baseline shares no case, timed alike, with this run; give a health run of as many "
            "ranks, the same dtype and the same version"
        )
    return runs
