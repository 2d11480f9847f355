"""An uneven all-to-all as embedding tables cause it: batch B, T_r tables on rank r, dimension D.

Rank i computes its T_i tables for the whole batch and needs all tables for its share of it: it
sends (B/n) * T_i * D * 4 bytes to every rank, in fp32. Its input has B * T_i * D elements, its
output (B/n) * sum(T) * D (moderato/param, comms.py with a file of bench params).

In: a row of PARAM's text, or a CSV of means over ranks (btd, size_bytes, latency_us, algbw_gbps,
busbw_gbps), whose bandwidths may carry the 0.0004 that its writer added. Their size is the output.
"""

import re
from collections.abc import Iterable, Mapping, Sequence

from meshwise.probe.importers.found import Found, Row, samples_of
from meshwise.spec import Case, Collective
from meshwise.spec.run import Regime

PATTERN = re.compile(r"(\d+),(\d+(?:-\d+)*),(\d+)")
COLUMNS = frozenset({"btd", "size_bytes", "latency_us"})


def splits(btd: str, where: str) -> tuple[tuple[int, ...], ...]:
    """Bytes from each rank to each, of ``B,T0-T1-..,D``."""
    found = PATTERN.fullmatch(btd)
    if found is None:
        raise ValueError(f"{where}: btd = {btd!r}: must be batch,tables-of-each-rank,dimension")
    batch, tables, dim = int(found[1]), [int(t) for t in found[2].split("-")], int(found[3])
    if batch % len(tables):
        raise ValueError(f"{where}: batch = {batch}: is not divisible by {len(tables)} ranks")
    return tuple((batch // len(tables) * t * dim * 4,) * len(tables) for t in tables)


def row(
    btd: str,
    size_bytes: int,
    per_rank: Sequence[Sequence[float]],
    place: str,
    where: str,
    regime: Regime = "blocking",
) -> Row:
    """``per_rank``: times in us, then bandwidths in GB/s; a number a rank, or their mean."""
    matrix = splits(btd, where)
    received = sum(line[0] for line in matrix)
    if size_bytes != received:
        raise ValueError(f"{where}: size = {size_bytes}, but {btd} gives an output of {received} B")
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
        where=place,
        case=Case(op=op, regime=regime, world_size=n),
        time_s=max(times_s),
        metrics={"output_bytes": float(size_bytes), **printed},
        rank_times_s=times_s if len(times_s) == n else (),
    )


def read_csv(lines: Iterable[Mapping[str, str]], name: str) -> Found:
    """The rows of a CSV with ``COLUMNS``."""
    rows = []
    for number, line in enumerate(lines, 2):
        where = f"{name}: line {number}"
        try:
            columns = ("latency_us", "algbw_gbps", "busbw_gbps")
            per_rank = [[float(line[column])] for column in columns if column in line]
            size_bytes = int(line["size_bytes"])
        except (TypeError, ValueError):
            raise ValueError(f"{where}: a number is missing or is none") from None
        rows.append(row(line["btd"], size_bytes, per_rank, f"line {number}", where))
    if not rows:
        raise ValueError(f"{name}: has a header and no rows")
    samples, doubled = samples_of(rows)
    return Found(
        tool="PARAM comms, table of batch, tables and dimension",
        size_kind="the output of a rank; ours is the most that a rank sends or receives",
        time_kind="mean over ranks",
        num_hosts=1,
        world_size=samples[0].case.world_size,
        device="",
        samples=samples,
        warnings=tuple(doubled),
        facts={"rows": len(rows)},
    )
