"""Compare two sides. In: the launches of each. Out: ratio, interval, verdict of each shared case.

ratio = b/a, below 1 if b is faster (``stats.compare``); geometric means summarise the ratios, also
of each kind of case. If the sides share no case, steps that differ only in their layout are
compared.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

import msgspec

from meshwise import stats
from meshwise.pages import conditions
from meshwise.pages.conditions import Launch
from meshwise.pages.table import Table, filled, grouped, listed
from meshwise.spec import Case, Collective, Layout, Record, Sample, Step
from meshwise.spec.label import label
from meshwise.spec.record import NonNegative, Positive, PositiveFloat
from meshwise.spec.run import FAILED
from meshwise.units import format_seconds


class Compared(Record, kw_only=True):
    """One compared case. ``a_s``, ``b_s``: geometric means of the launches' medians. ``low`` to
    ``high``: the ratio's 99 % interval. ``case``: b's. ``a_layout``: a's layout if it differs."""

    case: Case
    a_layout: Layout | None = None
    a_launches: Positive
    b_launches: Positive
    a_s: PositiveFloat
    b_s: PositiveFloat
    ratio: PositiveFloat
    low: PositiveFloat
    high: PositiveFloat
    verdict: Literal["same", "faster", "slower", "unclear"]


class GroupMean(Record, kw_only=True):
    """The geometric mean of the ratios of one kind of case."""

    kind: str
    num_cases: Positive
    ratio: PositiveFloat


class Comparison(Record, kw_only=True):
    """A comparison of two sides. ``warnings``: what else differs between them. ``missing``: number
    of cases that only one side finished. ``failed``: ids of the cases that ``fail_if`` caught."""

    a: str
    b: str
    threshold: PositiveFloat
    warnings: tuple[str, ...] = ()
    cases: tuple[Compared, ...]
    groups: tuple[GroupMean, ...]
    ratio: PositiveFloat
    missing: NonNegative
    fail_if: tuple[str, ...] = ()
    failed: tuple[str, ...] = ()


class Gate(NamedTuple):
    """A limit: ``slower>5%`` catches cases with verdict slower and a ratio above 1.05."""

    verdict: str
    limit: float

    def catches(self, compared: Compared) -> bool:
        change = compared.ratio - 1 if self.verdict == "slower" else 1 - compared.ratio
        return compared.verdict == self.verdict and change > self.limit


def parse_gate(text: str) -> Gate:
    """Read the user's ``slower>5%`` or ``faster>5%``."""
    match = re.fullmatch(r"\s*(slower|faster)\s*>\s*(\d+(?:\.\d+)?)\s*%\s*", text)
    if match is None:
        raise ValueError(f"fail_if = {text!r}: write it like 'slower>5%' or 'faster>5%'")
    return Gate(match[1], float(match[2]) / 100)


def compare(
    a: tuple[str, Sequence[Launch]],
    b: tuple[str, Sequence[Launch]],
    *,
    threshold: float = stats.THRESHOLD,
    fail_if: Sequence[str] = (),
    force: bool = False,
) -> Comparison:
    """Compare two named sides, case by case.

    Raises a ValueError if the sides share no case or differ in timing method or regime. ``force``
    compares across methods and regimes. Steps of two layouts are compared on one cluster only. A
    gate also catches a case that a finished and a launch of b failed.
    """
    gates = [parse_gate(text) for text in fail_if]
    sides = [[{_key(s, force): s for s in one} for _, one in launches] for _, launches in (a, b)]
    before, after = map(_finished, sides)
    pairs = [(before[key], after[key]) for key in before if key in after]
    clusters = [info.cluster for _, launches in (a, b) for info, _ in launches]
    if not pairs and all(cluster == clusters[0] for cluster in clusters):
        old, new = (_steps(launches, force) for _, launches in (a, b))
        pairs = [(old[key], new[key]) for key in old if key in new]
    if not pairs:
        raise ValueError(_nothing_shared(a[0], b[0], before, after))
    _check_methods(a[0], b[0], pairs, force)
    cases = tuple(_compared(*pair, threshold) for pair in pairs)
    caught = [case.case.id for case in cases if any(gate.catches(case) for gate in gates)]
    if gates:
        broken = (s for one in sides[1] for key, s in one.items() if key in before)
        caught += dict.fromkeys(sample.case_id for sample in broken if sample.status in FAILED)
    return Comparison(
        a=a[0],
        b=b[0],
        threshold=threshold,
        warnings=(*conditions.warnings(a[1], b[1]), *_few(cases, pairs)),
        cases=cases,
        groups=tuple(
            GroupMean(kind=kind, num_cases=len(of), ratio=_mean(of))
            for kind, of in grouped(cases, lambda case: kind_of(case.case)).items()
        ),
        ratio=_mean(cases),
        missing=len(before) + len(after) - 2 * len(pairs),
        fail_if=tuple(fail_if),
        failed=tuple(dict.fromkeys(caught)),
    )


_Launches = list[Sample]  # of one case, a sample of each launch


def _finished(side: Sequence[Mapping[str, Sample]]) -> dict[str, _Launches]:
    """Gather the ok samples of each case over the launches."""
    every = [(key, s) for launch in side for key, s in launch.items() if s.status == "ok"]
    return {key: [s for _, s in of] for key, of in grouped(every, lambda one: one[0]).items()}


def _steps(launches: Sequence[Launch], force: bool) -> dict[str, _Launches]:
    """Gather steps by what they are but for their layout. A side with several layouts of one thing
    has only the last."""
    steps = ([s for s in samples if _layout(s)] for _, samples in launches)
    found = _finished([{_key(s, force, any_layout=True): s for s in each} for each in steps])
    return {key: [s for s in of if _layout(s) == _layout(of[-1])] for key, of in found.items()}


def _check_methods(
    a: str, b: str, pairs: Sequence[tuple[_Launches, _Launches]], force: bool
) -> None:
    for pair in pairs if not force else ():
        versions = [{s.method_version for s in side} for side in pair]
        if len(versions[0] | versions[1]) > 1:
            one, other = (" and ".join(map(str, sorted(found))) for found in versions)
            raise ValueError(
                f"{a} was timed by method {one} and {b} by method {other}; "
                "measure again, or compare anyway with --force"
            )


def _few(cases: Sequence[Compared], pairs: Sequence[tuple[_Launches, _Launches]]) -> list[str]:
    """Say where there are few launches or times."""
    least = [min(of) for of in zip(*((c.a_launches, c.b_launches) for c in cases), strict=True)]
    short = sum(
        any(sum(len(s.times_s) for s in side) < stats.FEWEST for side in pair) for pair in pairs
    )
    found = []
    if min(least) == 1:
        found.append(
            "one launch does not show how far launches are apart: "
            f"{100 * stats.LAUNCH_SPREAD:.0f} % is assumed, more where times vary; give 6 a side"
        )
    elif min(least) < stats.FEWEST:
        found.append(
            f"few launches, a {least[0]} and b {least[1]}: intervals are wide; give 6 a side"
        )
    if short:
        found.append(f"fewer than {stats.FEWEST} times a side in {short} cases: they are unclear")
    return found


def kind_of(case: Case) -> str:
    """Name the kind of a case: ``gemm``, ``all_reduce``, ``train``."""
    if isinstance(case.op, Step):
        return case.op.mode
    if isinstance(case.op, Collective):
        return case.op.kind
    return str(case.op.__struct_config__.tag)


def _mean(cases: Sequence[Compared]) -> float:
    return stats.geometric_mean([case.ratio for case in cases])


def _key(sample: Sample, any_regime: bool, any_layout: bool = False) -> str:
    """Return the id of a sample's case; with ``any_regime`` or ``any_layout``, without these."""
    case = sample.case
    if any_regime:
        case = msgspec.structs.replace(case, regime="warm")
    if any_layout:
        op = msgspec.structs.replace(case.op, layout=Layout())
        case = msgspec.structs.replace(case, op=op)
    return case.id if any_regime or any_layout else sample.case_id


def _layout(sample: Sample) -> Layout | None:
    return sample.case.op.layout if isinstance(sample.case.op, Step) else None


def _nothing_shared(
    a: str, b: str, before: dict[str, _Launches], after: dict[str, _Launches]
) -> str:
    regimes = {_key(side[0], True): side[0].case.regime for side in before.values()}
    for sample in (side[0] for side in after.values()):
        if regime := regimes.get(_key(sample, True)):
            return (
                f"{a} was measured {regime} and {b} {sample.case.regime}: two regimes are never "
                "one number; compare anyway with --force"
            )
    return (
        f"{a} ({len(before)} finished cases) and {b} ({len(after)}) share no case; "
        "compare two runs of the same measurement, or of two layouts of one model, workload, dtype "
        "and cluster"
    )


def _compared(a: _Launches, b: _Launches, threshold: float) -> Compared:
    sides = ([sample.times_s for sample in side] for side in (a, b))
    found = stats.compare(*sides, threshold=threshold)
    old, new = _layout(a[0]), _layout(b[0])
    return Compared(
        case=b[0].case,
        a_layout=old if old != new else None,
        a_launches=len(a),
        b_launches=len(b),
        a_s=found.a,
        b_s=found.b,
        ratio=found.ratio,
        low=found.low,
        high=found.high,
        verdict=found.verdict,
    )


def _end(ratio: float) -> str:
    if ratio >= 1000:
        return "over 1000"
    return "under 0.001" if ratio < 0.001 else f"{ratio:.3f}"


def tables(comparison: Comparison) -> list[Table]:
    """Show the warnings, every shared case, and the mean of each kind. Cases that a gate caught are
    marked."""
    found = comparison
    means = listed(
        "Geometric means",
        found.groups if len(found.groups) > 1 else (),
        ("kind", "kind"),
        ("cases", "num_cases"),
        ("b/a", "ratio", "{:.3f}".format),
    )
    doubts = [Table("Warnings", (), (), legend=found.warnings)] if found.warnings else []
    return [*doubts, _cases(found), *filled(means)]


def _cases(found: Comparison) -> Table:
    caught, cases = set(found.failed), found.cases
    launches = [sorted({getattr(c, name) for c in cases}) for name in ("a_launches", "b_launches")]
    a, b = (" to ".join(map(str, dict.fromkeys((of[0], of[-1])))) for of in launches)
    mean = f"Geometric mean of {len(cases)} ratios" if len(cases) > 1 else "The one ratio"
    outcome = f"caught {len(caught)} of {len(cases)} cases" if caught else "holds"
    limit = f"{100 * found.threshold:g} %"
    legend = {
        f"{mean}: {found.ratio:.3f}. Below 1, b is faster.": True,
        f"a, b: geometric means of the medians of {a} and {b} launches; b/a with its 99 % "
        "interval, from how far the launches of a side are apart.": True,
        f"same: the interval is within {limit} of 1. slower: it is above 1, and b/a is over "
        f"{limit}; faster: the same of a/b. unclear: neither; more launches narrow it.": True,
        f"{found.missing} cases were finished on one side only.": found.missing,
        f"Gate {', '.join(found.fail_if)}: {outcome}.": found.fail_if,
    }
    return listed(
        f"a = {found.a}, b = {found.b}",
        cases,
        ("case", lambda c: label(c.case) + (f" (a: {c.a_layout.name})" if c.a_layout else "")),
        ("verdict", lambda case: case.verdict + " (fails)" * (case.case.id in caught)),
        ("a", "a_s", format_seconds),
        ("b", "b_s", format_seconds),
        ("b/a", "ratio", "{:.3f}".format),
        ("99 % interval", lambda c: f"{_end(c.low)} – {_end(c.high)}"),
        legend=tuple(line for line, holds in legend.items() if holds),
        left=2,
    )
