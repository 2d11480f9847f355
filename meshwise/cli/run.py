"""``meshwise run``."""

from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from cyclopts import Parameter

import meshwise
from meshwise.cli import output
from meshwise.cli.options import ANY, WAITS, DryRun, Json, Runs, Size, Waits
from meshwise.cli.output import DONE, SOME_FAILED, emit
from meshwise.patience import parsed
from meshwise.verbs import job

if TYPE_CHECKING:
    from meshwise.pages.table import Table
    from meshwise.verbs.suite import Listed, Settings


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Given:
    """What to run where no plan says it."""

    model: str | None = None
    "Run this model without a plan: a name of any family, a Hugging Face config.json or a record."
    layout: str | None = None
    'A file or JSON, for example {"tp": 2, "microbatch_size": 4}; dp over all devices by default.'
    recipe: str | None = None
    'A file or JSON, for example {"optimizer": "sgd", "max_grad_norm": 0}.'
    global_batch_size: int | None = None
    "Sequences or images in a step; by default those of the layout."
    seq_len: int | None = None
    "Tokens in a sequence."
    dtype: Literal["bf16", "fp32"] | None = None
    "In what it computes: bf16 on GPUs and fp32 on CPUs by default."
    lowering: Literal["eager", "compiled"] | None = None
    "Compiled layers on GPUs and eager ones on CPUs by default."
    cluster: str = "cluster.toml"
    "The machine; one without the file is looked at."


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Benchmark:
    """The suites of Alpa's benchmark, and its flags."""

    suite: str | None = None
    "Run the cases of this suite for the number of devices, by default all of the cluster."
    list_suites: bool = False
    "Name the suites, the sweeps, and the numbers of devices that they have cases for."
    sweep: str | None = None
    "Run a suite on every shape of the cluster, as the source's run_exp: gpt, moe_inference, ..."
    niter: int | None = None
    "Iterations of a case, 3 by default; the first, from 5 on the first two, are not counted."
    shard_only: bool = False
    "Refuse pipelines."
    local: bool = False
    "Start the ranks here, not under a launcher."
    profile_driver_time: bool = False
    "Time the whole loop from rank 0 with no barrier; of inference several batches are under way."
    profile_stage_execution_time: bool = False
    "Of inference: print each stage's latency and where the trace is."
    exp_name: str = "default"
    "Name of the table: rows are appended to NAME.tsv."
    scale_to_fit: bool = False
    "Make the sizes of a case smaller until they fit a device, and on CPUs take seconds."


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Kept:
    """What training leaves behind, and goes on from."""

    save: str | None = None
    "Write a checkpoint into this folder at the end."
    save_every: int | None = None
    "And after each so many steps."
    resume_from: str | None = None
    "Go on with the checkpoint in this folder, under any layout."


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Watched:
    """Checks and traces of a run, besides its times."""

    check: bool = False
    "Compare the losses of three steps with one device, in fp32 (images: fp64)."
    profile: bool = False
    "Where a step's time goes: forward, backward, exposed communication, bubble; a timeline."
    find_nonfinite: bool = False
    "Name the module where a loss that is not finite begins."
    nccl_trace: bool = False
    "On the GPUs of one host: compare the collectives that NCCL logs with the plan's."


_NOT_OF_SUITES = (
    "plan", "steps", "warmup", "rivals", "data", "seed", "in_flight", "new_tokens"
)  # fmt: skip
PLANNED, SINGLE, NOTHING, TIMED = Given(), Benchmark(), Kept(), Watched()


def run(
    plan: str | None = None,
    *,
    given: Given = PLANNED,
    mode: Literal["train", "infer", "decode"] = "train",
    steps: int | None = None,
    warmup: int | None = None,
    rivals: int = 0,
    watched: Watched = TIMED,
    data: str | None = None,
    seed: int = 0,
    in_flight: int | None = None,
    new_tokens: int | None = None,
    kept: Kept = NOTHING,
    benchmark: Benchmark = SINGLE,
    size: Size = ANY,
    waits: Waits = WAITS,
    runs: Runs = "runs",
    dry_run: DryRun = False,
    json: Json = False,
) -> int:
    """Execute a plan, a model in a layout, or the cases of a suite, and print what was measured,
    beside what was predicted if it was. One new run directory per layout.

    Parameters
    ----------
    plan
        The plan to execute; plan.json by default.
    mode
        Training steps, batches of inference, or tokens decoded one by one.
    steps
        Training steps or batches to time; 20 on GPUs and 5 on CPUs by default.
    warmup
        Untimed ones before them; 3 on GPUs and 1 on CPUs by default.
    rivals
        Also run this many runners-up.
    data
        A file of tokens; by default they are random.
    seed
        Of weights and data.
    in_flight
        Batches of streamed inference under way at once; 4 by default.
    new_tokens
        Tokens to decode behind each sequence; 64 by default.
    """
    if benchmark.list_suites or benchmark.suite is not None or benchmark.sweep is not None:
        return _benchmark(locals(), benchmark, runs, dry_run, json)
    _refuse_odd(benchmark, mode, steps=steps, warmup=warmup)
    done = meshwise.run(
        plan,
        **asdict(given),
        **asdict(kept),
        **asdict(watched),
        mode=mode,
        steps=steps,
        warmup=warmup,
        rivals=rivals,
        data=data,
        seed=seed,
        driver_time=benchmark.profile_driver_time,
        in_flight=in_flight,
        new_tokens=new_tokens,
        nproc=size.ranks,
        **asdict(waits),
        runs=runs,
        dry_run=dry_run,
    )
    return _shown(done, watched.nccl_trace, json)


def _said(options: Any) -> list[str]:
    """The fields of a group of options that were given."""
    return [one.name for one in fields(options) if getattr(options, one.name) != one.default]


def _refuse_odd(benchmark: Benchmark, mode: str, **counts: int | None) -> None:
    """Refuse what belongs to suites, or to another mode."""
    if odd := [name for name in _said(benchmark) if name != "profile_driver_time"]:
        raise ValueError(f"{odd[0]}: is of suites; leave it out, or give --suite or --sweep")
    for name, value in counts.items():
        if value is not None and mode == "decode":
            raise ValueError(f"{name}: decoding counts tokens; leave it out, or give --new-tokens")


def _refuse_beside_suites(options: dict[str, Any], benchmark: Benchmark) -> None:
    """Refuse, by name, what a suite or a sweep has of its own; ``options`` are those of ``run``."""
    if benchmark.suite is not None and benchmark.sweep is not None:
        raise ValueError(f"--sweep {benchmark.sweep}: runs a suite of its own; leave out --suite")
    odd = [name for name in _said(options["given"]) if name not in ("lowering", "cluster")]
    odd += [name for group in ("kept", "watched") for name in _said(options[group])]
    odd += ["mode"] * (options["mode"] != "train")
    odd += [name for name in _NOT_OF_SUITES if options[name]]
    if benchmark.sweep is not None:
        clocks = ("niter", "profile_driver_time", "profile_stage_execution_time")
        odd += [name for name in _said(benchmark) if name in clocks]
        odd += _said(options["size"])
    if odd:
        flags = ", ".join("the plan" if n == "plan" else "--" + n.replace("_", "-") for n in odd)
        what = "--suite" if benchmark.sweep is None else "--sweep"
        raise ValueError(f"{what} has its own; leave out {flags}")


def _shown(done: list[Any], nccl_trace: bool, json: bool) -> int:
    """Print what became of the plans, or the plans themselves."""
    from meshwise.pages import steps, tables

    run_dirs = [path for path in done if isinstance(path, Path)]
    if len(run_dirs) < len(done):
        emit(done, [tables.dry_run(done)], json)
        return DONE
    if not job.leads():
        return DONE
    found = steps.results(run_dirs)
    good = all(result.status == "ok" for result in found)
    if not nccl_trace:
        emit(found, steps.tables(found), json)
        return DONE if good else SOME_FAILED
    from meshwise.pages import show
    from meshwise.verbs import trace

    checks = {path.name: trace.read_check(path) for path in run_dirs}
    shown = [show.trace(check, f"Plan against trace: {name}") for name, check in checks.items()]
    emit({"steps": found, "nccl_checks": checks}, [*steps.tables(found), *shown], json)
    agree = all(check.agrees is not False for check in checks.values())
    return DONE if good and agree else SOME_FAILED


def _benchmark(
    options: dict[str, Any],
    asked: Benchmark,
    runs: str,
    dry_run: bool,
    json: bool,
) -> int:
    """Run a suite or a sweep, or say what it would run; or which there are."""
    from meshwise.spec.run import FAILED
    from meshwise.verbs import suite

    if asked.list_suites:
        return _list_suites(json)
    _refuse_beside_suites(options, asked)
    settings = _settings(asked, options["given"], options["size"], options["waits"], runs, json)
    if asked.sweep is not None:
        if dry_run:
            return _list_cases(suite.listed_sweep(asked.sweep, settings), json)
        found = suite.run_sweep(asked.sweep, settings)
    else:
        assert asked.suite is not None
        if dry_run:
            listed = suite.listed(asked.suite, settings)
            return _list_cases({_num_devices(listed): listed}, json)
        found = suite.run_suite(asked.suite, settings)
    if json:
        emit(found, [], json)
    return SOME_FAILED if {*FAILED} & {result.status for result in found} else DONE


def _settings(
    asked: Benchmark, given: Given, size: Size, waits: Waits, runs: str, json: bool
) -> "Settings":
    from meshwise.verbs.suite import Settings

    def say(line: str) -> None:
        if job.leads() and not json:
            output.say(line)

    ranks = size.ranks  # all spellings agree
    shape = (size.num_hosts, size.num_devices_per_host)
    return Settings(
        *((1, ranks) if ranks is not None and size.num_hosts is None else shape),
        niter=3 if asked.niter is None else asked.niter,
        shard_only=asked.shard_only,
        local=asked.local,
        profile_driver_time=asked.profile_driver_time,
        profile_stage_execution_time=asked.profile_stage_execution_time,
        exp_name=asked.exp_name,
        scale_to_fit=asked.scale_to_fit,
        lowering=given.lowering,
        cluster=given.cluster,
        patience=parsed(**asdict(waits)),
        runs=runs,
        say=say,
    )


def _list_suites(json: bool) -> int:
    from meshwise import suites
    from meshwise.pages.table import Table

    found = [(name, _sizes_of(name), suites.missing(name)) for name in suites.names()]
    swept = [(one.name, one.suite, one.niter, suites.missing(one.suite)) for one in suites.sweeps()]
    of_suites = tuple(
        (name, ", ".join(map(str, sizes)) or "–", lacks) for name, sizes, lacks in found
    )
    of_sweeps = tuple((name, suite, str(niter), lacks) for name, suite, niter, lacks in swept)
    emit(
        {
            "suites": [{"suite": n, "devices": sizes, "lacks": lacks} for n, sizes, lacks in found],
            "sweeps": [
                {"sweep": n, "suite": suite, "niter": niter, "lacks": lacks}
                for n, suite, niter, lacks in swept
            ],
        },
        [
            Table("Suites", ("suite", "devices", ""), of_suites, (_DEVICES_LEGEND,), left=3),
            Table("Sweeps", ("sweep", "suite", "niter", ""), of_sweeps, left=4),
        ],
        json,
    )
    return DONE


_DEVICES_LEGEND = "devices: the numbers of devices that a suite has cases for."


def _sizes_of(name: str) -> list[int]:
    from meshwise import suites

    return [] if suites.kind(name) == "unet" else list(suites.device_counts(name))


def _num_devices(found: "list[Listed]") -> int:
    return next(plan.layout.num_devices for _, plan, _ in found if plan is not None)


def _list_cases(found: "dict[int, list[Listed]]", json: bool) -> int:
    """``found``: cases by the number of devices."""
    document = [
        {"devices": size, "case": str(case), "plan": plan, "note": note}
        for size, cases in found.items()
        for case, plan, note in cases
    ]
    emit(document, [_table_of(size, cases) for size, cases in found.items()], json)
    return DONE


def _table_of(size: int, cases: "list[Listed]") -> "Table":
    from meshwise.pages.table import Table

    rows = tuple(
        (plan.model.name if plan else "–", plan.layout.name if plan else "–", note or "as it is")
        for _, plan, note in cases
    )
    ends = "" if len(cases) == 1 else "s", "" if size == 1 else "s"
    title = f"{len(cases)} case{ends[0]} on {size} device{ends[1]}; nothing was run"
    return Table(title, ("model", "layout", "changed, or refused"), rows, left=3)
