"""What ranks of a group exchange for attention, asynchronous, and how many bytes that was."""

import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Arrived = Callable[[], Tensor]
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_SAID = 1024  # bytes of what ranks tell each other


class Wire:
    """A group's transfers. ``sent_bytes`` and ``received_bytes`` count what left and reached this
    rank, ``collectives`` how many calls did; a group of one makes none. ``group`` None: the default
    group, or this process alone if there is none.

    ``muted``: nothing is sent, and copies of what would be sent stand for what would arrive: what
    is left is the computation, at the power that real numbers draw. ``log``: a list that takes
    (bytes to each rank, bytes from each rank) of every call.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group: Any = group
        self.alone = group is None and not dist.is_initialized()
        self.rank = 0 if self.alone else dist.get_rank(group)
        self.size = 1 if self.alone else dist.get_world_size(group)
        self.sent_bytes = self.received_bytes = self.collectives = 0
        self.muted = False
        self._agreed: dict[tuple[str, int], list[int]] = {}
        self.log: list[tuple[list[int], list[int]]] | None = None

    def exchange(self, x: Tensor, send: Sequence[int], receive: Sequence[int]) -> Arrived:
        """Rows of ``x`` [sum(send), ...]: the first send[0] go to rank 0, and so on. What arrives
        [sum(receive), ...] is in the order of the ranks. Call what is returned to wait for it; keep
        on computing before. Empty messages cost nothing; ``x`` must not change until then."""
        assert len(x) == sum(send), (x.shape, send)
        if self.size == 1:
            return lambda: x
        out, x = x.new_empty((sum(receive), *x.shape[1:])), x.contiguous()
        self._count(x, send, receive)
        return self._arrives(
            out, x,
            lambda: dist.all_to_all_single(
                out, x, list(receive), list(send), group=self.group, async_op=True
            ),
        )  # fmt: skip

    def gather(self, x: Tensor, rows: Sequence[int]) -> Arrived:
        """Every rank's x [rows[rank], ...] one after another, [sum(rows), ...]."""
        if self.size == 1:
            return lambda: x
        if len(set(rows)) > 1:  # all-gather wants equal sizes
            return self.exchange(torch.cat([x] * self.size), [len(x)] * self.size, rows)
        out, x = x.new_empty((sum(rows), *x.shape[1:])), x.contiguous()
        self._count(x, [len(x)] * self.size, rows)
        return self._arrives(
            out, x,
            lambda: _gather(out, x, group=self.group, async_op=True),
        )  # fmt: skip

    def _count(self, x: Tensor, send: Sequence[int], receive: Sequence[int]) -> None:
        width = math.prod(x.shape[1:]) * x.element_size()
        self.sent_bytes += (sum(send) - send[self.rank]) * width
        self.received_bytes += (sum(receive) - receive[self.rank]) * width
        self.collectives += 1
        if self.log is not None:
            self.log.append(([n * width for n in send], [n * width for n in receive]))

    def _arrives(self, out: Tensor, x: Tensor, start: Callable[[], Any]) -> Arrived:
        if self.muted:
            flat, own = out.view(-1), x.view(-1)
            for first in range(0, len(flat) if len(own) else 0, max(1, len(own))):
                flat[first : first + len(own)].copy_(own[: len(flat) - first])
            return lambda: out
        work = start()

        def wait(sent: Tensor = x) -> Tensor:  # which must last until it is sent
            work.wait()
            return out

        return wait

    def agree(self, said: str, number: int) -> list[int]:
        """Every rank's ``number``. What all ``said`` must be the same: ValueError on every rank,
        with what each said. On NCCL asked once for what was not said before, since the answer
        makes the host wait: there a later difference between ranks ends by the timeout."""
        if self.size == 1:
            return [number]
        by_gloo = "nccl" not in dist.get_backend(self.group)
        if not by_gloo and (said, number) in self._agreed:
            return self._agreed[said, number]
        text = f"{number} {said}".encode()[:_SAID].ljust(_SAID)
        mine = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        mine = mine.to("cpu" if by_gloo else "cuda")
        every = mine.new_empty(_SAID * self.size)
        _gather(every, mine, group=self.group)
        told = [bytes(row).decode().strip() for row in every.cpu().view(self.size, _SAID).tolist()]
        numbers, texts = zip(*(one.split(" ", 1) for one in told), strict=True)
        if len(set(texts)) > 1:
            ranks = "; ".join(f"rank {rank}: {one}" for rank, one in enumerate(texts))
            raise ValueError(f"ranks disagree, give all the same: {ranks}")
        self._agreed[said, number] = list(map(int, numbers))
        return self._agreed[said, number]


def wire_of(group: dist.ProcessGroup | None = None) -> Wire:
    """The group's wire; the same one each time, so that what was agreed on lasts."""
    if group is None and not dist.is_initialized():
        return Wire()
    of: Any = group or dist.group.WORLD
    if of not in _WIRES:
        _WIRES[of] = Wire(of)
    return _WIRES[of]


_WIRES: "weakref.WeakKeyDictionary[Any, Wire]" = weakref.WeakKeyDictionary()
