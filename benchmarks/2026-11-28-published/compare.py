"""Published layouts and iteration times beside plans by data sheet: print the tables of README.md.

    PYTHONPATH=. python benchmarks/2026-11-28-published/compare.py times
    PYTHONPATH=. python benchmarks/2026-11-28-published/compare.py layouts
    PYTHONPATH=. python benchmarks/2026-11-28-published/compare.py found

``times``: each step of ``tests/data/published``. ``layouts``: the same layouts beside our best.
``found``: the 21 plans that Alpa's search found. Each comparison has what its layout needs of
memory by our count, if that is more than the devices have.
"""

import sys
from collections.abc import Callable
from statistics import mean

from tests.oracle.published import (
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


def told(name: str, of: Compared) -> None:
    memory = f"{of.theirs.prediction.peak_memory_bytes / 2**30:.1f}"
    ours = zip(of.times_ours(), (*of.like, of.best), strict=True)
    cells = [cell for share, each in ours for cell in (f"{share:.3f}", each.layout.name)]
    row(name, of.theirs.layout.name, memory, f"{of.theirs.prediction.step_time_s:.2f} s", *cells)


if __name__ == "__main__":
    tables: dict[str, Callable[[], None]] = {"times": times, "layouts": layouts, "found": found}
    for table in sys.argv[1:] or tables:
        tables[table]()
