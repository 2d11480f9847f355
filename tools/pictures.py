"""Draw the pictures of docs/calibrate.md: `make pictures`, or `pictures.py FOLDER` elsewhere.

In: logs of nccl-tests under tests/data, and a profile of four H200 under benchmarks/. Out: SVG.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from meshwise import machine, store
from meshwise.fit import calibrate, laws
from meshwise.fit.calibrate import expected_s
from meshwise.fit.curves import fit_curve
from meshwise.models import block_tasks, device_of
from meshwise.pages import svg
from meshwise.prices import Datasheet, Prices, roofline_s, shape_op, unmeasured
from meshwise.prices.datasheet import attainable, of_bytes
from meshwise.prices.evaluate import NEIGHBOURS, apart, left_out, slower_s
from meshwise.prices.laws import Floats, KnotTimes, law_s
from meshwise.prices.measured import MOST_BEYOND
from meshwise.prices.uneven import RULES, even_bytes
from meshwise.probe import importers
from meshwise.probe.cases.sizes import embedding_splits, uneven
from meshwise.spec import Block, Cluster, Collective, Costs, Gemm, RunInfo, Sample
from meshwise.units import format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ROOT = Path(__file__).resolve().parent.parent
PROFILE = (
    "benchmarks/2026-11-27-four/plans-gpt-2.6b/runs/20261127T151853-measure-profile-4x-nvidia-h200"
)
Logged = tuple[Collective, Cluster, Floats, Floats]
BLUE, ORANGE, GREEN, GREY = svg.SERIES[0], svg.SERIES[1], svg.SERIES[2], svg.MUTED


def logged(name: str, cluster: str) -> Logged:
    """Return the collective of a log, the machine, and its curve in bytes and seconds."""
    place = store.read(Path(str(machine.shipped()[cluster])), Cluster)
    found: dict[int, float] = {}
    for one in importers.read(ROOT / "tests/data" / name, place).samples:
        op = one.case.op
        if isinstance(op, Collective) and op.size_bytes and one.times_s and not op.in_place:
            found[op.size_bytes], like = one.times_s[0], op
    x, t = np.asarray(sorted(found.items()), float).T
    return like, place, x, t


def sized(axes: "Axes", *ticks: int) -> None:
    """Give sizes a log axis with few ticks: three panels lie side by side."""
    axes.set_xscale("log")
    axes.set_xticks(ticks, labels=[format_bytes(size).replace(".0", "") for size in ticks])


def worded(
    axes: "Axes", text: str, at: tuple[float, float], shift: int = 4, colour: str = svg.INK
) -> None:
    """Write a text beside a point: so many points to its right, or to its left if negative."""
    look: Any = {"ha": "left" if shift > 0 else "right", "va": "center", "color": colour}
    axes.annotate(text, at, (shift, 0), textcoords="offset points", fontsize=8, **look)


# ---- the eight laws


def eight_laws() -> svg.Figure:
    like, place, x, t = logged("nccl_tests_a100x8/nccl_allgather.log", "p4d.24xlarge")
    whole, known = KnotTimes("cubic", (), x, t), np.arange(len(x)) % 2 == 0
    fine = np.exp2(np.arange(np.log2(x[0]), np.log2(x[known][-1]) + 0.1, 0.2))

    def measured(axes: "Axes") -> None:
        rate = like.bus_factor * x / t / 1e9
        for row, at in zip(laws.turning_points(t, rate), ("times rise", "full rate"), strict=True):
            axes.axvline(x[row], color=GREEN, linestyle="--", linewidth=1)
            worded(axes, at, (x[row], 240), -4, GREEN)
        axes.plot(x, rate, "o-", color=BLUE, markersize=3)
        axes.set(title="all-gather, 8 A100", ylabel="bus bandwidth (GB/s)", ylim=(-10, 250))
        sized(axes, 2**10, 2**20, 2**30)

    def of(name: Any, fit: Callable[..., Any]) -> svg.Paint:
        parameters = fit(x[known], t[known])
        times = KnotTimes(name, parameters, x[known], t[known])
        others = ~known & (x < fine[-1])
        off = 100 * (times(x[others]) / t[others] - 1)

        def paint(axes: "Axes") -> None:
            if parameters and name != "sigmoid":
                alone = 100 * (law_s(name, parameters, fine) / whole(fine) - 1)
                axes.plot(fine, alone, ":", color=GREY, linewidth=1.2, label="law alone")
            axes.plot(fine, 100 * (times(fine) / whole(fine) - 1), color=ORANGE)
            axes.plot(x[known], 0 * x[known], "o", color=BLUE, markersize=3, label="fitted to")
            look: Any = {"color": ORANGE, "markersize": 3.5, "fillstyle": "none"}
            axes.plot(x[others], off, "o", label="left out", **look)
            error = np.sqrt((off**2).mean())
            axes.set(title=f"{name}: {error:.1f} %", ylabel="off (%)", ylim=(-32, 32))
            sized(axes, 2**10, 2**20, 2**30)
            if name == "root":  # the first with a law of its own and room for words
                axes.legend(loc="lower left")

        return paint

    fits = laws.fits(like.bus_factor, Datasheet(place).lines(like))
    panels = [measured, *(of(name, fit) for name, fit in fits.items())]
    caption = (
        "Eight laws fitted to every second size of an all-gather over 8 A100, and how far off."
    )
    return svg.draw(caption, *panels, columns=3, width=8.8, height=6.6)


# ---- beyond the last knot


def beyond() -> svg.Figure:
    curves = {
        "all-reduce, 4 H200, measured up to 4 MiB": (
            logged("nccl_tests_h200x4/nccl_tests_all_reduce.txt", "h200-hgx"),
            (2**14, 2**18, 2**22, 2**26, 2**30),
        ),
        "all-gather, 8 A100, measured up to 512 MiB": (
            logged("nccl_tests_a100x8/nccl_allgather.log", "p4d.24xlarge"),
            (2**21, 2**25, 2**29, 2**33),
        ),
    }

    def of(title: str, curve: Logged, ticks: tuple[int, ...]) -> svg.Paint:
        like, place, x, t = curve
        last = ticks[2]
        known = x <= last
        points = dict(zip(x[known].astype(int).tolist(), t[known].tolist(), strict=True))
        fitted = fit_curve(points, {"like": like, "runs": ("log",)}, place)
        prices = Prices(msgspec.structs.replace(unmeasured(place), curves=(fitted,)))
        fine = np.geomspace(last, min(x[-1], MOST_BEYOND * last), 100)
        told = [prices.estimate(of_bytes(like, int(size))) for size in fine]
        time_s, error = np.asarray([(one.time_s, one.error) for one in told]).T
        steep = (t[known][-1] - t[known][-3]) / (x[known][-1] - x[known][-3])
        sheet, _ = Datasheet(place).s_per_byte(like)

        def rate(size: Floats, seconds: Floats) -> Floats:
            return like.bus_factor * size / seconds / 1e9

        def paint(axes: "Axes") -> None:
            low, high = rate(fine, time_s * (1 + error)), rate(fine, time_s / (1 + error))
            axes.fill_between(fine, low, high, color=ORANGE, alpha=0.18, lw=0, label="interval")
            for slope, name, look in ((sheet, "data sheet's slope", ":"),
                                      (steep, "slope of the last three", "--")):  # fmt: skip
                times = t[known][-1] + slope * (fine - last)
                axes.plot(fine, rate(fine, times), look, color=GREY, label=name)
            axes.plot(fine, rate(fine, time_s), color=ORANGE, label="price")
            axes.plot(x[known], rate(x[known], t[known]), "o-", color=BLUE, label="knots")
            later: Any = {"color": BLUE, "fillstyle": "none", "label": "measured later"}
            axes.plot(x[~known], rate(x[~known], t[~known]), "o", **later)
            axes.set(title=title, ylabel="bus bandwidth (GB/s)", ylim=(0, None))
            sized(axes, *ticks)
            axes.set_xlim(ticks[0] / 1.3, ticks[-1] * 1.3)
            axes.legend(loc="upper left")

        return paint

    panels = [of(title, *curve) for title, curve in curves.items()]
    caption = "Two curves cut short, and their prices beyond the last knot."
    return svg.draw(caption, *panels, width=8.8, height=3.4)


# ---- products near measured ones


def neighbours(costs: Costs) -> svg.Figure:
    surface = next(one for one in costs.surfaces if isinstance(one.like, Gemm) and one.like.trans_b)
    ops = [shape_op(surface, shape) for shape in surface.shapes]
    flops = np.asarray([op.flops for op in ops], float)
    places = np.log(np.asarray(surface.shapes, float))
    reached = np.asarray([roofline_s(op, surface) for op in ops]) / surface.time_s
    told = reached / left_out(places, np.log(reached))
    mine = int(np.argsort(np.abs(np.log(told / reached)))[-3])
    near = np.argsort(apart(places[mine], places))[1 : NEIGHBOURS + 1]

    def example(axes: "Axes") -> None:
        axes.plot(flops, 100 * reached, "o", color=BLUE, label="measured shapes")
        name = "x".join(map(str, surface.shapes[mine]))
        for i in near:
            ends = (flops[i], flops[mine]), (100 * reached[i], 100 * told[mine])
            axes.plot(*ends, "-", color=GREY, linewidth=0.8)
        axes.plot(flops[near], 100 * reached[near], "o", color=BLUE, markersize=9,
                  fillstyle="none", label="its four neighbours")  # fmt: skip
        axes.plot(flops[mine], 100 * told[mine], "D", color=ORANGE, label="predicted by these")
        axes.plot(flops[mine], 100 * reached[mine], "s", color=BLUE, fillstyle="none",
                  markersize=6, label="measured")  # fmt: skip
        axes.set(title=f"{name} left out", xscale="log", xlabel="work of the product")
        svg.rate_ticks(axes.xaxis, flops.min(), flops.max(), "FLOP")
        axes.set(ylabel="of the roofline (%)", ylim=(55, 105))
        axes.legend(loc="lower right")

    def all_shapes(axes: "Axes") -> None:
        ends, p90 = np.asarray([70, 105]), surface.held_out.p90
        axes.fill_between(ends, ends * (1 - p90), ends * (1 + p90), color=ORANGE, alpha=0.18, lw=0)
        axes.plot(ends, ends, color=GREY, linewidth=1)
        axes.plot(100 * reached, 100 * np.asarray(told), "o", color=BLUE)
        axes.set(title="each shape left out once; band: 9 of 10", xlim=ends, ylim=ends)
        axes.set(xlabel="measured (% of the roofline)", ylabel="predicted (%)")

    caption = (
        "Products of a GPT 2.6B on an H200: utilisation of shapes by that of their neighbours."
    )
    return svg.draw(caption, example, all_shapes, width=8.8, height=3.4)


# ---- what slows a step down


def slow(run: tuple[RunInfo, list[Sample]], costs: Costs) -> svg.Figure:
    prices, name = Prices(costs), costs.cluster.device.name
    found = {}
    for sample in run[1]:
        op = sample.case.op
        if isinstance(op, Block) and (op.part, op.direction, op.tp) == ("layer", "backward", 1):
            found[op] = expected_s(sample)
    blocks = sorted(found, key=lambda op: op.activation_elements)
    factor = next(one for one in costs.factors if one.like in found)
    ops = {op: block_tasks(op, device_of(costs.cluster, "compiled")) for op in blocks}

    def clocks(axes: "Axes") -> None:
        others, stretch = np.linspace(0, 2, 200), attainable().clocks.stretch
        axes.plot(others, [stretch(name, 1.0, each) for each in others], color=ORANGE)
        bursts = [prices.composed_s(ops[blocks[-1]], each) for each in (1.0, 2.0)]
        share = (2 * bursts[0] - bursts[1]) / (bursts[1] - bursts[0])
        at = share, stretch(name, 1.0, share)
        axes.plot(*at, "o", color=BLUE)
        worded(axes, "a layer of GPT 2.6B", at)
        axes.set(title="power cap, H200", xlabel="other work / products (time)")
        axes.set(ylabel="stretch of products", ylim=(0.98, 1.2), xlim=(0, 2))
        axes.set_yticks([1, 1.05, 1.1, 1.15, 1.2])

    def launches(axes: "Axes") -> None:
        x = np.asarray([op.microbatch_size for op in blocks], float)
        device = [
            prices.composed_s(ops[op]) * r for op, r in zip(blocks, factor.ratio, strict=True)
        ]
        fine = np.geomspace(x[0] / 1.4, x[-1] * 1.4, 100)
        line = np.exp(np.interp(np.log(fine), np.log(x), np.log(device)))
        line *= np.where(fine < x[0], fine / x[0], np.where(fine > x[-1], fine / x[-1], 1))
        hosts = np.interp(np.log(fine), np.log(x), factor.host_s)
        axes.plot(fine, 1e3 * hosts, color=GREEN, linestyle="--", label="host")
        axes.plot(fine, 1e3 * line, ":", color=GREY, label="device")
        axes.plot(fine, 1e3 * slower_s(hosts, line), color=ORANGE, label="T")
        axes.plot(x, [1e3 * found[op] for op in blocks], "o", color=BLUE, label="measured")
        axes.set(title="launches, a layer's backward", xscale="log", yscale="log")
        axes.set_xticks(x, labels=[f"{each:g}" for each in x])
        axes.set_yticks([0.5, 1, 2, 4, 8], labels=["0.5", "1", "2", "4", "8"])
        axes.set(xlabel="sequences of a microbatch", ylabel="time (ms)")
        axes.legend(loc="upper left")

    def beside(axes: "Axes") -> None:
        known, work, message = attainable().beside, 10.0, 6.0
        slow_message = message / known.collective
        ends = [work, message, work + (1 - known.products) * slow_message, slow_message]
        rows = ["work, alone", "message, alone", "work, together", "message, together"]
        for row, (end, colour) in enumerate(zip(ends, (BLUE, ORANGE) * 2, strict=True)):
            axes.barh(row + 0.4 * (row > 1), end, height=0.7, color=colour)
            worded(axes, f"{end:.1f}", (end, row + 0.4 * (row > 1)))
        axes.set_yticks([0, 1, 2.4, 3.4], labels=rows)
        axes.set(title="messages beside work", xlabel="time (ms)", xlim=(0, 15), ylim=(3.9, -0.5))
        axes.grid(axis="y", visible=False)

    caption = "Three causes that slow a step down: the power cap, launches, messages beside work."
    return svg.draw(caption, clocks, launches, beside, width=8.8, height=3.0)


# ---- uneven all-to-alls


def uneven_sizes() -> svg.Figure:
    splits = embedding_splits("2048,2-3-3-5,64", "tables")
    op, n = uneven(splits, 4, "fp32"), 4
    sent = [sum(row) - row[i] for i, row in enumerate(splits)]
    received = [sum(row[i] for row in splits) - splits[i][i] for i in range(n)]

    def matrix(axes: "Axes") -> None:
        for i, row in enumerate(splits):
            for j, part in enumerate(row):
                look: Any = {"facecolor": GREY if i == j else BLUE, "linewidth": 0}
                strength = 0.15 + 0.5 * part / max(map(max, splits))
                axes.broken_barh([(j - 0.48, 0.96)], (i - 0.48, 0.96), alpha=strength, **look)
                axes.annotate(f"{part / 1e6:.2f}", (j, i), ha="center", va="center", fontsize=8)
        axes.set(title="MB from each rank to each", xlabel="to rank", ylabel="from rank")
        axes.set(xticks=range(n), yticks=range(n), ylim=(n - 0.5, -0.5))
        axes.set_aspect("equal")
        axes.grid(visible=False)

    def sizes(axes: "Axes") -> None:
        ranks = np.arange(n)
        axes.bar(ranks - 0.18, [x / 1e6 for x in sent], 0.34, color=BLUE, label="sent to others")
        axes.bar(ranks + 0.18, [x / 1e6 for x in received], 0.34, color=ORANGE,
                 label="received from others")  # fmt: skip
        for rule in RULES:
            size = even_bytes(op, rule) / 1e6
            axes.axhline(size, color=svg.INK, linestyle="--", linewidth=0.8, xmax=0.98)
            look: Any = {"ha": "right", "va": "bottom", "fontsize": 8}
            axes.annotate(f"{rule}: {size:.2f}", (n + 0.55, size + 0.03), **look)
        axes.set(title="the size by each rule", xlabel="rank", ylabel="MB", xlim=(-0.6, n + 0.6))
        axes.set(xticks=range(n), ylim=(0, 4.2))
        axes.grid(visible=False)
        axes.legend(loc="upper left", ncols=2)

    caption = "An uneven exchange of embedding tables (2048,2-3-3-5,64), and its size by each rule."
    return svg.draw(caption, matrix, sizes, width=8.8, height=3.2)


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "docs")
    info, samples, _ = store.load(ROOT / PROFILE)
    costs = calibrate([(info, samples)])
    pictures = {
        "laws": eight_laws(), "beyond": beyond(), "uneven": uneven_sizes(),
        "neighbours": neighbours(costs), "slow": slow((info, samples), costs),
    }  # fmt: skip
    for name, figure in pictures.items():
        svg.write(folder / f"calibrate-{name}.svg", figure)


if __name__ == "__main__":
    main()
