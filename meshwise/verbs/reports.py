"""The files of Primus' operator benchmarks, of a measure run: its names, its columns."""

import importlib
import inspect
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

from meshwise.options.measure import Sweep
from meshwise.spec import Cluster, Derived
from meshwise.verbs import files
from meshwise.verbs.measure import chosen, scope_of

log = logging.getLogger("meshwise")


def derived(asked: Sweep, cluster: Cluster, size: int) -> list[Derived]:
    """The cases on ``size`` devices with the models that they are of, in the order of Primus'
    files."""
    module = importlib.import_module(f"meshwise.probe.cases.{asked.what}")
    listing: Callable[..., list[Derived]] = module.derived
    options, known = chosen(asked, module.cases), inspect.signature(listing).parameters
    given = {name: value for name, value in options.items() if name in known}
    return [
        row
        for each in options.get("dtypes") or (asked.dtype,)
        for row in listing(scope_of(cluster, size, each), **given)
    ]


def write(
    what: str,
    run_dir: Path | str,
    rows: Sequence[Derived],
    *,
    report_dir_path: Path | str | None = None,
    report_csv_path: Path | str | None = None,
    allgather_report_csv_path: Path | str | None = None,
    reducescatter_report_csv_path: Path | str | None = None,
) -> list[Path]:
    """Write the reports asked for, of the ``rows`` that ``derived`` gave; their paths."""
    from meshwise.pages import primus

    found = {sample.case_id: sample for sample in files.load(run_dir)[1]}
    written: list[Path] = []
    if report_dir_path is not None:
        several = primus.gemm if what == "gemm" else primus.collectives
        written += several(rows, found, report_dir_path)
    if report_csv_path is not None:
        written.append(primus.attention(rows, found, report_csv_path))
    for kind, path in (
        ("all_gather", allgather_report_csv_path),
        ("reduce_scatter", reducescatter_report_csv_path),
    ):
        if path is not None:
            written.append(primus.fsdp(rows, found, kind, path))
    for path in written:
        log.info("wrote %s", path)
    return written
