"""How far the data sheet alone is off at all that is stored: table.py [--before], no device.

Every run of `measure` under benchmarks/, every costs.json whose runs are not there, and every log
of collectives under tests/data is fitted by itself. The data sheet of its cluster then prices its
knots and shapes. --before: collectives without their launch, as they were priced until this day.
"""

import json
import logging
import sys
from collections import defaultdict
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from types import SimpleNamespace

from msgspec import convert

from meshwise import fit, store
from meshwise.fit.sheet import over_measured, points
from meshwise.pages import table
from meshwise.pages.table import percent
from meshwise.prices import Datasheet
from meshwise.prices.datasheet import attainable
from meshwise.spec import Attention, Cluster, Collective, Sized, Surface
from meshwise.verbs import imports

ROOT = Path(__file__).parents[2]
LOGS = {
    "nccl_tests_a100x8/*.log": "p4d.24xlarge", "nccl_tests_h200x4/*.txt": "h200-hgx",
    "param_h200x4/*.txt": "h200-hgx", "param_h200x4/*.csv": "p3.16xlarge",
}  # fmt: skip
MEASURED = "collectives", "gemm", "attention", "profile"
CLASSES = {"< 64 KiB": 2**16, "to 64 MiB": 2**26 + 1, "above": float("inf")}  # bytes, exclusive


def stored(scratch):
    """Yield all costs, each with the tool that timed them."""
    runs = {path.parent.name: path.parent for path in ROOT.glob("benchmarks/**/run.json")}
    for name, path in sorted(runs.items()):
        if any(f"-measure-{what}-" in name for what in MEASURED):
            yield "torch", fit.calibrate([store.load(path)[:2]])
    for path in sorted(ROOT.glob("benchmarks/**/costs*.json")):
        data = json.loads(path.read_text())
        if not {*data["runs"]} & {*runs}:  # of an older version, whose laws are not read
            curves = [curve | {"like": convert(curve["like"], Sized)} for curve in data["curves"]]
            yield (
                "torch",
                SimpleNamespace(
                    cluster=convert(data["cluster"], Cluster),
                    curves=[SimpleNamespace(**curve) for curve in curves],
                    surfaces=convert(data["surfaces"], list[Surface]),
                ),
            )
    for pattern, cluster in LOGS.items():
        for path in sorted((ROOT / "tests/data").glob(pattern)):
            (run,) = imports.import_files(path, cluster=cluster, runs=scratch)
            tool = "nccl-tests" if path.name.startswith("nccl") else "torch"
            yield tool, fit.calibrate([store.load(run)[:2]])


def errors(tool, costs):
    """Yield device, ranks, kind, way and size class of each point, then its predicted/measured - 1
    and whether its interval holds what was measured."""
    sheet, launch_s = Datasheet(costs.cluster), attainable().launch.time_s
    for price in (*costs.curves, *costs.surfaces):
        way = "graph" if price.regime == "graph" else tool
        found = zip(points(price), price.time_s, over_measured(price, sheet), strict=False)
        for op, time_s, ratio in found:
            sent = isinstance(op, Collective)
            size = op.size_bytes if sent else op.bytes
            if sent and "--before" in sys.argv:
                ratio -= launch_s / time_s
            kind = getattr(op, "kind", type(op).__name__.lower())
            kind += f" {op.direction}" if isinstance(op, Attention) else ""
            error = sheet.time_s(op)[1]
            where = (
                costs.cluster.device.name.removeprefix("NVIDIA "),
                op.group_size if sent else 1,
                kind,
                way,
            )
            sizes = next(name for name, most in CLASSES.items() if size < most)
            yield sent, where, sizes, ratio - 1, 1 / (1 + error) <= ratio <= 1 + error


def listed(title, heads, rows):
    """Print a row for each key: median, worst and points of each size class, and those inside."""
    columns, cells = [*heads], []
    for name in CLASSES:
        columns += [name, "worst", "points"]
    for key, of in sorted(rows.items()):
        row = list(map(str, key))
        for name in CLASSES:
            off = [error for sizes, error, _ in of if sizes == name]
            ends = (median(off), max(off, key=abs)) if off else (None, None)
            row += [*(percent(end, sign=True) for end in ends), str(len(off))]
        cells.append((*row, percent(sum(inside for *_, inside in of) / len(of))))
    left = len(heads)
    table.write([table.Table(title, (*columns, "inside"), tuple(cells), (), left)], sys.stdout)


def main() -> None:
    logging.disable(logging.WARNING)
    table.WIDTH = 200
    each, kinds, devices, others = (defaultdict(list) for _ in range(4))
    with TemporaryDirectory() as scratch:
        for tool, costs in stored(scratch):
            for sent, (device, ranks, kind, way), *of in errors(tool, costs):
                if sent:
                    each[device, ranks, kind, way].append(of)
                    kinds[kind, way].append(of)
                    devices[device, ranks, way].append(of)
                else:
                    others[device, kind].append(of)
    listed("Collectives", ("collective", "timed by"), kinds)
    listed("Devices, all collectives", ("device", "ranks", "timed by"), devices)
    listed("Collectives of each device", ("device", "ranks", "collective", "timed by"), each)
    listed("Other work", ("device", "operation"), others)


main()
