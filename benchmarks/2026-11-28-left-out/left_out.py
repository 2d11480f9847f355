"""How far prices are off for a model that nobody measured: left_out.py [--worst], no device.

Each model's profile of 2026-11-27-fresh (2 H200) is priced by those of the others, all fitted
together. What both measured is no test and is left out. `--worst` lists the shapes furthest off.
"""

import logging
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np
from msgspec.structs import replace

from meshwise import fit, store
from meshwise.pages import table
from meshwise.pages.table import percent
from meshwise.prices import Prices, shape_op
from meshwise.prices.key import how
from meshwise.spec import Attention, Case, Gemm
from meshwise.spec.label import label
from meshwise.units import format_seconds

RUNS = Path(__file__).parents[1] / "2026-11-27-fresh"
MODELS = ("gpt-1.3b", "gpt-2.6b", "gpt-6.7b", "llama-3-8b", "moe-2.4b", "wresnet-1b")


def loaded(model):
    """Return the runs of a model's profiles; moe-2.4b has two."""
    found = sorted(RUNS.glob(f"{model}*/runs/*-measure-*"))
    return [store.load(path)[:2] for path in found]


def kind(op, time_s):
    """Yield the rows of the table that an operation counts in."""
    if isinstance(op, Attention):
        yield f"attention {op.direction}"
        yield f"attention {op.direction}, {'from' if time_s >= 1e-4 else 'below'} 100 us"
    elif isinstance(op, Gemm) and op.groups > 1:
        yield "gemm, grouped"
    elif isinstance(op, Gemm):
        yield "gemm"
        size = (
            "below 20 us" if time_s < 2e-5 else "20 to 100 us" if time_s < 1e-4 else "from 100 us"
        )
        yield f"gemm, {size}"
        if min(op.n, op.k) <= 16:
            yield "gemm, n or k of 16 or less"
    else:
        yield type(op).__name__.lower()


def main() -> None:
    logging.disable(logging.WARNING)
    table.WIDTH = 160
    runs = {model: loaded(model) for model in MODELS}
    cluster = runs["gpt-2.6b"][0][0].cluster  # the same machine, told by another name
    runs = {
        model: [(replace(info, cluster=cluster), samples) for info, samples in each]
        for model, each in runs.items()
    }
    off, worst = defaultdict(list), []
    for model, own in runs.items():
        others = Prices(
            fit.calibrate([run for other in MODELS if other != model for run in runs[other]])
        )
        for surface in fit.calibrate(own).surfaces:
            for shape, time_s in zip(surface.shapes, surface.time_s, strict=True):
                op = shape_op(surface, shape)
                try:
                    found = others.estimate(op, how(surface))
                except ValueError:
                    off["no price"].append((1.0, False))
                    continue
                if found.source == "measured":
                    continue
                error = found.time_s / time_s - 1
                inside = (
                    found.time_s / (1 + found.error) <= time_s <= found.time_s * (1 + found.error)
                )
                stood_in = ", by a stand-in" * (found.source == "transferred")
                for row in kind(op, time_s):
                    off[row + stood_in].append((error, inside, found.error))
                said = (
                    f"{error:+.0%}",
                    model,
                    label(Case(op=op)),
                    format_seconds(time_s),
                    found.source,
                )
                worst.append((abs(error), said))
    rows = []
    for name, found in sorted(off.items()):
        errors = np.asarray([each[0] for each in found])
        ends = (np.median(np.abs(errors)), np.quantile(np.abs(errors), 0.9), np.median(errors))
        inside, half = sum(each[1] for each in found), np.median([each[-1] for each in found])
        cells = (percent(ends[0]), percent(ends[1]), percent(ends[2], sign=True))
        rows.append(
            (name, str(len(found)), *cells, f"{inside} ({inside / len(found):.0%})", percent(half))
        )
    heads = ("left out", "shapes", "median", "p90", "bias", "inside", "half-width")
    table.write([table.Table("Models left out", heads, tuple(rows), (), 1)], sys.stdout)
    if "--worst" in sys.argv:
        for _, said in sorted(worst, reverse=True)[:40]:
            print(*said)


main()
