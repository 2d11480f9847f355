"""Compare the conditions of runs. In: runs. Out: warnings, a sentence each."""

from collections.abc import Callable, Iterable, Sequence
from statistics import median

from meshwise.spec import RunInfo, Sample
from meshwise.spec.run import changes
from meshwise.text import one_line

Launch = tuple[RunInfo, Sequence[Sample]]
_CLOCKS = 0.02  # by which clocks may differ unsaid
_MOST_NAMED = 3


def warnings(a: Sequence[Launch], b: Sequence[Launch]) -> list[str]:
    """Say what differs between two sides, or among the launches of one, other than their times:
    machines, versions, settings, method, clocks, load."""
    first, every = a[0][0], [info for info, _ in (*a, *b)]
    found = [unlike(first, info) for info in every[1:]]
    methods = [{s.method_version for _, samples in side for s in samples} for side in (a, b)]
    if methods[0] != methods[1]:
        told = " and ".join(" and ".join(map(str, sorted(one))) for one in methods)
        found.append(f"timing methods differ: {told}")
    return [
        *dict.fromkeys(one_line(told) for told in found if told),
        *filter(None, (_clocks(a, b), _throttled("a", a), _throttled("b", b))),
        *filter(None, (_busy("a", a), _busy("b", b))),
    ]


def unlike(first: RunInfo, info: RunInfo) -> str:
    """Say how a run's machine, versions and settings differ from the first run's."""
    one, other = first.versions | _machine(first), info.versions | _machine(info)
    found = [told] if (told := changes(one, other)) else []
    gpus = [
        sorted(str(gpu.get("uuid_hash")) for gpu in of.provenance.get("gpus") or ())
        for of in (first, info)
    ]
    if all(gpus) and gpus[0] != gpus[1]:
        found.append("other GPUs")
    settings = [of.provenance.get("settings") or {} for of in (first, info)]
    names = [n for n in sorted({*settings[0], *settings[1]}) if _differs(n, settings)]
    if names:
        found.append(f"settings of {_some(names)}")
    return f"conditions differ: {', '.join(found)}" if found else ""


def _differs(name: str, settings: Sequence[dict[str, str]]) -> bool:
    return settings[0].get(name) != settings[1].get(name)


def _machine(info: RunInfo) -> dict[str, str]:
    known = {"CPU": "cpu", "cores": "host_cores", "threads a rank": "threads_per_rank"}
    cluster = info.cluster
    found = {name: info.provenance.get(key) for name, key in known.items()}
    hosts = {"hosts": cluster.num_hosts, "devices a host": cluster.num_devices_per_host}
    return {name: str(value) for name, value in (found | hosts).items() if value is not None}


def _clocks(a: Sequence[Launch], b: Sequence[Launch]) -> str:
    """Say whether the devices' clocks after the cases differ."""
    found = []
    for side in (a, b):
        states = (state for _, samples in side for s in samples for state in s.after)
        seen = [state.sm_clock_mhz for state in states if state.sm_clock_mhz is not None]
        found.append(median(seen) if seen else None)
    if None in found and any(found):
        return "clocks were recorded on one side only"
    before, after = found
    if not before or not after or abs(after / before - 1) <= _CLOCKS:
        return ""
    return f"clocks differ: a {before:.0f} MHz, b {after:.0f} MHz, medians after the cases"


def _throttled(name: str, side: Sequence[Launch]) -> str:
    """Say in how many launches devices were slowed down, other than by their power cap."""

    def reasons(samples: Iterable[Sample]) -> set[str]:
        return {why for s in samples for state in s.after for why in state.throttle} - {"power cap"}

    return _counted(name, side, lambda one: ", ".join(sorted(reasons(one[1]))), "throttled")


def _busy(name: str, side: Sequence[Launch]) -> str:
    return _counted(name, side, lambda one: one[0].busy, "host busy")


def _counted(name: str, side: Sequence[Launch], why: Callable[[Launch], str], what: str) -> str:
    found = [told for one in side if (told := why(one))]
    of = f" in {len(found)} of {len(side)} launches" if len(side) > 1 else ""
    return f"{name}: {what}{of}: {max(found, key=len)}" if found else ""


def _some(names: Sequence[str]) -> str:
    more = len(names) - _MOST_NAMED
    return ", ".join(names[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")
