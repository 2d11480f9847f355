"""A CSV file as rows, by the names of its columns.

Every line of the file is a row, because these tools write no cells of several lines. So an open
quote spoils only its own line.
"""

import csv
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from meshwise.probe.importers.found import (
    Doubts,
    Found,
    Printed,
    check_one_run,
    found_of,
    lines_of,
    readable,
    refusal,
    short,
    warnings_about,
)

Line = Mapping[str, str]


class Form(NamedTuple):
    """One tool's table. ``read`` turns (where a line is, the line, the file's name) into rows.
    ``ranks``: the column with the number of ranks, which must be the same in all lines."""

    name: str
    tool: str
    columns: frozenset[str]
    size_kind: str
    time_kind: str
    read: Callable[[str, Line, str], list[Printed]]
    ranks: str = ""


def columns_of(line: str, separator: str = ",") -> list[str]:
    """Return the cells of a header; none if a quote is open."""
    try:
        return _split(line, separator)
    except ValueError:
        return []


def form_of(columns: Sequence[str], forms: Sequence[Form]) -> Form | None:
    """Return the form whose columns are all present."""
    return next((form for form in forms if form.columns <= set(columns)), None)


def headers(text: str, forms: Sequence[Form]) -> Iterator[str]:
    """Yield the places of the lines that are a form's header."""
    return (where for where, line in lines_of(text) if form_of(columns_of(line), forms))


def lacking(columns: Sequence[str], forms: Sequence[Form]) -> str:
    """Say which columns the best-fitting form lacks; empty if half or more of them are missing."""
    share = {form: len(form.columns & set(columns)) / len(form.columns) for form in forms}
    form = max(share, key=lambda form: share[form])
    missing = ", ".join(sorted(form.columns - set(columns)))
    told = f"looks like a file of {form.tool} but has no column {missing}"
    return told if share[form] > 0.5 else ""


def read(text: str, form: Form, name: str) -> Found:
    """Read the rows under the header. ``name``: the file's, which may tell the collective."""
    (_, header), *lines = [(where, line) for where, line in lines_of(text) if line.strip()]
    doubts, columns = Doubts(), columns_of(header)

    def read_line(where: str, line: str) -> list[Printed]:
        return form.read(where, _cells(line, columns), name)

    rows = [row for of_line in readable(lines, read_line, doubts) for row in of_line]
    if not rows:
        raise refusal(doubts)
    check_one_run([(row.where, {form.ranks: row.case.world_size}) for row in rows if form.ranks])
    equal = len(rows) > 3 and len({row.time_s for row in rows}) == 1
    return found_of(
        rows,
        (*warnings_about(doubts, rows), *[f"constant: all {len(rows)} times are equal"] * equal),
        tool=form.tool,
        size_kind=form.size_kind,
        time_kind=form.time_kind,
        world_size=max(row.case.world_size for row in rows),
        facts={"form": form.name, "rows": len(rows)},
    )


def _cells(line: str, columns: Sequence[str]) -> Line:
    cells = _split(line)
    while len(cells) > len(columns) and not cells[-1]:
        cells.pop()
    if len(cells) != len(columns):
        raise ValueError(f"{len(cells)} values under {len(columns)} columns: {short(line)}")
    return dict(zip(columns, cells, strict=True))


def _split(line: str, separator: str = ",") -> list[str]:
    try:
        (cells,) = csv.reader([line], strict=True, delimiter=separator)
    except csv.Error:
        raise ValueError("a quote is open or a cell is too long") from None
    return [cell.strip() for cell in cells]
