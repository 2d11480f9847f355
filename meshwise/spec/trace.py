"""Plan against trace (``nccl_check.json``): the collectives that a step should issue, and did."""

from typing import Literal

from meshwise.spec.record import NonNegative, Positive, Record

SCHEMA_VERSION = 1

Verdict = Literal[
    "as planned", "missing", "too few", "too many", "not planned", "outside the steps", "not judged"
]


class TraceLine(Record, kw_only=True):
    """Calls of one kind and size. ``elements``: of a rank for gather and scatter, else of the
    message. ``planned``: how often a step. ``traced``: how often each rank in all, in rank order.
    """

    units: str
    kind: str
    elements: NonNegative
    dtype: str
    num_ranks: NonNegative  # of the communicator, 0 where the log does not say
    planned: NonNegative
    traced: tuple[NonNegative, ...]
    verdict: Verdict


class TraceCheck(Record, kw_only=True):
    """``agrees`` is None where the plan does not say what to expect; ``notes`` say why."""

    schema_version: Positive = SCHEMA_VERSION
    steps: Positive
    lines: tuple[TraceLine, ...]
    agrees: bool | None
    notes: tuple[str, ...] = ()
