"""Tables of what ``run`` measured: training steps, batches of inference, decoded tokens.

In: the ``StepResult`` of each run. Out: predicted beside measured where plans were priced, measured
alone where not; what failed and why.
"""

from collections.abc import Callable, Sequence

from meshwise.pages.spread import each
from meshwise.pages.steps import Outcome, StepResult
from meshwise.pages.table import ABSENT, Table, filled, interval, listed, percent, shown
from meshwise.pages.tables import CONVENTION, INTERVAL, MFU_LEGEND, headline
from meshwise.spec import WideResNet
from meshwise.spec.phases import ADDENDS
from meshwise.units import format_bytes, format_count, format_rate, format_seconds

CHECK_LEGEND = (
    "Loss error: largest relative difference from one device over three steps, in fp32 (of images: "
    "fp64)."
)
IMAGES_LEGEND = (
    "FLOP/s and MFU count two for each multiplication of the convolutions and the head, three "
    "times for a training step."
)
FORWARD_LEGEND = (
    f"FLOP/s and MFU count a forward pass, a third of {CONVENTION}'s step: 2 per parameter and "
    "token without embedding lookups, plus 4 x layers x hidden x seq a token, attention not halved."
)
INFER_LEGEND = (
    "Latency: from a batch's start on the first stage to its end on the last, one batch at a time. "
    "Streamed: time of a batch when they follow each other without a barrier."
)
LOOP_LEGEND = "The streamed loop alone was timed, by rank 0's clock: its time stands for both."
SLOWER_LEGEND = (
    "* streamed is slower than one by one: a single stage has nothing to overlap, the loop's begin "
    "and end count, and ranks that share cores hold each other up. More --steps tell."
)
STAGES_LEGEND = (
    "Own work: median over batches of a stage's own time, its slowest rank; weights and peak of "
    "the rank that has most."
)
PHASES_LEGEND = (
    "Means over ranks, which add up to the step, and the longest of a rank; phases.json has each. "
    "Exposed: moments when a collective runs and no computation does; bubble: waiting for a "
    "neighbour in the pipeline. timeline.json in the run directory opens in Perfetto."
)
SCALED_LEGEND = (
    "Of two steps behind the timed ones: the first, with marks between the parts, gives the times; "
    "the second, under torch's profiler, which slows it, what ran between marks, scaled to them."
)
LOSS_LEGEND = "Loss: of the run's first step, warm-up included, and of its last timed one."
PHASE_NAMES = ("forward", "backward", "optimizer", "exposed", "bubble", "other")  # of ADDENDS
DECODE_LEGEND = (
    "First token: from the common start until every sequence has its first. Then the time between "
    "tokens of a sequence; tokens/s of all sequences."
)


def steps(results: Sequence[StepResult]) -> list[Table]:
    """Each mode's runs, those of one model and batch in one table; then what failed."""
    shown = []
    for mode, tables in (("train", _training), ("infer", _inference), ("decode", _decoding)):
        alike: dict[str, list[StepResult]] = {}
        for result in results:
            if result.time is not None and result.mode == mode:
                alike.setdefault(headline(result.plan), []).append(result)
        shown += [table for group in alike.values() for table in tables(group)]
    return [*shown, *failures(results)]


def _layout(result: StepResult) -> str:
    return result.plan.layout.name


def _training(done: Sequence[StepResult]) -> list[Table]:
    """Predicted beside measured, time then memory; how fast that is."""
    kinds = " and ".join(sorted({result.memory_kind for result in done}))
    priced = any(result.plan.prediction is not None for result in done)
    compared = ("layout", "predicted", "interval", "measured", "error")
    columns = compared if priced else ("layout", "measured")
    beside = "predicted beside measured" if priced else "measured"
    median = "median over steps of the slowest rank"
    legend: tuple[str, ...] = (f"Measured: {median}. Interval: {INTERVAL}.",)
    if priced:
        legend = (
            "error = predicted/measured - 1; * marks a measurement outside the prediction's "
            f"interval. Measured: {median}.",
            f"First interval: the prediction's. Second: {INTERVAL}.",
        )
    return [
        Table(
            f"Step time, {beside}: {headline(done[0].plan)}",
            (*columns, "interval", "mean", "std", "steps"),
            tuple(
                (_layout(r), *_outcome(r.time, format_seconds, priced), *_spread(r)) for r in done
            ),
            legend,
        ),
        Table(
            f"Peak memory, {beside}",
            columns,
            tuple((_layout(r), *_outcome(r.memory, format_bytes, priced)) for r in done),
            (f"Measured: largest over ranks, {kinds}.",),
        ),
        _speed(done),
        *_phases(done),
    ]


def _phases(done: Sequence[StepResult]) -> list[Table]:
    """The parts of a step, of the runs that were profiled."""
    rows = tuple(
        (
            _layout(result),
            said,
            *(format_seconds(_number(result, of + name)) for name in ADDENDS),
            format_seconds(_number(result, "phases_step_s")) if not of else "",
        )
        for result in done
        if "phases_step_s" in result.metrics
        for said, of in (("mean", ""), ("longest", "largest_"))
    )
    columns = ("layout", "ranks", *PHASE_NAMES, "step")
    legend = (PHASES_LEGEND, SCALED_LEGEND)
    return filled(Table("Where a step's time goes", columns, rows, legend, left=2))


def _speed(done: Sequence[StepResult]) -> Table:
    checked = any(result.check_loss_error is not None for result in done)
    learned = any(each(result.metrics, "losses") for result in done)
    unit = _unit(done[0])
    if done[0].mode == "infer":
        unit += ", streamed" if _is_one_loop(done) else ", one by one"
    losses = (("first loss", _loss(0)), ("last loss", _loss(-1))) * learned
    check = (("loss error", lambda r: shown(r.check_loss_error, "{:.1e}".format)),) * checked
    return listed(
        "As it ran",
        done,
        ("layout", _layout),
        (unit, lambda r: shown(r.tokens_per_s, format_count)),
        ("FLOP/s a device", lambda r: shown(r.flops_per_device_per_s, _flops)),
        ("MFU", lambda r: percent(r.mfu)),
        ("parameters", lambda r: format_count(r.num_parameters)),
        *losses,
        *check,
        legend=(flop_legend(done[0]), *(LOSS_LEGEND,) * learned, *(CHECK_LEGEND,) * checked),
    )


def _flops(rate: float) -> str:
    return format_rate(rate, "FLOP/s")


def _loss(index: int) -> Callable[[StepResult], str]:
    def show(result: StepResult) -> str:
        losses = each(result.metrics, "losses")
        return f"{losses[index]:.4f}" if losses else ABSENT

    return show


def _unit(result: StepResult) -> str:
    return "images/s" if isinstance(result.plan.model, WideResNet) else "tokens/s"


def flop_legend(result: StepResult) -> str:
    """Say what the run's FLOP/s count."""
    if isinstance(result.plan.model, WideResNet):
        return IMAGES_LEGEND
    return MFU_LEGEND if result.mode == "train" else FORWARD_LEGEND


def _outcome(
    outcome: Outcome | None, show: Callable[[float], str], priced: bool
) -> tuple[str, ...]:
    """Predicted, its interval, measured, error; without ``priced`` only the third."""
    if outcome is None:
        return (ABSENT,) * (4 if priced else 1)
    measured = show(outcome.measured)
    if not priced:
        return (measured,)
    if outcome.predicted is None:
        return ABSENT, ABSENT, measured, ABSENT
    assert outcome.low is not None and outcome.high is not None
    return (
        show(outcome.predicted),
        interval(outcome.low, outcome.high, show),
        measured + ("" if outcome.within else " *"),
        percent(outcome.error, sign=True),
    )


def _spread(result: StepResult) -> tuple[str, str, str, str]:
    assert result.measured_low_s is not None and result.measured_high_s is not None
    assert result.mean_s is not None and result.std_s is not None
    spread = interval(result.measured_low_s, result.measured_high_s)
    means = format_seconds(result.mean_s), format_seconds(result.std_s)
    return spread, *means, str(result.num_steps)


def _inference(done: Sequence[StepResult]) -> list[Table]:
    slower = [_number(r, "streamed_s") > r.time.measured for r in done if r.time]
    rows = tuple(
        (
            _layout(result),
            *_outcome(result.time, format_seconds, False),
            *_spread(result),
            format_seconds(_number(result, "streamed_s")) + " *" * marked,
            format_count(_number(result, "tokens_per_s")),
        )
        for result, marked in zip(done, slower, strict=True)
    )
    columns = ("layout", "latency", "interval", "mean", "std", "batches", "streamed")
    median = f"Latency: median. Interval: {INTERVAL}."
    legend = (INFER_LEGEND, LOOP_LEGEND if _is_one_loop(done) else median)
    return [
        Table(
            f"Forward only: {headline(done[0].plan)}",
            (*columns, f"{_unit(done[0])}, streamed"),
            rows,
            (*legend, SLOWER_LEGEND) if any(slower) else legend,
        ),
        Table(
            "Stages",
            ("layout", "stage", "own work", "weights", "peak memory"),
            tuple(row for result in done for row in _stages(result)),
            (STAGES_LEGEND,),
            left=2,
        ),
        _speed(done),
    ]


def _is_one_loop(done: Sequence[StepResult]) -> bool:
    """Whether the streamed batches alone were timed, by the driver's clock."""
    return all(r.time is not None and r.time.measured == r.metrics["streamed_s"] for r in done)


def _stages(result: StepResult) -> list[tuple[str, ...]]:
    names = ("stage_s", "stage_weight_bytes", "stage_peak_bytes")
    columns = (each(result.metrics, name) for name in names)
    return [
        (_layout(result), str(stage), format_seconds(own_s), *map(format_bytes, held))
        for stage, (own_s, *held) in enumerate(zip(*columns, strict=True))
    ]


def _decoding(done: Sequence[StepResult]) -> list[Table]:
    return [
        listed(
            f"Decoding: {headline(done[0].plan)}",
            done,
            ("layout", _layout),
            ("first token", lambda r: format_seconds(_number(r, "time_to_first_token_s"))),
            ("token", lambda r: _outcome(r.time, format_seconds, False)[0]),
            ("interval", lambda r: _spread(r)[0]),
            ("tokens/s", lambda r: format_count(_number(r, "tokens_per_s"))),
            ("weights", lambda r: format_bytes(_number(r, "weight_bytes"))),
            ("cache", lambda r: format_bytes(_number(r, "cache_bytes"))),
            legend=(DECODE_LEGEND, f"{INTERVAL}."),
        )
    ]


def _number(result: StepResult, name: str) -> float:
    return each(result.metrics, name)[0]


def failures(results: Sequence[StepResult]) -> list[Table]:
    """Runs without a measured step, with what ended them."""
    return filled(
        listed(
            "Not measured",
            [result for result in results if result.time is None],
            ("layout", _layout),
            ("status", lambda result: result.status),
            ("reason", lambda result: result.reason),
            ("run", lambda result: result.run_id),
            left=4,
        )
    )
