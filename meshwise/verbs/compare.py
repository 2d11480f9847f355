"""compare: take the launches of two sides, return the ratio of every case they share and a verdict.

``save`` names launches, to compare others with; ``history`` follows cases over many runs.
"""

import glob
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from meshwise import stats, store
from meshwise.pages import compare as pages
from meshwise.pages.compare import Comparison
from meshwise.spec import Baseline
from meshwise.units import parse_share
from meshwise.verbs import files

if TYPE_CHECKING:
    from meshwise.pages.history import History

Side = Path | str | Sequence[Path | str]


def compare(
    a: Side,
    b: Side = (),
    *,
    threshold: str | float = stats.THRESHOLD,
    fail_if: str | Sequence[str] = (),
    force: bool = False,
    runs: Path | str = "runs",
) -> Comparison:
    """Tell whether ``b`` is faster than ``a``. A side is one launch or several: run directories,
    folders of them, patterns (``runs/*-gemm-*``), or the name of a baseline; in text with commas
    between them. Without ``b``: the runs under ``runs`` that are newer than those of ``a``.

    ``threshold``: the change that matters, as ``1%`` or 0.01. ``fail_if``: ``slower>5%`` or
    ``faster>5%``, one or several; ``failed`` then has the cases that match. Samples of different
    timing methods or regimes are refused unless ``force``. Two layouts of one model, workload,
    dtype and cluster are compared by their steps.
    """
    limit = parse_share(threshold, "threshold")
    before = launches(a, runs)
    after = launches(b, runs) if b else _newer(before, runs)
    return pages.compare(
        (_name(a, before), list(map(files.load, before))),
        (_name(b or runs, after), list(map(files.load, after))),
        threshold=limit,
        fail_if=[fail_if] if isinstance(fail_if, str) else fail_if,
        force=force,
    )


def history(
    *named: Path | str, threshold: str | float = stats.THRESHOLD, runs: Path | str = "runs"
) -> "History":
    """Follow every case over the named runs, by default all under ``runs``, and find where its time
    changed by more than ``threshold``."""
    from meshwise.pages import history as histories

    limit = parse_share(threshold, "threshold")
    found = launches(named or (runs,), runs)
    return histories.history(list(map(files.load, found)), threshold=limit)


def save(name: str, *named: Path | str, runs: Path | str = "runs") -> Path:
    """Call the named launches ``name``: write ``runs/.baselines/<name>.json`` and return it."""
    if not re.fullmatch(r"\w[\w.-]{0,99}", name, re.ASCII):
        raise ValueError(f"save = {name!r}: a name has letters, digits, ., - and _")
    found = launches(named, runs)
    told = tuple(os.path.relpath(path, runs) for path in found)
    path = _baseline(name, runs)
    return store.write(path, Baseline(saved=store.now(), runs=told))


def _baseline(name: str, runs: Path | str) -> Path:
    return Path(runs) / ".baselines" / f"{name}.json"


def is_baseline(name: str, runs: Path | str = "runs") -> bool:
    """Return whether ``save`` was given this name."""
    return "/" not in name and _baseline(name, runs).is_file()


def launches(side: Side, runs: Path | str = "runs") -> list[Path]:
    """Return the run directories that a side names, each once. ValueError if it names none."""
    parts = [side] if isinstance(side, Path | str) else side
    found = [path for part in parts for path in _of(part, runs)]
    if not found:
        raise ValueError("compare: no run is named; give run directories, or a baseline's name")
    return list({path.resolve(): path for path in found}.values())


def _of(part: Path | str, runs: Path | str) -> Iterator[Path]:
    """Yield the runs of one word: a baseline, a run, a folder, a pattern, several with commas."""
    path, text = Path(part), str(part)
    if is_baseline(text, runs):
        for told in store.read(_baseline(text, runs), Baseline).runs:
            yield Path(os.path.normpath(Path(runs) / told))
    elif path.name in ("run.json", "samples.jsonl"):
        yield path.parent
    elif (path / "run.json").exists():
        yield path
    elif path.is_dir() and (inside := store.runs_of(path)):
        yield from inside
    elif "," in text and not path.exists():
        for each in filter(None, map(str.strip, text.split(","))):
            yield from _of(each, runs)
    elif matches := [Path(m) for m in sorted(glob.glob(text)) if Path(m, "run.json").exists()]:
        yield from matches
    else:
        known = ", ".join(sorted(p.stem for p in Path(runs).glob(".baselines/*.json")))
        which = f"; baselines here: {known}" if known else ""
        raise ValueError(f"{text} is not a run directory; give runs/<id>{which}")


def _newer(before: list[Path], runs: Path | str) -> list[Path]:
    """Return the runs that began after the last of a side."""
    last = max(path.resolve().name for path in before)
    found = [path for path in store.runs_of(runs) if path.name > last]
    if not found:
        raise ValueError(f"compare: no run under {runs} is newer than {last}; name the other side")
    files.announce(found[0], f"{len(found)} runs from" if len(found) > 1 else "")
    return found


def _name(side: Side, found: list[Path]) -> str:
    text = str(side) if isinstance(side, Path | str) else str(side[0])
    others = "" if isinstance(side, Path | str) or len(side) == 1 else " ..."
    return f"{text}{others}" + (f" ({len(found)} launches)" if len(found) > 1 else "")
