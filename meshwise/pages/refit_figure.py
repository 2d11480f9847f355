"""One transfer as a picture: ranks on both sides, and what goes between them."""

from typing import TYPE_CHECKING

from meshwise.pages import svg
from meshwise.pages.refit import label_of, size
from meshwise.spec.refit import Forecast

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_RANKS = 16
LABELLED_RANKS = 8  # above, the bytes at the lines would hide each other
_LABEL_AT = 0.8  # of the way: lines to one rank come from different sides


def figure(one: Forecast) -> svg.Figure:
    """Links as lines, as thick as they carry bytes; what stays on its rank is pale."""
    if not one.loads:
        raise ValueError(f"figure: draws at most {MOST_RANKS} ranks, and here are {one.num_ranks}")
    heights = range(one.num_ranks)
    most = max(map(max, one.loads)) or 1

    def paint(axes: "Axes") -> None:
        for source, row in enumerate(one.loads):
            for destination, num_bytes in enumerate(row):
                if num_bytes:
                    _link(axes, source, destination, num_bytes / most)
                if num_bytes > 0.02 * most and one.num_ranks <= LABELLED_RANKS:
                    _label(axes, source, destination, num_bytes)
        for rank in heights:
            own = one.loads[rank][rank]
            out, into = sum(one.loads[rank]) - own, sum(row[rank] for row in one.loads) - own
            axes.text(-0.04, rank, _told(rank, "sends", out), ha="right", va="center", fontsize=8)
            axes.text(1.04, rank, _told(rank, "receives", into), va="center", fontsize=8)
        for side in (0, 1):
            axes.plot([side] * one.num_ranks, heights, "o", color=svg.INK, markersize=7, zorder=3)
        axes.set(xlim=(-0.35, 1.35), ylim=(one.num_ranks - 0.2, -0.8))
        legend = "pale: stays on its rank"
        axes.text(0.5, one.num_ranks - 0.4, legend, ha="center", fontsize=8, color=svg.MUTED)
        axes.text(0, -0.6, "training", ha="center", fontweight="bold")
        axes.text(1, -0.6, "inference", ha="center", fontweight="bold")
        axes.set_axis_off()

    return svg.draw(
        f"{label_of(one.op)}: bytes from each training rank to each inference rank; pale lines "
        f"stay on their GPU. {size(one.wire_bytes)} travel, {size(one.local_bytes)} do not.",
        paint,
        width=6.0,
        height=0.9 + 0.62 * one.num_ranks,
    )


def _told(rank: int, verb: str, num_bytes: int) -> str:
    return f"rank {rank}" + (f"\n{verb} {size(num_bytes)}" if num_bytes else "")


def _link(axes: "Axes", source: int, destination: int, share: float) -> None:
    is_own = source == destination
    colour = svg.MUTED if is_own else svg.colour(source)
    axes.plot(
        [0, 1], [source, destination], color=colour, linewidth=0.6 + 7 * share,
        alpha=0.35 if is_own else 0.75, solid_capstyle="butt",
    )  # fmt: skip


def _label(axes: "Axes", source: int, destination: int, num_bytes: int) -> None:
    height = source + _LABEL_AT * (destination - source)
    box = {"facecolor": "white", "edgecolor": "none", "pad": 1.0}
    axes.text(_LABEL_AT, height, size(num_bytes), fontsize=7, ha="center", va="center", bbox=box)
