"""The options of ``measure``: a record for each kind of measurement."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from meshwise.options import (
    PYTHON,
    Content,
    File,
    Flag,
    Memory,
    Models,
    Range,
    Shape,
    SomeRecipe,
    Started,
    Time,
)
from meshwise.options.models import DECODERS, MODELS
from meshwise.units import parse_bytes

Mode = Literal["warm", "blocking", "pipelined", "graph"]
Dtype = Literal["fp64", "fp32", "tf32", "bf16", "fp16", "fp8"]
_MOST_LOG2 = 62
SentDtype = Literal[Dtype, "int8", "uint8", "int32", "int64"]

_MODEL = (
    f"Whose operations: of {', '.join((*MODELS, *DECODERS))}, or of a Hugging Face config.json or "
    "its folder; may be repeated."
)


@dataclass(frozen=True, kw_only=True)
class MeasureOptions(Started):
    """Options of every kind of measurement."""

    cluster: File = "cluster.toml"
    "The machine; detected first when cluster.toml does not exist."
    dtype: Dtype | None = None
    "By default bf16 on GPUs and fp32 on CPUs."
    budget: Time | None = None
    "Time to spend, as 120s or 2m; the most useful cases come first. By default all cases."
    resume: bool = False
    "Continue the newest run of the same options and cluster; finished cases are not repeated."
    model: Models = field(default=(), metadata={"help": _MODEL})
    quick: bool = False
    "Spend 65 s of measuring, under 90 s in all."
    sustain: Time = "10s"
    "How long a sustained case lasts."
    follow: Annotated[bool, PYTHON] = True
    "Add sizes where a collective's curve bends, and shapes near the best one searched."

    @property
    def what(self) -> str:
        """The name of the kind."""
        return type(self).__name__.removesuffix("Options").lower()


@dataclass(frozen=True, kw_only=True)
class CountedOptions(MeasureOptions):
    """Options of kinds whose calls users may count themselves."""

    iterations: Annotated[int | None, Range(1, 100_000)] = None
    (
        "Exactly so many timed iterations of each case, however long they take; by default until "
        "the interval is narrow, at most 100."
    )
    warmup: Annotated[int, Range(0, 100_000)] = 0
    "Untimed calls of each case before the timed ones, beyond the first and the checked one."


@dataclass(frozen=True, kw_only=True)
class ProfileOptions(MeasureOptions):
    """Measure what prices rest on, the most useful first."""

    lowering: Literal["eager", "compiled"] | None = None
    "How a model's blocks are run; by default compiled on GPUs and eager on CPUs."
    seq_len: Annotated[int | None, Range(1)] = None
    "Tokens in a sequence of the plan; 1024 on GPUs and 128 on CPUs by default."
    recipe: SomeRecipe | None = None
    'A file or JSON, as of plan and run; {"fp8": true} adds what its layers need.'
    max_comm_size_intra_node: Memory | None = None
    "No larger messages within a host: bytes, as 4G, or up to 62 their base-2 logarithm, as 32."
    max_comm_size_inter_node: Memory | None = None
    "The same of messages between hosts."
    efa: bool = False
    "Let the ranks' libfabric use AWS EFA."
    max_fail_retry: Annotated[int, Range(0)] = 0
    "Measure cases that fail or hang so many times again, where no launcher started the ranks."

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("max_comm_size_intra_node", "max_comm_size_inter_node"):
            if (given := getattr(self, name)) is not None:
                largest_bytes(given, name)  # what is no size is refused at once


def largest_bytes(given: str | int, name: str = "") -> int:
    """Read a size in bytes, or up to 62 its base-2 logarithm. ``name``: the option that has it."""
    size = parse_bytes(str(given), name)
    return 2**size if size <= _MOST_LOG2 else size


@dataclass(frozen=True, kw_only=True)
class GemmOptions(CountedOptions):
    """Matrix products: of models, square, skinny, tiny, and the best shape there is."""

    configs: Annotated[Content | None, Flag("model_config_path")] = None
    "A file of models as Primus writes it (model_configs.json)."
    microbatch_sizes: Annotated[tuple[int, ...], Flag("microbatch_size"), Range(1)] = ()
    "Sequences at once; may be repeated. By default 1, or 1 to 8 with --model-config-path."
    seq_len: Annotated[int | None, Range(1)] = None
    "Tokens of a sequence; by default the model's, at most 4096 (128 on CPUs)."
    dtypes: tuple[Dtype, ...] = ()
    "Products in each of these instead of --dtype; may be repeated."
    modes: Annotated[tuple[Literal["cold", "warm", "graph", "sustained"], ...], Flag("mode")] = ()
    "How products are called; cold by default. sustained lasts --sustain."
    gradients: Annotated[bool, PYTHON] = True
    "Also the products of the backward."
    shape: tuple[Shape, ...] = ()
    (
        "Products as M,N,K, each a number or START:STOP:STEP (without STOP), as "
        "4096:8192:1024,4096,4096; may be repeated."
    )
    square: Annotated[tuple[int, ...], Range(1)] = ()
    "Sides of square products."
    skinny: bool = False
    "Also products with few rows."
    tiny: bool = False
    "Also products that take microseconds."
    search: bool = False
    "Search for the shape with the highest rate."


@dataclass(frozen=True, kw_only=True)
class AttentionOptions(CountedOptions):
    """Attention by every available back end, forward and backward."""

    shapes: Annotated[Content | None, Flag("shapes_json_path")] = None
    "A file of shapes as Primus writes it (attention_shapes.json)."
    microbatch_sizes: Annotated[tuple[int, ...], Flag("microbatch_size"), Range(1)] = ()
    "Sequences at once; may be repeated. By default 1, or 1 to 8 with --shapes-json-path."
    seq_lens: Annotated[tuple[int, ...], Flag("seq_len"), Range(1)] = ()
    "Lengths; may be repeated."
    backends: Annotated[tuple[str, ...], Flag("backend")] = ()
    (
        "flash, cudnn, efficient, math, flex, varlen, fa3, fa4, or torch (what it picks); all by "
        "default."
    )
    directions: Annotated[tuple[Literal["forward", "backward"], ...], PYTHON] = ()
    "Both by default."
    windows: Annotated[tuple[int, ...], Flag("window"), Range(1)] = ()
    "Keys that a query sees at most; may be repeated."
    causal: Annotated[bool, PYTHON] = True
    "No query sees later keys."


@dataclass(frozen=True, kw_only=True)
class CollectivesOptions(CountedOptions):
    """Collectives and messages, over any group and size, checked."""

    dtype: SentDtype | None = None  # type: ignore[assignment]
    "By default bf16 on GPUs and fp32 on CPUs; NCCL moves fp8, and reduces the others."
    op: Literal["sum", "prod", "max", "min", "avg"] = "sum"
    "How all_reduce, reduce_scatter and reduce reduce (nccl-tests' -o); avg on GPUs."
    root: Annotated[int, Range(0)] = 0
    "The rank within the group that is the root of broadcast, reduce, gather and scatter."
    kinds: Annotated[tuple[str, ...], PYTHON] = ()
    (
        "all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, reduce, gather, scatter, "
        "send_recv (a ring shift); by default the usual five."
    )
    sizes: Memory | None = None
    (
        "As 8..8G:x2, 1M..4M:+1M or 64K,1M; nccl-tests' size (its -b, -e and -f). By default "
        "1K..1G:x4, on CPUs 4K..16M:x4."
    )
    primus_lists: Annotated[bool, PYTHON] = False
    "What the models that Primus lists exchange, at its lengths (128 tokens on CPUs)."
    microbatch_sizes: Annotated[tuple[int, ...], Flag("microbatch_size"), Range(1)] = ()
    "Of --model; may be repeated."
    seq_len: Annotated[int | None, Range(1)] = None
    "Of --model; by default the model's, at most 8192 (128 on CPUs)."
    plan: Annotated[Content | None, Flag("sizes_from")] = None
    "A plan whose collectives are measured."
    splits: Content | None = None
    "An all_to_all_v: a JSON file of the bytes from each rank to each other, a list a rank."
    tables: str | None = None
    (
        "An all_to_all_v of embeddings: BATCH,T0-T1-...,DIM with the batch of all ranks and the "
        "tables of each; several with blanks between."
    )
    groups: int = 1
    "So many groups of equal size at once."
    stride: Annotated[int, Range(1)] = 1
    (
        "Between the ranks of a group, and a divisor of --groups: of 4 ranks, --groups 2 --stride "
        "2 are 0,2 and 1,3."
    )
    ranks: Content | None = None
    "One group of these ranks alone, as 0,2."
    pairs: bool = False
    (
        "One message between every ordered pair of ranks, a pair at a time; of 64M unless --sizes "
        "says otherwise (1M on CPUs)."
    )
    modes: Annotated[tuple[Mode, ...], Flag("mode")] = ()
    (
        "warm (events around each call), blocking, pipelined or graph; graph on GPUs and warm on "
        "CPUs by default. May be repeated."
    )
    backends: Annotated[tuple[str, ...], Flag("backend")] = ()
    (
        "torch (what it picks) by default; gloo, nccl (called directly), one_shot, two_shot and "
        "peer_copy (through symmetric memory). May be repeated."
    )
    place: Literal["out", "in", "both"] = "out"
    (
        "In place or out of place, where a back end has both; torch's all_reduce, reduce and "
        "broadcast are in place."
    )


@dataclass(frozen=True, kw_only=True)
class FsdpOptions(MeasureOptions):
    """The messages that FSDP2 sends for a model (llama-3-70b, on CPUs gpt-30m), unit by unit, and
    their nccl-tests commands."""

    replicas: int = 1
    "Groups among which the shards are repeated (HSDP)."
    param_dtype: Dtype | None = None
    "Of gathered weights; --dtype unless given."
    reduce_dtype: Dtype | None = None
    "Of reduced gradients; --dtype unless given."
    modes: Annotated[tuple[Mode, ...], Flag("mode")] = ()
    "How they are called; warm by default. May be repeated."


@dataclass(frozen=True, kw_only=True)
class OverlapOptions(MeasureOptions):
    """Products beside collectives: how much each slows the other down."""

    kinds: Annotated[tuple[str, ...], Flag("kind")] = ()
    "Collectives; may be repeated. By default all_gather, reduce_scatter, all_reduce, send_recv."
    sizes: Memory | None = None
    "Of the messages; 16M,256M by default, on CPUs 256K,4M."
    layers: bool = False
    "The model's layers beside the messages of their FSDP2 unit, instead of its largest product."
    microbatch_size: Annotated[int | None, Range(1)] = None
    "Of models: sequences at once; 1 by default, of layers as many as measure profile takes first."
    seq_len: Annotated[int | None, Range(1)] = None
    "Of models: tokens of a sequence."
    backends: Annotated[tuple[str, ...], PYTHON] = ()
    "Of the collectives."


@dataclass(frozen=True, kw_only=True)
class LayerOptions(CountedOptions):
    """Layers of each kind and the head, as training runs them, forward and backward."""

    lowering: Literal["eager", "compiled"] | None = None
    "By default compiled on GPUs and eager on CPUs."
    microbatch_sizes: Annotated[tuple[int, ...], Flag("microbatch_size"), Range(1)] = ()
    "Sequences or images at once; may be repeated. By default those of measure profile."
    seq_len: Annotated[int | None, Range(1)] = None
    "Tokens in a sequence; 1024 on GPUs and 128 on CPUs by default."
    recipe: SomeRecipe | None = None
    'A file or JSON, as of plan and run; {"fp8": true} adds layers whose products are in fp8.'
    tp: Annotated[tuple[int, ...], Range(1)] = (1,)
    "Ranks that share a layer's weights, with and without sequence parallelism; may be repeated."
    cp: Annotated[tuple[int, ...], Range(1)] = (1,)
    "Ranks that share a sequence; may be repeated."
    ep: Annotated[tuple[int, ...], Range(1)] = (1,)
    "Ranks that share a layer's experts; may be repeated."
    recompute: tuple[Literal["none", "selective", "full"], ...] = ("none",)
    "What a layer's backward recomputes; full and selective time that backward. May be repeated."


@dataclass(frozen=True, kw_only=True)
class HealthOptions(MeasureOptions):
    """All devices and links at once: which is slow, and by what evidence. Exit code 4 on a
    fault."""

    quick: bool = False
    "Neighbouring pairs only, nothing sustained."


KINDS: dict[str, type[MeasureOptions]] = {
    "profile": ProfileOptions,
    "gemm": GemmOptions,
    "attention": AttentionOptions,
    "collectives": CollectivesOptions,
    "fsdp": FsdpOptions,
    "overlap": OverlapOptions,
    "layer": LayerOptions,
    "health": HealthOptions,
}
