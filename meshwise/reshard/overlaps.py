"""Find tensors of one rank that share memory.

In: addresses, shapes and strides. Out: whether two elements of a tensor may overlap, and which
tensors have an element in common. The memory is not read, so it may be a GPU's.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

_MAX_WORK = 10_000  # of numpy's solver; a pair it cannot settle by then counts as shared


class Extent(NamedTuple):
    """The place of a tensor in memory; ``stride`` in elements, ``name`` says whose it is."""

    address: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    itemsize: int
    name: tuple[int, str]

    @property
    def end(self) -> int:
        last = sum((n - 1) * step for n, step in zip(self.shape, self.stride, strict=True))
        return self.address + (last + 1) * self.itemsize


def is_folded(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether two indices may have one address: a stride is within reach of the smaller ones.

    Also true for a few strides that interleave without meeting, such as (3, 2) of (2, 3).
    """
    reach = 0
    for step, size in sorted(zip(stride, shape, strict=True)):
        if size > 1 and step <= reach:
            return 0 not in shape
        reach += step * (size - 1)
    return False


def shared(extents: Iterable[Extent]) -> Iterator[tuple[Extent, Extent]]:
    """Yield pairs that have an element in common. A sweep by address leaves most pairs uncompared.

    Tensors that lie between each other's elements, as the columns of one matrix, have none.
    """
    active: list[Extent] = []
    for one in sorted(each for each in extents if 0 not in each.shape):
        active = [other for other in active if other.end > one.address]
        for other in active:
            if other[:4] == one[:4] or _meet(other, one):
                yield other, one
        active.append(one)


def _meet(a: Extent, b: Extent) -> bool:
    try:
        return np.shares_memory(_seen(a), _seen(b), _MAX_WORK)  # type: ignore[arg-type]  # any int
    except np.exceptions.TooHardError:
        return True


class _HostMemory:
    """Memory at an address, as numpy asks for it."""

    def __init__(self, of: Extent) -> None:
        self.__array_interface__ = {
            "version": 3,
            "data": (of.address, True),
            "shape": of.shape,
            "strides": tuple(step * of.itemsize for step in of.stride),
            "typestr": f"|V{of.itemsize}",
        }


def _seen(of: Extent) -> npt.NDArray[Any]:
    return np.asarray(_HostMemory(of))
