"""``meshwise compare``."""

from typing import Annotated

from cyclopts import Parameter

import meshwise
from meshwise.cli.options import Json
from meshwise.cli.output import DONE, GATE_FAILED, emit


def compare(
    a: str,
    b: str,
    *more: Annotated[str, Parameter(show=False)],
    fail_if: str | None = None,
    force: bool = False,
    json: Json = False,
) -> int:
    """Is run b faster than run a? Ratio of medians, interval and verdict of every shared case, or
    of the steps of two layouts of one model.

    Parameters
    ----------
    a
        The run directory to compare with.
    b
        The run directory in question.
    fail_if
        Exit with code 3 if a case is, for example, 'slower>5%'.
    force
        Compare across timing methods and regimes.
    """
    if more:
        raise ValueError(f"compare takes two runs, but {2 + len(more)} are given: name two")
    comparison = meshwise.compare(a, b, fail_if=fail_if, force=force)
    from meshwise.pages.compare import table

    emit(comparison, [table(comparison)], json)
    return GATE_FAILED if comparison.failed else DONE
