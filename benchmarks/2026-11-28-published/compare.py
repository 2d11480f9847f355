"""Published layouts and iteration times beside plans by data sheet: print the tables of README.md.

    PYTHONPATH=. python benchmarks/2026-11-28-published/compare.py times
    PYTHONPATH=. python benchmarks/2026-11-28-published/compare.py layouts
    PYTHONPATH=. python benchmarks/2026-11-28-published/compare.py found
    PYTHONPATH=. python benchmarks/2026-11-28-published/compare.py terms

``times``: each step of ``tests/data/published``. ``layouts``: the same layouts beside our best.
``found``: the 21 plans that Alpa's search found. ``terms``: three of these, otherwise, and ours, by
what the time is spent on; then of each stage's second microbatch forward + backward, and in these
the middle of bottlenecks, which tp divides, beside all else. Each comparison has what its layout
needs of memory by our count, if that is more than the devices have.
"""

import sys
from collections import Counter
from collections.abc import Callable
from statistics import mean

from msgspec.structs import replace

from meshwise import search
from meshwise.prices import Prices
from meshwise.search.pipeline import BUBBLE
from meshwise.search.predict import TRANSFER
from meshwise.search.simulate import COPIES, SLOWED, WAITING
from meshwise.search.stage import StageKind, kinds_of, priced
from tests.oracle.published import (
    OTHERWISE,
    ROWS,
    Compared,
    as_run_s,
    compared,
    found_by_alpa,
    likely,
    mfu_s,
    predicted,
    step_of,
)

TERMS = {
    "tensor-parallel communication": "tp messages", "sums over data ranks": "data", COPIES: "data",
    SLOWED: "data", WAITING: "data", TRANSFER: "between stages", BUBBLE: "bubble",
    "optimizer": "optimizer",
}  # fmt: skip
MIDDLE = ("conv2", "norm2", "relu2", "conv3")
STEPS = [step_of(row) for row in ROWS]


def row(*cells: object) -> None:
    print(f"| {' | '.join(map(str, cells))} |", flush=True)


def times() -> None:
    errors: dict[str, list[tuple[float, ...]]] = {}
    for step in STEPS:
        plan = predicted(step)
        counts = as_run_s(step, plan) if step.layout.zero == 0 else {"plan": plan.step_time_s}
        each = [sum(counts.values()), plan.step_time_s, mfu_s(step, STEPS)]
        off = [time_s / step.iter_s - 1 for time_s in each]
        errors.setdefault(step.source, []).append(tuple(map(abs, off)))
        told = [f"{value / step.iter_s:+.1%}" for name, value in counts.items() if name != "plan"]
        row(
            step.name, step.layout.name, f"{step.iter_s:.2f} s",
            f"{plan.low_s:.1f}-{plan.high_s:.1f}", *[f"{of:+.1%}" for of in off], *told,
        )  # fmt: skip
    for source, off in errors.items():
        row(source, *[f"{mean(of):.1%}, worst {max(of):.1%}" for of in zip(*off, strict=True)])


def layouts() -> None:
    for step in STEPS:
        of = compared(step.model, step.workload, step.costs, [step.layout], likely(step.layout))
        told(step.name, of)


def found() -> None:
    for name, of in found_by_alpa():
        told(name, compared(*of))


def terms() -> None:
    cases = dict(found_by_alpa())
    for name, otherwise in OTHERWISE.items():
        about, of = cases[name][:3], compared(*cases[name])
        layouts = of.theirs.layout, replace(of.theirs.layout, **otherwise), of.like[0].layout
        for layout in layouts:
            prediction = search.given(*about, layout).prediction
            sums = Counter[str]()
            for part in prediction.time_parts:
                sums[TERMS.get(part.name, "layers, embedding, head")] += part.value
            step = f"{prediction.step_time_s:.2f} s"
            spent = [f"{term} {seconds:.2f}" for term, seconds in sums.items()]
            row(name, layout.name, step, ", ".join(spent))
            times = prediction.stage_times
            row(name, "stages", *[f"{of.forward_s:.3f} + {of.backward_s:.3f}" for of in times])
            prices = Prices(about[2], datasheet=True)
            for stage in kinds_of(about[0], 1, layout) if times else ():
                row(name, stage.layout.name, *[f"{of} {s:.3f}" for of, s in parts(stage, prices)])


def parts(stage: StageKind, prices: Prices) -> list[tuple[str, float]]:
    """Return the seconds of a stage's second microbatch, in the middle of bottlenecks and else."""
    program, charge = priced(stage, prices)
    times = {at: of.times for of in program.loops for at in range(of.start, of.stop)}
    sums = Counter[str]()
    for _, microbatch, start, stop in program.actions:
        for at, task in enumerate(program.tasks[start:stop], start):
            if microbatch == 1 and task.stream == "compute":
                middle = any(f".{part}." in f"{task.name}." for part in MIDDLE)
                kind = type(task.op).__name__.lower()
                time_s = times.get(at, 1) * charge(task).time_s
                sums[f"{'middle' if middle else 'else'} {kind}"] += time_s
    return sorted(sums.items())


def told(name: str, of: Compared) -> None:
    memory = f"{of.theirs.prediction.peak_memory_bytes / 2**30:.1f}"
    ours = zip(of.times_ours(), (*of.like, of.best), strict=True)
    cells = [cell for share, each in ours for cell in (f"{share:.3f}", each.layout.name)]
    row(name, of.theirs.layout.name, memory, f"{of.theirs.prediction.step_time_s:.2f} s", *cells)


if __name__ == "__main__":
    tables: dict[str, Callable[[], None]] = {
        "times": times, "layouts": layouts, "found": found, "terms": terms,
    }  # fmt: skip
    for table in sys.argv[1:] or tables:
        tables[table]()
