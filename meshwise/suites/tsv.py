"""The tables of Alpa's benchmark: one row of tab-separated values a case, below one header.

Columns and number formats are the source's (benchmark/alpa/benchmark.py and
benchmark_one_case_gpt_bert_inference.py); its files have no header. A GB of memory is 2^30 bytes,
as there. A case that failed has no times and says why in ``Metadata``.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

from meshwise import files
from meshwise.suites.case import BenchmarkCase, UniformParallelArgs
from meshwise.text import plain

COLUMNS = (
    "Type",
    "Model Config",
    "#Microbatch",
    "#GPU",
    "Parallel Config",
    "Mean Time (s)",
    "Std Time (s)",
    "#Params (Billion)",
    "TFLOPs",
    "Peak Mem (GB)",
    "Metadata",
)
INFERENCE_COLUMNS = (
    "ModelName",
    "BS",
    "#Microbatch",
    "DP",
    "OP",
    "PP",
    "#GPU",
    "MeanTime(s)",
    "StdTime(s)",
    "TFLOPs",
    "StageWeights(B)",
    "StagePeakMem(B)",
    "StageLatencies(s)",
)


def row(
    kind: str,
    case: BenchmarkCase,
    num_devices: int,
    parameters: int,
    times_s: Sequence[float] = (),
    tflops: float | None = None,
    peak_bytes: int | None = None,
    metadata: Mapping[str, Any] | None = None,
) -> tuple[str, ...]:
    """The values of ``COLUMNS``. Without ``times_s`` the case failed; ``metadata`` says how."""
    return (
        kind,
        str(case.model_config),
        str(case.num_micro_batches),
        str(num_devices),
        str(case.parallel_args),
        *_mean_and_std(times_s),
        f"{parameters / 1e9:.3f}B",
        "" if tflops is None else _rate(tflops),
        "" if peak_bytes is None else f"{peak_bytes / 2**30:.3f}",
        rounded(dict(metadata or {})),
    )


def inference_row(
    kind: str,
    case: BenchmarkCase,
    parameters: int,
    times_s: Sequence[float],
    tflops: float,
    stage_weights_bytes: Sequence[int],
    stage_peak_bytes: Sequence[int],
    stage_latencies_s: Sequence[float],
) -> tuple[str, ...]:
    """The values of ``INFERENCE_COLUMNS``, which AlpaServe's profiles are made of."""
    args = case.parallel_args
    assert isinstance(args, UniformParallelArgs)
    return (
        f"{'moe' if kind.startswith('moe') else 'bert'}-{parameters / 1e9:.1f}b",
        str(case.batch_size),
        str(case.num_micro_batches),
        str(args.dp),
        str(args.op),
        str(args.pp),
        str(args.dp * args.op * args.pp),
        *_mean_and_std(times_s),
        _rate(tflops),
        str(list(stage_weights_bytes)),
        str(list(stage_peak_bytes)),
        str(list(stage_latencies_s)),
    )


def _rate(tflops: float) -> str:
    """Two decimals as the source's, or two digits of what has none."""
    return f"{tflops:.2f}" if tflops >= 0.01 else f"{tflops:.2g}"


def _mean_and_std(times_s: Sequence[float]) -> tuple[str, str]:
    """The deviation is that of the times themselves, not of what they are a sample of."""
    if not times_s:
        return "", ""
    return f"{fmean(times_s):.3f}", f"{pstdev(times_s):.3f}"


def rounded(value: Any, decimals: int = 2) -> str:
    """Plain data as the source prints it: numbers inside rounded, values of a dict as text."""
    if isinstance(value, Mapping):
        return str({key: rounded(item, decimals) for key, item in value.items()})
    if isinstance(value, list | tuple):
        return f"[{', '.join(rounded(item, decimals) for item in value)}]"
    return f"{value:.{decimals}f}" if isinstance(value, float) else str(value)


def line(columns: Sequence[str], values: Sequence[str]) -> str:
    """``head: value  head: value``, as printed."""
    return "  ".join(f"{head}: {value}" for head, value in zip(columns, values, strict=True))


def check(path: Path, columns: Sequence[str]) -> None:
    """ValueError if the file holds a table of other columns."""
    text = _text(path)
    if text and text.partition("\n")[0] != "\t".join(columns):
        raise ValueError(f"{path} has other columns; give another --exp-name, or move it")


def append(path: Path, columns: Sequence[str], values: Sequence[str]) -> None:
    """Add a row; to a new file its header first. ValueError if the file has other columns."""
    check(path, columns)
    if not _text(path):
        files.append_line(path, "\t".join(columns))
    # no tabs and line ends inside
    files.append_line(path, "\t".join(plain(" ".join(value.split())) for value in values))


def _text(path: Path) -> str:
    return files.read_text(path) if path.exists() else ""
