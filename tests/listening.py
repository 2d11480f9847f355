"""Where a process listens, as /proc tells it."""

import contextlib
import os
import socket
from pathlib import Path


def listens_of(pid: int) -> list[str]:
    """The address of each of its listening sockets."""
    own = set()
    for open_file in os.scandir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):  # another thread has closed it
            own.add(os.readlink(open_file.path))
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in own:
                packed = bytes.fromhex(fields[1].partition(":")[0])
                words = [packed[i : i + 4][::-1] for i in range(0, len(packed), 4)]
                family = socket.AF_INET if len(packed) == 4 else socket.AF_INET6
                found.append(socket.inet_ntop(family, b"".join(words)))
    return found
