"""Primus' operator CSVs, as rows (Primus, benchmark/kernel/{gemm,attention,rccl}).

Sizes: all_reduce, reduce_scatter and send have the whole MBS x Seq x HiddenSize; all_gather has
that gathered of mbs x (Seq // W) x hidden a rank; all2all has MBS x Seq x TopK rows, padded up to
a multiple of EP-Size; fsdp's ``Layer Weight`` is the elements of the whole layer. The bandwidth is
busbw, and tells all_reduce from the other two, whose columns are the same; these two are told
apart by the file's name, and a send's ping-pong by whether the time is that of both ways.

Times are means of 100 calls in a row (fsdp 20) by the host's clock, of gemm and attention between
two events; gemm rotates its operands through 512 MiB (cold), attention does not (warm). A kernel
of attention that failed is printed as 0; other times must be > 0.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any

from meshwise.probe.importers import csv_table
from meshwise.probe.importers.csv_table import Table
from meshwise.probe.importers.found import (
    DTYPES,
    Found,
    Row,
    left_out,
    number,
    samples_of,
    seconds,
    short,
    warning,
    whole,
)
from meshwise.spec import Attention, Case, Collective, Gemm
from meshwise.spec.op import DTYPE_BYTES, CollectiveKind, Direction, Dtype

_TIME = "Time(s)"
_RATE = "Bandwidth(GB/s)"
_MESSAGE = ("MBS", "Seq", "HiddenSize")  # whose product is its elements
_SHAPE = {"Model", *_MESSAGE, "DataType", _TIME, _RATE}
_FORMS = {
    "gemm": {"m", "n", "k", "transA", "transB", "dtype", _TIME},
    "attention": {
        "batch_size", "seqlen_q", "seqlen_kv", "num_head_q", "num_head_kv", "head_dim_qk",
        "head_dim_v", "causal", "fwd_time", "bwd_time",
    },
    "all2all": _SHAPE | {"EP-Size", "TopK"},
    "collective": _SHAPE | {"WorldSize"},
    "fsdp": {"Layer Weight", "DataType", "WorldSize", _TIME, _RATE},
    "send": _SHAPE,
}  # fmt: skip
_SIZE_KINDS = {
    "gemm": "m, n, k of one product",
    "attention": "shape of one call; it has no column of dtype and is bf16",
    "all2all": "MBS*Seq*TopK*HiddenSize of a rank, rows padded to a multiple of EP-Size",
    "collective": "MBS*Seq*HiddenSize, reduced or gathered",
    "fsdp": "elements of the whole layer, gathered or before the scatter",
    "send": "MBS*Seq*HiddenSize one way",
}
_ATTENTION = {
    "batch": "batch_size", "q_len": "seqlen_q", "kv_len": "seqlen_kv", "heads": "num_head_q",
    "kv_heads": "num_head_kv", "head_dim": "head_dim_qk", "head_dim_v": "head_dim_v",
}  # fmt: skip
_TRANSPOSED = {"T": True, "True": True, "N": False, "False": False}
_TRUTH = {"True": True, "False": False}
_TOLERANCE = 0.01

Line = Mapping[str, str]


def form_of(columns: Sequence[str]) -> str | None:
    """Name the file of Primus that has these columns."""
    return next((form for form, needed in _FORMS.items() if needed <= set(columns)), None)


def lacking(columns: Sequence[str]) -> str:
    """Say which columns a file of Primus would need besides; empty if few are of any."""
    share = {form: len(needed & set(columns)) / len(needed) for form, needed in _FORMS.items()}
    form = max(share, key=lambda form: share[form])
    missing = ", ".join(sorted(_FORMS[form] - set(columns)))
    return f"looks like Primus' {form} but has no column {missing}" if share[form] > 0.5 else ""


def read_csv(table: Table, form: str, name: str) -> Found:
    """The rows of one file; ``name`` is the file's, for messages."""
    readers: dict[str, Callable[[Line, str], list[Row]]] = {
        "gemm": _gemm,
        "attention": _attention,
        "all2all": _all_to_all,
        "collective": partial(_collective, name),
        "fsdp": partial(_fsdp, name),
        "send": _send,
    }
    rows, unread = csv_table.rows_of(table, readers[form], name)
    if "WorldSize" in table.columns:
        csv_table.check_one_run(rows, "WorldSize is", name)
    samples, doubled = samples_of(rows)
    faults = [f"{row.where}: {row.fault}" for row in rows if row.fault]
    faulty = warning(faults, "rows cannot be used")
    equal = [f"constant: all {len(rows)} times are equal"] * (
        len(rows) > 3 and len({row.time_s for row in rows}) == 1
    )
    return Found(
        tool=f"Primus {form} benchmark",
        size_kind=_SIZE_KINDS[form],
        time_kind="mean over calls in a row",
        world_size=max(sample.case.world_size for sample in samples),
        samples=samples,
        warnings=(*left_out(unread), *equal, *faulty, *doubled),
        facts={"form": form, "rows": len(rows)},
    )


def _dtype(text: str) -> Dtype:
    plain = text.removeprefix("torch.")
    if plain.startswith("float8"):
        return "fp8"
    if plain not in DTYPES:
        raise ValueError(f"dtype = {short(text)!r}: has no counterpart here")
    return DTYPES[plain]


def _gemm(line: Line, where: str) -> list[Row]:
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
    return [Row(where, Case(op=op, regime="cold"), seconds(line[_TIME], _TIME))]


def _flag(line: Line, column: str, words: Mapping[str, bool]) -> bool:
    if line[column] not in words:
        raise ValueError(f"{column} = {short(line[column])!r}: must be {' or '.join(words)}")
    return words[line[column]]


def _attention(line: Line, where: str) -> list[Row]:
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
        rows.append(Row(f"{where} {direction}", case, time_s, fault=fault))
    return rows


def _product(line: Line, *columns: str) -> int:
    return prod(whole(line[column], column, 1) for column in columns)


def _all_to_all(line: Line, where: str) -> list[Row]:
    ranks = whole(line["EP-Size"], "EP-Size", 2)
    tokens = _product(line, "MBS", "Seq", "TopK")
    elements = -(-tokens // ranks) * ranks * _product(line, "HiddenSize")
    return [_timed(line, where, "all_to_all", elements, ranks)]


def _collective(name: str, line: Line, where: str) -> list[Row]:
    """Primus gathers Seq // W positions a rank; all_reduce moves twice what the others do."""
    ranks, elements = whole(line["WorldSize"], "WorldSize", 2), _product(line, *_MESSAGE)
    size_bytes = elements * DTYPE_BYTES[_dtype(line["DataType"])]
    moved = _moved(line) * ranks / (ranks - 1)
    if abs(moved / size_bytes - 2) < 2 * _TOLERANCE:
        return [_timed(line, where, "all_reduce", elements, ranks)]
    kind = _kind_by_name(name)
    if kind == "all_gather":
        sequence = _product(line, "Seq")
        elements = elements // sequence * (sequence // ranks * ranks)
    return [_timed(line, where, kind, elements, ranks)]


def _kind_by_name(name: str) -> CollectiveKind:
    plain = name.lower().replace("_", "").replace("-", "")
    kinds: dict[str, CollectiveKind] = {
        "allgather": "all_gather",
        "reducescatter": "reduce_scatter",
    }
    named = [kind for word, kind in kinds.items() if word in plain]
    if len(named) != 1:
        raise ValueError(
            "all_gather and reduce_scatter have the same columns; name the file as Primus does, "
            "allgather_benchmark.csv or reducescatter_benchmark.csv"
        )
    return named[0]


def _fsdp(name: str, line: Line, where: str) -> list[Row]:
    ranks = whole(line["WorldSize"], "WorldSize", 2)
    elements = _product(line, "Layer Weight") // ranks * ranks
    return [_timed(line, where, _kind_by_name(name), elements, ranks)]


def _send(line: Line, where: str) -> list[Row]:
    """Half the time of a ping-pong, unless the bandwidth says that it is halved already."""
    elements = _product(line, *_MESSAGE)
    both_ways = _moved(line) > 1.5 * elements * DTYPE_BYTES[_dtype(line["DataType"])]
    return [_timed(line, where, "send", elements, 2, share=0.5 if both_ways else 1.0)]


def _moved(line: Line) -> float:
    """Bytes on the wire by the printed busbw and time."""
    return number(line[_RATE], _RATE) * 1e9 * seconds(line[_TIME], _TIME)


def _timed(
    line: Line, where: str, kind: CollectiveKind, elements: int, ranks: int, share: float = 1.0
) -> Row:
    """``share`` of the printed time is the operation's; its busbw must be the printed one."""
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
    return Row(where, case, time_s, {"printed_busbw_bytes_per_s": rate}, fault)
