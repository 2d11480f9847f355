"""The options of ``measure ring`` and ``show pattern``."""

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from meshwise.options import PYTHON, File, Flag, Options, Range, Started

Offsets = Literal["mod", "block", "group"]
Heads = Literal["query", "kv"]


@dataclass(frozen=True, kw_only=True)
class Settings(Options):
    """Sizes, and how attention is computed and timed: fields of ``cases.ring.RingSettings``."""

    batch_size: int | None = None
    "Sequences of a ring at once; by default 2."
    seq_lengths: tuple[int, ...] = ()
    "Tokens of a sequence, over all ranks of a ring; by default 16384 32768 65536."
    embed_dim: int | None = None
    "Width of all heads together; by default 768."
    num_heads: int | None = None
    "By default 12."
    num_kv_heads: Annotated[int | None, Flag("kv_heads")] = None
    "Heads of keys and values; by default as many as heads."
    segment_lengths: tuple[int, ...] = ()
    "By default 2048 4096 8192."
    dilation_rates: tuple[int, ...] = ()
    "One a segment length; by default 1 2 4."
    offsets: Offsets | None = None
    "First kept row of a head: head mod rate, head by blocks, or heads divided among the branches."
    offset_heads: Heads | None = None
    "Whose heads offsets count."
    causal: bool = False
    "No query sees later tokens."
    dense: bool = False
    "No dilation: every query sees all."
    dtype: Literal["float16", "bfloat16", "float32", "float64"] | None = None
    "By default float16, on CPUs float32."
    ring_sizes: tuple[int, ...] = ()
    "Ranks that share a sequence; by default 1 2 4 8. Those the ranks cannot form are skipped."
    way: Literal["auto", "ring", "gather", "heads", "ring_heads"] | None = None
    "How ranks exchange what they need; auto takes the cheapest."
    order: Literal["contiguous", "zigzag"] | None = None
    "Which tokens a rank holds; zigzag, with --dense, shares causal work equally."
    use_flash_attention: Annotated[bool, PYTHON] = True
    "By flash attention's kernel, or another."
    forward_only: bool = False
    "No backward."
    graph: bool = False
    "Replay a CUDA graph."
    warmup_runs: int | None = None
    "Untimed iterations, 3 or more; by default 3."
    benchmark_runs: int | None = None
    "Timed iterations; by default 10."

    def settings(self) -> dict[str, Any]:
        """The fields above that were given."""
        return {name: value for name, value in self.said().items() if name in vars(Settings())}


@dataclass(frozen=True, kw_only=True)
class RingOptions(Started, Settings):
    """Time ring and dilated attention."""

    mode: Annotated[Literal["", "all", "quick", "large"], PYTHON] = ""
    "Each ring size in a world of its own, few iterations, or long sequences."
    profile: bool = False
    "Each rank leaves a Chrome trace of the first case in --output-dir."
    costs: File | None = None
    "A costs.json by whose prices the cheapest way is chosen; by default by bytes."
    cluster: File = "cluster.toml"
    "The machine; detected first when cluster.toml does not exist."
    output_dir: File | None = None
    (
        "For the JSON and its copy latest.json; by default OUTPUT_DIR, else "
        "benchmark_results/ring_v2_collective."
    )
    no_save: bool = False
    "Write no file."


@dataclass(frozen=True, kw_only=True)
class Pattern(Options):
    """A pattern of attention over ranks."""

    segment_lengths: tuple[int, ...] = ()
    "Of each branch, as 2048,4096,8192."
    dilation_rates: tuple[int, ...] = ()
    "Of each branch, as 1,2,4."
    seq_len: Annotated[int, Range(1, 2**24)] = 65536  # each is looked at, for each rank and head
    "Tokens in all."
    heads: int = 12
    "Of queries."
    kv_heads: int | None = None
    "Of keys and values; by default as many."
    head_dim: int = 64
    "Width of a head."
    batch: int = 1
    "Sequences."
    dtype: Literal["fp32", "bf16", "fp16"] = "bf16"
    "Of queries, keys and values."
    offsets: Offsets = "mod"
    (
        "Which rows a head keeps: head mod rate (LongNet), blocks of heads (torchscale), or each "
        "branch its own group of heads."
    )
    offset_heads: Heads = "query"
    "Whether query heads or key-value heads are counted for that."
    causal: bool = False
    "A query sees keys up to itself."
    window: int | None = None
    "Of dense causal attention: keys a query sees at most."
    zigzag: bool = False
    "Of dense attention: rank r holds chunks r and 2n-1-r of 2n."
    ranks: Annotated[int, Range(1, 1024)] = 8
    "That share the sequence."
    figure: File | None = None
    "Draw who attends whom into this SVG file."
