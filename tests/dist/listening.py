"""Which sockets a process and all its descendants listen on, as the kernel tells it."""

import contextlib
import os
import re
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path
from typing import NamedTuple

_LISTENS, _BOUND = "0A", "07"  # states in /proc/net/tcp and udp
_ACCEPTS = 0x10000  # flag in /proc/net/unix


class Socket(NamedTuple):
    pid: int
    kind: str  # tcp, udp6, unix ...
    address: str
    port: int = 0

    @property
    def is_private(self) -> bool:
        """Whether nobody outside this host can reach it."""
        return self.kind == "unix" or ip_address(self.address).is_loopback


def tree(root: int) -> set[int]:
    """A process and its descendants."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(stat.parent.name))
    found, new = set(), {root}
    while new:
        found |= new
        new = {child for pid in new for child in children.get(pid, [])} - found
    return found


def sockets(pids: set[int]) -> set[Socket]:
    """What they accept connections or datagrams on: TCP, UDP and raw sockets of either IP, unix."""
    owners: dict[str, set[int]] = {}
    for pid in pids:
        for fd in Path(f"/proc/{pid}/fd").glob("*"):
            with contextlib.suppress(OSError):
                if inode := re.fullmatch(r"socket:\[(\d+)\]", os.readlink(fd)):
                    owners.setdefault(inode[1], set()).add(pid)
    found = set()
    for kind in ("tcp", "tcp6", "udp", "udp6", "udplite", "udplite6", "raw", "raw6"):
        wanted = _LISTENS if kind.startswith("tcp") else _BOUND
        for fields in _table(kind):
            address, _, port = fields[1].partition(":")
            if fields[3] == wanted:
                for pid in owners.get(fields[9], ()):
                    found.add(Socket(pid, kind, _address(address), int(port, 16)))
    for fields in _table("unix"):
        if int(fields[3], 16) & _ACCEPTS:
            name = fields[7] if len(fields) > 7 else ""
            found |= {Socket(pid, "unix", name) for pid in owners.get(fields[6], ())}
    return found


def _table(name: str) -> list[list[str]]:
    path = Path(f"/proc/net/{name}")
    return [line.split() for line in path.read_text().splitlines()[1:]] if path.exists() else []


def _address(text: str) -> str:
    """The kernel writes each 32-bit word of an address in the host's order."""
    words = [bytes.fromhex(text[i : i + 8])[::-1] for i in range(0, len(text), 8)]
    packed = b"".join(words)
    return str(IPv4Address(packed) if len(packed) == 4 else IPv6Address(packed))
