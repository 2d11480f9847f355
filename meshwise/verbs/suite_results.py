"""Report how a benchmark case ended, in the source's console lines and table rows.

In: a case, and the sample of its run or the reason why there is none. Out: a ``CaseResult``.
"""

from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

from meshwise import suites
from meshwise.pages.spread import each
from meshwise.spec import Record, Sample
from meshwise.suites import formulas, tsv
from meshwise.suites.case import BenchmarkCase, LoadSolutionParallelArgs
from meshwise.verbs.suite_cases import Prepared

INFERENCE_TSV = "inference_prof_res.tsv"
_PHASES = {  # the source's words -> our metric
    "Prepare input": "data_s",
    "Create train state": "build_s",
    "Compile (driver)": "setup_s",
    "Compile (worker)": "compile_s",
}
_SOLUTION = {  # the source's key in the metadata -> the field of the case
    "forward_stage_layer_ids": "forward_stage_layer_ids",
    "submesh_shapes": "submesh_physical_shapes",
    "logical_mesh_shapes": "submesh_logical_shapes",
    "autosharding_option_dicts": "submesh_autosharding_option_dicts",
}


class CaseResult(Record, kw_only=True):
    """A case and how it ended. ``row`` holds the columns of the table by name."""

    suite: str
    case: str
    status: str
    reason: str = ""
    run_dir: str = ""
    num_devices: int
    times_s: tuple[float, ...] = ()
    tflops: float | None = None
    row: dict[str, str]


def phases(sample: Sample, niter: int) -> Iterator[str]:
    """Yield the source's console lines for a case that ran."""
    for words, metric in _PHASES.items():
        yield (f" - {words}: {sample.metrics[metric]:.2f} s")
    for index in range(niter):
        yield (f"Iteration {index} ...")
    yield (f" - Benchmark: {sample.metrics['timed_s']:.2f} s")


def result(
    name: str,
    case: BenchmarkCase,
    size: int,
    prepared: Prepared | None = None,
    *,
    run_dir: Path | None = None,
    times_s: tuple[float, ...] = (),
    peak_bytes: float | None = None,
    status: str = "ok",
    reason: str = "",
) -> CaseResult:
    """Make the result and table row of a case: with ``times_s`` if it ran, else with a reason."""
    counts, changes = (prepared.counts, prepared.changes) if prepared else (None, ())
    counts = counts or formulas.counts(case, suites.kind(name))
    tflops = formulas.tflops(counts.flops, fmean(times_s), size) if times_s else None
    searched = prepared.told if prepared else {}
    told = _metadata(case, searched) if status == "ok" else {"status": status, "reason": reason}
    predicted = prepared.plan.prediction if prepared else None
    told |= {"predicted_s": f"{predicted.step_time_s:.3f}"} if predicted else {}
    told |= {"run": run_dir.name} if run_dir else {}
    told |= {"scaled": list(changes)} if changes else {}
    ran = tsv.Ran(
        suites.kind(name), case, size, counts.parameters, times_s, tflops,
        None if peak_bytes is None else int(peak_bytes), told,
    )  # fmt: skip
    return CaseResult(
        suite=name,
        case=str(case),
        status=status,
        reason=reason,
        run_dir=str(run_dir or ""),
        num_devices=size,
        times_s=times_s,
        tflops=tflops,
        row=tsv.row(ran),
    )


def _metadata(case: BenchmarkCase, searched: dict[str, Any]) -> dict[str, Any]:
    """Return the source's keys. Without a search, compilation times are None: nothing is compiled
    ahead."""
    found = dict.fromkeys(("compilation_times", "compute_cost_file_name", *_SOLUTION))
    args = case.parallel_args
    if isinstance(args, LoadSolutionParallelArgs):
        found |= {key: getattr(args, field) for key, field in _SOLUTION.items()}
    return found | searched


def add_inference(
    kind: str, prepared: Prepared, sample: Sample, times_s: tuple[float, ...]
) -> tuple[float, ...]:
    """Write a case's row of stages; return the seconds of each stage."""
    weights, peaks, seconds = (
        each(sample.metrics, name) for name in ("stage_weight_bytes", "stage_peak_bytes", "stage_s")
    )
    size, counts = prepared.plan.layout.num_devices, prepared.counts
    ran = tsv.Ran(
        kind,
        prepared.case,
        size,
        counts.parameters,
        times_s,
        formulas.tflops(counts.flops, fmean(times_s), size),
        stage_weights_bytes=list(map(int, weights)),
        stage_peak_bytes=list(map(int, peaks)),
        stage_latencies_s=seconds,
    )
    tsv.append(Path(INFERENCE_TSV), tsv.row(ran, tsv.INFERENCE_COLUMNS))
    return seconds
