"""Primus' operator CSVs, as rows (Primus, benchmark/kernel/{gemm,attention,rccl}).

Sizes: all_reduce, reduce_scatter and send have the whole MBS x Seq x HiddenSize. all_gather gathers
MBS x (Seq // W) x HiddenSize of each rank. all2all has MBS x Seq x TopK rows, padded up to a
multiple of EP-Size. fsdp's ``Layer Weight`` is the elements of the whole layer. all_reduce,
all_gather and reduce_scatter have the same columns: the bandwidth, which is busbw, identifies
all_reduce, and the file's name the other two. A send's busbw shows if its time is for both ways.

Times are means of 100 calls in a row (fsdp 20) by the host's clock; gemm and attention are timed
between two events. gemm rotates its operands through 512 MiB (cold), attention does not (warm). An
attention kernel that failed is printed as 0; other times must be > 0.
"""

from collections.abc import Mapping
from math import prod
from typing import Any

from meshwise.probe.importers.csv_table import Form, Line
from meshwise.probe.importers.found import (
    DTYPES,
    Printed,
    kind_named,
    number,
    seconds,
    short,
    whole,
)
from meshwise.spec import Attention, Case, Collective, Gemm
from meshwise.spec.op import DTYPE_BYTES, CollectiveKind, Direction, Dtype

_TIME = "Time(s)"
_RATE = "Bandwidth(GB/s)"
_MESSAGE = ("MBS", "Seq", "HiddenSize")  # their product is the number of elements
_ATTENTION = {
    "batch": "batch_size", "q_len": "seqlen_q", "kv_len": "seqlen_kv", "heads": "num_head_q",
    "kv_heads": "num_head_kv", "head_dim": "head_dim_qk", "head_dim_v": "head_dim_v",
}  # fmt: skip
_TRANSPOSED = {"T": True, "True": True, "N": False, "False": False}
_TRUTH = {"True": True, "False": False}
_TOLERANCE = 0.01


def _dtype(text: str) -> Dtype:
    plain = text.removeprefix("torch.")
    if plain.startswith("float8"):
        return "fp8"
    if plain not in DTYPES:
        raise ValueError(f"dtype = {short(text)!r}: has no counterpart here")
    return DTYPES[plain]


def _gemm(where: str, line: Line, _: str) -> list[Printed]:
    dtype = _dtype(line["dtype"])
    m, n, k = (whole(line[column], column, 1) for column in "mnk")
    op = Gemm(
        m=m,
        n=n,
        k=k,
        dtype=dtype,
        trans_a=_flag(line, "transA", _TRANSPOSED),
        trans_b=_flag(line, "transB", _TRANSPOSED),
        scaling="tensor" if dtype == "fp8" else "none",
    )
    return [Printed(where, Case(op=op, regime="cold"), seconds(line[_TIME], _TIME))]


def _flag(line: Line, column: str, words: Mapping[str, bool]) -> bool:
    if line[column] not in words:
        raise ValueError(f"{column} = {short(line[column])!r}: must be {' or '.join(words)}")
    return words[line[column]]


def _attention(where: str, line: Line, _: str) -> list[Printed]:
    rows = []
    directions: dict[str, Direction] = {"fwd_time": "forward", "bwd_time": "backward"}
    for column, direction in directions.items():
        if not line[column]:
            continue  # not measured: our own files leave the cell empty
        sizes: dict[str, Any] = {
            field: whole(line[name], name, 1) for field, name in _ATTENTION.items()
        }
        if sizes["head_dim_v"] == sizes["head_dim"]:
            del sizes["head_dim_v"]
        op = Attention(causal=_flag(line, "causal", _TRUTH), direction=direction, **sizes)
        backend = line.get("backend", "")
        case = Case(op=op, backend="" if backend == "default" else backend)
        failed = number(line[column], column) == 0
        time_s = 0.0 if failed else seconds(line[column], column)
        fault = f"{column} is 0: the kernel failed there" if failed else ""
        rows.append(Printed(f"{where} {direction}", case, time_s, fault=fault))
    return rows


def _product(line: Line, *columns: str) -> int:
    return prod(whole(line[column], column, 1) for column in columns)


def _all_to_all(where: str, line: Line, _: str) -> list[Printed]:
    ranks = whole(line["EP-Size"], "EP-Size", 2)
    tokens = _product(line, "MBS", "Seq", "TopK")
    elements = -(-tokens // ranks) * ranks * _product(line, "HiddenSize")
    return [_timed(where, line, "all_to_all", elements, ranks)]


def _collective(where: str, line: Line, name: str) -> list[Printed]:
    """Read a collective. all_reduce moves twice the others' bytes; all_gather drops Seq % W."""
    ranks, elements = whole(line["WorldSize"], "WorldSize", 2), _product(line, *_MESSAGE)
    size_bytes = elements * DTYPE_BYTES[_dtype(line["DataType"])]
    moved = _moved(line) * ranks / (ranks - 1)
    if abs(moved / size_bytes - 2) < 2 * _TOLERANCE:
        return [_timed(where, line, "all_reduce", elements, ranks)]
    kind = _kind_by_name(name)
    if kind == "all_gather":
        sequence = _product(line, "Seq")
        elements = elements // sequence * (sequence // ranks * ranks)
    return [_timed(where, line, kind, elements, ranks)]


def _kind_by_name(name: str) -> CollectiveKind:
    plain = name.lower().replace("_", "").replace("-", "")
    named = [kind_named(word) for word in ("allgather", "reducescatter") if word in plain]
    if len(named) != 1 or named[0] is None:
        raise ValueError(
            "all_gather and reduce_scatter have the same columns; name the file as Primus does, "
            "allgather_benchmark.csv or reducescatter_benchmark.csv"
        )
    return named[0]


def _fsdp(where: str, line: Line, name: str) -> list[Printed]:
    ranks = whole(line["WorldSize"], "WorldSize", 2)
    elements = _product(line, "Layer Weight") // ranks * ranks
    return [_timed(where, line, _kind_by_name(name), elements, ranks)]


def _send(where: str, line: Line, _: str) -> list[Printed]:
    """Read a send: half a ping-pong's time, unless the bandwidth shows it is halved already."""
    elements = _product(line, *_MESSAGE)
    both_ways = _moved(line) > 1.5 * elements * DTYPE_BYTES[_dtype(line["DataType"])]
    return [_timed(where, line, "send", elements, 2, share=0.5 if both_ways else 1.0)]


def _moved(line: Line) -> float:
    """Return the bytes on the wire, from the printed busbw and time."""
    return number(line[_RATE], _RATE) * 1e9 * seconds(line[_TIME], _TIME)


def _timed(
    where: str, line: Line, kind: CollectiveKind, elements: int, ranks: int, share: float = 1.0
) -> Printed:
    """Make a row. The operation takes ``share`` of the printed time; busbw must match this."""
    dtype = _dtype(line["DataType"])
    if not 0 < elements < 2**60:
        raise ValueError(f"{elements} elements: must be > 0 and < 2^60")
    op = Collective(
        kind=kind,
        size_bytes=elements * DTYPE_BYTES[dtype],
        group_size=ranks,
        dtype=dtype,
        in_place=kind == "all_reduce",
    )
    time_s, rate = seconds(line[_TIME], _TIME) * share, number(line[_RATE], _RATE) * 1e9
    backend = "list" if kind in ("all_gather", "reduce_scatter") else ""
    case = Case(op=op, regime="pipelined", backend=backend, world_size=ranks)
    fault = ""
    if abs(rate * time_s / (op.size_bytes * op.bus_factor) - 1) > _TOLERANCE:
        fault = f"busbw {line[_RATE]} GB/s does not follow from {op.size_bytes} B and the time"
    return Printed(where, case, time_s, {"printed_busbw_bytes_per_s": rate}, fault)


_SHAPE = frozenset({"Model", *_MESSAGE, "DataType", _TIME, _RATE})
FORMS = tuple(
    Form(name, f"Primus {name} benchmark", columns, size, "mean over calls in a row", reader, ranks)
    for name, columns, size, reader, ranks in (
        (
            "gemm", frozenset({"m", "n", "k", "transA", "transB", "dtype", _TIME}),
            "m, n, k of one product", _gemm, "",
        ),
        (
            "attention", frozenset({*_ATTENTION.values(), "causal", "fwd_time", "bwd_time"}),
            "shape of one call; it has no column of dtype and is bf16", _attention, "",
        ),
        (
            "all2all", _SHAPE | {"EP-Size", "TopK"},
            "MBS*Seq*TopK*HiddenSize of a rank, rows padded to a multiple of EP-Size",
            _all_to_all, "",
        ),
        (
            "collective", _SHAPE | {"WorldSize"}, "MBS*Seq*HiddenSize, reduced or gathered",
            _collective, "WorldSize",
        ),
        (
            "fsdp", frozenset({"Layer Weight", "DataType", "WorldSize", _TIME, _RATE}),
            "elements of the whole layer, gathered or before the scatter", _fsdp, "WorldSize",
        ),
        ("send", _SHAPE, "MBS*Seq*HiddenSize one way", _send, ""),
    )
)  # fmt: skip
