"""A CSV file as rows, by the names of its columns.

Every line of the file is a row, because these tools write no cells of several lines. So an open
quote spoils only its own line.
"""

import csv
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from meshwise.probe.importers.found import (
    Found,
    Printed,
    check_one_run,
    found_of,
    left_out,
    refusal,
    short,
    unusable,
)

Line = Mapping[str, str]


class Form(NamedTuple):
    """One tool's table. ``read`` turns (line, where it is, the file's name) into rows. ``ranks``:
    the column with the number of ranks, which must be the same in all lines."""

    name: str
    tool: str
    columns: frozenset[str]
    size_kind: str
    time_kind: str
    read: Callable[[Line, str, str], list[Printed]]
    ranks: str = ""


class CsvTable(NamedTuple):
    """A parsed file. ``unread``: lines whose cells do not fit the header, and why."""

    columns: tuple[str, ...]
    lines: list[tuple[str, dict[str, str]]]  # (``line 2``, cells by column)
    unread: list[str]


def parsed(text: str, separator: str = ",") -> CsvTable:
    """Parse the header, which is the first line that is not blank, and the rows under it."""
    rows = [(i, line) for i, line in enumerate(text.split("\n"), 1) if line.strip()]
    columns = tuple(_split(rows[0][1], separator) or ())
    found = CsvTable(columns, [], [])
    for number, line in rows[1:]:
        cells = _split(line, separator)
        if cells is None:
            found.unread.append(f"line {number}: a quote is open or a cell is too long")
            continue
        while len(cells) > len(columns) and not cells[-1]:
            cells.pop()
        if len(cells) == len(columns):
            found.lines.append((f"line {number}", dict(zip(columns, cells, strict=True))))
        else:
            many = f"{len(cells)} values under {len(columns)} columns"
            found.unread.append(f"line {number}: {many}: {short(line)}")
    return found


def form_of(columns: Sequence[str], forms: Sequence[Form]) -> Form | None:
    """Return the form whose columns are all present."""
    return next((form for form in forms if form.columns <= set(columns)), None)


def headers(text: str, forms: Sequence[Form]) -> Iterator[int]:
    """Yield the numbers of the lines that are a form's header."""
    for number, line in enumerate(text.split("\n"), 1):
        if form_of(_split(line, ",") or (), forms):
            yield number


def lacking(columns: Sequence[str], forms: Sequence[Form]) -> str:
    """Say which columns the best-fitting form lacks; empty if half or more of them are missing."""
    share = {form: len(form.columns & set(columns)) / len(form.columns) for form in forms}
    form = max(share, key=lambda form: share[form])
    missing = ", ".join(sorted(form.columns - set(columns)))
    told = f"looks like a file of {form.tool} but has no column {missing}"
    return told if share[form] > 0.5 else ""


def read(table: CsvTable, form: Form, name: str) -> Found:
    """Read the rows of one file. ``name``: the file's, for messages."""
    rows, unread = list[Printed](), list(table.unread)
    for where, line in table.lines:
        try:
            rows += form.read(line, where, name)
        except ValueError as error:
            unread.append(f"{where}: {error}")
    if not rows:
        raise refusal(name, unread)
    if form.ranks:
        check_one_run([(row.where, {form.ranks: row.case.world_size}) for row in rows], name)
    equal = len(rows) > 3 and len({row.time_s for row in rows}) == 1
    constant = [f"constant: all {len(rows)} times are equal"] * equal
    return found_of(
        rows,
        (*left_out(unread), *constant, *unusable(rows)),
        tool=form.tool,
        size_kind=form.size_kind,
        time_kind=form.time_kind,
        world_size=max(row.case.world_size for row in rows),
        facts={"form": form.name, "rows": len(rows)},
    )


def _split(line: str, separator: str) -> list[str] | None:
    """Return the cells of a line; None if a quote is open or a cell is too long."""
    try:
        (cells,) = csv.reader([line], strict=True, delimiter=separator)
    except csv.Error:
        return None
    return [cell.strip() for cell in cells]
