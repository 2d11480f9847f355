"""``meshwise refit``: Megatron's refit benchmark under its flags, and more."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

import meshwise
from meshwise.cli.options import ANY, WAITS, Json, Runs, Size, Waits
from meshwise.cli.output import DONE, code_of, emit, say
from meshwise.verbs import job

if TYPE_CHECKING:
    from meshwise.spec.refit import Forecast

Order = Literal["plain", "megatron", "engine"]


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Degrees:
    """How training and inference are laid out; inference as training unless given."""

    tensor_model_parallel_size: int | None = None
    "Of training."
    pipeline_model_parallel_size: int | None = None
    "Of training."
    expert_model_parallel_size: int | None = None
    "Of training; it multiplies the ranks, as in Megatron's benchmark."
    expert_tensor_parallel_size: int | None = None
    "Of training's experts; by default the tensor-model-parallel size."
    fsdp_size: int | None = None
    "Shards of training by FSDP2."
    rl_inference_tensor_model_parallel_size: int | None = None
    "Of inference."
    rl_inference_pipeline_model_parallel_size: int | None = None
    "Of inference."
    rl_inference_expert_model_parallel_size: int | None = None
    "Of inference."
    rl_inference_expert_tensor_model_parallel_size: int | None = None
    "Of inference's experts."
    train_order: Order = "megatron"
    "Names and order within fused tensors of training."
    inference_order: Order = "engine"
    "The same of inference; engine is vLLM's."


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The model; a scenario's own unless given."""

    model: str | None = None
    "A name of the catalogue, as llama-3-8b, or a Hugging Face config.json or its folder."
    num_layers: int | None = None
    "Layers."
    hidden_size: int | None = None
    "Width."
    ffn_hidden_size: int | None = None
    "Width of the feed-forward; by default 4 x hidden, with --swiglu 8/3 x."
    num_attention_heads: int | None = None
    "Heads."
    num_query_groups: int | None = None
    "Heads of k and v; by default as many as heads."
    num_experts: int | None = None
    "Experts in place of each feed-forward."
    moe_ffn_hidden_size: int | None = None
    "Width of an expert; by default the feed-forward's."
    vocab_size: int | None = None
    "Tokens; padded as Megatron and vLLM do."
    seq_length: int | None = None
    "Accepted and of no effect: weights do not depend on it."
    max_position_embeddings: int | None = None
    "Accepted and of no effect: positions are rotary."
    micro_batch_size: int | None = None
    "Accepted and of no effect: nothing is trained."
    group_query_attention: bool = False
    "Accepted and of no effect: --num-query-groups says it."
    transformer_impl: str | None = None
    "Accepted and of no effect: nothing is computed."
    normalization: str | None = None
    "Accepted and of no effect: norms have a weight each."
    position_embedding_type: str | None = None
    "Accepted and of no effect: positions are rotary."
    tokenizer_type: str | None = None
    "Accepted and of no effect: --vocab-size says it."
    num_workers: int | None = None
    "Accepted and of no effect: no data is read."
    distributed_timeout_minutes: int | None = None
    "Accepted and of no effect: --timeout says it."
    bf16: bool = False
    "Weights in bf16; of --model the default. Megatron's scenarios are fp32, others bf16."
    fp16: bool = False
    "Weights in fp16."
    fp32: bool = False
    "Weights in fp32."
    swiglu: bool = False
    "Gated feed-forwards."
    untie_embeddings_and_output_weights: bool = False
    "Accepted and of no effect: they are untied here."
    disable_bias_linear: bool = False
    "Accepted and of no effect: there are no biases here."
    no_load_checkpoint: bool = False
    "Accepted and of no effect: weights are synthetic."


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Manner:
    """How weights are moved."""

    cap: str = "512MiB"
    "Extra memory that a GPU may use."
    verify: Literal["hash", "full", "off"] = "hash"
    "In every refit: hash what was sent against what was received, read memory again (full), or no."
    atomic: bool = False
    "Keep the old weights whole until the new ones are verified."
    delta: bool = False
    "Send only what changed."
    changed: float | None = None
    "With --delta: the share of the weights that changes before each refit, by default 0.02."
    place: bool = False
    "Renumber the inference ranks so that the fewest bytes travel."


_SIZES = {
    "layers": "num_layers", "hidden": "hidden_size", "ffn": "ffn_hidden_size",
    "heads": "num_attention_heads", "kv_heads": "num_query_groups", "num_experts": "num_experts",
    "expert_ffn": "moe_ffn_hidden_size", "vocab": "vocab_size",
}  # fmt: skip
_TRAIN = {
    "tp": "tensor_model_parallel_size", "pp": "pipeline_model_parallel_size",
    "ep": "expert_model_parallel_size", "etp": "expert_tensor_parallel_size", "fsdp": "fsdp_size",
}  # fmt: skip
_INFER = {
    "tp": "rl_inference_tensor_model_parallel_size",
    "pp": "rl_inference_pipeline_model_parallel_size",
    "ep": "rl_inference_expert_model_parallel_size",
    "etp": "rl_inference_expert_tensor_model_parallel_size",
}
CHANGED = 0.02  # as a step of reinforcement learning changes bf16 weights, or fewer
_LARGEST = 2**24  # of a size or a degree

AS_SCENARIO, AS_MODEL, USUAL = Degrees(), Sizes(), Manner()


def refit(
    *,
    scenario: tuple[str, ...] = (),
    refit_mode: Literal["collocated", "non-collocated", "all"] | None = None,
    refit_method: Literal["nccl", "nvshmem", "gloo", "ipc", "auto", "all"] = "auto",
    num_benchmark_warmup: int = 2,
    num_benchmark_iterations: int = 10,
    degrees: Degrees = AS_SCENARIO,
    sizes: Sizes = AS_MODEL,
    manner: Manner = USUAL,
    check: Annotated[bool, Parameter(negative="--no-check")] = True,
    step_time: str | None = None,
    rate: str | None = None,
    figure: str | None = None,
    list_: Annotated[bool, Parameter(name="--list")] = False,
    dry_run: bool = False,
    cluster: str = "cluster.toml",
    size: Size = ANY,
    waits: Waits = WAITS,
    output_dir: str | None = None,
    runs: Runs = "runs",
    json: Json = False,
) -> int:
    """Move a model's weights from a training to an inference layout; time and check it.

    Weights are synthetic, and every element is compared. --dry-run needs no GPU and says what would
    move. In a training loop use meshwise.Refit.

    Parameters
    ----------
    scenario
        A name or a number of the menu (--list); may be repeated. Options change it. By default the
        degrees given, of a small GPT.
    refit_mode
        The two models on the same GPUs, or on different ones, or both measured. By default the
        scenario's.
    refit_method
        How weights travel; auto is the fastest that works here, all measures each.
    num_benchmark_warmup
        Untimed refits.
    num_benchmark_iterations
        Timed refits.
    check
        Compare every destination element once, outside the timing.
    step_time
        Of a training step, as 2s: shows which share of it a refit takes.
    rate
        Of a GPU's links, as 373GB/s, for the bounds; by default the cluster's.
    figure
        With --dry-run: draw the (first) transfer into this SVG file.
    list_
        Name the scenarios and do nothing.
    dry_run
        Say what would move, how fast it could be and what binds; needs no GPU.
    cluster
        The machine. Of a dry run the hosts and links, by default h200-hgx.
    output_dir
        Where logs/RUN_ID.log goes; by default OUTPUT_DIR, else benchmark_results.
    """
    if list_:
        return _list(json)
    step_s = _step_s(step_time)
    found = meshwise.refit(
        *scenario, **_model(sizes), **_layouts(degrees),
        mode=refit_mode, method=refit_method, cap=manner.cap, verify=manner.verify,
        atomic=manner.atomic, changed=_changed(manner),
        place=manner.place, check=check,
        warmup=num_benchmark_warmup, iterations=num_benchmark_iterations, rate=rate,
        cluster=cluster, nproc=size.ranks, **asdict(waits), runs=runs, output_dir=output_dir,
        dry_run=dry_run, figure=figure,
    )  # fmt: skip
    if isinstance(found, list):
        return _forecasts(found, step_s, json)
    return _results(found, step_s, json) if job.leads() else DONE


def _step_s(text: str | None) -> float | None:
    from meshwise.units import parse_seconds

    step_s = None if text is None else parse_seconds(text, "step_time")
    if step_s is not None and not 1e-9 <= step_s < 1e9:
        raise ValueError(f"step_time = {text!r}: must be some time, as 2s")
    return step_s


def _changed(manner: Manner) -> float | None:
    """The share that changes; None where all is sent."""
    if manner.delta:
        return CHANGED if manner.changed is None else manner.changed
    if manner.changed is not None:
        raise ValueError(f"changed = {manner.changed}: is of what --delta sends; add --delta")
    return None


def _given(options: object, names: dict[str, str]) -> dict[str, int]:
    found = {field: getattr(options, name) for field, name in names.items()}
    for field, value in found.items():
        if value is not None and not 1 <= value <= _LARGEST:
            raise ValueError(f"{names[field]} = {value}: must be >= 1 and <= {_LARGEST}")
    return {field: value for field, value in found.items() if value is not None}


def _model(sizes: Sizes) -> dict[str, Any]:
    dtypes = [dtype for dtype in ("bf16", "fp16", "fp32") if getattr(sizes, dtype)]
    if len(dtypes) > 1:
        raise ValueError(f"--{' and --'.join(dtypes)}: give one of them")
    given: dict[str, Any] = _given(sizes, _SIZES)
    if sizes.swiglu:
        given["gated"] = True
    return {"model": sizes.model, "sizes": given, "dtype": dtypes[0] if dtypes else None}


def _layouts(degrees: Degrees) -> dict[str, Any]:
    return {
        "train": _given(degrees, _TRAIN),
        "infer": _given(degrees, _INFER),
        "orders": (degrees.train_order, degrees.inference_order),
    }


def _list(json: bool) -> int:
    from meshwise.pages import refit as page
    from meshwise.probe.cases import refit as cases

    numbers = {
        names[0]: number
        for number, (names, methods) in cases.MENU.items()
        if len(names) == 1 and not methods
    }
    rows = [
        (one, cases.num_ranks(one, one.mode), numbers.get(one.name, ""))
        for one in cases.scenarios().values()
    ]
    document = [
        {"scenario": one, "gpus": gpus, "menu": menu, "command": page.command(one)}
        for one, gpus, menu in rows
    ]
    emit(document, page.listing(rows), json)
    return DONE


def _forecasts(found: "list[Forecast]", step_s: float | None, json: bool) -> int:
    from meshwise.pages import refit as page

    emit(found, page.forecasts(found, step_s), json)
    return DONE


def _results(run_dir: Path, step_s: float | None, json: bool) -> int:
    """The log's lines, then one table; with --json the document alone."""
    from meshwise import store
    from meshwise.pages import refit as page
    from meshwise.pages import samples

    info, measured, _ = store.load(run_dir)
    best = page.recommended(measured)
    document = samples.document(run_dir, info, measured)
    document |= {"recommended": best and best.case_id, "step_s": step_s}
    if not json:
        say(*(line for sample in measured for line in page.log_lines(sample)), "")
    tables = [samples.state(info, measured), *page.tables(measured, step_s)]
    emit(document, [*tables, *samples.failed(measured)], json)
    return code_of(sample.status for sample in measured)
