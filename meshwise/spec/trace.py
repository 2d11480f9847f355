"""Plan against trace (``nccl_check.json``): collectives that a step should and does issue."""

from typing import Literal

from meshwise.spec.record import NonNegative, NonNegativeFloat, Positive, Record

SCHEMA_VERSION = 1

Verdict = Literal[
    "as planned", "missing", "too few", "too many", "not planned", "outside the steps", "not judged"
]


class TraceLine(Record, kw_only=True):
    """Calls of one kind and size. ``elements``: of one rank's part for gather and scatter, else of
    the message. ``size_bytes``: nccl-tests' size; 0 in older files. ``planned``: calls per step; of
    a pipeline the mean over ranks. ``traced``: calls of each rank, in rank order, in all."""

    units: str
    kind: str
    elements: NonNegative
    size_bytes: NonNegative = 0
    dtype: str
    num_ranks: NonNegative  # of the communicator; 0 if the log does not say
    planned: NonNegativeFloat
    traced: tuple[NonNegative, ...]
    verdict: Verdict


class TraceCheck(Record, kw_only=True):
    """The whole comparison. ``agrees``: None if the plan predicts no calls; ``notes`` say why."""

    schema_version: Positive = SCHEMA_VERSION
    steps: Positive
    lines: tuple[TraceLine, ...]
    agrees: bool | None
    notes: tuple[str, ...] = ()
