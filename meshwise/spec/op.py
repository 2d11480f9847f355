"""The operations: every kind is described here, once.

An operation is a small frozen record that knows its FLOPs (matrix products only; a
multiply-add is 2) and the bytes it must move (each input read once, each output written once).
``probe`` times these records, ``fit`` and ``prices`` price them, ``models.apply`` emits them,
``search`` adds them up. Sizes are those of one rank.
"""

from math import lcm
from typing import Literal

from meshwise.spec.layout import Layout, Recompute
from meshwise.spec.model import AnyModel, forms_of
from meshwise.spec.record import Count, Length, NonNegative, Record
from meshwise.spec.vision import WideResNet

Dtype = Literal["fp64", "fp32", "tf32", "bf16", "fp16", "fp8"]
Direction = Literal["forward", "backward"]
Regime = Literal["cold", "warm", "graph", "blocking", "pipelined", "sustained"]
Lowering = Literal["eager", "compiled"]
SentDtype = Literal[Dtype, "int8", "uint8", "int32", "int64"]  # of collectives
Redop = Literal["sum", "prod", "max", "min", "avg"]
WHOLE_NUMBERS = {"int8": 1, "uint8": 1, "int32": 4, "int64": 8}
FP8_ALIGNMENT = 16  # fp8 kernels take all dims of a product in multiples of this
DTYPE_BYTES = {"fp64": 8, "fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2, "fp8": 1, **WHOLE_NUMBERS}

ElementwiseKind = Literal[
    "copy", "add", "mul", "layer_norm", "rms_norm", "gelu", "silu", "cross_entropy", "embedding",
    "cast", "adamw", "sgd", "adafactor", "grad_norm", "h2d", "d2h",
]  # fmt: skip
CollectiveKind = Literal[
    "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "all_to_all_v", "broadcast",
    "reduce", "gather", "scatter", "send_recv", "send",
]  # fmt: skip
REDUCING = ("all_reduce", "reduce_scatter", "reduce")
WHOLE = ("all_reduce", "broadcast", "reduce", "send_recv", "send")  # need not divide among ranks
IN_PLACE_ONLY = ("all_reduce", "reduce", "broadcast")  # of torch.distributed
ROOTED = ("broadcast", "reduce", "gather", "scatter")


class Gemm(Record, kw_only=True, tag_field="op", tag="gemm"):
    """C[m,n] = A[m,k] B[k,n]. ``trans_a``, ``trans_b``: this operand is stored transposed.

    ``groups`` > 1: a grouped product, as in experts. The rows m are divided among the groups, each
    with its own B; with ``trans_a`` (a weight gradient) k is divided, and each group has its own C.
    ``batched``: all groups have equally many rows; the matrices are stacked. ``scaling``: fp8
    operands have one scale per tensor or per row; their product is bf16.
    """

    m: Length
    n: Length
    k: Length
    dtype: Dtype = "bf16"
    trans_a: bool = False
    trans_b: bool = True
    groups: Count = 1
    batched: bool = False
    scaling: Literal["none", "tensor", "row"] = "none"

    def check(self) -> None:
        divided = self.k if self.trans_a else self.m
        if self.batched and (self.groups == 1 or divided % self.groups):
            self.fail("batched", f"groups = {self.groups} must be > 1 and divide {divided} rows")
        if (self.scaling == "none") == (self.dtype == "fp8"):
            self.fail("scaling", "fp8 is scaled by tensor or row, other dtypes by none")

    @property
    def flops(self) -> int:
        return 2 * self.m * self.n * self.k

    @property
    def bytes(self) -> int:
        size = DTYPE_BYTES[self.dtype]
        b_copies, c_copies = (1, self.groups) if self.trans_a else (self.groups, 1)
        read = (self.m * self.k + b_copies * self.k * self.n) * size
        return read + c_copies * self.m * self.n * max(size, 2)


class Attention(Record, kw_only=True, tag_field="op", tag="attention"):
    """softmax(Q K^T) V over ``heads`` query heads; ``kv_heads`` may be fewer (GQA).

    ``head_dim``: of Q and K. ``head_dim_v``: of V if it differs (MLA). ``window``: the most keys
    that a query sees, its own position included; causal only.

    Forward is two products over all pairs of query and key, 2*B*H*Sq*Skv*(d + d_v), halved if
    causal. Backward is 2.5 times that, as in flash-attention. ``exact_flops`` counts only pairs
    that the mask keeps: (S+1)/2S of them if causal. A window is always counted exactly.
    """

    batch: Count
    q_len: Length
    kv_len: Length
    heads: Count
    kv_heads: Count
    head_dim: Length
    head_dim_v: Length | None = None
    causal: bool = True
    window: Length | None = None
    direction: Direction = "forward"
    dtype: Dtype = "bf16"

    def check(self) -> None:
        if self.heads % self.kv_heads:
            self.fail("kv_heads", f"must divide heads = {self.heads}")
        if self.window is not None and not self.causal:
            self.fail("window", "only causal attention has a window; set causal")

    @property
    def value_dim(self) -> int:
        return self.head_dim_v or self.head_dim

    @property
    def pairs(self) -> int:
        """Pairs of query and key that the mask keeps in one head; the last query sees all keys."""
        if not self.causal:
            return self.q_len * self.kv_len
        before = max(0, self.kv_len - self.q_len)  # keys that every query sees
        queries = min(self.q_len, self.kv_len)  # the first of more than kv_len see no key
        most = min(self.kv_len, self.window or self.kv_len)
        short = min(queries, max(0, most - before))  # queries that see fewer than most
        growing = short * (before + 1) + short * (short - 1) // 2
        return growing + (queries - short) * most

    @property
    def flops(self) -> int:
        if self.window is not None:
            return self.exact_flops
        full = self._flops_of(self.q_len * self.kv_len)
        return full // 2 if self.causal else full

    @property
    def exact_flops(self) -> int:
        return self._flops_of(self.pairs)

    def _flops_of(self, pairs: int) -> int:
        forward = 2 * self.batch * self.heads * pairs * (self.head_dim + self.value_dim)
        return forward if self.direction == "forward" else forward * 5 // 2

    @property
    def bytes(self) -> int:
        width = self.head_dim + self.value_dim  # of q and the output, and of k and v
        rows = self.q_len * self.heads + self.kv_len * self.kv_heads
        passes = 1 if self.direction == "forward" else 2  # backward reads all and writes all grads
        return passes * self.batch * rows * width * DTYPE_BYTES[self.dtype]


class Convolution(Record, kw_only=True, tag_field="op", tag="convolution"):
    """One product of a convolution: channels last, a square kernel, padding kernel // 2.

    x[batch, in_channels, height, width] gives y[batch, out_channels, ceil(height / stride),
    ceil(width / stride)]. ``product``: y from x and w (forward), dx from dy and w (dgrad), or dw
    from dy and x (wgrad). All three have the same FLOPs.
    """

    batch: Count
    in_channels: Length
    out_channels: Length
    height: Length
    width: Length
    kernel: Length
    stride: Count = 1
    product: Literal["forward", "dgrad", "wgrad"] = "forward"
    dtype: Dtype = "bf16"

    def check(self) -> None:
        if self.kernel % 2 == 0:
            self.fail("kernel", "must be odd: padding by kernel // 2 then keeps the size")

    @property
    def out_pixels(self) -> int:
        return -(-self.height // self.stride) * -(-self.width // self.stride)

    @property
    def weight_elements(self) -> int:
        return self.out_channels * self.in_channels * self.kernel**2

    @property
    def flops(self) -> int:
        return 2 * self.batch * self.out_pixels * self.weight_elements

    @property
    def bytes(self) -> int:
        x = self.in_channels * self.height * self.width
        y = self.out_channels * self.out_pixels
        return (self.batch * (x + y) + self.weight_elements) * DTYPE_BYTES[self.dtype]


class Elementwise(Record, kw_only=True, tag_field="op", tag="elementwise"):
    """Memory-bound work: norms, activations, copies, the optimizer. Its bytes set its price.

    ``rows`` of ``width`` elements in ``dtype``: the tensor whose work ``measure`` times; 0 rows are
    work that is only priced, and kinds that their bytes describe.
    """

    kind: ElementwiseKind
    read_bytes: NonNegative
    write_bytes: NonNegative
    direction: Direction = "forward"
    rows: NonNegative = 0
    width: NonNegative = 0
    dtype: Dtype = "fp32"

    @property
    def flops(self) -> int:
        return 0

    @property
    def bytes(self) -> int:
        return self.read_bytes + self.write_bytes


class Collective(Record, kw_only=True, tag_field="op", tag="collective"):
    """A collective of ``group_size`` ranks, ``group_stride`` apart. All such groups run at once.
    With ``ranks``, only the group of these ranks runs, in this order, while other ranks wait.

    ``size_bytes`` is nccl-tests' ``size``: the larger of a rank's send and receive buffer. It is
    the gathered tensor for all_gather and the unreduced one for reduce_scatter.
    algbw = size/t; busbw = algbw * factor (nccl-tests, doc/PERFORMANCE.md).

    send_recv is a ring shift. send is one message from the first rank of the group to the last.
    all_to_all_v sends ``splits[i][j]`` bytes from the group's rank i to its rank j. ``redop``: how
    kinds that reduce do so. ``root``: the rank in the group that broadcasts, scatters, or has the
    result.
    """

    kind: CollectiveKind
    size_bytes: NonNegative
    group_size: Count
    group_stride: Count = 1
    dtype: SentDtype = "bf16"
    in_place: bool = False
    ranks: tuple[NonNegative, ...] = ()
    splits: tuple[tuple[NonNegative, ...], ...] = ()
    redop: Redop = "sum"
    root: NonNegative = 0

    def check(self) -> None:
        n = self.group_size
        if self.redop != "sum" and self.kind not in REDUCING:
            self.fail("redop", f"{self.kind} does not reduce; leave it out")
        if self.root and (self.root >= n or self.kind not in ROOTED):
            rooted = self.kind in ROOTED
            self.fail("root", f"must be < {n} ranks" if rooted else f"{self.kind} has none")
        if self.ranks and (len(set(self.ranks)) != n or len(self.ranks) != n):
            self.fail("ranks", f"must be group_size = {n} different ranks, or empty")
        if self.kind != "send" and list(self.ranks) != sorted(self.ranks):
            self.fail("ranks", "must ascend; only a send has a direction")
        if (self.kind == "all_to_all_v") != bool(self.splits):
            self.fail("splits", "all_to_all_v needs them, and no other kind has any")
        if self.splits and not len(self.splits) == n == min(map(len, self.splits)):
            self.fail("splits", f"must be {n} rows of {n} byte counts")
        if self.splits and self.size_bytes != (size := max(self._loads(keep_own=True))):
            self.fail("size_bytes", f"must be {size}, the most that a rank sends or receives")

    @property
    def flops(self) -> int:
        return 0

    @property
    def bytes(self) -> int:
        """Bytes each rank sends to others: ``size_bytes`` times the busbw factor, rounded up."""
        if self.splits:  # the rank that exchanges the most bytes with others sets the time
            return max(self._loads(keep_own=False))
        return -(-self.size_bytes * self._parts_sent // self.group_size)

    @property
    def bus_factor(self) -> float:
        if self.splits:
            return self.bytes / max(self.size_bytes, 1)
        return self._parts_sent / self.group_size

    @property
    def _parts_sent(self) -> int:
        """Return how many ``group_size``-ths of ``size_bytes`` each rank sends to others."""
        n = self.group_size
        if self.kind in ("broadcast", "reduce", "send_recv", "send"):
            return n if n > 1 else 0
        return 2 * (n - 1) if self.kind == "all_reduce" else n - 1

    def _loads(self, *, keep_own: bool) -> list[int]:
        """Return the bytes each rank sends, then those each receives, with or without its own."""
        n = len(self.splits)
        kept = [[self.splits[i][j] * (keep_own or i != j) for j in range(n)] for i in range(n)]
        return [*map(sum, kept), *map(sum, zip(*kept, strict=True))]


class Block(Record, kw_only=True, tag_field="op", tag="block"):
    """One measured piece of a model: a layer, or the head of a language model with its loss.

    The block's measured time over the sum of its operations' prices is a ratio that corrects every
    plan that contains the block (``fit.factors``). ``model`` has only as many layers as the block
    needs, and an empty name, so that equal pieces of different models share one key. ``form``:
    which layer, if the model's differ (``spec.forms_of``); "" is the first. ``seq_len``: of whole
    sequences. ``cp`` ranks share each, ``tp`` a layer's weights, ``ep`` its experts. ``dtype``: fp8
    is of a bf16 layer whose linear products are in fp8 (``Recipe.fp8``). ``recompute``: what a
    layer's backward computes again; its time is that of both.
    """

    part: Literal["layer", "head"]
    form: str = ""
    model: AnyModel
    microbatch_size: Count
    seq_len: Length
    tp: Count = 1
    sequence_parallel: bool = False
    cp: Count = 1
    ep: Count = 1
    direction: Direction = "forward"
    dtype: Dtype = "bf16"
    recompute: Recompute = "none"

    def check(self) -> None:
        known, images = forms_of(self.model, self.seq_len), isinstance(self.model, WideResNet)
        if images and self.part != "layer":
            self.fail("part", "must be layer for an image model")
        if self.form not in known and (self.form or images):
            self.fail("form", f"must be one of {', '.join(sorted(known))}")
        if self.seq_len % self.cp:
            self.fail("cp", f"must divide seq_len = {self.seq_len}")
        if self.recompute != "none" and (self.part, self.direction) != ("layer", "backward"):
            self.fail("recompute", "only the backward of a layer recomputes; use none")
        if self.dtype == "fp8" and (images or self.part != "layer"):
            self.fail("dtype", "fp8 is for the linear products of a language model's layer")

    @property
    def kept_dtype(self) -> Dtype:
        """The dtype of its activations and weights."""
        return "bf16" if self.dtype == "fp8" else self.dtype

    @property
    def layout(self) -> Layout:
        """The least layout that divides a layer so."""
        return Layout(
            dp=lcm(self.ep, self.cp) // self.cp,
            tp=self.tp,
            cp=self.cp,
            ep=self.ep,
            sequence_parallel=self.sequence_parallel,
            microbatch_size=self.microbatch_size,
        )

    @property
    def is_shared(self) -> bool:
        return self.layout.num_devices > 1

    @property
    def activation_elements(self) -> int:
        """Elements of a layer's input on the ranks that share a sequence, each."""
        if isinstance(self.model, WideResNet):
            return self.microbatch_size * self.model.channels * self.model.image_size**2
        return self.microbatch_size * self.seq_len // self.cp * self.model.hidden


class Overlap(Record, kw_only=True, tag_field="op", tag="overlap"):
    """Compute on one stream while a collective runs on another, again and again.

    Its time is the time of one ``compute`` while collectives run; of a block's backward with its
    forward. The baselines are measured alternately with it and stored in the sample's metrics.
    """

    compute: Gemm | Attention | Block
    collective: Collective

    @property
    def flops(self) -> int:
        return 0 if isinstance(self.compute, Block) else self.compute.flops

    @property
    def bytes(self) -> int:
        return 0 if isinstance(self.compute, Block) else self.compute.bytes


Shaped = Gemm | Attention | Convolution  # priced over several dims
Sized = Elementwise | Collective  # priced over bytes
Op = Shaped | Sized | Overlap | Block
