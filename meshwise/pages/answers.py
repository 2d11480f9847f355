"""Show the answers of a plan: a table for each, and a sentence that says what it comes to."""

from collections.abc import Callable, Sequence

from meshwise.pages.table import ABSENT, Column, Table, filled, listed, percent
from meshwise.pages.tables import batch, rate_unit
from meshwise.spec import (
    DeviceCount,
    Difference,
    Goodput,
    Plan,
    RefitCost,
    TieRun,
    Varying,
    WhatIf,
    WhyNot,
)
from meshwise.units import format_bytes, format_count, format_seconds

LEAST_BYTES = 1024  # of a difference in memory that is shown


def of(chosen: Plan) -> list[Table]:
    """Return the tables of a plan's answers; none of a plan without a prediction."""
    answers = chosen.answers
    if chosen.prediction is None:
        return []
    return [
        *(_why_not(chosen, why) for why in answers.why_not),
        *filled(_ties(answers.ties), _what_if(chosen, answers.what_if)),
        *filled(_varying(answers.varying), _sizes(chosen), *_compared(chosen)),
        *([_goodput(answers.goodput)] if answers.goodput else []),
        *([_refit(answers.refit)] if answers.refit else []),
        *filled(_bills(chosen)),
    ]


def _ties(found: Sequence[TieRun]) -> Table:
    return listed(
        "Layouts that tied, run on this machine",
        found,
        ("layout", "layout.name"),
        ("predicted", "told_s", format_seconds),
        ("measured", "measured_s", format_seconds),
        ("error", "error", lambda error: percent(error, sign=True)),
        ("note", "note"),
        legend=(
            "Measured: median over steps. Layouts rank by it; those that did not run by their "
            "prediction, over the median of predicted/measured of those that did.",
        ),
    )


def _varying(found: Sequence[Varying]) -> Table:
    return listed(
        "Steps that differ",
        found,
        ("over", "what"),
        ("p50", "p50_s", format_seconds),
        ("p95", "p95_s", format_seconds),
        legend=(
            "Each by the p50 of the slowest rank, all else as in the plan.",
            *(
                "Load: p50 is the step with the mean load, p95 the plan's."
                for one in found
                if one.what.startswith("load")
            ),
        ),
    )


def _goodput(found: Goodput) -> Table:
    failure, saved, each, again = map(
        format_seconds, (found.failure_s, found.checkpoint_s, found.each_s, found.restart_s)
    )
    said = (
        f"{percent(found.share)} of the time trains: a failure each {failure}, a checkpoint of "
        f"{saved} after each {each} of work, which is best, and {again} for a restart."
    )
    return Table("Goodput", (), (), (said,))


def _refit(found: RefitCost) -> Table:
    said = (
        f"Moving the weights to {found.layout.name} takes {format_seconds(found.predicted_s)} or "
        f"more: {format_bytes(found.wire_bytes)} between ranks, {format_bytes(found.max_in_bytes)} "
        f"into the busiest, {format_bytes(found.local_bytes)} within ranks, at {found.rate}. No "
        f"way takes less than {format_seconds(found.bound_s)} ({found.binding})."
    )
    return Table("Refit", (), (), (said,))


def _sizes(chosen: Plan) -> Table:
    """Show the best plan of each count of devices, and what ``tokens`` take on it."""
    answers, workload = chosen.answers, chosen.workload

    def seconds(one: DeviceCount) -> float | None:
        return one.seconds(answers.tokens, workload) if answers.tokens and one.layout else None

    def high(one: DeviceCount) -> float | None:
        return (seconds(one) or 0.0) * one.high_s / one.step_time_s if one.layout else None

    def hours(one: DeviceCount) -> float | None:
        return (seconds(one) or 0.0) * one.num_devices / 3600 if one.layout else None

    def goodput(one: DeviceCount) -> float | None:
        return one.goodput if one.layout else None

    of_all: tuple[Column, ...] = (
        *((("goodput", goodput, percent),) if answers.goodput else ()),
        (f"{format_count(answers.tokens or 0)} {_unit(chosen)} take", seconds, format_seconds),
        ("at most", high, format_seconds),
        ("device hours", hours, _amount),
    )
    lacking = (f"{one.num_devices}: {one.note}." for one in answers.sizes if one.note)
    mine = next((one for one in answers.sizes if one.layout == chosen.layout), None)
    late_s = high(mine) if mine else None
    late = ""
    if answers.deadline_s and late_s and late_s > answers.deadline_s:
        late = "The plan's interval ends behind the deadline: it is met as predicted, not surely."
    size = batch(chosen.model, workload)
    return listed(
        "How many devices",
        answers.sizes,
        ("devices", lambda one: f"{one.num_devices}{' <' * (one is mine)}"),
        ("best layout", "layout.name"),
        ("step", lambda one: one.step_time_s or None, format_seconds),
        *(of_all if answers.tokens else ()),
        legend=(
            *lacking,
            f"<: the plan. Every count has the same batch, {size}.",
            *(_counted(chosen) if answers.tokens else ()),
            *filter(None, [late]),
        ),
        left=2,
    )


def _counted(chosen: Plan) -> tuple[str]:
    """Say by which seconds of a step a training is counted."""
    lost = ", over the goodput" if chosen.answers.goodput else ", of steps alone"
    return (f"Times are by the p50 of a step{lost}.",)


def _amount(number: float) -> str:
    """Show 0.02157, 862.7 and 2,157."""
    return f"{number:,.0f}" if number >= 1000 else f"{number:.4g}"


def _unit(chosen: Plan) -> str:
    """Name what the model is trained on: tokens or images."""
    return rate_unit(chosen.model).removesuffix("/s")


def _bills(chosen: Plan) -> Table:
    told, bills = chosen.prediction, chosen.answers.bills
    assert told is not None
    most = percent(told.high_s / told.step_time_s - 1)
    rates: list[Column] = []
    if any(one.dollars is not None for one in bills):
        rates.append(("dollars", "dollars", _amount))
    if any(one.kwh is not None for one in bills):
        rates.append(("kWh", "kwh", _amount))
    return listed(
        f"What training takes on {chosen.layout.num_devices} device(s)",
        bills,
        (_unit(chosen), "tokens", format_count),
        ("time", "seconds", format_seconds),
        ("device hours", "device_hours", _amount),
        *rates,
        legend=(*_counted(chosen), f"It may be up to {most} more."),
        left=0,
    )


def _compared(chosen: Plan) -> list[Table]:
    """Show the best plan of each batch, or of each back end of attention, that was asked for."""
    rate, answers = rate_unit(chosen.model), chosen.answers
    return [
        listed(
            title,
            found,
            (what, lambda one: f"{one.change}{' ties' * one.ties}"),
            ("best layout", "layout.name"),
            ("step", lambda one: one.step_time_s or None, format_seconds),
            (rate, lambda one: one.tokens_per_s or None, format_count),
            ("of the best", lambda one: one.faster or None, percent),
            legend=(said, *(f"{one.change}: {one.note}." for one in found if one.note)),
            left=2,
        )
        for title, what, found, said in (
            (
                "How large a batch",
                "batch",
                answers.batches,
                f"The first is the plan: most {rate}. Training may take more steps of a smaller "
                "batch, or more tokens with a larger one: that is not predicted.",
            ),
            (
                "Attention by which back end",
                "back end",
                answers.attention,
                f"The first is the plan: most {rate}, or auto where it ties with them. Ties: the "
                "difference to the plan may be nothing but errors of prices.",
            ),
        )
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
    rows = [
        _row(of, part, show)
        for of, parts, show in of_both
        for part in parts
        if part.more and not (of == "memory" and abs(part.more) < LEAST_BYTES)
    ]
    same = len(why.time) + len(why.memory) - len(rows)
    alike = ("Parts of which both have as much, within 1 KiB, are left out.",) * (same > 0)
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
