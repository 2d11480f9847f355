"""``meshwise run``."""

from pathlib import Path

import meshwise
from meshwise.cli.options import ANY, DryRun, Json, Runs, Size
from meshwise.cli.output import DONE, SOME_FAILED, emit
from meshwise.verbs import job


def run(
    plan: str = "plan.json",
    *,
    steps: int | None = None,
    warmup: int | None = None,
    rivals: int = 0,
    check: bool = False,
    data: str | None = None,
    seed: int = 0,
    nccl_trace: bool = False,
    size: Size = ANY,
    runs: Runs = "runs",
    dry_run: DryRun = False,
    json: Json = False,
) -> int:
    """Execute a plan and print predicted beside measured. One new run directory per layout.

    Parameters
    ----------
    plan
        The plan to execute.
    steps
        Training steps to time; 20 on GPUs and 5 on CPUs by default.
    warmup
        Untimed steps before them; 3 on GPUs and 1 on CPUs by default.
    rivals
        Also run this many runners-up.
    check
        Compare the losses of three steps with one device in fp32.
    data
        A file of tokens; by default they are random.
    seed
        Of weights and data.
    nccl_trace
        On the GPUs of one host: compare the collectives that NCCL logs with the plan's.
    """
    done = meshwise.run(
        plan,
        steps=steps,
        warmup=warmup,
        rivals=rivals,
        check=check,
        data=data,
        seed=seed,
        nproc=size.ranks,
        runs=runs,
        nccl_trace=nccl_trace,
        dry_run=dry_run,
    )
    from meshwise.pages import tables
    from meshwise.pages.steps import results

    run_dirs = [path for path in done if isinstance(path, Path)]
    if dry_run:
        plans = [one for one in done if not isinstance(one, Path)]
        emit(plans, [tables.layouts(plans)], json)
        return DONE
    if not job.leads():
        return DONE
    found = results(run_dirs)
    good = all(result.status == "ok" for result in found)
    if not nccl_trace:
        emit(found, tables.steps(found), json)
        return DONE if good else SOME_FAILED
    from meshwise.pages import trace as page
    from meshwise.verbs import trace

    checks = {path.name: trace.read_check(path) for path in run_dirs}
    shown = [page.table(check, f"Plan against trace: {name}") for name, check in checks.items()]
    emit({"steps": found, "nccl_checks": checks}, [*tables.steps(found), *shown], json)
    agree = all(check.agrees is not False for check in checks.values())
    return DONE if good and agree else SOME_FAILED
