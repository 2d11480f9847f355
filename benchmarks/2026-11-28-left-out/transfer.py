"""How far off another device's measurements are: transfer.py, no device.

Each H100 profile of 2026-11-28-fresh is priced by the H200 profile of the same model, scaled by
data sheets as `calibrate --transfer-from` does, and the other way round.
"""

import logging
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np

from meshwise import fit, models, store
from meshwise.fit.calibrate import expected_s
from meshwise.fit.transfer import transfer
from meshwise.pages import table
from meshwise.pages.table import percent
from meshwise.prices import Prices, shape_op
from meshwise.prices.datasheet import of_bytes
from meshwise.prices.key import how
from meshwise.spec import Attention, Block, Collective, Elementwise, Sized

ROOT = Path(__file__).parents[1]
PAIRS = {
    "2026-11-28-fresh/h100-gpt-1.3b": "2026-11-27-fresh/gpt-1.3b",
    "2026-11-28-fresh/h100-llama-3-8b": "2026-11-27-fresh/llama-3-8b",
    "2026-11-28-fresh/h100-moe-2.4b": "2026-11-28-fresh/h200-moe-2.4b",
}


def loaded(folder):
    """Return the runs of a folder's profile."""
    return [
        store.load(path)[:2] for path in sorted((ROOT / folder).glob("runs/*-measure-profile-*"))
    ]


def kind(op):
    if isinstance(op, Collective):
        return f"collective, {'from' if op.size_bytes >= 2**24 else 'below'} 16 MiB"
    if isinstance(op, Attention):
        return f"attention {op.direction}"
    return f"{type(op).__name__.lower()}"


def errors(here, there):
    """Yield kind, predicted/measured - 1 and the half-width of what both measured: operations, and
    layers as the composed sum times the other device's factor."""
    target = there[0][0].cluster
    prices, own = Prices(transfer(here, target)), fit.calibrate(there)
    for price in (*own.curves, *own.surfaces):
        sizes = price.x_bytes if isinstance(price.like, Sized) else price.shapes
        for size, time_s in zip(sizes, price.time_s, strict=True):
            sized = isinstance(price.like, Sized)
            op = of_bytes(price.like, int(size)) if sized else shape_op(price, size)
            if isinstance(op, Elementwise) and size < 2**24:
                continue
            try:
                found = prices.estimate(op, how(price))
            except ValueError:
                continue
            if "stands in" not in found.note and "data sheet's price" not in found.note:
                yield kind(op), found.time_s / time_s - 1, found.error
    for sample in (sample for _, samples in there for sample in samples):
        op = sample.case.op
        if isinstance(op, Block) and sample.status == "ok":
            tasks = models.block_tasks(op)
            ratio, held_out = prices.factor(op, tasks)
            time_s = ratio * prices.composed_s(tasks)
            error = held_out.p90 if held_out else 1.0
            yield f"layer {op.direction}", time_s / expected_s(sample) - 1, error


def main() -> None:
    logging.disable(logging.WARNING)
    table.WIDTH = 140
    off = defaultdict(list)
    for there, here in PAIRS.items():
        runs = {"H100": loaded(there), "H200": loaded(here)}
        for source, target in (("H200", "H100"), ("H100", "H200")):
            for name, *of in errors(runs[source], runs[target]):
                off[f"{source} to {target}", name].append(of)
    rows = []
    for key, found in sorted(off.items()):
        errors_, half = np.asarray(found).T
        inside = (1 + errors_ >= 1 / (1 + half)) & (1 + errors_ <= 1 + half)
        cells = [percent(np.median(np.abs(errors_))), percent(np.quantile(np.abs(errors_), 0.9))]
        cells += [
            percent(np.median(errors_), sign=True),
            f"{inside.mean():.0%}",
            percent(np.median(half)),
        ]
        rows.append((*key, str(len(found)), *cells))
    heads = ("transfer", "work", "points", "median", "p90", "bias", "inside", "half-width")
    table.write([table.Table("Another device", heads, tuple(rows), (), 2)], sys.stdout)


main()
