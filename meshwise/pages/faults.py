"""Find what is wrong with a machine, and where. A health run in, findings out.

A GPU or a link is slow when all quarters of its times exceed those of its peers by more than a
limit, the larger of six robust sigma of the peers' quarters (``pages.outliers``) and a floor:

    8 %   products and copies in memory: chips of one host differ by 5 % (a lottery, sigma 2 %)
    15 %  messages between pairs, and the two directions of one pair: healthy pairs of H200 lie
          between 366 and 394 GB/s, a pair that goes through the host between 20 and 50
    60 %  copies from and to the host: far sockets are slower, half the lanes take twice as long

Worse than a baseline is 3 % more time, unless noise asks for more; 8 % between pairs, 25 % below
50 us, where launches differ from process to process, and of copies from and to the host, whose
pinned memory lies where it may. The specification is a bound that nothing reaches, see ``_LEAST``.
At its power cap a GPU works as intended; any other reason to lower its clock is a fault. Ranks on
CPUs share cores and memory: they have no links to judge, and a baseline must be exceeded by its
double.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Literal, NamedTuple, get_args

import numpy as np

from meshwise.pages import outliers
from meshwise.pages.outliers import Slow
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
from meshwise.spec.run import FAILED
from meshwise.units import format_bytes, format_rate, format_seconds

Kind = Literal["gpu", "host", "link", "group"]
Key = tuple[int, ...]  # (rank,), (from, to), or () for all ranks together
_SMALL_BYTES = 2**16  # of smaller messages the time is told, not the rate
_FLOOR: dict[Kind, float] = {"gpu": 0.08, "host": 0.60, "link": 0.15}
# Shares of the specification. Sustained products reach 0.5 to 0.8, copies 0.85, links 0.7 to 0.9
# through a switch (in a mesh of n a pair has but 1/(n-1) of a GPU's links), collectives on PCIe
# half.
_LEAST: dict[Kind, float] = {"gpu": 0.4, "link": 0.5, "group": 0.33}
_PAST_FLOOR: dict[Kind, float] = {"gpu": 0.03, "host": 0.25, "link": 0.08, "group": 0.03}
_LAUNCH_PAST_FLOOR, _CPU_PAST_FLOOR = 0.25, 1.0
_LAUNCH_S = 50e-6
_MOST_NAMES = 3


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
        if sample.status == "ok" and (one := _measured(info.cluster, sample)):
            found.setdefault(one.name, one).times_s.update(one.times_s)
    return sorted(found.values(), key=lambda one: get_args(Kind).index(one.kind))


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


class Finding(NamedTuple):
    """``where``: "GPU 2", "GPU 0 -> GPU 3", "GPU 0 <-> GPU 3". ``evidence``: numbers with units."""

    what: Literal[
        "slow gpu", "slow link", "asymmetric pair", "throttling", "below specification",
        "worse than baseline", "busbw above link", "wrong result", "failed", "incomplete",
    ]  # fmt: skip
    where: str
    evidence: str
    severity: Literal["fault", "note"] = "fault"


def verdict(found: Iterable[Finding]) -> str:
    """``healthy``, ``1 fault``, ``2 faults``; notes do not count."""
    count = sum(finding.severity == "fault" for finding in found)
    return f"{count} fault{'s' if count > 1 else ''}" if count else "healthy"


def findings(
    info: RunInfo, samples: Sequence[Sample], baseline: Sequence[Sample] | None = None
) -> list[Finding]:
    """Find what is wrong, faults first. ``baseline``: the samples of one or several earlier runs.

    Raises ValueError if the baseline shares no case with this run.
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
            # where there are more than two, peers have named the culprit: once is enough
            accused |= {(one.kind, key) for key in slow if len(one.times_s) > 2}
    past = [measured(info, run) for run in runs(samples, baseline)] if baseline else []
    for one in ours:
        unnamed = {k: t for k, t in one.times_s.items() if (one.kind, k) not in accused}
        more = [*_below(info, one, unnamed), *_worse(info, one, unnamed, past)]
        if one.kind == "group" and any(finding.severity == "fault" for finding in found):
            more = [finding._replace(severity="note") for finding in more]  # a consequence
        found += more + _above(info, one)
    return sorted(_joined(found), key=lambda finding: finding.severity)


def _failed(info: RunInfo, samples: Sequence[Sample]) -> list[Finding]:
    found = []
    for sample in samples:
        if sample.status in FAILED:
            op = sample.case.op
            place = where(info, op.ranks if isinstance(op, Collective) else ())
            text = f"{label(sample.case)}: {sample.status}: {sample.reason}"
            found.append(Finding("wrong result" if sample.num_wrong else "failed", place, text))
    everywhere = where(info, ())
    if not any(sample.status == "ok" for sample in samples):
        found.append(Finding("failed", everywhere, "nothing was measured"))
    if info.status in ("partial", "interrupted", "failed"):
        text = f"{info.status}: {info.reason}"
        found.append(Finding("incomplete", everywhere, text, "note"))
    return found


def _throttling(info: RunInfo, samples: Sequence[Sample]) -> list[Finding]:
    seen: dict[int, list[DeviceState]] = defaultdict(list)
    for sample in samples:
        for state in (*sample.before, *sample.after):
            seen[state.rank].append(state)
    found = []
    for rank, states in sorted(seen.items()):
        throttled = [state for state in states if set(state.throttle) - {"power cap"}]
        if throttled:
            reasons = sorted({word for s in throttled for word in s.throttle} - {"power cap"})
            text = f"{', '.join(reasons)} at {len(throttled)} of {len(states)} readings"
            hottest = max((s.temperature_c or 0 for s in throttled), default=0)
            slowest = min((s.sm_clock_mhz for s in throttled if s.sm_clock_mhz), default=0)
            text += f", {slowest} MHz" if slowest else ""
            text += f", {hottest} °C" if hottest else ""
            found.append(Finding("throttling", where(info, (rank,)), text))
    return found


def _devices(info: RunInfo, one: Measured, slow: Mapping[Key, Slow]) -> list[Finding]:
    found = []
    for key, by in slow.items():
        text = _against(one, key, by, "the others") + _clocks(one, key)
        place = where(info, key)
        if len(one.times_s) == 2:
            text = f"{place}: {text}; of two, only the specification or a baseline tells which"
            place = ", ".join(where(info, either) for either in one.times_s)
        if one.kind == "host":
            found.append(Finding("slow link", f"{place} <-> host", text))
        else:
            found.append(Finding("slow gpu", place, text))
    return found


def _clocks(one: Measured, key: Key) -> str:
    clocks = {(s.rank,): s.sm_clock_mhz for s in one.states if s.sm_clock_mhz}
    others = [clock for other, clock in clocks.items() if other != key]
    if key not in clocks or not others or not isinstance(one.op, Gemm):
        return ""
    return f", at {clocks[key]} MHz, the others {median(others):.0f} MHz"


def _links(info: RunInfo, one: Measured, slow: Mapping[Key, Slow]) -> list[Finding]:
    """Links that are slow: all of one GPU, both directions of a pair, or one of them."""
    found, left = [], set(slow)
    every = np.array([outliers.quarters(series) for series in one.times_s.values()])
    noise = outliers.PEER_SIGMAS * outliers.scatter(every) if len(every) > 2 else 0.0
    for rank in sorted({rank for key in one.times_s for rank in key}):
        mine = [key for key in one.times_s if rank in key]
        if len({other for key in mine for other in key}) > 2 and slow.keys() >= set(mine):
            worst = max(mine, key=lambda key: slow[key].excess)
            text = f"{where(info, worst)}: {_against(one, worst, slow[worst], 'the other pairs')}"
            found.append(Finding("slow link", f"{where(info, (rank,))} <-> all others", text))
            left -= set(mine)
    for key in one.times_s:
        back = key[::-1]
        if key in left and back in left:
            if key < back:
                text = _against(one, key, slow[key], "the other pairs")
                text += f"; {one.show(median(one.times_s[back]))} the other way"
                found.append(Finding("slow link", where(info, key).replace("->", "<->"), text))
        elif (by := _asymmetric(one, key, noise)) and back not in slow:
            text = _against(one, key, by, "the other way")
            found.append(Finding("asymmetric pair", where(info, key), text))
        elif key in left:
            text = _against(one, key, slow[key], "the other pairs")
            found.append(Finding("slow link", where(info, key), text))
    return found


def _asymmetric(one: Measured, key: Key, noise: float) -> Slow | None:
    """Compare this direction with the other: ``Slow`` if it is slower."""
    both = {way: one.times_s[way] for way in (key, key[::-1]) if way in one.times_s}
    return outliers.than_peers(both, max(_FLOOR["link"], noise)).get(key)


def _below(info: RunInfo, one: Measured, times: Mapping[Key, Sequence[float]]) -> list[Finding]:
    if one.spec is None or one.kind not in _LEAST:
        return []
    rates = {key: one.rate(median(series)) or 0.0 for key, series in one.times_s.items()}
    least = _LEAST[one.kind]
    if one.kind == "link" and max(rates.values()) < least * one.spec:
        least /= max(one.reach - 1, 1)  # no pair shows that there is a switch: a mesh, then
    bad = sorted((rates[key], key) for key in times if rates[key] < least * one.spec)
    if not bad:
        return []
    rate, worst = bad[0]
    text = (
        f"{one.name}: {one.show(median(times[worst]))} is {100 * rate / one.spec:.0f} % of "
        f"{one.show_rate(one.spec)}, at least {100 * least:.0f} % is expected"
    )
    return [Finding("below specification", _places(info, [key for _, key in bad], one), text)]


def _worse(
    info: RunInfo, one: Measured, times: Mapping[Key, Sequence[float]], past: list[list[Measured]]
) -> list[Finding]:
    runs = [earlier.times_s for run in past for earlier in run if earlier.name == one.name]
    if not runs or not times:
        return []
    shortest_s = min(median(series) for run in runs for series in run.values())
    floor = _LAUNCH_PAST_FLOOR if shortest_s < _LAUNCH_S else _PAST_FLOOR[one.kind]
    if info.cluster.device.kind == "cpu":
        floor = _CPU_PAST_FLOOR
    slow = outliers.than_before(times, runs, floor)
    if not slow:
        return []
    order = sorted(slow, key=lambda key: -slow[key].excess)
    than = "the baseline" if len(runs) == 1 else f"the median of {len(runs)} baselines"
    text = _against(one, order[0], slow[order[0]], than)
    return [Finding("worse than baseline", _places(info, order, one), text)]


def _above(info: RunInfo, one: Measured) -> list[Finding]:
    """Explain a busbw above the link's rate: it counts a ring's traffic.

    Reduced in the switch (NVLS) a GPU sends (n+1)/n of the message; over k hosts, by a tree or in
    levels, a network card carries (k-1)/(n-1) of busbw.
    """
    op, n = one.op, info.world_size
    if one.spec is None or not isinstance(op, Collective):
        return []
    busbw = max(one.rate(median(series)) or 0.0 for series in one.times_s.values())
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
    above = f"{one.name}: busbw {one.show_rate(busbw)} is above {one.show_rate(one.spec)}"
    if why and wire <= one.spec:
        text = f"{above}, since it counts the traffic of a ring; {why} = {one.show_rate(wire)}"
    else:
        text = f"{above}: no algorithm explains that; correct the link's rate in the cluster file"
    return [Finding("busbw above link", where(info, ()), text, "note")]


def _against(one: Measured, key: Key, slow: Slow, what: str) -> str:
    return (
        f"{one.name}: {one.show(median(one.times_s[key]))}, {what} {one.show(slow.reference_s)} "
        f"({100 * slow.excess:+.0f} % time, limit {100 * slow.limit:.0f} %)"
    )


def _places(info: RunInfo, keys: Sequence[Key], one: Measured) -> str:
    """The worst first; a count where they are many."""
    if len(keys) <= _MOST_NAMES:
        return ", ".join(where(info, key) for key in keys)
    things = "pairs" if one.kind == "link" else f"{device(info)}s"
    return f"{len(keys)} of {len(one.times_s)} {things}"


def runs(samples: Sequence[Sample], baseline: Iterable[Sample]) -> list[list[Sample]]:
    """Part the baseline's samples by run: in one run a case comes once."""
    methods = {s.case_id: s.method_version for s in samples if s.status == "ok"}
    runs: list[list[Sample]] = []
    count: dict[str, int] = defaultdict(int)
    for sample in baseline:
        if sample.status == "ok" and methods.get(sample.case_id) == sample.method_version:
            run = count[sample.case_id]
            count[sample.case_id] += 1
            runs += [[]] if run == len(runs) else []
            runs[run].append(sample)
    if methods and not runs:
        raise ValueError(
            "the baseline shares no case, timed alike, with this run; give a health run of as many "
            "ranks, the same dtype and the same version"
        )
    return runs


def _joined(found: Iterable[Finding]) -> list[Finding]:
    """Join the findings of one fault: their evidence stands in a row."""
    joined: dict[tuple[str, str, str], Finding] = {}
    for finding in found:
        key = finding.what, finding.where, finding.severity
        earlier = joined.get(key)
        text = finding.evidence if earlier is None else f"{earlier.evidence}; {finding.evidence}"
        joined[key] = finding._replace(evidence=text)
    return list(joined.values())
