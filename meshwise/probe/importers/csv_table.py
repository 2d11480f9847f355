"""A CSV file as lines by the names of their columns.

Every line of the file is a row: these tools write no cell of several lines, and so an open quote
spoils its line alone.
"""

import csv
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from meshwise.probe.importers.found import Row, refusal, short


class Table(NamedTuple):
    """``unread``: lines whose cells do not fit the header, and why."""

    columns: tuple[str, ...]
    lines: list[tuple[str, dict[str, str]]]  # with where: ``line 2``
    unread: list[str]


def read(text: str, separator: str = ",") -> Table:
    """The rows under the first line that is not blank."""
    rows = [(i, line) for i, line in enumerate(text.split("\n"), 1) if line.strip()]
    columns = tuple(split(rows[0][1], separator) or ())
    found = Table(columns, [], [])
    for number, line in rows[1:]:
        cells = split(line, separator)
        if cells is None:
            found.unread.append(f"line {number}: a quote is open or a cell is too long")
            continue
        while len(cells) > len(columns) and not cells[-1]:
            cells.pop()
        if len(cells) == len(columns):
            where, by_name = f"line {number}", dict(zip(columns, cells, strict=True))
            found.lines.append((where, by_name))
        else:
            many = f"{len(cells)} values under {len(columns)} columns"
            found.unread.append(f"line {number}: {many}: {short(line)}")
    return found


def rows_of(
    table: Table, reader: Callable[[Mapping[str, str], str], list[Row]], name: str
) -> tuple[list[Row], list[str]]:
    """The rows that ``reader`` makes of the lines, and the lines that cannot be read, and why.
    ValueError if none can; ``name`` is the file's."""
    rows, unread = [], list(table.unread)
    for where, line in table.lines:
        try:
            rows += reader(line, where)
        except ValueError as error:
            unread.append(f"{where}: {error}")
    if not rows:
        raise refusal(name, unread)
    return rows, unread


def check_one_run(rows: Sequence[Row], what: str, name: str) -> None:
    """ValueError if the rows are of different numbers of ranks; it names a line of each."""
    sizes: dict[int, str] = {}
    for row in rows:
        sizes.setdefault(row.case.world_size, row.where)
    if len(sizes) > 1:
        told = " and ".join(f"{size} at {where}" for size, where in sizes.items())
        raise ValueError(f"{name}: {what} {told}: files of several runs; split the file")


def split(line: str, separator: str = ",") -> list[str] | None:
    """The cells of a line; None where a quote is open or a cell is too long."""
    try:
        (cells,) = csv.reader([line], strict=True, delimiter=separator)
    except csv.Error:
        return None
    return [cell.strip() for cell in cells]
