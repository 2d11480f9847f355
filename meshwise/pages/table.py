"""Tables as plain data, which the terminal and the page show alike; their columns and cells.

Cells are text already; the first ``left`` columns are words, the rest numbers.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from typing import IO, Any, Literal, NamedTuple

from meshwise.text import plain
from meshwise.units import format_rate, format_seconds

Column = tuple[str, Callable[[Any], str]]
WIDTH = 120  # where the output is no terminal, so that logs and golden files do not change
ABSENT = "–"


class Table(NamedTuple):
    """``legend``: lines under the table that say what its columns mean."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    legend: tuple[str, ...] = ()
    left: int = 1


def listed(
    title: str,
    items: Iterable[Any],
    *columns: Column,
    legend: tuple[str, ...] = (),
    left: int = 1,
) -> Table:
    """A row for each item; a column is its head and how it shows an item."""
    rows = tuple(tuple(show(item) for _, show in columns) for item in items)
    return Table(title, tuple(head for head, _ in columns), rows, legend, left)


def columns(
    show: Callable[[Any], str], fields: str | Mapping[str, str | Callable[[Any], Any]]
) -> tuple[Column, ...]:
    """Columns of one format for ``listed``. ``fields``: heads, with where an item has the value: by
    a path (``plan.layout.name``, ``metrics.peak_bytes``) or a function; or names that are both.
    None is shown as ``ABSENT``."""
    named = {name: name for name in fields.split()} if isinstance(fields, str) else fields

    def column(where: str | Callable[[Any], Any]) -> Callable[[Any], str]:
        return lambda item: shown(where(item) if callable(where) else _at(item, where), show)

    return tuple((head, column(where)) for head, where in named.items())


def _at(item: Any, path: str) -> Any:
    """Follow attributes and keys; the first of several values."""
    for name in path.split("."):
        item = item.get(name) if isinstance(item, Mapping) else getattr(item, name)
    return item[0] if type(item) is tuple else item


def filled(*tables: Table) -> list[Table]:
    """The tables that have rows."""
    return [table for table in tables if table.rows]


def shown(value: float | None, show: Callable[[float], str]) -> str:
    """The value as ``show`` prints it; ``ABSENT`` for None."""
    return ABSENT if value is None else show(value)


def percent(value: float | None, sign: bool = False) -> str:
    return shown(value, lambda share: f"{100 * share:{'+' if sign else ''}.1f} %")


def share(value: float | None) -> str:
    """A share in three digits, however small: ``0.0123 %``."""
    return shown(value, lambda part: f"{100 * part:.3g} %")


def size(num_bytes: float | None) -> str:
    """Bytes in decimal units, as links count them: ``14.7 MB``."""
    return shown(num_bytes, lambda bytes_: format_rate(bytes_, "B") if bytes_ else "0")


def flops(per_s: float | None) -> str:
    """``794 TFLOP/s``."""
    return shown(per_s, lambda rate: format_rate(rate, "FLOP/s"))


def interval(low: float, high: float, show: Callable[[float], str] = format_seconds) -> str:
    """``1.20 – 1.31 ms``: the unit once where both ends share it, one number where they agree."""
    first, last = show(low), show(high)
    if first == last:
        return last
    (number, unit), (_, last_unit) = first.split(), last.split()
    return f"{number if unit == last_unit else first} – {last}"


def span(values: Iterable[float], show: Callable[[float], str]) -> str:
    """The least and the largest, or the one that all are."""
    each = list(values)
    ends = dict.fromkeys(show(end(each)) for end in (min, max)) if each else (ABSENT,)
    return " – ".join(ends)


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
            drawn = RichTable(
                box=box.SIMPLE_HEAD,
                pad_edge=False,
                show_edge=False,
                show_header=any(table.columns),
            )
            for index, column in enumerate(table.columns):
                justify: Literal["left", "right"] = "left" if index < table.left else "right"
                drawn.add_column(Text(plain(column, keep="\n")), justify=justify, overflow="fold")
            for row in table.rows:
                drawn.add_row(*(Text(plain(cell)) for cell in row))
            if table.rows:
                console.print(drawn)
            for line in table.legend:
                console.print(Text(plain(line), style="dim"))
            console.print()
    file.write(re.sub(r" +$", "", captured.get(), flags=re.MULTILINE))
