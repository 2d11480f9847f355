"""Errors of curves at points left out, and the time of fits and prices.

Usage: held_out.py [RUN...]; without one, the six logs of 8 A100 in tests/data (nccl-tests).
"""

import sys
import time
from pathlib import Path

import numpy as np

from meshwise import store
from meshwise.fit import calibrate, laws
from meshwise.fit.curves import fit_curve
from meshwise.prices import Prices, times_of
from meshwise.prices.laws import KnotTimes
from meshwise.spec import Gemm
from tests.unit.test_laws import ABOUT, logs

PROFILE = Path(__file__).parents[1].glob("2026-11-27-fresh/gpt-2.6b/runs/*-measure-profile-*")
NAMES = ("lines", "cubic", "alpha_beta", "root", "smooth", "pieces", "sigmoid")


def halves(x, t):
    """Yield the points of one half, and those of the other that lie between them."""
    for phase in (0, 1):
        mine = np.arange(len(x)) % 2 == phase
        others = ~mine & (x > x[mine][0]) & (x < x[mine][-1])
        yield x[mine], t[mine], x[others], t[others]


def told(name, errors):
    errors = np.abs(np.asarray(errors))
    print(
        f"{name:22} {100 * np.median(errors):8.2f} {100 * np.quantile(errors, 0.9):8.2f} "
        f"{100 * errors.mean():8.2f} {100 * errors.max():8.1f} {len(errors):7}"
    )


def main() -> None:
    if len(sys.argv) > 1:
        curves = [
            (np.asarray(c.x_bytes), np.asarray(c.time_s))
            for c in calibrate([store.load(path)[:2] for path in sys.argv[1:]]).curves
        ]
    else:
        curves = [(x, t) for *_, x, t in logs()]
    heads = "".join(f"{head:>9}" for head in ("median", "p90", "mean", "worst"))
    print(f"{'% off at left-out':22}{heads} {'points':>7}")
    alone: dict[str, list[float]] = {name: [] for name in NAMES}
    chosen, plain, failed = [], [], dict.fromkeys(NAMES, 0)
    for x, t in curves:
        for known_x, known_t, left_x, left_t in halves(x, t):
            curve = fit_curve(dict(zip(known_x, known_t, strict=True)), ABOUT)
            chosen += (times_of(curve)(left_x) / left_t - 1).tolist()
            alpha, beta = laws.alpha_beta(known_x, known_t)
            plain += ((alpha + beta * left_x) / left_t - 1).tolist()
            for name in NAMES:
                fitted = laws.fits(1.0, [])[name](known_x, known_t)
                if fitted is None:
                    failed[name] += 1
                    continue
                times = KnotTimes(name, fitted, known_x, known_t)(left_x)
                alone[name] += (times / left_t - 1).tolist()
    told("chosen by the fit", chosen)
    told("a line, not corrected", plain)
    for name in NAMES:
        if alone[name]:
            told(f"{name}" + f" ({failed[name]} failed)" * bool(failed[name]), alone[name])
    for name, law in (("every law", None), ("alpha_beta alone", "alpha_beta")):
        begin = time.perf_counter()
        for x, t in curves:
            fit_curve(dict(zip(x, t, strict=True)), ABOUT, law=law)
        each_s = (time.perf_counter() - begin) / len(curves)
        print(f"a fit of {name}: {1000 * each_s:.1f} ms a curve")
    times = times_of(fit_curve(dict(zip(*curves[0], strict=True)), ABOUT))
    begin = time.perf_counter()
    for _ in range(20_000):
        times(12_345.0)
    print(f"a curve's price alone: {50 * (time.perf_counter() - begin):.1f} us")
    prices = Prices(calibrate([store.load(path)[:2] for path in PROFILE]))
    products = [Gemm(m=m, n=2560, k=7680) for m in range(1001, 16001, 3)]
    prices.estimate(products[0])
    begin = time.perf_counter()
    for product in products[1:]:
        prices.estimate(product)
    print(f"a product, each once: {1e6 * (time.perf_counter() - begin) / len(products):.1f} us")
    sizes = np.random.default_rng(0).uniform(*curves[0][0][[0, -1]], 1_000_000)
    begin = time.perf_counter()
    times(sizes)
    print(f"prices at once: {1 / (time.perf_counter() - begin):.1f} M a second")


main()
