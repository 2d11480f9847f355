"""The answers that ``plan`` gives beside the layout: why not another, what would change it."""

from meshwise.spec.layout import Layout, Workload
from meshwise.spec.record import NonNegative, NonNegativeFloat, Positive, PositiveFloat, Record


class Difference(Record, kw_only=True):
    """One part of a step's time (seconds) or memory (bytes): of the chosen layout, and of a named
    one. 0 where a layout has no such part."""

    part: str
    chosen: NonNegativeFloat
    named: NonNegativeFloat

    @property
    def more(self) -> float:
        """The amount that the named layout has more of; negative if less."""
        return self.named - self.chosen


class WhyNot(Record, kw_only=True):
    """Compares a layout that the user named with the chosen one.

    ``obstacle``: why it cannot be planned at all; "" if it can, and only then the rest is filled.
    ``misfit``: the rank that needs too much memory, how much, and its largest part; "" if it fits.
    ``untried``: why the search leaves it out though it is legal, or "".
    ``error_s``: the possible error of the difference in time (``Prediction.difference_error_s``).
    ``time``, ``memory``: by part, the largest difference first. Parts add up to the step's time and
    the peak memory of each layout, so differences add up to the difference of these.
    """

    layout: Layout
    obstacle: str = ""
    misfit: str = ""
    missing_bytes: NonNegativeFloat = 0.0
    untried: str = ""
    step_time_s: NonNegativeFloat = 0.0
    error_s: NonNegativeFloat = 0.0
    time: tuple[Difference, ...] = ()
    memory: tuple[Difference, ...] = ()

    def check(self) -> None:
        if not self.obstacle and not self.time:
            self.fail("time", "a layout without an obstacle has parts of time; give them")

    @property
    def slower_s(self) -> float:
        """The seconds that a step takes longer than the chosen layout's; negative if shorter."""
        return sum(of.more for of in self.time)


class WhatIf(Record, kw_only=True):
    """The best plan after one ``change``. ``faster``: its tokens per second over the plan's.
    ``note``: how prices were changed, or why no layout (None) can be planned. ``ties``: with the
    plan (``Prediction.ties``); told of back ends alone."""

    change: str
    note: str = ""
    layout: Layout | None = None
    step_time_s: NonNegativeFloat = 0.0
    tokens_per_s: NonNegativeFloat = 0.0
    faster: NonNegativeFloat = 0.0
    ties: bool = False


class Goodput(Record, kw_only=True):
    """The ``share`` of the time that trains (``search.goodput``), and what it rests on: seconds
    between failures, of a checkpoint, of the work before each (``each_s``), and of a restart."""

    share: PositiveFloat
    failure_s: PositiveFloat
    checkpoint_s: PositiveFloat
    each_s: NonNegativeFloat
    restart_s: PositiveFloat


class DeviceCount(Record, kw_only=True):
    """The best layout on so many devices, with the upper end of its step time's interval, the
    median step (``Prediction.p50_s``) and the ``goodput``, 1 if not asked for. Layout None, and the
    reason in ``note``, if there is none."""

    num_devices: Positive
    layout: Layout | None = None
    step_time_s: NonNegativeFloat = 0.0
    high_s: NonNegativeFloat = 0.0
    p50_s: NonNegativeFloat = 0.0
    goodput: PositiveFloat = 1.0
    note: str = ""

    def check(self) -> None:
        if self.layout is not None and not self.step_time_s:
            self.fail("step_time_s", "must be > 0 where there is a layout")

    def seconds(self, tokens: float, workload: Workload) -> float:
        """Return the time of so many tokens, or images."""
        return tokens / workload.tokens * (self.p50_s or self.step_time_s) / self.goodput


class Bill(Record, kw_only=True):
    """The predicted time, device hours, money and energy (kilowatt hours) of so many tokens, or
    images. None where the user gave no rate."""

    tokens: PositiveFloat
    seconds: NonNegativeFloat
    device_hours: NonNegativeFloat
    dollars: NonNegativeFloat | None = None
    kwh: NonNegativeFloat | None = None


class Varying(Record, kw_only=True):
    """The quantiles of a step over ``what`` differs from step to step."""

    what: str
    p50_s: PositiveFloat
    p95_s: PositiveFloat


class TieRun(Record, kw_only=True):
    """A layout that ties with the first and was run: its predicted step, and the median of the
    measured ones. ``run``: the name of its run directory. None, and why in ``note``, if it failed.
    """

    layout: Layout
    told_s: PositiveFloat
    measured_s: PositiveFloat | None = None
    run: str = ""
    note: str = ""

    @property
    def error(self) -> float | None:
        """Predicted over measured, minus 1."""
        return None if self.measured_s is None else self.told_s / self.measured_s - 1


class RefitCost(Record, kw_only=True):
    """Cost of moving the plan's live weights to another ``layout`` on ranks of the same numbers.

    ``wire_bytes``: sent between ranks, over all ranks; ``local_bytes``: copied within ranks.
    ``max_in_bytes``, ``max_out_bytes``: of the busiest rank. ``predicted_s``: how long the busiest
    link is busy. ``bound_s``: the least of any plan, bound by ``binding``. ``rate``: the links'."""

    layout: Layout
    wire_bytes: NonNegative
    local_bytes: NonNegative
    max_in_bytes: NonNegative
    max_out_bytes: NonNegative
    predicted_s: NonNegativeFloat
    bound_s: NonNegativeFloat
    binding: str
    rate: str


class Answers(Record, kw_only=True):
    """The answers to what was asked of a plan; empty where nothing was. ``batches``, ``attention``:
    the best plan of each batch, or of each back end, that was asked for, ``faster`` over the plan.
    ``bills``: of a million tokens, and of all ``tokens`` (or images) of the training."""

    why_not: tuple[WhyNot, ...] = ()
    what_if: tuple[WhatIf, ...] = ()
    sizes: tuple[DeviceCount, ...] = ()
    batches: tuple[WhatIf, ...] = ()
    attention: tuple[WhatIf, ...] = ()
    tokens: PositiveFloat | None = None
    deadline_s: PositiveFloat | None = None
    goodput: Goodput | None = None
    varying: tuple[Varying, ...] = ()
    ties: tuple[TieRun, ...] = ()
    bills: tuple[Bill, ...] = ()
    refit: RefitCost | None = None
