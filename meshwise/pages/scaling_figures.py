"""A scaling benchmark as pictures: three files of panels, and the same panels for the page.

A panel paints one set of axes. Lines are named at their ends; cells without a time are hatched and
say why; what was not measured is a sentence in place of a plot, never a zero.
"""

import io
import math
import re
import textwrap
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from meshwise.pages import svg
from meshwise.pages.scaling import Row, Scaling, percent, rate
from meshwise.pages.scaling_report import TITLE, subtitle

if TYPE_CHECKING:
    from matplotlib.axes import Axes

APART = 0.065  # of the axes' height, between names of lines
IDEAL: dict[str, Any] = {"linestyle": (0, (4, 3)), "linewidth": 0.9, "alpha": 0.6, "zorder": 1}
_MARKERS = "osD^vPX*<>"
_MOST_BARS = 12  # above, numbers over bars would hide each other


class Palette(NamedTuple):
    ink: str
    muted: str
    grid: str
    series: tuple[str, ...]

    def of(self, index: int) -> str:
        return self.series[index % len(self.series)]


SCREEN = Palette(svg.INK, svg.MUTED, svg.GRID, svg.SERIES)


class End(NamedTuple):
    """The last point of a line, and its name."""

    x: float
    y: float
    name: str
    colour: str


def lines(
    axes: "Axes",
    scaling: Scaling,
    palette: Palette,
    value: Callable[[Row], float | None],
    *,
    over_lengths: bool = False,
) -> list[End]:
    """One line for each length over the ring sizes, or for each ring size over the lengths."""
    ends = []
    for index, one in enumerate(scaling.ring_sizes if over_lengths else scaling.lengths):
        points = []
        for row in scaling.measured:
            x, of_line = row.result.ring_size, row.result.seq_length
            if over_lengths:
                x, of_line = of_line, x
            if of_line == one and (y := value(row)) is not None:
                points.append((x, y))
        if points:
            colour, marker = palette.of(index), _MARKERS[index % len(_MARKERS)]
            axes.plot(*zip(*points, strict=True), color=colour, marker=marker, markersize=5)
            ends.append(End(*points[-1], f"ring {one}" if over_lengths else f"{one:,}", colour))
    sizes = scaling.lengths if over_lengths else scaling.measured_rings or [1]
    axes.set_xscale("log", base=2)
    axes.set_xticks(
        sizes, labels=list(map("{:,}".format, sizes)), rotation=30 if len(sizes) > 4 else 0
    )
    axes.set_xlim(sizes[0] / 1.15, sizes[-1] * 1.15)
    axes.set_xlabel("sequence length, tokens" if over_lengths else "ring size, ranks")
    return ends


def name_ends(axes: "Axes", ends: Sequence[End]) -> None:
    """Write each line's name right of the axes, at the height of its end if there is room."""
    axes.autoscale_view()
    to_axes = axes.transData + axes.transAxes.inverted()
    heights = [float(to_axes.transform((end.x, end.y))[1]) for end in ends]
    for end, height in zip(ends, apart(heights), strict=True):
        axes.annotate(
            end.name, (end.x, end.y), (1.05, height), textcoords="axes fraction", va="center",
            fontsize=8, color=end.colour, annotation_clip=False,
            arrowprops={
                "arrowstyle": "-", "color": end.colour, "linewidth": 0.5, "shrinkB": 4,
                "relpos": (0, 0.5),
            },
        )  # fmt: skip


def apart(heights: Sequence[float]) -> list[float]:
    """Places near ``heights``, in their order, at least ``APART`` from each other. Heights that are
    too close become a block around their mean, which takes in the blocks that it then meets."""
    order = sorted(range(len(heights)), key=lambda index: (heights[index], index))
    blocks: list[list[float]] = []
    for index in order:
        block = [heights[index]]
        while blocks and _bottom(block) < _bottom(blocks[-1]) + APART * len(blocks[-1]):
            block = blocks.pop() + block
        blocks.append(block)
    placed = [_bottom(block) + APART * place for block in blocks for place in range(len(block))]
    return [placed[order.index(index)] for index in range(len(heights))]


def _bottom(block: Sequence[float]) -> float:
    """The height of the lowest name of a block."""
    return sum(block) / len(block) - APART * (len(block) - 1) / 2


def map_(
    axes: "Axes", scaling: Scaling, palette: Palette, value: Callable[[Row], float | None],
    show: Callable[[float], str], *, logarithmic: bool = False, most: float | None = None,
    less_is_better: bool = False,
) -> None:  # fmt: skip
    """Cells of length and ring size: numbers on colour, bright ones better; or hatched with the
    reason."""
    import matplotlib as mpl
    from matplotlib.colors import LogNorm, Normalize
    from matplotlib.patches import Rectangle

    values = [v for row in scaling.measured if (v := value(row)) is not None]
    low, high = (0.0, most or 0) if most else (min(values, default=1), max(values, default=1))
    norm = (LogNorm if logarithmic and low < high else Normalize)(low, max(high, *values, low))
    colours = mpl.colormaps["cividis_r" if less_is_better else "cividis"]
    for y, tokens in enumerate(scaling.lengths):
        for x, ring in enumerate(scaling.ring_sizes):
            row = scaling.at(tokens, ring)
            number = value(row) if row and row.result.time_ms is not None else None
            look: dict[str, Any] = {"facecolor": "none", "edgecolor": palette.grid, "hatch": "////"}
            told, ink = _why(row), palette.ink
            if number is not None:
                red, green, blue, _ = colours(norm(number))
                ink = "black" if 0.3 * red + 0.59 * green + 0.11 * blue > 0.5 else "white"
                told, look = show(number), {"facecolor": (red, green, blue)}
            axes.add_patch(Rectangle((x - 0.48, y - 0.48), 0.96, 0.96, **look))
            axes.text(x, y, told, ha="center", va="center", color=ink, fontsize=8)
    sizes, lengths = scaling.ring_sizes, scaling.lengths
    axes.set_xticks(range(len(sizes)), labels=list(map(str, sizes)))
    axes.set_yticks(range(len(lengths)), labels=list(map("{:,}".format, lengths)))
    axes.set(xlim=(-0.5, len(sizes) - 0.5), ylim=(-0.5, len(lengths) - 0.5))
    axes.set(xlabel="ring size, ranks", ylabel="sequence length, tokens")
    axes.grid(visible=False)
    axes.tick_params(length=0)
    axes.spines[["left", "bottom"]].set_visible(False)


def _why(row: Row | None) -> str:
    """The text of a cell without a number."""
    if row is None:
        return "not run"
    return row.result.status if row.result.time_ms is None else "no ring 1"


def say(axes: "Axes", palette: Palette, sentence: str) -> None:
    """Show a sentence in place of the plot."""
    title = axes.get_title(loc="left")
    axes.clear()
    axes.set_title(title)
    axes.text(0.5, 0.5, sentence, transform=axes.transAxes, ha="center", color=palette.muted)
    axes.set_axis_off()


def log_limits(axes: "Axes") -> tuple[float, float]:
    """A logarithmic height that has room around what is drawn, and for a round number."""
    low, high = axes.dataLim.intervaly
    around = max(1.15, (2.6 * low / high) ** 0.5)
    axes.set_yscale("log", base=10)
    axes.set_ylim(low / around, high * around)
    return low / around, high * around


# ---- lines over ring sizes


def throughput(axes: "Axes", scaling: Scaling, palette: Palette) -> None:
    """Tokens a second of one ring; dashed: one rank's times the ring size."""
    axes.set_title("Throughput")
    ends = lines(axes, scaling, palette, lambda row: row.result.throughput_tokens_per_sec)
    if not ends:
        return say(axes, palette, "no case has a time")
    dashed = ""
    for index, tokens in enumerate(scaling.lengths):
        alone, sizes = scaling.at(tokens, 1), scaling.measured_rings
        first = alone.result.throughput_tokens_per_sec if alone and alone.result.time_ms else None
        if first and len(sizes) > 1:
            ideal = [first * size for size in sizes]
            axes.plot(sizes, ideal, color=palette.of(index), **IDEAL)
            dashed = " (dashed: linear)"
    svg.rate_ticks(axes.yaxis, *log_limits(axes), "")
    axes.set_ylabel(f"tokens/s of one ring{dashed}")
    name_ends(axes, ends)


def speedup(axes: "Axes", scaling: Scaling, palette: Palette) -> None:
    """Speedup over one rank at the same length."""
    axes.set_title("Speedup over one rank")
    ends = lines(axes, scaling, palette, lambda row: row.speedup)
    sizes = scaling.measured_rings
    if not ends or len(sizes) < 2:
        return say(axes, palette, _no_scaling(scaling))
    axes.plot(sizes, sizes, color=palette.ink, **IDEAL)
    axes.set_yscale("log", base=2)
    least = min(row.speedup for row in scaling.measured if row.speedup)
    below = [2.0**-power for power in range(1, math.ceil(-math.log2(least)) + 1)]
    axes.set_yticks([*below, *sizes], labels=[f"{each:g}x" for each in [*below, *sizes]])
    axes.set_ylabel("speedup, same length")
    name_ends(axes, [*ends, End(sizes[-1], sizes[-1], "linear", palette.muted)])


def efficiency(axes: "Axes", scaling: Scaling, palette: Palette) -> None:
    """Speedup over ring size."""
    axes.set_title("Strong efficiency")
    ends = lines(axes, scaling, palette, lambda row: row.strong and 100 * row.strong)
    sizes = scaling.measured_rings
    if not ends or len(sizes) < 2:
        return say(axes, palette, _no_scaling(scaling))
    axes.plot(sizes, [100] * len(sizes), color=palette.ink, **IDEAL)
    axes.set_ylim(0, max(108, 1.08 * max(100 * (row.strong or 0) for row in scaling.rows)))
    axes.set_ylabel("speedup / ring size, %")
    name_ends(axes, [*ends, End(sizes[-1], 100, "linear", palette.muted)])


def communication(axes: "Axes", scaling: Scaling, palette: Palette) -> None:
    """Isolated and exposed time; over each pair the exposed share of the step."""
    axes.set_title("Communication")
    rings = [ring for ring in scaling.measured_rings if ring > 1]
    rows = [row for row in scaling.measured if row.result.ring_size in rings]
    if not rows:
        return say(axes, palette, "only one rank a ring: nothing is sent")
    width, tallest = 0.8 / len(scaling.lengths), max(map(_taller, rows))
    for row in rows:
        index, one = scaling.lengths.index(row.result.seq_length), row.result
        x = rings.index(one.ring_size) - 0.4 + width * (index + 0.5)
        colour = palette.of(index)
        axes.bar(x, one.communication_time_ms or 0, 0.9 * width, color=colour, alpha=0.3)
        axes.bar(x, one.exposed_comm_ms or 0, 0.45 * width, color=colour)
        if len(rows) <= _MOST_BARS:
            told = percent(row.exposed_share) if one.bytes_sent else "none"
            axes.text(x, _taller(row), told, ha="center", va="bottom", fontsize=7)
    for index, tokens in enumerate(scaling.lengths):
        axes.text(
            1.05, 0.93 - APART * index, f"{tokens:,}", transform=axes.transAxes, va="center",
            color=palette.of(index), fontsize=8,
        )  # fmt: skip
    axes.set_ylim(0, 1.3 * tallest or 1)
    axes.set_xticks(range(len(rings)), labels=[str(ring) for ring in rings])
    axes.set(xlim=(-0.6, len(rings) - 0.4), xlabel="ring size, ranks", ylabel="ms a step")
    axes.grid(visible=False, axis="x")
    noted = "pale: isolated, solid: exposed; % of the step that is exposed"
    axes.text(0.01, 0.98, noted, transform=axes.transAxes, va="top", fontsize=7, color=palette.ink)


def _taller(row: Row) -> float:
    return max(row.result.communication_time_ms or 0, row.result.exposed_comm_ms or 0)


# ---- memory over lengths


def memory(axes: "Axes", scaling: Scaling, palette: Palette) -> None:
    """Peak of a rank."""
    axes.set_title("Peak memory of a rank")
    ends = lines(axes, scaling, palette, lambda row: row.result.peak_gb, over_lengths=True)
    if not ends:
        return say(axes, palette, _no_memory(scaling))
    for index, ring in enumerate(scaling.ring_sizes):
        height, colour = 0.97 - 0.07 * index, palette.of(index)
        rows = (scaling.at(tokens, ring) for tokens in scaling.lengths)
        for tokens in [row.result.seq_length for row in rows if row and row.result.status == "oom"]:
            across = axes.get_xaxis_transform()
            axes.plot(tokens, height, "x", color=colour, markersize=7, mew=2, transform=across)
            axes.annotate(
                f"oom, ring {ring}", (tokens, height), (-8, 0), xycoords=across, va="center",
                textcoords="offset points", ha="right", fontsize=8, color=colour,
            )  # fmt: skip
    low, high = log_limits(axes)
    if any(row.result.status == "oom" for row in scaling.rows):
        axes.set_ylim(low, high := high * (high / low) ** 0.2)  # room for the crosses
    inside = [value for value in svg.decades(low, high, (1, 2, 5)) if low <= value <= high]
    axes.set_yticks(inside, labels=[f"{value:g}" for value in inside])
    axes.set_ylabel("GB (1e9 bytes)")
    name_ends(axes, ends)


def tokens_per_gb(axes: "Axes", scaling: Scaling, palette: Palette) -> None:
    """Tokens of the batch over the peak of one rank: flat where memory grows with the length."""
    axes.set_title("Tokens held by a GB")
    ends = lines(axes, scaling, palette, lambda row: row.tokens_per_gb, over_lengths=True)
    if not ends:
        return say(axes, palette, _no_memory(scaling))
    axes.set_ylim(0, 1.15 * max(row.tokens_per_gb or 0 for row in scaling.rows))
    axes.yaxis.set_major_formatter(lambda value, _: rate(value) if value else "0")
    axes.set_ylabel("tokens of the batch / GB of one rank")
    name_ends(axes, ends)


# ---- maps of length and ring size


def time_map(axes: "Axes", scaling: Scaling, palette: Palette) -> None:
    """Time of a step of the slowest rank; bright is better."""
    axes.set_title("Time, ms (bright: better)")
    map_(axes, scaling, palette, lambda row: row.result.time_ms, _three_digits,
        logarithmic=True, less_is_better=True)  # fmt: skip


def throughput_map(axes: "Axes", scaling: Scaling, palette: Palette) -> None:
    """Tokens a second of one ring; bright is better."""
    axes.set_title("Throughput, tokens/s (bright: better)")
    map_(axes, scaling, palette, lambda row: row.result.throughput_tokens_per_sec, rate)


def efficiency_map(axes: "Axes", scaling: Scaling, palette: Palette) -> None:
    """Strong efficiency; bright is better."""
    axes.set_title("Strong efficiency, % (bright: better)")
    map_(axes, scaling, palette, lambda row: row.strong, lambda share: f"{100 * share:.0f}", most=1)


Panel = Callable[["Axes", Scaling, Palette], None]
FILES: dict[str, tuple[Panel, ...]] = {
    "scaling_efficiency_analysis.png": (throughput, speedup, efficiency, communication),
    "memory_analysis.png": (memory, tokens_per_gb),
    "performance_heatmaps.png": (time_map, throughput_map, efficiency_map),
}


def panels_of(name: str, scaling: Scaling) -> tuple[Panel, ...]:
    """The panels of a file; one that says why where no memory is known."""
    known = any(row.result.peak_gb is not None for row in scaling.rows)
    return FILES[name] if known or name != "memory_analysis.png" else (memory,)


def png(name: str, scaling: Scaling) -> bytes:
    """Draw one of ``FILES``."""
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    panels, palette = panels_of(name, scaling), paper()
    columns = 2 if len(panels) == 4 else len(panels)
    rows = -(-len(panels) // columns)
    tall = 1.4 + 0.42 * len(scaling.lengths) if name.startswith("performance") else 0
    with mpl.rc_context(_style(palette)):
        size = (max(7, 5.4 * columns), max(3.7, tall) * rows + 0.8)
        figure = Figure(figsize=size, layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.08))
        FigureCanvasAgg(figure)
        for axes, panel in zip(
            figure.subplots(rows, columns, squeeze=False).flat, panels, strict=True
        ):
            panel(axes, scaling, palette)
            axes.minorticks_off()
        said = textwrap.fill(subtitle(scaling), round(13 * size[0]))
        figure.suptitle(f"{TITLE}\n{said}", fontsize=10)
        file = io.BytesIO()
        figure.savefig(file, format="png", dpi=150)
    return file.getvalue()


def figures(scaling: Scaling) -> list[svg.Figure]:
    """Every panel for the page."""
    return [figure(panel, scaling) for name in FILES for panel in panels_of(name, scaling)]


def figure(panel: Panel, scaling: Scaling) -> svg.Figure:
    caption = (panel.__doc__ or "").strip()
    if panel is memory and any(row.result.status == "oom" for row in scaling.rows):
        caption += " Crosses at the top are lengths that did not fit."
    return svg.draw(caption, lambda axes: panel(axes, scaling, SCREEN))


def paper() -> Palette:
    """The page's colours on white."""
    colours = dict(re.findall(r"--(\w+): (#\w+);", svg.sheet()))
    series = tuple(colours[f"s{index}"] for index in range(10))
    return Palette(colours["ink"], colours["muted"], colours["grid"], series)


def _style(palette: Palette) -> Any:
    """The page's style in fixed colours, with larger titles."""
    fixed = dict(zip((svg.INK, svg.MUTED, svg.GRID), palette, strict=False))
    style = {name: fixed.get(value, value) for name, value in svg.STYLE.items()}
    return style | {"axes.titlesize": 10, "grid.linewidth": 0.7}


def _no_scaling(scaling: Scaling) -> str:
    if len(scaling.measured_rings) < 2:
        return "one ring size only: no scaling to show"
    return "no length has a time of one rank"


def _no_memory(scaling: Scaling) -> str:
    return "memory was not measured (CPU)" if scaling.measured else "no case has a time"


def _three_digits(value: float) -> str:
    return f"{value:,.{0 if value >= 100 else 1 if value >= 10 else 2}f}"
