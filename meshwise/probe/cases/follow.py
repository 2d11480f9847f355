"""Cases that follow from the samples so far: sizes where a curve bends, shapes near the best."""

from collections.abc import Callable, Sequence
from typing import Literal

from meshwise.probe.cases import collectives, gemm
from meshwise.spec import Case, Sample

Follow = Literal["nothing", "bends", "best_shape"]

_NEXT: dict[Follow, Callable[[Sequence[Sample]], list[Case]]] = {
    "nothing": lambda samples: [],
    "bends": collectives.between,
    "best_shape": gemm.next_shapes,
}


def next_cases(how: Follow, samples: Sequence[Sample]) -> list[Case]:
    """List the cases to measure next, without those that have a sample; none ends the sweep."""
    known = {sample.case_id for sample in samples}
    return [case for case in _NEXT[how](samples) if case.id not in known]
