"""Reach memory of other processes on this host's GPUs, by CUDA's interprocess handles.

In: tensors as torch allocated them. Out: addresses at which this process reaches a peer's tensors.
One handle stands for a whole allocation, which may hold many tensors. The driver is called through
its C interface (cuda.h), because torch gives out such handles only together with a reference count
that ends with the exporting process.
"""

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from meshwise.ranks import Ranks

_LAZY_PEER_ACCESS = 1
_LANES = 2  # of a mailbox: Triton wants a power of two


class _Handle(ctypes.Structure):
    _fields_ = [("reserved", ctypes.c_byte * 64)]


class Handle(NamedTuple):
    """The place of a tensor: an allocation's handle, in hex, and bytes into it."""

    handle: str
    offset: int


def share(tensor: Tensor) -> Handle:
    """Describe ``tensor`` for a peer that reaches it; ValueError if its memory cannot be shared."""
    base, size, handle = ctypes.c_uint64(), ctypes.c_size_t(), _Handle()
    address = tensor.data_ptr()
    _call(
        "cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(address)
    )
    try:
        _call("cuIpcGetMemHandle", ctypes.byref(handle), base)
    except OSError as error:
        raise ValueError(
            f"method = 'ipc': memory of this process cannot be shared ({error}); leave "
            "expandable_segments out of PYTORCH_ALLOC_CONF, or use method = 'nccl'"
        ) from None
    return Handle(bytes(handle.reserved).hex(), address - base.value)


def can_share(device: torch.device) -> bool:
    """Whether memory that torch allocates on a GPU can be shared."""
    try:
        share(torch.zeros(1, device=device))
    except ValueError:
        return False
    return True


class Peers:
    """Allocations of peers that this process has opened, and its meetings with them. ``close``
    before a peer frees them."""

    def __init__(self) -> None:
        self.bases: dict[str, int] = {}
        self.stops: list[Tensor] = []

    def release(self) -> None:
        """Release devices that wait for a peer that will not come."""
        for stop in self.stops:
            stop.fill_(1)

    def address(self, shared: Handle) -> int:
        handle, offset = shared
        if handle not in self.bases:
            base, opened = ctypes.c_uint64(), _Handle.from_buffer_copy(bytes.fromhex(handle))
            _call("cuIpcOpenMemHandle_v2", ctypes.byref(base), opened, _LAZY_PEER_ACCESS)
            self.bases[handle] = base.value
        return self.bases[handle] + offset

    def close(self) -> None:
        for base in self.bases.values():
            _call("cuIpcCloseMemHandle", ctypes.c_uint64(base))
        self.bases.clear()


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _call(name: str, *arguments: Any) -> None:
    code = getattr(_driver(), name)(*arguments)
    if code:
        text = ctypes.c_char_p()
        _driver().cuGetErrorString(code, ctypes.byref(text))
        raise OSError(f"{name}: {(text.value or b'unknown error').decode()}")


class Meeting:
    """A meeting of the devices of this rank and ``others`` on their streams, without their hosts.

    ``value``: this rank's number (int32) for the next meeting. ``total``: the sum of all numbers in
    the last.
    """

    def __init__(self, ranks: Ranks, peers: Peers, others: Sequence[int]) -> None:
        from meshwise.reshard.transports import kernels

        device, here = ranks.device, ranks.rank
        lanes = max(_LANES, 1 << max(0, len(others) - 1).bit_length())
        self.near = torch.zeros(2 * lanes, dtype=torch.int64, device=device)
        self.value = torch.zeros(1, dtype=torch.int32, device=device)
        self.total = torch.zeros(1, dtype=torch.int32, device=device)
        stop = torch.zeros(1, dtype=torch.int32).pin_memory()
        peers.stops.append(stop)
        epoch = torch.zeros(1, dtype=torch.int64, device=device)
        torch.cuda.synchronize(device)
        boxes = ranks.gather([share(self.near), list(others)])
        far = [0] * lanes
        for lane, rank in enumerate(others):
            box, known = boxes[rank]
            far[lane] = peers.address(Handle(*box)) + 16 * known.index(here)
        self.far = torch.tensor(far, device=device)
        self.meet: Callable[[], object] = kernels.meeting(
            self.far, self.near, len(others), epoch, self.value, self.total, stop
        )
