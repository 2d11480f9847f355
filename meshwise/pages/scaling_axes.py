"""Paint the panels of a scaling benchmark: lines named at their ends, maps of cells."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from meshwise.pages.scaling import Row, Scaling, length
from meshwise.pages.scaling_report import measured

if TYPE_CHECKING:
    from matplotlib.axes import Axes

APART = 0.065  # of the axes' height, between names of lines
IDEAL: dict[str, Any] = {"linestyle": (0, (4, 3)), "linewidth": 0.9, "alpha": 0.6, "zorder": 1}
_MARKERS = "osD^vPX*<>"


class Palette(NamedTuple):
    ink: str
    muted: str
    grid: str
    series: tuple[str, ...]

    def of(self, index: int) -> str:
        return self.series[index % len(self.series)]


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
        for row in measured(scaling):
            x, of_line = row.result.ring_size, row.result.seq_length
            if over_lengths:
                x, of_line = of_line, x
            if of_line == one and (y := value(row)) is not None:
                points.append((x, y))
        if points:
            colour, marker = palette.of(index), _MARKERS[index % len(_MARKERS)]
            axes.plot(*zip(*points, strict=True), color=colour, marker=marker, markersize=5)
            ends.append(End(*points[-1], f"ring {one}" if over_lengths else length(one), colour))
    sizes = scaling.lengths if over_lengths else ring_sizes(scaling) or [1]
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, labels=list(map(length, sizes)), rotation=30 if len(sizes) > 4 else 0)
    axes.set_xlim(sizes[0] / 1.15, sizes[-1] * 1.15)
    axes.set_xlabel("sequence length, tokens" if over_lengths else "ring size, ranks")
    return ends


def ring_sizes(scaling: Scaling) -> list[int]:
    """Ring sizes that have a time."""
    return sorted({row.result.ring_size for row in measured(scaling)})


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

    values = [v for row in measured(scaling) if (v := value(row)) is not None]
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
    axes.set_yticks(range(len(lengths)), labels=list(map(length, lengths)))
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
