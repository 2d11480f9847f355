"""plan --measure-ties: run the layouts that may be as fast as the first, and rank them anew."""

import logging
import time
from pathlib import Path
from statistics import median
from typing import cast

from msgspec.structs import replace

from meshwise import store
from meshwise.launch import RanksFailed
from meshwise.spec import Candidate, Cluster, Plan, TieRun, stages_of
from meshwise.units import format_seconds
from meshwise.verbs import files, world
from meshwise.verbs.run import run

STEPS, WARMUP = 8, 2
log = logging.getLogger("meshwise")


def check(cluster: Cluster, size: int) -> None:
    """Refuse to plan for a machine that is not this one: layouts that tie could not run on it."""
    try:
        world.size(size, cluster, default=1)
        world.check_machine(cluster, size)
    except ValueError as error:
        raise ValueError(
            f"measure_ties: runs layouts on this machine, and it cannot: {error}; or leave "
            "--measure-ties out"
        ) from None


def measured(plan: Plan, seconds: float, out: Path | str) -> Plan:
    """Run the plan and all that ties with it, one after the other, and return the plan of the
    fastest. None begins that would probably end after ``seconds``, but two run always.

    Those that ran rank by the median of their steps. All others' predictions are taken to be off as
    these were, in the median. A layout whose run fails is no candidate any more.
    """
    told = plan.prediction
    assert told is not None
    every = [Candidate(layout=plan.layout, prediction=told), *plan.runners_up]
    tied = [every[0], *[each for each in every[1:] if each.ties]]
    begun, longest_s, found = time.monotonic(), 0.0, list[TieRun]()
    for each in tied if len(tied) > 1 else ():
        before_s = time.monotonic() - begun
        if len(found) > 1 and before_s + longest_s > seconds:
            break
        files.replace(out, _chosen(plan, each))
        found.append(_run(each, out))
        longest_s = max(longest_s, time.monotonic() - begun - before_s)
    log.info("%d of %d layouts that tie ran", len(found), len(tied) if len(tied) > 1 else 0)
    took_s = {one.layout: one.measured_s for one in found}
    off = [one.measured_s / one.told_s for one in found if one.measured_s is not None]
    if found and not off:
        raise ValueError(f"measure_ties: no layout ran: {found[0].note}")

    def expected_s(each: Candidate) -> float:
        usual_s = each.prediction.step_time_s * (median(off) if off else 1.0)
        return took_s.get(each.layout) or usual_s

    ran = [each for each in every if took_s.get(each.layout, 0.0) is not None]
    first, *others = sorted(ran, key=expected_s)
    unsure = [
        replace(
            each,
            ties=first.prediction.ties(each.prediction)
            and not (first.layout in took_s and each.layout in took_s),
        )
        for each in others
    ]
    ties = replace(plan.answers, ties=tuple(found))
    return replace(_chosen(plan, first), runners_up=tuple(unsure), answers=ties)


def _chosen(plan: Plan, of: Candidate) -> Plan:
    stages = stages_of(of.layout, plan.model)
    return replace(plan, layout=of.layout, prediction=of.prediction, stages=stages)


def _run(each: Candidate, plan: Path | str) -> TieRun:
    told_s = each.prediction.step_time_s
    try:
        (run_dir,) = cast("list[Path]", run(plan, steps=STEPS, warmup=WARMUP))
        (sample,) = store.load(run_dir)[1]
    except RanksFailed as error:  # as out of memory
        log.warning("%s did not run: %s", each.layout.name, error)
        return TieRun(layout=each.layout, told_s=told_s, note=str(error))
    if sample.status != "ok":
        return TieRun(layout=each.layout, told_s=told_s, note=sample.reason or sample.status)
    step_s = median(sample.times_s)
    log.info("%s took %s a step", each.layout.name, format_seconds(step_s))
    return TieRun(layout=each.layout, told_s=told_s, measured_s=step_s, run=run_dir.name)
