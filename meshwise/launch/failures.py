"""Record how each rank ended: a small file per rank while it lives, one sentence if it dies.

A rank writes its ``Fate`` beside its order: its case, and the error that ended it. The file
outlives the rank, so the launcher can say in which case a rank was killed.
"""

import re
import signal
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Literal

import msgspec

from meshwise import files
from meshwise.launch.failed import RanksFailed
from meshwise.spec import Record

# errors that ranks report because another rank died
_COLLATERAL = r"had not arrived|timed out|timeout|closed by peer|reset by peer|broken pipe|refused"


class Fate(Record, kw_only=True):
    """A rank's last report."""

    rank: int
    state: Literal["running", "done", "failed"] = "running"
    case: str = ""
    error: str = ""
    details: str = ""
    time_s: float = 0.0  # when it failed, on the host's clock

    @property
    def collateral(self) -> bool:
        return re.search(_COLLATERAL, self.error, re.IGNORECASE) is not None


def write(folder: Path, fate: Fate) -> None:
    """Replace the rank's file atomically, so that a reader never sees half of it."""
    path = folder / f"rank-{fate.rank}.json"
    files.write_whole(path, msgspec.json.encode(fate), sync=False)  # it goes with its job


def read(folder: Path) -> dict[int, Fate]:
    """Return the fates of all ranks that wrote one."""
    paths = folder.glob("rank-*.json")
    fates = [msgspec.json.decode(path.read_bytes(), type=Fate) for path in paths]
    return {fate.rank: fate for fate in sorted(fates, key=lambda fate: fate.rank)}


def finished(fates: Mapping[int, Fate]) -> set[int]:
    """Return the ranks whose work is done; they only have to exit."""
    return {rank for rank, fate in fates.items() if fate.state == "done"}


def explain(
    fates: Mapping[int, Fate], codes: Mapping[int, int], killed: Collection[int]
) -> RanksFailed:
    """Return the error that names the rank to blame: the first with an error of its own, else one
    that died, else one with a survivor's error, else one that stopped.

    ``codes``: subprocess's exit codes (-9 is SIGKILL), in the order in which ranks ended, without
    ranks that the launcher told to end. ``killed``: ranks it killed because they did not answer."""
    failed = sorted((f for f in fates.values() if f.state == "failed"), key=lambda f: f.time_s)
    own = [fate for fate in failed if not fate.collateral]
    silent = {fate.rank for fate in failed} | set(killed)
    done = finished(fates)
    deaths = {r: code for r, code in codes.items() if r not in silent and (code or r not in done)}
    if own:
        cause, message = own[0].rank, own[0].error
    elif deaths:
        cause, code = next(iter(deaths.items()))
        died = f" died of {_signal_name(-code)}" if code < 0 else f" exited with code {code}"
        message = sentence(cause, died, _case(fates, cause))
    elif failed:
        cause, message = failed[0].rank, failed[0].error
    else:
        cause = min(killed)
        message = sentence(cause, " had stopped", _case(fates, cause))
    frozen = "".join(f", rank {r} did not answer and was killed" for r in sorted(killed))
    details = fates[cause].details if cause in fates else ""
    return RanksFailed(f"{message}; the other ranks were ended{frozen}", cause, details)


def _case(fates: Mapping[int, Fate], rank: int) -> str:
    return fates[rank].case if rank in fates else ""


def sentence(rank: int, what: str, case: str) -> str:
    """Return ``rank 2 died of SIGKILL during case gemm 4096x4096x4096``."""
    return f"rank {rank}{what} " + (f"during case {case}" if case else "before its first case")


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
