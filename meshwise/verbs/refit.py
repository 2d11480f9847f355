"""refit: move synthetic weights between two layouts, check every element, time it.

All scenarios, methods and modes asked for share one run directory. Each is a case with freshly
started ranks, because a process cannot change its back end of symmetric memory. To refit real
weights in a training loop, use ``meshwise.Refit``.
"""

import functools
import logging
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, get_args

import msgspec

from meshwise.files import append_line
from meshwise.launcher import Job
from meshwise.models import catalogue
from meshwise.models.decoder import published_parameters, weights
from meshwise.options import keywords
from meshwise.options.refit import ModelSizes, RefitOptions, Training
from meshwise.pages import refit as page
from meshwise.pages import svg
from meshwise.probe.cases import refit as cases
from meshwise.spec import DTYPE_BYTES, Case, Cluster, Resharding
from meshwise.spec.label import label
from meshwise.spec.op import Dtype
from meshwise.spec.refit import Forecast, Mode, Scenario
from meshwise.spec.weights import Order
from meshwise.text import plain
from meshwise.units import parse_bytes
from meshwise.verbs import files, forecast, measure, memory, world
from meshwise.verbs.recording import Recording

log = logging.getLogger("meshwise")

MOST_RANKS = 4096  # a plan for so many takes a minute, not hours
MOST_BYTES = 2**50  # limit of a cap and of a model
STACKS: dict[str, Order] = {  # and the order of weights in them
    "hf": "hf-fused", "megatron": "megatron", "vllm": "engine", "plain": "plain",
}  # fmt: skip
LAPTOP = "h200-hgx"  # a dry run's cluster if none is named, or if cluster.toml has no links


@keywords(RefitOptions)
def refit(asked: RefitOptions) -> Path | list[Forecast]:
    """Measure into a run directory and return its path. With ``dry_run`` return a ``Forecast`` of
    what would move for each scenario and mode, without torch. Positional arguments are names of
    scenarios. A log like that of Megatron's suite goes to ``output_dir``/logs.
    """
    asked = _of_stacks(asked)
    _check(asked)
    cap_bytes = _cap_bytes(asked.cap)
    tasks = [
        _Task(one, methods, each, cap_bytes, asked)
        for one, methods in _scenarios(asked)
        for each in (get_args(Mode) if asked.mode == "all" else (asked.mode or one.mode,))
    ]
    _check_sizes(tasks, asked)
    if asked.dry_run:
        found = _forecasts(tasks, asked)
        if asked.figure is not None and Job.here().leads:
            svg.write(asked.figure, page.figure(found[0]))
        return found
    machine = measure.machine_of(asked.cluster, asked.nproc, keep=True)
    return _measure_all(_cases(tasks, machine, asked), machine, asked)


def _of_stacks(asked: RefitOptions) -> RefitOptions:
    """Replace ``source``, ``destination`` and ``layout`` by the options that they stand for."""
    if asked.layout is not None:
        layout = cases.degrees(asked.layout)
        if twice := [axis for axis in asked.train or () if axis in layout]:
            raise ValueError(f"layout = {asked.layout!r}: {twice[0]} is given twice")
        asked = replace(asked, train={**layout, **(asked.train or {})}, layout=None)
    ends = {"from": asked.source, "to": asked.destination}
    if not any(ends.values()):
        return asked
    (of, name), (to, other) = (_end(flag, text) for flag, text in ends.items())
    models = catalogue.find(name), catalogue.find(other)
    if clash := next((n for n in ("model", "scenario") if getattr(asked, n)), None):
        raise ValueError(
            f"{clash} = {getattr(asked, clash)!r}: --from names the model; leave it out"
        )
    if weights(models[0]) != weights(models[1]):
        fields = (field for field in models[0].__struct_fields__ if field != "name")
        pairs = ((field, *(getattr(each, field, None) for each in models)) for field in fields)
        field, here, there = next(each for each in pairs if each[1] != each[2])
        raise ValueError(
            f"{field} = {here} of {asked.source} and {there} of {asked.destination}: must be "
            "equal, since one model's weights move"
        )
    one = {"tp": 1}
    asked = replace(asked, train=asked.train or one, infer=asked.infer or one)
    return replace(asked, model=name, orders=(of, to), source=None, destination=None)


def _end(flag: str, text: str | None) -> tuple[Order, str]:
    """Parse ``stack:model``."""
    if text is None:
        raise ValueError(f"{flag} = null: --from and --to go together")
    stack, _, name = text.partition(":")
    if stack not in STACKS or not name:
        known = ", ".join(f"{each}:MODEL" for each in STACKS)
        raise ValueError(f"{flag} = {text!r}: must be one of {known}")
    return STACKS[stack], name


class _Task(NamedTuple):
    """A scenario in one mode. ``methods``: those that the menu fixes, or ()."""

    scenario: Scenario
    methods: tuple[str, ...]
    mode: Mode
    cap_bytes: int
    asked: RefitOptions

    @property
    def num_ranks(self) -> int:
        return cases.num_ranks(self.scenario, self.mode)

    def op(self, num_ranks: int) -> Resharding:
        scenario, asked = self.scenario, self.asked
        source, destination = cases.layouts(scenario, self.mode, num_ranks, asked.orders)
        op = Resharding(
            model=scenario.model,
            source=source,
            destination=destination,
            scenario=scenario.name,
            cap_bytes=self.cap_bytes,
            verify=asked.verify,
            atomic=asked.atomic,
            changed=asked.changed,
        )
        return msgspec.structs.replace(op, placement=forecast.placement(op)) if asked.place else op


class _Todo(NamedTuple):
    """A case, the ``reason`` why it cannot be measured here or "", and ``metrics`` known before."""

    case: Case
    reason: str
    metrics: dict[str, float]


def _check(asked: RefitOptions) -> None:
    """Refuse options that do not go together."""
    changed, known = asked.changed, get_args(Dtype)
    degrees = {*vars(Training()), "replicas"}
    for name, fields in (("train", degrees), ("infer", degrees), ("sizes", {*vars(ModelSizes())})):
        if odd := [key for key in getattr(asked, name) or () if key not in fields]:
            raise ValueError(f"{name}: {odd[0]!r} is not one of {', '.join(sorted(fields))}")
    if asked.dtype not in (None, *known):
        raise ValueError(f"dtype = {asked.dtype!r}: must be one of {', '.join(known)}")
    for name, order in zip(("train_order", "inference_order"), asked.orders, strict=True):
        if order not in get_args(Order):
            raise ValueError(f"{name} = {order!r}: must be one of {', '.join(get_args(Order))}")
    if asked.figure is not None and not asked.dry_run:
        raise ValueError(f"figure = {str(asked.figure)!r}: is drawn of a dry run; add --dry-run")
    if changed is None:
        return
    if not 0 < changed <= 1:
        raise ValueError(f"changed = {changed}: must be a share, > 0 and <= 1")
    if asked.verify == "off":
        raise ValueError("verify = 'off': --delta finds changes by hashes; use hash or full")
    if asked.atomic:
        raise ValueError("atomic = True: does not go with --delta; give one of them")


def _check_sizes(tasks: Sequence[_Task], asked: RefitOptions) -> None:
    """Refuse models and ranks that are too many to plan in reasonable time, or to draw."""
    nproc, figure = asked.nproc, asked.figure
    for number, one in enumerate(tasks):
        size = nproc or one.num_ranks
        model = one.scenario.model
        if published_parameters(model) * DTYPE_BYTES[one.scenario.dtype] > MOST_BYTES:
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


def _scenarios(asked: RefitOptions) -> Iterator[tuple[Scenario, tuple[str, ...]]]:
    """Yield the scenarios asked for, with the user's changes, and the methods the menu fixes."""
    usual_dtype: Any = asked.dtype or (None if asked.model is None else "bf16")
    changed = functools.partial(
        cases.changed,
        model=None if asked.model is None else catalogue.find(asked.model),
        sizes=asked.sizes,
        train=asked.train,
        infer=asked.infer,
        dtype=usual_dtype,
    )
    if not asked.scenario:
        if not (asked.train or asked.infer):
            raise ValueError(
                "nothing to refit: give --scenario (`meshwise refit --list` names them) or both "
                "layouts, as --tensor-model-parallel-size 2 "
                "--rl-inference-tensor-model-parallel-size 4"
            )
        yield changed(cases.custom()), ()
    for name in asked.scenario:
        found = cases.find(name)
        for one in found.scenarios:
            yield changed(one), found.methods


def _forecasts(tasks: Sequence[_Task], asked: RefitOptions) -> list[Forecast]:
    cluster, rate, given = asked.cluster, asked.rate, None
    usual = str(cluster) == measure.DEFAULT_CLUSTER
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
    sizes = [(one, asked.nproc or one.num_ranks) for one in tasks]
    return [forecast.forecast(one.op(size), size, given) for one, size in sizes]


def _cases(tasks: Sequence[_Task], machine: Cluster, asked: RefitOptions) -> list[_Todo]:
    """List a case for each scenario, mode and method. Too few ranks, too little memory or a missing
    device is a reason and not an error, since other cases can run. Lay out all, and plan those with
    enough ranks, so that impossible cases are refused before the run begins."""
    found, nproc, method = [], asked.nproc, asked.method
    given = forecast.links(machine, asked.rate)
    limit = machine.num_devices if nproc is None else world.size(nproc, machine, default=nproc)
    launched = Job.here().launched
    if launched:
        limit = nproc = world.size(None, machine, default=1)
    for one in tasks:
        too_few = one.num_ranks > limit
        size = one.num_ranks if too_few or nproc is None else nproc
        op = one.op(size)
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
    if launched and len({todo.case.backend for todo in found}) > 1:
        raise ValueError(
            f"method = {method!r}: a process keeps its back end, and these ranks are a launcher's; "
            "name one method, or let `meshwise refit` start the ranks"
        )
    return found


def _measure_all(todo: Sequence[_Todo], machine: Cluster, asked: RefitOptions) -> Path:
    """Measure case after case into one run directory, and write the log."""
    possible = [one.case.world_size for one in todo if not one.reason]
    size = world.size(None, machine, default=max(possible, default=1))
    world.check_machine(machine, size)
    names = list(dict.fromkeys(one.case.op.scenario for one in todo))  # type: ignore[union-attr]
    slug = f"{'-'.join(names) if len(names) < 3 else 'suite'}-{machine.name}"
    recording = Recording.begin(asked.runs, "refit", slug, machine, size)
    run_dir, leads = recording.path, recording.leads
    text = _log_path(asked.output_dir)
    if leads:
        _write(text, [f"run directory: {run_dir}"])
        count = f"{len(todo)} case{'s' * (len(todo) > 1)}"
        log.info("%s, into %s and %s", count, run_dir, text)
    with recording.watched(f"what was measured is in {run_dir}"):
        for one in todo:
            _measure(one, recording, asked)
            if leads:
                sample = files.load(run_dir)[1][-1]
                _write(text, page.log_lines(sample))
                log.info("%s: %s", label(one.case), page.outcome(sample))
    recording.finish()
    return run_dir


def _measure(todo: _Todo, recording: Recording, asked: RefitOptions) -> None:
    """Measure one sample. If we started the ranks, one that dies or hangs ends only this case."""
    from meshwise import launch

    case = todo.case
    if todo.reason:
        recording.append_failed(case, "skipped", todo.reason)
        return
    from meshwise.probe.refit import RefitRequest

    run_dir = str(recording.path)
    request = RefitRequest(case=case, run_dir=run_dir, asked=asked, metrics=todo.metrics)
    target, size = "meshwise.probe.refit:measure_ranks", case.world_size
    try:
        launch.run(target, request, nproc=size, patience=asked.patience)
    except launch.RanksFailed as failed:
        if recording.job.launched:
            raise
        recording.append_failed(case, "hung" if failed.hung else "error", str(failed))


def _log_path(output_dir: Path | str | None) -> Path:
    """Return OUTPUT_DIR/logs/RUN_ID.log, with the names of Megatron's launcher."""
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
