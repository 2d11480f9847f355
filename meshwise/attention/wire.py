"""Asynchronous exchanges between the ranks of a group, with their bytes counted."""

import functools
import hashlib
import json
import math
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from meshwise.text import one_line

Arrived = Callable[[], Tensor]
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_SAID = 2048  # bytes of one rank's message to the others
_REMEMBERED = 256  # agreements


class Wire:
    """Transfers of a group. ``sent_bytes`` and ``received_bytes`` count what this rank sent and
    received, ``collectives`` its calls; a group of one makes none. ``group`` None: the default
    group, or this process alone if there is none. ``alone``: this process alone in any case.

    ``muted``: nothing is sent; what would arrive is filled with copies of what would be sent. Only
    the computation is left, at the power that real numbers draw. ``log``: a list that takes (bytes
    to each rank, bytes from each rank) of every call.
    """

    def __init__(self, group: Any = None, *, alone: bool = False) -> None:
        if group is dist.GroupMember.NON_GROUP_MEMBER:
            raise ValueError("group: this rank is not in it; call on its members only")
        if not (group is None or isinstance(group, dist.ProcessGroup)):
            raise ValueError(f"group = a {type(group).__name__}: give a process group, or None")
        self.group = group
        alone = alone or (group is None and not dist.is_initialized())
        self.rank = 0 if alone else dist.get_rank(group)
        self.size = 1 if alone else dist.get_world_size(group)
        self.sent_bytes = self.received_bytes = self.collectives = 0
        self.muted = False
        self._agreed: dict[tuple[str, int], list[int]] = {}
        self.log: list[tuple[list[int], list[int]]] | None = None

    def exchange(self, x: Tensor, send: Sequence[int], receive: Sequence[int]) -> Arrived:
        """Start to send rows of ``x`` [sum(send), ...]: the first send[0] to rank 0, and so on.
        Call the result to wait for the received rows [sum(receive), ...], in rank order; compute in
        between. Until then ``x`` must not change. Empty messages cost nothing."""
        assert len(x) == sum(send), (x.shape, send)
        if self.size == 1:
            return lambda: x
        return self._moved(
            x, send, receive,
            lambda out, x: dist.all_to_all_single(
                out, x, list(receive), list(send), group=self.group, async_op=True
            ),
        )  # fmt: skip

    def gather(self, x: Tensor, rows: Sequence[int]) -> Arrived:
        """Start to collect every rank's x [rows[rank], ...] in rank order, [sum(rows), ...]."""
        if self.size == 1:
            return lambda: x
        if len(set(rows)) > 1:  # all-gather wants equal sizes
            return self.exchange(torch.cat([x] * self.size), [len(x)] * self.size, rows)
        return self._moved(
            x, [len(x)] * self.size, rows,
            lambda out, x: _gather(out, x, group=self.group, async_op=True),
        )  # fmt: skip

    def _moved(
        self, x: Tensor, send: Sequence[int], receive: Sequence[int],
        start: Callable[[Tensor, Tensor], Any],
    ) -> Arrived:  # fmt: skip
        out, x = x.new_empty((sum(receive), *x.shape[1:])), x.contiguous()
        width = math.prod(x.shape[1:]) * x.element_size()
        self.sent_bytes += (sum(send) - send[self.rank]) * width
        self.received_bytes += (sum(receive) - receive[self.rank]) * width
        self.collectives += 1
        if self.log is not None:
            self.log.append(([n * width for n in send], [n * width for n in receive]))
        if self.muted:
            flat, own = out.view(-1), x.view(-1)
            for first in range(0, len(flat) if len(own) else 0, max(1, len(own))):
                flat[first : first + len(own)].copy_(own[: len(flat) - first])
            return lambda: out
        work = start(out, x)

        def wait(sent: Tensor = x) -> Tensor:  # x must last until it is sent
            work.wait()
            return out

        return wait

    def agree(self, said: dict[str, object], number: int, *, known: bool = False) -> list[int]:
        """Return every rank's ``number``. The values in ``said`` must be the same on all ranks;
        otherwise every rank raises a ValueError that lists the differences.

        Each call asks all ranks, and the host waits. ``known``: what ranks say determines all
        numbers. NCCL's ranks then ask only once for the same values; a later difference ends in a
        timeout.
        """
        if self.size == 1:
            return [number]
        by_gloo = "nccl" not in dist.get_backend(self.group)
        text = json.dumps({name: str(value) for name, value in said.items()})
        key = (text, number)
        if known and key in self._agreed:
            return self._agreed[key]
        digest = hashlib.sha256(text.encode()).hexdigest()
        line = f"{number} {digest} {text}".encode("ascii", "replace")[:_SAID].ljust(_SAID)
        mine = torch.frombuffer(bytearray(line), dtype=torch.uint8)
        mine = mine.to("cpu" if by_gloo else "cuda")
        every = mine.new_empty(_SAID * self.size)
        _gather(every, mine, group=self.group)
        told = [bytes(row).decode().strip() for row in every.cpu().view(self.size, _SAID).tolist()]
        numbers, digests, texts = zip(*(one.split(" ", 2) for one in told), strict=True)
        if len(set(digests)) > 1:
            raise ValueError(_differences(texts))
        if "problem" in said:  # on all ranks
            return []
        found = list(map(int, numbers))
        if known and not by_gloo:
            if len(self._agreed) >= _REMEMBERED:
                self._agreed.clear()
            self._agreed[key] = found
        return found

    def refuse(self, problem: str) -> NoReturn:
        """Raise ValueError for a call that this rank cannot join, on all ranks that still ask.

        NCCL's ranks may have asked for the last time: the timeout or a launcher ends them.
        """
        if not self._agreed:
            self.agree({"problem": problem}, 0)
        raise ValueError(problem)


def _differences(texts: Sequence[str]) -> str:
    """Describe in a line what ranks said differently: ``scale: 0.5 on rank 0, 1.0 on rank 1``."""
    try:
        told = [json.loads(text) for text in texts]
    except ValueError:  # cut off
        told = [{"problem": text[:200]} for text in texts]
    found = [
        f"rank {rank}: {each['problem']}" for rank, each in enumerate(told) if "problem" in each
    ]
    if found:
        return one_line("; ".join(found))
    for name in dict.fromkeys(name for each in told for name in each):
        values = [each.get(name, "nothing") for each in told]
        if len(set(values)) > 1:
            each = ", ".join(f"{value} on rank {rank}" for rank, value in enumerate(values))
            found.append(f"{name}: {each}")
    return one_line(f"ranks disagree, give all the same: {'; '.join(found)}")


@functools.lru_cache(16)
def _wire(group: Any) -> Wire:
    return Wire(group)


def wire_of(group: dist.ProcessGroup | None = None, wire: Wire | None = None) -> Wire:
    """Return the wire, or the group's: the same one each time, so that agreements last."""
    if wire is not None:
        if not isinstance(wire, Wire):
            raise ValueError(f"wire = a {type(wire).__name__}: give a Wire of the group, or None")
        return wire
    if group is None and dist.is_initialized():
        group = dist.group.WORLD
    return _wire(group) if isinstance(group, dist.ProcessGroup) else Wire(group)
