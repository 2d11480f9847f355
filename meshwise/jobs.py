"""Jobs that were launched apart, a trainer and a server say, as one; and a job joined elsewhere.

Out: a ``Ranks`` over all processes. Each job keeps its own default group.
"""

import atexit
import contextlib
import functools
import os
import socket
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import cast

import msgspec
import torch
import torch.distributed as dist

from meshwise import ranks
from meshwise.ranks import Environment, Ranks


def join_at(
    address: str,
    job: str,
    jobs: Sequence[str],
    *,
    timeout_s: float = ranks.STEADY_S,
    setup_s: float = ranks.SETUP_S,
) -> Ranks:
    """Join jobs that were launched apart at ``address``, host:port: one ``Ranks`` over them all.

    ``jobs`` names every job, alike in each, ``job`` this process's own; ranks are numbered job by
    job. Rank 0 of the first holds the store, on the address's host. Default groups stay as they
    are, and ``control`` is none that ``dist.isend`` would take: call ``control.send`` itself. Jobs
    may meet at one address again, also when others than the first were started anew.
    ValueError in all jobs if they disagree, TimeoutError that names who did not come.
    """
    host, _, port = address.rpartition(":")
    if not host or not (port.isdecimal() and port.isascii() and 0 < int(port) < 2**16):
        raise ValueError(f"address = {address!r}: must be host:port, for example node1:29600")
    if not jobs:
        raise ValueError("jobs = []: name every job, for example trainer and server")
    place = _place_in_job()
    opens = job == jobs[0] and place["rank"] == 0
    store = _meeting_point(host, int(port), opens, f"{jobs[0]} rank 0", setup_s)
    came = ranks.asked(lambda: _meet_jobs(store, opens, place, job, list(jobs), setup_s), setup_s)
    if came is None:
        raise TimeoutError(
            f"{jobs[0]} rank 0 (its store does not answer) {ranks.ABSENT} at the start"
        )
    if isinstance(came, Exception):
        raise came
    meeting, sizes = came
    names = [f"{name} rank {r}" for name, size in sizes.items() for r in range(size)]
    rank, device = names.index(f"{job} rank {place['rank']}"), ranks.device_of(place)
    control = dist.ProcessGroupGloo(
        dist.PrefixStore("group", meeting), rank, len(names), timedelta(seconds=timeout_s)
    )
    return Ranks(
        rank=rank,
        local_rank=place["local_rank"],
        world_size=len(names),
        device=device,
        backend="nccl" if device.type == "cuda" else "gloo",
        store=dist.PrefixStore("ranks", meeting),
        control=cast(dist.ProcessGroup, control),  # of another class with the same methods
        timeout_s=timeout_s,
        names=tuple(names),
    )


def _place_in_job() -> Environment:
    """What the default group or the launcher says; a process with neither is a job of one."""
    place = ranks.environment() or ranks.environment({"RANK": "0", "WORLD_SIZE": "1"})
    assert place is not None
    if dist.is_initialized():
        place["rank"], place["world_size"] = dist.get_rank(), dist.get_world_size()
        if torch.cuda.is_available():
            place["local_rank"] = torch.cuda.current_device()
    return place


def _meeting_point(host: str, port: int, opens: bool, who: str, setup_s: float) -> dist.TCPStore:
    """The store where jobs meet. Its holder keeps it; others connect anew: it may be a new one."""
    started = time.monotonic()
    if opens:
        with contextlib.suppress(TimeoutError):  # taken: the jobs disagree about who is first
            return ranks.open_store(host, port, True, setup_s, who)
    return ranks.connect(host, port, False, max(1.0, started + setup_s - time.monotonic()), who)


def _meet_jobs(
    store: dist.Store, opens: bool, place: Environment, job: str, jobs: list[str], setup_s: float
) -> tuple[dist.Store, dict[str, int]] | Exception:
    """The meeting's own keys and each job's size when all are there, else what to raise.

    A meeting is open until all are there. One that was refused stays so until the next is opened.
    """
    limit = time.monotonic() + setup_s
    token = f"{socket.gethostname()} {os.getpid()}"
    if opens := opens and store.compare_set("opener", "", token) == token.encode():
        store.set("open", str(store.add("meetings", 1)))
    try:
        store.wait(["open"], timedelta(seconds=setup_s))
    except dist.DistError:
        return TimeoutError(
            f"{jobs[0]} rank 0 {ranks.ABSENT} at the start: it did not open the meeting"
        )
    meeting = dist.PrefixStore(f"meeting/{store.get('open').decode()}", store)
    refusal = _enter(meeting, place, job, jobs)
    if not refusal and not _not_come(meeting, jobs):
        store.delete_key("open")  # who comes now comes to the next meeting
        meeting.set("over", "")
    elif not refusal:
        with contextlib.suppress(dist.DistError):
            meeting.wait(["over"], timedelta(seconds=max(0.1, limit - time.monotonic())))
        missing = ", ".join(_not_come(meeting, jobs))
        refusal = missing and f"{missing} {ranks.ABSENT} at the start after {setup_s:g} s"
    if refusal:
        meeting.compare_set("refused", "", refusal)
        meeting.set("over", "")
    if meeting.check(["refused"]):
        reason = meeting.get("refused").decode()
        time.sleep(ranks.GRACE_S if opens else 0.0)  # the store may end with this process
        return TimeoutError(reason) if ranks.ABSENT in reason else ValueError(reason)
    return meeting, {name: int(meeting.get(f"size/{name}")) for name in jobs}


def _enter(meeting: dist.Store, place: Environment, job: str, jobs: list[str]) -> str:
    """Tell the others that this rank is there; why the meeting cannot be, or nothing."""
    me, size = f"{job} rank {place['rank']}", place["world_size"]
    told = msgspec.json.encode(jobs).decode()
    agreed = msgspec.json.decode(meeting.compare_set("jobs", "", told))
    if agreed != jobs or job not in jobs or len(set(jobs)) < len(jobs):
        return (
            f"{me} came with jobs = {jobs}, another rank with {agreed}: give all ranks of all jobs "
            "the same names, each once, their own among them"
        )
    agreed = int(meeting.compare_set(f"size/{job}", "", str(size)))
    if agreed != size:
        return f"{me} came as one of {size} ranks, another as one of {agreed}: two jobs of one name"
    if meeting.add(f"{me}/came", 1) > 1:
        return f"{me} came twice: two jobs have one name, or a process joined again by itself"
    meeting.add(f"came/{job}", 1)
    return ""


def _not_come(meeting: dist.Store, jobs: list[str]) -> list[str]:
    """Ranks that are not there, the first few; of a job of unknown size the job."""
    missing: list[str] = []
    for job in jobs:
        if not meeting.check([f"size/{job}"]):
            missing.append(f"{job} (none of its ranks)")
        elif meeting.add(f"came/{job}", 0) < (size := int(meeting.get(f"size/{job}"))):
            here = [f"{job} rank {r}" for r in range(size)]
            missing += [name for name in here if not meeting.check([f"{name}/came"])]
    return missing if len(missing) <= 8 else [*missing[:8], f"{len(missing) - 8} more"]


def attached(timeout_s: float = ranks.STEADY_S) -> Ranks:
    """The job that this process joined by torch.distributed itself, its groups left as they are.

    ValueError where it joined none, or where no launcher says how to reach the store.
    """
    place = ranks.environment()
    if not dist.is_initialized() or place is None:
        raise ValueError(
            "this process has joined no job; call meshwise.ranks.join() under torchrun or srun"
        )
    return _attached(dist.group.WORLD, timeout_s)


@functools.cache
def _attached(world: dist.ProcessGroup, timeout_s: float) -> Ranks:
    """Made once for a group: its control group and its keys in the store stay."""
    place = ranks.environment()
    assert place is not None
    joined = Ranks(
        rank=world.rank(),
        local_rank=place["local_rank"],
        world_size=world.size(),
        device=ranks.device_of(place),
        backend=dist.get_backend(),
        store=dist.PrefixStore(
            f"meshwise/{next(ranks.joins)}",
            ranks.open_store(place["host"], place["port"], False, ranks.SETUP_S, "rank 0"),
        ),
        control=dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s)),
        timeout_s=timeout_s,
    )
    atexit.register(_let_go, joined)
    return joined


def _let_go(joined: Ranks) -> None:
    """A group that lives until Python itself is taken down may end its process by SIGABRT."""
    joined.control = joined.store = None
    _attached.cache_clear()
