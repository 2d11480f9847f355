"""One step taken apart: every instant goes to one row, so that the rows add up to the step.

In: the events of a Chrome trace that torch's profiler exported (GPU kernels and copies only) of
steps whose phases ``mark`` separates. Out: the last whole step as milliseconds by phase and row.
Phases are cut by a kernel of ours: record_function does not see the backward's kernels, which
autograd launches from a thread of its own.

An instant at which kernels of several rows run goes to the first of them in ``ROWS``; so "NCCL
exposed" is time in which nothing else runs, and "idle" is time in which no kernel does.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

from torch import Tensor

PHASES = ("forward", "backward", "optimizer")
ROWS = ("GEMM", "attention", "elementwise", "optimizer", "FSDP copies", "NCCL exposed", "idle")
_PATTERNS = (  # the first that matches; cutlass names attention kernels too
    ("elementwise", r"^triton_"),  # inductor's names list all that it fused, as split_with_sizes
    ("NCCL exposed", r"nccl"),
    ("attention", r"flash|fmha|sdpa|cudnn|dot_do_o|convert_dq"),
    ("GEMM", r"gemm|nvjet|cutlass|splitk|xmma|cublas"),
    ("FSDP copies", r"split_with_sizes|chunk_cat|multi_tensor|copy_kernel|memcpy|catarray"),
)
HEADER = " ".join(f"{name[:9]:>9}" for name in (*PHASES, *ROWS, "NCCL all"))
_MARK = "bitwisexor"
_KINDS = ("kernel", "gpu_memcpy", "gpu_memset")


def mark(marker: Tensor) -> None:
    """A kernel on the current stream that nothing else launches."""
    marker.bitwise_xor_(1)


def table(events: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """``ms[phase][row]``, its sums ``total_ms[row]``, and what lies under them."""
    work = [event for event in events if event.get("cat") in _KINDS]
    marks = sorted(float(e["ts"]) for e in work if _MARK in e["name"].lower())
    if len(marks) < 4 or len(marks) % 4:
        raise ValueError(f"{len(marks)} phase marks in the trace: expected four a step")
    cuts = marks[-4:]
    spans = []
    for event in work:
        start = float(event["ts"])
        spans.append((start, start + float(event["dur"]), _row(event["name"], start, cuts[2])))
    ms, beside = {}, Counter[str]()
    for phase, (low, high) in zip(PHASES, pairwise(cuts), strict=True):
        ms[phase] = dict.fromkeys(ROWS, 0.0)
        for length, running in _sweep(spans, low, high):
            row = next((row for row in ROWS if row in running), "idle")
            ms[phase][row] += length
            if "NCCL exposed" in running:
                beside[row] += length
    step = [e for e in work if cuts[0] <= float(e["ts"]) < cuts[3]]
    nccl = [e for e in step if "nccl" in e["name"].lower()]
    return {
        "step_ms": (cuts[3] - cuts[0]) / 1e3,
        "ms": ms,
        "total_ms": {row: sum(ms[phase][row] for phase in PHASES) for row in ROWS},
        "beside_nccl_ms": beside,  # of each row, while NCCL runs too
        "nccl_ms": beside.total(),
        "nccl_blocks": sorted({e["args"].get("grid", [0])[0] for e in nccl}),  # SMs it takes
        "longest": _longest(step),
    }


def line(table: dict[str, Any]) -> str:
    """Milliseconds under ``HEADER``."""
    phases = [sum(table["ms"][phase].values()) for phase in PHASES]
    values = [*phases, *table["total_ms"].values(), table["nccl_ms"]]
    return " ".join(f"{value:9.1f}" for value in values)


def _row(name: str, start: float, optimizer_from: float) -> str:
    found = (row for row, words in _PATTERNS if re.search(words, name, re.IGNORECASE))
    row = next(found, "elementwise")
    return "optimizer" if start >= optimizer_from and row != "NCCL exposed" else row


def _sweep(
    spans: Iterable[tuple[float, float, str]], low: float, high: float
) -> Iterable[tuple[float, set[str]]]:
    """(milliseconds, rows with a kernel running) of every stretch without change."""
    changes: dict[float, Counter[str]] = defaultdict(Counter)
    changes[low], changes[high]  # the edges, even if nothing happens there
    for start, end, row in spans:
        start, end = max(start, low), min(end, high)
        if start < end:
            changes[start][row] += 1
            changes[end][row] -= 1
    running: Counter[str] = Counter()
    for now, then in pairwise(sorted(changes)):
        running.update(changes[now])
        yield (then - now) / 1e3, {row for row, count in running.items() if count > 0}


def _longest(step: list[dict[str, Any]], count: int = 25) -> list[dict[str, Any]]:
    """The kernels that take most time by name."""
    times: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    for event in step:
        times[event["name"]] += float(event["dur"]) / 1e3
        calls[event["name"]] += 1
    return [{"name": n[:120], "ms": t, "calls": calls[n]} for n, t in times.most_common(count)]
