"""Tables of ``measure health``: the verdict, every GPU, every pair, all against the datasheet."""

from collections.abc import Sequence
from statistics import median

from meshwise.pages import collectives, faults
from meshwise.pages.faults import (
    HealthCase,
    HealthFinding,
    Key,
    device,
    findings,
    measured,
    verdict,
    where,
)
from meshwise.pages.samples import failed
from meshwise.pages.table import Column, Table, columns, listed, percent
from meshwise.spec import Gemm, RunInfo, Sample

__all__ = ["HealthFinding", "findings", "tables", "verdict"]

_LEGEND = (
    "slow: in every quarter of its iterations more time than the median of its peers, by more than "
    "8 % for a GPU, 15 % for a link, 60 % for the host's, or six robust sigma of the peers.",
    "A note is a consequence or an explanation; it does not count.",
)
_SPECIFICATION = "specification: the datasheet's peak, or the rate of the links in one direction."


def tables(
    info: RunInfo, samples: Sequence[Sample], baseline: Sequence[Sample] | None = None
) -> list[Table]:
    """Make the tables of a health run. ``baseline``: the samples of one or several earlier runs,
    for the last two columns."""
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
        _specification(info, ours, [one for run in past for one in run]),
        *failed(samples),
    ]


def _devices(info: RunInfo, ours: Sequence[HealthCase]) -> Table:
    """Show each GPU's rates, and its state after the last matrix product."""
    each = [one for one in ours if one.kind in ("gpu", "host")]
    states = {s.rank: s for one in each if isinstance(one.op, Gemm) for s in one.states}

    def rate(one: HealthCase) -> Column:
        head = f"{one.name.split()[0]} {one.regime}".removesuffix(" warm")
        return head, lambda rank: one.medians_s.get((rank,)), one.show

    def state(head: str, field: str, unit: str) -> Column:
        return head, lambda rank: getattr(states.get(rank), field, None), f"{{:.0f}} {unit}".format

    return listed(
        "Each by itself",
        range(info.world_size),
        ("", lambda rank: where(info, (rank,))),
        *map(rate, each),
        state("SM clock", "sm_clock_mhz", "MHz"),
        state("power", "power_w", "W"),
        state("temp.", "temperature_c", "°C"),
        ("throttled", lambda rank: ", ".join(getattr(states.get(rank), "throttle", ())) or None),
        legend=(
            f"All {device(info)}s at once; medians. Clock, power and temperature are those right "
            "after the last matrix product. At its power cap a GPU works as intended.",
        ),
    )


def _specification(info: RunInfo, ours: Sequence[HealthCase], past: Sequence[HealthCase]) -> Table:
    """Compare rates. Without a known specification its columns are left out."""
    rows = []
    for one in ours:
        if one.times_s:
            worst = max(one.medians_s, key=one.medians_s.__getitem__)
            before = [median(old.medians_s.values()) for old in past if old.name == one.name]
            middle_s, before_s = median(one.medians_s.values()), median(before) if before else None
            rows.append((one, worst, middle_s, before_s))

    def of_spec(row: tuple[HealthCase, Key, float, float | None]) -> float | None:
        rate = row[0].rate(row[2])
        return rate and row[0].spec and rate / row[0].spec

    known = any(one.spec for one, *_ in rows)
    compared: tuple[Column, ...] = (
        ("specification", lambda row: row[0].spec and row[0].show_rate(row[0].spec)),
        ("of it", of_spec, percent),
    )
    return listed(
        "Against the specification" if known else "Rates",
        rows,
        ("", lambda row: row[0].name),
        ("slowest", lambda row: row[0].show(row[0].medians_s[row[1]])),
        ("at", lambda row: where(info, row[1])),
        ("median", lambda row: row[0].show(row[2])),
        *compared * known,
        ("baseline", lambda row: row[3] and row[0].show(row[3])),
        ("time", lambda row: percent(row[3] and row[2] / row[3] - 1, sign=True)),
        legend=(
            f"Medians over iterations, then over {device(info)}s or pairs; of collectives busbw, "
            "of a copy the bytes read and written.",
            *(_SPECIFICATION,) * known,
            "time: against the median of the baselines.",
        ),
    )
