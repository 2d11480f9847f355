"""The tables of Alpa's benchmark: one header, then a row of tab-separated values for each case.

Columns and number formats are the source's (benchmark/alpa/benchmark.py and
benchmark_one_case_gpt_bert_inference.py); its files have no header. As there, a GB of memory is
2^30 bytes. A case that failed has no times, and ``Metadata`` has the reason.
"""

import contextlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any, NamedTuple
from uuid import uuid4

from meshwise import files
from meshwise.suites.case import BenchmarkCase, UniformParallelArgs
from meshwise.text import plain


class Ran(NamedTuple):
    """A case and its outcome. Without ``times_s`` it failed, and ``metadata`` says how. Only
    inference has figures of stages."""

    kind: str
    case: BenchmarkCase
    num_devices: int
    parameters: int
    times_s: Sequence[float] = ()
    tflops: float | None = None
    peak_bytes: int | None = None
    metadata: Mapping[str, Any] = {}
    stage_weights_bytes: Sequence[int] = ()
    stage_peak_bytes: Sequence[int] = ()
    stage_latencies_s: Sequence[float] = ()


Columns = dict[str, Callable[[Ran], str]]
COLUMNS: Columns = {
    "Type": lambda ran: ran.kind,
    "Model Config": lambda ran: str(ran.case.model_config),
    "#Microbatch": lambda ran: str(ran.case.num_micro_batches),
    "#GPU": lambda ran: str(ran.num_devices),
    "Parallel Config": lambda ran: str(ran.case.parallel_args),
    "Mean Time (s)": lambda ran: _mean(ran.times_s),
    "Std Time (s)": lambda ran: _deviation(ran.times_s),
    "#Params (Billion)": lambda ran: f"{ran.parameters / 1e9:.3f}B",
    "TFLOPs": lambda ran: "" if ran.tflops is None else _rate(ran.tflops),
    "Peak Mem (GB)": lambda ran: "" if ran.peak_bytes is None else f"{ran.peak_bytes / 2**30:.3f}",
    "Metadata": lambda ran: rounded(dict(ran.metadata)),
}
# AlpaServe's profiles are made from these
INFERENCE_COLUMNS: Columns = {
    "ModelName": lambda ran: (
        f"{'moe' if ran.kind.startswith('moe') else 'bert'}-{ran.parameters / 1e9:.1f}b"
    ),
    "BS": lambda ran: str(ran.case.batch_size),
    "#Microbatch": lambda ran: str(ran.case.num_micro_batches),
    "DP": lambda ran: str(_equal(ran).dp),
    "OP": lambda ran: str(_equal(ran).op),
    "PP": lambda ran: str(_equal(ran).pp),
    "#GPU": lambda ran: str(ran.num_devices),
    "MeanTime(s)": lambda ran: _mean(ran.times_s),
    "StdTime(s)": lambda ran: _deviation(ran.times_s),
    "TFLOPs": lambda ran: _rate(ran.tflops or 0.0),
    "StageWeights(B)": lambda ran: str(list(ran.stage_weights_bytes)),
    "StagePeakMem(B)": lambda ran: str(list(ran.stage_peak_bytes)),
    "StageLatencies(s)": lambda ran: str(list(ran.stage_latencies_s)),
}


def _equal(ran: Ran) -> UniformParallelArgs:
    assert isinstance(ran.case.parallel_args, UniformParallelArgs)
    return ran.case.parallel_args


def row(ran: Ran, columns: Columns = COLUMNS) -> dict[str, str]:
    """Return the cells by column."""
    return {head: show(ran) for head, show in columns.items()}


def _rate(tflops: float) -> str:
    """Format with two decimals as the source does, or with two digits below 0.01."""
    return f"{tflops:.2f}" if tflops >= 0.01 else f"{tflops:.2g}"


def _mean(times_s: Sequence[float]) -> str:
    return f"{fmean(times_s):.3f}" if times_s else ""


def _deviation(times_s: Sequence[float]) -> str:
    """Return the population standard deviation of the times."""
    return f"{pstdev(times_s):.3f}" if times_s else ""


def rounded(value: Any, decimals: int = 2) -> str:
    """Format plain data as the source does: numbers are rounded, values of a dict become text."""
    if isinstance(value, Mapping):
        return str({key: rounded(item, decimals) for key, item in value.items()})
    if isinstance(value, list | tuple):
        return f"[{', '.join(rounded(item, decimals) for item in value)}]"
    return f"{value:.{decimals}f}" if isinstance(value, float) else str(value)


def line(cells: Mapping[str, str]) -> str:
    """Return the row as the console line ``head: value  head: value``."""
    return "  ".join(f"{head}: {value}" for head, value in cells.items())


def check(path: Path, columns: Iterable[str]) -> None:
    """Raise ValueError if the file holds a table with other columns."""
    if path.exists() and files.read_text(path).partition("\n")[0] != "\t".join(columns):
        raise ValueError(f"{path} has other columns; give another --exp-name, or move it")


def append(path: Path, cells: Mapping[str, str]) -> None:
    """Add a row, to a new file after a header. Several jobs may at once. Raise ValueError if the
    file has other columns."""
    check(path, cells)
    if not path.exists():
        fresh = path.with_name(f".{path.name}.{uuid4().hex}")
        head = files.write_whole(fresh, "\t".join(cells) + "\n")
        with contextlib.suppress(FileExistsError):  # another job's header
            os.link(head, path)
        head.unlink()
    # cells must not contain tabs or line ends
    files.append_line(path, "\t".join(plain(" ".join(each.split())) for each in cells.values()))
