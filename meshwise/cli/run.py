"""``meshwise run``."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import meshwise
from meshwise.cli import output
from meshwise.cli.options import ANY, Json, Size, alone, flags
from meshwise.cli.output import DONE, SOME_FAILED, emit, on_rank_0
from meshwise.launcher import Job
from meshwise.options import Started
from meshwise.options.run import RunOptions, Suite

if TYPE_CHECKING:
    from meshwise.verbs.suite import Listed

USUAL = Suite()
_ALSO_OF_SUITES = {*vars(Started()), "lowering", "cluster", "driver_time"}


def run(
    asked: Annotated[Suite, flags(Suite)] = USUAL, *, size: Size = ANY, json: Json = False
) -> int:
    """Execute a plan, a model in a layout, or the cases of a suite, and print what was measured,
    beside the prediction if there is one. Makes a new run directory for each layout."""
    asked = dataclasses.replace(asked, nproc=size.ranks, num_hosts=size.num_hosts or 1)
    of_suites = vars(Suite()).keys() - vars(RunOptions()).keys()
    given = asked.said()
    if asked.list_suites:
        alone("--list-suites", given.keys() - {"list_suites", "num_hosts"})
        return _list_suites(json)
    if asked.suite is not None or asked.sweep is not None:
        return _benchmark(asked, size, json)
    if odd := [name for name in given if name in of_suites - {"num_hosts"}]:
        which = "--suite" if odd[0] == "cases" else "--suite or --sweep"
        raise ValueError(f"{odd[0]}: only suites have it; give {which}, or leave it out")
    return _shown(meshwise.run(asked), asked.nccl_trace, json)


def _refuse_beside_suites(asked: Suite, size: Size) -> None:
    """Refuse options that a suite or a sweep sets itself; the error names them."""
    if asked.suite is not None and asked.sweep is not None:
        raise ValueError(f"--sweep {asked.sweep}: runs a suite of its own; leave out --suite")
    given, of_runs = asked.said(), vars(RunOptions()).keys() - _ALSO_OF_SUITES
    odd = [name for name in given if name in of_runs]
    if asked.sweep is not None:
        odd += [name for name in ("niter", "profile_stage_execution_time") if name in given]
        odd += ["profile_driver_time"] * asked.driver_time + ["case"] * bool(asked.cases)
        odd += [name for name, number in size.counts.items() if number is not None]
    if odd:
        named = ", ".join("the plan" if n == "plan" else "--" + n.replace("_", "-") for n in odd)
        what = "--suite" if asked.sweep is None else "--sweep"
        raise ValueError(f"{what} has its own; leave out {named}")


def _shown(done: list[Any], nccl_trace: bool, json: bool) -> int:
    """Print the runs' results, or the plans of a dry run."""
    from meshwise.pages import tables

    run_dirs = [path for path in done if isinstance(path, Path)]
    if len(run_dirs) < len(done):
        emit(done, tables.dry_run(done), json)
        return DONE
    return _results(run_dirs, nccl_trace, json)


@on_rank_0
def _results(run_dirs: list[Path], nccl_trace: bool, json: bool) -> int:
    from meshwise.pages import steps

    found = steps.results(run_dirs)
    good = all(result.status == "ok" for result in found)
    if not nccl_trace:
        emit(found, steps.tables(found), json)
        return DONE if good else SOME_FAILED
    from meshwise.pages import show
    from meshwise.verbs import trace

    checks = {path.name: trace.read_check(path) for path in run_dirs}
    tables = steps.tables(found)
    for name, check in checks.items():
        tables += show.trace(check, f"Plan against trace: {name}")
    emit({"steps": found, "nccl_checks": checks}, tables, json)
    agree = all(check.agrees is not False for check in checks.values())
    return DONE if good and agree else SOME_FAILED


def _benchmark(asked: Suite, size: Size, json: bool) -> int:
    """Run a suite or a sweep, or list what it would run."""
    from meshwise.spec.run import FAILED
    from meshwise.verbs import suite

    def say(line: str) -> None:
        if Job.here().leads and not json:
            output.say(line)

    _refuse_beside_suites(asked, size)
    do: Any = suite.listed if asked.dry_run else suite.run_suite
    if asked.sweep is not None:
        found = suite.swept(asked.sweep, asked, say, do)
    else:
        assert asked.suite is not None
        found = {0: do(asked.suite, asked, say)}
    if asked.dry_run:
        return _list_cases([cases for cases in found.values() if cases], json)
    results = [result for of_size in found.values() for result in of_size]
    if json:
        emit(results, [], json)
    return SOME_FAILED if {*FAILED} & {result.status for result in results} else DONE


def _list_suites(json: bool) -> int:
    from meshwise import suites
    from meshwise.pages.table import columns, listed

    found: list[dict[str, Any]] = [
        {"suite": name, "devices": _sizes_of(name), "lacks": suites.missing(name)}
        for name in suites.names()
    ]
    swept = [
        {"sweep": one.name, "suite": one.suite, "niter": one.niter,
         "lacks": suites.missing(one.suite)}
        for one in suites.sweeps()
    ]  # fmt: skip
    devices = {"devices": lambda one: ", ".join(map(str, one["devices"])) or None}
    tables = [
        listed(
            "Suites",
            found,
            *columns(str, {"suite": "suite", **devices, "": "lacks"}),
            legend=("devices: the numbers of devices that a suite has cases for.",),
            left=3,
        ),
        listed("Sweeps", swept, *columns(str, "sweep suite niter"), *columns(str, {"": "lacks"}),
               left=4),
    ]  # fmt: skip
    emit({"suites": found, "sweeps": swept}, tables, json)
    return DONE


def _sizes_of(name: str) -> list[int]:
    from meshwise import suites

    return [] if suites.kind(name) == "unet" else list(suites.device_counts(name))


def _list_cases(found: "list[list[Listed]]", json: bool) -> int:
    """Print the cases of each list in ``found``. In each list at least one case has a plan."""
    from meshwise.pages.table import columns, listed

    document, tables = [], []
    for cases in found:
        size = next(plan.layout.num_devices for *_, plan, _ in cases if plan is not None)
        document += [
            {"devices": size, "number": number, "case": str(case), "plan": plan, "note": note}
            for number, case, plan, note in cases
        ]
        ends = "" if len(cases) == 1 else "s", "" if size == 1 else "s"
        title = f"{len(cases)} case{ends[0]} on {size} device{ends[1]}; nothing was run"
        plans = {"case": lambda row: str(row[0]),
                 "model": lambda row: row[2] and row[2].model.name,
                 "layout": lambda row: row[2] and row[2].layout.name}  # fmt: skip
        note = ("changed, or refused", lambda row: row[3] or "as it is")
        tables.append(listed(title, cases, *columns(str, plans), note, left=4))
    emit(document, tables, json)
    return DONE
