"""A case in words short enough for a progress line, a table's first column or a figure's legend."""

from meshwise.spec.op import Attention, Block, Collective, Elementwise, Gemm
from meshwise.spec.run import Case, Step
from meshwise.units import format_bytes


def label(case: Case) -> str:
    """``gemm 8192x2560x2560 bf16``, ``all_gather 16.0 MiB x4``, ``layer gpt h2560 mb8 tp2+sp
    backward``. The regime is named unless it is warm or cold, which a device implies."""
    text = _of_op(case.op)
    return f"{text} graph" if case.regime == "graph" else text


def _of_op(op: Gemm | Attention | Elementwise | Collective | Block | Step) -> str:
    if isinstance(op, Gemm):
        stored = ("t" if op.trans_a else "n") + ("t" if op.trans_b else "n")
        return f"gemm {op.m}x{op.n}x{op.k} {op.dtype}" + ("" if stored == "nt" else f" {stored}")
    if isinstance(op, Attention):
        length = f"{op.q_len}" + ("" if op.q_len == op.kv_len else f"/{op.kv_len}")
        heads = f"{op.heads}" + ("" if op.heads == op.kv_heads else f"/{op.kv_heads}")
        shape = f"b{op.batch} s{length} h{heads}x{op.head_dim}"
        return f"attention {shape} {op.dtype}{' causal' if op.causal else ''} {op.direction}"
    if isinstance(op, Elementwise):
        return f"{op.kind} {format_bytes(op.bytes)}"
    if isinstance(op, Collective):
        apart = f" stride {op.group_stride}" if op.group_stride > 1 else ""
        return f"{op.kind} {format_bytes(op.size_bytes)} x{op.group_size}{apart}"
    family = type(op.model).__struct_config__.tag
    if isinstance(op, Step):
        return f"step {op.model.name or f'{family} h{op.model.hidden}'} {op.layout.name}"
    parallel = f" tp{op.tp}" + ("+sp" if op.sequence_parallel else "") if op.tp > 1 else ""
    shape = f"{family} h{op.model.hidden} mb{op.microbatch_size}"
    return f"{op.part} {shape}{parallel} {op.direction}"
