"""``meshwise measure ring``: the benchmark of RingDilatedAttentionV2Collective under its flags, and
more."""

from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal

from cyclopts import Parameter

from meshwise.cli.flags import as_typed
from meshwise.cli.options import ANY, WAITS, DryRun, Json, Numbers, Runs, Size, Waits
from meshwise.cli.output import DONE, code_of, emit
from meshwise.verbs import job

CHECK_FAILED = 1
Dtype = Literal["float16", "bfloat16", "float32", "float64"]


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Shape:
    """What is attended."""

    batch_size: int | None = None
    "Sequences of a ring at once; by default 2."
    seq_lengths: Numbers = ()
    "Tokens of a sequence, over all ranks of a ring; by default 16384 32768 65536."
    embed_dim: int | None = None
    "Width of all heads together; by default 768."
    num_heads: int | None = None
    "By default 12."
    kv_heads: int | None = None
    "Heads of keys and values; by default as many as heads."
    segment_lengths: Numbers = ()
    "By default 2048 4096 8192."
    dilation_rates: Numbers = ()
    "One a segment length; by default 1 2 4."
    offsets: Literal["mod", "block", "group"] | None = None
    "First kept row of a head: head mod rate, head by blocks, or heads divided among the branches."
    offset_heads: Literal["query", "kv"] | None = None
    "Whose heads offsets count."
    causal: bool = False
    "No query sees later tokens."
    dense: bool = False
    "No dilation: every query sees all."
    dtype: Dtype | None = None
    "By default float16, on CPUs float32."


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Manner:
    """How it is computed and timed."""

    ring_sizes: Numbers = ()
    "Ranks that share a sequence; by default 1 2 4 8. Those the ranks cannot form are skipped."
    way: Literal["auto", "ring", "gather", "heads", "ring_heads"] | None = None
    "How ranks exchange what they need; auto takes the cheapest."
    order: Literal["contiguous", "zigzag"] | None = None
    "Which tokens a rank holds; zigzag, with --dense, shares causal work equally."
    no_flash_attention: bool = False
    "By another kernel than flash attention's."
    forward_only: bool = False
    "No backward."
    graph: bool = False
    "Replay a CUDA graph."
    warmup_runs: int | None = None
    "Untimed iterations, 3 or more; by default 3."
    benchmark_runs: int | None = None
    "Timed iterations; by default 10."


AS_SOURCE, USUAL = Shape(), Manner()
_FLAGS = ("causal", "dense", "forward_only", "graph")
_OF_FIELDS = {"num_kv_heads": "kv_heads", "heads": "num_heads", "seq_len": "seq_lengths"}


def ring(
    ranks: int | None = None,
    /,
    *,
    shape: Shape = AS_SOURCE,
    manner: Manner = USUAL,
    all_: Annotated[bool, Parameter(name="--all")] = False,
    quick: bool = False,
    large: bool = False,
    profile: bool = False,
    verify: bool = False,
    costs: str | None = None,
    cluster: str = "cluster.toml",
    size: Size = ANY,
    waits: Waits = WAITS,
    output_dir: str | None = None,
    no_save: bool = False,
    runs: Runs = "runs",
    dry_run: DryRun = False,
    json: Json = False,
) -> int:
    """Ring and dilated attention over rings of GPUs: time, scaling, memory, bytes.

    Also read from the environment: BATCH_SIZE, SEQ_LENGTHS, NUM_HEADS, EMBED_DIM, WARMUP_RUNS,
    BENCHMARK_RUNS and OUTPUT_DIR; options win. A case that failed ends in exit code 4.

    Parameters
    ----------
    ranks
        The same as --nproc.
    all_
        Each ring size in a world of its own.
    quick
        8192 and 16384 tokens, 1 warm-up, 3 iterations.
    large
        131072 and 262144 tokens, batch 1, on 4 GPUs unless said otherwise.
    profile
        Each rank leaves a Chrome trace of the first case in --output-dir.
    verify
        Time nothing; check against the definition: exit code 1 if anything is wrong.
    costs
        A costs.json by whose prices the cheapest way is chosen; by default by bytes.
    cluster
        The machine; detected first when cluster.toml does not exist.
    output_dir
        For the JSON and its copy latest.json; by default OUTPUT_DIR, else
        benchmark_results/ring_v2_collective.
    no_save
        Write no file.
    """
    from meshwise.verbs import ring as verb

    modes = [name for name, on in (("all", all_), ("quick", quick), ("large", large)) if on]
    if len(modes) > 1:
        raise ValueError(f"--{' and --'.join(modes)}: give one of them")
    nproc = job.num_ranks(nproc=size.ranks, gpus=ranks)
    with as_typed((*vars(shape), *vars(manner), *vars(waits), "output_dir"), **_OF_FIELDS):
        what = verb.asked(
            mode=modes[0] if modes else "",  # type: ignore[arg-type]
            nproc=nproc, cluster=cluster, costs=costs, keep=not dry_run, **_given(shape, manner),
        )  # fmt: skip
        if dry_run:
            return _forecast(what, json)
        if verify:
            return _verify(what, waits, json)
        found = verb.measure_ring(
            what, runs=runs, output_dir=output_dir, save=not no_save, profile=profile,
            **asdict(waits),
        )  # fmt: skip
    return _results(found, json) if job.leads() else DONE


def _given(shape: Shape, manner: Manner) -> dict[str, Any]:
    """The settings that were given."""
    found = {**vars(shape), **vars(manner)}
    found["num_kv_heads"] = found.pop("kv_heads")
    found["use_flash_attention"] = False if found.pop("no_flash_attention") else None
    found |= {name: found[name] or None for name in _FLAGS}
    return {name: value for name, value in found.items() if value not in (None, ())}


def _forecast(what: Any, json: bool) -> int:
    import msgspec

    from meshwise.pages import scaling
    from meshwise.verbs.ring import forecast

    found = forecast(what)
    config = msgspec.to_builtins(what.chosen)
    emit(found, scaling.dry_run(config, [(one, one["reason"]) for one in found]), json)
    return DONE


def _verify(what: Any, waits: Waits, json: bool) -> int:
    from meshwise.pages import ring as page
    from meshwise.verbs.ring import verify_ring

    found, notes = verify_ring(what, **asdict(waits))
    if not job.leads():
        return DONE
    emit({"checks": found, "notes": notes}, page.checks(found, notes), json)
    return CHECK_FAILED if any(one["passed"] is False for one in found) else DONE


def _results(found: Any, json: bool) -> int:
    from meshwise.pages import scaling
    from meshwise.pages.table import Table

    places = [str(path) for path in (found.run_dir, *found.files) if path is not None]
    written = [Table("Written", ("",), tuple((place,) for place in places))] if places else []
    emit(found.document, [*scaling.of_run(found.document), *written], json)
    return code_of(row["status"] for row in found.document["results"])
