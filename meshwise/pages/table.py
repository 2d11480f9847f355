"""Tables as plain data, which the terminal and the page show in the same way.

A table is a list of columns over a list of items. Its cells are text. The first ``left`` columns
are words, the others numbers.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import IO, Any, Literal, NamedTuple, TypeVar

from meshwise.text import plain
from meshwise.units import format_rate, format_seconds

T = TypeVar("T")
K = TypeVar("K")
Show = Callable[[Any], str]
Where = str | Callable[[Any], Any]
Column = tuple[str, Where] | tuple[str, Where, Show]
WIDTH = 120  # if the output is no terminal, so that logs and golden files do not change
NARROW = 60  # terminals below it get a wide table as records
ABSENT = "–"


class Table(NamedTuple):
    """A table. ``legend``: lines under it that say what its columns mean."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    legend: tuple[str, ...] = ()
    left: int = 1


def listed(
    title: str, items: Iterable[Any], *columns: Column, legend: tuple[str, ...] = (), left: int = 1
) -> Table:
    """Build a table with a row for each item.

    A column is a head, the place of the value in an item, and a function that shows it (by default
    ``str``). The place is a function, or a path of attributes and keys (``metrics.peak_bytes``); of
    several values it takes the first. None is shown as ``ABSENT``.
    """
    rows = tuple(tuple(_cell(item, column) for column in columns) for item in items)
    return Table(title, tuple(column[0] for column in columns), rows, legend, left)


def _cell(item: Any, column: Column) -> str:
    value = column[1]
    if callable(value):
        value = value(item)
    else:
        for name in value.split("."):
            item = item.get(name) if isinstance(item, Mapping) else getattr(item, name, None)
        value = item[0] if type(item) is tuple else item
    return shown(value, column[2] if len(column) == 3 else str)


def columns(show: Show, fields: str | Mapping[str, Where]) -> tuple[Column, ...]:
    """Make columns of one format. ``fields``: heads with the place of the value, or names that are
    both."""
    named = {name: name for name in fields.split()} if isinstance(fields, str) else fields
    return tuple((head, where, show) for head, where in named.items())


def grouped(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """Group items that share a key, in the order in which keys first appear."""
    found: dict[K, list[T]] = {}
    for item in items:
        found.setdefault(key(item), []).append(item)
    return found


def filled(*tables: Table) -> list[Table]:
    """Drop the tables without rows."""
    return [table for table in tables if table.rows]


def shown(value: float | None, show: Callable[[float], str]) -> str:
    """Show a value; ``ABSENT`` for None."""
    return ABSENT if value is None else show(value)


def percent(value: float | None, sign: bool = False) -> str:
    return shown(value, lambda x: f"{round(100 * x, 1) + 0.0:{'+' if sign else ''}.1f} %")


def share(value: float | None) -> str:
    """Show a share with three significant digits: ``0.0123 %``."""
    return shown(value, lambda part: f"{100 * part:.3g} %")


def size(num_bytes: float | None) -> str:
    """Show bytes in decimal units, as links count them: ``14.7 MB``."""
    return shown(num_bytes, lambda bytes_: format_rate(bytes_, "B") if bytes_ else "0")


def flops(per_s: float | None) -> str:
    """Show ``794 TFLOP/s``."""
    return shown(per_s, lambda rate: format_rate(rate, "FLOP/s"))


def interval(low: float, high: float, show: Callable[[float], str] = format_seconds) -> str:
    """Show ``1.20 – 1.31 ms``: the unit once if both ends share it, one value if they agree, and
    ``0 – 1.31 ms`` from nothing on."""
    first, last = show(low), show(high)
    if first == last:
        return last
    (number, unit), (_, last_unit) = first.split(), last.split()
    return f"{number if unit == last_unit else first if low else 0} – {last}"


def span(values: Iterable[float], show: Callable[[float], str]) -> str:
    """Show the least and the largest value, or one value if they agree."""
    each = list(values)
    ends = dict.fromkeys(show(end(each)) for end in (min, max)) if each else (ABSENT,)
    return " – ".join(ends)


def _parts(table: Table, width: int) -> Iterator[Table]:
    """Yield the table with as many of its columns of numbers as fit beside the words, then with the
    next ones. On a narrow terminal yield one whose lines are cells beside their columns' names."""
    gap = 3
    sizes = [
        gap + max(len(line) for cell in cells for line in cell.split("\n"))
        for cells in zip(table.columns, *table.rows, strict=True)
    ]
    words, room, widest = range(table.left), width, max(sizes[table.left :], default=0)
    if sum(sizes) > width:
        natural = sum(sizes[: table.left])
        room = max(widest, width - (natural if 3 * natural <= 2 * width else width // 2))
        sizes[: table.left] = [0] * table.left
    parts: list[list[int]] = [[]]
    for index in range(table.left, len(sizes)):
        if parts[-1] and sum(sizes[at] for at in (*words, *parts[-1], index)) > room:
            parts.append([])
        parts[-1].append(index)
    if len(parts) > 1 and width < NARROW:
        lines = list[tuple[str, str]]()
        for row in table.rows:
            lines += [("", "")] * bool(lines)
            named = zip(table.columns, row, strict=True)
            lines += [(name, cell) if name else (cell, "") for name, cell in named]
        yield table._replace(columns=("", ""), rows=tuple(lines), left=2)
        return
    for part in parts:
        kept = [*words, *part]
        columns, *rows = [tuple(row[at] for at in kept) for row in (table.columns, *table.rows)]
        yield table._replace(columns=columns, rows=tuple(rows))


def markdown(tables: Iterable[Table]) -> str:
    """Write tables as GitHub and GitLab show them. Names stay text."""
    lines = list[str]()
    for table in tables:
        lines += [f"**{_escaped(table.title)}**", ""]
        if table.rows:
            marks = [":--" if at < table.left else "--:" for at in range(len(table.columns))]
            rows = [table.columns, marks, *table.rows]
            escaped = ([cell if row is marks else _escaped(cell) for cell in row] for row in rows)
            lines += [*(f"| {' | '.join(cells)} |" for cells in escaped), ""]
        lines += [*(f"- {_escaped(line)}" for line in table.legend), ""]
    return "\n".join(lines).strip()


def _escaped(text: str) -> str:
    return re.sub(r"([\\`*_\[\]<>|#~&@])", r"\\\1", plain(" ".join(text.split())))


def write(tables: Iterable[Table], file: IO[str]) -> None:
    """Print tables on a stream, in colour only on a terminal and without NO_COLOR. On a terminal of
    fewer than ``WIDTH`` columns a wide table goes on below, its words repeated; below ``NARROW`` it
    becomes records."""
    from rich import box
    from rich.console import Console
    from rich.table import Table as RichTable
    from rich.text import Text

    console = Console(file=file, highlight=False, width=None if file.isatty() else WIDTH)
    with console.capture() as captured:
        for table in tables:
            console.print(Text(plain(table.title), style="bold"))
            is_narrow = console.width < WIDTH and bool(table.columns)
            for part in _parts(table, console.width) if is_narrow else [table]:
                drawn = RichTable(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
                drawn.show_header = any(part.columns)
                for index, column in enumerate(part.columns):
                    words = index < part.left
                    justify: Literal["left", "right"] = "left" if words else "right"
                    drawn.add_column(
                        Text(plain(column, keep="\n")), justify=justify, overflow="fold",
                        no_wrap=is_narrow and not words,
                    )  # fmt: skip
                for row in part.rows:
                    drawn.add_row(*(Text(plain(cell)) for cell in row))
                if table.rows:
                    console.print(drawn)
            for line in table.legend:
                console.print(Text(plain(line), style="dim"))
            console.print()
    file.write(re.sub(r" +$", "", captured.get(), flags=re.MULTILINE))
