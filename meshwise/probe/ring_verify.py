"""Check ring attention against its definition, on the user's own shapes and ranks.

In: a ``VerifyRequest`` as JSON. Out: a JSON list of ``RingCheck``s in the file it names, by rank 0.
Every rank draws the same whole sequence, attends its own rows together with the other ranks, and
compares them with ``attention.reference``. The worst rank counts. Checks, for each ring size:

    forward, gradients   |x - reference| of a row of D elements, over that row's norm, or over the
                         mean norm if that is larger, so that one wrong row shows
    log-sum-exp          largest difference; rows that attend nothing are -inf in both
    locality             change one key and value: only rows that may attend it may change

float64 on CPUs, else the dtype asked for. Each dtype has its own tolerance.
"""

from collections.abc import Callable
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from meshwise import files, timing
from meshwise.attention.reference import multiplicity, reference
from meshwise.attention.shards import positions
from meshwise.prices import Prices
from meshwise.probe.loop import Failed
from meshwise.probe.ring import RankRing, Rings, agreed, attention, kernel
from meshwise.probe.work import torch_dtype
from meshwise.ranks import Ranks
from meshwise.spec import Costs, LongAttention, Record

TOLERANCE = {
    "fp64": (1e-12, 1e-11),
    "fp32": (1e-4, 3e-4),
    "fp16": (5e-3, 2e-2),
    "bf16": (4e-2, 0.1),
}
SHIFT = 3.0  # added to the changed key and value: far more than any rounding


class VerifyRequest(Record, kw_only=True):
    """The checks to do. ``kernel``: of attention, "" for the fastest."""

    op: LongAttention
    ring_sizes: tuple[int, ...]
    file: str
    kernel: str = ""
    costs: Costs | None = None


class RingCheck(Record, kw_only=True):
    """One check and its result."""

    ring_size: int
    name: str
    passed: bool
    found: str


class _Case(NamedTuple):
    """``inputs``: q, k, v of the whole sequence and the gradient of out, the same on all ranks.
    ``attend``: this rank's rows of q, k, v -> its rows of out and lse. ``mine``: the positions of
    this rank's rows."""

    op: LongAttention
    ring: RankRing
    mine: Tensor
    inputs: tuple[Tensor, ...]
    attend: Callable[..., tuple[Tensor, Tensor]]


def verify_ranks(ranks: Ranks, request: bytes) -> None:
    """Verify the request. Every rank must call this with the same one."""
    asked = msgspec.json.decode(request, type=VerifyRequest)
    rings, found = Rings(ranks), list[RingCheck]()
    prices = None if asked.costs is None else Prices(asked.costs)
    for size in asked.ring_sizes:
        ranks.at(f"verify ring of {size}")
        with kernel(asked.kernel):
            found += _verify(asked.op, rings.ring(asked.op, size), prices)
    if ranks.rank == 0:
        files.write_whole(asked.file, msgspec.json.encode(found))
    ranks.barrier("the end of all checks")


def _verify(op: LongAttention, ring: RankRing, prices: Prices | None) -> list[RingCheck]:
    shapes = [(op.batch, op.seq_len, heads, op.head_dim) for heads in _heads(op)]
    device, dtype = ring.ranks.device, torch_dtype(op.dtype)
    inputs = tuple(  # drawn on the CPU: equal on all ranks
        timing.randn(shape, dtype, "cpu", seed).to(device) for seed, shape in enumerate(shapes)
    )
    mine = torch.from_numpy(positions(ring.shards, ring.wire.rank)).to(device)
    attend = attention(op, ring, prices, return_lse=True)
    case = _Case(op, ring, mine, inputs, attend)
    checks = {"forward and gradients": _against_reference, "locality": _locality}
    found = []
    for name, check in checks.items():
        try:
            found += agreed(ring, lambda check=check: check(case))  # type: ignore[misc]
        except Failed as failed:
            if failed.lost:
                raise RuntimeError(f"{name}: {failed.reason}") from None
            found.append(_check(case, name, False, str(failed)))
    return found


def _heads(op: LongAttention) -> tuple[int, int, int, int]:
    return op.heads, op.kv_heads, op.kv_heads, op.heads


def _rows(case: _Case, *tensors: Tensor) -> list[Tensor]:
    return [x[:, case.mine] for x in tensors]


def _against_reference(case: _Case) -> list[RingCheck]:
    q, k, v = (x.double().clone().requires_grad_() for x in case.inputs[:3])
    out, lse = reference(q, k, v, case.op)
    wanted = torch.autograd.grad(out, (q, k, v), case.inputs[3].double())
    own = [x.clone().requires_grad_() for x in _rows(case, *case.inputs[:3])]
    got, got_lse = case.attend(*own)
    grads = torch.autograd.grad(got, own, _rows(case, case.inputs[3]))
    forward, backward = TOLERANCE[case.op.dtype]
    errors = {
        "forward": (_error(got.detach(), out.detach(), case.mine), forward),
        "log-sum-exp": (_lse_error(got_lse.detach(), lse.detach()[..., case.mine]), forward),
    }
    for name, x, exact in zip("qkv", grads, wanted, strict=True):
        errors[f"gradient of {name}"] = _error(x, exact, case.mine), backward
    return [
        _check(case, name, worst <= limit, f"error {worst:.1e}, at most {limit:.0e}")
        for (name, (_, limit)), worst in zip(
            errors.items(), _worst(case, [error for error, _ in errors.values()]), strict=True
        )
    ]


def _error(x: Tensor, exact: Tensor, mine: Tensor) -> float:
    """Return the largest error of this rank's rows; NaN counts as infinite."""
    size = exact.norm(dim=-1)
    least = max(float(size.mean()), 1e-30)
    off = (x.double() - exact[:, mine]).norm(dim=-1) / size[:, mine].clamp(min=least)
    return float(off.nan_to_num(nan=torch.inf).max()) if off.numel() else 0.0


def _lse_error(lse: Tensor, exact: Tensor) -> float:
    dead = exact == -torch.inf
    if not torch.equal(lse == -torch.inf, dead):
        return torch.inf
    off = (lse.double() - exact).masked_fill(dead, 0.0).abs()
    return float(off.nan_to_num(nan=torch.inf).max()) if off.numel() else 0.0


def _worst(case: _Case, errors: list[float]) -> list[float]:
    """Return the largest errors over all ranks, capped because JSON has no infinity."""
    told = case.ring.ranks.gather([min(error, 1e300) for error in errors])
    return [max(each) for each in zip(*told, strict=True)]


def _changed(case: _Case, token: int) -> Tensor:
    """Return [own rows, H]: whether a row of out changes if ``token``'s key and value change."""
    q, k, v = (x.clone() for x in case.inputs[:3])
    before, _ = case.attend(*_rows(case, q, k, v))
    for x in (k, v):
        x[:, token] += SHIFT
    after, _ = case.attend(*_rows(case, q, k, v))
    return (before != after).any(-1).any(0)


def _locality(case: _Case) -> list[RingCheck]:
    op, wrong, moved, allowed = case.op, 0, 0, 0
    tokens = sorted({0, op.seq_len // 3, op.seq_len // 2, op.seq_len - 1})
    masks = [multiplicity(op, head)[case.mine.cpu()] > 0 for head in range(op.heads)]
    for token in tokens:
        changed = _changed(case, token).cpu()
        may = torch.stack([mask[:, token] for mask in masks], dim=1)
        wrong += int((changed & ~may).sum())
        moved, allowed = moved + int((changed & may).sum()), allowed + int(may.sum())
    told = case.ring.ranks.gather((wrong, moved, allowed))
    wrong = sum(each[0] for each in told)
    moved, allowed = (sum(each[at] for each in told[: case.ring.wire.size]) for at in (1, 2))
    found = f"{wrong} rows changed that may not, {moved} of {allowed} that may"
    least = allowed if op.dtype == "fp64" else allowed / 2  # rounding may hide a small weight
    return [_check(case, "locality", not wrong and moved >= least, found)]


def _check(case: _Case, name: str, passed: bool, found: str) -> RingCheck:
    return RingCheck(ring_size=case.ring.wire.size, name=name, passed=passed, found=found)
