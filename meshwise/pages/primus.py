"""Write samples as the CSV files of Primus' operator benchmarks, with their names and columns.

Source: Primus, benchmark/kernel/{gemm,attention,rccl}. In: rows with the model that each case was
derived from, in the order of the file, and the samples by case id. ``Time(s)`` is the median.
``Bandwidth(GB/s)`` of a collective is its bus bandwidth (1e9 bytes). There is no column for a
reason: a case without a time has empty cells, never zeros; our records keep the reason.
"""

import csv
import io
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from meshwise import files
from meshwise.pages.spread import reading
from meshwise.pages.table import grouped
from meshwise.spec import DTYPE_BYTES, Attention, Case, Collective, Derived, Gemm, Sample

Cells = dict[str, Any]
Samples = Mapping[str, Sample]

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


class _Row(NamedTuple):
    """A row of the file. ``time_s`` is None if the case has no time."""

    of: Derived
    op: Any
    time_s: float | None

    def per_s(self, amount: float) -> float | None:
        return None if self.time_s is None else amount / self.time_s


def _rows(rows: Iterable[Derived], samples: Samples, kind: type) -> Iterable[_Row]:
    """Yield the rows of one kind of operation, with the medians of their samples."""
    for row in rows:
        if isinstance(row.case.op, kind):
            sample = samples.get(row.case.id)
            read = reading(sample) if sample else None
            yield _Row(row, row.case.op, read and read.median_s)


def gemm(rows: Iterable[Derived], samples: Samples, folder: Path | str) -> list[Path]:
    """Write ``benchmark_gemm_<model>.csv`` and ``.json`` of every model in ``rows``."""
    found = [
        {
            "model": row.of.model,
            **{size: getattr(row.op, size) for size in "mnk"},
            "transA": "T" if row.op.trans_a else "N",
            "transB": "T" if row.op.trans_b else "N",
            "dtype": _DTYPES[row.op.dtype],
            "Time(s)": row.time_s,
            "TFLOPS": row.per_s(row.op.flops / 1e12),
            "Bandwidth(GB/s)": row.per_s(row.op.bytes / 1e9),
        }
        for row in _rows(rows, samples, Gemm)
    ]
    paths = []
    for model, cells in grouped(found, lambda row: str(row["model"])).items():
        path = Path(folder) / f"benchmark_gemm_{model.replace('/', '_')}.csv"
        json_path = path.with_name(f"{path.stem}.json")
        paths += [_write(path, cells), json_path]
        files.write_whole(json_path, json.dumps(cells, indent=4) + "\n")
    return paths


def attention(rows: Iterable[Derived], samples: Samples, path: Path | str) -> Path:
    """Write one file. Forward and backward of a shape and back end share a row."""
    found: dict[tuple[str, int, Case], Cells] = {}
    for row in _rows(rows, samples, Attention):
        op, case = row.op, row.of.case
        forward = msgspec.structs.replace(op, direction="forward")
        cells = found.setdefault(
            (row.of.model, op.batch, msgspec.structs.replace(case, op=forward)),
            {
                "model": row.of.model,
                **{column: getattr(op, field) for column, field in _ATTENTION.items()},
                **dict.fromkeys(("fwd_tflops", "fwd_time", "bwd_tflops", "bwd_time")),
                "backend": case.backend or "default",
            },
        )
        way = "fwd" if op.direction == "forward" else "bwd"
        cells |= {f"{way}_tflops": row.per_s(op.flops / 1e12), f"{way}_time": row.time_s}
    return _write(Path(path), list(found.values()))


def collectives(rows: Iterable[Derived], samples: Samples, folder: Path | str) -> list[Path]:
    """Write a file for each kind of collective among ``rows`` that Primus has."""
    found = [row for row in _rows(rows, samples, Collective) if row.op.kind in _FILES]
    by_file = grouped(found, lambda row: _FILES[row.op.kind])
    return [_write(Path(folder) / name, map(_message, same)) for name, same in by_file.items()]


def _message(row: _Row) -> Cells:
    of, op = row.of, row.op
    # a send always has two ranks; an all_to_all has the experts' ranks
    ranks: Cells = {} if op.kind in ("send", "send_recv") else {"WorldSize": op.group_size}
    if op.kind == "all_to_all":
        ranks = {"EP-Size": op.group_size, "TopK": of.top_k}
    cells = {"Model": of.model, "MBS": of.microbatch_size, "Seq": of.seq_len}
    return cells | {"HiddenSize": of.hidden} | _sent(row, ranks)


def fsdp(rows: Iterable[Derived], samples: Samples, kind: str, path: Path | str) -> Path:
    """Write the units of ``kind`` (all_gather or reduce_scatter), a row each.

    ``Layer Weight`` counts the elements of the whole unit, padding included.
    """
    return _write(
        Path(path),
        [
            {"Model": row.of.model, "Layer Weight": row.op.size_bytes // DTYPE_BYTES[row.op.dtype]}
            | _sent(row, {"WorldSize": row.op.group_size})
            for row in _rows(rows, samples, Collective)
            if row.op.kind == kind
        ],
    )


def _sent(row: _Row, ranks: Cells) -> Cells:
    """Return the columns that all collectives share, with ``ranks``; busbw is over the median."""
    bandwidth = row.per_s(row.op.size_bytes * row.op.bus_factor / 1e9)
    times = {"Time(s)": row.time_s, "Bandwidth(GB/s)": bandwidth}
    return {"DataType": _DTYPES[row.op.dtype], **ranks, **times}


def _write(path: Path, cells: Iterable[Cells]) -> Path:
    rows = list(cells)
    if not rows:
        raise ValueError(f"{path}: no case of this run belongs in it; measure one or leave it out")
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, list(rows[0]))
    writer.writeheader()
    writer.writerows(rows)
    return files.write_whole(path, text.getvalue())
