"""measure: time operations on every rank, into a run directory."""

import difflib
import importlib
import inspect
import logging
import shlex
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from meshwise import store
from meshwise.patience import Limit, Patience, parsed
from meshwise.spec import Case, Cluster, Plan, RunInfo, Sample, digest, ending
from meshwise.units import some_seconds
from meshwise.verbs import files, job
from meshwise.verbs.detect import look, write

if TYPE_CHECKING:
    from meshwise.probe.cases.follow import Follow
    from meshwise.probe.cases.scope import Scope
    from meshwise.probe.sweep import SweepRequest

log = logging.getLogger("meshwise")

DEFAULT_CLUSTER = "cluster.toml"
KINDS = ("profile", "gemm", "attention", "collectives", "fsdp", "overlap", "health")
QUICK_S = 65.0  # of measuring: starting ranks and the last case take the rest of 90 s
MOST_HUNG = 3  # cases in a row, then the machine is at fault and not a case


def measure(
    what: str = "profile",
    *,
    cluster: Path | str = DEFAULT_CLUSTER,
    model: str | tuple[str, ...] = (),
    dtype: str | None = None,
    budget: str | float | None = None,
    quick: bool = False,
    follow: bool = True,
    sustain: str | float = 10.0,
    timeout: Limit = None,
    setup_timeout: Limit = None,
    resume: bool = False,
    nproc: int | None = None,
    runs: Path | str = "runs",
    dry_run: bool = False,
    **options: Any,
) -> Path | list[tuple[Case, float]]:
    """Measure into a run directory whose path is returned. With ``dry_run`` nothing is written, and
    the cases are returned with about how many seconds each would take.

    ``what``: profile (what prices rest on), gemm, attention, collectives, fsdp, overlap or health.
    ``model``: names of the catalogue or paths of Hugging Face configs whose operations are
    measured. ``dtype``: bf16 on GPUs and fp32 on CPUs unless given. ``budget``: seconds to spend
    (``120s``, ``2m``), all cases by default; ``quick`` is a budget of 65 s, of health fewer cases.
    ``follow``: add sizes where a collective's curve bends, and shapes near the best where a best
    one is searched. ``sustain``: how long a sustained case lasts. ``timeout``,
    ``setup_timeout``: how long ranks wait for each other before a case counts as hung.
    ``resume`` continues the newest run of the same cases on this cluster. ``options``: see
    ``help(meshwise.probe.cases.gemm.cases)`` and its neighbours; where they take records, file
    names do. A missing cluster.toml is detected first.
    """
    if what not in KINDS:
        logs = "; meshwise.verbs.imports.import_files reads logs" if what == "import" else ""
        raise ValueError(f"what = {what!r}: must be one of {', '.join(KINDS)}{logs}")
    listing = importlib.import_module(f"meshwise.probe.cases.{what}").cases
    if quick and "quick" in inspect.signature(listing).parameters:  # it knows what to leave out
        options, quick = options | {"quick": True}, False
    budget_s = QUICK_S if quick else None
    if budget is not None:
        budget_s = some_seconds("budget", budget)
    sustain_s, patience = some_seconds("sustain", sustain), parsed(timeout, setup_timeout)
    machine, size = place(cluster, nproc, keep=not dry_run)
    asked = chosen(listing, what, files.several(model), options)
    cases: list[Case] = listing(scope_of(machine, size, dtype), **asked)
    if not cases:
        raise ValueError(f"measure {what}: these options leave no case; ask for more")
    from meshwise.probe.cases import effort

    if dry_run:
        return [(case, effort.estimate_s(case, machine, sustain_s)) for case in cases]
    job.check_machine(machine, size)
    key = digest(tuple(case.id for case in cases))
    choose = _newest if resume else _created
    run_dir = choose(runs, what, machine, size, key)
    from meshwise.probe.sweep import SweepRequest

    request = SweepRequest(
        cases=tuple(cases), run_dir=str(run_dir), budget_s=budget_s, sustain_s=sustain_s,
        follow=_follow(what, options) if follow else "nothing",
    )  # fmt: skip
    with job.locked(run_dir):
        _sweep(run_dir, request, size, patience, resume=resume)
    return run_dir


def place(cluster: Path | str, nproc: int | None, *, keep: bool) -> tuple[Cluster, int]:
    """The machine, and how many of its devices take part."""
    machine = machine_of(cluster, nproc, keep=keep)
    return machine, job.world_size(nproc, machine, default=machine.num_devices)


def machine_of(path: Path | str, nproc: int | None, *, keep: bool) -> Cluster:
    """The cluster in ``path``. Where cluster.toml is missing it is this machine, all of it, though
    only ``nproc`` ranks may take part now; written if ``keep``."""
    if Path(path).exists() or str(path) != DEFAULT_CLUSTER:
        return files.take(path, Cluster)
    log.info("%s does not exist: looking at this machine", path)
    machine = look(at_least=nproc or 1)
    if keep:
        write(path, machine)
    return machine


def scope_of(cluster: Cluster, size: int, dtype: str | None) -> "Scope":
    """bf16 on GPUs and fp32 on CPUs unless ``dtype`` says otherwise."""
    from meshwise.probe.cases.scope import Scope
    from meshwise.spec.op import DTYPE_BYTES

    if dtype is not None and dtype not in DTYPE_BYTES:
        raise ValueError(f"dtype = {dtype!r}: must be one of {', '.join(DTYPE_BYTES)}")
    usual = "bf16" if cluster.device.kind == "cuda" else "fp32"
    return Scope(cluster, size, dtype or usual)  # type: ignore[arg-type]


def chosen(
    listing: Callable[..., Any], what: str, names: tuple[str, ...], options: dict[str, Any]
) -> dict[str, Any]:
    """The keyword arguments of ``listing``, read from the files that options name; an option that
    this kind of measurement does not have is refused by name."""
    from meshwise.models import catalogue, primus

    read: dict[str, Callable[[Any], Any]] = {
        "configs": primus.read_models,
        "shapes": primus.read_attention_shapes,
        "plan": lambda path: files.take(path, Plan),
        "splits": _read_splits,
        "ranks": _read_ranks,
        "kinds": _read_kinds,
    }
    find = catalogue.find_any if what == "profile" else catalogue.find
    given = options | ({"models": tuple(map(find, names))} if names else {})
    known = list(inspect.signature(listing).parameters)[1:]
    for name, value in list(given.items()):
        if name not in known:
            shown = "model" if name == "models" else name
            said = ", ".join("model" if option == "models" else option for option in known)
            raise ValueError(f"{shown}: measure {what} has no such option; it has {said}")
        if name in read and (name == "kinds" or isinstance(value, str | Path)):
            given[name] = read[name](value)
        if name == "backends":
            given[name] = tuple("" if backend == "torch" else backend for backend in value)
    if {"configs", "shapes"} & given.keys():
        given.setdefault("microbatch_sizes", tuple(range(1, 9)))
    return given


def _read_kinds(names: tuple[str, ...]) -> tuple[str, ...]:
    """Collectives, also as nccl-tests and NCCL spell them: all_reduce_perf, AllReduce."""
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


def _read_splits(path: str | Path) -> tuple[tuple[int, ...], ...]:
    found = store.read(path, tuple[tuple[int, ...], ...])
    if not found:
        raise ValueError(f"{path}: the list is empty; give a list of bytes for each rank")
    return found


def _read_ranks(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(rank) for rank in text.split(","))
    except ValueError:
        raise ValueError(f"ranks = {text!r}: must be numbers, as 0,2") from None


def _follow(what: str, options: dict[str, Any]) -> "Follow":
    if what == "collectives":
        return "bends"
    return "best_shape" if what == "gemm" and options.get("search") else "nothing"


def _created(runs: Path | str, what: str, cluster: Cluster, size: int, key: str) -> Path:
    return job.created(runs, "measure", f"{what}-{cluster.name}", cluster, size, cases=key)


def _newest(runs: Path | str, what: str, cluster: Cluster, size: int, key: str) -> Path:
    """The newest run of the same cases on this cluster; where there is none, the error says which
    command began the newest of other cases or ranks, since its options are what is missing."""
    others = []
    for run_dir in reversed(store.runs_of(runs, f"measure-{what}")):
        info = store.read(run_dir / "run.json", RunInfo)
        if digest(info.cluster) != digest(cluster):
            continue
        if info.provenance.get("cases", key) == key and info.world_size == size:
            files.announce(run_dir, "the newest run")
            return run_dir
        others.append(shlex.join(info.command))
    repeat = f"add --resume to the newest one's, {others[0]}, or " if others else ""
    raise ValueError(
        f"no run of measure {what} with these options on cluster {cluster.name!r} with {size} "
        f"ranks under {runs}; {repeat}start one without --resume"
    )


def _sweep(
    run_dir: Path, request: "SweepRequest", size: int, patience: Patience, *, resume: bool
) -> None:
    """Measure what is not measured yet. A case that hangs is recorded, and ranks that we started
    are started again for the others."""
    import msgspec

    from meshwise import launch
    from meshwise.probe.sweep import CURRENT

    kept = f"what was measured is in {run_dir}, --resume continues"
    if resume and job.leads():
        before = launch.RanksFailed(store.read(run_dir / "run.json", RunInfo).reason)
        if before.hung:  # ranks that a launcher started were not started again
            _record_hung(run_dir, str(before))
    started, restarts_left = time.monotonic(), len(request.cases)
    budget_s = request.budget_s
    while True:
        skip = _measured(run_dir)
        done = all(case.id in skip for case in request.cases) and request.follow == "nothing"
        if done and job.starts():  # ranks of a launcher meet: rank 0's list is the one that counts
            log.info("all %d cases are measured already", len(request.cases))
            info, samples, _ = store.load(run_dir)
            if job.leads() and (info.status, info.reason) != ending(samples):
                store.finish(
                    run_dir, *ending(samples)
                )  # the last case hung, or the end was cut off
            (run_dir / CURRENT).unlink(missing_ok=True)
            return
        left = sum(case.id not in skip for case in request.cases)
        log.info("%d cases on %d ranks, into %s", left, size, run_dir)
        todo = msgspec.structs.replace(request, skip=tuple(sorted(skip)), budget_s=budget_s)
        try:
            with job.recorded(run_dir, kept):
                if job.leads():
                    store.finish(run_dir, "running")
                launch.run(
                    "meshwise.probe.sweep:measure_ranks", todo, nproc=size, patience=patience
                )
            return
        except launch.RanksFailed as failed:
            goes_on = failed.hung and job.starts() and _record_hung(run_dir, str(failed))
            if not (goes_on and restarts_left):
                raise
            restarts_left -= 1
            if request.budget_s is not None:
                budget_s = max(1.0, request.budget_s - (time.monotonic() - started))
            log.warning("%s; the ranks are started again for the other cases", failed)


def _record_hung(run_dir: Path, reason: str) -> bool:
    """Make the case that was in hand a sample; False when there is none, or too many hung."""
    from meshwise.probe.sweep import CURRENT

    current = run_dir / CURRENT
    if not current.exists():
        return False
    try:
        case = store.read(current, Case)
    except ValueError as error:
        log.warning("%s; which case hung is not known", error)
        return False
    finally:
        current.unlink()
    if case.id not in _measured(run_dir):
        store.append(run_dir, Sample(case_id=case.id, case=case, status="hung", reason=reason))
    last = [sample.status for sample in store.load(run_dir)[1][-MOST_HUNG:]]
    return last != ["hung"] * MOST_HUNG


def _measured(run_dir: Path) -> frozenset[str]:
    """The cases that need not be measured again."""
    if not job.leads() and not (run_dir / "run.json").exists():
        return frozenset()  # rank 0's list counts
    _, samples = files.load(run_dir)
    return frozenset(sample.case_id for sample in samples if sample.status != "error")
