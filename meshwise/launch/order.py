"""The order that every rank gets, and how a rank carries it out: join, call the target, leave."""

import importlib
import os
import traceback
from collections.abc import Callable
from pathlib import Path
from time import time
from typing import TYPE_CHECKING

import msgspec

from meshwise.launch import failures
from meshwise.launch.failed import RanksFailed
from meshwise.launch.failures import Fate
from meshwise.launcher import Job
from meshwise.patience import USUAL, Patience
from meshwise.spec import Record

if TYPE_CHECKING:
    from meshwise.ranks import Ranks

Target = Callable[["Ranks", bytes], None]


class WorkOrder(Record, kw_only=True):
    """An order: the function ``module:name``, its request as JSON, options of ``launch.run``."""

    target: str
    request: msgspec.Raw
    threads: int
    patience: Patience = USUAL
    environment: dict[str, str] = {}


def find(target: str, package: str = "meshwise") -> Target:
    """Return the function ``module:name`` of ``package``. An order cannot name other functions."""
    module, _, name = target.partition(":")
    if module.split(".")[0] != package or not name.isidentifier():
        raise ValueError(f"target = {target!r}: must be {package}.<module>:<function>")
    found: Target = getattr(importlib.import_module(module), name)
    return found


def serve(
    target: Target, request: bytes, patience: Patience, *, note: Callable[[str], None] | None = None
) -> None:
    """Join, call the target with rank 0's request, leave. Any error becomes a RanksFailed that
    names this rank and its case.

    After an error the process should just end: leaving would wait for ranks that never arrive.
    """
    from meshwise import ranks

    rank = Job.here().rank
    joined = None
    try:
        joined = ranks.join(patience.timeout_s, setup_s=patience.setup_s, note=note)
        # under torchrun every rank makes a request: use rank 0's, or they might disagree
        agreed = joined.gather(msgspec.Raw(request) if joined.rank == 0 else None)[0]
        target(joined, msgspec.json.encode(agreed))
        joined.leave()
    except Exception as error:
        told = error if joined is None else joined.explain(error)
        first, *_ = str(told).splitlines() or [""]  # torch adds stacks of its C++ code
        what = f": {type(told).__name__}: {first},"
        message = failures.sentence(rank, what, joined.case if joined else "")
        raise RanksFailed(message, rank, traceback.format_exc()) from error


def run(path: Path, package: str = "meshwise") -> None:
    """Carry out the order in the file ``path`` as the rank that the environment names, and write
    the rank's fate beside it. Any error ends this process with exit code 1."""
    order = msgspec.json.decode(path.read_bytes(), type=WorkOrder)
    fate = Fate(rank=int(os.environ["RANK"]))

    def write(**changes: object) -> None:
        nonlocal fate
        fate = msgspec.structs.replace(fate, **changes)
        failures.write(path.parent, fate)

    write()
    try:
        target = find(order.target, package)
        serve(target, bytes(order.request), order.patience, note=lambda case: write(case=case))
    except Exception as error:
        details = getattr(error, "details", "") or traceback.format_exc()
        write(state="failed", error=str(error), details=details, time_s=time())
        os._exit(1)  # an orderly exit may wait for ranks that are gone
    write(state="done")
