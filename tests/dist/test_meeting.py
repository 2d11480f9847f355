"""The store where jobs meet, and those that may not use it.

What goes over the wire is made here by hand from the description in ``meshwise.meeting`` with
hashlib alone, so that the proofs are checked against something that shares nothing with them.
"""

import hashlib
import hmac
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from datetime import timedelta

import msgspec
import pytest
import torch
import torch.distributed as dist

from meshwise import jobs, meeting, ranks
from tests.listening import listens_of
from tests.pace import paced

pytestmark = pytest.mark.dist
SECRET = b"only they know these 32 characters"
SOON_S = paced(120.0)
HERE = "127.0.0.1"
MAGIC = b"meshwise meeting 1\n"


def free_port():
    with socket.socket() as probe:
        probe.bind((HERE, 0))
        return probe.getsockname()[1]


@pytest.fixture
def port():
    number = free_port()
    meeting.hold(HERE, number, SECRET)
    return number


def member(port, secret=SECRET, setup_s=SOON_S):
    return meeting.connect(HERE, port, secret, setup_s, "trainer rank 0")


def stop(process):
    process.send_signal(signal.SIGSTOP)
    os.waitpid(process.pid, os.WUNTRACED)  # until all of its threads have stopped


def mac(key, message):
    return hmac.new(key, message, hashlib.sha256).digest()


class Wire:
    """A connection and what both its ends said, written by hand."""

    def __init__(self, port):
        self.socket = socket.create_connection((HERE, port), paced(30))
        self.sent = b""

    def say(self, message):
        self.sent += message
        self.socket.sendall(message)

    def hear(self, count):
        parts = b""
        while len(parts) < count and (part := self.socket.recv(count - len(parts))):
            parts += part
        return parts

    def is_closed(self):
        try:
            return self.socket.recv(1) == b""
        except ConnectionError:
            return True

    def greet(self, nonce=bytes(range(32))):
        self.say(MAGIC + nonce)
        greeting = self.hear(len(MAGIC) + 32)
        assert greeting.startswith(MAGIC)
        return nonce + greeting[len(MAGIC) :]

    def enter(self, secret=SECRET):
        nonces = self.greet()
        self.say(mac(secret, MAGIC + b"client proves" + nonces))
        assert self.hear(32) == mac(secret, MAGIC + b"server proves" + nonces)
        self.key = mac(secret, MAGIC + b"client sends" + nonces)
        self.theirs = mac(secret, MAGIC + b"server sends" + nonces)
        return self

    def frame(self, number, payload, key=None):
        framed = len(payload).to_bytes(4, "big") + payload
        return framed + mac(key or self.key, number.to_bytes(8, "big") + framed)


def request(**fields):
    return msgspec.msgpack.encode(
        {"ask": "add", "keys": ["n"], "values": [], "number": 1, "timeout_s": 0.0} | fields
    )


def test_the_wire_is_as_described(port):
    wire = Wire(port).enter()
    wire.say(wire.frame(1, request(number=5)))
    reply = wire.hear(4)
    reply += wire.hear(int.from_bytes(reply, "big") + 32)
    assert reply == wire.frame(1, reply[4:-32], wire.theirs)
    assert msgspec.msgpack.decode(reply[4:-32])["number"] == 5 == member(port).add("n", 0)


# The store itself, beside torch's own TCPStore.


@pytest.fixture(params=["ours", "torch's"])
def store(request, port):
    if request.param == "ours":
        return member(port)
    return dist.TCPStore(HERE, 0, is_master=True, wait_for_workers=False)


@pytest.mark.parametrize("prefixed", [False, True])
def test_it_answers_as_torchs_store_does(store, prefixed):
    s = dist.PrefixStore("p", store) if prefixed else store
    assert s.add("n", 2) == 2 and s.add("n", -5) == -3 and s.get("n") == b"-3"
    assert not s.check(["a"]) and s.check(["n"]) and not s.check(["a", "n"])
    s.set("a", "text")
    s.set("b", bytes(range(256)))
    s.wait(["a", "b"], timedelta(seconds=1))
    assert s.get("a") == b"text"
    assert s.get("b") == bytes(range(256))
    assert s.compare_set("a", "other", "new") == b"text" == s.get("a")
    assert s.compare_set("a", "text", "new") == b"new" == s.get("a")
    assert s.compare_set("c", "", "first") == b"first" == s.get("c")
    assert s.compare_set("d", "some", "first") == b"some"
    assert not s.check(["d"])
    assert s.delete_key("a") and not s.delete_key("a") and not s.check(["a"])
    with pytest.raises(dist.DistStoreError):
        s.wait(["a"], timedelta(seconds=0.2))
    s.set_timeout(timedelta(seconds=0.2))
    with pytest.raises(dist.DistStoreError):
        s.get("a")


def test_a_wait_ends_when_the_key_comes(port):
    one, other = member(port), member(port)
    later = threading.Timer(0.3, lambda: other.set("k", "v"))
    later.start()
    one.wait(["k"], timedelta(seconds=SOON_S))
    assert one.get("k") == b"v"
    later.join()


def test_threads_of_one_process_share_a_connection(port):
    one = member(port)
    threads = [
        threading.Thread(target=lambda: [one.add("n", 1) for _ in range(50)]) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert one.add("n", 0) == 400


def test_groups_of_gloo_meet_over_it_at_the_address_given(port):
    sums, listening = [], []

    def rank(number):
        joined = ranks.Ranks(
            rank=number, local_rank=0, world_size=3, device=torch.device("cpu"), backend="gloo",
            store=dist.PrefixStore("ranks", member(port)), timeout_s=SOON_S, listens="127.0.0.2",
        )  # fmt: skip
        group = joined.group("g")
        total = torch.ones(3) * number
        group.allreduce([total]).wait()
        listening.append(listens_of(os.getpid()))
        group.barrier().wait()
        sums.append(total.tolist())

    threads = [threading.Thread(target=rank, args=[number]) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sums == [[3.0] * 3] * 3
    for seen in listening:
        assert seen.count("127.0.0.2") == 3 and set(seen) <= {HERE, "127.0.0.2"}


# Strangers. After each, members still get in and no key has changed.


def silent(port):
    return Wire(port)


def garbage(port):
    wire = Wire(port)
    wire.say(os.urandom(4096))
    assert wire.is_closed()


def huge_length(port):
    wire = Wire(port)
    wire.say(b"\xff" * 200)
    assert wire.is_closed()


def torchs_client(port):
    with pytest.raises(TimeoutError, match=r"their store at 127\.0\.0\.1:"):
        ranks.connect(HERE, port, False, 1.0, "nobody")


def wrong_secret(port):
    with pytest.raises(ValueError, match="has another secret than this process"):
        member(port, b"!" + SECRET)


def wrong_secret_that_goes_on(port):
    wire = Wire(port)
    nonces = wire.greet()
    wire.say(mac(b"!" + SECRET, MAGIC + b"client proves" + nonces))
    wire.key = mac(b"!" + SECRET, MAGIC + b"client sends" + nonces)
    wire.say(wire.frame(1, request()))
    assert wire.hear(32) in (bytes(32), b"")
    assert wire.is_closed()


def replayed(port):
    """All that a member said, said again."""
    true = Wire(port).enter()
    true.say(true.frame(1, request(ask="set", keys=["k"], values=[b"v"])))
    true.hear(4)
    member(port).delete_key("k")
    wire = Wire(port)
    wire.say(true.sent)
    assert wire.hear(len(MAGIC) + 64).endswith(bytes(32))
    assert wire.is_closed()


def reflected_to_the_server(port):
    """The server's own random bytes given back to it."""
    first, second = Wire(port), Wire(port)
    nonces = first.greet()
    second.greet(nonces[32:])
    second.say(bytes(32))
    first.say(second.hear(32))
    assert first.hear(32) == bytes(32)
    assert first.is_closed()


def no_proof(port):
    """Go on as if the proof had been accepted, by a key without a secret."""
    wire = Wire(port)
    nonces = wire.greet()
    wire.key = mac(b"", MAGIC + b"client sends" + nonces)
    wire.say(wire.frame(1, request()))
    assert wire.hear(32) in (bytes(32), b"")
    assert wire.is_closed()


STRANGERS = [
    silent, garbage, huge_length, torchs_client, wrong_secret, wrong_secret_that_goes_on,
    replayed, reflected_to_the_server, no_proof,
]  # fmt: skip


@pytest.mark.parametrize("stranger", STRANGERS)
def test_a_stranger_neither_reads_nor_writes(port, stranger):
    before = member(port)
    kept = stranger(port)
    assert not before.check(["n"]) and not member(port).check(["k"])
    del kept


def test_many_idle_strangers_keep_no_member_out(port, monkeypatch):
    monkeypatch.setattr(meeting, "STRANGERS", 20)
    idle = [Wire(port) for _ in range(60)]
    for wire in idle[:30]:
        assert wire.is_closed()  # the oldest make room
    assert member(port).add("n", 1) == 1
    idle += [Wire(port) for _ in range(60)]
    assert member(port).add("n", 1) == 2


HOLDS = """
import os, resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (512, 512))
from meshwise import meeting
meeting.hold("127.0.0.1", int(sys.argv[1]), sys.argv[2].encode())
print("holds", flush=True)
most = failed = 0
while not os.path.exists(sys.argv[3]):
    try:
        most = max(most, len(os.listdir("/proc/self/fd")))
    except OSError:
        failed += 1
print(failed, most)
"""


def test_a_flood_of_strangers_leaves_the_process_its_file_descriptors(tmp_path):
    port, done = free_port(), tmp_path / "done"
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDS, str(port), SECRET.decode(), str(done)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout is not None and holder.stdout.readline() == "holds\n"
    flood = []
    for _ in range(900):
        flood.append(socket.socket())
        flood[-1].setblocking(False)
        flood[-1].connect_ex((HERE, port))
    assert member(port).add("n", 1) == 1  # whoever came before has been accepted
    done.touch()
    failed, most = map(int, holder.communicate(timeout=SOON_S)[0].split())
    for one in flood:
        one.close()
    assert failed == 0 and most < 512


def test_a_stranger_who_trickles_is_closed(port, monkeypatch):
    monkeypatch.setattr(meeting, "PROOF_S", 0.5)
    wire = Wire(port)
    wire.say(MAGIC[:3])
    assert wire.is_closed()


FAULTS = {
    "repeated": lambda wire, first, second: first + first,
    "left out": lambda wire, first, second: second,
    "in another order": lambda wire, first, second: second + first,
    "changed": lambda wire, first, second: first[:10] + bytes([first[10] ^ 1]) + first[11:],
    "of the other direction": lambda wire, *_: wire.frame(1, request(), wire.theirs),
    "too long": lambda wire, first, second: b"\xff" * 4 + first,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_message_is_taken_once_and_in_its_turn(port, fault):
    """What somebody between two members could do to their messages."""
    wire = Wire(port).enter()
    wire.say(FAULTS[fault](wire, wire.frame(1, request()), wire.frame(2, request())))
    while wire.hear(1):
        pass
    assert member(port).add("n", 0) == (1 if fault == "repeated" else 0)


MALFORMED = [
    b"", b"\xc1", b"\x91" * 5000, request(ask="exec"), request(more=1), request(keys=[]),
    request(keys=["a", "b"]), request(keys=["\0" * 2**20] * 3), request(keys=["text"]),
    request(number=2**63),
    request(ask="wait", keys=["never"], timeout_s=float("nan")),
    request(ask="wait", keys=["never"], timeout_s=1e300),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(MALFORMED)))
def test_what_a_member_says_wrong_harms_nobody(port, number, capfd):
    other = member(port)
    other.set("text", "no number")
    wire = Wire(port).enter()
    wire.say(wire.frame(1, MALFORMED[number]))
    head = wire.hear(4)
    if head:
        reply = msgspec.msgpack.decode(wire.hear(int.from_bytes(head, "big") + 32)[:-32])
        assert reply["error"] or reply["late"]
    assert other.add("n", 1) == 1
    assert capfd.readouterr().err == ""


def test_a_value_too_large_is_refused_and_the_store_goes_on(port):
    one = member(port)
    with pytest.raises(ValueError, match="a store takes 4194304"):
        one.set("k", bytes(meeting.LARGEST))
    assert one.add("n", 1) == 1


def test_the_error_of_a_store_is_one_printable_line(port):
    one = member(port)
    with pytest.raises(dist.DistStoreError) as error:
        one.wait(["a\x1b[2J\n" + "b" * 1000], timedelta(seconds=0.1))
    assert str(error.value).isprintable() and len(str(error.value)) < 400


TOLD = {
    "refused": (b"\x1b[2J\nno" + b"\xff" * 10_000, r"^\\u001b\[2J no"),
    "jobs": (b"[" * 100_000, "another process told .* as jobs"),
    "jobs of another kind": (b'{"a": 1}', "another process told .* as jobs"),
    "size/server": (b"1e9\x1b", "another process told .* as size/server"),
}


@pytest.mark.parametrize("key", TOLD)
def test_what_another_member_told_is_raised_printable_and_short(port, key, monkeypatch):
    monkeypatch.setenv("MESHWISE_SECRET", SECRET.decode())
    value, said = TOLD[key]
    bad = member(port)
    bad.set(f"meeting/1/{key.partition(' ')[0]}", value)
    bad.set("meeting/1/over", "")
    bad.set("open", "1")
    with pytest.raises(ValueError, match=said) as error:
        jobs.join_at(f"{HERE}:{port}", "server", ["trainer", "server"])
    assert str(error.value).isprintable() and len(str(error.value)) < 400


# Whoever has the port instead of the store. Every client ends by its deadline.


@pytest.fixture(params=["silent", "closes", "garbage", "not accepted", "full", "stopped"])
def impostor(request):
    """The port of something that is no store; one that is "full" answers as a black hole does."""
    if request.param == "stopped":
        code = "import socket,time; s=socket.create_server(('127.0.0.1',0)); "
        code += "print(s.getsockname()[1], flush=True); time.sleep(600)"
        with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
            number = int(process.stdout.readline())
            stop(process)
            try:
                yield request.param, number
            finally:
                process.kill()
        return
    listening = socket.create_server((HERE, 0), backlog=0 if request.param == "full" else 16)
    number = listening.getsockname()[1]
    kept = []
    if request.param == "full":
        for _ in range(4):
            kept.append(socket.socket())
            kept[-1].setblocking(False)
            kept[-1].connect_ex((HERE, number))

    def accept():
        while True:
            try:
                one, _ = listening.accept()
            except OSError:
                return
            if request.param == "closes":
                one.close()
                continue
            if request.param == "garbage":
                one.sendall(b"SSH-2.0-OpenSSH_9.2p1 Debian-2\r\n" * 10)
            kept.append(one)

    if request.param in ("silent", "closes", "garbage"):
        threading.Thread(target=accept, daemon=True).start()
    yield request.param, number
    listening.close()
    for one in kept:
        one.close()


def by_hand(port):
    meeting.connect(HERE, port, SECRET, 1.0, "trainer rank 0")


def by_torch(port):
    ranks.connect(HERE, port, False, 1.0, "trainer rank 0")


def by_join_at(port):
    jobs.join_at(f"{HERE}:{port}", "server", ["trainer", "server"], setup_s=1.0)


def by_join_at_as_the_first(port):
    jobs.join_at(f"{HERE}:{port}", "trainer", ["trainer", "server"], setup_s=1.0)


def by_join(port):
    os.environ.update(RANK="1", WORLD_SIZE="2", MASTER_ADDR=HERE, MASTER_PORT=str(port))
    try:
        ranks.join(setup_s=1.0)
    finally:
        for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            del os.environ[name]


CLIENTS = [by_hand, by_torch, by_join, by_join_at, by_join_at_as_the_first]


@pytest.mark.parametrize("client", CLIENTS)
def test_a_port_of_somebody_else_is_left_by_the_deadline(impostor, client, monkeypatch):
    kind, number = impostor
    monkeypatch.setenv("MESHWISE_SECRET", SECRET.decode())
    monkeypatch.setattr(ranks, "_keep_freed_memory", None)  # the process has become no rank
    started = time.monotonic()
    with pytest.raises((TimeoutError, ValueError)) as error:
        client(number)
    assert time.monotonic() - started < paced(30)
    assert f"{HERE}:{number}" in str(error.value) and "\n" not in str(error.value)
    if isinstance(error.value, TimeoutError):
        assert " had not arrived: their store at " in str(error.value)
        assert "rank 0" in str(error.value)
    else:
        assert kind == "garbage" and "something else listens there" in str(error.value)


def test_a_client_that_gave_up_does_not_keep_its_process(tmp_path):
    """The thread that torch's constructor holds is left behind."""
    with socket.create_server((HERE, 0)) as listening:
        code = (
            "from meshwise import ranks\n"
            f"try: ranks.connect('{HERE}', {listening.getsockname()[1]}, False, 1.0, 'rank 0')\n"
            "except TimeoutError as error: print(error)"
        )
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=SOON_S
        )
    assert done.returncode == 0 and done.stderr == ""
    assert done.stdout.endswith("does not answer: what listens there says nothing\n")


@pytest.mark.parametrize("answer", ["own proof", "zeros", "noise"])
def test_a_client_believes_no_one_who_does_not_know_the_secret(answer):
    """Above all its own proof, sent back to it."""

    def pretend():
        one, _ = listening.accept()
        hello = one.recv(1024)
        one.sendall(hello)
        proof = one.recv(1024)
        one.sendall({"own proof": proof, "zeros": bytes(32), "noise": os.urandom(32)}[answer])

    with socket.create_server((HERE, 0)) as listening:
        thread = threading.Thread(target=pretend)
        thread.start()
        with pytest.raises(ValueError, match="has another secret than this process"):
            member(listening.getsockname()[1])
        thread.join()


def test_a_member_whose_store_stops_is_told_so(monkeypatch):
    code = (
        "import sys, time; from meshwise import meeting; "
        "meeting.hold('127.0.0.1', int(sys.argv[1]), sys.argv[2].encode()); time.sleep(600)"
    )
    order = [sys.executable, "-c", code, str(number := free_port()), SECRET.decode()]
    with subprocess.Popen(order) as holder:
        try:
            one = member(number)
            assert one.add("n", 1) == 1
            stop(holder)
            monkeypatch.setattr(meeting, "ANSWER_S", 1.0)
            for _ in range(2):  # once by the deadline, then at once
                with pytest.raises(dist.DistNetworkError, match=r"store at .* does not answer"):
                    one.add("n", 1)
        finally:
            holder.kill()


# Where the store listens.


def test_it_listens_at_its_address_alone(port):
    assert set(listens_of(os.getpid())) <= {HERE, "127.0.0.2"}
    meeting.hold("localhost", free_port(), SECRET)
    assert set(listens_of(os.getpid())) <= {HERE, "127.0.0.2", "::1"}


def test_an_address_of_another_host_is_refused_by_the_first(monkeypatch):
    monkeypatch.setenv("MESHWISE_SECRET", SECRET.decode())
    with pytest.raises(ValueError, match=r"198\.51\.100\.1 is no address of this host"):
        jobs.join_at("198.51.100.1:29600", "trainer", ["trainer", "server"], setup_s=1.0)


def test_an_address_that_means_the_own_host_only_is_refused(monkeypatch):
    """Debian gives a host's own name the address 127.0.1.1."""
    usual = socket.getaddrinfo
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda host, *rest, **named: usual("127.0.1.1", *rest, **named)
    )
    monkeypatch.setenv("MESHWISE_SECRET", SECRET.decode())
    with pytest.raises(ValueError, match=r"node1 means 127.0.1.1 here.*give .* or bind="):
        jobs.join_at(f"node1:{free_port()}", "trainer", ["trainer", "server"], setup_s=1.0)
