"""Health runs in one job of four ranks: fifty clean ones, then two with a fault put in.

    torchrun --nproc-per-node 4 health.py RUNS

Each is what ``meshwise measure health --quick`` measures, into a run directory of its own; judge
them with ``judge.py``. The faults: a program that multiplies matrices on GPU 2; messages between
GPUs 1 and 2 that go through the host.
"""

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist

from meshwise import provenance, ranks, store
from meshwise.probe import collectives, sweep
from meshwise.probe.cases import health
from meshwise.probe.cases.scope import Scope
from meshwise.spec import Cluster

CLEAN = 50
COMPETITOR = """
import torch
a = torch.randn(8192, 8192, device="cuda:2", dtype=torch.bfloat16)
for i in range(10**9):
    a @ a
    if i % 20 == 0:
        torch.cuda.synchronize()
        print("busy", flush=True)
"""


@contextlib.contextmanager
def competing(rank: int) -> Iterator[None]:
    """Another program on GPU 2."""
    program = None
    if rank == 2:
        program = subprocess.Popen([sys.executable, "-c", COMPETITOR], stdout=subprocess.PIPE)
        assert program.stdout is not None
        program.stdout.readline()
        program.stdout.readline()
    dist.barrier()
    yield
    if program is not None:
        program.kill()


@contextlib.contextmanager
def through_the_host(here: ranks.Ranks) -> Iterator[None]:
    """GPUs 1 and 2 reach each other by host memory alone."""
    direct = collectives._send

    def send(op, buffers, party) -> None:
        if sorted(op.ranks) != [1, 2]:
            direct(op, buffers, party)
        elif party.here == 0:
            dist.send(buffers.source.cpu(), party.ranks[1], group=here.control)
        else:
            received = torch.empty_like(buffers.result, device="cpu")
            dist.recv(received, party.ranks[0], group=here.control)
            buffers.result.copy_(received)

    collectives._send = send
    yield
    collectives._send = direct


def main(runs: str) -> None:
    here = ranks.join()
    cluster = store.read("cluster.toml", Cluster)
    cases = tuple(health.cases(Scope(cluster, here.world_size, "bf16"), quick=True))
    groups = collectives.Groups(here)
    collectives.Groups = lambda _: groups  # connections are made once for all runs

    def measure(name: str) -> None:
        run_dir = None
        if here.rank == 0:
            run_dir = store.create(
                runs, verb="measure", slug=f"health-{name}", cluster=cluster,
                world_size=here.world_size, command=("torchrun", "health.py"),
                provenance=provenance.collect(nproc=here.world_size),
            )  # fmt: skip
        folder = here.gather(str(run_dir))[0]
        request = sweep.SweepRequest(cases=cases, run_dir=folder)
        sweep.measure_ranks(here, msgspec.json.encode(request))

    started = time.monotonic()
    for number in range(CLEAN):
        measure(f"clean-{number}")
        if here.rank == 0:
            print(f"clean {number} after {time.monotonic() - started:.0f} s", file=sys.stderr)
        if here.gather(time.monotonic() - started)[0] > 110:
            break
    with competing(here.rank):
        measure("competing-program-on-gpu-2")
    with through_the_host(here):
        measure("pair-1-2-through-the-host")
    here.leave()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(str(Path(sys.argv[1])))
