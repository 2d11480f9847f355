"""``meshwise measure``: one sub-command for each kind of measurement."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import cyclopts
from cyclopts import Parameter

import meshwise
from meshwise.cli.options import PLAIN, Json, Runs, Size, flags
from meshwise.cli.output import DONE, SOME_FAILED, code_of, emit, on_rank_0
from meshwise.launcher import Job
from meshwise.options import helps
from meshwise.options import measure as kinds
from meshwise.options.measure import KINDS, MeasureOptions
from meshwise.options.trace import TraceOptions

if TYPE_CHECKING:
    from collections.abc import Sequence

    from meshwise.spec import Case, Derived, Sample

measure = cyclopts.App(
    name="measure",
    help="Time operations on every rank, into a new run directory. Starts its ranks, or joins "
    "those of torchrun or srun. Without a command: profile.",
    result_action="return_value",
    default_parameter=PLAIN,
)


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Called(Size):
    """Flags that only the command line has: for ranks, and for what is printed and written."""

    full: bool = False
    "Not causal."
    exact_flops: bool = False
    "Count the pairs that the mask leaves, instead of half of all when causal."
    as_measured: bool = False
    "Measure these sizes only, without more where a curve bends."
    baseline: tuple[str, ...] = ()
    "Run directories of earlier health runs to compare with; may be repeated."
    report_dir_path: str | None = None
    (
        "Also write files with Primus' columns into this folder: benchmark_gemm_<model>.csv and "
        ".json, or five CSVs (allreduce_benchmark.csv, ...), without --model of the models that "
        "Primus lists, at its lengths (128 tokens on CPUs)."
    )
    report_csv_path: str | None = None
    "Also write a CSV with Primus' columns."
    allgather_report_csv_path: str | None = None
    "Also write a CSV of all-gathers with Primus' columns."
    reducescatter_report_csv_path: str | None = None
    "The same of reduce-scatters."
    json: Json = False

    @property
    def reports(self) -> dict[str, str]:
        """The paths of files with Primus' columns to write, by flag."""
        named = {name: path for name, path in vars(self).items() if "report" in name}
        return {name: path for name, path in named.items() if path is not None}


_OWN = {  # the kind's flags of ``Called``, and flags of its record that it hides
    "profile": ((), ("sustain",)),
    "gemm": (("report_dir_path",), ("quick",)),
    "attention": (("full", "exact_flops", "report_csv_path"), ("quick", "sustain")),
    "collectives": (("as_measured", "report_dir_path"), ("quick", "sustain")),
    "fsdp": (
        ("allgather_report_csv_path", "reducescatter_report_csv_path"), ("quick", "sustain")
    ),
    "overlap": ((), ("quick", "sustain")),
    "layer": ((), ("quick", "sustain")),
    "health": (("baseline",), ("model", "sustain")),
}  # fmt: skip


def _command(what: str, kind: type[MeasureOptions]) -> Callable[..., int]:
    """Make the command of a kind. Its flags are those of its record and of ``Called``."""
    own, hidden = _OWN[what]
    others = {name for flags, _ in _OWN.values() for name in flags} - {*own}

    def command(
        *,
        asked: Annotated[kind, flags(kind, *hidden)] = kind(),  # type: ignore[valid-type] # noqa: B008
        called: Annotated[Called, flags(Called, *others)] = HERE,
    ) -> int:
        return _measure(asked, called)

    def of_kinds(
        *kinds: Annotated[str, Parameter(help=helps(kind).get("kinds"))],
        asked: Annotated[kind, flags(kind, *hidden)] = kind(),  # type: ignore[valid-type] # noqa: B008
        called: Annotated[Called, flags(Called, *others)] = HERE,
    ) -> int:
        return _measure(replace(asked, kinds=kinds), called)

    return of_kinds if what == "collectives" else command


HERE, ANYTHING = Called(), TraceOptions()
for number, (what, kind) in enumerate(KINDS.items()):
    one = _command(what, kind)
    measure.command(one, name=what, help=inspect.getdoc(kind), sort_key=number)
    if what == "profile":
        measure.default(one)

measure.command(
    "meshwise.cli.ring:ring",
    name="ring",
    sort_key=7,
    help="Ring and dilated attention over rings of GPUs: time, scaling, memory, bytes.",
)


@measure.command(name="import", sort_key=8)
def import_(
    *file: str,
    cluster: str | None = None,
    runs: Runs = "runs",
    asked: Annotated[TraceOptions, flags(TraceOptions)] = ANYTHING,
    json: Json = False,
) -> int:
    """Turn logs of nccl-tests, PARAM, NCCL and Primus into run directories. Exit code 4 if a
    result in them was wrong. With --model or --plan also say whether the calls in NCCL's traces are
    those of its training steps; all files are then one training's.

    Parameters
    ----------
    file
        Logs, JSON or CSV files; their contents tell which tool wrote them.
    cluster
        The machine they were measured on; by default made from what the file says.
    """
    from meshwise import store
    from meshwise.pages import samples, show
    from meshwise.verbs import trace
    from meshwise.verbs.imports import import_files

    check = trace.compare(file, asked) if file and asked.said() else None
    run_dirs = import_files(file, cluster=cluster, runs=runs)
    document: Any = [str(path) for path in run_dirs]
    tables = samples.imported(run_dirs)
    if check is not None:
        document = {"run_dirs": document, "check": check}
        tables += show.trace(check, "Model against trace")
    emit(document, tables, json)
    statuses = {sample.status for path in run_dirs for sample in store.load(path)[1]}
    return SOME_FAILED if "error" in statuses else DONE


def _measure(asked: MeasureOptions, called: Called) -> int:
    """Measure, write the files asked for and print."""
    asked = _completed(asked, called)
    from meshwise.verbs import files

    if Job.here().leads and not asked.dry_run:
        files.check_writable(called.reports.values())
    past = [sample for path in called.baseline for sample in files.load(path)[1]]
    found = meshwise.measure(asked)
    if isinstance(found, list):
        return _list(asked, found, called.json)
    return _results(found, asked, called, past)


@on_rank_0
def _results(run_dir: Path, asked: MeasureOptions, called: Called, past: "list[Sample]") -> int:
    if isinstance(asked, kinds.HealthOptions):
        return _judge(run_dir, past, called.json)
    from meshwise import store
    from meshwise.verbs import reports as primus

    rows, reports = [], called.reports
    if reports or isinstance(asked, kinds.FsdpOptions):
        info, _, _ = store.load(run_dir)
        rows = primus.derived(asked, info.cluster, info.world_size)
        primus.write(asked.what, run_dir, rows, reports)
    return _summarize(asked.what, run_dir, called.json, called.exact_flops, rows)


def _completed(asked: MeasureOptions, called: Called) -> MeasureOptions:
    """Return the record with the settings that ``Called`` makes."""
    asked, folder = replace(asked, nproc=called.ranks), called.report_dir_path
    if (
        isinstance(asked, kinds.GemmOptions)
        and folder is not None
        and not (asked.model or asked.configs)
    ):
        raise ValueError(
            f"report_dir_path = {folder!r}: its files list models; give --model or "
            "--model-config-path"
        )
    if isinstance(asked, kinds.AttentionOptions):
        return replace(asked, causal=not called.full)
    if isinstance(asked, kinds.CollectivesOptions):
        asked = replace(asked, follow=not called.as_measured)
        if folder is not None and not asked.model:  # measure what Primus' models exchange
            sizes = asked.microbatch_sizes or tuple(range(1, 9))
            asked = replace(asked, primus_lists=True, microbatch_sizes=sizes)
    return asked


def _list(asked: MeasureOptions, cases: "list[tuple[Case, float]]", json: bool) -> int:
    from meshwise.pages import collectives, samples

    uses: dict[str, str] = {}
    if isinstance(asked, kinds.ProfileOptions):
        from meshwise.verbs.measure import uses_of

        uses = uses_of(asked)
    document = [
        {"id": case.id, "case": case, "about_s": about_s} | ({"use": uses[case.id]} if uses else {})
        for case, about_s in cases
    ]
    tables = [samples.listing(cases, uses)]
    if isinstance(asked, kinds.FsdpOptions):
        from meshwise.verbs import reports
        from meshwise.verbs.measure import place

        there = place(asked.cluster, asked.nproc, keep=False)
        tables = [*collectives.fsdp_tables(reports.derived(asked, *there), []), *tables]
    emit(document, tables, json)
    return DONE


def _summarize(what: str, run_dir: Path, json: bool, exact: bool, rows: "Sequence[Derived]") -> int:
    """Print the measurement; of a profile, which is for ``calibrate``, only how it ended."""
    from meshwise import store
    from meshwise.pages import samples

    info, measured, _ = store.load(run_dir)
    if what == "profile":
        tables = [samples.state(info, measured), *samples.failed(measured)]
    else:
        tables = samples.run(info, measured, exact=exact, rows=rows)
    emit(samples.document(run_dir, info, measured), tables, json)
    return code_of(sample.status for sample in measured)


def _judge(run_dir: Path, past: "Sequence[Sample]", json: bool) -> int:
    from meshwise import store
    from meshwise.pages import health, samples

    info, measured, _ = store.load(run_dir)
    found = health.findings(info, measured, past or None)
    document = samples.document(run_dir, info, measured)
    document |= {"verdict": health.verdict(found), "findings": [one._asdict() for one in found]}
    emit(document, health.tables(info, measured, past), json)
    return DONE if health.verdict(found) == "healthy" else SOME_FAILED
