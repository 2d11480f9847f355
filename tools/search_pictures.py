"""Draw the pictures of docs/search.md, for `make pictures`: `search_pictures.py FOLDER` elsewhere.

In: the example of that chapter, four layers and a heavy head on three V100, priced by the data
sheet. Out: SVG. ``endings`` goes through all pipelines without dropping any, unlike the search.
"""

import sys
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from meshwise import machine, store
from meshwise.pages import svg
from meshwise.prices import Prices, unmeasured
from meshwise.search.inter_op import Problem, StageTable
from meshwise.search.inter_op_stages import Frame, frames
from meshwise.search.pipeline import course
from meshwise.search.predict import staged
from meshwise.spec import Cluster, Layout, Model, Workload

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BLUE, ORANGE, GREEN, GREY = svg.SERIES[0], svg.SERIES[1], svg.SERIES[2], svg.MUTED
ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = Model(name="small", hidden=1024, layers=4, heads=16, ffn=4096, vocab=51200)
WORKLOAD = Workload(global_batch_size=16, seq_len=1024)
ROWS, DEVICES = 4, 3  # of a microbatch; in all
TOLD, CHOSEN = (  # first by the table, first by simulation
    Layout(
        pp=2, schedule="1f1b", meshes=((1, 1), (2, 1)), layers=layers, zero=zero,
        microbatch_size=4, num_microbatches=4,
    )
    for layers, zero in (((3, 1), 2), ((), 1))
)  # fmt: skip


class Ending(NamedTuple):
    """The last stages of a division: S, V, T and tied of search/inter_op.py, and of each stage its
    way, its first layer and the layer behind its last."""

    sum_s: float = 0.0
    busy_s: float = 0.0
    time_s: float = 0.0
    tied_s: float = 0.0
    stages: tuple[tuple[Layout, int, int], ...] = ()


Endings = dict[tuple[int, int], list[Ending]]  # by first layer and number of devices


def prices_of_example() -> Prices:
    place = store.read(Path(str(machine.shipped()["p3.16xlarge"])), Cluster)
    return Prices(unmeasured(place), datasheet=True)


def frame_of_example(prices: Prices) -> Frame:
    return next(of for of in frames(EXAMPLE, WORKLOAD, prices, DEVICES) if of.rows == ROWS)


def endings(ways: list[Layout], table: StageTable, problem: Problem) -> Endings:
    """Return every ending, by plain recursion: none is dropped. All of them fit, on one host."""
    found: Endings = defaultdict(list)
    count, further = table.num_layers, problem.num_microbatches - 1
    found[count, 0] = [Ending()]
    for start in reversed(range(count)):
        for stop, used in [place for place in found if place[0] > start]:
            for way, size in enumerate(table.devices.tolist()):
                kind, again = table.kind[start, stop], ways[way].recompute != "selective"
                if kind < 0 or used + size > problem.num_devices or again:
                    continue
                hop_s = table.hops_s[way, 0] * (stop < count)
                once_s, pace_s = table.once_s[way, kind] + hop_s, table.pace_s[way, kind] + hop_s
                for of in found[stop, used]:
                    ahead = problem.in_flight[len(of.stages)] - 1
                    waits_s = max(0.0, of.sum_s - ahead * pace_s / 3)
                    busy_s = once_s + max(of.busy_s, further * pace_s + waits_s)
                    time_s = max(of.time_s + once_s / 3, busy_s + table.late_s[way, kind])
                    tied_s = max(of.tied_s, table.tied_s[way, kind])
                    if start == 0:
                        time_s = max(time_s, busy_s + tied_s)
                    stages = ((ways[way], start, stop), *of.stages)
                    new = Ending(once_s + of.sum_s, busy_s, time_s, tied_s, stages)
                    found[start, used + size].append(new)
    return found


def unbeaten(of: list[Ending]) -> list[Ending]:
    """Return those that no other is as good as in all four."""
    kept: list[Ending] = []
    for new in sorted(of, key=lambda each: each[:4]):
        if not any(all(map(float.__le__, each[:4], new[:4])) for each in kept):
            kept.append(new)
    return kept


def search_table(prices: Prices) -> svg.Figure:
    frame = frame_of_example(prices)
    table, count = frame.table, EXAMPLE.layers
    found = endings(frame.ways, table, frame.problems[0])
    spans = [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (1, 4), (2, 4), (3, 4)]
    stages_of = {TOLD: ORANGE, CHOSEN: BLUE}

    def colour(start: int, stop: int, size: int) -> str:
        for layout, each in stages_of.items():
            edge = layout.layers[0] if layout.layers else count // 2
            if (start, stop, size) in ((0, edge, 1), (edge, count, 2)):
                return each
        return GREY

    def written(axes: "Axes", at: tuple[int, int], text: str, shade: str) -> None:
        look: Any = {"facecolor": shade, "alpha": 0.1 if shade == GREY else 0.25, "linewidth": 0}
        axes.broken_barh([(at[0] - 0.48, 0.96)], (at[1] - 0.46, 0.92), **look)
        axes.annotate(text, at, ha="center", va="center", fontsize=8)

    def gridded(axes: "Axes", columns: list[str], rows: list[str]) -> None:
        axes.set_xticks(range(len(columns)), labels=columns)
        axes.set_yticks(range(len(rows)), labels=rows)
        axes.set(xlim=(-0.5, len(columns) - 0.5), ylim=(len(rows) - 0.5, -0.5))
        axes.grid(visible=False)
        axes.tick_params(length=0)

    def stages(axes: "Axes") -> None:
        gridded(axes, [named(*span) for span in spans], ["1", "2"])
        for column, span in enumerate(spans):
            for size in (1, 2):
                pace_s = table.pace_s[table.devices == size, table.kind[span]].min()
                written(axes, (column, size - 1), f"{1e3 * pace_s:.1f}", colour(*span, size))
        axes.set(title="pace of a stage, the fastest way (ms)")
        axes.set(xlabel="layers of the stage", ylabel="its devices")

    def best(axes: "Axes") -> None:
        gridded(axes, ["1", "2", "3"], [named(start, count) for start in range(count)])
        for (start, used), every in found.items():
            if used and (start > 0) == (used < DEVICES):
                of, kept = min(every, key=lambda each: each.time_s), len(unbeaten(every))
                text = "   ".join(f"{n} {1e3 * s:.1f}" for n, s in zip("SVT", of[:3], strict=True))
                more = (
                    f"{len(every)} ending{'s' * (len(every) > 1)}, {kept} kept"
                    if start
                    else f"{len(every)} pipelines"
                )
                shade = GREEN if not start else colour(start, count, used)
                written(axes, (used - 1, start), f"{text}\n{more}", shade)
        axes.set(title="the fastest ending of each place (ms)")
        axes.set(xlabel="devices, from the last", ylabel="layers, from the last")

    caption = "Prices of the example's stages, and the table that the search fills from them."
    return svg.draw(caption, stages, best, columns=1, width=8.8, height=5.2)


def named(start: int, stop: int) -> str:
    """Name the layers of a stage, from 1, with the embedding (e) and the head (h)."""
    layers = str(start + 1) if stop == start + 1 else f"{start + 1} to {stop}"
    return "e, " * (start == 0) + layers + ", h" * (stop == EXAMPLE.layers)


def search_timeline(prices: Prices) -> svg.Figure:
    frame = frame_of_example(prices)
    found = endings(frame.ways, frame.table, frame.problems[0])[0, DEVICES]

    def of(layout: Layout, title: str) -> svg.Paint:
        steps, told_s = course(*staged(EXAMPLE, WORKLOAD, layout, prices)), told(found, layout)

        def bar(axes: "Axes", rank: int, start_s: float, end_s: float, kind: str) -> None:
            colour = {"forward": BLUE, "backward": ORANGE, "optimizer": GREEN}[kind]
            at, long, label = 1e3 * start_s, 1e3 * (end_s - start_s), kind
            if kind in axes.get_legend_handles_labels()[1]:
                label = ""
            look: Any = {"facecolor": colour, "linewidth": 0, "label": label}
            axes.broken_barh([(at + 0.1, long - 0.2)], (rank - 0.35, 0.7), **look)

        def paint(axes: "Axes") -> None:
            look: Any = {"va": "center", "fontsize": 8}
            for rank, row in enumerate(steps.spans):
                for (kind, _, microbatch), start_s, end_s in row:
                    bar(axes, rank, start_s, end_s, "forward" if kind == "F" else "backward")
                    middle = 500 * (start_s + end_s), rank
                    axes.annotate(str(microbatch + 1), middle, color="white", ha="center", **look)
                bar(axes, rank, steps.ready[rank], steps.finish[rank], "optimizer")
            ends = (told_s, "dotted: table", ":"), (max(steps.finish), "dashed: simulated", "--")
            for height, (time_s, name, line) in zip((-0.62, 0.5), ends, strict=True):
                axes.axvline(1e3 * time_s, color=svg.INK, linestyle=line, linewidth=1)
                axes.annotate(f"{name} {1e3 * time_s:.1f}", (111, height), **look)
            axes.set(title=title, xlabel="time (ms)", xlim=(0, 140), ylim=(1.5, -0.8))
            axes.set_yticks([0, 1], labels=["1 device", "2 devices"])
            axes.grid(axis="y", visible=False)
            axes.legend(loc="lower right", bbox_to_anchor=(0.8, 0.98), ncols=3)

        return paint

    caption = "Two pipelines of the example, simulated: forwards, backwards, the optimizer."
    panels = [of(TOLD, "layers 3, 1, ZeRO-2"), of(CHOSEN, "layers 2, 2, ZeRO-1")]
    return svg.draw(caption, *panels, columns=1, width=8.8, height=4.0)


def told(found: list[Ending], layout: Layout) -> float:
    """Return the seconds of a step by the table, of a pipeline as TOLD or CHOSEN."""
    edge = layout.layers[0] if layout.layers else EXAMPLE.layers // 2
    return next(
        each.time_s
        for each in found
        if [(way.dp, way.tp, start) for way, start, _ in each.stages] == [(1, 1, 0), (2, 1, edge)]
        and each.stages[-1][0].zero == layout.zero
    )


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "docs")
    prices = prices_of_example()
    svg.write(folder / "search-table.svg", search_table(prices))
    svg.write(folder / "search-timeline.svg", search_timeline(prices))


if __name__ == "__main__":
    main()
