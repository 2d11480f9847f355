"""Short labels of cases, for progress lines, a table's first column or a figure's legend.

The size of memory-bound work is its bytes read and written. The size of a copy from or to the host
is the bytes that it copies, counted once.
"""

from meshwise.spec.long_attention import LongAttention
from meshwise.spec.op import (
    REDUCING,
    WHOLE_NUMBERS,
    Attention,
    Collective,
    Convolution,
    Elementwise,
    Gemm,
    Op,
    Overlap,
    Shaped,
)
from meshwise.spec.refit import Resharding
from meshwise.spec.run import Case, Step
from meshwise.spec.vision import WideResNet
from meshwise.units import format_bytes


def label(case: Case) -> str:
    """Return a label: ``gemm 8192x2560x2560 bf16``, ``all_gather 16.0 MiB x4``, ``layer gpt h2560
    mb8 tp2+sp backward``. It names the regime unless warm or cold, which the device implies; the
    backend if it is not torch's choice; and the number of ranks of a ring."""
    usual = case.regime in ("cold", "warm") or isinstance(case.op, Resharding)
    regime = "" if usual else case.regime
    ring = f"x{case.world_size}" if isinstance(case.op, LongAttention) else ""
    return " ".join(filter(None, (_of_op(case.op), ring, regime, case.backend)))


def shape(op: Shaped) -> str:
    """Return a shape: ``4096x1024x2048``, ``4096x1024x2048 8 groups`` (or ``8 batches``), ``b1
    s4096 h32/8x128 causal``, ``b8 256x56x56 -> 512 1x1``, with ``/2`` at its end for stride 2."""
    if isinstance(op, Gemm):
        parts = f" {op.groups} {'batches' if op.batched else 'groups'}"
        return f"{op.m}x{op.n}x{op.k}" + parts * (op.groups > 1)
    if isinstance(op, Convolution):
        image = f"b{op.batch} {op.in_channels}x{op.height}x{op.width} -> {op.out_channels}"
        return f"{image} {op.kernel}x{op.kernel}" + (f" /{op.stride}" if op.stride > 1 else "")
    width = f"{op.head_dim}" + ("" if op.value_dim == op.head_dim else f"/{op.value_dim}")
    length = f"{op.q_len}" + ("" if op.q_len == op.kv_len else f"/{op.kv_len}")
    heads = f"{op.heads}" + ("" if op.heads == op.kv_heads else f"/{op.kv_heads}")
    mask = " causal" if op.causal else ""
    mask += f" window {op.window}" if op.window is not None else ""
    return f"b{op.batch} s{length} h{heads}x{width} {op.dtype}{mask}"


def storage(op: Gemm) -> str:
    """Return the storage of the operands in BLAS's letters: ``nt`` is A as it is, B transposed."""
    return ("t" if op.trans_a else "n") + ("t" if op.trans_b else "n")


def variant(op: Gemm | Convolution) -> str:
    """Return the word that tells products of one shape apart: ``nt`` (``storage``), ``wgrad``."""
    return storage(op) if isinstance(op, Gemm) else op.product


def number_format(op: Gemm | Convolution) -> str:
    """Return dtype and scaling: ``bf16``, ``fp8 row``."""
    scaling = op.scaling if isinstance(op, Gemm) else "none"
    return op.dtype + ("" if scaling == "none" else f" {scaling}")


def uneven(op: Collective) -> str:
    """Return ``sent 1000-3000``: the least and the most bytes that a rank of all_to_all_v sends,
    its own part included. If all ranks send equally many, return ``received 500-1500``. Return ""
    for other kinds."""
    for what, parts in (("sent", op.splits), ("received", zip(*op.splits, strict=True))):
        sizes = [sum(of_rank) for of_rank in parts]
        if len(set(sizes)) > 1 or (sizes and what == "received"):
            return f"{what} {min(sizes)}-{max(sizes)}"
    return ""


def _of_op(op: Op | Step | Resharding | LongAttention) -> str:
    if isinstance(op, Gemm):
        sizes, _, groups = shape(op).partition(" ")
        stored = "" if storage(op) == "nt" else storage(op)
        return " ".join(filter(None, ("gemm", sizes, number_format(op), groups, stored)))
    if isinstance(op, Attention):
        return f"attention {shape(op)} {op.direction}"
    if isinstance(op, Convolution):
        return f"convolution {shape(op)} {op.dtype} {op.product}"
    if isinstance(op, LongAttention):
        return _of_long_attention(op)
    if isinstance(op, Elementwise):
        crossing = op.kind in ("h2d", "d2h")
        moved = format_bytes(op.read_bytes if crossing else op.bytes)
        return f"{op.kind} {moved}" + (f" {op.direction}" if op.direction == "backward" else "")
    if isinstance(op, Collective):
        return _of_collective(op)
    if isinstance(op, Overlap):
        return f"{_of_op(op.compute)} beside {_of_op(op.collective)}"
    if isinstance(op, Resharding):
        return f"refit {op.scenario or op.model.name} {op.mode}{_choices(op)}"
    family = str(type(op.model).__struct_config__.tag)
    if isinstance(op.model, WideResNet):
        family += f" c{op.model.channels}"
    else:
        family += f" h{op.model.hidden}"
    if isinstance(op, Step):
        name = op.model.name or family
        return f"{'step' if op.mode == 'train' else op.mode} {name} {op.layout.name}"
    degrees = [f" {name}{of}" for name in ("cp", "tp", "ep") if (of := getattr(op, name)) > 1]
    parallel = "".join(degrees) + ("+sp" if op.sequence_parallel else "")
    parallel += " fp8" if op.dtype == "fp8" else ""
    part = " ".join(filter(None, (op.part, op.form)))
    again = f" recompute {op.recompute}" if op.recompute != "none" else ""
    return f"{part} {family} mb{op.microbatch_size}{parallel} {op.direction}{again}"


def _of_long_attention(op: LongAttention) -> str:
    """Return ``ring attention b2 n16384 h12x64 fp16 w2048/4096 r1/2 backward``; dense: the way."""
    heads = f"{op.heads}" + ("" if op.heads == op.kv_heads else f"/{op.kv_heads}")
    if op.dilation is None:
        kind = " ".join((op.way, *(["zigzag"] if op.order == "zigzag" else [])))
    else:
        lists = (op.dilation.segment_lengths, op.dilation.dilation_rates)
        kind = "w{} r{}".format(*("/".join(map(str, each)) for each in lists))
    mask = "causal " if op.causal else ""
    mask += f"window {op.window} " if op.window is not None else ""
    size = f"b{op.batch} n{op.seq_len} h{heads}x{op.head_dim} {op.dtype}"
    return f"ring attention {size} {kind} {mask}{op.direction}"


def _choices(op: Resharding) -> str:
    """Return the options that differ from the defaults."""
    chosen = {
        f"verify {op.verify}": op.verify != "hash",
        "atomic": op.atomic,
        f"delta {op.changed}": op.changed is not None,
        "placed": bool(op.placement),
    }
    return "".join(f" {word}" for word, said in chosen.items() if said)


def _of_collective(op: Collective) -> str:
    apart = f" stride {op.group_stride}" if op.group_stride > 1 else ""
    group = f"ranks {','.join(map(str, op.ranks))}" if op.ranks else f"x{op.group_size}{apart}"
    place = " in place" if op.in_place else ""
    dtype = (
        op.dtype
        if (op.kind in REDUCING and op.dtype != "bf16") or op.dtype in WHOLE_NUMBERS
        else ""
    )
    redop = "" if op.redop == "sum" else op.redop
    root = f"root {op.root}" if op.root else ""
    size = format_bytes(op.size_bytes)
    words = (op.kind, redop, size, dtype, group + place, root, uneven(op))
    return " ".join(filter(None, words))
