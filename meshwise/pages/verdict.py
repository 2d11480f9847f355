"""Say in words what a report comes to: the cluster, the layout to run, how sure that is, problems.

In: the contents of a page. Out: an answer to each of four questions, problems, facts. The chosen
plan wins against a layout that ran if its launches are faster by ``stats.compare``, and loses if
they are slower; else the two cannot be told apart.
"""

import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import Literal, NamedTuple

from meshwise import stats
from meshwise.pages import collectives, faults, tables
from meshwise.pages.prices import doubts
from meshwise.pages.samples import clocks, software
from meshwise.pages.steps import StepResult
from meshwise.pages.table import grouped, interval, percent
from meshwise.spec import Cluster, Costs, Plan, RunInfo, Sample
from meshwise.spec.phases import PhaseSpan
from meshwise.spec.run import FAILED, changes
from meshwise.units import format_bytes, format_count, format_rate, format_seconds

Tone = Literal["good", "unsure", "bad", ""]
Run = tuple[RunInfo, tuple[Sample, ...]]
POWER_CAP = "power cap"  # a GPU at it works as intended


class Contents(NamedTuple):
    """The content of a page. ``results``: runs of the plan's model. ``runs``: all runs shown.
    ``spans``: the profiled step of runs that have one, by run."""

    plan: Plan | None
    costs: Costs | None
    results: tuple[StepResult, ...]
    runs: tuple[Run, ...]
    spans: Mapping[str, tuple[PhaseSpan, ...]] = {}

    @property
    def clusters(self) -> list[Cluster]:
        """The clusters on the page, each name once."""
        found = [one.cluster for one in (self.plan, self.costs) if one is not None]
        found += [result.plan.cluster for result in self.results]
        found += [info.cluster for info, _ in self.runs]
        return list({one.name: one for one in reversed(found)}.values())[::-1]


class Answer(NamedTuple):
    question: str
    said: tuple[str, ...]
    tone: Tone = ""


class Concern(NamedTuple):
    """``where``: what it concerns: a run's id, "plan", "prices" or "results"."""

    where: str
    what: str


def answers(contents: Contents, found: Sequence[Concern]) -> list[Answer]:
    """Answer the four questions of a first screen. ``found``: the page's problems."""
    wrong = Answer("What is wrong here?", ("Nothing that was recorded.",), "good")
    if found:
        said = tuple(dict.fromkeys(one.what for one in found))
        grave = any(one.where not in ("plan", "prices") for one in found)
        wrong = wrong._replace(said=said, tone="bad" if grave else "unsure")
    which = Answer("What is this cluster?", tuple(map(_cluster, contents.clusters[:4])))
    if contents.plan is None and not contents.results:
        return [which, wrong]
    return [which, *_choice(contents), wrong]


def _cluster(one: Cluster) -> str:
    hosts, device = one.num_hosts, one.device
    links = (f"{t.name} {format_rate(t.bytes_per_s, 'B/s')}" for t in one.tiers if t.bytes_per_s)
    joined = ", ".join(links)
    return (
        f"{hosts} host{'s' * (hosts > 1)} with {one.num_devices_per_host} x {device.name}, "
        f"{format_bytes(device.memory_bytes)} each" + f"; each way {joined}" * bool(joined) + "."
    )


def _choice(contents: Contents) -> list[Answer]:
    """Say what to run, and how sure that is."""
    plan, ran = contents.plan, mine(contents)
    question, sure = "What should I run?", "How sure is that?"
    if plan is None:
        best = min(
            (one for one in contents.results if one.time), default=None,
            key=lambda one: one.time.measured if one.time else 0.0,
        )  # fmt: skip
        if best is None or best.time is None:
            return [Answer(question, ("No step was measured.",), "bad")]
        step = format_seconds(best.time.measured)
        said = f"{best.plan.layout.name}: {step}, the fastest that ran. `meshwise plan` searches."
        return [Answer(question, (said,)), Answer(sure, _within(contents.results))]
    told, layout = plan.prediction, plan.layout.name
    if told is None:
        return [Answer(question, (f"{layout} was given, not priced.",))]
    memory = f"{format_bytes(told.peak_memory_bytes)} of {format_bytes(plan.cluster.usable_bytes)}"
    said = (
        f"{layout}: {format_seconds(told.step_time_s)} a step, {format_count(told.tokens_per_s)} "
        f"{tables.rate_unit(plan.model)}, {memory} a device; predicted to be the fastest of "
        f"{plan.num_considered:,} layouts."
    )
    ties = sum(one.ties for one in plan.runners_up)
    tied = (f"On paper it ties with {ties} of the next {len(plan.runners_up)}.",) * bool(ties)
    return [Answer(question, (said, *tied)), _certainty(contents, ran)._replace(question=sure)]


def mine(contents: Contents) -> StepResult | None:
    """Return the last run of the chosen layout that has a time."""
    plan = contents.plan
    ran = [one for one in contents.results if plan and one.plan.layout == plan.layout]
    return next((one for one in reversed(ran) if one.time and one.mode == "train"), None)


def _certainty(contents: Contents, ran: StepResult | None) -> Answer:
    plan = contents.plan
    assert plan is not None and plan.prediction is not None
    told = plan.prediction
    if ran is None or ran.time is None:
        half = percent((told.high_s - told.low_s) / 2 / told.step_time_s)
        tier = f", {tables.TIERS[told.tier]}" if told.tier else ""
        between = interval(told.low_s, told.high_s)
        said = f"It has not been run. The prediction's interval is {between} (±{half}{tier})."
        return Answer("", (said, *_within(contents.results)), "unsure")
    time, tone = ran.time, "unsure"
    first = f"It ran: {format_seconds(time.measured)} a step."
    if time.low is not None and time.high is not None:
        place = "inside" if time.within else "OUTSIDE"
        first = (
            f"It ran: {format_seconds(time.measured)} a step, {place} the interval told before, "
            f"{interval(time.low, time.high)} (error {percent(time.error, sign=True)})."
        )
    won, level, lost = _rivals(contents, ran)
    if lost:
        tone, name = "bad", max(lost, key=lost.__getitem__)
        second = f"It LOST: {name} ran {percent(lost[name])} faster."
    elif won or level:
        tone = "unsure" if level or time.within is False else "good"
        words = [f"won against {len(won)}"] * bool(won)
        words += [f"cannot be told apart from {len(level)} (more launches tell)"] * bool(level)
        second = f"Of {len(won) + len(level) + 1} layouts that ran, it {' and '.join(words)}."
    else:
        second = "No rival ran; `meshwise run plan.json --rivals 2` runs some."
    again = told.step_time_s != time.predicted and time.predicted is not None
    made = "plan.json was made anew since; the first line is what it says now."
    rest = (*_within(contents.results), *(made,) * again, *_clocks(contents))
    return Answer("", (f"{first} {second}", *rest), "bad" if lost else tone)  # type: ignore[arg-type]


def _rivals(contents: Contents, ran: StepResult) -> tuple[list[str], list[str], dict[str, float]]:
    """Return the layouts that the chosen one beat, those it cannot be told apart from, and by which
    share of its time others were faster. Launches of a layout count together."""
    times = {info.run_id: step_times(samples) for info, samples in contents.runs}
    trained = [one for one in contents.results if one.mode == "train" and times.get(one.run_id)]
    launches = grouped(trained, lambda one: one.plan.layout.name)
    mine = [times[one.run_id] for one in launches.pop(ran.plan.layout.name, [])]
    won, level, lost = list[str](), list[str](), dict[str, float]()
    for name, theirs in launches.items() if mine else ():
        found = stats.compare(mine, [times[one.run_id] for one in theirs])
        if found.verdict == "slower":
            won.append(name)
        elif found.verdict == "faster":
            lost[name] = 1 - found.ratio
        else:
            level.append(name)
    return won, level, lost


def step_times(samples: Sequence[Sample]) -> tuple[float, ...]:
    """Return the times of a run's steps."""
    return next((one.times_s for one in samples if one.status == "ok"), ())


def _within(results: Sequence[StepResult]) -> tuple[str, ...]:
    """Say how many measured steps are inside their intervals, and how far predictions were off."""
    judged = [one.time for one in results if one.time and one.time.error is not None]
    if len(judged) < 2:
        return ()
    inside = sum(one.within is True for one in judged)
    mean = percent(fmean(abs(one.error or 0.0) for one in judged))
    return (
        f"{inside} of {len(judged)} measured steps are inside their intervals; mean error {mean}.",
    )


def _clocks(contents: Contents) -> tuple[str, ...]:
    samples = [sample for _, measured in contents.runs for sample in measured]
    gpus = any(info.cluster.device.kind == "cuda" for info, _ in contents.runs)
    return (f"Clocks: {clocks(samples)}.",) * (gpus and bool(samples))


def problems(contents: Contents) -> list[Concern]:
    """List what is wrong, most grave first: results, runs, the machine, prices, the plan."""
    plan, costs = contents.plan, contents.costs
    notes = tables.warned(plan.prediction.notes) if plan and plan.prediction else []
    found = [
        *_missed(contents.results),
        *(one for run in contents.runs for one in _of_run(*run)),
        *_busy(contents.runs),
        *_mixed(contents.runs),
        *(Concern("prices", line) for line in (doubts(costs) if costs else ())),
        *(Concern("plan", f"{line}.") for line in notes),
    ]
    return list(dict.fromkeys(found))


def _missed(results: Sequence[StepResult]) -> Iterator[Concern]:
    """Yield the measured steps outside their intervals, in a sentence for all."""
    judged = [one for one in results if one.time and one.time.error is not None]
    outside = [one for one in judged if one.time and one.time.within is False]
    if outside:
        worst = max(outside, key=lambda one: abs(one.time.error or 0.0) if one.time else 0.0)
        assert worst.time is not None
        error = percent(worst.time.error, sign=True)
        yield Concern(
            "results",
            f"{len(outside)} of {len(judged)} measured steps are outside the prediction's "
            f"interval; worst: {worst.plan.layout.name}, {error}.",
        )
    for one in results:
        if one.time is None:
            yield Concern("results", f"{one.plan.layout.name} was not measured: {one.reason}.")


def _of_run(info: RunInfo, samples: Sequence[Sample]) -> Iterator[Concern]:
    """Yield what is wrong with a run: its end, its host, clocks, failures, links."""
    where = info.run_id
    if info.status not in ("complete", "running"):
        yield Concern(where, f"{where} is {info.status}: {info.reason or 'no reason was kept'}.")
    elif failed := Counter(one.status for one in samples if one.status in FAILED):
        told = ", ".join(f"{count} {status}" for status, count in failed.items())
        yield Concern(where, f"{where}: {told} of {len(samples)} cases.")
    slowed = [{r for state in one.after for r in state.throttle} - {POWER_CAP} for one in samples]
    if any(slowed):
        names = ", ".join(sorted(set().union(*slowed)))
        count = sum(map(bool, slowed))
        yield Concern(where, f"Clocks were lowered in {count} cases of {where}: {names}.")
    if "-measure-health-" in where:
        for one in faults.findings(info, samples, None):
            if one.severity == "fault":
                yield Concern(where, f"{one.where}: {one.what}, {one.evidence}.")
    else:
        for pair, excess in collectives.odd_pairs(collectives.sends(samples)).items():
            more = percent(excess, sign=True)
            yield Concern(where, f"Slow link from rank {pair[0]} to {pair[1]}: {more} time.")
    for doubt in (info.provenance.get("imported") or {}).get("warnings", ()):
        yield Concern(where, f"{doubt}.")


def _busy(runs: Sequence[Run]) -> list[Concern]:
    """Say in one sentence how many runs began on a busy host."""
    found = {info.run_id: info for info, _ in runs if info.busy}
    worst = max(found.values(), key=lambda info: info.provenance["host_load"], default=None)
    count = f"{len(found)} of {len(runs)} run{'s' * (len(runs) > 1)}"
    said = f"The host was busy in {count}: {worst.busy if worst else ''}, in the worst."
    return [Concern(where, said) for where in found]


def _mixed(runs: Sequence[Run]) -> Iterator[Concern]:
    """Yield which versions differ between runs of one cluster."""
    for of in grouped(runs, lambda run: run[0].cluster.name).values():
        first, *others = (info.versions for info, _ in of)
        changed = dict.fromkeys(filter(None, (changes(first, other) for other in others)))
        for line in changed:
            yield Concern(of[0][0].run_id, f"Runs differ in their versions: {line}.")


def facts(contents: Contents) -> list[tuple[str, str]]:
    """Return date, machine, software and command of the runs, or what a plan rests on."""
    infos = sorted((info for info, _ in contents.runs), key=lambda info: info.started)
    if not infos:
        known = contents.plan.versions if contents.plan else {}
        return [("priced under", ", ".join(f"{n} {v}" for n, v in known.items()))] if known else []
    days = list(dict.fromkeys(info.started[:16].replace("T", " ") for info in infos))
    last = days[-1].removeprefix(days[0][:11])
    ends = days[0] if len(days) == 1 else f"{days[0]} to {last}"
    devices = dict.fromkeys(
        f"{info.cluster.num_devices} x {info.cluster.device.name}" for info in infos
    )
    found = {
        "measured": f"{ends} UTC, {len(infos)} run{'s' * (len(infos) > 1)}",
        "machine": "; ".join(devices),
        "software": "; ".join(dict.fromkeys(filter(None, map(software, infos)))),
        "command": shlex.join(infos[-1].command),
    }
    return [(name, text) for name, text in found.items() if text]
