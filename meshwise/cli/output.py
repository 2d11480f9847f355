"""Print a verb's result: tables for people, or one JSON document for programs. Only rank 0 does."""

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from meshwise.text import plain
from meshwise.verbs import job

if TYPE_CHECKING:
    from meshwise.pages.table import Table

DONE, BAD_INPUT, GATE_FAILED, SOME_FAILED, INTERRUPTED = 0, 2, 3, 4, 130


def emit(document: Any, tables: "Iterable[Table]", json: bool) -> None:
    """Print ``document`` as JSON, or ``tables``, on standard output."""
    if not job.leads():
        return
    if json:
        import msgspec

        text = msgspec.json.format(msgspec.json.encode(document), indent=1)
        sys.stdout.write(plain(text.decode(), keep="\n") + "\n")  # JSON's own escapes
    else:
        from meshwise.pages import table

        table.write(tables, sys.stdout)


def code_of(statuses: Iterable[str]) -> int:
    """Return the exit code of measurements: DONE if some case was measured and none failed."""
    from meshwise.spec.run import FAILED

    found = set(statuses)
    return DONE if "ok" in found and not found & {*FAILED} else SOME_FAILED


def say(*lines: str) -> None:
    """Print lines on standard output at once, without control characters."""
    for line in lines:
        print(plain(line), flush=True)
