"""A case that is ready to be timed: buffers are allocated, nothing has run."""

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
# the words with which torch, cuDNN, Inductor and FlashAttention say they have no kernel
_NO_KERNEL = re.compile(
    r"no (available|viable|valid|engine)|not (currently )?(supported|implemented)|could not run"
    r"|only supports?\b|only supported|does not support|unsupported|no kernel image|NOT_SUPPORTED"
    r"|multiples? of|divisible by|out of resource|compute capability",
    re.IGNORECASE,
)
_DTYPES = {name: dtype for dtype, name in DTYPES.items()}


Call = Callable[[], object]


class Check(NamedTuple):
    """A check of a collective. ``fill``: poison the result and write sources with a known result.
    ``num_wrong``: count the wrong elements of this rank's result after the calls."""

    fill: Callable[[], None]
    num_wrong: Callable[[], int]


class Work(NamedTuple):
    """``calls``: the same work on rotated buffers. ``prepare``: runs untimed before each iteration.
    ``metrics``: returns other figures after a first call. ``check``: takes a number of calls in a
    row and returns the check of ``calls[-1]``'s result; None, on all ranks, if there is none.
    ``batch``: how many calls a graph holds, or are timed as one in the pipelined regime.
    ``on_host``: the host does the work, even if there is a GPU. ``measure``: times the case instead
    of the sweep; takes seconds and what to do with the timed work afterwards."""

    calls: tuple[Call, ...]
    prepare: Callable[[], None] | None = None
    metrics: Callable[[], dict[str, float | tuple[float, ...]]] | None = None
    check: Callable[[int], Check | None] = lambda _: None
    batch: int = 1
    on_host: bool = False
    measure: Callable[[float, Callable[[Call], None]], Timed] | None = None


class Unavailable(RuntimeError):
    """This machine or version has no back end for the case. The case is skipped with a reason."""


def tried(call: Callable[[], T]) -> T:
    """Return the result of a first call. A missing kernel raises Unavailable, with the reasons from
    the library's error and its warnings (torch's attention gives reasons as warnings)."""
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
    """Join the first line of each text, without the place in torch's sources."""
    lines = [text.strip().splitlines()[0].split(" (Triggered internally")[0] for text in said]
    reasons = [line for line in lines if not line.endswith(("because:", "issues/new"))]
    return "; ".join(dict.fromkeys(line.strip(" .") for line in reasons))


def communicates(op: Op | Step | Resharding | LongAttention) -> bool:
    return isinstance(op, Collective | Overlap) or (isinstance(op, Block) and op.is_shared)


def torch_dtype(name: str) -> torch.dtype:
    if name not in _DTYPES:
        raise Unavailable(f"no probe for {name} yet; measure {', '.join(_DTYPES)}")
    return _DTYPES[name]


def fp32_precision(dtype: str, device: torch.device) -> AbstractContextManager[None]:
    """Return a context in which fp32 kernels use ``dtype``; it does nothing for other dtypes."""
    if dtype == "tf32" and device.type != "cuda":
        raise Unavailable("tf32 is a precision of GPUs; measure fp32")
    if dtype not in ("fp32", "tf32"):
        return nullcontext()
    return kernels.fp32_precision("tf32" if dtype == "tf32" else "ieee")


def num_buffers(case: Case, size_bytes: int, device: torch.device) -> int:
    """Return how many buffer sets of ``size_bytes`` to rotate through, so that none is in L2 when
    its turn comes. The timing loop flushes L2 as well; the sets also vary the addresses."""
    if case.regime != "cold" or device.type != "cuda":
        return 1
    cache_bytes = torch.cuda.get_device_properties(device).L2_cache_size
    return min(1 + -(-cache_bytes // max(size_bytes, 1)), _MAX_BUFFERS)
