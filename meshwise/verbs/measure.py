"""measure: time operations on every rank, into a run directory."""

import contextlib
import dataclasses
import difflib
import functools
import importlib
import inspect
import logging
import math
import os
import shlex
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from meshwise import store
from meshwise.launcher import Job
from meshwise.options import described
from meshwise.options.measure import (
    KINDS,
    CollectivesOptions,
    CountedOptions,
    GemmOptions,
    MeasureOptions,
    ProfileOptions,
)
from meshwise.spec import Case, Cluster, Plan, Recipe, RunInfo, digest
from meshwise.spec.record import NonNegative
from meshwise.units import some_seconds
from meshwise.verbs import files, world
from meshwise.verbs.detect import look, write
from meshwise.verbs.recording import Recording

if TYPE_CHECKING:
    from meshwise.probe.cases.follow import Follow
    from meshwise.probe.cases.scope import Scope
    from meshwise.probe.request import SweepRequest

log = logging.getLogger("meshwise")

Splits = tuple[tuple[NonNegative, ...], ...]
DEFAULT_CLUSTER = "cluster.toml"
QUICK_S = 65.0  # seconds of measuring; starting ranks and the last case take the rest of 90 s
MOST_HUNG = 3  # hung cases in a row; then the machine is at fault, not a case


def measure(
    what: str | MeasureOptions = "profile", **options: Any
) -> Path | list[tuple[Case, float]]:
    """Measure into a run directory and return its path. With ``dry_run`` write nothing and return
    the cases, with about how many seconds each would take.

    ``what``: profile (for the prices), gemm, attention, collectives, fsdp, overlap, layer or
    health; or one of their records, with its options. Options that take records also take file
    names. A missing cluster.toml is detected first.
    """
    asked = what if isinstance(what, MeasureOptions) else _asked(what, options)
    budget_s = QUICK_S if asked.quick and asked.what != "health" else None
    if asked.budget is not None:
        budget_s = some_seconds("budget", asked.budget)
    sustain_s = some_seconds("sustain", asked.sustain)
    machine, size = place(asked.cluster, asked.nproc, keep=not asked.dry_run)
    listing = importlib.import_module(f"meshwise.probe.cases.{asked.what}").cases
    cases: list[Case] = listing(scope_of(machine, size, asked.dtype), loaded(asked))
    if not cases:
        said = [f"{name} = {value!r}" for name, value in asked.said().items() if name != "dry_run"]
        raise ValueError(f"{', '.join(said) or asked.what}: no case is left; ask for more")
    counts = _counts(asked)
    key = digest((*(case.id for case in cases), *(str(each) for each in counts.items())))
    old = _newest(asked.runs, asked.what, machine, size, key) if asked.resume else None
    if asked.dry_run:
        from meshwise.probe.cases.effort import estimate_s

        done = _measured(old) if old else frozenset()
        left = [case for case in cases if case.id not in done]
        about_s = functools.partial(estimate_s, cluster=machine, sustain_s=sustain_s, **counts)
        return _within(budget_s, left, about_s)
    world.check_machine(machine, size)
    slug = f"{asked.what}-{machine.name}"
    recording = old or Recording.begin(asked.runs, "measure", slug, machine, size, cases=key)
    from meshwise.probe.request import SweepRequest

    request = SweepRequest(
        cases=tuple(cases), run_dir=str(recording.path), budget_s=budget_s, sustain_s=sustain_s,
        follow=_follow(asked) if asked.follow else "nothing", **counts,
    )  # fmt: skip
    with recording.locked():
        _sweep(recording, request, size, asked)
        retries = 0 if recording.job.launched else getattr(asked, "max_fail_retry", 0)
        for _ in range(retries):
            if failed := _failed(recording):
                log.warning("%d case(s) failed and are measured again", len(failed))
                _sweep(recording, request, size, asked, failed)
    return recording.path


measure.__doc__ = "\n\n".join(
    [f"{inspect.getdoc(measure)}\n\n{described(MeasureOptions)}"]
    + [f"{what}:\n{described(kind, but=MeasureOptions)}" for what, kind in KINDS.items()]
)


def uses_of(asked: ProfileOptions) -> dict[str, str]:
    """Return what each case of a profile is for, by the case's id."""
    from meshwise.probe.cases.profile import with_uses

    machine, size = place(asked.cluster, asked.nproc, keep=False)
    options: Any = loaded(asked)
    return {case.id: use for case, use in with_uses(scope_of(machine, size, asked.dtype), options)}


def _within(
    budget_s: float | None, cases: list[Case], estimate_s: Callable[[Case], float]
) -> list[tuple[Case, float]]:
    """Estimate the seconds of each case, and list those that a sweep would reach in its budget."""
    from meshwise.probe.cases import effort

    found, left_s = list[tuple[Case, float]](), math.inf if budget_s is None else budget_s
    about_s = {case: estimate_s(case) for case in cases}
    todo = list(cases)
    seen = set[tuple[object, ...]]()
    while todo:
        at = effort.next_of(todo, about_s.__getitem__, left_s, seen) if found else 0
        if at is None:
            break
        case = todo.pop(at)
        seen.add(effort.category(case))
        found.append((case, about_s[case]))
        left_s -= about_s[case]
    if len(found) < len(cases):
        log.info(
            "the budget is likely to leave out %d of %d cases", len(cases) - len(found), len(cases)
        )
    return found


def _counts(asked: MeasureOptions) -> dict[str, Any]:
    """Return how often each case is called, as far as the user said it."""
    said = asked.said() if isinstance(asked, CountedOptions) else {}
    return {name: said[name] for name in ("iterations", "warmup") if name in said}


def _asked(what: str, options: dict[str, Any]) -> MeasureOptions:
    """Make the record of a kind of measurement. The error for an unknown option names it."""
    if what not in KINDS:
        logs = "; meshwise.verbs.imports.import_files reads logs" if what == "import" else ""
        raise ValueError(f"what = {what!r}: must be one of {', '.join(KINDS)}{logs}")
    for name in options:
        if name not in vars(KINDS[what]()):
            raise _no_such(name, what)
    return KINDS[what](**options)


def _no_such(name: str, what: str) -> ValueError:
    own = KINDS[what].__mro__[: KINDS[what].__mro__.index(MeasureOptions)]
    names = [name for kind in own for name in kind.__annotations__]
    said = ", ".join([*(["model"] if what != "health" else []), *names])
    return ValueError(f"{name}: measure {what} has no such option; it has {said}")


def place(cluster: Path | str, nproc: int | None, *, keep: bool) -> tuple[Cluster, int]:
    """Return the machine, and how many of its devices take part."""
    machine = machine_of(cluster, nproc, keep=keep)
    return machine, world.size(nproc, machine, default=machine.num_devices)


def machine_of(path: Path | str, nproc: int | None, *, keep: bool) -> Cluster:
    """Read the cluster in ``path``. If cluster.toml is missing, detect all of this machine, even if
    only ``nproc`` ranks take part now, and write it if ``keep``."""
    if Path(path).exists() or str(path) != DEFAULT_CLUSTER:
        return files.take(path, Cluster)
    log.info("%s does not exist: looking at this machine", path)
    machine = look(at_least=nproc or 1)
    if keep:
        write(path, machine)
    return machine


def scope_of(cluster: Cluster, size: int, dtype: str | None) -> "Scope":
    """Make the scope of cases. ``dtype`` defaults to bf16 on GPUs and fp32 on CPUs."""
    from meshwise.probe.cases.scope import Scope
    from meshwise.spec.op import DTYPE_BYTES

    if dtype is not None and dtype not in DTYPE_BYTES:
        raise ValueError(f"dtype = {dtype!r}: must be one of {', '.join(DTYPE_BYTES)}")
    usual = "bf16" if cluster.device.kind == "cuda" else "fp32"
    return Scope(cluster, size, dtype or usual)  # type: ignore[arg-type]


def loaded(asked: MeasureOptions) -> MeasureOptions:
    """Return the record with names replaced by what they stand for: models, contents of files."""
    from meshwise.models import catalogue, primus

    read: dict[str, Callable[[Any], Any]] = {
        "configs": primus.read_models,
        "shapes": primus.read_attention_shapes,
        "plan": lambda path: files.take(path, Plan),
        "splits": splits_of,
        "ranks": _read_ranks,
    }
    if asked.model and asked.what == "health":
        raise _no_such("model", asked.what)
    any_family = asked.what in ("profile", "layer")
    find: Callable[[Any], Any] = catalogue.find_any if any_family else catalogue.find
    given: dict[str, Any] = {"model": tuple(map(find, asked.model))}
    for name, value in vars(asked).items():
        if name == "recipe" and value is not None:
            given[name] = files.record(value, Recipe)
        if name in read and value is not None:
            given[name] = read[name](value) if isinstance(value, str) else _converted(name, value)
        if name == "kinds":
            given[name] = _read_kinds(value)
        if name == "backends":
            given[name] = tuple("" if backend == "torch" else backend for backend in value)
    if {"configs", "shapes"} & given.keys() and not vars(asked)["microbatch_sizes"]:
        given["microbatch_sizes"] = tuple(range(1, 9))
    return dataclasses.replace(asked, **given)


def _converted(name: str, value: Any) -> Any:
    """Check what Python gives in place of a file; one rank may stand alone."""
    from msgspec import ValidationError, convert

    kinds = {
        "configs": dict[str, tuple[Any, int]], "shapes": list[Any], "plan": Plan,
        "splits": Splits, "ranks": tuple[int, ...],
    }  # fmt: skip
    try:
        return convert((value,) if name == "ranks" and type(value) is int else value, kinds[name])
    except ValidationError as error:
        raise ValueError(f"{name} = {value!r:.80}: {error}") from None


def _read_kinds(names: tuple[str, ...]) -> tuple[str, ...]:
    """Parse names of collectives; nccl-tests' and NCCL's too: all_reduce_perf, AllReduce."""
    from meshwise.spec.op import CollectiveKind

    known = {kind.replace("_", ""): kind for kind in get_args(CollectiveKind)}
    found = []
    for name in names:
        plain = name.lower().removesuffix("_perf").replace("_", "").replace("-", "")
        if plain not in known:
            near = difflib.get_close_matches(plain, known, n=1)
            hint = (
                f"did you mean {known[near[0]]}?" if near else f"known: {', '.join(known.values())}"
            )
            raise ValueError(f"kind = {name!r}: is no collective; {hint}")
        found.append(known[plain])
    return tuple(found)


def splits_of(given: Any) -> Splits:
    """Return the bytes from each rank to each other: of a file, or as Python gives them."""
    found = store.read(given, Splits) if isinstance(given, str | Path) else given
    converted: Splits = _converted("splits", found)
    if not converted:
        raise ValueError(f"splits = {given}: the list is empty; give the bytes of each rank")
    return converted


def _read_ranks(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(rank) for rank in text.split(","))
    except ValueError:
        raise ValueError(f"ranks = {text!r}: must be numbers, as 0,2") from None


def _follow(asked: MeasureOptions) -> "Follow":
    if isinstance(asked, CollectivesOptions):
        return "bends"
    return "best_shape" if isinstance(asked, GemmOptions) and asked.search else "nothing"


def _newest(runs: Path | str, what: str, cluster: Cluster, size: int, key: str) -> Recording:
    """Find the newest run of the same cases on this cluster. If there is none, the error shows the
    command of the newest run with other cases or ranks, whose options may be missing here."""
    others = []
    for run_dir in reversed(store.runs_of(runs, f"measure-{what}")):
        info = store.read(run_dir / "run.json", RunInfo)
        if digest(info.cluster.specified) != digest(cluster.specified):
            continue
        if info.provenance.get("cases", key) == key and info.world_size == size:
            files.announce(run_dir, "the newest run")
            return Recording(run_dir, Job.here())
        others.append(shlex.join(info.command))
    repeat = f"add --resume to the newest one's, {others[0]}, or " if others else ""
    raise ValueError(
        f"no run of measure {what} with these options on cluster {cluster.name!r} with {size} "
        f"ranks under {runs}; {repeat}start one without --resume"
    )


def _sweep(
    recording: Recording,
    request: "SweepRequest",
    size: int,
    asked: MeasureOptions,
    again: frozenset[str] = frozenset(),
) -> None:
    """Measure the cases that have no sample yet, and those with the ids ``again``. Record a case
    that hangs. If we started the ranks, start them again for the other cases."""
    import msgspec

    from meshwise import launch
    from meshwise.probe.request import CURRENT

    run_dir, job = recording.path, recording.job
    if asked.resume and job.leads:
        before = launch.RanksFailed(store.read(run_dir / "run.json", RunInfo).reason)
        if before.hung:  # a launcher's ranks were not started again
            _record_hung(recording, str(before))
    started, restarts_left = time.monotonic(), len(request.cases)
    budget_s = request.budget_s
    kept = f"what was measured is in {run_dir}, --resume continues"
    while True:
        skip = _measured(recording) - again
        done = all(case.id in skip for case in request.cases) and request.follow == "nothing"
        if done and not job.launched:  # under a launcher all ranks go on: rank 0 decides
            log.info("all %d cases are measured already", len(request.cases))
            recording.finish()  # the last case hung, or the end was cut off
            (run_dir / CURRENT).unlink(missing_ok=True)
            return
        left = sum(case.id not in skip for case in request.cases)
        log.info("%d cases on %d ranks, into %s", left, size, run_dir)
        todo = msgspec.structs.replace(request, skip=tuple(sorted(skip)), budget_s=budget_s)
        try:
            with recording.watched(kept):
                if job.leads:
                    store.finish(run_dir, "running")
                target = "meshwise.probe.sweep:measure_ranks"
                with _environment(request, asked):
                    launch.run(target, todo, nproc=size, patience=asked.patience)
            return
        except launch.RanksFailed as failed:
            is_ours = failed.hung and not job.launched
            hung = _record_hung(recording, str(failed)) if is_ours else None
            if hung is None or not restarts_left:
                raise
            restarts_left, again = restarts_left - 1, again - {hung}
            if request.budget_s is not None:
                budget_s = max(1.0, request.budget_s - (time.monotonic() - started))
            log.warning("%s; the ranks are started again for the other cases", failed)


def _failed(recording: Recording) -> frozenset[str]:
    """Return the ids of cases that failed or hung."""
    samples = recording.samples().items()
    return frozenset(name for name, sample in samples if sample.status in ("error", "hung"))


@contextlib.contextmanager
def _environment(request: "SweepRequest", asked: MeasureOptions) -> Iterator[None]:
    """Set what libraries must know before the ranks' first communicator, unless it is set. To NCCL:
    nothing runs beside a graph with its calls, as is so between cases, which saves each call in a
    graph some 5 us. To libfabric, with ``efa``: which provider to take."""
    wanted = {"FI_PROVIDER": "efa", "FI_EFA_USE_DEVICE_RDMA": "1"}
    wanted = wanted if getattr(asked, "efa", False) else {}
    if any(case.regime == "graph" for case in request.cases):
        wanted["NCCL_GRAPH_MIXING_SUPPORT"] = "0"
    added = {name: value for name, value in wanted.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            del os.environ[name]


def _record_hung(recording: Recording, reason: str) -> str | None:
    """Record the case under way as hung. Return its id, or None if there is none or if too many
    hung."""
    from meshwise.probe.request import CURRENT

    current = recording.path / CURRENT
    if not current.exists():
        return None
    try:
        case = store.read(current, Case)
    except ValueError as error:
        log.warning("%s; which case hung is not known", error)
        return None
    finally:
        current.unlink()
    if case.id not in _measured(recording):
        recording.append_failed(case, "hung", reason)
    last = [sample.status for sample in store.load(recording.path)[1][-MOST_HUNG:]]
    return None if last == ["hung"] * MOST_HUNG else case.id


def _measured(recording: Recording) -> frozenset[str]:
    """Return the ids of cases that need not be measured again."""
    samples = recording.samples().items()
    return frozenset(case_id for case_id, sample in samples if sample.status != "error")
