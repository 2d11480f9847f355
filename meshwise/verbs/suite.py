"""run --suite and --sweep: the cases of Alpa's benchmark one after the other, and their tables.

In: a suite's name. Out: for each case a run directory, the source's console lines and a row of
``{exp_name}.tsv``; for inference also a row of ``inference_prof_res.tsv``. A case that crashes,
hangs or runs out of memory gets a row too, and the suite goes on.
"""

import dataclasses
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

from meshwise import store, suites
from meshwise.launcher import Job
from meshwise.options.run import Suite
from meshwise.spec import Cluster, Plan, Sample
from meshwise.suites import tsv
from meshwise.suites.case import BenchmarkCase
from meshwise.verbs import measure, suite_search, world
from meshwise.verbs.run import carry_out, new_run
from meshwise.verbs.suite_cases import Prepared, prepared, too_large
from meshwise.verbs.suite_results import INFERENCE_TSV, CaseResult, add_inference, phases, result

Say = Callable[[str], None]  # gets the console lines
Listed = tuple[int, BenchmarkCase, Plan | None, str]
T = TypeVar("T")
USUAL_ITERATIONS = 3


def silent(_: str) -> None:
    """Print nothing."""


def run_suite(name: str, asked: Suite, say: Say = silent) -> list[CaseResult]:
    """Run the cases of a suite for the number of devices asked for, by default all.

    A case that can never run so, as a pipeline with ``shard_only``, is recorded as skipped. Raise
    ValueError if no case can run, or for any other fault, before the first case starts.
    """
    cluster, size = _place(asked)
    _check(name, asked)
    cases = _prepared(name, cluster, size, asked)
    world.check_machine(cluster, size)
    path = Path(f"{asked.exp_name}.tsv")
    results = []
    for case, one in cases:
        if isinstance(one, ValueError):
            say(f"Working on case: {case}")
            found = result(name, case, size, status="skipped", reason=str(one))
        else:
            found = _run_case(name, one, asked, say)
        say(tsv.line(found.row))
        if Job.here().leads:
            tsv.append(path, found.row)
        results.append(found)
    return results


def listed(name: str, asked: Suite, say: Say = silent) -> list[Listed]:
    """List what a suite would run: each case with its number, its plan and its changes, or why it
    cannot run. Raise ValueError as ``run_suite`` does."""
    cluster, size = _place(asked)
    _check(name, asked)
    found: list[Listed] = []
    prepared = _prepared(name, cluster, size, asked)
    for number, (case, one) in zip(asked.cases or count(), prepared, strict=False):
        if isinstance(one, ValueError):
            found.append((number, case, None, str(one)))
        else:
            doubt = too_large(one, _timed(name, asked))
            changes = ", ".join([*one.changes, *([doubt] if doubt else [])])
            found.append((number, case, one.plan, changes))
    return found


def swept(
    name: str, asked: Suite, say: Say, do: Callable[[str, Suite, Say], list[T]]
) -> dict[int, list[T]]:
    """Call ``do`` (``run_suite`` or ``listed``) for a sweep's suite on each cluster shape, like the
    source's run_exp. Report shapes that cannot run here; raise ValueError if none can. Return
    results by number of devices."""
    sweep = next((sweep for sweep in suites.sweeps() if sweep.name == name), None)
    if sweep is None:
        known = ", ".join(sweep.name for sweep in suites.sweeps())
        raise ValueError(f"sweep = {name!r}: must be one of {known}")
    if lacks := suites.missing(sweep.suite):
        raise ValueError(
            f"sweep = {name!r}: no case of {sweep.suite} can run ({lacks}); take another"
        )
    results: dict[int, list[T]] = {}
    reasons: list[ValueError] = []
    for num_hosts, num_devices_per_host in suites.shapes():
        size = num_hosts * num_devices_per_host
        shape = dataclasses.replace(
            asked,
            nproc=size,
            num_hosts=num_hosts,
            niter=sweep.niter,
            driver_time=sweep.profile_driver_time,
            profile_stage_execution_time=sweep.profile_stage_execution_time,
        )
        try:
            results[size] = do(sweep.suite, shape, say)
        except ValueError as error:
            say(f"{num_hosts} x {num_devices_per_host} devices: {error}")
            reasons.append(error)
    if not results:
        raise reasons[-1]
    return results


def _place(asked: Suite) -> tuple[Cluster, int]:
    """Return the machine, and how many of its devices take part."""
    hosts, launched = asked.num_hosts, Job.here().launched
    if asked.local and (hosts > 1 or launched):
        raise ValueError("local: starts the ranks on this host alone; leave it out")
    if hosts > 1 and not launched:
        raise ValueError(
            f"num_hosts = {hosts}: start this command on every host with torchrun or srun"
        )
    return measure.place(asked.cluster, asked.nproc, keep=False)


def _prepared(
    name: str, cluster: Cluster, size: int, asked: Suite
) -> list[tuple[BenchmarkCase, Prepared | ValueError]]:
    """List the cases of a suite that are asked for, each with its plan or why it has none.
    ValueError if none has one, or there is no such case."""
    kind = suites.kind(name)
    cases = [suite_search.asking(case, asked) for case in chosen(name, size, asked)]
    searching = any(case.parallel_mode == "search" for case in cases)
    known = suite_search.prices(cluster, asked) if searching else None
    found = [(case, prepared(kind, case, cluster, size, asked, known)) for case in cases]
    refused = [one for _, one in found if isinstance(one, ValueError)]
    if len(refused) == len(found):
        raise refused[0]
    return found


def chosen(name: str, size: int, asked: Suite) -> Sequence[BenchmarkCase]:
    """Return the cases of a suite that are asked for. ValueError if there is none for ``size``
    devices, or not that one."""
    known = suites.cases(name, size)
    if wrong := [number for number in asked.cases if number >= len(known)]:
        most = len(known) - 1
        raise ValueError(f"case = {wrong[0]}: {name} has cases 0 to {most} for {size} devices")
    return [known[number] for number in asked.cases] or known


def _num_iterations(asked: Suite) -> int:
    return USUAL_ITERATIONS if asked.niter is None else asked.niter


def _check(name: str, asked: Suite) -> None:
    if _num_iterations(asked) < 2:
        raise ValueError(f"niter = {asked.niter}: must be >= 2, as the first is not counted")
    if not asked.exp_name or "/" in asked.exp_name:
        raise ValueError(f"exp_name = {asked.exp_name!r}: must be a file's name")
    if asked.profile_stage_execution_time and not suites.is_inference(name):
        raise ValueError(
            f"profile_stage_execution_time: {name} trains; it is for the suites of inference"
        )
    if asked.space and suites.is_inference(name):
        raise ValueError(f"space: {name} infers, and searches are for training; leave it out")
    if not Job.here().leads:
        return
    tsv.check(Path(f"{asked.exp_name}.tsv"), tsv.COLUMNS)
    if suites.is_inference(name):
        tsv.check(Path(INFERENCE_TSV), tsv.INFERENCE_COLUMNS)


def _run_case(name: str, one: Prepared, asked: Suite, say: Say) -> CaseResult:
    """Run a case, which may fail, and print the lines that Alpa's benchmark would print."""
    from meshwise.launch import RanksFailed

    plan, size, niter = one.plan, one.plan.layout.num_devices, _num_iterations(asked)
    say(f"Working on case: {one.case}")
    if one.changes:
        say(f" - Changed: {', '.join(one.changes)}")
    timed = _timed(name, asked)
    if doubt := too_large(one, timed):
        return result(name, one.case, size, one, status="skipped", reason=doubt)
    recording = new_run(plan, timed, suite=name)
    run_dir = recording.path
    status, reason, samples = "skipped", "rank 0 has it", []
    try:
        carry_out(plan, timed, recording)
    except RanksFailed as error:
        if recording.job.launched:
            raise  # a launcher ends all ranks
        status, reason = "hung" if error.hung else "error", str(error)
    else:
        samples = store.load(run_dir)[1] if recording.leads else []
    if samples:
        status, reason = samples[0].status, samples[0].reason
    if status != "ok":
        return result(name, one.case, size, one, run_dir=run_dir, status=status, reason=reason)
    for line in phases(samples[0], niter):
        say(line)
    return _finished(name, one, samples[0], run_dir, asked, say)


def _timed(name: str, asked: Suite) -> Suite:
    """Return the options for each case's run."""
    mode: Any = "infer" if suites.is_inference(name) else "train"
    return dataclasses.replace(asked, mode=mode, steps=_num_iterations(asked) - 1, warmup=1)


def _finished(
    name: str, one: Prepared, sample: Sample, run_dir: Path, asked: Suite, say: Say
) -> CaseResult:
    times_s = sample.times_s
    if not asked.driver_time:  # the first was not timed; the second may be warm-up too
        times_s = times_s[suites.warmup_steps(_num_iterations(asked)) - 1 :]
    if suites.is_inference(name):
        stages_s = add_inference(suites.kind(name), one, sample, times_s)
        if asked.profile_stage_execution_time:
            say(f" - Stage latencies: {tsv.rounded(stages_s, 6)}")
            for trace in run_dir.glob("trace-*.json"):
                say(f" - Trace: {trace}")
    peak: Any = sample.metrics.get("peak_bytes")
    size = one.plan.layout.num_devices
    return result(name, one.case, size, one, run_dir=run_dir, times_s=times_s, peak_bytes=peak)
