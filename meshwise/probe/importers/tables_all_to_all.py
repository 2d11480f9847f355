"""An uneven all-to-all as embedding tables cause it: batch B, T_r tables on rank r, dimension D.

Rank i computes its T_i tables for the whole batch and needs all tables for its share of it: it
sends (B/n) * T_i * D * 4 bytes to every rank, in fp32. Its input has B * T_i * D elements, its
output (B/n) * sum(T) * D (moderato/param, comms.py with a file of bench params).

In: a row of PARAM's text, or a CSV of means over ranks (btd, size_bytes, latency_us, algbw_gbps,
busbw_gbps), whose bandwidths may carry the 0.0004 that its writer added. Their size is the output.
"""

import re
from collections.abc import Mapping, Sequence

from meshwise.probe.importers import csv_table
from meshwise.probe.importers.csv_table import Table
from meshwise.probe.importers.found import (
    Found,
    Row,
    left_out,
    number,
    samples_of,
    seconds,
    short,
    whole,
)
from meshwise.spec import Case, Collective, Regime

PATTERN = re.compile(r"(\d{1,18}),(\d{1,18}(?:-\d{1,18})*),(\d{1,18})")
COLUMNS = frozenset({"btd", "size_bytes", "latency_us"})
MOST_RANKS = 2048  # whose matrix of splits has 4 million numbers


def lacking(columns: Sequence[str]) -> str:
    """Say which columns a table with ``btd`` lacks; empty without ``btd``."""
    missing = ", ".join(sorted(COLUMNS - set(columns)))
    return f"is a table of btd but has no column {missing}" if "btd" in columns else ""


def splits(btd: str) -> tuple[tuple[int, ...], ...]:
    """Bytes from each rank to each, of ``B,T0-T1-..,D``."""
    found = PATTERN.fullmatch(btd)
    if found is None:
        raise ValueError(f"btd = {short(btd)!r}: must be batch,tables-of-each-rank,dimension")
    batch, tables, dim = int(found[1]), [int(t) for t in found[2].split("-")], int(found[3])
    if len(tables) > MOST_RANKS:
        raise ValueError(f"btd names {len(tables)} ranks: must be <= {MOST_RANKS}")
    if batch % len(tables):
        raise ValueError(f"batch = {batch}: is not divisible by {len(tables)} ranks")
    return tuple((batch // len(tables) * t * dim * 4,) * len(tables) for t in tables)


def row(
    btd: str,
    size_bytes: int,
    per_rank: Sequence[Sequence[float]],
    where: str,
    regime: Regime = "blocking",
) -> Row:
    """``per_rank``: times in us, then bandwidths in GB/s; a number a rank, or their mean."""
    matrix = splits(btd)
    received = sum(line[0] for line in matrix)
    if size_bytes != received:
        raise ValueError(f"size = {size_bytes}, but {short(btd)} gives an output of {received} B")
    n, times_s = len(matrix), tuple(time * 1e-6 for time in per_rank[0])
    op = Collective(
        kind="all_to_all_v",
        size_bytes=max(received, n * max(line[0] for line in matrix)),
        group_size=n,
        dtype="fp32",
        splits=matrix,
    )
    names = ("printed_algbw_bytes_per_s", "printed_busbw_bytes_per_s")
    printed = {
        name: tuple(rate * 1e9 for rate in rates) if len(rates) > 1 else rates[0] * 1e9
        for name, rates in zip(names, per_rank[1:], strict=False)
    }
    return Row(
        where=where,
        case=Case(op=op, regime=regime, world_size=n),
        time_s=max(times_s),
        metrics={"output_bytes": float(size_bytes), **printed},
        rank_times_s=times_s if len(times_s) == n else (),
    )


def read_csv(table: Table, name: str) -> Found:
    """The rows of a CSV with ``COLUMNS``."""
    rows, unread = csv_table.rows_of(table, _csv_row, name)
    csv_table.check_one_run(rows, "ranks are", name)
    samples, doubled = samples_of(rows)
    return Found(
        tool="PARAM comms, table of batch, tables and dimension",
        size_kind="the output of a rank; ours is the most that a rank sends or receives",
        time_kind="mean over ranks",
        world_size=samples[0].case.world_size,
        samples=samples,
        warnings=(*left_out(unread), *doubled),
        facts={"rows": len(rows)},
    )


def _csv_row(line: Mapping[str, str], where: str) -> list[Row]:
    time_us = seconds(line["latency_us"], "latency_us")
    rates = [[number(line[c], c)] for c in ("algbw_gbps", "busbw_gbps") if c in line]
    size_bytes = whole(line["size_bytes"], "size_bytes")
    return [row(line["btd"], size_bytes, [[time_us], *rates], where)]
