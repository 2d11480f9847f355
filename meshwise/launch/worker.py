"""One rank's process: ``python -m meshwise.launch.worker <request.json>``.

Joins the job, calls the target that the request names, and leaves its fate beside the request.
Standard output belongs to the parent's documents, so a rank's goes to standard error.
"""

import ctypes
import importlib
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from meshwise.launch import failures
from meshwise.launch.failures import Fate, RanksFailed
from meshwise.spec import Record

if TYPE_CHECKING:
    from meshwise.ranks import Ranks

Target = Callable[["Ranks", bytes], None]

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


class Errand(Record, kw_only=True):
    """What every rank of a job is told: the function ``module:name`` and its request."""

    target: str
    request: msgspec.Raw
    threads: int
    timeout_s: float
    environment: dict[str, str] = {}


def find(target: str, package: str = "meshwise") -> Target:
    """The function ``module:name`` of ``package``. A request file cannot name any other."""
    module, _, name = target.partition(":")
    if module.split(".")[0] != package or not name.isidentifier():
        raise ValueError(f"target = {target!r}: must be {package}.<module>:<function>")
    found: Target = getattr(importlib.import_module(module), name)
    return found


def serve(
    target: Target,
    request: bytes,
    *,
    timeout_s: float,
    setup_s: float = 600.0,
    note: Callable[[str], None] | None = None,
) -> None:
    """Join, call with rank 0's request, leave. Any error becomes a RanksFailed that names this
    rank and its case.

    After an error the process should just end: leaving would wait for ranks that do not come.
    """
    from meshwise import ranks

    place = ranks.environment()
    assert place is not None
    joined = None
    try:
        joined = ranks.join(timeout_s, setup_s=setup_s, note=note)
        # under torchrun every rank makes a request; one must count, or they would disagree
        agreed = joined.gather(msgspec.Raw(request) if joined.rank == 0 else None)[0]
        target(joined, msgspec.json.encode(agreed))
        joined.leave()
    except Exception as error:
        told = error if joined is None else joined.explain(error)
        first, *_ = str(told).splitlines() or [""]  # torch adds stacks of its C++ code
        what = f": {type(told).__name__}: {first},"
        message = failures.sentence(place["rank"], what, joined.case if joined else "")
        raise RanksFailed(message, place["rank"], traceback.format_exc()) from error


def main(request_path: str, package: str = "meshwise") -> None:
    """One rank of a job that ``launch.local`` started; it ends with exit code 1 on any error."""
    os.dup2(2, 1)
    _end_with_parent()
    path = Path(request_path)
    errand = msgspec.json.decode(path.read_bytes(), type=Errand)
    os.environ["OMP_NUM_THREADS"] = str(errand.threads)
    for variable, value in errand.environment.items():
        os.environ[variable] = value.replace("{rank}", os.environ["RANK"])
    # the store's C++ code warns of every timeout that we report ourselves
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler tells of every start and stop
    # all ranks are on this host: gloo need not ask the resolver for our own name
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    fate = Fate(rank=int(os.environ["RANK"]))
    failures.write(path.parent, fate)

    def note(case: str) -> None:
        nonlocal fate
        fate = msgspec.structs.replace(fate, case=case)
        failures.write(path.parent, fate)

    try:
        serve(
            find(errand.target, package),
            bytes(errand.request),
            timeout_s=errand.timeout_s,
            setup_s=errand.timeout_s,  # ranks of one host start within seconds of each other
            note=note,
        )
    except Exception as error:
        details = getattr(error, "details", "") or traceback.format_exc()
        ended = msgspec.structs.replace(
            fate, state="failed", error=str(error), details=details, time_s=time.time()
        )
        failures.write(path.parent, ended)
        os._exit(1)  # an orderly exit may wait for ranks that are gone
    failures.write(path.parent, msgspec.structs.replace(fate, state="done"))


def _end_with_parent() -> None:
    """Ctrl-C ends a rank at once, also in the middle of a collective; so does the parent's end."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1])
