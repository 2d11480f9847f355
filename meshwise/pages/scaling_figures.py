"""A scaling benchmark as pictures: three files of panels, and the same panels for the page.

A panel paints one set of axes. Lines are named at their ends; cells without a time are hatched and
say why; what was not measured is a sentence in place of a plot, never a zero.
"""

import math
import re
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwise.pages import svg
from meshwise.pages.scaling import Row, Scaling, length
from meshwise.pages.scaling_axes import (
    APART,
    IDEAL,
    End,
    Palette,
    lines,
    log_limits,
    map_,
    name_ends,
    ring_sizes,
    say,
)
from meshwise.pages.scaling_report import TITLE, measured, percent, rate, subtitle

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MOST_BARS = 12  # above, numbers over bars would hide each other
SCREEN = Palette(svg.INK, svg.MUTED, svg.GRID, svg.SERIES)


# ---- lines over ring sizes


def throughput(axes: "Axes", scaling: Scaling, palette: Palette) -> None:
    """Tokens a second of one ring; dashed: one rank's times the ring size."""
    axes.set_title("Throughput")
    ends = lines(axes, scaling, palette, lambda row: row.result.throughput_tokens_per_sec)
    if not ends:
        return say(axes, palette, "no case has a time")
    dashed = ""
    for index, tokens in enumerate(scaling.lengths):
        alone, sizes = scaling.at(tokens, 1), ring_sizes(scaling)
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
    sizes = ring_sizes(scaling)
    if not ends or len(sizes) < 2:
        return say(axes, palette, _no_scaling(scaling))
    axes.plot(sizes, sizes, color=palette.ink, **IDEAL)
    axes.set_yscale("log", base=2)
    least = min(row.speedup for row in measured(scaling) if row.speedup)
    below = [2.0**-power for power in range(1, math.ceil(-math.log2(least)) + 1)]
    axes.set_yticks([*below, *sizes], labels=[f"{each:g}x" for each in [*below, *sizes]])
    axes.set_ylabel("speedup, same length")
    name_ends(axes, [*ends, End(sizes[-1], sizes[-1], "linear", palette.muted)])


def efficiency(axes: "Axes", scaling: Scaling, palette: Palette) -> None:
    """Speedup over ring size."""
    axes.set_title("Strong efficiency")
    ends = lines(axes, scaling, palette, lambda row: row.strong and 100 * row.strong)
    sizes = ring_sizes(scaling)
    if not ends or len(sizes) < 2:
        return say(axes, palette, _no_scaling(scaling))
    axes.plot(sizes, [100] * len(sizes), color=palette.ink, **IDEAL)
    axes.set_ylim(0, max(108, 1.08 * max(100 * (row.strong or 0) for row in scaling.rows)))
    axes.set_ylabel("speedup / ring size, %")
    name_ends(axes, [*ends, End(sizes[-1], 100, "linear", palette.muted)])


def communication(axes: "Axes", scaling: Scaling, palette: Palette) -> None:
    """Isolated and exposed time; over each pair the exposed share of the step."""
    axes.set_title("Communication")
    rings = [ring for ring in ring_sizes(scaling) if ring > 1]
    rows = [row for row in measured(scaling) if row.result.ring_size in rings]
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
            1.05, 0.93 - APART * index, length(tokens), transform=axes.transAxes, va="center",
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
    """One of ``FILES``."""
    import io

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
    page = (Path(__file__).parent / "report.html.j2").read_text()
    found = re.findall(r"--(\w+): (#\w+);", page.partition("@media")[0])
    colours = dict(found)
    series = tuple(colours[f"s{index}"] for index in range(10))
    return Palette(colours["ink"], colours["muted"], colours["grid"], series)


def _style(palette: Palette) -> Any:
    """The page's style in fixed colours, with larger titles."""
    fixed = dict(zip((svg.INK, svg.MUTED, svg.GRID), palette, strict=False))
    style = {name: fixed.get(value, value) for name, value in svg.STYLE.items()}
    return style | {"axes.titlesize": 10, "grid.linewidth": 0.7}


def _no_scaling(scaling: Scaling) -> str:
    if len(ring_sizes(scaling)) < 2:
        return "one ring size only: no scaling to show"
    return "no length has a time of one rank"


def _no_memory(scaling: Scaling) -> str:
    return "memory was not measured (CPU)" if measured(scaling) else "no case has a time"


def _three_digits(value: float) -> str:
    return f"{value:,.{0 if value >= 100 else 1 if value >= 10 else 2}f}"
