"""Show the answers of a plan: a table for each, and a sentence that says what it comes to."""

from collections.abc import Callable, Sequence

from meshwise.pages.table import ABSENT, Table, filled, listed, percent
from meshwise.pages.tables import rate_unit
from meshwise.spec import Difference, Plan, WhatIf, WhyNot
from meshwise.units import format_bytes, format_count, format_seconds


def of(chosen: Plan) -> list[Table]:
    """Return the tables of a plan's answers; none of a plan without a prediction."""
    answers = chosen.answers
    if chosen.prediction is None:
        return []
    return [
        *(_why_not(chosen, why) for why in answers.why_not),
        *filled(_what_if(chosen, answers.what_if)),
    ]


def _what_if(chosen: Plan, found: Sequence[WhatIf]) -> Table:
    told = chosen.prediction
    assert told is not None
    now = WhatIf(
        change="none", layout=chosen.layout, step_time_s=told.step_time_s,
        tokens_per_s=told.tokens_per_s, faster=1.0,
    )  # fmt: skip
    return listed(
        "What would change the answer",
        (now, *found) if found else (),
        ("change", "change"),
        ("best layout", "layout.name"),
        ("step", lambda one: one.step_time_s or None, format_seconds),
        (rate_unit(chosen.model), lambda one: one.tokens_per_s or None, format_count),
        ("faster", lambda one: one.faster - 1 if one.layout and one is not now else None,
         lambda more: percent(more, sign=True)),
        legend=(
            f"Each change alone, searched anew; faster: by {rate_unit(chosen.model)}.",
            *(f"{one.change}: {one.note}." for one in found if one.note),
        ),
        left=2,
    )  # fmt: skip


def _why_not(chosen: Plan, why: WhyNot) -> Table:
    title = f"Why not {why.layout.name}"
    if why.obstacle:
        return Table(title, (), (), (f"It cannot be planned: {why.obstacle}.",))
    of_both = (("time", why.time, format_seconds), ("memory", why.memory, format_bytes))
    rows = [_row(of, part, show) for of, parts, show in of_both for part in parts if part.more]
    same = len(why.time) + len(why.memory) - len(rows)
    alike = ("Parts of which both have as much are left out.",) * (same > 0)
    columns = ("of", "part", "in the plan", "in this layout", "difference")
    return Table(title, columns, tuple(rows), (*_verdict(chosen, why), *alike), left=2)


def _row(of: str, part: Difference, show: Callable[[float], str]) -> tuple[str, ...]:
    sizes = (show(size) if size else ABSENT for size in (part.chosen, part.named))
    return of, part.part, *sizes, f"{'-' if part.more < 0 else '+'}{show(abs(part.more))}"


def _verdict(chosen: Plan, why: WhyNot) -> list[str]:
    """Say whether the layout fits, how much slower it is and in which part most, whether that is
    more than prices may be off, and why the search did not try it."""
    if why.layout == chosen.layout:
        return ["It is the chosen plan."]
    assert chosen.prediction is not None
    share = percent(why.slower_s / chosen.prediction.step_time_s, sign=True)
    off = f"prices that the two do not share may be off by {format_seconds(why.error_s)}"
    tie = f"A tie: {off}; run both to decide." if abs(why.slower_s) <= why.error_s else ""
    said = [
        f"It does not fit: {why.misfit}." if why.misfit else "It fits.",
        f"{why.layout.name} {_loses(why.slower_s, why.time)} ({share}).",
        tie or f"{off.capitalize()}.",
    ]
    if why.untried:
        said.append(f"The search does not try it: {why.untried}.")
    elif why.slower_s < 0 and not why.misfit and chosen.num_considered > 1:
        said.append("The search did not try it: it has stages alike, cut over tp by default.")
    return said


def _loses(slower_s: float, time: tuple[Difference, ...]) -> str:
    """Say ``loses 41.0 ms, 33.0 ms of them PART``, or, if the largest part is more than all, what
    takes more and what less."""
    verb, sign = ("loses", 1) if slower_s > 0 else ("gains", -1)
    changes = [(sign * of.more, of.part) for of in time]
    (least_s, least), (most_s, most) = min(changes), max(changes)
    text = f"{verb} {format_seconds(abs(slower_s))}"
    if most_s <= abs(slower_s):
        return f"{text}, {format_seconds(most_s)} of them {most}"
    more, less = ("more", "less") if sign > 0 else ("less", "more")
    return (
        f"{text}: {format_seconds(most_s)} {more} {most}, {format_seconds(-least_s)} {less} {least}"
    )
