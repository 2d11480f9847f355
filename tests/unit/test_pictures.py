"""The pictures of docs/calibrate.md and docs/search.md are those that `make pictures` draws."""

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def words(svg: str) -> list[str]:
    return re.findall(r"<text[^>]*>([^<]+)<", svg)


def places(svg: str) -> list[float]:
    """The coordinates of all lines and marks, in points."""
    drawn = " ".join(re.findall(r' d="([^"]+)"', svg) + re.findall(r' (?:x|y)="([^"]+)"', svg))
    return list(map(float, re.findall(r"-?[\d.]+", drawn)))


@pytest.mark.parametrize(
    ("program", "chapter"), [("pictures", "calibrate"), ("search_pictures", "search")]
)
def test_the_pictures_are_current(tmp_path, monkeypatch, program, chapter):
    monkeypatch.setattr("sys.argv", [f"{program}.py", str(tmp_path)])
    runpy.run_path(str(ROOT / f"tools/{program}.py"), run_name="__main__")
    drawn, text = sorted(tmp_path.glob("*.svg")), (ROOT / f"docs/{chapter}.md").read_text()
    assert {path.name for path in drawn} == set(re.findall(rf"\(({chapter}-\w+\.svg)\)", text))
    for path in drawn:
        kept, now = (ROOT / "docs" / path.name).read_text(), path.read_text()
        assert words(kept) == words(now), f"{path.name} is old: make pictures"
        assert places(now) == pytest.approx(places(kept), abs=1), f"{path.name}: make pictures"
        assert len(now) < 2**18
