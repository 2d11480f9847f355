"""Join jobs that were launched separately, such as a trainer and a server; or use a joined job.

Out: a ``Ranks`` over all processes. Each job keeps its own default group. All participants know the
jobs' secret (``secret``); nobody else can read or write a key (``meeting``).
"""

import atexit
import contextlib
import dataclasses
import errno
import functools
import os
import re
import socket
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec
import torch
import torch.distributed as dist

from meshwise import meeting, ranks, secret
from meshwise.launcher import Job
from meshwise.patience import Patience
from meshwise.ranks import Ranks

T = TypeVar("T")
Size = Annotated[int, msgspec.Meta(ge=1, le=1_000_000)]


def join_at(
    address: str,
    job: str,
    jobs: Sequence[str],
    *,
    secret_file: Path | str | None = None,
    bind: str = "",
    timeout_s: float | None = None,
    setup_s: float | None = None,
) -> Ranks:
    """Join separately launched jobs at ``address``, host:port. Return one ``Ranks`` over them all.

    ``jobs``: the names of all jobs, the same in each. ``job``: this process's job. Ranks are
    numbered job by job. Rank 0 of the first job holds the store, on the address's host, and listens
    there or at ``bind``. All give the same secret: in ``secret_file``, in MESHWISE_SECRET_FILE's
    file, in MESHWISE_SECRET, or in ~/.meshwise/secret, which is made at its first use. Default
    groups stay as they are. ``dist.isend`` does not take ``control``: call ``control.send`` itself.
    Jobs may meet at one address again, also if jobs other than the first were restarted.
    If jobs disagree, all raise a ValueError. A TimeoutError names the ranks that did not arrive.
    """
    timeout_s, setup_s = Patience(timeout_s, setup_s).limits()
    limit = time.monotonic() + setup_s
    host, port = _host_and_port(address)
    _check_names(job, jobs)
    word = secret.read(secret_file)
    place = _place_in_job()
    opens = job == jobs[0] and place.rank == 0
    if opens:
        _hold(bind or host, port, word, address)
    first = f"{jobs[0]} rank 0"
    store = meeting.connect(host, port, word, max(0.1, limit - time.monotonic()), first)
    came = ranks.asked(
        lambda: _meet_jobs(store, opens, place, job, list(jobs), setup_s, limit),
        max(0.0, limit - time.monotonic()),
    )
    if came is None:
        raise TimeoutError(f"{first} (its store does not answer) {ranks.ABSENT} at the start")
    if isinstance(came, Exception):
        time.sleep(ranks.grace_s() if opens else 0.0)  # the store may end with this process
        raise came
    met, sizes = came
    names = [f"{name} rank {r}" for name, size in sizes.items() for r in range(size)]
    device = ranks.device_of(place)
    joined = Ranks(
        rank=names.index(f"{job} rank {place.rank}"),
        local_rank=place.local_rank,
        world_size=len(names),
        device=device,
        backend="nccl" if device.type == "cuda" else "gloo",
        store=dist.PrefixStore("ranks", met),
        timeout_s=timeout_s,
        setup_s=setup_s,
        names=tuple(names),
        listens=_listens(host, store),
    )
    joined.control = joined.group("group")
    return joined


def _check_names(job: str, jobs: Sequence[str]) -> None:
    if not jobs:
        raise ValueError("jobs = []: name every job, for example trainer and server")
    for name in (job, *jobs):
        if not re.fullmatch(r"[\w.+-]{1,64}", name):
            raise ValueError(f"job = {name!r}: 1 to 64 letters, digits, . _ + -")


def _host_and_port(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    with contextlib.suppress(ValueError):  # of names that are too long or have other characters
        if host.encode("idna") and port.isascii() and port.isdecimal() and 0 < int(port) < 2**16:
            return host, int(port)
    raise ValueError(f"address = {address!r}: must be host:port, for example node1:29600")


def _hold(host: str, port: int, word: bytes, address: str) -> None:
    """Hold the store, unless another does: jobs that disagree about the first then notice."""
    try:
        meeting.hold(host, port, word)
    except ValueError as error:
        raise ValueError(
            f"address = {address!r}: {error}; give an address of the first job's rank 0 that all "
            "hosts reach, or bind=, the one to listen at (0.0.0.0: all)"
        ) from None
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            reason = ranks.plain(error.strerror or str(error))
            raise ValueError(f"address = {address!r}: cannot listen there: {reason}") from None


def _listens(host: str, store: meeting.MeetingStore) -> str:
    """Return the address where gloo's sockets listen: the one from which this process reached the
    store. Return "" if the user named an interface, or if the address is a loopback one that only
    stands for the host's own name: other hosts know it by another address.
    """
    own = str(store.connection.getsockname()[0])
    if os.environ.get("GLOO_SOCKET_IFNAME") or (
        meeting.is_loopback(own) and not meeting.is_loopback(host)
    ):
        return ""
    return own


def _place_in_job() -> Job:
    """Return this process's place, from the default group or else the launcher. A process with
    neither is a job of one."""
    place = Job.here()
    if not dist.is_initialized():
        return place
    on_gpu = torch.cuda.is_available()
    return dataclasses.replace(
        place,
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        local_rank=torch.cuda.current_device() if on_gpu else place.local_rank,
    )


def _meet_jobs(
    store: dist.Store,
    opens: bool,
    place: Job,
    job: str,
    jobs: list[str],
    setup_s: float,
    limit: float,
) -> tuple[dist.Store, dict[str, int]] | Exception:
    """Return the meeting's keys and each job's size when all are there, or the error to raise.

    A meeting is open until all ranks are there. A refused one stays refused until the next opens.
    """
    token = f"{socket.gethostname()} {os.getpid()}"
    if opens and store.compare_set("opener", "", token) == token.encode():
        store.set("open", str(store.add("meetings", 1)))
    try:
        store.wait(["open"], timedelta(seconds=max(0.1, limit - time.monotonic())))
    except dist.DistStoreError:
        return TimeoutError(
            f"{jobs[0]} rank 0 {ranks.ABSENT} at the start: it did not open the meeting"
        )
    met = dist.PrefixStore(f"meeting/{_told(store, 'open', Size)}", store)
    refusal = _enter(met, place, job, jobs)
    if not refusal and not _not_come(met, jobs):
        store.delete_key("open")  # later ranks join the next meeting
        met.set("over", "")
    elif not refusal:
        with contextlib.suppress(dist.DistStoreError):
            met.wait(["over"], timedelta(seconds=max(0.1, limit - time.monotonic())))
        missing = ", ".join(_not_come(met, jobs))
        refusal = missing and f"{missing} {ranks.ABSENT} at the start after {setup_s:g} s"
    if refusal:
        met.compare_set("refused", "", refusal)
        met.set("over", "")
    if met.check(["refused"]):
        reason = met.get("refused")
        kind = TimeoutError if ranks.ABSENT.encode() in reason else ValueError
        return kind(ranks.plain(reason))
    return met, {name: _told(met, f"size/{name}", Size) for name in jobs}


def _told(store: dist.Store, key: str, kind: type[T], told: bytes | None = None) -> T:
    """Read another process's value under ``key``. Raises a ValueError if its type is wrong."""
    told = store.get(key) if told is None else told
    try:
        return msgspec.json.decode(told, type=kind)
    except msgspec.MsgspecError:
        raise ValueError(f"another process told {ranks.plain(told)!r} as {key}") from None


def _enter(met: dist.Store, place: Job, job: str, jobs: list[str]) -> str:
    """Tell the others that this rank is there. Return why the meeting is refused, or ""."""
    me, size = f"{job} rank {place.rank}", place.world_size
    mine = msgspec.json.encode(jobs).decode()
    agreed = _told(met, "jobs", list[str], met.compare_set("jobs", "", mine))
    if agreed != jobs or job not in jobs or len(set(jobs)) < len(jobs):
        return (
            f"{me} came with jobs = {jobs}, another rank with {agreed}: give all ranks of all jobs "
            "the same names, each once, their own among them"
        )
    key = f"size/{job}"
    sizes = _told(met, key, Size, met.compare_set(key, "", str(size)))
    if sizes != size:
        return f"{me} came as one of {size} ranks, another as one of {sizes}: two jobs of one name"
    if met.add(f"{me}/came", 1) > 1:
        return f"{me} came twice: two jobs have one name, or a process joined again by itself"
    met.add(f"came/{job}", 1)
    return ""


def _not_come(met: dist.Store, jobs: list[str]) -> list[str]:
    """Return the first few missing ranks; of a job of unknown size the job's name."""
    missing: list[str] = []
    for job in jobs:
        if not met.check([f"size/{job}"]):
            missing.append(f"{job} (none of its ranks)")
        elif met.add(f"came/{job}", 0) < (size := _told(met, f"size/{job}", Size)):
            here = [f"{job} rank {r}" for r in range(size)]
            missing += [name for name in here if not met.check([f"{name}/came"])]
    return missing if len(missing) <= 8 else [*missing[:8], f"{len(missing) - 8} more"]


def attached() -> Ranks:
    """Return the job that this process joined through torch.distributed. Its groups stay unchanged.

    Raises a ValueError if it joined none, or if no launcher says how to reach the store.
    """
    if not (dist.is_initialized() and Job.here().launched):
        raise ValueError(
            "this process has joined no job; call meshwise.ranks.join() under torchrun or srun"
        )
    return _attached(dist.group.WORLD)


@functools.cache
def _attached(world: dist.ProcessGroup) -> Ranks:
    """Make a group's ``Ranks`` once: its control group and its keys in the store stay."""
    place = Job.here()
    timeout_s, setup_s = Patience().limits(place.world_size // place.num_hosts)
    joined = Ranks(
        rank=world.rank(),
        local_rank=place.local_rank,
        world_size=world.size(),
        device=ranks.device_of(place),
        backend=dist.get_backend(),
        store=dist.PrefixStore(
            f"meshwise/{next(ranks.joins)}",
            ranks.open_store(place.host, place.port, False, setup_s, "rank 0"),
        ),
        control=dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s)),
        timeout_s=timeout_s,
        setup_s=setup_s,
    )
    atexit.register(_let_go, joined)
    return joined


def _let_go(joined: Ranks) -> None:
    """Drop the group at exit: one that lives until Python shuts down may raise SIGABRT."""
    joined.control = joined.store = None
    _attached.cache_clear()
