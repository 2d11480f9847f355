"""Options of ``show price``: which operation, of what size, run how."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from meshwise.options import Content, File, Options, Range, SomeModel
from meshwise.spec.costs import SizeRule
from meshwise.spec.layout import Recompute
from meshwise.spec.op import Direction, Redop, Regime, SentDtype

_WHAT = (
    "A collective (all_reduce ...), memory-bound work (copy ...), gemm, attention, conv, layer or "
    "unit."
)
_SIZE = "Bytes, as 64MiB: nccl-tests' size of a collective, or what work reads and writes."


@dataclass(frozen=True, kw_only=True)
class PriceOptions(Options):
    """An operation and the prices to ask."""

    what: str = field(default="all_reduce", kw_only=False, metadata={"help": _WHAT})
    size: str | None = field(default=None, kw_only=False, metadata={"help": _SIZE})
    group: Annotated[int, Range(2, 2**20)] = 2
    "Ranks of a collective or of an FSDP unit."
    stride: Annotated[int, Range(1, 2**20)] = 1
    "Between the ranks of a group: 8 is one rank on each host of eight."
    in_place: Literal["usual", "yes", "no"] = "usual"
    "Whether a collective is in place; usually, as in training, all-reduces are."
    op: Redop = "sum"
    "How a collective reduces."
    root: Annotated[int, Range(0)] = 0
    "The rank of the group that is the root of broadcast, reduce, gather or scatter."
    splits: Content | None = None
    "Of all_to_all_v: a JSON file with a row for each rank, the bytes that it sends to each."
    tables: str | None = None
    "Of all_to_all_v instead: embedding tables as BATCH,T0-T1-...,DIM."
    rule: SizeRule = "busiest"
    "Of all_to_all_v: which even exchange it is priced as, by the busiest rank or as ml_perf_model."
    shape: str | None = None
    (
        "Of a product M,N,K; of attention BATCH,TOKENS,HEADS,HEAD_DIM; of a convolution "
        "BATCH,IN,OUT,HEIGHT,WIDTH,KERNEL,STRIDE."
    )
    groups: Annotated[int, Range(1, 2**20)] = 1
    "Of a product: experts that share its rows."
    trans: Literal["nn", "nt", "tn"] = "nt"
    "Which operands of a product are transposed; nt is a linear layer's forward."
    model: SomeModel | None = None
    "Whose layer or FSDP unit."
    microbatch_size: Annotated[int, Range(1, 2**20)] = 1
    "Sequences of a layer's microbatch."
    seq_len: Annotated[int | None, Range(1, 2**30)] = None
    "Of a layer; by default the model's largest."
    tp: Annotated[int, Range(1, 2**10)] = 1
    "Ranks that share a layer."
    cp: Annotated[int, Range(1, 2**10)] = 1
    "Ranks that share a layer's sequences."
    ep: Annotated[int, Range(1, 2**10)] = 1
    "Ranks that share a layer's experts."
    direction: Direction = "forward"
    "Of a layer, attention or a convolution (backward: of the input and of the weights)."
    recompute: Recompute = "none"
    "What a layer's backward computes again, within its time."
    dtype: SentDtype | None = None
    "By default that of the plans made from these prices."
    regime: Regime | None = None
    "By default as a training step runs it."
    backend: str = ""
    "Whose code, as nccl for logs of nccl-tests; by default torch's own choice."
    cluster: File | None = None
    "Price by the data sheet of this cluster: a cluster.toml, or a name as h100-hgx."
    hosts: int | None = None
    "How many such hosts; the data sheet gives the links between them."
    costs: File | None = None
    "The prices, as calibrate wrote them: costs.json, unless --cluster is given."
