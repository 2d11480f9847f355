"""Weights whose elements identify themselves: written in one layout, checked in another.

In: what a rank holds (``reshard.holdings``) and its buffers. The bits of an element are a hash of
the logical tensor's name, the element's place in it and a version, cut to the lowest bits that fit
the dtype. So a lost, misplaced or outdated element is found (in bf16 one in 65,536 escapes by
chance). Bits are written and compared as integers, so NaN and -0.0 are compared too. Work is
vectorised, in parts of at most ``PART`` elements, which need 32 bytes of scratch each.
"""

import hashlib
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from meshwise.reshard.holdings import Holdings
from meshwise.reshard.regions import Box, narrowed

PART = 2**22
POISON = 0x5A  # every byte of elements not written yet
_A, _B = -0x61C8864680B583EB, -0x40A7B892E31B1A47  # splitmix64's, as signed numbers
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def poison(buffers: Mapping[str, Tensor]) -> None:
    """Overwrite everything with bits that no version has, except by chance."""
    for buffer in buffers.values():
        _bits(buffer).fill_(int.from_bytes(bytes([POISON]) * buffer.element_size(), "little"))


def write(buffers: Mapping[str, Tensor], held: Holdings, rank: int, version: int) -> None:
    """Set every element that the rank holds to its bits of ``version``."""
    for name, box, shape, part in _parts(buffers, held, rank):
        part.copy_(_expected(name, box, shape, version, part))


def change(buffers: Mapping[str, Tensor], held: Holdings, rank: int, turn: int, every: int) -> None:
    """Change some elements, the same ones on all ranks: one in ``every`` of the runs of 4,096
    neighbours in a logical tensor, and other runs in each ``turn``."""
    for _, box, shape, part in _parts(buffers, held, rank):
        part.bitwise_xor_((((_places(box, shape, part) >> 12) + turn) % every == 0).to(part.dtype))


def wrong(
    buffers: Mapping[str, Tensor], held: Holdings, rank: int, version: int
) -> tuple[int, dict[str, int]]:
    """Compare with ``version``; count the elements compared, and the wrong ones by tensor."""
    compared, counts = 0, dict[str, Tensor]()
    for name, box, shape, part in _parts(buffers, held, rank):
        differ = torch.count_nonzero(part != _expected(name, box, shape, version, part))
        counts[name] = counts.get(name, torch.zeros_like(differ)) + differ
        compared += part.numel()
    found = torch.stack([*counts.values()]).tolist() if counts else []
    return compared, {name: n for name, n in zip(counts, found, strict=True) if n}


def _parts(
    buffers: Mapping[str, Tensor], held: Holdings, rank: int
) -> Iterator[tuple[str, Box, tuple[int, ...], Tensor]]:
    """Cut what the rank holds into parts: tensor name, box, tensor shape, view of the bits."""
    for name, tensor in held.items():
        for piece in tensor.layout:
            if piece.rank != rank:
                continue
            seen = _seen(_bits(buffers[piece.buffer or name]), len(tensor.shape))
            for box in _split(piece.box):
                local = piece.local(box)
                ranges = zip(local.low, local.high, strict=True)
                yield name, box, tensor.shape, seen[tuple(slice(*ends) for ends in ranges)]


def _bits(buffer: Tensor) -> Tensor:
    return buffer.view(_BITS[buffer.element_size()])


def _seen(buffer: Tensor, dims: int) -> Tensor:
    """Return the buffer with so many dims: flatten leading dims, or add dims of extent 1."""
    if buffer.dim() > dims:
        return buffer.flatten(0, buffer.dim() - dims)
    return buffer[(None,) * (dims - buffer.dim())]


def _split(box: Box) -> Iterator[Box]:
    """Cut a box into boxes of at most ``PART`` elements, along the outermost dim, then the next."""
    if box.num_elements <= PART:
        yield box
        return
    dim = next(d for d, extent in enumerate(box.shape) if extent > 1)
    step = max(1, PART * box.shape[dim] // box.num_elements)
    for low in range(box.low[dim], box.high[dim], step):
        high = min(low + step, box.high[dim])
        yield from _split(narrowed(box, dim, low, high))


def _places(box: Box, shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Return the elements' row-major indices in the whole logical tensor."""
    places, stride = torch.zeros((), dtype=torch.int64, device=like.device), 1
    for dim in reversed(range(len(shape))):
        along = torch.arange(box.low[dim], box.high[dim], device=like.device) * stride
        places = places + along.reshape(-1, *[1] * (len(shape) - 1 - dim))
        stride *= shape[dim]
    return places


def _expected(name: str, box: Box, shape: tuple[int, ...], version: int, like: Tensor) -> Tensor:
    """Return the bits that these elements must have."""
    seed = hashlib.blake2b(f"{name} {version}".encode(), digest_size=8).digest()
    mixed = _places(box, shape, like)
    mixed = mixed.add_(int.from_bytes(seed, "little", signed=True)).mul_(_A)
    mixed = mixed.bitwise_xor_(mixed >> 31).mul_(_B)
    return mixed.bitwise_xor_(mixed >> 29).to(like.dtype)
