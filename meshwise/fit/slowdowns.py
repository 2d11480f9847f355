"""Slowdowns of work and collectives beside each other, from samples of ``measure overlap``.

Samples of one type of work, direction and kind of collective make one figure: the median of their
slowdowns. A sample counts if nine of ten of its timed calls ended while the other work still ran;
otherwise its slowdown is too small.
"""

from collections.abc import Sequence
from statistics import median
from typing import cast

from meshwise.prices.key import how
from meshwise.spec import Overlap, Sample, Slowdown

COVERED = 0.9


def fit_slowdowns(samples: Sequence[Sample], runs: tuple[str, ...]) -> tuple[Slowdown, ...]:
    """Return the slowdowns of the samples that are ok, in the order of the first of each."""
    alike: dict[tuple[object, ...], list[Sample]] = {}
    for sample in samples:
        op = sample.case.op
        if isinstance(op, Overlap) and sample.status == "ok" and not ended_first(sample):
            way = getattr(op.compute, "direction", "")
            key = (type(op.compute), way, op.collective.kind, how(sample.case))
            alike.setdefault(key, []).append(sample)
    found = []
    for same in alike.values():
        case = same[0].case
        compute, collective = map(
            median, zip(*(_of(each, "slowdown") for each in same), strict=True)
        )
        found.append(
            Slowdown(
                like=cast("Overlap", case.op), runs=runs, compute=compute, collective=collective,
                **how(case)._asdict(),
            )
        )  # fmt: skip
    return tuple(found)


def ended_first(sample: Sample) -> bool:
    """Return whether more than a tenth of the calls of an overlap ran after the other side's."""
    is_overlap = isinstance(sample.case.op, Overlap) and sample.status == "ok"
    return is_overlap and min(_of(sample, "covered")) < COVERED


def _of(sample: Sample, what: str) -> tuple[float, float]:
    compute, collective = (
        sample.metrics.get(f"{of}_{what}", 0) for of in ("compute", "collective")
    )
    return cast("float", compute), cast("float", collective)
