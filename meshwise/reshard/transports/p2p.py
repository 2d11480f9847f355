"""Move one tensor between the ranks of two layouts by point-to-point messages, in the background.

In: two layouts, the process group of all ranks that take part, and this rank's buffer. Out:
messages in flight, to wait for. The messages of one call start together, so ranks that send and
receive at once cannot block each other. All ranks of a group must make their calls on it in the
same order. A slice that is contiguous in its buffer is sent from its place, or received into it;
any other is packed. Moves within a rank are no messages and are not allowed here.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from meshwise.reshard.regions import Box, Layout
from meshwise.reshard.transfer import Move, transfer_list


@dataclass(frozen=True)
class Route:
    """This rank's messages from one layout to another."""

    sends: tuple[Move, ...]
    receives: tuple[Move, ...]
    group: dist.ProcessGroup


def connected(
    source: Layout, destination: Layout, group: dist.ProcessGroup, device: torch.device
) -> Route:
    """Make this rank's route and open its connections. All ranks of a group make their routes in
    the same order.

    NCCL makes a connection at the first message, and holds up the host of one end until the other
    end sends or receives too. Two ranks that both send first, on routes that are not connected,
    would wait for each other forever.
    """
    here, moves = dist.get_rank(), transfer_list(source, destination)
    assert not any(move.is_local for move in moves)
    sends = tuple(move for move in moves if move.source == here)
    receives = tuple(move for move in moves if move.destination == here)
    to, by = {move.destination for move in sends}, {move.source for move in receives}
    words = iter(torch.zeros(len(to) + len(by), 1, device=device))
    operations = [dist.P2POp(dist.isend, next(words), rank, group) for rank in sorted(to)]
    operations += [dist.P2POp(dist.irecv, next(words), rank, group) for rank in sorted(by)]
    for work in _start(operations):
        work.wait()
    return Route(sends, receives, group)


@dataclass(frozen=True)
class Sending:
    """Messages under way. ``messages`` must not change until they are sent."""

    works: list[dist.Work]
    messages: list[Tensor]

    def is_done(self) -> bool:
        return all(work.is_completed() for work in self.works)

    def wait(self) -> None:
        for work in self.works:
            work.wait()


@dataclass(frozen=True)
class Receiving:
    works: list[dist.Work]
    buffer: Tensor
    packed: list[tuple[Tensor, Tensor]]  # (place in the buffer, message)

    def wait(self) -> Tensor:
        """Return the filled buffer. On a GPU the current stream waits, not the host."""
        for work in self.works:
            work.wait()
        for place, message in self.packed:
            place.copy_(message)
        return self.buffer


def send(route: Route, buffer: Tensor) -> Sending:
    """Start sending parts of ``buffer`` to the ranks that need them."""
    operations, messages = [], []
    for move in route.sends:
        message = _at(buffer, move.read).contiguous()
        messages.append(message)
        operations.append(dist.P2POp(dist.isend, message, move.destination, route.group))
    return Sending(_start(operations), messages)


def receive(
    route: Route, shape: Sequence[int], dtype: torch.dtype, device: torch.device
) -> Receiving:
    """Start filling a new buffer from the ranks that hold its parts."""
    buffer = torch.empty(shape, dtype=dtype, device=device)
    operations, packed = [], []
    for move in route.receives:
        place = message = _at(buffer, move.write)
        if not place.is_contiguous():
            message = torch.empty_like(place, memory_format=torch.contiguous_format)
            packed.append((place, message))
        operations.append(dist.P2POp(dist.irecv, message, move.source, route.group))
    return Receiving(_start(operations), buffer, packed)


def _at(buffer: Tensor, box: Box) -> Tensor:
    return buffer[tuple(slice(low, high) for low, high in zip(box.low, box.high, strict=True))]


def _start(operations: list[dist.P2POp]) -> list[dist.Work]:
    return dist.batch_isend_irecv(operations) if operations else []
