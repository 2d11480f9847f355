"""``gloo_ranks(n, function, **arguments)``: call a test's function on n joined gloo ranks.

The function takes (ranks, **arguments) and every rank's return value comes back in rank order;
arguments and values are plain data, as JSON (a record is its own JSON, as a string). Ranks are
processes that serve many calls, because starting them costs seconds; an error in one ends them
all and is raised here with its traceback.
"""

import gc
import importlib.util
import itertools
import json
import os
import subprocess
import sys
import traceback
from multiprocessing.connection import Connection, Pipe, wait

import pytest

from meshwise.ranks import hold_store
from tests.pace import paced

CALL_S = 240.0
TIMEOUT_S = 10.0  # of collectives, where each rank has a core
# Groups stay until their rank ends, and each has threads that wake up 150 times a second: hundreds
# keep a core busy. torch's caches hold meshes, so that groups cannot be left one by one.
MOST_GROUPS = 40


@pytest.fixture(scope="module")
def gloo_ranks():
    """Ranks that a module's tests share, until their meshes have made too many groups."""
    started = _GlooRanks()
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
    def __init__(self):
        self.jobs = {}

    def __call__(self, n, function, **arguments):
        if n not in self.jobs:
            self.jobs[n] = _Job(n)
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

    def __init__(self, n):
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
                "OMP_NUM_THREADS": 1,
                "CUDA_VISIBLE_DEVICES": "",
                "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            }
            variables = {name: str(value) for name, value in (place | settings).items()}
            self.processes.append(
                subprocess.Popen(
                    [sys.executable, __file__, str(theirs.fileno())],
                    env=os.environ | variables,
                    pass_fds=[theirs.fileno()],
                )
            )
            theirs.close()
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
        for process, pipe in itertools.zip_longest(self.processes, self.pipes):
            process.kill()
            process.wait()
            pipe.close()


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
    try:
        _serve(Connection(int(sys.argv[1])))
    except EOFError:
        os._exit(0)
