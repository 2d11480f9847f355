"""A store where jobs meet, open only to processes that prove that they know its secret.

In: an address and a secret. Out: ``hold``, the store's server, in a thread of its holder's process,
and ``connect``, its client, which torch accepts as a store. Messages have fixed sizes until both
ends have proved themselves:

    client  MAGIC, 32 random bytes
    server  MAGIC, 32 random bytes
    client  HMAC-SHA256(secret, MAGIC + "client proves" + both random bytes)
    server  HMAC-SHA256(secret, MAGIC + "server proves" + both random bytes), or 32 zeros

Then requests and replies in msgpack follow: 4 bytes of length, the message, and an HMAC over its
number, length and content. Each direction has its own key, derived like the proofs. So a message
that is forged, repeated, left out or sent back ends the connection. Nothing is encrypted.
"""

import asyncio
import contextlib
import errno
import functools
import hmac
import ipaddress
import secrets
import socket
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Literal

import msgspec
import torch.distributed as dist

from meshwise import ranks
from meshwise.spec import Record

MAGIC = b"meshwise meeting 1\n"
NONCE, TAG, HEAD = 32, 32, 4  # bytes
LARGEST = 2**22  # bytes of a message; gloo's addresses are some 100 bytes a pair of ranks
STRANGERS = 256  # connections without proof; one more closes the oldest
BACKLOG = 1024
AT_ONCE = 16  # accepted before the oldest strangers are closed: each takes a file descriptor
PROOF_S = 30.0  # for a proof
ANSWER_S = 30.0  # for an answer, beyond the time that the store was asked to wait
LONGEST_S = 7 * 86400.0
REFUSED = bytes(TAG)


Ask = Literal["set", "get", "add", "compare_set", "check", "wait", "delete_key"]


class Request(Record):
    ask: Ask
    keys: tuple[str, ...]
    values: tuple[bytes, ...] = ()
    number: int = 0
    timeout_s: float = 0.0


class Reply(Record):
    value: bytes = b""
    number: int = 0
    error: str = ""
    late: bool = False


class Frames:
    """The numbered messages of one direction."""

    def __init__(self, key: bytes) -> None:
        self.key, self.count = key, 0

    def sealed(self, payload: bytes) -> bytes:
        head = len(payload).to_bytes(HEAD, "big")
        return head + payload + self._tag(head + payload)

    @staticmethod
    def rest(head: bytes) -> int:
        """Return the number of bytes after a head."""
        length = int.from_bytes(head, "big")
        if length > LARGEST:
            raise ConnectionError("a message is longer than a store takes")
        return length + TAG

    def opened(self, frame: bytes) -> bytes:
        if not hmac.compare_digest(self._tag(frame[:-TAG]), frame[-TAG:]):
            raise ConnectionError("a message is not the other end's next one")
        return frame[HEAD:-TAG]

    def _tag(self, message: bytes) -> bytes:
        self.count += 1
        return hmac.digest(self.key, self.count.to_bytes(8, "big") + message, "sha256")


def derived(secret: bytes, purpose: bytes, nonces: bytes) -> bytes:
    """Derive a proof or a key. ``nonces``: the client's, then the server's. Their length is fixed,
    so that no two purposes hash the same bytes."""
    assert len(nonces) == 2 * NONCE
    return hmac.digest(secret, MAGIC + purpose + nonces, "sha256")


def frames(secret: bytes, nonces: bytes) -> tuple[Frames, Frames]:
    """Return the frames of the client's messages and of the server's."""
    client = Frames(derived(secret, b"client sends", nonces))
    return client, Frames(derived(secret, b"server sends", nonces))


class _Server:
    """The table, and a task for each connection. It runs in the event loop of its own thread."""

    def __init__(self, secret: bytes) -> None:
        self.secret = secret
        self.table: dict[str, bytes] = {}
        self.awaited: dict[str, asyncio.Event] = {}
        self.strangers: dict[asyncio.StreamWriter, None] = {}  # oldest first

    async def serve(self, listening: list[socket.socket]) -> None:
        for one in listening:
            # asyncio also accepts this many connections at once
            await asyncio.start_server(self._attend, sock=one, backlog=AT_ONCE)
            one.listen(BACKLOG)
        await asyncio.Event().wait()  # for the life of the process

    async def _attend(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.strangers[writer] = None
        if len(self.strangers) > STRANGERS:
            oldest = next(iter(self.strangers))
            del self.strangers[oldest]
            oldest.transport.abort()
        try:
            async with asyncio.timeout(PROOF_S):
                heard, said = await self._prove(reader, writer)
            self.strangers.pop(writer, None)
            while True:
                head = await reader.readexactly(HEAD)
                payload = heard.opened(head + await reader.readexactly(heard.rest(head)))
                reply = await self._reply(msgspec.msgpack.decode(payload, type=Request))
                writer.write(said.sealed(reply))
                await writer.drain()
        except (OSError, EOFError, msgspec.MsgspecError):
            pass  # gone, or not trusted: the other end learns nothing more
        finally:
            self.strangers.pop(writer, None)
            writer.close()

    async def _prove(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> tuple[Frames, Frames]:
        if await reader.readexactly(len(MAGIC)) != MAGIC:
            raise ConnectionError
        nonces = await reader.readexactly(NONCE) + (own := secrets.token_bytes(NONCE))
        writer.write(MAGIC + own)
        proof = await reader.readexactly(TAG)
        if not hmac.compare_digest(proof, derived(self.secret, b"client proves", nonces)):
            writer.write(REFUSED)
            raise ConnectionError
        writer.write(derived(self.secret, b"server proves", nonces))
        return frames(self.secret, nonces)

    async def _reply(self, request: Request) -> bytes:
        try:
            reply = await self._done(request)
        except TimeoutError:
            reply = Reply(late=True)
        except ValueError:
            reply = Reply(error=ranks.plain(f"cannot {request.ask} {', '.join(request.keys)}"))
        return msgspec.msgpack.encode(reply)

    async def _done(self, request: Request) -> Reply:
        """Carry out a request, with the answers of torch's TCPStore."""
        table, keys = self.table, request.keys
        match request.ask:
            case "wait" | "get":
                if not 0 <= request.timeout_s <= LONGEST_S:
                    raise ValueError
                async with asyncio.timeout(request.timeout_s):
                    for key in keys:
                        while key not in table:
                            await self.awaited.setdefault(key, asyncio.Event()).wait()
                return Reply(value=table[keys[-1]] if request.ask == "get" and keys else b"")
            case "check":
                return Reply(number=int(all(key in table for key in keys)))
            case "delete_key":
                (key,) = keys
                return Reply(number=int(table.pop(key, None) is not None))
            case "set":
                (key,), (value,) = keys, request.values
                self._put(key, value)
                return Reply()
            case "add":
                (key,) = keys
                number = int(table.get(key, b"0")) + request.number
                if not -(2**63) <= number < 2**63:
                    raise ValueError
                self._put(key, str(number).encode())
                return Reply(number=number)
            case "compare_set":
                (key,), (expected, desired) = keys, request.values
                if table.get(key, b"") != expected:
                    return Reply(value=table.get(key, expected))
                self._put(key, desired)
                return Reply(value=desired)

    def _put(self, key: str, value: bytes) -> None:
        self.table[key] = value
        if event := self.awaited.pop(key, None):
            event.set()


@functools.cache  # kept open for the life of the process
def hold(host: str, port: int, secret: bytes) -> None:
    """Hold a store at the addresses of ``host`` and at no others.

    Raises an OSError if a port is taken, and a ValueError if this machine does not have the address
    ``host`` or only this machine can reach it."""
    listening = []
    try:
        for family, _, _, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
            one = socket.socket(family, socket.SOCK_STREAM)
            listening.append(one)
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            try:
                one.bind(address)
            except OSError as error:
                if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                    raise
                listening.pop().close()
                continue
            one.listen(BACKLOG)
        if not listening:
            raise ValueError(f"{host} is no address of this host")
        reached = [one.getsockname()[0] for one in listening]
        if all(map(is_loopback, reached)) and not is_loopback(host):
            raise ValueError(f"{host} means {reached[0]} here, which no other host reaches")
    except Exception:
        for one in listening:
            one.close()
        raise
    server = _Server(secret)
    threading.Thread(target=lambda: asyncio.run(server.serve(listening)), daemon=True).start()


def is_loopback(host: str) -> bool:
    """Return whether ``host``, as written, can be reached only from this host."""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    return host == "localhost"


class MeetingStore(dist.Store):
    """The client. It sends one request at a time; after one without an answer it is unusable."""

    def __init__(self, connection: socket.socket, said: Frames, heard: Frames, where: str) -> None:
        super().__init__()
        self.connection, self.said, self.heard, self.where = connection, said, heard, where
        self.turn = threading.Lock()
        _kept.append(self)

    def set(self, key: str, value: str | bytes) -> None:
        self._ask("set", key, values=(_bytes(value),))

    def get(self, key: str) -> bytes:
        return self._ask("get", key, timeout_s=self._seconds(None)).value

    def add(self, key: str, value: int) -> int:
        return self._ask("add", key, number=value).number

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        return self._ask("compare_set", key, values=(_bytes(expected), _bytes(desired))).value

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._ask("check", *keys).number)

    def delete_key(self, key: str) -> bool:
        return bool(self._ask("delete_key", key).number)

    deleteKey = delete_key  # C++ calls it by this name

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._ask("wait", *keys, timeout_s=self._seconds(timeout))

    def _seconds(self, timeout: timedelta | None) -> float:
        usual = self.timeout  # type: ignore[attr-defined]  # torch's stub lacks it
        return float(min(LONGEST_S, max(0.0, (timeout or usual).total_seconds())))

    def _ask(self, ask: Ask, *keys: str, **more: Any) -> Reply:
        request = Request(ask=ask, keys=keys, **more)
        payload = msgspec.msgpack.encode(request)
        if len(payload) > LARGEST:
            raise ValueError(f"{request.keys}: {len(payload)} bytes; a store takes {LARGEST}")
        limit = time.monotonic() + request.timeout_s + ANSWER_S
        if not self.turn.acquire(timeout=request.timeout_s + ANSWER_S):
            raise dist.DistNetworkError(f"{self.where} does not answer: others wait for it, too")
        try:
            self.connection.settimeout(max(0.001, limit - time.monotonic()))
            self.connection.sendall(self.said.sealed(payload))
            head = _read(self.connection, HEAD, limit)
            frame = head + _read(self.connection, self.heard.rest(head), limit)
            reply = msgspec.msgpack.decode(self.heard.opened(frame), type=Reply)
        except BaseException as error:
            self.connection.close()  # it is unknown which message comes next
            if not isinstance(error, OSError | EOFError | msgspec.MsgspecError):
                raise
            raise dist.DistNetworkError(f"{self.where} does not answer: {_reason(error)}") from None
        finally:
            self.turn.release()
        if reply.late:
            named, waited_s = ranks.plain(", ".join(keys)), request.timeout_s
            raise dist.DistStoreError(f"timed out after {waited_s:g} s: nobody set {named}")
        if reply.error:
            raise dist.DistStoreError(ranks.plain(reply.error))
        return reply


# C++ calls these objects for as long as a group lives, and does not keep them alive itself
_kept: list[MeetingStore] = []


def connect(host: str, port: int, secret: bytes, setup_s: float, who: str) -> MeetingStore:
    """Return the store that ``who`` holds at host:port, once both ends have proved themselves.

    Raises a TimeoutError if nobody does in time, a ValueError if the other end's secret differs.
    """
    limit, where = time.monotonic() + setup_s, f"{host}:{port}"
    reason = "it says nothing"
    while (left_s := limit - time.monotonic()) > 0:
        try:
            connection = _connected(host, port, min(left_s, PROOF_S))
            said, heard = _proved(connection, secret, min(limit, time.monotonic() + PROOF_S))
            return MeetingStore(connection, said, heard, f"{who}'s store at {where}")
        except (OSError, EOFError) as error:
            reason = _reason(error)
        except ValueError as error:
            raise ValueError(f"address = {where}: {error}") from None
        time.sleep(max(0.0, min(0.2, limit - time.monotonic())))
    raise TimeoutError(f"{who} {ranks.ABSENT}: their store at {where} does not answer: {reason}")


def _connected(host: str, port: int, timeout_s: float) -> socket.socket:
    """Return a connection to the first of the host's addresses that accepts one."""

    def addresses() -> list[str]:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        return [str(address[0]) for *_, address in found]

    limit, failed = time.monotonic() + timeout_s, OSError(f"{host} has no address")
    for address in ranks.within(addresses, timeout_s):  # a name server may never answer
        try:
            left_s = max(0.001, limit - time.monotonic())
            connection = socket.create_connection((address, port), left_s)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            return connection
        except OSError as error:
            failed = error
    raise failed


def _proved(connection: socket.socket, secret: bytes, limit: float) -> tuple[Frames, Frames]:
    """Prove both ends to each other. Return the frames to send and receive; close on failure."""
    try:
        own = secrets.token_bytes(NONCE)
        connection.sendall(MAGIC + own)
        if _read(connection, len(MAGIC), limit) != MAGIC:
            raise ValueError("something else listens there, or another version: give a free port")
        nonces = own + _read(connection, NONCE, limit)
        connection.sendall(derived(secret, b"client proves", nonces))
        proof = _read(connection, TAG, limit)
        if not hmac.compare_digest(proof, derived(secret, b"server proves", nonces)):
            raise ValueError(
                "the store there has another secret than this process: give all jobs the same, "
                "in a file that MESHWISE_SECRET_FILE names"
            )
    except BaseException:
        connection.close()
        raise
    return frames(secret, nonces)


def _read(connection: socket.socket, count: int, limit: float) -> bytes:
    """Read ``count`` bytes until ``limit``, however slowly they arrive."""
    parts = bytearray()
    while len(parts) < count:
        connection.settimeout(max(0.001, limit - time.monotonic()))
        part = connection.recv(count - len(parts))
        if not part:
            raise EOFError("it hung up")
        parts += part
    return bytes(parts)


def _reason(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "it says nothing"
    return ranks.plain((isinstance(error, OSError) and error.strerror) or str(error))


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else value
