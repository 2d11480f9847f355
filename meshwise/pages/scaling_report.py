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
from meshwise.pages.scaling import Row, Scaling, length, subject
from meshwise.pages.svg import Figure
from meshwise.pages.table import Table, filled
from meshwise.pages.tables import ABSENT, shown, size
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


def tables(scaling: Scaling) -> list[Table]:
    """All that the report shows, in its order; the last two only where they have rows."""
    found = _times(scaling), _best(scaling), _communication(scaling), _memory(scaling)
    return filled(*found, _failures(scaling))


def measured(scaling: Scaling) -> list[Row]:
    return [row for row in scaling.rows if row.result.time_ms is not None]


def _times(scaling: Scaling) -> Table:
    rows = []
    for row in scaling.rows:
        one = row.result
        if one.time_ms is None:
            rows.append((*_key(row), one.status, *[ABSENT] * 8))
            continue
        rows.append((
            *_key(row), ms(one.time_ms), ms(one.forward_time_ms),
            "noisy" if one.is_noisy else ms(one.backward_time_ms),
            ms(one.time_p95_ms), rate(one.throughput_tokens_per_sec), _number(one.achieved_tflops),
            times(row.speedup), percent(row.strong), percent(row.weak),
        ))  # fmt: skip
    columns = (
        "tokens", "ring", "time", "forward", "backward", "p95", "tokens/s", "TFLOP/s a rank",
        "speedup", "strong", "weak",
    )  # fmt: skip
    grows = "; dense work a rank grows with the length, so that 1 / ring size is ideal"
    legend = [
        f"time: of the slowest rank, median. speedup: {_NOTED['speedup']}.",
        "p95: over the iterations of all ranks, each rank's own.",
        f"weak: {_NOTED['weak']}{grows if scaling.is_dense else ''}.",
    ]
    conventions = dict.fromkeys(filter(None, (r.result.flop_convention for r in scaling.rows)))
    legend += [f"FLOPs: {said}." for said in conventions]
    return Table("Time and scaling", columns, tuple(rows), tuple(legend))


def _best(scaling: Scaling) -> Table:
    rows = []
    for tokens in scaling.lengths:
        of_length = [row for row in measured(scaling) if row.result.seq_length == tokens]
        if not of_length:
            rows.append((length(tokens), *[ABSENT] * 5))
            continue
        fastest = min(of_length, key=lambda row: row.result.time_ms or 0)
        fair = [row for row in of_length if row.strong is not None and row.strong >= FAIR]
        largest = max((row.result.ring_size for row in fair), default=None)
        rows.append((
            length(tokens), str(fastest.result.ring_size), ms(fastest.result.time_ms),
            times(fastest.speedup), percent(fastest.strong),
            ABSENT if largest is None else str(largest),
        ))  # fmt: skip
    columns = ("tokens", "fastest ring", "time", "speedup", "strong", "largest efficient ring")
    legend = (f"efficient: at least {percent(FAIR)} of linear.",)
    return Table("Best ring size for each length", columns, tuple(rows), legend)


def _communication(scaling: Scaling) -> Table:
    rows = []
    for row in measured(scaling):
        one = row.result
        if one.ring_size == 1:
            continue
        rows.append((
            *_key(row), ways(one.strategy or ABSENT), size(one.bytes_received),
            size(one.comm_lower_bound_bytes), percent(one.comm_efficiency),
            _number(one.collectives), ms(one.communication_time_ms), ms(one.exposed_comm_ms),
            percent(row.exposed_share), percent(one.overlap_fraction), _number(one.load_imbalance),
        ))  # fmt: skip
    columns = (
        "tokens", "ring", "strategy", "received", "planned", "of it", "calls", "isolated",
        "exposed", "of step", "hidden", "imbalance",
    )  # fmt: skip
    legend = (
        "received: bytes into the busiest rank, of a step.",
        f"planned: {_NOTED['planned']}.",
        f"exposed: {_NOTED['exposed']}; hidden: 1 - exposed / isolated, at least 0.",
        WAITING,
        f"imbalance: {_NOTED['imbalance']}.",
    )
    return Table("Communication", columns, tuple(rows), legend, left=1)


def _memory(scaling: Scaling) -> Table:
    rows = [
        (
            *_key(row), size(row.result.peak_gb * 1e9), percent(row.memory_share),
            percent(1 / row.result.ring_size), rate(row.tokens_per_gb),
        )
        for row in measured(scaling)
        if row.result.peak_gb is not None
    ]  # fmt: skip
    columns = ("tokens", "ring", "peak of a rank", "of one rank's", "ideal", "tokens/GB")
    legend = ("tokens/GB: tokens of the batch over the peak of one rank. GB = 1e9 bytes.",)
    return Table("Memory", columns, tuple(rows), legend)


def _failures(scaling: Scaling) -> Table:
    rows = tuple(
        (*_key(row), row.result.status, row.result.reason or ABSENT)
        for row in scaling.rows
        if row.result.time_ms is None
    )
    return Table("Not measured", ("tokens", "ring", "status", "reason"), rows, left=4)


def conclusions(scaling: Scaling) -> list[str]:
    """Say what the numbers mean, good and bad, one sentence each."""
    return [*_scales(scaling), *_reaches(scaling), *_falls_short(scaling), *_missing(scaling)]


def _scales(scaling: Scaling) -> Iterable[str]:
    for ring in scaling.ring_sizes:
        of_ring = [row for row in measured(scaling) if row.result.ring_size == ring > 1]
        known = [(row.strong, row) for row in of_ring if row.strong is not None]
        known.sort(key=lambda pair: pair[0])
        if not of_ring:
            continue
        if not known:
            yield f"Ring {ring}: no length has a time of one rank, so its scaling is not known."
            continue
        (low, worst), (high, best) = known[0], known[-1]
        lengths = f"{percent(low)} of linear at {length(worst.result.seq_length)} tokens"
        if len(known) > 1:
            lengths += f" to {percent(high)} at {length(best.result.seq_length)}"
        yield f"Ring {ring}: {lengths}; at best {times(best.speedup)} the speed of one rank."
    if not measured(scaling):
        yield "No case has a time, so nothing can be concluded."
    elif all(row.result.ring_size == 1 for row in measured(scaling)):
        yield "Only one rank a ring was measured: this says nothing of scaling."


def _reaches(scaling: Scaling) -> Iterable[str]:
    """Lengths that need more than one rank."""
    for tokens in scaling.lengths:
        alone = scaling.at(tokens, 1)
        rings = [r.result.ring_size for r in measured(scaling) if r.result.seq_length == tokens]
        if alone is not None and alone.result.status == "oom" and rings:
            told = f"{length(tokens)} tokens do not fit on one rank"
            yield f"{told}; a ring of {min(rings)} runs them."


def _falls_short(scaling: Scaling) -> Iterable[str]:
    for row in measured(scaling):
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


def _missing(scaling: Scaling) -> Iterable[str]:
    """Count the cases without a time, by status."""
    lost = [row.result.status for row in scaling.rows if row.result.time_ms is None]
    if lost:
        told = ", ".join(f"{lost.count(status)} {status}" for status in dict.fromkeys(lost))
        yield f"{len(lost)} of {len(scaling.rows)} cases have no time: {told}."


def _lost(row: Row) -> str:
    """Explain the time beyond t(1) / P, as far as it was measured; its parts are what is lost.
    Waiting is at most what the transfers take alone: what else is exposed is noise."""
    one, strong = row.result, row.strong or 0
    time_ms = one.time_ms or 0
    ideal_ms = strong * time_ms
    lost_ms = time_ms - ideal_ms
    isolated_ms = one.communication_time_ms
    waiting_ms = min(one.exposed_comm_ms or 0, lost_ms)
    if isolated_ms is not None:
        waiting_ms = min(waiting_ms, isolated_ms)
    uneven_ms = max(0, (one.load_imbalance or 1) - 1) * ideal_ms
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
    for title, lines in (("Conclusions", conclusions(scaling)), ("Sources", _sources(scaling))):
        wrapped = (
            textwrap.fill(f"- {line}", table.WIDTH, subsequent_indent="  ") for line in lines
        )
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
        html.Section(
            "Where the numbers come from", tuple(_sources(scaling)), folded=(_config(scaling),)
        ),
    ]
    legend = (*(f"{name}: {said}." for name, said in _NOTED.items()), WAITING, "GB = 1e9 bytes.")
    return html.render(TITLE, subtitle(scaling), sections, legend)


def subtitle(scaling: Scaling) -> str:
    """Name what was measured, in which rings, and how they exchanged."""
    config, timed = scaling.config, sorted({row.result.ring_size for row in measured(scaling)})
    rings = ", ".join(map(str, timed or scaling.ring_sizes))
    used = [row.result.strategy for row in measured(scaling) if row.result.ring_size > 1]
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
    rows = tuple((name, _told(value)) for name, value in scaling.config.items())
    return Table("Configuration", ("", ""), rows, left=2)


def _told(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(map(str, value))
    return ABSENT if value is None else str(value)


def _sources(scaling: Scaling) -> list[str]:
    taken = [f"{name}: used" for name in scaling.files]
    return [*taken, *(f"left out, {said}" for said in scaling.left_out)]


def _key(row: Row) -> tuple[str, str]:
    return length(row.result.seq_length), str(row.result.ring_size)


def _where(row: Row) -> str:
    return f"{length(row.result.seq_length)} tokens on ring {row.result.ring_size}"


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
