"""Nobody outside this host can connect to anything that a job listens on, and nothing that comes
over a connection is unpickled. Compiled code is apart: see docs/security.md."""

import contextlib
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from meshwise import launcher, ranks, store
from meshwise.spec import Layout, Model, Workload
from tests.dist import listening
from tests.pace import paced

pytestmark = pytest.mark.dist
MODEL = Model(name="tiny", hidden=64, layers=2, heads=4, ffn=256, vocab=128, max_seq_len=32)
PIPELINE = Layout(pp=2, dp=2, num_microbatches=2, schedule="1f1b")
VERBS = {
    "measure": "measure collectives all_reduce all_gather --sizes 4K..4M:x2 --nproc 2",
    "a pipeline": "run plan.json --steps 300",
}


def test_sockets_of_all_kinds_are_seen() -> None:
    with contextlib.ExitStack() as open_:
        for family, host in ((socket.AF_INET, ""), (socket.AF_INET6, "::")):
            for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
                made = open_.enter_context(socket.socket(family, kind))
                made.bind((host, 0))
                if kind == socket.SOCK_STREAM:
                    made.listen()
        seen = {each for each in listening.sockets({os.getpid()}) if not each.is_private}
    assert {each.kind for each in seen} >= {"tcp", "tcp6", "udp", "udp6"}
    assert {each.address for each in seen} >= {"0.0.0.0", "::"}


def test_a_store_that_rank_0_holds_for_its_host_is_on_the_loopback_interface() -> None:
    """As srun starts the ranks of one host."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = launcher.Job.here({"RANK": "0", "WORLD_SIZE": "2", "MASTER_PORT": str(port)})
    kept = ranks._store(place, 5.0)
    seen = {each for each in listening.sockets({os.getpid()}) if each.port == kept.port == port}
    assert seen and all(each.is_private for each in seen)


ROOT = Path(__file__).resolve().parents[2]
OURS = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
NOTES_PICKLES = """
import os, pickle, sys, traceback
def note(event, arguments):
    if event == "pickle.find_class":
        with open(os.environ["NOTES"] + "/unpickled", "a") as file:
            traceback.print_stack(file=file)
sys.addaudithook(note)
class Unpickler(pickle.Unpickler):  # of data alone, too, as torch's gathering of objects has it
    def load(self):
        note("pickle.find_class", ())
        return super().load()
pickle.Unpickler = Unpickler
"""


@pytest.mark.parametrize("name", VERBS)
def test_a_job_listens_on_the_loopback_interface_alone(name, tmp_path: Path, plan_of) -> None:
    store.write(
        tmp_path / "plan.json", plan_of(MODEL, Workload(global_batch_size=4, seq_len=32), PIPELINE)
    )
    (tmp_path / "sitecustomize.py").write_text(NOTES_PICKLES)
    quiet = {name: v for name, v in os.environ.items() if not name.endswith("_SOCKET_IFNAME")}
    job = subprocess.Popen(
        [sys.executable, "-m", "meshwise", *VERBS[name].split()],
        cwd=tmp_path,
        env=quiet | OURS | {"NOTES": str(tmp_path), "PYTHONPATH": f"{tmp_path}:{ROOT}"},
        stderr=subprocess.PIPE,
        text=True,
    )
    found: set[listening.Socket] = set()
    limit = time.monotonic() + paced(120)
    try:
        while not list(tmp_path.glob("runs/*/samples.jsonl")) or not _worked(tmp_path):
            assert job.poll() is None and time.monotonic() < limit
            found |= listening.sockets(listening.tree(job.pid))
            time.sleep(0.05)
        found |= listening.sockets(listening.tree(job.pid))
    finally:
        job.terminate()
        print(job.communicate()[1])
    others = {each.pid for each in found} - {job.pid}
    assert len(others) >= 2 and any(each.pid == job.pid for each in found)  # gloo's, and the store
    assert {each for each in found if not each.is_private} == set()
    assert {each for each in found if each.kind == "unix"} == set()
    unpickled = tmp_path / "unpickled"
    assert not unpickled.exists(), unpickled.read_text()


def _worked(folder: Path) -> bool:
    """Whether ranks are in the midst of it, all groups made."""
    lines = [path.read_text() for path in folder.glob("runs/*/s*.jsonl")]
    return any(line.count("\n") > 2 for line in lines)
