"""Every private name of torch that meshwise uses, each with the public way it stands in for.

Tried on torch 2.11 and 2.13.
"""

from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

Postponed = list[dict[str, Any]]


def set_timeout(groups: Iterable[dist.ProcessGroup], timeout_s: float) -> None:
    """How long collectives wait from now on.

    A mesh makes its groups with torch's 10 or 30 minutes, whatever the default group was given,
    and a group's timeout is public only where the group is made.
    """
    for group in groups:
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_s), group)


def abort(groups: Iterable[dist.ProcessGroup], device: torch.device) -> None:
    """End the GPU collectives of groups that a rank has left, so that this process can go on.

    The public ``destroy_process_group`` waits for them.
    """
    if device.type == "cuda":
        for group in groups:
            group._get_backend(device).abort()


def scale(tensors: list[Tensor], factor: Tensor) -> None:
    """Multiply many tensors in place in few kernels; torch's optimizers do so by this name."""
    torch._foreach_mul_(tensors, factor)


def sleep(cycles: int) -> None:
    """Keep the current CUDA stream, and nothing else of the device, busy for so many cycles."""
    torch.cuda._sleep(cycles)


def scaled_mm(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, out: Tensor) -> Tensor:
    """out = (a * scale_a) @ (b * scale_b) of fp8 operands, summed in full precision.

    The public ``F.scaled_mm`` allocates its result, and has no CPU kernel before 2.13.
    """
    torch._scaled_mm(a, b, scale_a=scale_a, scale_b=scale_b, out_dtype=out.dtype, out=out)
    return out


def backward_of_input(
    result: Tensor, gradient: Tensor | None, x: Tensor, weights: Iterable[nn.Parameter]
) -> Postponed:
    """Fill ``x.grad`` and return what is left to do for the weights.

    Public autograd would go through the whole graph again for the weights. torch's pipelines call
    the same two functions.
    """
    from torch.distributed.pipelining import _backward

    gradients = None if gradient is None else [gradient]
    return _backward.stage_backward_input([result], gradients, [x], iter(weights))[1]


def backward_of_weights(weights: Iterable[nn.Parameter], postponed: Postponed) -> None:
    """Add to the gradients of the weights what ``backward_of_input`` left."""
    from torch.distributed.pipelining import _backward

    _backward.stage_backward_weight(iter(weights), postponed)


def end_backward(model: nn.Module) -> None:
    """What FSDP2 does when autograd has ended, for gradients that no hook of its saw."""
    fully_shard.state(model)._root_post_backward_final_callback()  # type: ignore[attr-defined]
