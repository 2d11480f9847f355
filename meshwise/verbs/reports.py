"""Write a measure run as the files of Primus' operator benchmarks, with its names and columns."""

import importlib
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from meshwise.options.measure import GemmOptions, MeasureOptions
from meshwise.spec import Cluster, Derived
from meshwise.verbs import files
from meshwise.verbs.measure import loaded, scope_of

log = logging.getLogger("meshwise")


def derived(asked: MeasureOptions, cluster: Cluster, size: int) -> list[Derived]:
    """List the cases on ``size`` devices with their models, in the order of Primus' files."""
    listing: Callable[..., list[Derived]] = importlib.import_module(
        f"meshwise.probe.cases.{asked.what}"
    ).derived
    dtypes = asked.dtypes if isinstance(asked, GemmOptions) else ()
    return [
        row
        for dtype in dtypes or (asked.dtype,)
        for row in listing(scope_of(cluster, size, dtype), loaded(asked))
    ]


def write(
    what: str, run_dir: Path | str, rows: Sequence[Derived], asked: Mapping[str, Path | str]
) -> None:
    """Write reports of ``rows``, which come from ``derived``. ``asked``: paths by option."""
    from meshwise.pages import primus

    found = {sample.case_id: sample for sample in files.load(run_dir)[1]}
    for option, path in asked.items():
        if option == "report_dir_path":
            written = (primus.gemm if what == "gemm" else primus.collectives)(rows, found, path)
        elif option == "report_csv_path":
            written = [primus.attention(rows, found, path)]
        else:
            kind = "all_gather" if option.startswith("allgather") else "reduce_scatter"
            written = [primus.fsdp(rows, found, kind, path)]
        for one in written:
            log.info("wrote %s", one)
