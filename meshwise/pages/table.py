"""A table as plain data, so that the terminal and the page show the same one.

Cells are text already; the first ``left`` columns are words, the rest numbers.
"""

import re
from collections.abc import Callable, Iterable
from typing import IO, Literal, NamedTuple, TypeVar

from meshwise.text import plain

T = TypeVar("T")
WIDTH = 120  # where the output is no terminal, so that logs and golden files do not change


class Table(NamedTuple):
    """``legend``: lines under the table that say what its columns mean."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    legend: tuple[str, ...] = ()
    left: int = 1


def listed(
    title: str,
    items: Iterable[T],
    *columns: tuple[str, Callable[[T], str]],
    legend: tuple[str, ...] = (),
    left: int = 1,
) -> Table:
    """A row for each item; a column is its head and how it shows an item."""
    rows = tuple(tuple(show(item) for _, show in columns) for item in items)
    return Table(title, tuple(head for head, _ in columns), rows, legend, left)


def filled(*tables: Table) -> list[Table]:
    """The tables that have rows."""
    return [table for table in tables if table.rows]


def write(tables: Iterable[Table], file: IO[str]) -> None:
    """Print tables on a stream; colour only on a terminal, and not under NO_COLOR."""
    from rich import box
    from rich.console import Console
    from rich.table import Table as RichTable
    from rich.text import Text

    console = Console(file=file, highlight=False, width=None if file.isatty() else WIDTH)
    with console.capture() as captured:
        for table in tables:
            console.print(Text(plain(table.title), style="bold"))
            shown = RichTable(
                box=box.SIMPLE_HEAD,
                pad_edge=False,
                show_edge=False,
                show_header=any(table.columns),
            )
            for index, column in enumerate(table.columns):
                justify: Literal["left", "right"] = "left" if index < table.left else "right"
                shown.add_column(Text(plain(column, keep="\n")), justify=justify, overflow="fold")
            for row in table.rows:
                shown.add_row(*(Text(plain(cell)) for cell in row))
            if table.rows:
                console.print(shown)
            for line in table.legend:
                console.print(Text(plain(line), style="dim"))
            console.print()
    file.write(re.sub(r" +$", "", captured.get(), flags=re.MULTILINE))
