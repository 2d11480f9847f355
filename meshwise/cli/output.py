"""Print a verb's result: tables for people, or one JSON document for programs. Only rank 0 does."""

import functools
import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, ParamSpec

from meshwise.launcher import Job
from meshwise.text import plain

if TYPE_CHECKING:
    from meshwise.pages.table import Table

P = ParamSpec("P")
DONE, BAD_INPUT, GATE_FAILED, SOME_FAILED, INTERRUPTED = 0, 2, 3, 4, 130


def emit(document: Any, tables: "Iterable[Table]", json: bool) -> None:
    """Print ``document`` as JSON, or ``tables``, on standard output."""
    if not Job.here().leads:
        return
    if json:
        import msgspec

        text = msgspec.json.format(msgspec.json.encode(document), indent=1)
        sys.stdout.write(plain(text.decode(), keep="\n") + "\n")  # JSON's own escapes
    else:
        from meshwise.pages import table

        table.write(tables, sys.stdout)


def on_rank_0(shown: Callable[P, int]) -> Callable[P, int]:
    """Decorate a function that prints a verb's result and returns its exit code: only rank 0 calls
    it, as only rank 0 is sure to see the run directory."""

    @functools.wraps(shown)
    def show(*args: P.args, **kwargs: P.kwargs) -> int:
        return shown(*args, **kwargs) if Job.here().leads else DONE

    return show


def code_of(statuses: Iterable[str]) -> int:
    """Return the exit code of measurements: DONE if some case was measured and none failed."""
    from meshwise.spec.run import FAILED

    found = set(statuses)
    return DONE if "ok" in found and not found & {*FAILED} else SOME_FAILED


def say(*lines: str) -> None:
    """Print lines on standard output at once, without control characters."""
    for line in lines:
        print(plain(line), flush=True)
