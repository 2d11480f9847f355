"""``gloo_ranks(n, function, **arguments)``: call a test's function on n joined gloo ranks.

The function takes (ranks, **arguments) and every rank's return value comes back in rank order;
arguments and values are plain data, as JSON (a record is its own JSON, as a string). Ranks are
processes that serve many calls; an error in one ends them all and is raised here with its
traceback. They are forked from one process that has imported torch, because importing it costs a
core five seconds; it has no threads yet.
"""

import contextlib
import gc
import importlib
import importlib.util
import json
import os
import select
import signal
import socket
import subprocess
import sys
import traceback
from multiprocessing.connection import Connection, Pipe, wait

import pytest

from meshwise.ranks import hold_store
from tests.pace import paced

CALL_S = 240.0
TIMEOUT_S = 10.0  # of collectives, where each rank has a core
SETTINGS = {
    "OMP_NUM_THREADS": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
}
IMPORTED = [
    "hypothesis", "pytest", "torch", "torch._dynamo", "torch._inductor.compile_fx",
    "torch.distributed.checkpoint", "torch.distributed.fsdp", "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel", "torch.profiler", "meshwise.engine.train",
    "meshwise.search",
]  # fmt: skip
# Groups stay until their rank ends, and each has threads that wake up 150 times a second: hundreds
# keep a core busy. torch's caches hold meshes, so that groups cannot be left one by one.
MOST_GROUPS = 40


@contextlib.contextmanager
def forking():
    """A process that has imported torch and forks at each message: a rank's pipe and variables."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        process = subprocess.Popen(
            [sys.executable, __file__, str(theirs.fileno())],
            env=os.environ | SETTINGS | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            pass_fds=[theirs.fileno()],
        )
        theirs.close()
        yield ours
    process.wait()


@pytest.fixture(scope="session")
def forks():
    with forking() as forks:
        yield forks


@pytest.fixture(scope="module")
def gloo_ranks(forks):
    """Ranks that a module's tests share, until their meshes have made too many groups."""
    started = _GlooRanks(forks)
    yield started
    for n in list(started.jobs):
        started.end(n)


@pytest.fixture(scope="session")
def plan_of():
    return _plan


def _plan(model, workload, layout, dtype="fp32", lowering="eager"):
    """A plan as the engine needs it; its prediction and sharding say nothing."""
    from meshwise.spec import Cluster, Device, Plan, Prediction, Tier, stages_of

    size = layout.num_devices
    cluster = Cluster(
        name="here",
        num_hosts=1,
        num_devices_per_host=size,
        device=Device(name="cpu", kind="cpu", memory_bytes=2**30),
        tiers=(Tier(name="host", num_devices=size),),
    )
    numbers = ["step_time_s", "low_s", "high_s", "tokens_per_s", "flops_per_device_per_s"]
    numbers += ["peak_memory_bytes", "memory_low_bytes", "memory_high_bytes"]
    return Plan(
        model=model,
        workload=workload,
        cluster=cluster,
        dtype=dtype,
        lowering=lowering,
        layout=layout,
        stages=stages_of(layout, model),
        prediction=Prediction(time_parts=(), memory_parts=(), **dict.fromkeys(numbers, 1.0)),
    )


class _GlooRanks:
    def __init__(self, forks):
        self.forks = forks
        self.jobs = {}

    def __call__(self, n, function, **arguments):
        if n not in self.jobs:
            self.jobs[n] = _Job(self.forks, n)
        order = [function.__code__.co_filename, function.__name__, arguments]
        try:
            values = self.jobs[n].call(json.dumps(order).encode())
        except BaseException:
            self.end(n)
            raise
        if self.jobs[n].groups > MOST_GROUPS:
            self.end(n)
        return values

    def end(self, n):
        """End n ranks that a test left unusable; the next call starts others."""
        if job := self.jobs.pop(n, None):
            job.end()


class _Job:
    """The processes of one group of ranks, each with a pipe to it."""

    def __init__(self, forks, n):
        # held here, as torchrun does, so that no one else can take its port before rank 0 does
        self.store = hold_store()
        self.pipes, self.processes, self.groups = [], [], 0
        for rank in range(n):
            ours, theirs = Pipe()
            place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": n}
            settings = {
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": self.store.port,
                "TORCHELASTIC_USE_AGENT_STORE": True,
                "GLOO_SOCKET_IFNAME": "lo",
            }
            variables = {name: str(value) for name, value in (place | settings).items()}
            message = json.dumps(dict(os.environ) | SETTINGS | variables).encode()
            socket.send_fds(forks, [message], [theirs.fileno()])
            theirs.close()
            self.processes.append(os.pidfd_open(int(forks.recv(16))))
            self.pipes.append(ours)

    def call(self, order):
        for pipe in self.pipes:
            pipe.send_bytes(order)
        replies = {}
        while len(replies) < len(self.pipes):
            waiting = [pipe for pipe in self.pipes if pipe not in replies]
            ready = wait(waiting, paced(CALL_S))
            assert ready, f"ranks {[self.pipes.index(p) for p in waiting]} gave no answer"
            for pipe in ready:
                reply = json.loads(pipe.recv_bytes())
                rank = self.pipes.index(pipe)
                assert "error" not in reply, f"rank {rank}:\n{reply['error']}"
                replies[pipe] = reply["value"]
                self.groups = max(self.groups, reply["groups"])
        return [replies[pipe] for pipe in self.pipes]

    def end(self):
        for process, pipe in zip(self.processes, self.pipes, strict=True):
            if not select.select([process], [], [], 0)[0]:
                signal.pidfd_send_signal(process, signal.SIGKILL)
                select.select([process], [], [])
            os.close(process)
            pipe.close()


def _fork(messages):
    """Fork a rank for each message, until the parent is gone."""
    for name in IMPORTED:
        importlib.import_module(name)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # ended ranks are forgotten
    while True:
        text, pipes, *_ = socket.recv_fds(messages, 2**20, 1)
        if not text:
            os._exit(0)
        if pid := os.fork():
            os.close(*pipes)
            messages.send(str(pid).encode())
            continue
        messages.close()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.environ.clear()
        os.environ.update(json.loads(text))
        try:
            _serve(Connection(*pipes))
        except EOFError:
            os._exit(0)


def _serve(pipe):
    """A rank: join, then answer calls until the parent is gone."""
    from torch.distributed.distributed_c10d import _world

    from meshwise import ranks

    joined = ranks.join(paced(TIMEOUT_S))
    while True:
        file, name, arguments = json.loads(pipe.recv_bytes())
        try:
            value = _load(file)[name](joined, **arguments)
            reply = {"value": value, "groups": len(_world.pg_map)}
        except Exception:
            reply = {"error": traceback.format_exc()}
        pipe.send_bytes(json.dumps(reply).encode())
        gc.collect()  # groups that a test made by itself


def _load(file):
    spec = importlib.util.spec_from_file_location("called", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return vars(module)


if __name__ == "__main__":
    _fork(socket.socket(fileno=int(sys.argv[1])))
