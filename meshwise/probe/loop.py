"""The loop over cases. All ranks measure one case after another, and save each finished one.

In: cases, and a function that measures one. Out: one ``Sample`` for each case in the run directory,
which rank 0 writes at once. A case that cannot be measured is a sample too: out of memory on one
rank is ``oom`` on all, a missing back end ``skipped``, any other failure ``error``. A failed
transfer ends the job, since the ranks no longer know each other's state. ``current.json`` in the
run directory then names the case.

Rank 0 decides which case comes next: the first that fits the budget; one that would take much of it
waits (``effort.next_of``). A case passed over leaves no sample, so a resumed run measures it.
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple, TypeVar

import msgspec
import torch

from meshwise import store, timing
from meshwise.probe.progress import Pace, Progress
from meshwise.probe.request import CURRENT
from meshwise.probe.work import Unavailable
from meshwise.ranks import Ranks
from meshwise.spec import Case, Sample
from meshwise.spec.label import label

T = TypeVar("T")
Metrics = dict[str, float | tuple[float, ...]]
Status = Literal["oom", "skipped", "error"]


class Failed(Exception):
    """A case that cannot be measured, raised on all ranks. ``lost``: some ranks may still wait in
    its transfers."""

    def __init__(
        self, status: Status, reason: str, metrics: Metrics | None = None, lost: bool = False
    ) -> None:
        super().__init__(reason)
        self.status, self.reason, self.metrics, self.lost = status, reason, metrics or {}, lost


class Outcome(NamedTuple):
    """The sample of a case. ``lost``: no other case can follow."""

    sample: Sample
    lost: bool = False


def together(ranks: Ranks, work: Callable[[], T], *, transfers: bool = False, waits: str = "") -> T:
    """Return this rank's result of ``work``. A failure on one rank raises Failed on all.

    ``transfers``: other ranks may wait for this one. So only a lack of memory, a missing back end
    or a ValueError becomes Failed; any other error ends the job. ``waits``: see ``Ranks.together``.
    """

    def told(error: Exception) -> tuple[Status, str] | None:
        status: Status = "oom" if timing.is_out_of_memory(error) else "error"
        if isinstance(error, Unavailable):
            status = "skipped"
        if transfers and status == "error" and not isinstance(error, ValueError):
            return None
        return status, first_line(error)

    result, failures = ranks.together(work, told, waits)
    failed = [rank for rank, failure in enumerate(failures) if failure is not None]
    if failed:
        status, reason = failures[failed[0]]
        reason = reason if status == "skipped" else f"rank {failed[0]}: {reason}"
        raise Failed(status, reason, lost=transfers and len(failed) < len(failures))
    return result


def first_line(error: Exception) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__


def outcome(
    case: Case,
    measure: Callable[[], tuple[timing.Timed, Metrics, str]],
    known: Metrics | None = None,
) -> Outcome:
    """Make a sample of what ``measure`` returns: times, metrics, a remark. ``known``: metrics known
    before; a sample of a failure has them too."""
    sample = partial(Sample, case_id=case.id, case=case, method_version=timing.METHOD_VERSION)
    known = known or {}
    try:
        timed, metrics, remark = measure()
    except Failed as failed:
        metrics = known | failed.metrics
        found = sample(status=failed.status, reason=failed.reason, metrics=metrics)
        return Outcome(found, failed.lost)
    except torch.OutOfMemoryError as error:  # from the timing loop, on all ranks
        return Outcome(sample(status="oom", reason=first_line(error), metrics=known))
    return Outcome(
        sample(
            status="ok",
            reason=remark,
            times_s=timed.times_s,
            rank_times_s=timed.rank_times_s,
            metrics=known | metrics,
            before=timed.before,
            after=timed.after,
        )
    )


def measure_all(
    ranks: Ranks,
    run_dir: str,
    cases: Sequence[Case],
    measure: Callable[[Case], Outcome],
    *,
    estimate_s: Callable[[Case], float],
    budget_s: float | None = None,
    follow: Callable[[], list[Case]] = list,
) -> str:
    """Measure the cases, then round by round those that ``follow``. Say how many are left, or "".
    Nothing follows once a case did not fit the budget. All ranks must pass the same cases."""
    todo, missed, folder = list(cases), 0, Path(run_dir)
    pace = Pace(estimate_s, todo, budget_s) if ranks.rank == 0 else None  # only rank 0 decides
    with Progress(len(todo), visible=pace is not None) as progress:
        while todo:
            while todo:
                index = ranks.gather(pace.next(todo) if pace else None)[0]
                if index is None:
                    missed += len(todo)
                    break
                case = todo.pop(index)
                ranks.at(label(case))
                if pace:
                    store.write(folder / CURRENT, case)
                sample, lost = measure(case)
                if pace:
                    store.append(folder, sample)
                    pace.done(case)
                    progress.end(sample, pace.remaining_s())
                if lost:
                    ranks.barrier("the record of a failure")
                    raise RuntimeError(f"{sample.reason}; the other ranks wait for it")
            if pace:
                (folder / CURRENT).unlink(missing_ok=True)
            more = follow() if pace and not missed else []
            replies = ranks.gather([msgspec.Raw(msgspec.json.encode(case)) for case in more])
            todo = msgspec.convert(replies[0], list[Case])
            progress.add(len(todo))
            if pace:
                pace.add(todo)
    if not missed:
        return ""
    return f"budget: {missed} of {progress.total} cases not measured; --resume continues"
