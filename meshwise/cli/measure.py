"""``meshwise measure``: one sub-command for each kind of measurement."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import cyclopts
from cyclopts import Parameter

import meshwise
from meshwise.cli.options import Json, Runs, Size, flags
from meshwise.cli.output import DONE, SOME_FAILED, code_of, emit
from meshwise.options.measure import (
    KINDS,
    Attention,
    Collectives,
    Fsdp,
    Gemm,
    Health,
    Overlap,
    Profile,
    Sweep,
)
from meshwise.verbs import job

if TYPE_CHECKING:
    from collections.abc import Sequence

    from meshwise.spec import Case, Derived

app = cyclopts.App(
    name="measure",
    help="Time operations on every rank, into a new run directory. Starts its ranks, or joins "
    "those of torchrun or srun. Without a command: profile.",
    result_action="return_value",
    default_parameter=Parameter(negative=()),
)


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Called(Size):
    """Where the ranks are, and how results are printed."""

    master_addr: str | None = None
    "With --master-port: where the ranks of several hosts meet, when no launcher says it."
    master_port: int | None = None
    "See --master-addr."
    json: Json = False


HERE = Called()
PROFILE, GEMM, ATTENTION, COLLECTIVES = Profile(), Gemm(), Attention(), Collectives()
FSDP, OVERLAP, HEALTH = Fsdp(), Overlap(), Health()


def _kind(kind: type[Sweep]) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Register the command of a kind, with the help of its record."""
    number = list(KINDS.values()).index(kind)
    return app.command(name=list(KINDS)[number], help=inspect.getdoc(kind), sort_key=number)


@app.default
@_kind(Profile)
def profile(
    *, asked: Annotated[Profile, flags(Profile, "sustain")] = PROFILE, called: Called = HERE
) -> int:
    """Measure what prices rest on."""
    return _measure(asked, called)


@_kind(Gemm)
def gemm(
    *,
    asked: Annotated[Gemm, flags(Gemm, "quick")] = GEMM,
    report_dir_path: str | None = None,
    called: Called = HERE,
) -> int:
    """Measure products.

    Parameters
    ----------
    report_dir_path
        Also write benchmark_gemm_<model>.csv and .json with Primus' columns into this folder.
    """
    if report_dir_path is not None and not (asked.model or asked.configs):
        raise ValueError(
            f"report_dir_path = {report_dir_path!r}: its files are of models; give --model or "
            "--model-config-path"
        )
    return _measure(asked, called, report_dir_path=report_dir_path)


@_kind(Attention)
def attention(
    *,
    asked: Annotated[Attention, flags(Attention, "quick", "sustain")] = ATTENTION,
    full: bool = False,
    exact_flops: bool = False,
    report_csv_path: str | None = None,
    called: Called = HERE,
) -> int:
    """Measure attention.

    Parameters
    ----------
    full
        Not causal.
    exact_flops
        Count the pairs that the mask leaves, instead of half of all when causal.
    report_csv_path
        Also write a CSV with Primus' columns.
    """
    asked = replace(asked, causal=not full)
    return _measure(asked, called, exact_flops=exact_flops, report_csv_path=report_csv_path)


@_kind(Collectives)
def collectives(
    *kind: str,
    asked: Annotated[Collectives, flags(Collectives, "quick", "sustain")] = COLLECTIVES,
    as_measured: bool = False,
    report_dir_path: str | None = None,
    called: Called = HERE,
) -> int:
    """Measure collectives.

    Parameters
    ----------
    kind
        all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, reduce, gather, scatter,
        send_recv (a ring shift); by default the usual five.
    as_measured
        Measure these sizes only, without more where a curve bends.
    report_dir_path
        Also write five CSVs with Primus' columns into this folder: allreduce_benchmark.csv, ...
        Without --model of the models that Primus lists, at its lengths (128 tokens on CPUs).
    """
    asked = replace(asked, kinds=kind, follow=not as_measured)
    if report_dir_path is not None and not asked.model:  # it measures what its models exchange
        sizes = asked.microbatch_sizes or tuple(range(1, 9))
        asked = replace(asked, primus_lists=True, microbatch_sizes=sizes)
    return _measure(asked, called, report_dir_path=report_dir_path)


@_kind(Fsdp)
def fsdp(
    *,
    asked: Annotated[Fsdp, flags(Fsdp, "quick", "sustain")] = FSDP,
    allgather_report_csv_path: str | None = None,
    reducescatter_report_csv_path: str | None = None,
    called: Called = HERE,
) -> int:
    """Measure FSDP2's messages.

    Parameters
    ----------
    allgather_report_csv_path
        Also write a CSV of all-gathers with Primus' columns.
    reducescatter_report_csv_path
        The same of reduce-scatters.
    """
    return _measure(
        asked,
        called,
        allgather_report_csv_path=allgather_report_csv_path,
        reducescatter_report_csv_path=reducescatter_report_csv_path,
    )


@_kind(Overlap)
def overlap(
    *,
    asked: Annotated[Overlap, flags(Overlap, "quick", "sustain")] = OVERLAP,
    called: Called = HERE,
) -> int:
    """Measure products beside collectives."""
    return _measure(asked, called)


@_kind(Health)
def health(
    *,
    asked: Annotated[Health, flags(Health, "model", "sustain")] = HEALTH,
    baseline: tuple[str, ...] = (),
    called: Called = HERE,
) -> int:
    """Measure all devices and links at once.

    Parameters
    ----------
    baseline
        Run directories of earlier health runs to compare with; may be repeated.
    """
    return _measure(asked, called, baseline=baseline)


app.command(
    "meshwise.cli.ring:ring",
    name="ring",
    sort_key=7,
    help="Ring and dilated attention over rings of GPUs: time, scaling, memory, bytes.",
)


@app.command(name="import", sort_key=8)
def import_(*file: str, cluster: str | None = None, runs: Runs = "runs", json: Json = False) -> int:
    """Turn logs of nccl-tests, PARAM, NCCL and Primus into run directories. Exit code 4 if a
    result in them was wrong.

    Parameters
    ----------
    file
        Logs, JSON or CSV files; what wrote them is seen from what they say.
    cluster
        The machine they are of; by default what the file says of it.
    """
    from meshwise import store
    from meshwise.pages import samples
    from meshwise.verbs.imports import import_files

    run_dirs = import_files(file, cluster=cluster, runs=runs)
    emit([str(path) for path in run_dirs], samples.imported(run_dirs), json)
    statuses = {sample.status for path in run_dirs for sample in store.load(path)[1]}
    return SOME_FAILED if "error" in statuses else DONE


def _measure(
    asked: Sweep,
    called: Called,
    *,
    baseline: tuple[str, ...] = (),
    exact_flops: bool = False,
    **reports: str | None,
) -> int:
    """Measure and print; ``reports``: the files with Primus' columns to write."""
    job.meet_at(called.master_addr, called.master_port)
    asked = replace(asked, nproc=called.ranks)
    paths = {name: path for name, path in reports.items() if path is not None}
    from meshwise.verbs import files

    if job.leads() and not asked.dry_run:
        files.check_writable(paths.values())
    found = meshwise.measure(asked)
    if isinstance(found, list):
        return _list(asked, found, called.json)
    if not job.leads():
        return DONE
    if isinstance(asked, Health):
        return _judge(found, baseline, called.json)
    from meshwise import store
    from meshwise.verbs import reports as primus

    rows = []
    if paths or isinstance(asked, Fsdp):
        info, _, _ = store.load(found)
        rows = primus.derived(asked, info.cluster, info.world_size)
        primus.write(asked.what, found, rows, **paths)
    return _summarize(asked.what, found, called.json, exact_flops, rows)


def _list(asked: Sweep, cases: "list[tuple[Case, float]]", json: bool) -> int:
    from meshwise.pages import collectives, samples

    document = [{"id": case.id, "case": case, "about_s": about_s} for case, about_s in cases]
    tables = [samples.listing(cases)]
    if isinstance(asked, Fsdp):
        from meshwise.verbs import reports
        from meshwise.verbs.measure import place

        there = place(asked.cluster, asked.nproc, keep=False)
        tables = [*collectives.fsdp_tables(reports.derived(asked, *there), []), *tables]
    emit(document, tables, json)
    return DONE


def _summarize(what: str, run_dir: Path, json: bool, exact: bool, rows: "Sequence[Derived]") -> int:
    """The whole measurement, but of a profile, which is for ``calibrate``, only how it ended."""
    from meshwise import store
    from meshwise.pages import samples

    info, measured, _ = store.load(run_dir)
    if what == "profile":
        tables = [samples.state(info, measured), *samples.failed(measured)]
    else:
        tables = samples.run(info, measured, exact=exact, rows=rows)
    emit(samples.document(run_dir, info, measured), tables, json)
    return code_of(sample.status for sample in measured)


def _judge(run_dir: Path, baseline: tuple[str, ...], json: bool) -> int:
    from meshwise import store
    from meshwise.pages import health, samples

    info, measured, _ = store.load(run_dir)
    past = [sample for path in baseline for sample in store.load(path)[1]] or None
    found = health.findings(info, measured, past)
    document = samples.document(run_dir, info, measured)
    document |= {"verdict": health.verdict(found), "findings": [one._asdict() for one in found]}
    emit(document, health.tables(info, measured, past), json)
    return DONE if health.verdict(found) == "healthy" else SOME_FAILED
