"""Compare two runs. In: their samples. Out: ratio, interval and verdict of each shared case.

ratio = median(b) / median(a), below 1 if b is faster; a geometric mean summarises all ratios. If
two runs share no case, steps that differ only in their layout are compared. Each side is one
launch, and a verdict (``stats.compare``) holds for these two: launches of the same code differ.
"""

import re
from collections.abc import Iterable
from typing import Literal, NamedTuple

import msgspec

from meshwise import stats
from meshwise.pages.table import Table, listed
from meshwise.spec import Case, Layout, Record, Sample, Step
from meshwise.spec.label import label
from meshwise.spec.record import PositiveFloat
from meshwise.spec.run import FAILED
from meshwise.units import format_seconds


class Compared(Record, kw_only=True):
    """One compared case. ``ratio`` has its 95 % interval or, with too few times, the range of
    ratios of single times. ``case``: b's. ``a_layout``: a's layout if it differs."""

    case: Case
    a_layout: Layout | None = None
    a_s: PositiveFloat
    b_s: PositiveFloat
    ratio: PositiveFloat
    low: PositiveFloat
    high: PositiveFloat
    interval: Literal["95 %", "range"]
    verdict: Literal["same", "faster", "slower", "unclear"]


class Comparison(Record, kw_only=True):
    """A comparison of two runs. ``missing``: number of cases that only one side finished.
    ``failed``: ids of the cases that ``fail_if`` caught."""

    a: str
    b: str
    cases: tuple[Compared, ...]
    ratio: PositiveFloat
    missing: int
    fail_if: str | None = None
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
    a: tuple[str, Iterable[Sample]],
    b: tuple[str, Iterable[Sample]],
    *,
    fail_if: str | None = None,
    force: bool = False,
    layouts: bool = True,
) -> Comparison:
    """Compare two named sets of samples, case by case.

    Raises a ValueError if the sets share no case or differ in timing method or regime. ``force``
    compares across methods and regimes. ``layouts``, for runs on one cluster, compares steps of two
    layouts. A gate also catches a case that a finished and b failed.
    """
    gate = None if fail_if is None else parse_gate(fail_if)
    every = [{_key(s, force): s for s in side} for _, side in (a, b)]
    before, after = ({k: s for k, s in side.items() if s.status == "ok"} for side in every)
    pairs = [(before[key], after[key]) for key in before if key in after]
    if not pairs and layouts:  # steps that differ in nothing but their layout
        steps = ([s for s in side.values() if _layout(s)] for side in (before, after))
        old, new = ({_key(s, force, any_layout=True): s for s in side} for side in steps)
        pairs = [(old[key], new[key]) for key in old if key in new]
    if not pairs:
        raise ValueError(_nothing_shared(a[0], b[0], before, after))
    for methods in ((x.method_version, y.method_version) for x, y in pairs):
        if methods[0] != methods[1] and not force:
            raise ValueError(
                f"{a[0]} was timed by method {methods[0]} and {b[0]} by method {methods[1]}; "
                "measure again, or compare anyway with --force"
            )
    cases = tuple(_compared(*pair) for pair in pairs)
    caught: list[str] = []
    if gate is not None:
        caught = [case.case.id for case in cases if gate.catches(case)]
        broken = (s for key, s in every[1].items() if key in before and s.status in FAILED)
        caught += [sample.case_id for sample in broken]
    return Comparison(
        a=a[0],
        b=b[0],
        cases=cases,
        ratio=stats.geometric_mean([case.ratio for case in cases]),
        missing=len(before) + len(after) - 2 * len(pairs),
        fail_if=fail_if,
        failed=tuple(caught),
    )


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


def _nothing_shared(a: str, b: str, before: dict[str, Sample], after: dict[str, Sample]) -> str:
    regimes = {_key(sample, True): sample.case.regime for sample in before.values()}
    for sample in after.values():
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


def _compared(a: Sample, b: Sample) -> Compared:
    found = stats.compare(a.times_s, b.times_s)
    return Compared(
        case=b.case,
        a_layout=_layout(a) if _layout(a) != _layout(b) else None,
        a_s=stats.median_interval(a.times_s)[0],
        b_s=stats.median_interval(b.times_s)[0],
        **found._asdict(),
    )


def _capped(ratio: float) -> str:
    return f"{ratio:.3f}" if ratio < 1000 else "over 1000"


def table(comparison: Comparison) -> Table:
    """Show every shared case. Cases that the gate caught are marked."""
    caught, cases = set(comparison.failed), comparison.cases
    mean = f"Geometric mean of {len(cases)} ratios" if len(cases) > 1 else "The one ratio"
    outcome = f"caught {len(caught)} of {len(cases)} cases" if caught else "holds"
    legend = {
        f"{mean}: {comparison.ratio:.3f}. Below 1, b is faster.": True,
        "Ratio of medians (b/a) with its 95 % interval, from blocks of consecutive times; same: it "
        f"lies within {100 * stats.TOLERANCE:.0f} % of 1; faster, slower: beyond that; unclear: "
        "neither.": True,
        "The verdicts are about these launches, one a side; another launch of the same may "
        "differ.": True,
        f"(range): of fewer than {stats.FEWEST} times, the least and the largest ratio of single "
        "ones; no 95 %.": any(case.interval == "range" for case in cases),
        "For more times run both again with more steps; their commands are in run.json.": any(
            case.verdict == "unclear" and isinstance(case.case.op, Step) for case in cases
        ),
        f"{comparison.missing} cases were finished on one side only.": comparison.missing,
        f"Gate {comparison.fail_if}: {outcome}.": comparison.fail_if,
    }
    return listed(
        f"a = {comparison.a}, b = {comparison.b}",
        cases,
        ("case", lambda c: label(c.case) + (f" (a: {c.a_layout.name})" if c.a_layout else "")),
        ("verdict", lambda case: case.verdict + " (fails)" * (case.case.id in caught)),
        ("a", "a_s", format_seconds),
        ("b", "b_s", format_seconds),
        ("b/a", "ratio", "{:.3f}".format),
        (
            "interval",
            lambda c: f"{c.low:.3f} – {_capped(c.high)}" + " (range)" * (c.interval == "range"),
        ),
        legend=tuple(line for line, holds in legend.items() if holds),
        left=2,
    )
