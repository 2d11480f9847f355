"""Memory-bound work: copies, by whose curve elementwise work is priced, and the optimizer.

adamw is one fused step over one flat fp32 parameter: p, g, m, v read and p, m, v written, 28
bytes an element. h2d and d2h copy between pinned memory of the host and the device.
"""

import functools
from collections.abc import Callable

import torch

from meshwise.probe.work import Unavailable, Work, num_buffers
from meshwise.spec import Case, Elementwise
from meshwise.timing import randn

FP32_BYTES = 4


def build(case: Case, device: torch.device) -> Work:
    op = case.op
    assert isinstance(op, Elementwise)
    if op.kind not in ("copy", "adamw", "h2d", "d2h"):
        raise Unavailable(f"no probe for {op.kind}: it is priced by its bytes, as a copy")
    if op.kind in ("h2d", "d2h") and device.type == "cpu":
        raise Unavailable("no host link: the device is the host")
    make = _adamw if op.kind == "adamw" else _copy
    seeds = range(num_buffers(case, op.bytes, device))
    return Work(calls=tuple(make(op, device, seed) for seed in seeds))


def _copy(op: Elementwise, device: torch.device, seed: int) -> Callable[[], object]:
    assert op.read_bytes == op.write_bytes, "a copy writes what it reads"
    source = randn((op.read_bytes // FP32_BYTES,), torch.float32, device, seed)
    target = torch.empty_like(source)
    if op.kind == "h2d":
        source = source.cpu().pin_memory()
    elif op.kind == "d2h":
        target = target.cpu().pin_memory()
    return functools.partial(target.copy_, source, non_blocking=True)


def _adamw(op: Elementwise, device: torch.device, seed: int) -> Callable[[], object]:
    elements = op.read_bytes // (4 * FP32_BYTES)
    parameter = torch.nn.Parameter(randn((elements,), torch.float32, device, 2 * seed))
    parameter.grad = randn((elements,), torch.float32, device, 2 * seed + 1)
    return torch.optim.AdamW([parameter], lr=1e-4, fused=True).step
