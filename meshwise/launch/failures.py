"""What became of each rank: a small file per rank while it lives, one sentence when it died.

``Fate`` is what a rank writes beside its request: its case, and the error that ended it.
It outlives the rank, so the launcher can say what a killed rank was doing.
"""

import re
import signal
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Literal

import msgspec

from meshwise.spec import Record

# what the survivors of another rank's death report
_COLLATERAL = r"had not arrived|timed out|timeout|closed by peer|reset by peer|broken pipe|refused"


class RanksFailed(RuntimeError):
    """A job ended because of ``rank``; ``details`` is that rank's traceback, if it wrote one."""

    def __init__(self, message: str, rank: int | None = None, details: str = "") -> None:
        super().__init__(message)
        self.rank = rank
        self.details = details

    @property
    def hung(self) -> bool:
        """Whether a rank stayed away, and none died or raised an error of its own."""
        return re.search("had not arrived|had stopped", str(self)) is not None


class Fate(Record, kw_only=True):
    """The last words of a rank."""

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
    """Replace the rank's file whole, so that a reader never sees half of one."""
    path = folder / f"rank-{fate.rank}.json"
    temporary = path.with_suffix(".new")
    temporary.write_bytes(msgspec.json.encode(fate))
    temporary.replace(path)


def read(folder: Path) -> dict[int, Fate]:
    """The fates of all ranks that got as far as writing one."""
    paths = folder.glob("rank-*.json")
    fates = [msgspec.json.decode(path.read_bytes(), type=Fate) for path in paths]
    return {fate.rank: fate for fate in sorted(fates, key=lambda fate: fate.rank)}


def explain(
    fates: Mapping[int, Fate], exit_codes: Mapping[int, int], killed: Collection[int]
) -> RanksFailed:
    """Who died of what: an own error, else a death, else what the survivors said, else a stop,
    else the SIGTERM that one of them got, for which all others get theirs.

    ``exit_codes`` as subprocess gives them (-9 is SIGKILL), in the order in which ranks ended;
    ``killed`` are the ranks that the launcher ended itself because they did not answer.
    """
    failed = sorted((f for f in fates.values() if f.state == "failed"), key=lambda f: f.time_s)
    own = [fate for fate in failed if not fate.collateral]
    silent = {rank for rank, fate in fates.items() if fate.state == "failed"} | set(killed)
    deaths = {
        rank: code
        for rank, code in sorted(exit_codes.items())
        if code not in (0, -signal.SIGTERM) and rank not in silent
    }
    if own:
        cause, message = own[0].rank, own[0].error
    elif deaths:
        cause, code = next(iter(deaths.items()))
        died = f" died of {_signal_name(-code)}" if code < 0 else f" exited with code {code}"
        message = sentence(cause, died, _case(fates, cause))
    elif failed:
        cause, message = failed[0].rank, failed[0].error
    elif killed:
        cause = min(killed)
        message = sentence(cause, " had stopped", _case(fates, cause))
    else:
        cause = next(iter(exit_codes))
        message = sentence(cause, " died of SIGTERM", _case(fates, cause))
    frozen = "".join(f", rank {r} did not answer and was killed" for r in sorted(killed))
    details = fates[cause].details if cause in fates else ""
    return RanksFailed(f"{message}; the other ranks were ended{frozen}", cause, details)


def _case(fates: Mapping[int, Fate], rank: int) -> str:
    return fates[rank].case if rank in fates else ""


def sentence(rank: int, what: str, case: str) -> str:
    """``rank 2 died of SIGKILL during case gemm 4096x4096x4096``."""
    return f"rank {rank}{what} " + (f"during case {case}" if case else "before its first case")


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
