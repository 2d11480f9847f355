"""Call NCCL directly, on the current stream and with separate send and receive buffers.

``torch.distributed`` runs collectives on a separate stream and has no out-of-place all-reduce,
reduce or broadcast. nccl-tests calls the library as this module does. The library is the one that
torch has loaded; calls go through its C interface (nccl.h).
"""

import ctypes
import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import torch

_TYPES = {  # fp8 is moved, not reduced
    torch.int8: 0, torch.uint8: 1, torch.float8_e4m3fn: 1, torch.int32: 2, torch.int64: 4,
    torch.float16: 6, torch.float32: 7, torch.float64: 8, torch.bfloat16: 9,
}  # fmt: skip
_REDOPS = {"sum": 0, "prod": 1, "max": 2, "min": 3, "avg": 4}


class _UniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_byte * 128)]


class Message(NamedTuple):
    """A part of a buffer, sent to or received from a rank of the group."""

    peer: int
    tensor: torch.Tensor


class Communicator:
    """This rank's end of an NCCL communicator. All ranks of a group make theirs together."""

    def __init__(self, unique_id: Sequence[int], rank: int, size: int) -> None:
        self.handle = ctypes.c_void_p()
        whole = _UniqueId((ctypes.c_byte * 128)(*unique_id))
        _call("ncclCommInitRank", ctypes.byref(self.handle), size, whole, rank)

    def close(self) -> None:
        """Destroy the communicator. All ranks of the group do so together."""
        _call("ncclCommDestroy", self.handle)

    def collective(
        self,
        kind: str,
        source: torch.Tensor,
        result: torch.Tensor,
        redop: str = "sum",
        root: int = 0,
    ) -> Callable[[], object]:
        """Return a function that calls one of NCCL's collectives. ``redop`` and ``root``: of
        those that reduce or have one."""
        name, has_op, has_root = {
            "all_reduce": ("ncclAllReduce", True, False),
            "all_gather": ("ncclAllGather", False, False),
            "reduce_scatter": ("ncclReduceScatter", True, False),
            "broadcast": ("ncclBroadcast", False, True),
            "reduce": ("ncclReduce", True, True),
        }[kind]
        count = min(len(source), len(result))  # per rank, as nccl.h counts
        rest: list[Any] = [_REDOPS[redop]] if has_op else []
        rest += [root] if has_root else []
        rest = [ctypes.c_size_t(count), _TYPES[source.dtype], *rest, self.handle]

        def call() -> None:
            _call(name, *_buffers(source, result), *rest, _stream())

        return call

    def exchange(
        self, sent: Sequence[Message], received: Sequence[Message]
    ) -> Callable[[], object]:
        """Return a function that sends and receives all messages as one group, sorted by peer, like
        NCCL's own all-to-all."""
        ends = [("ncclSend", message) for message in sent if len(message.tensor)]
        ends += [("ncclRecv", message) for message in received if len(message.tensor)]
        ends.sort(key=lambda end: end[1].peer)

        def call() -> None:
            stream = _stream()
            _call("ncclGroupStart")
            for name, (peer, tensor) in ends:
                (buffer,) = _buffers(tensor)
                count = ctypes.c_size_t(len(tensor))
                _call(name, buffer, count, _TYPES[tensor.dtype], peer, self.handle, stream)
            _call("ncclGroupEnd")

        return call


class _Memory:
    """Device memory of NCCL's allocator. What tensors leave is kept for the next ones and never
    freed: NCCL drops a graph's registration after the graph, and would take new memory at the same
    address for the old."""

    left: ClassVar[list[tuple[int, int]]] = []  # bytes, address

    def __init__(self, num_bytes: int) -> None:
        fit = min((block for block in self.left if block[0] >= num_bytes), default=None)
        if fit:
            self.left.remove(fit)
        else:
            pointer, size = ctypes.c_void_p(), max(num_bytes, 1)
            _call("ncclMemAlloc", ctypes.byref(pointer), ctypes.c_size_t(size))
            fit = size, pointer.value or 0
        weakref.finalize(self, self.left.append, fit).atexit = False
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,), "typestr": "|u1", "data": (fit[1], False), "version": 3,
        }  # fmt: skip


def empty(length: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a flat buffer in memory that NCCL registers when it captures a call, as nccl-tests'
    is: messages pass without a copy into NCCL's own buffers."""
    memory = _Memory(length * dtype.itemsize)
    return torch.as_tensor(memory, device=device).view(dtype)


def unique_id() -> list[int]:
    """Return the identifier that the first rank of a group sends to the others."""
    made = _UniqueId()
    _call("ncclGetUniqueId", ctypes.byref(made))
    return list(made.internal)


def _buffers(*tensors: torch.Tensor) -> tuple[ctypes.c_void_p, ...]:
    return tuple(ctypes.c_void_p(tensor.data_ptr()) for tensor in tensors)


def _stream() -> ctypes.c_void_p:
    return ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)


@functools.cache
def library() -> ctypes.CDLL:
    """Return the NCCL that torch loaded. Raises an OSError if there is none."""
    if not torch.cuda.is_available():
        raise OSError("NCCL needs GPUs")
    try:
        found = ctypes.CDLL("libnccl.so.2")
    except OSError:
        raise OSError("libnccl.so.2 was not found beside torch") from None
    found.ncclGetErrorString.restype = ctypes.c_char_p
    return found


def _call(name: str, *arguments: Any) -> None:
    found = library()
    failed = getattr(found, name)(*arguments)
    if failed:
        raise RuntimeError(f"{name}: {found.ncclGetErrorString(failed).decode()}")
