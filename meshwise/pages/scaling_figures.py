"""Draw a scaling benchmark: three files of panels, and a page with the same panels.

A panel paints one set of axes. Cells without a time are hatched and give the reason. If nothing was
measured, a sentence replaces the plot, never a zero.
"""

import math
import textwrap
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from meshwise.pages import html, scaling, svg
from meshwise.pages.scaling import FAILED, TITLE, Scaling, ScalingRow, rate, subtitle
from meshwise.pages.table import percent

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Value = Callable[[ScalingRow], float | None]
_MARKERS = "osD^vPX*<>"
_MOST_BARS = 12  # above, numbers over bars would hide each other


def lines(axes: "Axes", found: Scaling, value: Value, *, over_lengths: bool = False) -> bool:
    """Draw a line for each length over the ring sizes, or for each ring size over the lengths.
    Return whether there is a line."""
    for index, one in enumerate(found.ring_sizes if over_lengths else found.lengths):
        points = []
        for row in found.measured:
            x, of_line = row.result.ring_size, row.result.seq_length
            if over_lengths:
                x, of_line = of_line, x
            if of_line == one and (y := value(row)) is not None:
                points.append((x, y))
        if points:
            axes.plot(
                *zip(*points, strict=True), color=svg.colour(index), markersize=5,
                marker=_MARKERS[index % len(_MARKERS)],
                label=f"ring {one}" if over_lengths else f"{one:,} tokens",
            )  # fmt: skip
    sizes = found.lengths if over_lengths else found.measured_rings or [1]
    turned = 30 if len(sizes) > 4 else 0
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, labels=list(map("{:,}".format, sizes)), rotation=turned)
    axes.set_xlim(sizes[0] / 1.15, sizes[-1] * 1.15)
    axes.set_xlabel("sequence length, tokens" if over_lengths else "ring size, ranks")
    return bool(axes.lines)


def map_(
    axes: "Axes", found: Scaling, value: Value, show: Callable[[float], str], *,
    logarithmic: bool = False, most: float | None = None, less_is_better: bool = False,
) -> None:  # fmt: skip
    """Draw a cell for each length and ring size: a value on colour, where bright is better, or
    hatched with the reason."""
    import matplotlib as mpl
    from matplotlib.colors import LogNorm, Normalize
    from matplotlib.patches import Rectangle

    values = [v for row in found.measured if (v := value(row)) is not None]
    low, high = (0.0, most or 0) if most else (min(values, default=1), max(values, default=1))
    norm = (LogNorm if logarithmic and low < high else Normalize)(low, max(high, *values, low))
    colours = mpl.colormaps["cividis_r" if less_is_better else "cividis"]
    for y, tokens in enumerate(found.lengths):
        for x, ring in enumerate(found.ring_sizes):
            row = found.at(tokens, ring)
            number = value(row) if row and row.result.time_ms is not None else None
            look: dict[str, Any] = {"facecolor": "none", "edgecolor": svg.GRID, "hatch": "////"}
            told, ink = _why(row), svg.INK
            if number is not None:
                red, green, blue, _ = colours(norm(number))
                ink = "black" if 0.3 * red + 0.59 * green + 0.11 * blue > 0.5 else "white"
                told, look = show(number), {"facecolor": (red, green, blue)}
            axes.add_patch(Rectangle((x - 0.48, y - 0.48), 0.96, 0.96, **look))
            axes.text(x, y, told, ha="center", va="center", color=ink, fontsize=8)
    sizes, lengths = found.ring_sizes, found.lengths
    axes.set_xticks(range(len(sizes)), labels=list(map(str, sizes)))
    axes.set_yticks(range(len(lengths)), labels=list(map("{:,}".format, lengths)))
    axes.set(xlim=(-0.5, len(sizes) - 0.5), ylim=(-0.5, len(lengths) - 0.5))
    axes.set(xlabel="ring size, ranks", ylabel="sequence length, tokens")
    axes.grid(visible=False)
    axes.tick_params(length=0)
    axes.spines[["left", "bottom"]].set_visible(False)


def _why(row: ScalingRow | None) -> str:
    """Return the text of a cell without a value."""
    if row is None:
        return "not run"
    return row.result.status if row.result.time_ms is None else "no ring 1"


def say(axes: "Axes", sentence: str) -> None:
    """Show a sentence in place of the plot."""
    axes.text(0.5, 0.5, sentence, transform=axes.transAxes, ha="center", color=svg.MUTED)
    axes.set_axis_off()


def log_limits(axes: "Axes") -> tuple[float, float]:
    """Make the height logarithmic, with room around the lines and for a round tick."""
    low, high = axes.dataLim.intervaly
    around = max(1.15, (2.6 * low / high) ** 0.5)
    axes.set_yscale("log", base=10)
    axes.set_ylim(low / around, high * around)
    return low / around, high * around


# ---- lines over ring sizes


def throughput(axes: "Axes", found: Scaling) -> None:
    axes.set_title("Throughput")
    if not lines(axes, found, lambda row: row.result.throughput_tokens_per_sec):
        return say(axes, "no case has a time")
    dashed, sizes = "", found.measured_rings
    for index, tokens in enumerate(found.lengths):
        alone = found.at(tokens, 1)
        first = alone.result.throughput_tokens_per_sec if alone and alone.result.time_ms else None
        if first and len(sizes) > 1:
            ideal = [first * size for size in sizes]
            axes.plot(sizes, ideal, **svg.DASHED | {"color": svg.colour(index)})
            dashed = " (dashed: linear)"
    svg.rate_ticks(axes.yaxis, *log_limits(axes), "")
    axes.set_ylabel(f"tokens/s of one ring{dashed}")
    axes.legend()


def speedup(axes: "Axes", found: Scaling) -> None:
    axes.set_title("Speedup over one rank")
    sizes = found.measured_rings
    if len(sizes) < 2 or not lines(axes, found, lambda row: row.speedup):
        return say(axes, _no_scaling(found))
    axes.plot(sizes, sizes, label="linear", **svg.DASHED)
    axes.set_yscale("log", base=2)
    least = min(row.speedup for row in found.measured if row.speedup)
    below = [2.0**-power for power in range(1, math.ceil(-math.log2(least)) + 1)]
    axes.set_yticks([*below, *sizes], labels=[f"{each:g}x" for each in [*below, *sizes]])
    axes.set_ylabel("speedup, same length")
    axes.legend()


def efficiency(axes: "Axes", found: Scaling) -> None:
    axes.set_title("Strong efficiency")
    sizes = found.measured_rings
    if len(sizes) < 2 or not lines(axes, found, lambda row: row.strong and 100 * row.strong):
        return say(axes, _no_scaling(found))
    axes.plot(sizes, [100] * len(sizes), label="linear", **svg.DASHED)
    axes.set_ylim(0, max(108, 1.08 * max(100 * (row.strong or 0) for row in found.rows)))
    axes.set_ylabel("speedup / ring size, %")
    axes.legend()


def communication(axes: "Axes", found: Scaling) -> None:
    axes.set_title("Communication")
    rings = [ring for ring in found.measured_rings if ring > 1]
    rows = [row for row in found.measured if row.result.ring_size in rings]
    if not rows:
        return say(axes, "only one rank a ring: nothing is sent")
    width, tallest = 0.8 / len(found.lengths), max(map(_taller, rows))
    for index, tokens in enumerate(found.lengths):
        of_length = [row for row in rows if row.result.seq_length == tokens]
        x = [rings.index(r.result.ring_size) - 0.4 + width * (index + 0.5) for r in of_length]
        isolated = [row.result.communication_time_ms or 0 for row in of_length]
        exposed = [row.result.exposed_comm_ms or 0 for row in of_length]
        colour = svg.colour(index)
        axes.bar(x, isolated, 0.9 * width, color=colour, alpha=0.3)
        axes.bar(x, exposed, 0.45 * width, color=colour, label=f"{tokens:,} tokens")
        for at, row in zip(x, of_length if len(rows) <= _MOST_BARS else (), strict=False):
            told = percent(row.exposed_share) if row.result.bytes_sent else "none"
            axes.text(at, _taller(row), told, ha="center", va="bottom", fontsize=7)
    axes.set_ylim(0, 1.3 * tallest or 1)
    axes.set_xticks(range(len(rings)), labels=[str(ring) for ring in rings])
    axes.set(xlim=(-0.6, len(rings) - 0.4), xlabel="ring size, ranks", ylabel="ms a step")
    axes.grid(visible=False, axis="x")
    axes.legend(title="pale: isolated, solid: exposed;\n% of the step that is exposed")


def _taller(row: ScalingRow) -> float:
    return max(row.result.communication_time_ms or 0, row.result.exposed_comm_ms or 0)


# ---- memory over lengths


def memory(axes: "Axes", found: Scaling) -> None:
    axes.set_title("Peak memory of a rank")
    if not lines(axes, found, lambda row: row.result.peak_gb, over_lengths=True):
        return say(axes, _no_memory(found))
    low, high = log_limits(axes)
    failed = [row.result for row in found.rows if row.result.status == "oom"]
    if failed:
        axes.set_ylim(low, high := high * (high / low) ** 0.2)  # room for the crosses
    for index, ring in enumerate(found.ring_sizes):
        tokens = [one.seq_length for one in failed if one.ring_size == ring]
        if tokens:
            axes.plot(
                tokens, [0.97 - 0.07 * index] * len(tokens), "x", color=svg.colour(index),
                markersize=7, mew=2, label=f"oom, ring {ring}",
                transform=axes.get_xaxis_transform(),
            )  # fmt: skip
    inside = [value for value in svg.decades(low, high, (1, 2, 5)) if low <= value <= high]
    axes.set_yticks(inside, labels=[f"{value:g}" for value in inside])
    axes.set_ylabel("GB (1e9 bytes)")
    axes.legend()


def tokens_per_gb(axes: "Axes", found: Scaling) -> None:
    axes.set_title("Tokens held by a GB")
    if not lines(axes, found, lambda row: row.tokens_per_gb, over_lengths=True):
        return say(axes, _no_memory(found))
    axes.set_ylim(0, 1.15 * max(row.tokens_per_gb or 0 for row in found.rows))
    axes.yaxis.set_major_formatter(lambda value, _: rate(value) if value else "0")
    axes.set_ylabel("tokens of the batch / GB of one rank")
    axes.legend()


# ---- maps of length and ring size


def time_map(axes: "Axes", found: Scaling) -> None:
    axes.set_title("Time, ms (bright: better)")
    map_(axes, found, lambda row: row.result.time_ms, _three_digits,
        logarithmic=True, less_is_better=True)  # fmt: skip


def throughput_map(axes: "Axes", found: Scaling) -> None:
    axes.set_title("Throughput, tokens/s (bright: better)")
    map_(axes, found, lambda row: row.result.throughput_tokens_per_sec, rate)


def efficiency_map(axes: "Axes", found: Scaling) -> None:
    axes.set_title("Strong efficiency, % (bright: better)")
    map_(axes, found, lambda row: row.strong, lambda share: f"{100 * share:.0f}", most=1)


Panel = Callable[["Axes", Scaling], None]
FILES: dict[str, dict[Panel, str]] = {  # the panels of each, with their captions on the page
    "scaling_efficiency_analysis.png": {
        throughput: "Tokens a second of one ring; dashed: one rank's times the ring size.",
        speedup: "Speedup over one rank at the same length.",
        efficiency: "Speedup over ring size.",
        communication: "Isolated and exposed time; over each pair the exposed share of the step.",
    },
    "memory_analysis.png": {
        memory: "Peak of a rank. Crosses at the top are lengths that did not fit.",
        tokens_per_gb: "Tokens of the batch over the peak of one rank: flat where memory grows "
        "with the length.",
    },
    "performance_heatmaps.png": {
        time_map: "Time of a step of the slowest rank; bright is better.",
        throughput_map: "Tokens a second of one ring; bright is better.",
        efficiency_map: "Strong efficiency; bright is better.",
    },
}


def png(name: str, found: Scaling) -> bytes:
    """Draw one of ``FILES``."""
    panels = [lambda axes, panel=panel: panel(axes, found) for panel in FILES[name]]
    columns = 2 if len(panels) == 4 else len(panels)
    tall = 1.4 + 0.42 * len(found.lengths) if name.startswith("performance") else 0
    width, height = 5.4 * columns, max(3.7, tall) * (len(panels) // columns) + 0.8
    title = f"{TITLE}\n{textwrap.fill(subtitle(found), round(13 * width))}"
    return svg.picture(title, panels, columns=columns, width=width, height=height)


def figure(panel: Panel, found: Scaling) -> svg.Figure:
    """Draw a panel for the page."""
    caption = next(panels[panel] for panels in FILES.values() if panel in panels)
    return svg.draw(caption, lambda axes: panel(axes, found))


def page(found: Scaling) -> str:
    """Return words, figures and tables as one self-contained page."""
    time, best, *others = scaling.tables(found)
    failures = tuple(each for each in others if each.title == FAILED)
    rest = [each for each in others if each not in failures]
    drawn = [figure(panel, found) for panels in FILES.values() for panel in panels]
    folded = (scaling.configuration(found),)
    sections = [
        html.PageSection(
            "What it says", tuple(scaling.conclusions(found)), tables=(best, *failures)
        ),
        html.PageSection("Scaling, memory, all cases", figures=tuple(drawn)),
        html.PageSection("The numbers", tables=(time, *rest)),
        html.PageSection(html.SOURCES, tuple(scaling.sources(found)), folded=folded),
    ]
    return html.render(TITLE, subtitle(found), sections, ("GB = 1e9 bytes.",))


def _no_scaling(found: Scaling) -> str:
    if len(found.measured_rings) < 2:
        return "one ring size only: no scaling to show"
    return "no length has a time of one rank"


def _no_memory(found: Scaling) -> str:
    return "memory was not measured (CPU)" if found.measured else "no case has a time"


def _three_digits(value: float) -> str:
    return f"{value:,.{0 if value >= 100 else 1 if value >= 10 else 2}f}"
