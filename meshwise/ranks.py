"""One rank of a job: its place, how it meets the other ranks, and which of them are missing.

In: the variables that torchrun or srun set. Out: a ``Ranks`` with one process group ("cpu:gloo,
cuda:nccl" on GPUs, else gloo) and a gloo group for agreement, ``control``. There are two limits
(``patience``): set-up (``arrive``, a barrier on the store) and steady state (every collective).
After either, the error names the ranks that had not arrived, each with its case. Every rank keeps
its progress in the store; a rank that is behind is missing. ``jobs.join_at`` makes one ``Ranks`` of
separately launched jobs, such as a trainer and a server.
"""

import contextlib
import ctypes
import fcntl
import functools
import itertools
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar, cast

import msgspec
import torch
import torch.distributed as dist

from meshwise import patience
from meshwise.files import MOST_BYTES, parse_json
from meshwise.launcher import Job, is_loopback
from meshwise.patience import Patience
from meshwise.text import one_line

LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=lo"}  # for ranks of one host
START_S = 1e-3  # longer than ranks take to learn their common start
GRACE_S = 2.0  # ranks of one collective fail this close to each other if each has a core
ABSENT, BEFORE = "had not arrived", "before its first case"
_LOST = r"timed out|timeout|closed by peer|reset by peer|broken pipe"
joins = itertools.count()
_SIOCGIFADDR = 0x8915  # linux/sockios.h
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # malloc.h
T = TypeVar("T")


@dataclass
class Ranks:
    """One joined process. Call ``leave`` at the end; after an error just let the process end."""

    rank: int
    local_rank: int
    world_size: int
    device: torch.device
    backend: str
    store: dist.Store | None = None
    control: dist.ProcessGroup | None = None
    timeout_s: float = patience.STEADY_S
    setup_s: float = patience.SETUP_S
    note: Callable[[str], None] | None = None  # called with each case; keeps it if we die
    case: str = ""
    names: tuple[str, ...] = ()  # names in errors, for ranks of several jobs
    listens: str = ""  # the address at which ``group`` listens; "" leaves it to gloo
    _progress: tuple[int, int] = (0, 0)  # meetings so far, and waits since the last

    @property
    def others(self) -> list[int]:
        return [rank for rank in range(self.world_size) if rank != self.rank]

    def at(self, name: str) -> None:
        """Tell all ranks that this one works on case ``name`` from now on; errors name it."""
        self.case = name
        if self.store is not None:
            self.store.set(f"case/{self.rank}", name)
        if self.note is not None:
            self.note(name)

    def arrive(self, name: str, timeout_s: float | None = None) -> None:
        """Wait for all ranks at a set-up barrier on the store. A TimeoutError names the missing
        ranks and their cases."""
        if self.store is None:
            return
        store, started = self.store, time.monotonic()
        timeout_s = self.setup_s if timeout_s is None else timeout_s
        key = f"arrived/{self._tell(self._progress[0] + 1, 0)}"

        def meet() -> bool:
            if store.add(key, 1) == self.world_size:
                store.set(f"{key}/all", "")
            store.wait([f"{key}/all"], timedelta(seconds=timeout_s))
            return True

        if not asked(meet, timeout_s):
            waited_s = round(time.monotonic() - started, 1)
            raise TimeoutError(self._absence(name, min(timeout_s, waited_s)))

    def barrier(self, what: str = "a barrier") -> None:
        """Wait for all ranks at a steady-state barrier on the control group."""
        if self.control is not None:
            with self._meeting(what):
                # dist.all_reduce loses the error of a group that is not registered: join_at's
                self.control.allreduce([torch.zeros(1)]).wait()

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's value, in rank order, on every rank. Values are sent as JSON."""
        payload = msgspec.json.encode(value)
        if self.control is None:
            return [msgspec.json.decode(payload)]
        with self._meeting("a gather"):
            # gloo cannot gather uneven sizes: agree on the largest, then pad
            sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world_size)]
            self.control.allgather([sizes], [torch.tensor([len(payload)])]).wait()
            largest = max(int(size) for size in sizes)
            if largest > MOST_BYTES:  # raised on all ranks, before memory is allocated
                told = self.name(sizes.index(max(sizes)))
                raise ValueError(
                    f"{told} gathers {largest} bytes, of at most {MOST_BYTES}; give less"
                )
            mine = torch.frombuffer(bytearray(payload.ljust(largest)), dtype=torch.uint8)
            parts = [torch.empty_like(mine) for _ in range(self.world_size)]
            self.control.allgather([parts], [mine]).wait()
        said = (part.numpy().tobytes() for part in parts)
        return [parse_json(text, f"{self.name(r)}: what it gathers") for r, text in enumerate(said)]

    def together(
        self, work: Callable[[], T], told: Callable[[Exception], Any], waits: str = ""
    ) -> tuple[T, list[Any]]:
        """Return this rank's result of ``work``, and each rank's failure or None.

        ``told`` turns an error into the value that all ranks get; if it returns None, the error is
        raised here. ``waits``: name of work that takes ranks very different times; they then meet
        at the set-up barrier.
        """
        result, failure = None, None
        try:
            result = work()
        except Exception as error:
            failure = told(error)
            if failure is None:
                raise
        if waits:
            self.arrive(waits)
        return cast(T, result), self.gather(failure)

    def start_together(self) -> None:
        """Wait at a barrier that the ranks of one host leave within microseconds, by their common
        clock. Ranks of several hosts leave it up to a message's time apart."""
        told = self.gather((socket.gethostname(), time.monotonic()))
        if len({host for host, _ in told}) > 1:
            return
        instant = max(now for _, now in told) + START_S
        while time.monotonic() < instant:
            pass

    def synchronize(
        self,
        what: str = "work on the device",
        event: torch.cuda.Event | None = None,
        *,
        poll_s: float = 5e-5,
    ) -> None:
        """Wait for the device, or for an event. Name missing ranks before NCCL's watchdog acts.

        It polls every ``poll_s``; 0 polls without a pause, which uses a core but adds no delay.
        """
        if self.device.type != "cuda":
            return
        if event is None:
            event = torch.cuda.Event()
            event.record()
        limit = time.monotonic() + 0.8 * self.timeout_s
        while not event.query():
            if self.control is not None and time.monotonic() > limit:
                if asked(self._unheard) != []:
                    raise TimeoutError(self._absence(what, self.timeout_s))
                limit += self.timeout_s  # all ranks wait like this one: the work is long
            time.sleep(poll_s)

    def explain(self, error: Exception) -> Exception:
        """Return the error, or if a collective failed, one that names ranks that do not answer."""
        text = str(error)
        if self.store is None or ABSENT in text or not re.search(_LOST, text, re.IGNORECASE):
            return error
        missing = asked(self._unheard)
        if missing == []:
            return error
        if _timed_out(error):
            return TimeoutError(self._absence("a collective", self.timeout_s))
        told = self._absence("a collective")
        # where the store is lost rank 0 is, which says why itself
        return RuntimeError(told if missing is None else f"{told}: {text.splitlines()[0]}")

    def group(self, name: str) -> Any:  # torch's stubs do not know its methods
        """Make a gloo group of all ranks, not registered with torch.distributed."""
        assert self.store is not None
        store, limit = dist.PrefixStore(name, self.store), timedelta(seconds=self.timeout_s)
        if not self.listens:
            return dist.ProcessGroupGloo(store, self.rank, self.world_size, limit)
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = limit
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=self.listens)]
        return dist.ProcessGroupGloo(store, self.rank, self.world_size, options)

    def leave(self) -> None:
        """Leave the job, together with the others."""
        if self.control is not None:
            self.barrier("the end")
            if not self.names:
                dist.destroy_process_group()
            self.control = self.store = None

    def _unheard(self) -> list[int]:
        """Tell the others that this rank waits in a collective. Return the ranks that neither wait
        there nor have gone past it.

        Ranks that wait in the same collective give up within ``grace_s()`` of each other. A rank
        that is dead, stopped or busy elsewhere stays behind."""
        self._tell(self._progress[0], self._progress[1] + 1)
        limit = time.monotonic() + grace_s()
        while self._missing() and time.monotonic() < limit:
            time.sleep(0.1)
        return self._missing()

    def _tell(self, meeting: int, wait: int) -> int:
        """Tell the others how far this rank is: its meetings, and its waits since the last one."""
        assert self.store is not None
        self._progress = (meeting, wait)
        self.store.set(f"progress/{self.rank}", f"{meeting} {wait}")
        return meeting

    def _missing(self) -> list[int]:
        """Return the ranks that are behind this one."""
        told = [self._read(f"progress/{r}") or "0 0" for r in range(self.world_size)]
        return [r for r, text in enumerate(told) if tuple(map(int, text.split())) < self._progress]

    @contextlib.contextmanager
    def _meeting(self, what: str) -> Iterator[None]:
        self._tell(self._progress[0] + 1, 0)
        try:
            yield
        except RuntimeError as error:
            if not _timed_out(error):
                raise self.explain(error) from None
            asked(self._unheard)  # a rank that stopped after arriving does not say that it waits
            raise TimeoutError(self._absence(what, self.timeout_s)) from None

    def _absence(self, what: str, waited_s: float | None = None) -> str:
        who = asked(self._who) or f"{self.name(0)} (its store does not answer)"
        return f"{who} {ABSENT} at {what}" + (f" after {waited_s:g} s" if waited_s else "")

    def _who(self) -> str:
        missing = self._missing()
        told = []
        for rank in missing[:8]:
            case = self._read(f"case/{rank}")
            told.append(f"{self.name(rank)} ({f'in case {case}' if case else BEFORE})")
        told += [f"{len(missing) - 8} more"] if len(missing) > 8 else []
        return ", ".join(told) or "a rank that answers by now"

    def name(self, rank: int) -> str:
        return self.names[rank] if self.names else f"rank {rank}"

    def _read(self, key: str) -> str:
        assert self.store is not None
        return plain(self.store.get(key)) if self.store.check([key]) else ""


def join(
    timeout_s: float | None = None,
    *,
    setup_s: float | None = None,
    note: Callable[[str], None] | None = None,
) -> Ranks:
    """Join the job that torchrun, srun or ``meshwise.launch`` started this process in."""
    job = Job.here()
    if not job.launched:
        raise ValueError("no launcher started this process; use meshwise.launch.run or torchrun")
    device = device_of(job)
    here = job.world_size // job.num_hosts
    timeout_s, setup_s = Patience(timeout_s, setup_s).limits(here)
    if job.num_hosts > 1 and not is_loopback(job.host):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", _interface(job.host))
    # a verb may join more than once in one process, each time with new keys
    earlier = next(joins)
    store = dist.PrefixStore(f"meshwise/{earlier}", _store(job, setup_s))
    ranks = Ranks(
        rank=job.rank,
        local_rank=job.local_rank,
        world_size=job.world_size,
        device=device,
        backend="nccl" if device.type == "cuda" else "gloo",
        store=store,
        timeout_s=timeout_s,
        setup_s=setup_s,
        note=note,
    )
    ranks.arrive("the start")
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        store=dist.PrefixStore("group", store),
        rank=ranks.rank,
        world_size=ranks.world_size,
        timeout=timedelta(seconds=timeout_s),
        # with it, meshes split their groups off the world; torch 2.11 crashes there unless the
        # world is the first of this process (pytorch/pytorch#192109)
        device_id=device if device.type == "cuda" and not earlier else None,
    )
    ranks.control = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
    if device.type == "cpu":
        _keep_freed_memory()
    return ranks


def _keep_freed_memory() -> None:
    """Have glibc keep freed memory for what is allocated next, as GPUs' caching allocators do. By
    default every tensor over 32 MiB is mapped, and cleared by the kernel, anew at each step."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(_M_MMAP_MAX, 0)
        libc.mallopt(_M_TRIM_THRESHOLD, -1)


def _interface(host: str) -> str:
    """Return the interface by which this host reaches ``host``, or which has its address. Gloo's
    own choice is the interface of this host's name, for many hosts the loopback's."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as there:
        with contextlib.suppress(OSError):  # not of IPv4
            there.connect((host, 1))  # sends nothing
        own = there.getsockname()[0]
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # one without an address
                told = fcntl.ioctl(there, _SIOCGIFADDR, name.encode().ljust(256, b"\0"))
                if socket.inet_ntoa(told[20:24]) == own:
                    return name
    return ""


def alone(device: str | torch.device = "cpu") -> Ranks:
    """Return a job of one rank without a process group."""
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    backend = "nccl" if device.type == "cuda" else "gloo"
    return Ranks(rank=0, local_rank=0, world_size=1, device=device, backend=backend)


def _store(job: Job, setup_s: float) -> dist.TCPStore:
    # torchrun and meshwise.launch hold the store in the agent, so that it outlives rank 0
    held = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    master = job.rank == 0 and not held
    if master and is_loopback(job.host):
        return _held_store(job.host, job.port)
    return open_store(job.host, job.port, master, setup_s, "rank 0 or its launcher")


def hold_store(host: str = "127.0.0.1", port: int = 0) -> dist.TCPStore:
    """Hold a store that listens only at ``host``. Given an address, TCPStore would listen on all
    interfaces."""
    listening = socket.create_server((host, port), backlog=1024)
    return dist.TCPStore(
        host,
        listening.getsockname()[1],
        is_master=True,
        wait_for_workers=False,
        master_listen_fd=listening.detach(),
    )


_held_store = functools.cache(hold_store)  # kept open for the life of the process


def grace_s() -> float:
    """Return how many seconds apart ranks may fail in one collective, at this machine's current
    load. It is well below the 30 s after which launchers kill ranks that have not ended."""
    return min(10.0, GRACE_S * patience.turns())


def connect(host: str, port: int, master: bool, setup_s: float, who: str) -> dist.TCPStore:
    try:
        return within(
            lambda: dist.TCPStore(
                host,
                port,
                is_master=master,
                wait_for_workers=False,
                timeout=timedelta(seconds=setup_s),
                multi_tenant=True,
            ),
            setup_s + grace_s(),
        )
    except dist.DistError as error:
        reason = plain(str(error).partition("\n")[0])
    except TimeoutError:  # the constructor waits forever for a first answer
        reason = "what listens there says nothing"
    raise TimeoutError(f"{who} {ABSENT}: their store at {host}:{port} does not answer: {reason}")


open_store = functools.cache(connect)  # kept open for the life of the process


def asked(ask: Callable[[], T], waits_s: float = 0.0) -> T | None:
    """Ask the store; return None if it does not answer. Its client cannot be interrupted, and waits
    forever for a store whose process has stopped."""
    with contextlib.suppress(dist.DistError, TimeoutError):
        return within(ask, waits_s + 2 * grace_s())
    return None


def within(call: Callable[[], T], limit_s: float) -> T:
    """Call in a thread. Raises a TimeoutError if that takes longer; the thread is then abandoned,
    and does not keep the process alive."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future.result(limit_s)


def plain(told: str | bytes) -> str:
    """Return another process's text for a line of an error: printable, at most 300 characters."""
    return one_line(told.decode(errors="replace") if isinstance(told, bytes) else told)


def device_of(job: Job) -> torch.device:
    """Return the GPU of this rank, or the CPU if no GPU is visible."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count == 0:
        return torch.device("cpu")
    # srun --gpus-per-task=1 shows each task its own GPU, as number 0
    own = count == 1 and "SLURM_PROCID" in os.environ
    index = 0 if own else job.local_rank
    if index >= count:
        raise ValueError(
            f"local rank {index} has no GPU: {count} visible; start at most {count} ranks a host, "
            "or set CUDA_VISIBLE_DEVICES= to use the CPU"
        )
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def _timed_out(error: Exception) -> bool:
    return isinstance(error, TimeoutError) or bool(re.search("timed out|timeout", str(error), re.I))
