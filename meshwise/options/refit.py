"""The options of ``refit``."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from meshwise.options import PYTHON, File, Flag, Memory, Names, Options, Range, Rate, Started
from meshwise.spec.weights import Order

_Degree = Annotated[int | None, Range(1, 2**24)]


@dataclass(frozen=True, kw_only=True)
class Training(Options):
    """The layout of training."""

    tp: Annotated[_Degree, Flag("tensor_model_parallel_size")] = None
    "Of training."
    pp: Annotated[_Degree, Flag("pipeline_model_parallel_size")] = None
    "Of training."
    ep: Annotated[_Degree, Flag("expert_model_parallel_size")] = None
    "Of training; it multiplies the ranks, as in Megatron's benchmark."
    etp: Annotated[_Degree, Flag("expert_tensor_parallel_size")] = None
    "Of training's experts; by default the tensor-model-parallel size."
    fsdp: Annotated[_Degree, Flag("fsdp_size")] = None
    "Shards of training by FSDP2."


@dataclass(frozen=True, kw_only=True)
class Inference(Options):
    """The layout of inference; as training unless given."""

    tp: Annotated[_Degree, Flag("rl_inference_tensor_model_parallel_size")] = None
    "Of inference."
    pp: Annotated[_Degree, Flag("rl_inference_pipeline_model_parallel_size")] = None
    "Of inference."
    ep: Annotated[_Degree, Flag("rl_inference_expert_model_parallel_size")] = None
    "Of inference."
    etp: Annotated[_Degree, Flag("rl_inference_expert_tensor_model_parallel_size")] = None
    "Of inference's experts."


@dataclass(frozen=True, kw_only=True)
class ModelSizes(Options):
    """The sizes of a model; a scenario's own unless given."""

    layers: Annotated[_Degree, Flag("num_layers")] = None
    "Layers."
    hidden: Annotated[_Degree, Flag("hidden_size")] = None
    "Width."
    ffn: Annotated[_Degree, Flag("ffn_hidden_size")] = None
    "Width of the feed-forward; by default 4 x hidden, with --swiglu 8/3 x."
    heads: Annotated[_Degree, Flag("num_attention_heads")] = None
    "Heads."
    kv_heads: Annotated[_Degree, Flag("num_query_groups")] = None
    "Heads of k and v; by default as many as heads."
    num_experts: _Degree = None
    "Experts in place of each feed-forward."
    expert_ffn: Annotated[_Degree, Flag("moe_ffn_hidden_size")] = None
    "Width of an expert; by default the feed-forward's."
    vocab: Annotated[_Degree, Flag("vocab_size")] = None
    "Tokens; padded as Megatron and vLLM do."
    gated: Annotated[bool, Flag("swiglu")] = False
    "Gated feed-forwards."


@dataclass(frozen=True, kw_only=True)
class Moving(Options):
    """Weights to move, and how that is timed."""

    scenario: Names = field(default=(), kw_only=False)
    "Names or numbers of the menu (--list), which options change. By default the degrees given."
    model: str | None = None
    "A name of the catalogue, as llama-3-8b, or a Hugging Face config.json or its folder."
    source: Annotated[str | None, Flag("from")] = None
    "In place of --model: hf:, megatron: or plain: and the model of training, as hf:DIR."
    destination: Annotated[str | None, Flag("to")] = None
    "With --from: vllm: or another of these and the model of inference, as vllm:DIR."
    layout: str | None = None
    "Degrees of training in a word each, as 'fsdp4 tp2'; x2: two replicas."
    sizes: Annotated[Mapping[str, Any] | None, PYTHON] = None
    "Other sizes of the model: fields of ``ModelSizes``."
    train: Annotated[Mapping[str, int] | None, PYTHON] = None
    "Degrees of training: tp, pp, ep, etp, fsdp, replicas."
    infer: Annotated[Mapping[str, int] | None, PYTHON] = None
    "The same of inference."
    dtype: Annotated[str | None, PYTHON] = None
    "Of the weights: by default the scenario's, of a model bf16."
    orders: Annotated[tuple[Order, Order], PYTHON] = ("megatron", "engine")
    "Names and order within fused tensors of training and inference; engine is vLLM's."
    mode: Annotated[Literal["collocated", "non-collocated", "all"] | None, Flag("refit_mode")] = (
        None
    )
    "Both models on the same GPUs, on different ones, or both measured. By default the scenario's."
    method: Annotated[
        Literal["nccl", "nvshmem", "gloo", "ipc", "auto", "all"], Flag("refit_method")
    ] = "auto"
    "How weights travel; auto is the fastest that works here, all measures each."
    warmup: Annotated[int, Range(0), Flag("num_benchmark_warmup")] = 2
    "Untimed refits."
    iterations: Annotated[int, Range(1), Flag("num_benchmark_iterations")] = 10
    "Timed refits."
    cap: Memory = "512MiB"
    "Extra memory that a GPU may use."
    verify: Literal["hash", "full", "off"] = "hash"
    "In every refit: hash what was sent against what was received, read memory again (full), or no."
    atomic: bool = False
    "Keep the old weights whole until the new ones are verified."
    changed: float | None = None
    "Send only what changed, and change this share of the weights before each refit."
    place: bool = False
    "Renumber the inference ranks so that the fewest bytes travel."
    check: Annotated[bool, PYTHON] = True
    "Compare every destination element once, outside the timing."
    rate: Rate | None = None
    "Of a GPU's links, as 373GB/s, for the bounds; by default the cluster's."
    figure: File | None = None
    "With --dry-run: draw the (first) transfer into this SVG file."
    cluster: File = "cluster.toml"
    "The machine. Of a dry run the hosts and links, by default h200-hgx."
    output_dir: File | None = None
    "Where logs/RUN_ID.log goes; by default OUTPUT_DIR, else benchmark_results."


@dataclass(frozen=True, kw_only=True)
class RefitOptions(Started, Moving):
    """Move a model's weights from a training to an inference layout."""
