"""A case made ready to be timed: buffers allocated, nothing run yet."""

from collections.abc import Callable
from typing import NamedTuple

import torch

from meshwise.spec import Block, Case, Collective, Op, Step

_MAX_BUFFERS = 32
_DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


class Work(NamedTuple):
    """``calls``: the same work on rotated buffers. ``prepare``: untimed, before each iteration.
    ``metrics``: other numbers, asked for after a first call."""

    calls: tuple[Callable[[], object], ...]
    prepare: Callable[[], None] | None = None
    metrics: Callable[[], dict[str, float | tuple[float, ...]]] | None = None


class Unavailable(RuntimeError):
    """This machine or version has no back end for the case: it is skipped, and says why."""


def communicates(op: Op | Step) -> bool:
    return isinstance(op, Collective) or (isinstance(op, Block) and op.tp > 1)


def torch_dtype(name: str) -> torch.dtype:
    if name not in _DTYPES:
        raise Unavailable(f"no probe for {name} yet; measure {', '.join(_DTYPES)}")
    return _DTYPES[name]


def num_buffers(case: Case, size_bytes: int, device: torch.device) -> int:
    """Sets of buffers of ``size_bytes`` to rotate through, so that none is in L2 when its turn
    comes. The timing loop flushes L2 as well; the sets also vary the addresses."""
    if case.regime != "cold" or device.type != "cuda":
        return 1
    cache_bytes = torch.cuda.get_device_properties(device).L2_cache_size
    return min(1 + -(-cache_bytes // max(size_bytes, 1)), _MAX_BUFFERS)
