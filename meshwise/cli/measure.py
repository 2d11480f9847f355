"""``meshwise measure``: one sub-command for each kind of measurement."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import cyclopts
from cyclopts import Parameter

import meshwise
from meshwise.cli.options import ANY, DECODERS, MODELS, WAITS, DryRun, Json, Runs, Size, Waits
from meshwise.cli.output import DONE, SOME_FAILED, code_of, emit
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

Models = Annotated[
    tuple[str, ...],
    Parameter(
        name="--model",
        help=f"Whose operations: of {', '.join((*MODELS, *DECODERS))}, or of a Hugging Face "
        "config.json or its folder; may be repeated.",
    ),
]
Mode = Literal["warm", "blocking", "pipelined", "graph"]
Dtype = Literal["fp64", "fp32", "tf32", "bf16", "fp16", "fp8"]


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Sweep(Waits):
    """How any kind is measured."""

    cluster: str = "cluster.toml"
    "The machine; detected first when cluster.toml does not exist."
    dtype: Dtype | None = None
    "By default bf16 on GPUs and fp32 on CPUs."
    budget: str | None = None
    "Time to spend, as 120s or 2m; the most useful cases come first. By default all cases."
    resume: bool = False
    "Continue the newest run of this kind and cluster without repeating finished cases."
    master_addr: str | None = None
    "With --master-port: where the ranks of several hosts meet, when no launcher says it."
    master_port: int | None = None
    "See --master-addr."
    runs: Runs = "runs"
    dry_run: DryRun = False
    json: Json = False

    def options(self) -> dict[str, Any]:
        """As ``meshwise.measure`` takes them."""
        job.meet_at(self.master_addr, self.master_port)
        names = (*vars(WAITS), "cluster", "dtype", "budget", "resume", "runs", "dry_run")
        return {name: getattr(self, name) for name in names}


USUAL = Sweep()


@app.default
def profile(
    *,
    model: Models = (),
    lowering: Literal["eager", "compiled"] | None = None,
    seq_len: int | None = None,
    quick: bool = False,
    sweep: Sweep = USUAL,
    size: Size = ANY,
) -> int:
    """What prices rest on, the most useful first.

    Parameters
    ----------
    lowering
        How a model's blocks are run; by default compiled on GPUs and eager on CPUs.
    seq_len
        Tokens in a sequence of the plan; 1024 on GPUs and 128 on CPUs by default.
    quick
        Spend 65 s of measuring, under 90 s in all.
    """
    options = {"model": model, "quick": quick, **_given(lowering=lowering, seq_len=seq_len)}
    return _measure("profile", options, sweep, size)


app.command(profile, name="profile", sort_key=0)


@app.command(sort_key=1)
def gemm(
    *,
    model: Models = (),
    model_config_path: str | None = None,
    microbatch_size: tuple[int, ...] = (),
    seq_len: int | None = None,
    dtypes: tuple[Dtype, ...] = (),
    mode: tuple[Literal["cold", "warm", "graph", "sustained"], ...] = (),
    square: tuple[int, ...] = (),
    skinny: bool = False,
    tiny: bool = False,
    search: bool = False,
    sustain: str = "10s",
    report_dir_path: str | None = None,
    sweep: Sweep = USUAL,
    size: Size = ANY,
) -> int:
    """Matrix products: of models, square, skinny, tiny, and the best shape there is.

    Parameters
    ----------
    model_config_path
        A file of models as Primus writes it (model_configs.json).
    microbatch_size
        Sequences at once; may be repeated. By default 1, or 1 to 8 with --model-config-path.
    seq_len
        Tokens of a sequence; by default the model's, at most 4096 (128 on CPUs).
    dtypes
        Products in each of these instead of --dtype; may be repeated.
    mode
        How products are called; cold by default. sustained lasts --sustain.
    square
        Sides of square products.
    skinny
        Also products with few rows.
    tiny
        Also products that take microseconds.
    search
        Search the shape with the highest rate.
    sustain
        How long a sustained case lasts.
    report_dir_path
        Also write benchmark_gemm_<model>.csv and .json with Primus' columns into this folder.
    """
    if report_dir_path is not None and not (model or model_config_path):
        raise ValueError(
            f"report_dir_path = {report_dir_path!r}: its files are of models; give --model or "
            "--model-config-path"
        )
    options = {"sustain": sustain, **_given(
        model=model, configs=model_config_path, microbatch_sizes=microbatch_size, seq_len=seq_len,
        dtypes=dtypes, modes=mode, square=square, skinny=skinny, tiny=tiny, search=search,
    )}  # fmt: skip
    reports = _given(report_dir_path=report_dir_path)
    return _measure("gemm", options, sweep, size, reports)


@app.command(sort_key=2)
def attention(
    *,
    model: Models = (),
    shapes_json_path: str | None = None,
    microbatch_size: tuple[int, ...] = (),
    seq_len: tuple[int, ...] = (),
    backend: tuple[str, ...] = (),
    window: tuple[int, ...] = (),
    full: bool = False,
    exact_flops: bool = False,
    report_csv_path: str | None = None,
    sweep: Sweep = USUAL,
    size: Size = ANY,
) -> int:
    """Attention by every back end there is, forward and backward.

    Parameters
    ----------
    shapes_json_path
        A file of shapes as Primus writes it (attention_shapes.json).
    microbatch_size
        Sequences at once; may be repeated. By default 1, or 1 to 8 with --shapes-json-path.
    seq_len
        Lengths; may be repeated.
    backend
        flash, cudnn, efficient, math, flex, varlen, fa3, fa4, or torch (what it picks); all by
        default.
    window
        Keys that a query sees at most; may be repeated.
    full
        Not causal.
    exact_flops
        Count the pairs that the mask leaves, instead of half of all when causal.
    report_csv_path
        Also write a CSV with Primus' columns.
    """
    options = _given(
        model=model, shapes=shapes_json_path, microbatch_sizes=microbatch_size, seq_lens=seq_len,
        backends=backend, windows=window,
    )  # fmt: skip
    options |= {"causal": False} if full else {}
    reports = _given(report_csv_path=report_csv_path, exact_flops=exact_flops)
    return _measure("attention", options, sweep, size, reports)


@app.command(sort_key=3)
def collectives(
    *kind: str,
    sizes: str | None = None,
    model: Models = (),
    microbatch_size: tuple[int, ...] = (),
    seq_len: int | None = None,
    sizes_from: str | None = None,
    splits: str | None = None,
    tables: str | None = None,
    groups: int = 1,
    ranks: str | None = None,
    pairs: bool = False,
    mode: tuple[Mode, ...] = (),
    backend: tuple[str, ...] = (),
    place: Literal["out", "in", "both"] = "out",
    as_measured: bool = False,
    report_dir_path: str | None = None,
    sweep: Sweep = USUAL,
    size: Size = ANY,
) -> int:
    """Collectives and messages, over any group and size, checked.

    Parameters
    ----------
    kind
        all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, reduce, gather, scatter,
        send_recv (a ring shift); by default the usual five.
    sizes
        As 8..8G:x2, 1M..4M:+1M or 64K,1M; nccl-tests' size (its -b, -e and -f). By default
        1K..1G:x4, on CPUs 4K..16M:x4.
    microbatch_size
        Of --model; may be repeated.
    seq_len
        Of --model; by default the model's, at most 8192 (128 on CPUs).
    sizes_from
        A plan whose collectives are measured.
    splits
        An all_to_all_v: a JSON file of the bytes from each rank to each other, a list a rank.
    tables
        An all_to_all_v of embeddings: BATCH,T0-T1-...,DIM with the batch of all ranks and the
        tables of each.
    groups
        So many groups of equal size at once.
    ranks
        One group of these ranks alone, as 0,2.
    pairs
        One message between every ordered pair of ranks, a pair at a time; of 64M unless --sizes
        says otherwise (1M on CPUs).
    mode
        warm (events around each call), blocking, pipelined or graph; graph on GPUs and warm on
        CPUs by default. May be repeated.
    backend
        torch (what it picks) by default; gloo, nccl (called directly), one_shot, two_shot and
        peer_copy (through symmetric memory). May be repeated.
    place
        In place or out of place, where a back end has both; torch's all_reduce, reduce and
        broadcast are in place.
    as_measured
        Measure these sizes only, without more where a curve bends.
    report_dir_path
        Also write five CSVs with Primus' columns into this folder: allreduce_benchmark.csv, ...
        Without --model of the models that Primus lists, at its lengths (128 tokens on CPUs).
    """
    as_primus = report_dir_path is not None and not model  # it measures what its models exchange
    if as_primus:
        microbatch_size = microbatch_size or tuple(range(1, 9))
    options = _given(
        kinds=kind, sizes=sizes, model=model, primus_lists=as_primus,
        microbatch_sizes=microbatch_size, seq_len=seq_len, plan=sizes_from, splits=splits,
        tables=tables, ranks=ranks, pairs=pairs, modes=mode, backends=backend,
    )  # fmt: skip
    options |= {"groups": groups, "place": place, "follow": not as_measured}
    reports = _given(report_dir_path=report_dir_path)
    return _measure("collectives", options, sweep, size, reports)


@app.command(sort_key=4)
def fsdp(
    *,
    model: Models = (),
    replicas: int = 1,
    param_dtype: Dtype | None = None,
    reduce_dtype: Dtype | None = None,
    mode: tuple[Mode, ...] = (),
    allgather_report_csv_path: str | None = None,
    reducescatter_report_csv_path: str | None = None,
    sweep: Sweep = USUAL,
    size: Size = ANY,
) -> int:
    """The messages that FSDP2 sends for a model (llama-3-70b, on CPUs gpt-30m), unit by unit, and
    their nccl-tests commands.

    Parameters
    ----------
    replicas
        Groups among which the shards are repeated (HSDP).
    param_dtype
        Of gathered weights; --dtype unless given.
    reduce_dtype
        Of reduced gradients; --dtype unless given.
    mode
        How they are called; warm by default. May be repeated.
    allgather_report_csv_path
        Also write a CSV of all-gathers with Primus' columns.
    reducescatter_report_csv_path
        The same of reduce-scatters.
    """
    options = {"replicas": replicas, **_given(
        model=model, param_dtype=param_dtype, reduce_dtype=reduce_dtype, modes=mode,
    )}  # fmt: skip
    reports = _given(
        allgather_report_csv_path=allgather_report_csv_path,
        reducescatter_report_csv_path=reducescatter_report_csv_path,
    )
    return _measure("fsdp", options, sweep, size, reports)


@app.command(sort_key=5)
def overlap(
    *,
    model: Models = (),
    kind: tuple[str, ...] = (),
    sizes: str | None = None,
    sweep: Sweep = USUAL,
    size: Size = ANY,
) -> int:
    """How much products and collectives slow each other down.

    Parameters
    ----------
    kind
        Collectives; may be repeated. By default all_gather, reduce_scatter, all_reduce, send_recv.
    sizes
        Of the messages; 16M,256M by default, on CPUs 256K,4M.
    """
    options = _given(model=model, kinds=kind, sizes=sizes)
    return _measure("overlap", options, sweep, size)


@app.command(sort_key=6)
def health(
    *,
    quick: bool = False,
    baseline: tuple[str, ...] = (),
    sweep: Sweep = USUAL,
    size: Size = ANY,
) -> int:
    """All devices and links at once: which is slow, and by what evidence. Exit code 4 on a fault.

    Parameters
    ----------
    quick
        Neighbouring pairs only, nothing sustained.
    baseline
        Run directories of earlier health runs to compare with; may be repeated.
    """
    reports = _given(baseline=baseline)
    return _measure("health", _given(quick=quick), sweep, size, reports)


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


def _given(**options: Any) -> dict[str, Any]:
    """The options that say something."""
    return {
        name: value
        for name, value in options.items()
        if value is not None and value is not False and value != ()
    }


def _measure(
    what: str,
    options: dict[str, Any],
    sweep: Sweep,
    size: Size,
    reports: dict[str, Any] | None = None,
) -> int:
    reports = reports or {}
    baseline, exact = reports.pop("baseline", ()), reports.pop("exact_flops", False)
    if reports and job.leads() and not sweep.dry_run:
        from meshwise.verbs.reports import check_writable

        check_writable(reports.values())
    found = meshwise.measure(what, nproc=size.ranks, **sweep.options(), **options)
    rest = {name: value for name, value in options.items() if name not in ("sustain", "follow")}
    if isinstance(found, list):
        return _list(what, found, sweep, size, rest)
    if not job.leads():
        return DONE
    if what == "health":
        return _judge(found, baseline, sweep.json)
    from meshwise import store
    from meshwise.verbs import reports as files

    rows = []
    if reports or what == "fsdp":
        info, _, _ = store.load(found)
        rows = files.derived(what, info.cluster, info.world_size, dtype=sweep.dtype, **rest)
        files.write(what, found, rows, **reports)
    return _summarize(what, found, sweep.json, exact, rows)


def _list(
    what: str, cases: "list[tuple[Case, float]]", sweep: Sweep, size: Size, options: dict[str, Any],
) -> int:  # fmt: skip
    from meshwise.pages import collectives, samples

    document = [{"id": case.id, "case": case, "about_s": about_s} for case, about_s in cases]
    tables = [samples.listing(cases)]
    if what == "fsdp":
        from meshwise.verbs import reports
        from meshwise.verbs.measure import place

        there = place(sweep.cluster, size.ranks, keep=False)
        rows = reports.derived(what, *there, dtype=sweep.dtype, **options)
        tables = [*collectives.fsdp_tables(rows, []), *tables]
    emit(document, tables, sweep.json)
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
