"""A scaling benchmark in words: tables, what falls short and why, the text file, the page.

Every sentence is made from rows of ``scaling.read``; a row without a time says why and is left out
of all that is compared.
"""

import io
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

from meshwise.pages import html, table
from meshwise.pages.ring import ways
from meshwise.pages.scaling import Row, Scaling, subject
from meshwise.pages.svg import Figure
from meshwise.pages.table import ABSENT, Table, columns, filled, listed, shown, size
from meshwise.text import plain
from meshwise.units import format_rate, format_seconds

FAIR = 0.95  # of linear; a row below it is explained
TITLE = "Ring attention: scaling"
WAITING = "Waiting in what is lost: exposed, but at most isolated; what is more is noise."
_NOTED = {
    "speedup": "time of one rank at the same length / time; strong is speedup / ring size",
    "weak": "time of one rank at length / ring size over this time",
    "exposed": "time that goes when nothing is sent; isolated: the transfers alone",
    "planned": "bytes into the busiest rank by the plan; of it: planned / received",
    "imbalance": "most / mean attended pairs that a rank computes",
}


_KEY = columns("{:,}".format, {"tokens": "result.seq_length"})
_KEY += columns(str, {"ring": "result.ring_size"})


def tables(scaling: Scaling) -> list[Table]:
    """All that the report shows, in its order; the last two only where they have rows."""
    grows = "; dense work a rank grows with the length, so that 1 / ring size is ideal"
    conventions = dict.fromkeys(filter(None, (r.result.flop_convention for r in scaling.rows)))
    time = listed(
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
        *columns(_number, {"TFLOP/s a rank": "result.achieved_tflops"}),
        *columns(times, "speedup"),
        *columns(percent, "strong weak"),
        legend=(
            f"time: of the slowest rank, median. speedup: {_NOTED['speedup']}.",
            "p95: over the iterations of all ranks, each rank's own.",
            f"weak: {_NOTED['weak']}{grows if scaling.is_dense else ''}.",
            *(f"FLOPs: {said}." for said in conventions),
        ),
    )
    communication = listed(
        "Communication",
        [row for row in scaling.measured if row.result.ring_size > 1],
        *_KEY,
        ("strategy", lambda row: ways(row.result.strategy or ABSENT)),
        *columns(size, {"received": "result.bytes_received"}),
        *columns(size, {"planned": "result.comm_lower_bound_bytes"}),
        *columns(percent, {"of it": "result.comm_efficiency"}),
        *columns(_number, {"calls": "result.collectives"}),
        *columns(ms, {"isolated": "result.communication_time_ms"}),
        *columns(ms, {"exposed": "result.exposed_comm_ms"}),
        *columns(percent, {"of step": "exposed_share", "hidden": "result.overlap_fraction"}),
        *columns(_number, {"imbalance": "result.load_imbalance"}),
        legend=(
            "received: bytes into the busiest rank, of a step.",
            f"planned: {_NOTED['planned']}.",
            f"exposed: {_NOTED['exposed']}; hidden: 1 - exposed / isolated, at least 0.",
            WAITING,
            f"imbalance: {_NOTED['imbalance']}.",
        ),
    )
    memory = listed(
        "Memory",
        [row for row in scaling.measured if row.result.peak_gb is not None],
        *_KEY,
        *columns(size, {"peak of a rank": lambda row: 1e9 * row.result.peak_gb}),
        *columns(percent, {"of one rank's": "memory_share"}),
        *columns(percent, {"ideal": lambda row: 1 / row.result.ring_size}),
        *columns(rate, {"tokens/GB": "tokens_per_gb"}),
        legend=("tokens/GB: tokens of the batch over the peak of one rank. GB = 1e9 bytes.",),
    )
    failures = listed(
        "Not measured",
        [row for row in scaling.rows if row.result.time_ms is None],
        *_KEY,
        *columns(str, {"status": "result.status", "reason": lambda row: row.result.reason or None}),
        left=4,
    )
    return filled(time, _best(scaling), communication, memory, failures)


def _backward(row: Row) -> str:
    return "noisy" if row.result.is_noisy else ms(row.result.backward_time_ms)


def _best(scaling: Scaling) -> Table:
    rows = []
    for tokens in scaling.lengths:
        of_length = [row for row in scaling.measured if row.result.seq_length == tokens]
        fair = [row.result.ring_size for row in of_length if (row.strong or 0) >= FAIR]
        cells = [ABSENT] * 4
        if of_length:
            fastest = min(of_length, key=lambda row: row.result.time_ms or 0)
            cells = [str(fastest.result.ring_size), ms(fastest.result.time_ms)]
            cells += [times(fastest.speedup), percent(fastest.strong)]
        rows.append((f"{tokens:,}", *cells, shown(max(fair, default=None), str)))
    heads = ("tokens", "fastest ring", "time", "speedup", "strong", "largest efficient ring")
    legend = (f"efficient: at least {percent(FAIR)} of linear.",)
    return Table("Best ring size for each length", heads, tuple(rows), legend)


def conclusions(scaling: Scaling) -> list[str]:
    """Say what the numbers mean, good and bad, one sentence each."""
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
        yield f"Ring {ring}: {lengths}; at best {times(best.speedup)} the speed of one rank."
    if not scaling.measured:
        yield "No case has a time, so nothing can be concluded."
    elif all(row.result.ring_size == 1 for row in scaling.measured):
        yield "Only one rank a ring was measured: this says nothing of scaling."


def _reaches(scaling: Scaling) -> Iterable[str]:
    """Lengths that need more than one rank."""
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


def _lost(row: Row) -> str:
    """Explain the time beyond t(1) / P, as far as it was measured; its parts are what is lost.
    Waiting is at most what the transfers take alone: what else is exposed is noise."""
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
    """The whole report as a text file."""
    out = io.StringIO()
    out.write(f"{TITLE}\n{textwrap.fill(subtitle(scaling), table.WIDTH)}\n\n")
    table.write([_config(scaling), *tables(scaling)], out)
    wrap = textwrap.TextWrapper(table.WIDTH, subsequent_indent="  ")
    for title, lines in (("Conclusions", conclusions(scaling)), ("Sources", _sources(scaling))):
        wrapped = (wrap.fill(f"- {line}") for line in lines)
        out.write("\n".join([title, *wrapped, "", ""]))
    return plain(out.getvalue().rstrip() + "\n", keep="\n")


def page(scaling: Scaling, figures: Sequence[Figure]) -> str:
    """The same as one self-contained page."""
    time, best, *others = tables(scaling)
    failures = [each for each in others if each.title == "Not measured"]
    rest = [each for each in others if each not in failures]
    sections = [
        html.Section("What it says", tuple(conclusions(scaling)), tables=(best, *failures)),
        html.Section("Scaling, memory, all cases", figures=tuple(figures)),
        html.Section("The numbers", tables=(time, *rest)),
        html.Section(html.SOURCES, tuple(_sources(scaling)), folded=(_config(scaling),)),
    ]
    legend = (*(f"{name}: {said}." for name, said in _NOTED.items()), WAITING, "GB = 1e9 bytes.")
    return html.render(TITLE, subtitle(scaling), sections, legend)


def subtitle(scaling: Scaling) -> str:
    """Name what was measured, in which rings, and how they exchanged."""
    config = scaling.config
    rings = ", ".join(map(str, scaling.measured_rings or scaling.ring_sizes))
    used = [row.result.strategy for row in scaling.measured if row.result.ring_size > 1]
    went = " or ".join(dict.fromkeys(ways(each) for each in used if each))
    said = [subject(scaling)]
    said += ["forward only"] if config.get("forward_only") else []
    said += ["CUDA graphs"] if config.get("graph") else []
    said.append(f"rings of {rings} ranks" if rings != "1" else "one rank")
    said.append(f"{config.get('order') or 'contiguous'} shards")
    asked = config.get("way") or "auto"
    said.append(f"way {asked}" + (f": {went}" if went not in ("", asked) else ""))
    return ", ".join(said)


def _config(scaling: Scaling) -> Table:
    def told(value: Any) -> str:
        return " ".join(map(str, value)) if isinstance(value, list) else shown(value, str)

    rows = tuple((name, told(value)) for name, value in scaling.config.items())
    return Table("Configuration", ("", ""), rows, left=2)


def _sources(scaling: Scaling) -> list[str]:
    taken = [f"{name}: used" for name in scaling.files]
    return [*taken, *(f"left out, {said}" for said in scaling.left_out)]


def _where(row: Row) -> str:
    return f"{row.result.seq_length:,} tokens on ring {row.result.ring_size}"


def ms(time_ms: float | None) -> str:
    return shown(time_ms, lambda ms_: format_seconds(ms_ / 1e3) if ms_ else "0")


def percent(part: float | None) -> str:
    return shown(part, lambda x: f"{100 * x:.{0 if x >= 0.1 else 1}f} %")


def times(factor: float | None) -> str:
    return shown(factor, "{:.2f}x".format)


def rate(per: float | None) -> str:
    """``1.50 M``."""
    return shown(per, lambda number: format_rate(number, "").strip())


def _number(value: float | None) -> str:
    return shown(value, "{:.4g}".format)
