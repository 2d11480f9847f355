"""Collectives through symmetric memory: ranks read each other's buffers over NVLink.

    one_shot   all_reduce: each rank reads all sources and adds them; one step, n-1 times the bytes
    two_shot   all_reduce: reduce-scatter, then all-gather, in one kernel
    peer_copy  all_gather, all_to_all, send_recv: the receiver copies what it needs by copy engine,
               which uses no SM; a barrier of the devices before it and one after

The sources are in symmetric memory, as in a program that wants this speed.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from meshwise import torch_private
from meshwise.probe import pattern
from meshwise.probe.work import Unavailable
from meshwise.spec import Collective

_PATIENCE_MS = 20_000  # then a barrier's kernel traps: a lost rank must not hang the others


class Heap:
    """Symmetric buffers of this process, one for each group, length and dtype. They are kept,
    because all ranks of the group must meet to make one."""

    def __init__(self) -> None:
        self.buffers: dict[tuple[str, int, torch.dtype], tuple[torch.Tensor, Any]] = {}

    def source(
        self, length: int, dtype: torch.dtype, group: dist.ProcessGroup, device: torch.device
    ) -> tuple[torch.Tensor, Any]:
        """Return a flat buffer, and the handle by which ranks reach each other's buffers."""
        memory = torch_private.symmetric_memory()
        key = (group.group_name, length, dtype)
        if key not in self.buffers:
            if length * dtype.itemsize >= 2**28:
                self.buffers.clear()  # large ones are not kept beside each other
            try:
                buffer = memory.empty(length, dtype=dtype, device=device)
                self.buffers[key] = buffer, memory.rendezvous(buffer, group)
            except RuntimeError as error:
                if "out of memory" in str(error):
                    raise
                raise Unavailable(f"no symmetric memory: {str(error).splitlines()[0]}") from None
        return self.buffers[key]


def call(
    op: Collective, backend: str, source: torch.Tensor, result: torch.Tensor, handle: Any,
    group: dist.ProcessGroup,
) -> Callable[[], object]:  # fmt: skip
    """Return a call that runs one operation on the current stream."""
    if backend == "one_shot":
        add = torch.ops.symm_mem.one_shot_all_reduce_out
        return lambda: add(source, "sum", group.group_name, result)
    if backend == "two_shot":
        return lambda: torch.ops.symm_mem.two_shot_all_reduce_(source, "sum", group.group_name)
    copies = list(_copies(op, source, result, handle, dist.get_rank(group)))

    def pull() -> None:
        handle.barrier(channel=0, timeout_ms=_PATIENCE_MS)
        for into, taken in copies:
            into.copy_(taken, non_blocking=True)
        handle.barrier(channel=1, timeout_ms=_PATIENCE_MS)

    return pull


def _copies(
    op: Collective, source: torch.Tensor, result: torch.Tensor, handle: Any, here: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield (destination, source) of each copy. Every rank begins with the rank after it, so that
    no two read from the same rank at once."""
    wanted = pattern.pieces(op, here)
    for piece in sorted(wanted, key=lambda piece: (piece.sources[0] - here - 1) % op.group_size):
        (peer,) = piece.sources
        far = handle.get_remote_tensor(peer, source.shape, source.dtype) if peer != here else source
        yield result[piece.at :][: piece.length], far[piece.start :][: piece.length]
