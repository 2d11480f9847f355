"""Samples as the CSV files of Primus' operator benchmarks, under their names and columns.

Source: Primus, benchmark/kernel/{gemm,attention,rccl}. In: rows that say which model each case was
derived from, in the order of the file, and the samples by case id. ``Time(s)`` is the median,
``Bandwidth(GB/s)`` of a collective its bus bandwidth (1e9 bytes). The columns have no place for a
reason: a case without a time has empty cells, never zeros, and its reason stays in our records.
"""

import csv
import io
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from meshwise import files
from meshwise.spec import DTYPE_BYTES, Attention, Case, Collective, Derived, Gemm, Sample
from meshwise.stats import median_interval

Cells = dict[str, Any]
Kind = TypeVar("Kind")

_DTYPES = {
    "fp64": "torch.float64",
    "fp32": "torch.float32",
    "tf32": "torch.float32",
    "bf16": "torch.bfloat16",
    "fp16": "torch.float16",
    "fp8": "torch.float8_e4m3fn",
}
_ATTENTION = {
    "batch_size": "batch", "seqlen_q": "q_len", "seqlen_kv": "kv_len", "num_head_q": "heads",
    "num_head_kv": "kv_heads", "head_dim_qk": "head_dim", "head_dim_v": "value_dim",
    "causal": "causal",
}  # fmt: skip
_FILES = {
    "all_to_all": "all2all_benchmark.csv",
    "send": "send_recv_benchmark.csv",
    "send_recv": "send_recv_benchmark.csv",
    "all_reduce": "allreduce_benchmark.csv",
    "all_gather": "allgather_benchmark.csv",
    "reduce_scatter": "reducescatter_benchmark.csv",
}


def gemm(rows: Iterable[Derived], samples: Mapping[str, Sample], folder: Path | str) -> list[Path]:
    """``benchmark_gemm_<model>.csv`` and ``.json`` of every model in ``rows``."""
    by_model: dict[str, list[Cells]] = {}
    for row, op in _with_op(rows, Gemm):
        time_s = _time_s(row.case, samples)
        cells = {
            "model": row.model,
            "m": op.m,
            "n": op.n,
            "k": op.k,
            "transA": "T" if op.trans_a else "N",
            "transB": "T" if op.trans_b else "N",
            "dtype": _DTYPES[op.dtype],
            "Time(s)": time_s,
            "TFLOPS": _per(op.flops / 1e12, time_s),
            "Bandwidth(GB/s)": _per(op.bytes / 1e9, time_s),
        }
        by_model.setdefault(row.model, []).append(cells)
    paths = []
    for model, found in by_model.items():
        path = Path(folder) / f"benchmark_gemm_{model.replace('/', '_')}.csv"
        json_path = path.with_name(f"{path.stem}.json")
        paths += [_write(path, found), json_path]
        files.write_whole(json_path, json.dumps(found, indent=4) + "\n")
    return paths


def attention(rows: Iterable[Derived], samples: Mapping[str, Sample], path: Path | str) -> Path:
    """One file; forward and backward of a shape and back end share a row."""
    found: dict[tuple[str, int, Case], Cells] = {}
    for row, op in _with_op(rows, Attention):
        forward = msgspec.structs.replace(op, direction="forward")
        key = (row.model, op.batch, msgspec.structs.replace(row.case, op=forward))
        usual = {
            "model": row.model,
            **{column: getattr(op, field) for column, field in _ATTENTION.items()},
            **dict.fromkeys(("fwd_tflops", "fwd_time", "bwd_tflops", "bwd_time")),
            "backend": row.case.backend or "default",
        }
        time_s = _time_s(row.case, samples)
        short = "fwd" if op.direction == "forward" else "bwd"
        found.setdefault(key, usual).update(
            {f"{short}_tflops": _per(op.flops / 1e12, time_s), f"{short}_time": time_s}
        )
    return _write(Path(path), list(found.values()))


def collectives(
    rows: Iterable[Derived], samples: Mapping[str, Sample], folder: Path | str
) -> list[Path]:
    """One file for each kind of collective among ``rows`` that Primus has."""
    found: dict[str, list[Cells]] = {}
    for row, op in _with_op(rows, Collective):
        if op.kind not in _FILES:
            continue
        # of two ranks by definition; with experts the group is theirs
        ranks: Cells = {"WorldSize": op.group_size}
        if op.kind == "all_to_all":
            ranks = {"EP-Size": op.group_size, "TopK": row.top_k}
        elif op.kind in ("send", "send_recv"):
            ranks = {}
        cells = {
            "Model": row.model,
            "MBS": row.microbatch_size,
            "Seq": row.seq_len,
            "HiddenSize": row.hidden,
            **_sent(row, op, samples, ranks),
        }
        found.setdefault(_FILES[op.kind], []).append(cells)
    return [_write(Path(folder) / name, cells) for name, cells in found.items()]


def fsdp(
    rows: Iterable[Derived], samples: Mapping[str, Sample], kind: str, path: Path | str
) -> Path:
    """The units of ``kind`` (all_gather or reduce_scatter), a row each.

    ``Layer Weight`` is the elements of the whole unit, padding included.
    """
    found = [
        {
            "Model": row.model,
            "Layer Weight": op.size_bytes // DTYPE_BYTES[op.dtype],
            **_sent(row, op, samples, {"WorldSize": op.group_size}),
        }
        for row, op in _with_op(rows, Collective)
        if op.kind == kind
    ]
    return _write(Path(path), found)


def _with_op(rows: Iterable[Derived], kind: type[Kind]) -> Iterator[tuple[Derived, Kind]]:
    """The rows of one kind of operation."""
    return ((row, row.case.op) for row in rows if isinstance(row.case.op, kind))


def _sent(row: Derived, op: Collective, samples: Mapping[str, Sample], ranks: Cells) -> Cells:
    """The columns that all collectives share, ``ranks`` among them; busbw is of the median."""
    time_s = _time_s(row.case, samples)
    return {
        "DataType": _DTYPES[op.dtype],
        **ranks,
        "Time(s)": time_s,
        "Bandwidth(GB/s)": _per(op.size_bytes * op.bus_factor / 1e9, time_s),
    }


def _time_s(case: Case, samples: Mapping[str, Sample]) -> float | None:
    sample = samples.get(case.id)
    return median_interval(sample.times_s)[0] if sample is not None and sample.times_s else None


def _per(amount: float, time_s: float | None) -> float | None:
    return None if time_s is None else amount / time_s


def _write(path: Path, rows: Sequence[Cells]) -> Path:
    if not rows:
        raise ValueError(f"{path}: no case of this run belongs in it; measure one or leave it out")
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)
    return files.write_whole(path, text.getvalue())
