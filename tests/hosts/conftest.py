"""``hosts``: two hosts on this machine, network namespaces with names, addresses and a link."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PORT = 29611
PATIENCE_S = 900


class Hosts:
    """Two hosts, 10.77.0.1 and 10.77.0.2, each with its own loopback and host name, which nothing
    resolves. Their links are ``mw-v1`` and ``mw-v2`` at a bridge."""

    def __init__(self) -> None:
        self.names = {1: f"mw{os.getpid()}-1", 2: f"mw{os.getpid()}-2"}

    def ip(self, *words: str, check: bool = True) -> None:
        subprocess.run(["ip", *words], check=check, capture_output=True)

    def build(self) -> None:
        self.ip("link", "add", "mw-br", "type", "bridge")
        self.ip("link", "set", "mw-br", "up")
        for number, name in self.names.items():
            link = f"mw-v{number}"
            self.ip("netns", "add", name)
            self.ip("link", "add", link, "type", "veth", "peer", "name", "e0", "netns", name)
            self.ip("link", "set", link, "master", "mw-br", "up")
            self.ip("-n", name, "addr", "add", f"10.77.0.{number}/24", "dev", "e0")
            self.ip("-n", name, "link", "set", "e0", "up")
            self.ip("-n", name, "link", "set", "lo", "up")

    def remove(self) -> None:
        for name in self.names.values():
            self.ip("netns", "del", name, check=False)
        for link in ("mw-v1", "mw-v2", "mw-br"):  # of a run that was killed, too
            self.ip("link", "del", link, check=False)

    @contextlib.contextmanager
    def slow(self, number: int, rate: str) -> Iterator[None]:
        """Give what host ``number`` receives so much bandwidth."""
        link = ["tc", "qdisc", "add", "dev", f"mw-v{number}", "root"]
        limits = ["tbf", "rate", rate, "burst", "64kb", "latency", "500ms"]
        subprocess.run([*link, *limits], check=True)
        try:
            yield
        finally:
            subprocess.run(["tc", "qdisc", "del", *link[3:]], check=True)

    def start(self, number: int, folder: Path, *words: str, ranks: int = 2) -> subprocess.Popen:
        """Start torchrun with a command of meshwise on a host."""
        torchrun = [
            sys.executable, "-m", "torch.distributed.run", "--nnodes=2",
            f"--nproc-per-node={ranks}",
            f"--node-rank={number - 1}", "--master-addr=10.77.0.1", f"--master-port={PORT}",
        ]  # fmt: skip
        named = 'hostname "$1"; shift; exec ip netns exec "$@"'
        host = ["unshare", "--uts", "bash", "-c", named, "bash", f"host{number}"]
        with (folder / f"host{number}.log").open("w") as log:
            return subprocess.Popen(
                [*host, self.names[number], *torchrun, "-m", "meshwise", *words],
                cwd=folder, stdout=log, stderr=log, start_new_session=True,
                env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
            )  # fmt: skip

    def run(self, folder: Path, *words: str, ranks: int = 2) -> str:
        """Run a command on both hosts; return what the first printed. Both must succeed."""
        both = [self.start(number, folder, *words, ranks=ranks) for number in (2, 1)]
        try:
            codes = [process.wait(PATIENCE_S) for process in both]
        finally:
            for process in both:
                end(process)
        logs = {number: (folder / f"host{number}.log").read_text() for number in (1, 2)}
        assert codes == [0, 0], logs
        return logs[1]


def end(process: subprocess.Popen) -> None:
    """End a host's torchrun with all it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@pytest.fixture(scope="session")
def hosts() -> Iterator[Hosts]:
    for program in ("ip", "tc", "unshare"):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed; make test-hosts installs it")
    made = Hosts()
    made.remove()
    try:
        made.build()
    except subprocess.CalledProcessError as error:
        made.remove()
        pytest.skip(f"no network namespaces here: {error.stderr.decode().strip()}")
    try:
        yield made
    finally:
        made.remove()
