"""Primus' operator CSVs, as rows (Primus, benchmark/kernel/{gemm,attention,rccl}).

Sizes: all_reduce, reduce_scatter and send have the whole MBS x Seq x HiddenSize; all_gather has
that gathered of mbs x (Seq // W) x hidden a rank; all2all has MBS x Seq x TopK rows, padded up to
a multiple of EP-Size; fsdp's ``Layer Weight`` is the elements of the whole layer. The bandwidth is
busbw, and tells all_reduce from the other two, whose columns are the same; these two are told
apart by the file's name, and a send's ping-pong by whether the time is that of both ways.

Times are means of 100 calls in a row (fsdp 20) by the host's clock, of gemm and attention between
two events; gemm rotates its operands through 512 MiB (cold), attention does not (warm). A kernel
that failed is printed as 0.
"""

import csv
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice

from meshwise.probe.importers.found import DTYPES, Found, Row, samples_of
from meshwise.spec import Attention, Case, Collective, Gemm
from meshwise.spec.op import DTYPE_BYTES, CollectiveKind, Direction, Dtype

_TIME = "Time(s)"
_RATE = "Bandwidth(GB/s)"
_SHAPE = {"Model", "MBS", "Seq", "HiddenSize", "DataType", _TIME, _RATE}
_FORMS = {
    "gemm": {"m", "n", "k", "transA", "transB", "dtype", _TIME},
    "attention": {"batch_size", "seqlen_q", "num_head_kv", "head_dim_v", "fwd_time", "bwd_time"},
    "all2all": _SHAPE | {"EP-Size", "TopK"},
    "collective": _SHAPE | {"WorldSize"},
    "fsdp": {"Layer Weight", "DataType", "WorldSize", _TIME, _RATE},
    "send": _SHAPE,
}
_SIZE_KINDS = {
    "gemm": "m, n, k of one product",
    "attention": "shape of one call; it has no column of dtype and is bf16",
    "all2all": "MBS*Seq*TopK*HiddenSize of a rank, rows padded to a multiple of EP-Size",
    "collective": "MBS*Seq*HiddenSize, reduced or gathered",
    "fsdp": "elements of the whole layer, gathered or before the scatter",
    "send": "MBS*Seq*HiddenSize one way",
}
_TOLERANCE = 0.01

Line = Mapping[str, str]


def form_of(columns: Sequence[str]) -> str | None:
    """Which of Primus' files has these columns."""
    return next((form for form, needed in _FORMS.items() if needed <= set(columns)), None)


def read_csv(text: str, form: str, name: str) -> Found:
    """The rows of one file; ``name`` is the file's, for messages."""
    readers: dict[str, Callable[[Line, str, str], list[Row]]] = {
        "gemm": _gemm,
        "attention": _attention,
        "all2all": _all_to_all,
        "collective": _collective,
        "fsdp": _fsdp,
        "send": _send,
    }
    rows: list[Row] = []
    for number, line in enumerate(csv.DictReader(text.splitlines()), 2):
        try:
            rows += readers[form](line, f"line {number}", name)
        except (AttributeError, KeyError, TypeError, ZeroDivisionError):
            raise ValueError(f"{name}: line {number}: a value is missing or 0") from None
        except ValueError as error:
            raise ValueError(f"{name}: line {number}: {error}") from None
    if not rows:
        raise ValueError(f"{name}: has a header and no rows")
    samples, doubled = samples_of(rows)
    equal = [f"constant: all {len(rows)} times are equal"] * (
        len(rows) > 3 and len({row.time_s for row in rows}) == 1
    )
    return Found(
        tool=f"Primus {form} benchmark",
        size_kind=_SIZE_KINDS[form],
        time_kind="mean over calls in a row",
        num_hosts=1,
        world_size=max(sample.case.world_size for sample in samples),
        device="",
        samples=samples,
        warnings=(*equal, *islice(_faults(rows), 20), *doubled),
        facts={"form": form, "rows": len(rows)},
    )


def _faults(rows: Iterable[Row]) -> Iterable[str]:
    return (f"{row.where}: {row.fault}" for row in rows if row.fault)


def _dtype(text: str) -> Dtype:
    plain = text.removeprefix("torch.")
    if plain.startswith("float8"):
        return "fp8"
    if plain not in DTYPES:
        raise ValueError(f"dtype = {text!r}: has no counterpart here")
    return DTYPES[plain]


def _gemm(line: Line, where: str, _: str) -> list[Row]:
    dtype = _dtype(line["dtype"])
    op = Gemm(
        m=int(line["m"]),
        n=int(line["n"]),
        k=int(line["k"]),
        dtype=dtype,
        trans_a=line["transA"] in ("T", "True"),
        trans_b=line["transB"] in ("T", "True"),
        scaling="tensor" if dtype == "fp8" else "none",
    )
    return [Row(where, Case(op=op, regime="cold"), float(line[_TIME]))]


def _attention(line: Line, where: str, _: str) -> list[Row]:
    rows = []
    directions: dict[str, Direction] = {"fwd": "forward", "bwd": "backward"}
    for short, direction in directions.items():
        if not line[f"{short}_time"]:
            continue  # not measured: our own files leave the cell empty
        head_dim, head_dim_v = int(line["head_dim_qk"]), int(line["head_dim_v"])
        op = Attention(
            batch=int(line["batch_size"]),
            q_len=int(line["seqlen_q"]),
            kv_len=int(line["seqlen_kv"]),
            heads=int(line["num_head_q"]),
            kv_heads=int(line["num_head_kv"]),
            head_dim=head_dim,
            head_dim_v=None if head_dim_v == head_dim else head_dim_v,
            causal=line["causal"] == "True",
            direction=direction,
        )
        backend = line.get("backend", "")
        case = Case(op=op, backend="" if backend == "default" else backend)
        time_s = float(line[f"{short}_time"])
        fault = "" if time_s else f"{short}_time is 0: the kernel failed there"
        rows.append(Row(f"{where} {short}", case, time_s, fault=fault))
    return rows


def _elements(line: Line) -> int:
    return int(line["MBS"]) * int(line["Seq"]) * int(line["HiddenSize"])


def _all_to_all(line: Line, where: str, _: str) -> list[Row]:
    ranks = int(line["EP-Size"])
    tokens = int(line["MBS"]) * int(line["Seq"]) * int(line["TopK"])
    elements = -(-tokens // ranks) * ranks * int(line["HiddenSize"])
    return [_timed(line, where, "all_to_all", elements, ranks)]


def _collective(line: Line, where: str, name: str) -> list[Row]:
    """Primus gathers Seq // W positions a rank; all_reduce moves twice what the others do."""
    ranks, elements = int(line["WorldSize"]), _elements(line)
    size_bytes = elements * DTYPE_BYTES[_dtype(line["DataType"])]
    moved = float(line[_RATE]) * 1e9 * float(line[_TIME]) * ranks / (ranks - 1)
    if abs(moved / size_bytes - 2) < 2 * _TOLERANCE:
        return [_timed(line, where, "all_reduce", elements, ranks)]
    kind = _kind_by_name(name)
    if kind == "all_gather":
        sequence = int(line["Seq"])
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


def _fsdp(line: Line, where: str, name: str) -> list[Row]:
    ranks = int(line["WorldSize"])
    elements = int(line["Layer Weight"]) // ranks * ranks
    return [_timed(line, where, _kind_by_name(name), elements, ranks)]


def _send(line: Line, where: str, _: str) -> list[Row]:
    """Half the time of a ping-pong, unless the bandwidth says that it is halved already."""
    size_bytes = _elements(line) * DTYPE_BYTES[_dtype(line["DataType"])]
    both_ways = float(line[_RATE]) * 1e9 * float(line[_TIME]) > 1.5 * size_bytes
    return [_timed(line, where, "send", _elements(line), 2, share=0.5 if both_ways else 1.0)]


def _timed(
    line: Line, where: str, kind: CollectiveKind, elements: int, ranks: int, share: float = 1.0
) -> Row:
    """``share`` of the printed time is the operation's; its busbw must be the printed one."""
    dtype = _dtype(line["DataType"])
    op = Collective(
        kind=kind,
        size_bytes=elements * DTYPE_BYTES[dtype],
        group_size=ranks,
        dtype=dtype,
        in_place=kind == "all_reduce",
    )
    time_s, rate = float(line[_TIME]) * share, float(line[_RATE]) * 1e9
    backend = "list" if kind in ("all_gather", "reduce_scatter") else ""
    case = Case(op=op, regime="pipelined", backend=backend, world_size=ranks)
    fault = ""
    if abs(rate * time_s / (op.size_bytes * op.bus_factor) - 1) > _TOLERANCE:
        fault = f"busbw {line[_RATE]} GB/s does not follow from {op.size_bytes} B and the time"
    return Row(where, case, time_s, {"printed_busbw_bytes_per_s": rate}, fault)
