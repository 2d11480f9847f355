"""``meshwise compare``: two sides, a baseline to keep, or a history."""

from typing import Annotated, Any

from cyclopts import Parameter

import meshwise
from meshwise.cli.options import Json, Runs
from meshwise.cli.output import DONE, GATE_FAILED, emit, say


def compare(
    a: str | None = None,
    b: str | None = None,
    /,
    *more: Annotated[str, Parameter(show=False)],
    threshold: str = "1%",
    fail_if: tuple[str, ...] = (),
    force: bool = False,
    save: str | None = None,
    history: bool = False,
    out: str | None = None,
    runs: Runs = "runs",
    md: bool = False,
    json: Json = False,
) -> int:
    """Is side b faster than side a? Ratio of medians, interval and verdict of every shared case, or
    of the steps of two layouts of one model.

    A side is one launch or several, with commas between them: run directories, folders of them,
    'runs/*-gemm-*', or the name of a baseline. Give six launches a side.

    Parameters
    ----------
    a
        The launches to compare with.
    b
        The launches to judge; by default the runs that are newer than a's. If a is a baseline,
        several may follow.
    threshold
        The change that matters: smaller ones are never faster or slower.
    fail_if
        Exit with code 3 if a case is, for example, 'slower>5%'; may be repeated.
    force
        Compare across timing methods and regimes.
    save
        Keep the named launches as the baseline of this name.
    history
        Say where the time of each case changed over the named runs; by default all in --runs.
    out
        With --history: also draw it, as a page or an .svg file.
    md
        Print Markdown, for a pull request.
    """
    named = tuple(one for one in (a, b, *more) if one is not None)
    if out is not None and not history:
        raise ValueError(f"out = {out!r}: only --history draws; give --history, or leave it out")
    if (save is not None or history) and (fail_if or force or (save is not None and history)):
        raise ValueError("--save and --history compare nothing; give one of them, without gates")
    if save is not None:
        return _save(save, named, runs, json)
    if history:
        return _history(named, threshold, runs, out, md, json)
    _check_sides(named, runs)
    from meshwise.pages.compare import tables

    found = meshwise.compare(
        named[0], named[1:], threshold=threshold, fail_if=fail_if, force=force, runs=runs
    )
    _print(found, tables(found), md, json)
    return GATE_FAILED if found.failed else DONE


def _check_sides(named: tuple[str, ...], runs: str) -> None:
    """Refuse words that are not two sides. Behind a baseline a shell's pattern may stand."""
    from meshwise.verbs.compare import is_baseline

    if not named:
        raise ValueError("compare: no run is named; give two, or a baseline's name")
    if len(named) > 2 and not is_baseline(named[0], runs):
        raise ValueError(
            f"compare takes two sides, but {len(named)} are given: put commas between the launches "
            "of a side, or quote 'runs/*'"
        )


def _save(name: str, named: tuple[str, ...], runs: str, json: bool) -> int:
    from meshwise.verbs.compare import save

    path = save(name, *named, runs=runs)
    emit({"path": str(path)}, (), json)
    if not json:
        say(str(path))
    return DONE


def _history(
    named: tuple[str, ...], threshold: str, runs: str, out: str | None, md: bool, json: bool
) -> int:
    from meshwise.pages import history as pages
    from meshwise.verbs.compare import history

    found = history(*named, threshold=threshold, runs=runs)
    if out is not None:
        pages.write(out, found)
    _print(found, pages.tables(found), md, json)
    return DONE


def _print(document: Any, tables: Any, md: bool, json: bool) -> None:
    if md and json:
        raise ValueError("md: --json is given too; leave one of them out")
    if md:
        from meshwise.pages.table import markdown

        say(markdown(tables))
    else:
        emit(document, tables, json)
