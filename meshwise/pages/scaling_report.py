"""A scaling benchmark in words: what falls short and why, the text file, the page.

Every sentence is made from rows of ``scaling.read``; a row without a time says why and is left out
of all that is compared.
"""

import io
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

from meshwise.pages import html, table
from meshwise.pages.ring import ways
from meshwise.pages.scaling import (
    FAIR,
    NOTED,
    WAITING,
    Row,
    Scaling,
    ms,
    percent,
    subject,
    tables,
    times,
)
from meshwise.pages.svg import Figure
from meshwise.pages.table import Table, shown, size
from meshwise.text import plain

TITLE = "Ring attention: scaling"


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
    legend = (*(f"{name}: {said}." for name, said in NOTED.items()), WAITING, "GB = 1e9 bytes.")
    return html.render(TITLE, subtitle(scaling), sections, legend)


def subtitle(scaling: Scaling) -> str:
    """Name what was measured, in which rings, and how they exchanged."""
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
