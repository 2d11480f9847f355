"""An uneven all-to-all as embedding tables cause it: batch B, T_r tables on rank r, dimension D.

Rank i computes its T_i tables for the whole batch and needs all tables for its share of it: it
sends (B/n) * T_i * D * 4 bytes to every rank, in fp32. Its input has B * T_i * D elements, its
output (B/n) * sum(T) * D (moderato/param, comms.py with a file of bench params).

In: a row of PARAM's text, or a CSV of means over ranks (btd, size_bytes, latency_us, algbw_gbps,
busbw_gbps), whose bandwidths may carry the 0.0004 that its writer added. Their size is the output.
"""

from collections.abc import Sequence

from meshwise.probe.cases.sizes import embedding_splits
from meshwise.probe.importers.csv_table import Form, Line
from meshwise.probe.importers.found import Row, number, seconds, short, whole
from meshwise.spec import Case, Collective, Regime


def row(
    btd: str,
    size_bytes: int,
    per_rank: Sequence[Sequence[float]],
    where: str,
    regime: Regime = "blocking",
) -> Row:
    """``per_rank``: times in us, then bandwidths in GB/s; a number a rank, or their mean."""
    matrix = embedding_splits(btd, "btd")
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


def _csv_row(line: Line, where: str, _: str) -> list[Row]:
    time_us = seconds(line["latency_us"], "latency_us")
    rates = [[number(line[c], c)] for c in ("algbw_gbps", "busbw_gbps") if c in line]
    size_bytes = whole(line["size_bytes"], "size_bytes")
    return [row(line["btd"], size_bytes, [[time_us], *rates], where)]


FORM = Form(
    name="btd",
    tool="PARAM comms, table of batch, tables and dimension",
    columns=frozenset({"btd", "size_bytes", "latency_us"}),
    size_kind="the output of a rank; ours is the most that a rank sends or receives",
    time_kind="mean over ranks",
    read=_csv_row,
    ranks="number of ranks",
)
