"""A case made ready to be timed: buffers allocated, nothing run yet."""

import re
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple, TypeVar

import torch

from meshwise.attention.arguments import DTYPES
from meshwise.engine import kernels
from meshwise.spec import Block, Case, Collective, LongAttention, Op, Overlap, Resharding, Step
from meshwise.timing import Timed

T = TypeVar("T")

_MAX_BUFFERS = 32
# how torch, cuDNN, Inductor and FlashAttention say that they have no code for a case
_NO_KERNEL = re.compile(
    r"no (available|viable|valid|engine)|not (currently )?(supported|implemented)|could not run"
    r"|only supports?\b|only supported|does not support|unsupported|no kernel image|NOT_SUPPORTED"
    r"|multiples? of|divisible by|out of resource|compute capability",
    re.IGNORECASE,
)
_DTYPES = {name: dtype for dtype, name in DTYPES.items()}


Call = Callable[[], object]


class Check(NamedTuple):
    """``fill``: poison the result and write sources of which every result is known. ``num_wrong``:
    how many elements of this rank's result are wrong after the calls."""

    fill: Callable[[], None]
    num_wrong: Callable[[], int]


class Work(NamedTuple):
    """``calls``: the same work on rotated buffers. ``prepare``: untimed, before each iteration.
    ``metrics``: other numbers, asked for after a first call. ``check``: how the result of
    ``calls[-1]`` is checked after so many calls in a row, alike on all ranks; None where it cannot
    be. ``batch``: calls that a graph holds, and that are timed as one when they are pipelined.
    ``on_host``: the work is the host's, also where there is a GPU. ``measure``: how the case times
    itself in place of the sweep, given seconds and what to do with the timed work afterwards."""

    calls: tuple[Call, ...]
    prepare: Callable[[], None] | None = None
    metrics: Callable[[], dict[str, float | tuple[float, ...]]] | None = None
    check: Callable[[int], Check | None] = lambda _: None
    batch: int = 1
    on_host: bool = False
    measure: Callable[[float, Callable[[Call], None]], Timed] | None = None


class Unavailable(RuntimeError):
    """This machine or version has no back end for the case: it is skipped, and says why."""


def tried(call: Callable[[], T]) -> T:
    """The outcome of a first call; a kernel that does not exist is Unavailable, with the reasons
    that the library gives as its error and, torch's attention, as warnings."""
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        try:
            return call()
        except RuntimeError as error:
            said = [str(error), *(str(warning.message) for warning in heard)]
            if isinstance(error, NotImplementedError) or _NO_KERNEL.search(said[0]):
                raise Unavailable(_first_sentences(said)) from None
            raise


def _first_sentences(said: list[str]) -> str:
    """The first line of each text, without where in torch's sources it was written."""
    lines = [text.strip().splitlines()[0].split(" (Triggered internally")[0] for text in said]
    reasons = [line for line in lines if not line.endswith(("because:", "issues/new"))]
    return "; ".join(dict.fromkeys(line.strip(" .") for line in reasons))


def communicates(op: Op | Step | Resharding | LongAttention) -> bool:
    return isinstance(op, Collective | Overlap) or (isinstance(op, Block) and op.tp > 1)


def torch_dtype(name: str) -> torch.dtype:
    if name not in _DTYPES:
        raise Unavailable(f"no probe for {name} yet; measure {', '.join(_DTYPES)}")
    return _DTYPES[name]


def fp32_precision(dtype: str, device: torch.device) -> AbstractContextManager[None]:
    """Hold kernels of fp32 tensors to ``dtype``; of other dtypes do nothing."""
    if dtype == "tf32" and device.type != "cuda":
        raise Unavailable("tf32 is a precision of GPUs; measure fp32")
    if dtype not in ("fp32", "tf32"):
        return nullcontext()
    return kernels.fp32_precision("tf32" if dtype == "tf32" else "ieee")


def num_buffers(case: Case, size_bytes: int, device: torch.device) -> int:
    """Sets of buffers of ``size_bytes`` to rotate through, so that none is in L2 when its turn
    comes. The timing loop flushes L2 as well; the sets also vary the addresses."""
    if case.regime != "cold" or device.type != "cuda":
        return 1
    cache_bytes = torch.cuda.get_device_properties(device).L2_cache_size
    return min(1 + -(-cache_bytes // max(size_bytes, 1)), _MAX_BUFFERS)
