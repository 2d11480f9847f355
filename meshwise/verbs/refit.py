"""refit: move synthetic weights between two layouts, check every element, time it.

One run directory for all scenarios, methods and modes asked for; each is a case and is measured in
freshly started ranks, since a process cannot change its back end of symmetric memory. The live
thing, for a training loop, is ``meshwise.Refit``.
"""

import logging
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import msgspec

from meshwise import store
from meshwise.files import append_line, write_whole
from meshwise.models import catalogue
from meshwise.models.decoder import num_parameters
from meshwise.pages import refit as page
from meshwise.pages import svg
from meshwise.patience import Limit, Patience, parsed
from meshwise.probe.cases import refit as cases
from meshwise.spec import DTYPE_BYTES, Case, Cluster, Resharding, Sample, ending
from meshwise.spec.label import label
from meshwise.spec.op import Dtype
from meshwise.spec.refit import Forecast, Mode, Order, Scenario, Verify
from meshwise.text import plain
from meshwise.units import parse_bytes
from meshwise.verbs import files, forecast, job, measure, memory

log = logging.getLogger("meshwise")

MOST_RANKS = 4096  # that a plan takes a minute for, not hours
MOST_BYTES = 2**50  # of a cap, and of a model
LAPTOP = "h200-hgx"  # of a dry run, where no cluster is named or cluster.toml has no links


def refit(
    *scenario: str,
    model: str | None = None,
    sizes: Mapping[str, Any] | None = None,
    train: Mapping[str, int] | None = None,
    infer: Mapping[str, int] | None = None,
    dtype: str | None = None,
    orders: tuple[str, str] = ("megatron", "engine"),
    mode: str | None = None,
    method: str = "auto",
    cap: str | int = "512MiB",
    verify: str = "hash",
    atomic: bool = False,
    changed: float | None = None,
    place: bool = False,
    check: bool = True,
    warmup: int = 2,
    iterations: int = 10,
    rate: str | float | None = None,
    cluster: Path | str = measure.DEFAULT_CLUSTER,
    nproc: int | None = None,
    timeout: Limit = None,
    setup_timeout: Limit = None,
    runs: Path | str = "runs",
    output_dir: Path | str | None = None,
    dry_run: bool = False,
    figure: Path | str | None = None,
) -> Path | list[Forecast]:
    """Measure into a run directory whose path is returned; with ``dry_run`` only say what would
    move: a ``Forecast`` for each scenario and mode, without torch.

    ``scenario``: names, or numbers of the menu; without one ``train`` and ``infer`` give the
    degrees (tp, pp, ep, etp, fsdp, replicas) of a small GPT or of ``model`` (a name of the
    catalogue or a Hugging Face config.json), whose ``sizes`` may be changed. ``dtype``: of the
    weights, by default the scenario's, of a ``model`` bf16. ``mode``: collocated,
    non-collocated or all; the scenario's own by default. ``method``: nccl, nvshmem, gloo, ipc, auto
    or all. ``cap``: extra memory of a rank. ``changed``: send only what changed, and change that
    share of the weights before each refit. ``place``: let destination ranks be renumbered so that
    the fewest bytes travel. ``check``: compare every destination element once, untimed. ``rate``:
    of the links, for the bounds. ``nproc``: ranks, as many as needed by default. A log like that of
    Megatron's suite goes to ``output_dir``/logs (OUTPUT_DIR, else benchmark_results) as RUN_ID.
    ``figure``: the SVG file that a dry run draws its first transfer into.
    """
    _check_choices(dtype, mode, method, verify, orders)
    _check_delta(changed, verify, atomic)
    if figure is not None and not dry_run:
        raise ValueError(f"figure = {str(figure)!r}: is drawn of a dry run; add --dry-run")
    timing = _timing(warmup, iterations, check, parsed(timeout, setup_timeout))
    changes = {
        "model": None if model is None else catalogue.find(model),
        "sizes": sizes, "train": train, "infer": infer,
        "dtype": dtype or (None if model is None else "bf16"),
    }  # fmt: skip
    choices = {
        "cap_bytes": _cap_bytes(cap), "verify": verify, "atomic": atomic, "changed": changed,
    }  # fmt: skip
    asked = [
        _Asked(one, methods, each, orders, choices)  # type: ignore[arg-type]
        for one, methods in _scenarios(scenario, changes)
        for each in (get_args(Mode) if mode == "all" else (mode or one.mode,))
    ]
    _check_sizes(asked, nproc, figure)
    if dry_run:
        found = _forecasts(asked, cluster, nproc, rate, place)
        if figure is not None and job.leads():
            _draw(found[0], figure)
        return found
    machine = measure.machine_of(cluster, nproc, keep=True)
    todo = _cases(asked, method, machine, nproc, place, forecast.links(machine, rate))
    return _measure_all(todo, machine, timing, runs, output_dir)


class _Asked(NamedTuple):
    """A scenario in one mode. ``methods``: those that the menu names. ``choices``: fields of
    ``Resharding``."""

    scenario: Scenario
    methods: tuple[str, ...]
    mode: Mode
    orders: tuple[Order, Order]
    choices: Mapping[str, Any]

    @property
    def num_ranks(self) -> int:
        return cases.num_ranks(self.scenario, self.mode)

    def op(self, num_ranks: int, *, place: bool) -> Resharding:
        source, destination = cases.layouts(self.scenario, self.mode, num_ranks, self.orders)
        op = Resharding(
            model=self.scenario.model,
            source=source,
            destination=destination,
            scenario=self.scenario.name,
            **self.choices,
        )
        return msgspec.structs.replace(op, placement=forecast.placement(op)) if place else op


class _Todo(NamedTuple):
    """``reason``: why it cannot be measured here. ``metrics``: known before it is."""

    case: Case
    reason: str
    metrics: dict[str, float]


class _Timing(NamedTuple):
    warmup: int
    iterations: int
    check: bool
    patience: Patience


def _check_choices(dtype: Any, mode: Any, method: Any, verify: Any, orders: Any) -> None:
    known = {
        "dtype": (dtype, (None, *get_args(Dtype))),
        "mode": (mode, (None, *get_args(Mode), "all")),
        "method": (method, (*cases.METHODS, "auto", "all")),
        "verify": (verify, get_args(Verify)),
        "train_order": (orders[0], get_args(Order)),
        "inference_order": (orders[1], get_args(Order)),
    }
    for name, (value, choices) in known.items():
        if value not in choices:
            said = ", ".join(str(choice) for choice in choices if choice)
            raise ValueError(f"{name} = {value!r}: must be one of {said}")


def _check_delta(changed: float | None, verify: str, atomic: bool) -> None:
    if changed is None:
        return
    if not 0 < changed <= 1:
        raise ValueError(f"changed = {changed}: must be a share, > 0 and <= 1")
    if verify == "off":
        raise ValueError("verify = 'off': --delta finds changes by hashes; use hash or full")
    if atomic:
        raise ValueError("atomic = True: does not go with --delta; give one of them")


def _check_sizes(asked: "Sequence[_Asked]", nproc: int | None, figure: Path | str | None) -> None:
    """Before anything is planned: too many would take for ever, or cannot be drawn."""
    for number, one in enumerate(asked):
        size = nproc or one.num_ranks
        model = one.scenario.model
        if num_parameters(model) * DTYPE_BYTES[one.scenario.dtype] > MOST_BYTES:
            raise ValueError(f"model = {model.name or 'custom'}: must be at most 1024 TiB")
        if size > MOST_RANKS:
            said = f"nproc = {nproc}" if nproc else f"{one.scenario.name} {one.mode}: {size} ranks"
            raise ValueError(f"{said}: must be at most {MOST_RANKS} ranks")
        if figure is not None and number == 0 and size > page.MOST_RANKS:
            raise ValueError(
                f"figure = {str(figure)!r}: draws at most {page.MOST_RANKS} ranks, and "
                f"here are {size}; leave it out"
            )


def _cap_bytes(cap: str | int) -> int:
    found = parse_bytes(str(cap), "cap")
    if not 0 < found <= MOST_BYTES:
        raise ValueError(f"cap = {cap!r}: must be some memory, as 512MiB")
    return found


def _draw(found: Forecast, figure: Path | str) -> None:
    write_whole(figure, svg.standalone(page.figure(found)))


def _timing(warmup: int, iterations: int, check: bool, patience: Patience) -> _Timing:
    numbers = ("num_benchmark_warmup", warmup, 0), ("num_benchmark_iterations", iterations, 1)
    for name, number, least in numbers:
        if number < least:
            raise ValueError(f"{name} = {number}: must be >= {least}")
    return _Timing(warmup, iterations, check, patience)


def _scenarios(
    names: Sequence[str], changes: Mapping[str, Any]
) -> Iterator[tuple[Scenario, tuple[str, ...]]]:
    """What is asked for, with the user's changes, and the methods that the menu names."""
    if not names:
        if not (changes["train"] or changes["infer"]):
            raise ValueError(
                "nothing to refit: give --scenario (`meshwise refit --list` names them) or both "
                "layouts, as --tensor-model-parallel-size 2 "
                "--rl-inference-tensor-model-parallel-size 4"
            )
        yield cases.changed(cases.custom(), **changes), ()
    for name in names:
        found = cases.find(name)
        for one in found.scenarios:
            yield cases.changed(one, **changes), found.methods


def _forecasts(
    asked: Sequence[_Asked],
    cluster: Path | str,
    nproc: int | None,
    rate: str | float | None,
    place: bool,
) -> list[Forecast]:
    usual = str(cluster) == measure.DEFAULT_CLUSTER
    given = None
    if Path(cluster).exists() or not usual:
        given = forecast.links(files.take(cluster, Cluster), rate)
    if given is None and not usual:
        raise ValueError(
            f"cluster = {str(cluster)!r}: names no rate of its links; give --rate 373GB/s"
        )
    if given is None and Path(cluster).exists():
        log.info("%s names no rate of its links, so for this dry run:", cluster)
    given = given or forecast.links(files.take(LAPTOP, Cluster), rate)
    assert given is not None
    sizes = [(one, nproc or one.num_ranks) for one in asked]
    return [forecast.forecast(one.op(size, place=place), size, given) for one, size in sizes]


def _cases(
    asked: Sequence[_Asked],
    method: str,
    machine: Cluster,
    nproc: int | None,
    place: bool,
    given: forecast.Links | None,
) -> list[_Todo]:
    """One for each scenario, mode and method; ranks that are too few, or a method without its
    device, are a reason and not an error, since the others can be measured. All are laid out and
    those with ranks enough are planned here, so that no run begins with what cannot be."""
    found = []
    limit = machine.num_devices if nproc is None else job.world_size(nproc, machine, default=nproc)
    if not job.starts():
        limit = nproc = job.world_size(None, machine, default=1)
    for one in asked:
        too_few = one.num_ranks > limit
        size = one.num_ranks if too_few or nproc is None else nproc
        op = one.op(size, place=place)
        lacks = f"needs {size} ranks, and here are {limit}" if too_few else ""
        if too_few:
            forecast.sides(op)  # refuses what cannot be laid out
        else:
            lacks = memory.missing(machine, forecast.held_bytes(op, size))
        known = {} if too_few else forecast.known(op, size, given)
        for each in cases.methods(method, machine.device.kind, one.methods):
            no_gpu = machine.device.kind == "cpu" and each not in ("auto", "gloo")
            reason = f"{each} needs GPUs" if no_gpu else lacks
            case = Case(op=op, regime="blocking", backend=each, world_size=size)
            found.append(_Todo(case, reason, known))
    if not job.starts() and len({todo.case.backend for todo in found}) > 1:
        raise ValueError(
            f"method = {method!r}: a process keeps its back end, and these ranks are a launcher's; "
            "name one method, or let `meshwise refit` start the ranks"
        )
    return found


def _measure_all(
    todo: Sequence[_Todo],
    machine: Cluster,
    timing: _Timing,
    runs: Path | str,
    output_dir: Path | str | None,
) -> Path:
    """Case after case into one run directory, and into the log."""
    possible = [one.case.world_size for one in todo if not one.reason]
    size = job.world_size(None, machine, default=max(possible, default=1))
    job.check_machine(machine, size)
    names = list(dict.fromkeys(one.case.op.scenario for one in todo))  # type: ignore[union-attr]
    slug = f"{'-'.join(names) if len(names) < 3 else 'suite'}-{machine.name}"
    run_dir, leads = job.created(runs, "refit", slug, machine, size), job.leads()
    text = _log_path(output_dir)
    if leads:
        _write(text, [f"run directory: {run_dir}"])
        count = f"{len(todo)} case{'s' * (len(todo) > 1)}"
        log.info("%s, into %s and %s", count, run_dir, text)
    with job.recorded(run_dir, f"what was measured is in {run_dir}"):
        for one in todo:
            _measure(one, run_dir, timing)
            if leads:
                sample = files.load(run_dir)[1][-1]
                _write(text, page.log_lines(sample))
                log.info("%s: %s", label(one.case), page.outcome(sample))
    if leads:
        store.finish(run_dir, *ending(files.load(run_dir)[1]))
    return run_dir


def _measure(todo: _Todo, run_dir: Path, timing: _Timing) -> None:
    """One sample. A rank that dies or hangs ends this case and not the others, if we started it."""
    from meshwise import launch

    case = todo.case
    if todo.reason:
        _append(run_dir, case, "skipped", todo.reason)
        return
    from meshwise.probe.refit import RefitRequest

    request = RefitRequest(
        case=case,
        run_dir=str(run_dir),
        warmup=timing.warmup,
        iterations=timing.iterations,
        compare=timing.check,
        metrics=todo.metrics,
    )
    try:
        launch.run(
            "meshwise.probe.refit:measure_ranks", request,
            nproc=case.world_size, patience=timing.patience,
        )  # fmt: skip
    except launch.RanksFailed as failed:
        if not job.starts():
            raise
        _append(run_dir, case, "hung" if failed.hung else "error", str(failed))


def _append(
    run_dir: Path, case: Case, status: Literal["skipped", "hung", "error"], reason: str
) -> None:
    if job.leads():
        store.append(run_dir, Sample(case_id=case.id, case=case, status=status, reason=reason))


def _log_path(output_dir: Path | str | None) -> Path:
    """OUTPUT_DIR/logs/RUN_ID.log, named as Megatron's launcher names it."""
    folder = Path(output_dir or os.environ.get("OUTPUT_DIR") or "benchmark_results")
    of_job = os.environ.get("SLURM_JOB_ID") or "local"
    run_id = os.environ.get("RUN_ID") or f"benchmark_{time.strftime('%y%m%d_%H%M%S')}_{of_job}"
    if Path(run_id).name != run_id:
        raise ValueError(f"RUN_ID = {run_id!r}: must be a file's name, without a folder")
    return folder / "logs" / f"{run_id}.log"


def _write(path: Path, lines: Iterable[str]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        append_line(path, "\n".join(map(plain, lines)))
    except (OSError, ValueError) as error:
        raise ValueError(f"{error}; use --output-dir") from None
