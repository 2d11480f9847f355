"""Jobs that were launched apart meet at an address: one set of ranks over all of them.

This file started as a program is one process of a job: it joins and prints what it finds.
"""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from meshwise import jobs as meetings
from meshwise import ranks
from tests.listening import listens_of
from tests.pace import paced

pytestmark = pytest.mark.dist
ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S, STARTED_S = paced(3.0), paced(240.0)
SECRET = "only they know these 32 characters"


@pytest.fixture
def port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def start(port):
    """``start(job, size, jobs, what, **variables)`` starts one job; what is left of it is ended."""
    started = []

    def job(name, size, jobs, what, setup_s=STARTED_S, own_port=0, **variables):
        mine = []
        for rank in range(size):
            place = {"PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
            place |= {"CUDA_VISIBLE_DEVICES": "", "TORCH_CPP_LOG_LEVEL": "ERROR"}
            place |= {"MESHWISE_SECRET": SECRET, **variables}
            if own_port:
                place |= {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_PORT": str(own_port)}
            order = [f"127.0.0.1:{port}", name, jobs, setup_s, what, bool(own_port)]
            mine.append(
                subprocess.Popen(
                    [sys.executable, __file__, json.dumps(order)],
                    env=os.environ | place | {"MASTER_ADDR": "127.0.0.1"},
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
        started.extend(mine)
        return mine

    yield job
    for process in started:
        process.kill()
        process.communicate()


def answers(processes):
    """What each process printed last, as soon as all have ended."""
    return [json.loads(p.communicate(timeout=paced(300))[0].splitlines()[-1]) for p in processes]


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_two_jobs_with_and_without_a_group_of_their_own_become_one(start):
    jobs = ["trainer", "server"]
    trainer = start("trainer", 2, jobs, "meet", own_port=free_port())
    server = start("server", 1, jobs, "meet")
    everyone = [["trainer", 0], ["trainer", 1], ["server", None]]
    names = ["trainer rank 0", "trainer rank 1", "server rank 0"]
    # in the trainer's own group the ranks still add up to 0 + 1
    found = answers(trainer + server)
    for answer in found:
        del answer["listens"]  # the trainer's own group listens where torch wants it
    assert found == [
        {"rank": rank, "world_size": 3, "names": names, "gathered": everyone, "own": own, "word": 7}
        for rank, own in enumerate([1, 1, None])
    ]


def test_the_first_job_may_come_last(start):
    jobs = ["trainer", "server"]
    server = start("server", 2, jobs, "meet", own_port=free_port())
    trainer = start("trainer", 1, jobs, "meet")
    assert [answer["rank"] for answer in answers(trainer + server)] == [0, 1, 2]


@pytest.mark.parametrize("what", ["meet", "meet under growing load"])
def test_a_job_that_never_comes_is_named(start, what):
    (trainer,) = start("trainer", 1, ["trainer", "server"], what, setup_s=TIMEOUT_S)
    (answer,) = answers([trainer])
    absent = "server (none of its ranks) had not arrived at the start"
    assert answer == {"TimeoutError": f"{absent} after {TIMEOUT_S:g} s"}


def test_a_rank_that_never_comes_is_named_with_its_job(start):
    jobs = ["trainer", "server"]
    first, second = start("server", 2, jobs, "wait", own_port=free_port())
    assert second.stdout.readline() == "here\n" == first.stdout.readline()
    first.send_signal(signal.SIGUSR1)
    (trainer,) = start("trainer", 1, jobs, "meet", setup_s=TIMEOUT_S)
    said = f"server rank 1 had not arrived at the start after {TIMEOUT_S:g} s"
    assert answers([trainer, first]) == [{"TimeoutError": said}] * 2


def test_the_first_job_that_never_comes_is_named(start):
    (server,) = start("server", 1, ["trainer", "server"], "meet", setup_s=TIMEOUT_S)
    (answer,) = answers([server])
    assert answer["TimeoutError"].startswith("trainer rank 0 had not arrived: their store at ")


@pytest.mark.parametrize("others", [["server", "trainer"], ["trainer", "serve"], ["trainer"]])
def test_jobs_that_disagree_are_refused_everywhere(start, others):
    processes = start("trainer", 1, ["trainer", "server"], "meet")
    processes += start("server", 1, others, "meet")
    said = [answer["ValueError"] for answer in answers(processes)]
    assert said[0] == said[1]
    assert "jobs = " in said[0] and str(others) in said[0] and "['trainer', 'server']" in said[0]


def test_two_jobs_of_one_name_are_refused(start):
    processes = start("trainer", 2, ["trainer", "server"], "wait", own_port=free_port())
    for process in processes:
        assert process.stdout.readline() == "here\n"
        process.send_signal(signal.SIGUSR1)
    processes += start("trainer", 1, ["trainer", "server"], "meet")
    (said,) = {answer["ValueError"] for answer in answers(processes)}
    assert said.startswith("trainer rank ") and said.endswith(": two jobs of one name")


def test_a_stopped_rank_is_named_and_a_new_server_may_come(start):
    jobs = ["trainer", "server"]
    (trainer,) = start("trainer", 1, jobs, "meet twice")
    (server,) = start("server", 1, jobs, "stop")
    assert trainer.stdout.readline() == "met\n"
    missing = json.loads(trainer.stdout.readline())
    absent = "server rank 0 (in case weights) had not arrived at a barrier after"
    assert re.fullmatch(rf"{re.escape(absent)} [\d.]+ s", missing["TimeoutError"])
    server.kill()
    (again,) = start("server", 1, jobs, "meet")
    assert [answer["rank"] for answer in answers([trainer, again])] == [0, 1]


def connected(port):
    """A connection to a store that is still being opened."""
    for _ in range(2400):
        with contextlib.suppress(ConnectionRefusedError):
            return socket.create_connection(("127.0.0.1", port), 60)
        time.sleep(0.1)
    raise AssertionError("nobody listens")


def test_a_crowd_of_strangers_gets_nothing_and_keeps_no_member_out(start, port, tmp_path):
    jobs = ["trainer", "server"]
    (trainer,) = start("trainer", 1, jobs, "meet", GLOO_SOCKET_IFNAME="")
    crowd = [connected(port) for _ in range(300)]
    for number in range(0, 300, 3):
        with contextlib.suppress(ConnectionError):
            crowd[number].sendall(os.urandom(500))
    no_secret = {"MESHWISE_SECRET": "", "HOME": str(tmp_path)}  # another user
    strangers = start("server", 1, jobs, "meet", **no_secret)
    strangers += start("server", 1, jobs, "meet", MESHWISE_SECRET="!" + SECRET)
    strangers += start("trainer", 1, jobs, "meet", MESHWISE_SECRET="!" + SECRET)
    with pytest.raises(TimeoutError):
        ranks.connect("127.0.0.1", port, False, 1.0, "nobody")
    for answer in answers(strangers):
        assert answer == {
            "ValueError": f"address = 127.0.0.1:{port}: the store there has another secret than "
            "this process: give all jobs the same, in a file that MESHWISE_SECRET_FILE names"
        }
    (server,) = start("server", 1, jobs, "meet", GLOO_SOCKET_IFNAME="")
    for rank, answer in enumerate(answers([trainer, server])):
        assert answer["rank"] == rank and answer["word"] == 7
        assert set(answer["listens"]) == {"127.0.0.1"}
    for one in crowd:
        one.settimeout(30)
        with contextlib.suppress(ConnectionError):
            assert one.recv(100) == b""


def test_jobs_of_one_user_need_no_setting(start, tmp_path):
    jobs, home = ["trainer", "server"], {"MESHWISE_SECRET": "", "HOME": str(tmp_path)}
    processes = [
        *start("trainer", 1, jobs, "meet", **home),
        *start("server", 1, jobs, "meet", **home),
    ]
    assert [answer["rank"] for answer in answers(processes)] == [0, 1]
    made = tmp_path / ".meshwise" / "secret"
    assert made.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("name", ["", "a/b", "a\x1b[2J", "a\n", "x" * 65])
def test_a_job_of_a_name_that_no_line_could_hold_is_refused(name):
    with pytest.raises(ValueError, match="1 to 64 letters") as error:
        meetings.join_at("127.0.0.1:29600", "a", ["a", name])
    assert str(error.value).isprintable()


@pytest.mark.parametrize("address", ["node1", ":29600", "node1:99999", "node1:²"])
def test_an_address_without_a_port_is_refused(address):
    with pytest.raises(ValueError, match="must be host:port, for example node1:29600"):
        meetings.join_at(address, "a", ["a"])


def _answer(address, job, jobs, setup_s, what, has_group):
    import torch
    import torch.distributed as dist

    if has_group:
        dist.init_process_group("gloo")
    if what == "wait":
        print("here", flush=True)
        signal.sigwait([signal.SIGUSR1])

    def join():
        return meetings.join_at(address, job, jobs, timeout_s=TIMEOUT_S, setup_s=setup_s)

    if what == "meet under growing load":  # what the store was given is over before the grace is
        given_s = iter([1.0])
        ranks.grace_s = lambda: next(given_s, 4.0)
    joined = join()
    if what == "stop":
        joined.at("weights")
        joined.barrier()
        os.kill(os.getpid(), signal.SIGSTOP)
    if what == "meet twice":
        joined.barrier()
        print("met", flush=True)
        try:
            joined.barrier()
        except TimeoutError as error:
            print(json.dumps({"TimeoutError": str(error)}), flush=True)
        joined = join()
    listens = listens_of(os.getpid())
    gathered = joined.gather([job, int(os.environ["RANK"]) if has_group else None])
    last, word = joined.world_size - 1, torch.tensor([7.0])
    if joined.rank == 0:
        joined.control.send([word], last, 0).wait()
    elif joined.rank == last:
        joined.control.recv([word.zero_()], 0, 0).wait()
    joined.barrier()
    joined.leave()
    own = None
    if has_group:  # leaving together ended nothing of its own
        number = torch.tensor(float(dist.get_rank()))
        dist.all_reduce(number)
        own = int(number)
    return {
        "listens": listens,
        "rank": joined.rank,
        "world_size": joined.world_size,
        "names": list(joined.names),
        "gathered": gathered,
        "own": own,
        "word": word.item(),
    }


if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    try:
        answer = _answer(*json.loads(sys.argv[1]))
    except (TimeoutError, ValueError) as error:
        answer = {type(error).__name__: str(error)}
    print(json.dumps(answer), flush=True)
    os._exit(0)
