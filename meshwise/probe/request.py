"""Records of what ``measure`` asks of its ranks. No torch: they are made before the ranks start."""

from meshwise.probe.cases import effort
from meshwise.probe.cases.follow import Follow
from meshwise.spec import Case, Record
from meshwise.spec.record import NonNegative, Positive, PositiveFloat

CURRENT = "current.json"  # in the run directory: the case in hand, while it is measured


class SweepRequest(Record, kw_only=True):
    """Cases to measure. ``skip``: ids of those measured already. No budget means all cases.
    ``sustain_s``: how long a sustained case lasts. ``iterations``: exactly so many timed ones, else
    as many as the interval needs. ``warmup``: untimed calls, beyond the first."""

    cases: tuple[Case, ...]
    run_dir: str
    budget_s: PositiveFloat | None = None
    skip: tuple[str, ...] = ()
    follow: Follow = "nothing"
    sustain_s: PositiveFloat = effort.SUSTAIN_S
    iterations: Positive | None = None
    warmup: NonNegative = 0
