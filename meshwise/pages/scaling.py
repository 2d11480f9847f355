"""Read the files of ``measure ring`` and show how time and memory change with the ring's size.

In: a folder of ``ring_v2_collective_benchmark_*.json``. Out: one ``ScalingRow`` for each sequence
length and ring size. With t(P, N) the time of a ring of P ranks over N tokens, the slowest rank's
median:

    speedup            t(1, N) / t(P, N)
    strong efficiency  speedup / P
    weak efficiency    t(1, N / P) / t(P, N): with fixed segments the work per rank is constant
    exposed share      time that the step saves if nothing is sent / t(P, N)
    memory share       peak of a rank in a ring of P / peak of one rank alone, same N; ideal 1 / P

They are computed here, not read, because each ring size may come from a different run. Sentences
say which rows fall short, and why.
"""

import io
import itertools
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from meshwise import store
from meshwise.pages import table
from meshwise.pages.ring import ways
from meshwise.pages.table import ABSENT, Table, columns, filled, listed, percent, shown, size
from meshwise.spec.ring import RingRow, Whole
from meshwise.text import plain
from meshwise.units import format_rate, format_seconds

TITLE = "Ring attention: scaling"
SCHEMA_VERSION = 1
FAIR = 0.95  # share of linear scaling below which a row is explained
PATTERN, LATEST = "ring_v2_collective_benchmark_*.json", "latest.json"

NONE = RingRow(seq_length=0, ring_size=1, world_size=1, status="skipped")


class _RingConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The settings that all runs shown together share."""

    batch_size: Whole = 1
    embed_dim: Whole | None = None
    num_heads: Whole | None = None
    num_kv_heads: Whole | None = None
    segment_lengths: tuple[Whole, ...] = ()
    dilation_rates: tuple[Whole, ...] = ()
    use_flash_attention: bool = True
    dtype: str | None = None
    causal: bool = False
    window: Whole | None = None
    offsets: str | None = None
    offset_heads: str | None = None
    mixture: str | None = None
    dense: bool = False
    way: str | None = None
    order: str | None = None
    forward_only: bool = False
    graph: bool = False


class _RingRun(msgspec.Struct, frozen=True, kw_only=True):
    """A run's file. ``told``: the configuration as written, with keys that are only shown."""

    schema_version: int = SCHEMA_VERSION
    config: _RingConfig
    told: dict[str, Any]
    world_size: Whole
    timestamp: str
    results: tuple[RingRow, ...]
    device: str | dict[str, Any] | None = None


class ScalingRow(NamedTuple):
    """A result, compared with one rank at the same length; None if that was not measured."""

    result: RingRow
    speedup: float | None
    strong: float | None
    weak: float | None
    exposed_share: float | None
    memory_share: float | None
    tokens_per_gb: float | None


class Scaling(NamedTuple):
    """All rows. ``left_out``: files that are older or of another configuration, with the reason."""

    config: dict[str, Any]
    device: str
    rows: tuple[ScalingRow, ...]
    files: tuple[str, ...]
    left_out: tuple[str, ...]

    @property
    def measured(self) -> list[ScalingRow]:
        """The rows that have a time."""
        return [row for row in self.rows if row.result.time_ms is not None]

    @property
    def lengths(self) -> list[int]:
        return sorted({row.result.seq_length for row in self.rows})

    @property
    def ring_sizes(self) -> list[int]:
        return sorted({row.result.ring_size for row in self.rows})

    @property
    def measured_rings(self) -> list[int]:
        return sorted({row.result.ring_size for row in self.measured})

    def at(self, seq_length: int, ring_size: int) -> ScalingRow | None:
        wanted = (seq_length, ring_size)
        return next((r for r in self.rows if wanted == (r[0].seq_length, r[0].ring_size)), None)


def read(folder: Path | str) -> Scaling:
    """Read the newest run of each world size that has the newest run's configuration and device. Of
    two rows with the same length and ring size the newer counts; a skipped row counts only if there
    is no other. Raises a ValueError if there is no result."""
    folder = Path(folder)
    paths = sorted(folder.glob(PATTERN)) or [p for p in (folder / LATEST,) if p.exists()]
    runs = [(_load(path), path.name) for path in paths]
    runs.sort(key=lambda run: (run[0].timestamp, run[1]), reverse=True)
    if not any(run.results for run, _ in runs):
        raise ValueError(
            f"{folder}: holds no results of a scaling benchmark; write some with "
            f"`meshwise measure ring --output_dir {folder}`"
        )
    return _together(runs)


def _together(runs: Sequence[tuple[_RingRun, str]]) -> Scaling:
    """Make one row for each length and ring size. ``runs``: the newest first."""
    newest, kept, left_out = runs[0][0], dict[int, tuple[_RingRun, str]](), []
    for run, name in runs:
        if other := _differs(run, newest):
            left_out.append(f"{name}: another {other} than the newest run's")
        elif run.world_size in kept:
            left_out.append(f"{name}: older than {kept[run.world_size][1]}")
        else:
            kept[run.world_size] = run, name
    results: dict[tuple[int, int], RingRow] = {}
    for result in (result for run, _ in kept.values() for result in run.results):
        key = result.seq_length, result.ring_size
        if key not in results or (results[key].status == "skipped" != result.status):
            results[key] = result
    batch, device = newest.config.batch_size, newest.device
    rows = tuple(_row(result, results, batch) for _, result in sorted(results.items()))
    files = tuple(name for _, name in kept.values())
    told = device.get("name") if isinstance(device, dict) else device
    return Scaling(newest.told, str(told or "unknown device"), rows, files, tuple(left_out))


def _run(found: Mapping[str, Any], source: str) -> _RingRun:
    return store.convert({**found, "told": found.get("config", {})}, _RingRun, source)


def _load(path: Path) -> _RingRun:
    try:
        run = _run(store.read(path, dict), str(path))
    except ValueError as error:
        raise ValueError(
            f"{error}; only files that `meshwise measure ring` wrote can be read"
        ) from None
    for number, result in enumerate(run.results):
        if result.status == "ok" and result.total_time_ms is None:
            field = f"results[{number}].total_time_ms"
            raise ValueError(f"{path}: {field} = None: a row whose status is ok has a time")
    return run


def _differs(run: _RingRun, newest: _RingRun) -> str | None:
    """Return the first field in which two runs differ, or None if they are comparable."""
    if run.device != newest.device:
        return "device"
    names = _RingConfig.__struct_fields__
    changed = (name for name in names if getattr(run.config, name) != getattr(newest.config, name))
    return next(changed, None)


def _row(result: RingRow, results: dict[tuple[int, int], RingRow], batch_size: int) -> ScalingRow:
    length, ring = result.seq_length, result.ring_size
    alone = results.get((length, 1), NONE)
    smaller = NONE if length % ring else results.get((length // ring, 1), NONE)
    speedup = _ratio(alone.time_ms, result.time_ms)
    batch = result.effective_batch_size or batch_size
    return ScalingRow(
        result,
        speedup=speedup,
        strong=_ratio(speedup, ring),
        weak=_ratio(smaller.time_ms, result.time_ms),
        exposed_share=_ratio(result.exposed_comm_ms, result.time_ms),
        memory_share=_ratio(result.peak_gb, alone.peak_gb),
        tokens_per_gb=_ratio(batch * length, result.peak_gb),
    )


def _ratio(above: float | None, below: float | None) -> float | None:
    return above / below if above is not None and below else None


def subject(config: Mapping[str, Any]) -> str:
    """Name what is measured: ``dilated attention 2048/1 4096/2, causal, 12 heads x 64, fp16``."""
    said = ["dense attention"]
    if not _is_dense(config):
        rates = config.get("dilation_rates", [])
        pairs = itertools.zip_longest(config["segment_lengths"], rates, fillvalue="?")
        said = ["dilated attention " + " ".join(f"{w}/{r}" for w, r in pairs)]
    if config.get("causal"):
        said.append("causal")
    heads, width = config.get("num_heads"), config.get("embed_dim")
    if heads and width:
        kv_heads = config.get("num_kv_heads") or heads
        shared = "" if kv_heads == heads else f" ({kv_heads} of k and v)"
        said.append(f"{heads} heads × {width // heads}{shared}")
    said.append(f"batch {config.get('batch_size', 1)}")
    return ", ".join([*said, *filter(None, [config.get("dtype")])])


def _is_dense(config: Mapping[str, Any]) -> bool:
    return bool(config.get("dense")) or not config.get("segment_lengths")


FAILED = "Not measured"  # the title of a table
_NUMBER, _TIMES = "{:.4g}".format, "{:.2f}x".format
_KEY = columns("{:,}".format, {"tokens": "result.seq_length"})
_KEY += columns(str, {"ring": "result.ring_size"})


def tables(scaling: Scaling) -> list[Table]:
    """Return all tables of the report, in order, without those that have no rows."""
    failures = listed(
        FAILED,
        [row for row in scaling.rows if row.result.time_ms is None],
        *_KEY,
        *columns(str, {"status": "result.status", "reason": lambda row: row.result.reason or None}),
        left=4,
    )
    shown = (_time(scaling), _best(scaling), _communication(scaling), _memory(scaling), failures)
    return filled(*shown)


def _time(scaling: Scaling) -> Table:
    grows = "; dense work a rank grows with the length, so that 1 / ring size is ideal"
    conventions = dict.fromkeys(filter(None, (r.result.flop_convention for r in scaling.rows)))
    return listed(
        "Time and scaling",
        scaling.rows,
        *_KEY,
        ("time", lambda row: ms(row.result.time_ms) if row.result.time_ms else row.result.status),
        *columns(ms, {"forward": "result.forward_time_ms"}),
        (
            "backward",
            lambda row: "noisy" if row.result.is_noisy else ms(row.result.backward_time_ms),
        ),
        *columns(ms, {"p95": "result.time_p95_ms"}),
        *columns(rate, {"tokens/s": "result.throughput_tokens_per_sec"}),
        *columns(_NUMBER, {"TFLOP/s a rank": "result.achieved_tflops"}),
        *columns(_TIMES, "speedup"),
        *columns(percent, "strong weak"),
        legend=(
            "time: of the slowest rank, median. p95: over the iterations of all ranks, each rank's "
            "own.",
            "speedup: time of one rank at the same length / time; strong is speedup / ring size.",
            "weak: time of one rank at length / ring size over this time"
            f"{grows if _is_dense(scaling.config) else ''}.",
            *(f"FLOPs: {said}." for said in conventions),
        ),
    )


def _communication(scaling: Scaling) -> Table:
    return listed(
        "Communication",
        [row for row in scaling.measured if row.result.ring_size > 1],
        *_KEY,
        ("strategy", lambda row: ways(row.result.strategy or ABSENT)),
        *columns(size, {"received": "result.bytes_received"}),
        *columns(size, {"planned": "result.comm_lower_bound_bytes"}),
        *columns(percent, {"of it": "result.comm_efficiency"}),
        *columns(_NUMBER, {"calls": "result.collectives"}),
        *columns(ms, {"isolated": "result.communication_time_ms"}),
        *columns(ms, {"exposed": "result.exposed_comm_ms"}),
        *columns(percent, {"of step": "exposed_share", "hidden": "result.overlap_fraction"}),
        *columns(_NUMBER, {"imbalance": "result.load_imbalance"}),
        legend=(
            "received: bytes into the busiest rank, of a step. planned: those by the plan; of it: "
            "planned / received.",
            "exposed: time that goes when nothing is sent; isolated: the transfers alone; hidden: "
            "1 - exposed / isolated, at least 0.",
            "Waiting in what is lost: exposed, but at most isolated; what is more is noise.",
            "imbalance: most / mean attended pairs that a rank computes.",
        ),
    )


def _memory(scaling: Scaling) -> Table:
    return listed(
        "Memory",
        [row for row in scaling.measured if row.result.peak_gb is not None],
        *_KEY,
        *columns(size, {"peak of a rank": lambda row: 1e9 * row.result.peak_gb}),
        *columns(percent, {"of one rank's": "memory_share"}),
        *columns(percent, {"ideal": lambda row: 1 / row.result.ring_size}),
        *columns(rate, {"tokens/GB": "tokens_per_gb"}),
        legend=("tokens/GB: tokens of the batch over the peak of one rank. GB = 1e9 bytes.",),
    )


def of_run(document: Mapping[str, Any]) -> list[Table]:
    """Return the same tables for a document that ``measure ring`` has just made."""
    found = _together([(_run(document, "results"), "this run")])
    first, *others = tables(found)
    name = f"{subject(found.config)}, {found.device}, {document['world_size']} ranks"
    return [first._replace(title=f"{first.title}: {name}"), *others]


def _best(scaling: Scaling) -> Table:
    """Show each length's fastest ring, and the largest ring with nearly linear scaling."""

    def of(tokens: int) -> tuple[int, ScalingRow | None, int | None]:
        rows = [row for row in scaling.measured if row.result.seq_length == tokens]
        fair = [row.result.ring_size for row in rows if (row.strong or 0) >= FAIR]
        fastest = min(rows, key=lambda row: row.result.time_ms or 0, default=None)
        return tokens, fastest, max(fair, default=None)

    return listed(
        "Best ring size for each length",
        map(of, scaling.lengths),
        ("tokens", lambda best: f"{best[0]:,}"),
        *columns(str, {"fastest ring": lambda best: best[1] and best[1].result.ring_size}),
        *columns(ms, {"time": lambda best: best[1] and best[1].result.time_ms}),
        *columns(_TIMES, {"speedup": lambda best: best[1] and best[1].speedup}),
        *columns(percent, {"strong": lambda best: best[1] and best[1].strong}),
        *columns(str, {"largest efficient ring": lambda best: best[2]}),
        legend=(f"efficient: at least {percent(FAIR)} of linear.",),
    )


def dry_run(config: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> list[Table]:
    """Show the rows of ``measure ring --dry-run``: their figures, or why they would be skipped."""

    def by(row: Mapping[str, Any]) -> str:
        return f"skipped: {row['reason']}" if row["reason"] else ways(row["strategy"])

    return [
        listed(
            subject(config),
            rows,
            *columns(str, {"tokens": "seq_length", "ring": "ring_size"}),
            ("by", by),
            (
                "a rank computes",
                lambda row: "" if row["reason"] else format_rate(row["flops_per_rank"], "FLOP"),
            ),
            ("and receives", lambda row: "" if row["reason"] else size(row["planned_bytes"])),
            legend=("Of an iteration, the rank that receives most. Nothing was measured.",),
            left=3,
        )
    ]


def ms(time_ms: float | None) -> str:
    return shown(time_ms, lambda ms_: format_seconds(ms_ / 1e3) if ms_ else "0")


def rate(per: float) -> str:
    """Show ``1.50 M``."""
    return format_rate(per, "").strip()


def conclusions(scaling: Scaling) -> list[str]:
    """Return what the figures mean, good and bad, one sentence each."""
    said = [*_scales(scaling), *_reaches(scaling), *_falls_short(scaling)]
    lost = [row.result.status for row in scaling.rows if row.result.time_ms is None]
    if lost:
        told = ", ".join(f"{lost.count(status)} {status}" for status in dict.fromkeys(lost))
        said.append(f"{len(lost)} of {len(scaling.rows)} cases have no time: {told}.")
    return said


def _scales(scaling: Scaling) -> Iterable[str]:
    for ring in scaling.ring_sizes:
        of_ring = [row for row in scaling.measured if row.result.ring_size == ring > 1]
        known = [(row.strong, row) for row in of_ring if row.strong is not None]
        known.sort(key=lambda pair: pair[0])
        if not of_ring:
            continue
        if not known:
            yield f"Ring {ring}: no length has a time of one rank, so its scaling is not known."
            continue
        (low, worst), (high, best) = known[0], known[-1]
        lengths = f"{percent(low)} of linear at {worst.result.seq_length:,} tokens"
        if len(known) > 1:
            lengths += f" to {percent(high)} at {best.result.seq_length:,}"
        gained = shown(best.speedup, _TIMES)
        yield f"Ring {ring}: {lengths}; at best {gained} the speed of one rank."
    if not scaling.measured:
        yield "No case has a time, so nothing can be concluded."
    elif all(row.result.ring_size == 1 for row in scaling.measured):
        yield "Only one rank a ring was measured: this says nothing of scaling."


def _reaches(scaling: Scaling) -> Iterable[str]:
    """Name the lengths that need more than one rank."""
    for tokens in scaling.lengths:
        alone = scaling.at(tokens, 1)
        rings = [r.result.ring_size for r in scaling.measured if r.result.seq_length == tokens]
        if alone is not None and alone.result.status == "oom" and rings:
            told = f"{tokens:,} tokens do not fit on one rank"
            yield f"{told}; a ring of {min(rings)} runs them."


def _falls_short(scaling: Scaling) -> Iterable[str]:
    for row in scaling.measured:
        if row.strong is not None and row.strong < FAIR:
            yield _lost(row)
        received, planned = row.result.bytes_received, row.result.comm_lower_bound_bytes
        if received and planned is not None and received > 1.001 * planned:
            over = f"{received / planned:.2f}x the planned" if planned else "none were planned"
            yield f"{_where(row)}: receives {size(received)}, {over}."
        share = row.memory_share
        if share is not None and share > 1.2 / row.result.ring_size:
            ideal = percent(1 / row.result.ring_size)
            yield f"{_where(row)}: peak memory is {percent(share)} of one rank's, ideal is {ideal}."


def _lost(row: ScalingRow) -> str:
    """Explain the lost time, beyond t(1) / P, by its measured parts. Waiting is at most the time of
    the transfers alone: any other exposed time is noise."""
    one, strong, time_ms = row.result, row.strong or 0, row.result.time_ms or 0
    lost_ms = time_ms - strong * time_ms
    waiting_ms = min(one.exposed_comm_ms or 0, lost_ms)
    if one.communication_time_ms is not None:
        waiting_ms = min(waiting_ms, one.communication_time_ms)
    uneven_ms = max(0, (one.load_imbalance or 1) - 1) * strong * time_ms
    uneven_ms = min(uneven_ms, lost_ms - waiting_ms)
    rest_ms = lost_ms - waiting_ms - uneven_ms
    told = (
        (waiting_ms, "waiting for transfers"),
        (uneven_ms, "for uneven work"),
        (rest_ms, "not explained (smaller kernels, launches, copies, noise)"),
    )
    parts = [f"{ms(part_ms)} {why}" for part_ms, why in told if part_ms > 0.001 * time_ms]
    lost = f"of {ms(time_ms)} it loses {ms(lost_ms)}: {', '.join(parts)}"
    return f"{_where(row)}: {percent(strong)} of linear; {lost}."


def text(scaling: Scaling) -> str:
    """Return the whole report as text."""
    out = io.StringIO()
    out.write(f"{TITLE}\n{textwrap.fill(subtitle(scaling), table.WIDTH)}\n\n")
    table.write([configuration(scaling), *tables(scaling)], out)
    wrap = textwrap.TextWrapper(table.WIDTH, subsequent_indent="  ")
    for title, lines in (("Conclusions", conclusions(scaling)), ("Sources", sources(scaling))):
        wrapped = (wrap.fill(f"- {line}") for line in lines)
        out.write("\n".join([title, *wrapped, "", ""]))
    return plain(out.getvalue().rstrip() + "\n", keep="\n")


def subtitle(scaling: Scaling) -> str:
    """Name the measured work, the rings, and how their ranks exchanged keys."""
    config = scaling.config
    rings = ", ".join(map(str, scaling.measured_rings or scaling.ring_sizes))
    used = [row.result.strategy for row in scaling.measured if row.result.ring_size > 1]
    went = " or ".join(dict.fromkeys(ways(each) for each in used if each))
    said = [subject(config), scaling.device]
    said += ["forward only"] if config.get("forward_only") else []
    said += ["CUDA graphs"] if config.get("graph") else []
    said.append(f"rings of {rings} ranks" if rings != "1" else "one rank")
    said.append(f"{config.get('order') or 'contiguous'} shards")
    asked = config.get("way") or "auto"
    said.append(f"way {asked}" + (f": {went}" if went not in ("", asked) else ""))
    return ", ".join(said)


def configuration(scaling: Scaling) -> Table:
    def told(value: Any) -> str:
        return " ".join(map(str, value)) if isinstance(value, list) else shown(value, str)

    rows = tuple((name, told(value)) for name, value in scaling.config.items())
    return Table("Configuration", ("", ""), rows, left=2)


def sources(scaling: Scaling) -> list[str]:
    taken = [f"{name}: used" for name in scaling.files]
    return [*taken, *(f"left out, {said}" for said in scaling.left_out)]


def _where(row: ScalingRow) -> str:
    return f"{row.result.seq_length:,} tokens on ring {row.result.ring_size}"
