"""Tables of ``measure health``: the verdict, every GPU, every pair, all against the datasheet."""

from collections.abc import Sequence
from itertools import chain
from statistics import median

from meshwise.pages import collectives, faults
from meshwise.pages.faults import Finding, Measured, device, findings, measured, verdict, where
from meshwise.pages.samples import failed
from meshwise.pages.table import ABSENT, Table, columns, listed, percent, shown
from meshwise.spec import DeviceState, Gemm, RunInfo, Sample

__all__ = ["Finding", "findings", "tables", "verdict"]

_LEGEND = (
    "slow: in every quarter of its iterations more time than the median of its peers, by more than "
    "8 % for a GPU, 15 % for a link, 60 % for the host's, or six robust sigma of the peers.",
    "A note is a consequence or an explanation; it does not count.",
)
_SPECIFICATION = "specification: the datasheet's peak, or the rate of the links in one direction."


def tables(
    info: RunInfo, samples: Sequence[Sample], baseline: Sequence[Sample] | None = None
) -> list[Table]:
    """``baseline``: the samples of one or several earlier health runs, for the last two columns."""
    found = findings(info, samples, baseline)
    ours = measured(info, samples)
    done = [sample for sample in samples if sample.status == "ok"]
    past = [measured(info, run) for run in faults.runs(samples, baseline)] if baseline else []
    verdicts = listed(
        f"Health of {info.cluster.name}: {verdict(found)}",
        found,
        *columns(str, {"": "severity", "finding": "what"}),
        *columns(str, "where evidence"),
        legend=_LEGEND if found else (),
        left=4,
    )
    return [
        verdicts,
        _devices(info, ours),
        *collectives.pair_matrices(collectives.series(done)),
        _specification(info, ours, past),
        *failed(samples),
    ]


def _devices(info: RunInfo, ours: Sequence[Measured]) -> Table:
    """A line a GPU: its rates, and its state after the last matrix product."""
    each = [one for one in ours if one.kind in ("gpu", "host")]
    states = {s.rank: s for one in each if isinstance(one.op, Gemm) for s in one.states}
    rows = []
    for rank in range(info.world_size):
        times = [one.times_s.get((rank,)) for one in each]
        rates = [one.show(median(t)) if t else ABSENT for one, t in zip(each, times, strict=True)]
        rows.append((where(info, (rank,)), *rates, *_state(states.get(rank))))
    heads = [f"{one.name.split()[0]} {one.regime}".removesuffix(" warm") for one in each]
    titles = ("", *heads, "SM clock", "power", "temp.", "throttled")
    legend = (
        f"All {device(info)}s at once; medians. Clock, power and temperature are those right after "
        "the last matrix product. At its power cap a GPU works as intended.",
    )
    return Table("Each by itself", titles, tuple(rows), legend)


def _state(state: DeviceState | None) -> tuple[str, ...]:
    if state is None:
        return (ABSENT,) * 4
    known = (
        (state.sm_clock_mhz, "MHz"), (state.power_w, "W"), (state.temperature_c, "°C")
    )  # fmt: skip
    cells = (ABSENT if value is None else f"{value:.0f} {unit}" for value, unit in known)
    return (*cells, ", ".join(state.throttle) or ABSENT)


def _specification(
    info: RunInfo, ours: Sequence[Measured], past: Sequence[Sequence[Measured]]
) -> Table:
    """Compare rates; where no specification is known its columns are left out."""
    judged = [one for one in ours if one.times_s]
    known = any(one.spec for one in judged)
    rows = []
    for one in judged:
        middle = {key: median(series) for key, series in one.times_s.items()}
        middle_s, worst = median(middle.values()), max(middle, key=lambda key: middle[key])
        before = [
            median(map(median, earlier.times_s.values()))
            for earlier in chain(*past)
            if earlier.name == one.name
        ]
        before_s = median(before) if before else None
        spec: tuple[str, ...] = ()
        if known:
            rate = one.rate(middle_s) if one.spec else None
            spec = shown(one.spec, one.show_rate), percent(rate and one.spec and rate / one.spec)
        cells = (one.name, one.show(middle[worst]), where(info, worst), one.show(middle_s), *spec)
        change = percent(before_s and middle_s / before_s - 1, sign=True)
        rows.append((*cells, shown(before_s, one.show), change))
    compared = ("specification", "of it") if known else ()
    legend = (
        f"Medians over iterations, then over {device(info)}s or pairs; of collectives busbw, of a "
        "copy the bytes read and written.",
        *((_SPECIFICATION,) * known),
        "time: against the median of the baselines.",
    )
    title = "Against the specification" if known else "Rates"
    heads = ("", "slowest", "at", "median", *compared, "baseline", "time")
    return Table(title, heads, tuple(rows), legend)
