"""Decisions about a command on Ray, without Ray: its hosts, its ranks in order, their variables."""

import contextlib
import http.server
import logging
import socket
import sys
import threading
import time
import types

import pytest

from meshwise.cli.flags import as_typed
from meshwise.launch import RanksFailed, ray
from meshwise.launch.errand import Errand
from meshwise.launch.ray_hosts import (
    RayHost,
    Seat,
    could_fit,
    fitting,
    ranked,
    sized,
    too_few,
    variables,
)
from meshwise.launch.ray_job import RayJob
from meshwise.options.allocation import Allocation

MEASURE = Errand(("measure", "collectives"))


def host(name: str, gpus: int, free: int) -> RayHost:
    return RayHost(name, name, f"10.0.0.{name[1:]}", 96, 90, gpus, free)


HOSTS = [host("h1", 8, 8), host("h2", 8, 3), host("h3", 8, 4), host("h4", 0, 0)]


@pytest.mark.parametrize(
    ("nodes", "per_node", "strategy", "here", "taken"),
    [
        (1, 2, "pack", "", ["h2"]),  # filled best
        (1, 2, "spread", "", ["h1"]),  # most to spare
        (2, 4, "pack", "", ["h3", "h1"]),
        (2, 2, "pack", "h1", ["h1", "h2"]),  # rank 0 is here
        (2, 2, "pack", "h4", ["h2", "h3"]),  # no GPUs here
        (3, 4, "pack", "", []),
        (4, 1, "pack", "", []),
    ],
)
def test_hosts_are_chosen_by_what_is_free(nodes, per_node, strategy, here, taken):
    place = Allocation(launcher="ray", nodes=nodes, gpus_per_node=per_node, strategy=strategy)
    assert [each.node for each in fitting(HOSTS, place, here)] == taken


def test_too_few_names_what_is_needed_and_what_there_is():
    place = Allocation(launcher="ray", nodes=4, gpus_per_node=2)
    assert too_few(HOSTS, place) == (
        "nodes = 4: each needs 2 free GPUs, and the cluster's hosts with GPUs have 8 of 8, 3 of 8, "
        "4 of 8; ask for less, or wait"
    )
    assert not could_fit(HOSTS, place)
    for hosts, name, ask in [
        (HOSTS[3:], "gpus_per_node = 1", {"gpus_per_node": 1}),
        (HOSTS, "gpus_per_node = 9", {"gpus_per_node": 9}),
        (HOSTS, "nproc_per_node = 97", {"nproc_per_node": 97}),
    ]:  # no host has as many
        told = too_few(hosts, Allocation(launcher="ray", **ask))
        assert told.startswith(f"{name}: each needs {name.split()[-1]} free ")
    assert could_fit(
        HOSTS, Allocation(launcher="ray", nodes=3, gpus_per_node=8)
    )  # when all is free
    assert not could_fit(HOSTS, Allocation(launcher="ray", nodes=1, nproc_per_node=97))


def test_ranks_go_by_host_then_by_number_of_the_device():
    seats = [
        Seat(1, "b", ("0",)),
        Seat(0, "a", ("10",)),
        Seat(0, "a", ("9",)),
        Seat(1, "b", ("1",)),
    ]
    assert ranked(seats) == [2, 1, 0, 3]
    assert ranked([Seat(1, "b"), Seat(0, "a"), Seat(0, "a")]) == [1, 2, 0]
    assert ranked([Seat(0, "a", ("GPU-b",)), Seat(0, "a", ("GPU-a",))]) == [1, 0]


def test_every_rank_sees_the_gpus_of_its_host_and_knows_its_own():
    """Worked by hand: two hosts, the job has GPUs 2 and 5 of one and 0 and 1 of the other."""
    seats = [Seat(0, "10.0.0.7", ("2",)), Seat(0, "10.0.0.7", ("5",)),
             Seat(1, "10.0.0.8", ("0",)), Seat(1, "10.0.0.8", ("1",))]  # fmt: skip
    found = variables(seats, 4242)
    assert found[3] == {
        "RANK": "3",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "4",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "1",
        "MASTER_ADDR": "10.0.0.7",
        "MASTER_PORT": "4242",
        "CUDA_VISIBLE_DEVICES": "0,1",
    }
    assert [each["LOCAL_RANK"] for each in found] == ["0", "1", "0", "1"]
    assert found[0]["CUDA_VISIBLE_DEVICES"] == "2,5"
    assert variables([Seat(0, "a")], 1)[0]["CUDA_VISIBLE_DEVICES"] == ""  # a rank on a CPU


def test_alpas_words_say_which_part_of_the_cluster():
    words = ("run", "--suite", "gpt.tmp", "--num-hosts", "2", "--num-devices-per-host=4")
    on_gpus = sized(Errand(words), Allocation(launcher="ray"), True)
    assert (on_gpus.nodes, on_gpus.gpus_per_node, on_gpus.num_ranks) == (2, 4, 8)
    on_cpus = sized(Errand(words), Allocation(launcher="ray"), False)
    assert (on_cpus.nodes, on_cpus.gpus_per_node, on_cpus.num_ranks) == (2, 0, 8)
    with pytest.raises(ValueError, match="nodes = 3: the command says 2 by --num-hosts"):
        sized(Errand(words), Allocation(launcher="ray", nodes=3), True)


def test_more_ranks_than_gpus_are_refused_by_name():
    place = Allocation(launcher="ray", gpus_per_node=4, nproc_per_node=2)
    with pytest.raises(ValueError, match="nproc_per_node = 2: each rank has one GPU"):
        sized(MEASURE, place, True)


def test_a_version_that_is_not_the_clusters_is_said_with_both():
    """The words are those of Ray 2.5x."""
    told = ray._unconnected(
        "Version mismatch: The cluster was started with:\n    Ray: 2.59.0\n    Python: 3.11.7\n"
        "This process on node 10.0.0.1 was started with:\n    Ray: 2.60.0\n    Python: 3.12.1\n",
        "auto",
    )
    assert told == (
        "address = 'auto': the cluster has Ray 2.59.0 and Python 3.11.7, this environment Ray "
        "2.60.0 and Python 3.12.1; run this in the cluster's environment, or pip install "
        "ray==2.59.0 under Python 3.11.7"
    )
    assert "no Ray runs on this host; begin one by" in ray._unconnected(
        "Could not find any running Ray instance. Please specify", "auto"
    )


@pytest.mark.parametrize("address", [None, "auto", "127.0.0.1:1"])
def test_without_ray_the_line_says_what_to_install(address, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ValueError, match=r"^ray: not installed; pip install 'meshwise\[ray\]'$"):
        ray.start(MEASURE, Allocation(launcher="ray", address=address))


@pytest.mark.parametrize("address", ["head", "ray://head:1", ":1"])
def test_an_address_is_auto_or_a_host_with_its_port(address):
    with pytest.raises(ValueError, match="must be auto or HOST:PORT"):
        ray.start(MEASURE, Allocation(launcher="ray", address=address))


def _listening(answer: bytes | None) -> tuple[socket.socket, int]:
    """A server that gives each client this answer; None: it accepts and says nothing."""
    here = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with contextlib.suppress(OSError):
            there, _ = here.accept()
            there.recv(33)
            there.sendall(answer or b"")
            there.recv(1)  # until the other end closes

    threading.Thread(target=serve, daemon=True).start()
    return here, here.getsockname()[1]


def _refused(port: int, why: str) -> None:
    with pytest.raises(ValueError) as refused:
        ray._knock("127.0.0.1", port)
    assert str(refused.value) == (
        f"address = '127.0.0.1:{port}': no Ray answers there ({why}); give the one that ray start "
        "--head printed"
    )


def test_what_listens_and_is_no_ray_is_refused(monkeypatch):
    monkeypatch.setattr(ray, "_ANSWERING_S", 0.2)
    web = http.server.HTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler)
    web.RequestHandlerClass.log_message = lambda *_: None
    threading.Thread(target=web.serve_forever, daemon=True).start()
    _refused(web.server_port, "something else does")
    web.shutdown()
    web.server_close()
    for answer, why in [
        (None, "timed out"),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", "something else does"),
        (b"\0\0\0\4\1", "something else does"),  # it acknowledges before it begins
    ]:
        here, port = _listening(answer)
        with here:
            _refused(port, why)
    here, port = _listening(bytes([0, 0, 18, 4, 0]))  # as Ray 2.60's begins
    with here:
        ray._knock("127.0.0.1", port)


def test_a_long_wait_for_ray_is_told_once(monkeypatch, caplog):
    monkeypatch.setattr(ray, "_SLOW_S", 0.01)
    with caplog.at_level(logging.INFO, "meshwise"):
        with ray._told("waiting for Ray"):
            while not caplog.messages:
                time.sleep(0.01)
        monkeypatch.setattr(ray, "_SLOW_S", 60.0)
        with ray._told("not said"):
            pass
    assert caplog.messages == ["waiting for Ray"]


def test_a_job_that_waits_for_room_says_so_once(monkeypatch, caplog):
    class Here:
        def get_runtime_context(self):
            return self

        def get_node_id(self):
            return "h1"

    place = Allocation(launcher="ray", nodes=2, gpus_per_node=8)
    monkeypatch.setattr(ray, "_hosts", lambda _: HOSTS)
    for name, s in [("_SETTLING_S", 0.2), ("_TOLD_S", 0.0), ("_POLL_S", 0.01)]:
        monkeypatch.setattr(ray, name, s)
    with caplog.at_level(logging.INFO, "meshwise"), pytest.raises(ValueError, match="nodes = 2"):
        ray._carry_out(Here(), place, [RayJob(None, MEASURE)])
    assert caplog.messages == [
        "waiting up to 0.2 s for room: nodes = 2: each needs 8 free GPUs, and the cluster's hosts "
        "with GPUs have 8 of 8, 3 of 8, 4 of 8"
    ]


def test_a_ray_that_does_not_start_is_said_in_a_line(monkeypatch):
    """The words are those of Ray 2.60 on a host with too much to do."""

    def init(**_: object) -> None:
        raise Exception("The current node timed out during startup. This could\nhappen because")

    monkeypatch.setitem(sys.modules, "ray", types.SimpleNamespace(init=init))
    with pytest.raises(ValueError, match=r"^Ray did not start here: The current node timed"):
        ray.start(MEASURE, Allocation(launcher="ray"))


@pytest.mark.parametrize("port", [0, 65536, 99999])
def test_a_port_is_one_there_can_be(port):
    with pytest.raises(ValueError, match=f"^address = 'head:{port}': its port must be 1 to 65535$"):
        ray.start(MEASURE, Allocation(launcher="ray", address=f"head:{port}"))


def test_alpas_words_are_named_where_they_were_typed():
    words = ["run", "--num-hosts", "3", "--num-devices-per-host=9"]
    assert as_typed("nodes = 3: each needs", words) == "--num-hosts = 3: each needs"
    for name in ("gpus_per_node", "nproc_per_node"):
        assert as_typed(f"{name} = 9: each", words) == "--num-devices-per-host = 9: each"


def test_an_image_for_other_launchers_does_not_choose_rays_interpreter(monkeypatch):
    monkeypatch.setenv("CONTAINER_IMAGE", "torch:2")
    assert MEASURE.program(Allocation(launcher="ray"))[0] == sys.executable
    assert MEASURE.program(Allocation())[0] == "python3"


def ended(codes: dict[int, int], said: dict[int, str], name: str = "") -> RayJob:
    """A job of two ranks whose ranks ended, in this order."""
    job = RayJob(None, MEASURE, name)
    job.hosts = [HOSTS[0], HOSTS[1]]
    for rank, code in codes.items():
        job.said[rank] = said.get(rank, "")
        job.codes[rank] = code
        if code:
            job._failed(rank, job._reason(rank, code))
    return job


@pytest.mark.parametrize(
    ("codes", "code"),
    [
        ({0: 0, 1: 0}, 0),
        ({1: 0, 0: 4}, 4),  # rank 0 said which cases failed
        ({0: 2, 1: 2}, 2),
    ],
)
def test_rank_0_gives_the_exit_code_where_it_gave_the_reason(codes, code):
    assert ended(codes, {}).verdict() == code


@pytest.mark.parametrize(
    ("codes", "said", "rank", "error"),
    [
        ({0: 4, 1: 4}, {0: "error: rank 0: closed by peer", 1: "error: rank 1: OSError: no disk"},
         1, "rank 1: OSError: no disk; the other ranks were ended"),
        ({1: -9, 0: 4}, {0: "error: rank 0: rank 1 had not arrived"},
         1, "rank 1 on 10.0.0.2 died of SIGKILL; the other"),
        ({1: 1}, {1: "ImportError: no torch"}, 1, "rank 1: ImportError: no torch; the other"),
        ({1: 2}, {1: "error: plan.json: no such file"}, 1, "rank 1: plan.json: no such file"),
    ],
)  # fmt: skip
def test_the_rank_to_blame_is_named(codes, said, rank, error):
    with pytest.raises(RanksFailed, match=error) as found:
        ended(codes, said).verdict()
    assert found.value.rank == rank


def test_output_of_rank_0_is_the_commands_and_that_of_others_has_their_number(capsys):
    job = RayJob(None, MEASURE)
    for rank, is_error, line in [(0, False, "table\n"), (0, True, "1/2\n"), (1, True, "odd\n")]:
        job._show(rank, is_error, line)
    assert capsys.readouterr() == ("table\n", "1/2\nrank 1: odd\n")


def test_an_error_is_said_once(capsys):
    """By the job if its rank is to blame, else by the rank; and once if ranks agree."""
    job = ended({}, {})
    for rank, line in [(0, "going\n"), (1, "error: rank 1: OSError: no disk\n"),
                       (0, "error: rank 0: closed by peer\n")]:  # fmt: skip
        job._show(rank, True, line)
    for rank in (1, 0):
        job.codes[rank] = 4
        job._failed(rank, job._reason(rank, 4))
    with pytest.raises(RanksFailed, match=r"^rank 1: OSError: no disk; the other ranks"):
        job.verdict()
    assert capsys.readouterr() == ("", "going\nerror: rank 0: closed by peer\n")
    job = ended({}, {})
    for rank in (0, 1):
        job._show(rank, True, "error: --sizes = '4Kip': has no unit\n")
        job.codes[rank] = 2
        job._failed(rank, job._reason(rank, 2))
    assert job.verdict() == 2
    assert capsys.readouterr() == ("", "error: --sizes = '4Kip': has no unit\n")


def test_json_of_a_failed_job_is_one_document(capsys):
    """Rank 0's error is not printed: the command prints the cause, after this."""
    job = ended({0: 4, 1: -9}, {})
    job.errand = Errand(("measure", "--json"))
    job._show(0, False, '{"error": "rank 1 had not arrived"}\n')
    with pytest.raises(RanksFailed):
        job.verdict()
    assert capsys.readouterr().out == ""
