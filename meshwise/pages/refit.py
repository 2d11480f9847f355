"""Show a ``refit``: the forecast, the measurements and the best method, as tables, lines, a figure.

Bytes sent over links have decimal units (GB = 1e9, like rates), memory has binary units.

    of bound   = bound / median time, the product of
    plan       = bound / predicted time of the plan's busiest link, and
    execution  = that predicted time / median time

The recommended row is the fastest; of those within 5 % of it, the one with the least extra memory.
"""

from collections.abc import Callable, Sequence
from itertools import groupby
from statistics import median

from meshwise.models.decoder import published_parameters
from meshwise.pages import charts, svg
from meshwise.pages.spread import each, number, reading
from meshwise.pages.table import Column, Table, columns, filled, listed, share, size
from meshwise.spec import DTYPE_BYTES, Resharding, Sample, WeightLayout
from meshwise.spec.label import label
from meshwise.spec.refit import Forecast, Scenario
from meshwise.units import format_bytes, format_rate, format_seconds

MOST_RANKS = 16  # in a figure
CLOSE = 1.05
_MB = 2**20  # Megatron's suite prints this as MB
BOUND_NAMES = ("ingress", "relayed", "hosts", "memory")  # egress binds only if nobody passes on
PHASES = ("copy_within", "pack", "move", "unpack", "hash", "compare", "meet")  # in order
LEGEND = (
    "Time: median over the refits of the slowest rank. Extra memory: of the rank with most. Moved: "
    "between ranks, all together."
)
COPY = "After +: the second copy that keeps it atomic."
BEST = "> is recommended: the fastest, within 5 % of it the one with the least extra memory."
_WHY = {
    "ingress": "bytes into one rank",
    "relayed": "bytes that must leave their owners once",
    "egress": "bytes out of their owners if nobody passes them on",
    "hosts": "bytes between hosts",
    "memory": "memory read and written",
}


def arrangement(layout: WeightLayout) -> str:
    """Return ``TP2 DP2 PP2 megatron, ranks 0-7``."""
    degrees = {
        "TP": layout.tp, "DP": layout.dp, "PP": layout.pp, "EP": layout.ep, "FSDP": layout.fsdp,
        "ETP": layout.etp if layout.ep > 1 else 1,
    }  # fmt: skip
    said = " ".join(f"{axis}{degree}" for axis, degree in degrees.items() if degree > 1) or "TP1"
    last = layout.first_rank + layout.num_ranks - 1
    ranks = f"ranks {layout.first_rank}-{last}" if layout.num_ranks > 1 else f"rank {last}"
    return f"{said} {layout.order}, {ranks}"


def command(scenario: Scenario) -> str:
    """Return the command that runs a scenario."""
    return f"meshwise refit --scenario {scenario.name}"


def listing(scenarios: Sequence[tuple[Scenario, int, str]]) -> list[Table]:
    """List scenarios by source, with their number of ranks and their number in the menu."""
    run = (
        "Run one: meshwise refit --scenario NAME, or a menu number: 8 is tp2-tp1 by nccl and "
        "nvshmem, 10 is 1 to 7. --refit-mode all measures both modes, --refit-method all all ways."
    )
    abouts = list(dict.fromkeys(one.about for one, _, _ in scenarios))
    return [
        listed(
            f"Scenarios: {about}",
            [row for row in scenarios if row[0].about == about],
            ("scenario", lambda row: row[0].name),
            ("menu", lambda row: row[2]),
            ("GPUs", lambda row: str(row[1])),
            ("mode", lambda row: row[0].mode),
            ("layouts", lambda row: f"{row[0].train.name} -> {row[0].infer.name}"),
            ("model", lambda row: f"{row[0].model.name} {row[0].dtype}"),
            *columns(
                size,
                {
                    "weights": lambda row: (
                        published_parameters(row[0].model) * DTYPE_BYTES[row[0].dtype]
                    )
                },
            ),
            legend=(run,) if about == abouts[-1] else (),
            left=6,
        )
        for about in abouts
    ]


def forecasts(found: Sequence[Forecast], step_s: float | None = None) -> list[Table]:
    """Make the tables of a dry run. ``step_s``: seconds of a training step."""
    tables = []
    for one in found:
        tables += [_summary(one, step_s), _bounds(one), *([_matrix(one)] if one.loads else [])]
    return tables


def label_of(op: Resharding) -> str:
    return f"{op.scenario or op.model.name}, {op.mode}"


def _summary(one: Forecast, step_s: float | None) -> Table:
    op = one.op
    busiest = f"busiest rank {size(one.max_in_bytes)} in, {size(one.max_out_bytes)} out"
    steps = f" in {one.num_stages} steps" if one.num_stages > 1 else ""
    extra = f"at most {format_bytes(one.staging_bytes)} a rank"
    extra += f", and {format_bytes(one.atomic_bytes)} to stay atomic" if op.atomic else ""
    rows = [
        ("model", f"{op.model.name or 'custom'}, {op.source.dtype}"),
        ("training", arrangement(op.source)),
        ("inference", arrangement(op.destination)),
        ("weights", f"{size(one.source_bytes)} a training rank, {size(one.destination_bytes)} an "
                    "inference rank (the first of each)"),
        ("between ranks", f"{size(one.wire_bytes)}; {busiest}"),
        ("within ranks", size(one.local_bytes)),
        ("slices", f"{one.num_slices} in {one.num_messages} messages{steps}"),
        ("extra memory", extra),
        ("bound", f"{format_seconds(one.bound_s)}, {one.binding}"),
        ("predicted", f"{format_seconds(one.predicted_s)}, plan efficiency "
                      f"{100 * one.plan_efficiency:.0f} %"),
    ]  # fmt: skip
    if step_s:
        part = share(one.predicted_s / step_s)
        rows.append(("of a step", f"{part} of {format_seconds(step_s)}, as predicted"))
    if op.changed:
        unknown = "all above is for a whole refit; what changes is not known yet"
        rows.append(("with --delta", unknown))
    if op.placement:
        rows.append(("placed", _placed(op)))
    elif one.placed_wire_bytes is not None:
        saved = one.wire_bytes - one.placed_wire_bytes
        told = f"{size(one.placed_wire_bytes)} between ranks, {size(saved)} less"
        rows.append(("with --place", told if saved else "no less between ranks"))
    title = f"Dry run: {label_of(op)}, {one.num_ranks} ranks"
    legend = (
        f"Planned in {format_seconds(one.plan_took_s)}, the same for every method. Predicted: "
        "the plan's busiest link or memory; launches, packing and verification come on top. "
        "Nothing was moved."
    )
    return Table(title, ("", ""), tuple(rows), (legend,), left=2)


def _placed(op: Resharding) -> str:
    """Return the ranks that change: ``inference rank 1 on 2, 2 on 1``."""
    moved = [f"{rank} on {other}" for rank, other in enumerate(op.placement) if other != rank]
    more = f" and {len(moved) - 8} more, see op.placement of --json" if len(moved) > 8 else ""
    return f"inference rank {', '.join(moved[:8])}{more}" if moved else "as numbered"


def _bounds(one: Forecast) -> Table:
    said = next((bound.rate for bound in one.bounds if bound.rate), "")
    return listed(
        "Bounds",
        [bound for bound in one.bounds if bound.seconds],
        ("bound", lambda bound: bound.name + (" (binds)" if bound.name == one.binding else "")),
        ("", lambda bound: _WHY[bound.name]),
        *columns(format_seconds, {"time": "seconds"}),
        ("at", lambda b: format_rate(b.bytes_per_s, "B/s") if b.bytes_per_s else "not known"),
        (
            "ranks or hosts",
            lambda of: ", ".join([*map(str, of.ranks[:8]), *["..."] * (len(of.ranks) > 8)]),
        ),
        legend=(f"Links of a rank: {said}, each way.",),
        left=2,
    )


def _cells(one: Forecast) -> tuple[str, Callable[[float], str]]:
    """Return the heading of the bytes between ranks, and a function that shows bytes."""
    unit, factor = ("GB", 1e9) if max(map(max, one.loads)) >= 1e10 else ("MB", 1e6)

    def cell(num_bytes: float) -> str:
        value = num_bytes / factor
        return f"{value:.{int(value < 100)}f}" if value else "."

    title = f"{unit} from each rank (rows) to each rank; what stays on a rank is on the diagonal"
    return title, cell


def _matrix(one: Forecast) -> Table:
    title, cell = _cells(one)
    rows = tuple((str(rank), *map(cell, row)) for rank, row in enumerate(one.loads))
    return Table(title, ("", *map(str, range(one.num_ranks))), rows)


def figures_of(sample: Sample) -> dict[str, float | str]:
    """Return the figures of a sample's table row in SI units, without unknown ones."""
    found: dict[str, float | str] = {}
    extra = [*each(sample.metrics, "extra_bytes"), *each(sample.metrics, "allocated_bytes")]
    if extra:
        found["extra_bytes"] = max(extra)
    bound_s, predicted_s = number(sample.metrics, "bound_s"), number(sample.metrics, "predicted_s")
    whole = _op(sample).changed is None  # changes have no known bound
    if bound_s is not None and predicted_s is not None and whole:
        bounds = {name: number(sample.metrics, f"bound_{name}_s") or 0.0 for name in BOUND_NAMES}
        found |= {"bound_s": bound_s, "binding": max(bounds, key=lambda name: bounds[name])}
        found["plan_efficiency"] = bound_s / predicted_s if predicted_s else 1.0
        if sample.times_s:
            middle_s = median(sample.times_s)
            found["execution_efficiency"] = predicted_s / middle_s
            found["of_bound"] = bound_s / middle_s
    return found


def recommended(samples: Sequence[Sample]) -> Sample | None:
    """Return the sample with the least extra memory among those within 5 % of the fastest."""
    done = [(median(s.times_s), s) for s in samples if s.status == "ok"]
    if not done:
        return None
    fastest_s = min(time_s for time_s, _ in done)
    close = [(time_s, s) for time_s, s in done if time_s <= CLOSE * fastest_s]
    return min(close, key=lambda one: (figures_of(one[1]).get("extra_bytes", 0), one[0]))[1]


def tables(samples: Sequence[Sample], step_s: float | None = None) -> list[Table]:
    """Make a table for each scenario, with a row per mode and method, failures too; then phases."""
    chosen = [sample for sample in samples if isinstance(sample.case.op, Resharding)]
    found = []
    for _, group in groupby(chosen, key=_scenario):
        members = list(group)
        found.append(_results(members, step_s))
        found += [*_against(members), *_phases(members)]
    return found


def _op(sample: Sample) -> Resharding:
    assert isinstance(sample.case.op, Resharding)
    return sample.case.op


def _scenario(sample: Sample) -> tuple[str, str, str]:
    return _op(sample).scenario, _op(sample).model.name, _manner(_op(sample))


def _mode(sample: Sample) -> str:
    return _op(sample).mode


def _results(samples: Sequence[Sample], step_s: float | None) -> Table:
    best, op = recommended(samples) if len(samples) > 1 else None, _op(samples[0])
    legend = [LEGEND + (f" {COPY}" if op.atomic else ""), *([BEST] if best else [])]
    of_step: tuple[Column, ...] = ()
    if step_s:
        legend.append(f"A step takes {format_seconds(step_s)}.")
        of_step = columns(share, {"of a step": lambda row: row[1] and row[1].median_s / step_s})
    title = f"Refit {op.scenario or 'custom'}: {op.model.name or 'custom'}, {op.source.dtype}"
    return listed(
        title + _manner(op),
        [(one, reading(one) if one.status == "ok" else None) for one in samples],
        ("", lambda row: ">" if row[0] is best else ""),
        ("mode", lambda row: _mode(row[0])),
        ("method", lambda row: _method(row[0])),
        ("ranks", lambda row: str(row[0].case.world_size)),
        ("time", lambda row: format_seconds(row[1].median_s) if row[1] else row[0].status),
        *columns(str, {"interval": lambda row: row[1] and row[1].interval}),
        *columns(str, {"extra memory": lambda row: row[1] and _extra(row[0])}),
        *columns(size, {"moved": lambda row: row[1] and _moved_bytes(row[0])}),
        *of_step,
        legend=tuple(legend),
        left=3,
    )


def _moved_bytes(sample: Sample) -> float | None:
    received = each(sample.metrics, "received_bytes")
    return sum(received) if received else None


def _extra(sample: Sample) -> str | None:
    """Return ``12.3 MiB``, or with the second copy of an atomic refit ``12.3 + 307.2 MiB``."""
    extra = figures_of(sample).get("extra_bytes")
    if extra is None:
        return None
    held = each(sample.metrics, "destination_bytes") if _op(sample).atomic else ()
    copy = max(held, default=0.0)
    if not 0 < copy <= float(extra):
        return format_bytes(float(extra))
    return f"{format_bytes(float(extra) - copy)} + {format_bytes(copy)}"


def _manner(op: Resharding) -> str:
    """Name the options that differ from the defaults: ``, verify full, placed``."""
    chosen = {
        f"verify {op.verify}": op.verify != "hash",
        "atomic": op.atomic,
        f"{share(op.changed)} changed": op.changed is not None,
        "placed": bool(op.placement),
    }
    return "".join(f", {word}" for word, said in chosen.items() if said)


def _against(samples: Sequence[Sample]) -> list[Table]:
    """Compare each sample with its bound, if the rates of the links are known."""
    rate = next((r for s in samples if (r := number(s.metrics, "rate_bytes_per_s"))), None)
    at = f" at {format_rate(rate, 'B/s')} into and out of a rank" if rate else ""
    legend = (
        f"Bound: no transfer is faster{at}. Of bound = plan x execution: the bound over the time "
        "of the plan's busiest link, and that over the time measured.",
    )
    done = [(sample, figures_of(sample)) for sample in samples if sample.status == "ok"]
    return filled(
        listed(
            "Against the bound",
            [(sample, known) for sample, known in done if "of_bound" in known],
            ("mode", lambda one: _mode(one[0])),
            ("method", lambda one: _method(one[0])),
            ("most in", lambda one: size(number(one[0].metrics, "max_in_bytes") or 0)),
            ("binds", lambda one: one[1]["binding"]),
            ("bound", lambda one: format_seconds(one[1]["bound_s"])),
            ("of bound", lambda one: share(one[1]["of_bound"])),
            ("plan", lambda one: share(one[1]["plan_efficiency"])),
            ("execution", lambda one: share(one[1]["execution_efficiency"])),
            legend=legend,
            left=2,
        )
    )


def _method(sample: Sample) -> str:
    """Return ``nccl``, or ``auto (ipc)``."""
    if sample.status == "ok" and sample.reason.startswith("auto chose "):
        return f"{sample.case.backend} ({sample.reason.rpartition(' ')[2]})"
    return sample.case.backend


def _phases(samples: Sequence[Sample]) -> list[Table]:
    """Show the slowest rank's time in each phase, for methods that report phases."""
    found = {
        name.removeprefix("phase_").removesuffix("_s")
        for sample in samples
        for name in sample.metrics
        if name.startswith("phase_")
    }
    names = [*(name for name in PHASES if name in found), *sorted(found.difference(PHASES))]
    heads = {name.replace("_", " "): f"metrics.phase_{name}_s" for name in names}
    return filled(
        listed(
            "Phases",
            [one for one in samples if any(f"phase_{name}_s" in one.metrics for name in names)],
            ("mode", _mode),
            ("method", _method),
            *columns(format_seconds, heads),
            legend=("Each phase by itself, of the slowest rank; in a refit they overlap.",),
            left=2,
        )
    )


def outcome(sample: Sample) -> str:
    """Return ``12.3 ms``, or ``oom: rank 0: ...``."""
    if sample.status == "ok":
        return format_seconds(median(sample.times_s))
    return f"{sample.status}: {sample.reason}"


def log_lines(sample: Sample) -> list[str]:
    """Return the lines that Megatron's suite prints and greps for, in both wordings; MB is 2^20."""
    op, times_ms = _op(sample), [time_s * 1e3 for time_s in sample.times_s]
    lines = [
        f"=== {label(sample.case)} ===",
        f"Refit mode: {op.mode}, method: {_method(sample)}, ranks: {sample.case.world_size}",
        f"Training: {arrangement(op.source)}",
        f"Inference: {arrangement(op.destination)}",
        "MB are 2^20 bytes, as in Megatron's benchmark",
    ]
    for name, metric in (("Source", "source_bytes"), ("Destination", "destination_bytes")):
        held = each(sample.metrics, metric)
        if held:
            lines.append(f"{name} model size on rank 0: {held[0] / _MB:.2f} MB")
            rank = next((rank for rank, number in enumerate(held) if number), 0)
            if rank:
                lines.append(f"{name} model size on rank {rank}: {held[rank] / _MB:.2f} MB")
    if not times_ms:
        return [*lines, f"Not measured: {sample.status}: {sample.reason}"]
    count = len(times_ms)
    lines += [f"Iteration {i}/{count}: {time_ms:.3f} ms" for i, time_ms in enumerate(times_ms, 1)]
    found = {"Mean": sum(times_ms) / count, "Min": min(times_ms), "Max": max(times_ms)}
    lines += [f"{name} refit time: {time_ms:.3f} ms" for name, time_ms in found.items()]
    return lines + [f"{name}: {time_ms:.3f} ms" for name, time_ms in found.items()]


def figure(one: Forecast) -> svg.Figure:
    """Draw the bytes from each rank to each other; darker is more."""
    if not one.loads:
        raise ValueError(f"figure: draws at most {MOST_RANKS} ranks, and here are {one.num_ranks}")
    title, cell = _cells(one)
    loads = {(a, b): float(n) for a, row in enumerate(one.loads) for b, n in enumerate(row) if n}
    travel = f"{size(one.wire_bytes)} travel, {size(one.local_bytes)} do not"
    return charts.matrix(f"{label_of(one.op)}: {title}. {travel}.", loads, cell)
