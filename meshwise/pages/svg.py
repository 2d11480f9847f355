"""Draw a figure. In: functions that paint axes. Out: an inline SVG element, a PNG or a PDF file.

An SVG has no script, no fonts and no addresses, and its text stays text. CSS variables of the page
replace its colours, so one figure suits light and dark pages.
"""

import html
import io
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from meshwise.files import write_whole
from meshwise.text import plain
from meshwise.units import format_bytes, format_rate

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Paint = Callable[["Axes"], None]
_TIP = "tip: "  # begins the ids of artists that have a text of their own

INK, MUTED, GRID = "#1b1f24", "#5b6573", "#e4e8ee"
SERIES = (
    "#1f5fa8", "#d9781a", "#23875c", "#b5447c", "#3f93c9",
    "#9a6a00", "#7b61c4", "#7d8894", "#c0392b", "#6f961c",
)  # fmt: skip
_NAMES = {"ink": INK, "muted": MUTED, "grid": GRID}
_NAMES |= {f"s{index}": colour for index, colour in enumerate(SERIES)}
_DARK = (
    "#e5e9ee", "#a3adba", "#2f3640",
    "#6aa8f0", "#f2a04c", "#5cc795", "#e583b4", "#8fd0f5",
    "#d9b14a", "#ab97ee", "#a3adb8", "#f07f72", "#b1d65c",
)  # fmt: skip
SHEET = " ".join(f"--{name}: {colour};" for name, colour in _NAMES.items())
THEMES = " ".join(  # of the page, which can be light or dark
    f"--{name}: light-dark({colour}, {dark});"
    for (name, colour), dark in zip(_NAMES.items(), _DARK, strict=True)
)
STYLE: dict[str, Any] = {
    "svg.fonttype": "none",
    "text.parse_math": False,  # a model may be called a$b
    "font.size": 9,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": MUTED,
    "axes.titlesize": 9,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "lines.linewidth": 1.4,
    "lines.markersize": 4,
}
DASHED: dict[str, Any] = {"color": MUTED, "linestyle": (0, (4, 3)), "linewidth": 1}


class Figure(NamedTuple):
    """An SVG element with a caption of one sentence. A ``wide`` one takes a row of the page.
    ``paints``, ``columns``, ``size``: as drawn, to draw it again as a PNG or PDF file."""

    svg: str
    caption: str
    wide: bool = False
    paints: tuple[Paint, ...] = ()
    columns: int = 1
    size: tuple[float, float] = (4.4, 3.2)
    name: str = ""


def draw(
    caption: str, *paints: Paint, columns: int = 0, width: float = 4.4, height: float = 3.2
) -> Figure:
    """Paint sets of axes in rows of ``columns``, by default side by side, of ``width`` x ``height``
    inches together."""
    columns, size = columns or len(paints), (width, height)
    svg = _saved("svg", caption, paints, columns, size).decode()
    return Figure(_inline(svg, caption), caption, width > 6, paints, columns, size)


def picture(
    title: str,
    paints: Sequence[Paint],
    *,
    columns: int,
    width: float,
    height: float,
    form: Literal["png", "pdf"] = "png",
) -> bytes:
    """Paint sets of axes in rows of ``columns``, under a title, as a PNG or PDF file on white."""
    return _saved(form, title, paints, columns, (width, height))


def _saved(
    form: str, title: str, paints: Sequence[Paint], columns: int, size: tuple[float, float]
) -> bytes:
    import matplotlib as mpl
    from matplotlib.figure import Figure as Canvas

    # the salt makes names of markers and clip paths differ between the figures of a page
    style: Any = {**STYLE, "svg.hashsalt": title}
    with mpl.rc_context(style):
        canvas = Canvas(figsize=size, layout="constrained")
        if form != "svg" and title:
            canvas.suptitle(title, fontsize=10)
        canvas.patch.set_visible(form != "svg")
        all_axes = canvas.subplots(-(-len(paints) // columns), columns, squeeze=False)
        for axes in all_axes.flat[len(paints) :]:
            axes.set_axis_off()
        for axes, paint in zip(all_axes.flat, paints, strict=False):
            axes.patch.set_visible(False)
            axes.minorticks_off()
            paint(axes)
            axes.minorticks_off()
        buffer = io.BytesIO()
        metadata = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(form)
        canvas.savefig(buffer, format=form, dpi=150, metadata=metadata)
    return buffer.getvalue()


def tip(artist: Any, text: str) -> None:
    """Let the artist say ``text`` where the mouse is over it, without a script."""
    artist.set_gid(f"{_TIP}{text}")


def _inline(svg: str, caption: str) -> str:
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r' xmlns(:xlink)?="[^"]*"', "", svg)
    svg = re.sub(rf'<g id="{_TIP}([^"]*)">', r"<g><title>\1</title>", svg)
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)  # every figure uses the same ids
    svg = re.sub(r"font: ([\d.]+)px [^;\"]*", r"font-size: \1px", svg)
    head, rest = svg.split(">", 1)
    head = re.sub(r' (width|height)="[^"]*"', "", head)
    svg = f'{head} role="img" aria-label="{html.escape(caption)}">{rest}'
    for name, colour in _NAMES.items():
        svg = svg.replace(colour, f"var(--{name})")
    return svg


def standalone(figure: Figure) -> str:
    """Return the figure as a file of its own, on white, in the colours of the page."""
    names = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
    head, rest = figure.svg.replace("<svg", f"<svg {names}", 1).split(">", 1)
    white = '<rect width="100%" height="100%" fill="white"/>'
    return plain(f"{head}><style>:root {{ {SHEET} }}</style>{white}{rest}", keep="\n")


def write(path: Path | str, figure: Figure) -> None:
    """Write the figure to a file, in the format that its name ends in: .svg, .png or .pdf."""
    form = Path(path).suffix[1:]
    if form not in ("svg", "png", "pdf"):
        raise ValueError(f"figure = {str(path)!r}: let its name end in .svg, .png or .pdf")
    if form == "svg":
        write_whole(path, standalone(figure))
    else:
        write_whole(path, _saved(form, "", figure.paints, figure.columns, figure.size))


def colour(index: int) -> str:
    return SERIES[index % len(SERIES)]


def byte_ticks(axis: Any, low: float, high: float) -> None:
    """Tick up to six powers of two between ``low`` and ``high``, named with units."""
    powers = range(math.ceil(math.log2(low) - 0.01), math.floor(math.log2(high) + 0.01) + 1)
    step = max(1, math.ceil(len(powers) / 6))
    _ticks(axis, [2.0**power for power in powers[::step]], format_bytes)


def rate_ticks(axis: Any, low: float, high: float, unit: str) -> None:
    """Tick round rates around [low, high], named with units."""
    inside = [value for value in decades(low, high) if low * 0.8 <= value <= high * 1.25]
    _ticks(axis, inside, lambda value: format_rate(value, unit))


def decades(low: float, high: float, factors: tuple[int, ...] = ()) -> list[float]:
    """Return powers of ten times ``factors`` around [low, high]. By default the factor is 1, or
    1-2-5 if there are few powers."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    factors = factors or ((1, 2, 5) if len(powers) < 4 else (1,))
    return [factor * 10.0**power for power in powers for factor in factors]


def linear_ticks(axis: Any, top: float, show: Callable[[float], str], base: int) -> None:
    """Set ticks at about five round values from 0 to ``top``. ``base``: 1000, or 1024 for bytes."""
    unit = float(base) ** math.floor(math.log(top, base))
    rough = top / unit / 5
    decade = 10.0 ** math.floor(math.log10(rough))
    step = unit * decade * next(factor for factor in (1, 2, 2.5, 5, 10) if factor * decade >= rough)
    values = [step * index for index in range(int(top / step) + 1)]
    _ticks(axis, values, lambda value: show(value) if value else "0")


def _ticks(axis: Any, values: list[float], show: Callable[[float], str]) -> None:
    axis.set_ticks(values, labels=[_short(show(value)) for value in values])


def _short(text: str) -> str:
    """Drop trailing zeros: ``1.00 GB/s`` becomes ``1 GB/s``, ``64.0 KiB`` ``64 KiB``."""
    return re.sub(r"\.0+ |(\.\d*[1-9])0+ ", lambda match: f"{match[1] or ''} ", text)
