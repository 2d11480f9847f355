"""The vocabulary: every operation is described here, once.

An operation is a small frozen record that knows its FLOPs (matrix products only, a
multiply-add is 2) and the bytes it must move (each input read once, each output written once).
``probe`` times these records, ``fit`` and ``prices`` price them, ``models.apply`` emits them,
``search`` adds them up. Sizes are those of one rank.
"""

from typing import Literal

from meshwise.spec.model import Model
from meshwise.spec.record import NonNegative, Positive, Record

Dtype = Literal["fp64", "fp32", "tf32", "bf16", "fp16", "fp8"]
Direction = Literal["forward", "backward"]
DTYPE_BYTES = {"fp64": 8, "fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2, "fp8": 1}

ElementwiseKind = Literal[
    "copy", "add", "layer_norm", "gelu", "cross_entropy", "embedding", "cast", "adamw", "grad_norm"
]
CollectiveKind = Literal[
    "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send_recv"
]


class Gemm(Record, kw_only=True, tag_field="op", tag="gemm"):
    """C[m,n] = A[m,k] B[k,n]; ``trans_a``, ``trans_b`` say which operand is stored transposed."""

    m: Positive
    n: Positive
    k: Positive
    dtype: Dtype = "bf16"
    trans_a: bool = False
    trans_b: bool = True

    @property
    def flops(self) -> int:
        return 2 * self.m * self.n * self.k

    @property
    def bytes(self) -> int:
        return (self.m * self.k + self.k * self.n + self.m * self.n) * DTYPE_BYTES[self.dtype]


class Attention(Record, kw_only=True, tag_field="op", tag="attention"):
    """softmax(Q K^T) V over ``heads`` query heads; ``kv_heads`` may be fewer (GQA).

    Forward is two products of 2*B*H*Sq*Skv*d, halved when causal (the exact count has
    (S+1)/2S); backward is 2.5 times that, as flash-attention counts it.
    """

    batch: Positive
    q_len: Positive
    kv_len: Positive
    heads: Positive
    kv_heads: Positive
    head_dim: Positive
    causal: bool = True
    direction: Direction = "forward"
    dtype: Dtype = "bf16"

    def check(self) -> None:
        if self.heads % self.kv_heads:
            self.fail("kv_heads", f"must divide heads = {self.heads}")

    @property
    def flops(self) -> int:
        full = 4 * self.batch * self.heads * self.q_len * self.kv_len * self.head_dim
        forward = full // 2 if self.causal else full
        return forward if self.direction == "forward" else forward * 5 // 2

    @property
    def bytes(self) -> int:
        q = self.batch * self.q_len * self.heads * self.head_dim
        kv = 2 * self.batch * self.kv_len * self.kv_heads * self.head_dim
        passes = 1 if self.direction == "forward" else 2  # backward reads all and writes all grads
        return passes * (2 * q + kv) * DTYPE_BYTES[self.dtype]


class Elementwise(Record, kw_only=True, tag_field="op", tag="elementwise"):
    """Memory-bound work: norms, activations, copies, the optimizer. Its price is its bytes."""

    kind: ElementwiseKind
    read_bytes: NonNegative
    write_bytes: NonNegative
    direction: Direction = "forward"

    @property
    def flops(self) -> int:
        return 0

    @property
    def bytes(self) -> int:
        return self.read_bytes + self.write_bytes


class Collective(Record, kw_only=True, tag_field="op", tag="collective"):
    """A collective of ``group_size`` ranks spaced ``group_stride`` apart, all groups at once.

    ``size_bytes`` is nccl-tests' ``size``: the larger of a rank's send and receive buffer, that
    is the gathered tensor for all_gather and the unreduced one for reduce_scatter.
    algbw = size/t; busbw = algbw * factor (nccl-tests, doc/PERFORMANCE.md).
    """

    kind: CollectiveKind
    size_bytes: NonNegative
    group_size: Positive
    group_stride: Positive = 1
    dtype: Dtype = "bf16"

    @property
    def flops(self) -> int:
        return 0

    @property
    def bytes(self) -> int:
        """Bytes each rank puts on the wire: ``size_bytes`` times the busbw factor."""
        return int(self.size_bytes * self.bus_factor)

    @property
    def bus_factor(self) -> float:
        n = self.group_size
        if n == 1:
            return 0.0
        factors = {"all_reduce": 2 * (n - 1) / n, "broadcast": 1.0, "send_recv": 1.0}
        return factors.get(self.kind, (n - 1) / n)


class Block(Record, kw_only=True, tag_field="op", tag="block"):
    """One measured piece of a model: a transformer layer, or the head with its loss.

    The sum of its operations' prices is compared with the clock once, and the ratio corrects
    every plan that contains the block (``fit.factors``). ``model`` carries ``layers=1`` and an
    empty name, so that equal pieces of different models are one key.
    """

    part: Literal["layer", "head"]
    model: Model
    microbatch_size: Positive
    seq_len: Positive
    tp: Positive = 1
    sequence_parallel: bool = False
    direction: Direction = "forward"
    dtype: Dtype = "bf16"


Op = Gemm | Attention | Elementwise | Collective | Block
