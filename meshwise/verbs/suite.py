"""run --suite and --sweep: the cases of Alpa's benchmark one after the other, and their tables.

In: a suite's name. Out: for each case a run directory, the source's console lines and a row of
``{exp_name}.tsv``; of inference a row of ``inference_prof_res.tsv`` besides. A case that crashes,
hangs or runs out of memory is such a row too, and the suite goes on.
"""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, TypeVar

from meshwise import store, suites
from meshwise.patience import USUAL, Patience
from meshwise.spec import Cluster, Plan, Sample
from meshwise.suites import tsv
from meshwise.suites.case import BenchmarkCase
from meshwise.verbs import job, measure, order
from meshwise.verbs.suite_cases import Prepared, prepared, too_large
from meshwise.verbs.suite_results import (
    INFERENCE_TSV,
    CaseResult,
    add_inference,
    failed,
    finished,
    phases,
)

Say = Callable[[str], None]
Listed = tuple[BenchmarkCase, Plan | None, str]
T = TypeVar("T")


class Settings(NamedTuple):
    """The flags of the source's benchmark.py, and ours. ``say`` gets the console lines."""

    num_hosts: int | None = None
    num_devices_per_host: int | None = None
    niter: int = 3
    shard_only: bool = False
    local: bool = False
    profile_driver_time: bool = False
    profile_stage_execution_time: bool = False
    exp_name: str = "default"
    scale_to_fit: bool = False
    lowering: str | None = None
    cluster: Path | str = measure.DEFAULT_CLUSTER
    patience: Patience = USUAL
    runs: Path | str = "runs"
    say: Say = lambda _: None


def run_suite(name: str, settings: Settings) -> list[CaseResult]:
    """Run the cases of a suite for the number of devices that was asked for, by default all.

    A case that can never run so, as a pipeline with ``shard_only``, is recorded as skipped;
    ValueError if that is true of all, or before the first for whatever else is wrong.
    """
    cluster, size = _place(settings)
    _check(name, settings)
    cases = _prepared(name, cluster, size, settings)
    job.check_machine(cluster, size)
    path = Path(f"{settings.exp_name}.tsv")
    results = []
    for case, one in cases:
        if isinstance(one, ValueError):
            settings.say(f"Working on case: {case}")
            found = failed(name, case, size, "skipped", str(one))
        else:
            found = _run_case(name, one, settings)
        settings.say(tsv.line(tsv.COLUMNS, tuple(found.row.values())))
        if job.leads():
            tsv.append(path, tsv.COLUMNS, tuple(found.row.values()))
        results.append(found)
    return results


def listed(name: str, settings: Settings) -> list[Listed]:
    """What a suite would run: each case with its plan, and what was changed or why it cannot.
    ValueError as of ``run_suite``."""
    cluster, size = _place(settings)
    _check(name, settings)
    found: list[Listed] = []
    for case, one in _prepared(name, cluster, size, settings):
        if isinstance(one, ValueError):
            found.append((case, None, str(one)))
        else:
            doubt = too_large(one, _order(name, settings))
            found.append((case, one.plan, ", ".join([*one.changes, *([doubt] if doubt else [])])))
    return found


def run_sweep(name: str, settings: Settings) -> list[CaseResult]:
    """Run a sweep's suite on each of its cluster shapes that is here, as the source's run_exp;
    which are not is said. ValueError if none is."""
    found = _on_each_shape(name, settings, run_suite)
    return [result for of_shape in found.values() for result in of_shape]


def listed_sweep(name: str, settings: Settings) -> dict[int, list[Listed]]:
    """What a sweep would run, by number of devices; ValueError as of ``run_sweep``."""
    return _on_each_shape(name, settings, listed)


def _on_each_shape(
    name: str, settings: Settings, do: Callable[[str, Settings], list[T]]
) -> dict[int, list[T]]:
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
    for num_hosts, num_devices_per_host in suites.SHAPES:
        shape = settings._replace(
            num_hosts=num_hosts,
            num_devices_per_host=num_devices_per_host,
            niter=sweep.niter,
            profile_driver_time=sweep.profile_driver_time,
            profile_stage_execution_time=sweep.profile_stage_execution_time,
        )
        try:
            results[num_hosts * num_devices_per_host] = do(sweep.suite, shape)
        except ValueError as error:
            settings.say(f"{num_hosts} x {num_devices_per_host} devices: {error}")
            reasons.append(error)
    if not results:
        raise reasons[-1]
    return results


def _place(settings: Settings) -> tuple[Cluster, int]:
    """The machine, and how many of its devices take part."""
    asked = job.num_ranks(
        num_hosts=settings.num_hosts, num_devices_per_host=settings.num_devices_per_host
    )
    hosts = settings.num_hosts or 1
    if settings.local and (hosts > 1 or not job.starts()):
        raise ValueError("local: starts the ranks on this host alone; leave it out")
    if hosts > 1 and job.starts():
        raise ValueError(
            f"num_hosts = {hosts}: start this command on every host with torchrun or srun"
        )
    return measure.place(settings.cluster, asked, keep=False)


def _prepared(
    name: str, cluster: Cluster, size: int, settings: Settings
) -> list[tuple[BenchmarkCase, Prepared | ValueError]]:
    """Every case of a suite with its plan, or why it has none; ValueError if none has."""
    found = [
        (
            case,
            prepared(
                suites.kind(name),
                case,
                cluster,
                size,
                shard_only=settings.shard_only,
                scale_to_fit=settings.scale_to_fit,
                lowering=settings.lowering,
            ),
        )
        for case in suites.cases(name, size)
    ]
    refused = [one for _, one in found if isinstance(one, ValueError)]
    if len(refused) == len(found):
        raise refused[0]
    return found


def _check(name: str, settings: Settings) -> None:
    if settings.niter < 2:
        raise ValueError(f"niter = {settings.niter}: must be >= 2, as the first is not counted")
    if not settings.exp_name or "/" in settings.exp_name:
        raise ValueError(f"exp_name = {settings.exp_name!r}: must be a file's name")
    if settings.profile_stage_execution_time and not suites.is_inference(name):
        raise ValueError(
            f"profile_stage_execution_time: {name} trains; it is for the suites of inference"
        )
    if not job.leads():
        return
    tsv.check(Path(f"{settings.exp_name}.tsv"), tsv.COLUMNS)
    if suites.is_inference(name):
        tsv.check(Path(INFERENCE_TSV), tsv.INFERENCE_COLUMNS)


def _run_case(name: str, one: Prepared, settings: Settings) -> CaseResult:
    """Run a case to its end, whatever that is, and say what the source says on the way."""
    from meshwise.launch import RanksFailed

    plan, size, say = one.plan, one.plan.layout.num_devices, settings.say
    say(f"Working on case: {one.case}")
    if one.changes:
        say(f" - Changed: {', '.join(one.changes)}")
    ordered = _order(name, settings)
    if doubt := too_large(one, ordered):
        return failed(name, one.case, size, "skipped", doubt, counts=one.counts)
    slug = f"{name}-{plan.model.name}-{plan.layout.name}"
    run_dir = job.created(settings.runs, "run", slug, plan.cluster, size, plan, suite=name)
    status, reason, samples = "skipped", "rank 0 has it", []
    try:
        order.carry_out(plan, ordered, settings.runs, run_dir=run_dir)
    except RanksFailed as error:
        if not job.starts():
            raise  # the launcher ends all ranks
        status, reason = "hung" if error.hung else "error", str(error)
    else:
        samples = store.load(run_dir)[1] if job.leads() else []
    if samples:
        status, reason = samples[0].status, samples[0].reason
    if status != "ok":
        return failed(name, one.case, size, status, reason, run_dir, one.counts, one.changes)
    return _finished(name, one, samples[0], run_dir, settings)


def _order(name: str, settings: Settings) -> order.Order:
    """What is asked of each case."""
    return order.Order(
        steps=settings.niter - 1,
        warmup=1,
        mode="infer" if suites.is_inference(name) else "train",
        driver_time=settings.profile_driver_time,
        patience=settings.patience,
    )


def _finished(
    name: str, one: Prepared, sample: Sample, run_dir: Path, settings: Settings
) -> CaseResult:
    for line in phases(sample, settings.niter):
        settings.say(line)
    times_s = sample.times_s
    if (
        not settings.profile_driver_time
    ):  # the first iteration was not timed, nor may the second count
        times_s = times_s[suites.warmup_steps(settings.niter) - 1 :]
    if suites.is_inference(name):
        stages_s = add_inference(suites.kind(name), one, sample, times_s)
        if settings.profile_stage_execution_time:
            settings.say(f" - Stage latencies: {tsv.rounded(stages_s, 6)}")
            for trace in run_dir.glob("trace-*.json"):
                settings.say(f" - Trace: {trace}")
    return finished(name, one, sample, times_s, run_dir)
