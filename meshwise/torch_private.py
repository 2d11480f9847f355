"""Every private name of torch that meshwise uses, each with the public way it stands in for.

Tried on torch 2.11 and 2.13.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Shard

Postponed = list[dict[str, Any]]
_ATEN = torch.ops.aten
# Operators whose results selective recomputation keeps in compiled code. Most have no public name.
KEPT = frozenset(
    {
        _ATEN.mm.default,
        _ATEN.addmm.default,
        _ATEN.bmm.default,
        _ATEN.convolution.default,
        _ATEN._grouped_mm.default,
        _ATEN._scaled_mm.default,
        _ATEN._scaled_dot_product_cudnn_attention.default,
        _ATEN._scaled_dot_product_flash_attention.default,
        _ATEN._scaled_dot_product_efficient_attention.default,
        _ATEN._scaled_dot_product_flash_attention_for_cpu.default,
        torch.ops._c10d_functional.reduce_scatter_tensor.default,
        torch.ops._c10d_functional.all_reduce.default,
    }
)


def storage_of(tensor: Tensor) -> int:
    """Return the number of a tensor's storage, while that lives; addresses on meta are all 0."""
    return int(tensor.untyped_storage()._cdata)


def set_timeout(groups: Iterable[dist.ProcessGroup], timeout_s: float) -> None:
    """Set how long collectives wait from now on.

    A mesh makes its groups with torch's 10 or 30 minutes, whatever the default group was given, and
    a group's timeout is public only where the group is made.
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


def summed(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sum x over a group: in place, but in a new tensor where code is compiled.

    A compiled recomputation goes wrong over what was changed in place, silently: gradients of torch
    2.11 through the public ``all_reduce`` were 90 times too large.
    """
    if torch.compiler.is_compiling():
        from torch.distributed import _functional_collectives

        total: Tensor = _functional_collectives.all_reduce(x, "sum", group)
        return total
    dist.all_reduce(x, group=group)
    return x


def all_reduced(x: Tensor, group: str) -> Tensor:
    """Sum x over the group of this name, in a new tensor.

    These four are what torch's functional collectives call, whose public forms wrap the result in
    eager code, and changed names between 2.11 and 2.13.
    """
    call = torch.ops._c10d_functional
    return call.wait_tensor(call.all_reduce(x, "sum", group))  # type: ignore[no-any-return]


def gathered(x: Tensor, group: str, size: int) -> Tensor:
    """Return the x of all ranks, one after the other in dim 0."""
    call = torch.ops._c10d_functional
    found = call.all_gather_into_tensor(x.contiguous(), size, group)
    return call.wait_tensor(found)  # type: ignore[no-any-return]


def scattered(x: Tensor, group: str, size: int) -> Tensor:
    """Sum x over all ranks; return this rank's part of dim 0."""
    call = torch.ops._c10d_functional
    found = call.reduce_scatter_tensor(x, "sum", size, group)
    return call.wait_tensor(found)  # type: ignore[no-any-return]


def exchanged(x: Tensor, group: str, size: int) -> Tensor:
    """Send part i of dim 0 of x to rank i; return the parts that came from each rank."""
    call, splits = torch.ops._c10d_functional, [len(x) // size] * size
    found = call.all_to_all_single(x, splits, splits, group)
    return call.wait_tensor(found)  # type: ignore[no-any-return]


def symmetric_memory() -> Any:
    """Return torch's module of symmetric memory, an alpha interface that has no public name."""
    from torch.distributed import _symmetric_memory

    return _symmetric_memory


def summed_at_once(group: dist.ProcessGroup, like: Tensor) -> Callable[[Tensor], Tensor] | None:
    """Return a sum over ranks of tensors as large as ``like``, each rank reading those of all from
    symmetric memory: a third of NCCL's time for some KiB. None where GPUs cannot.

    No multicast is used.
    """
    memory = symmetric_memory()
    try:
        buffer = memory.empty(like.numel(), dtype=like.dtype, device=like.device)
        memory.rendezvous(buffer, group)
    except RuntimeError:
        return None
    add, name = torch.ops.symm_mem.one_shot_all_reduce_copy, group.group_name
    return lambda part: add(buffer, part.flatten(), "sum", name).view_as(part)


def sleep(cycles: int) -> None:
    """Keep the current CUDA stream, and nothing else of the device, busy for so many cycles."""
    torch.cuda._sleep(cycles)


def scaled_mm(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    dtype: torch.dtype,
    out: Tensor | None = None,
) -> Tensor:
    """Return (a * scale_a) @ (b * scale_b) of fp8 operands in ``dtype``, summed in full precision.

    The public ``F.scaled_mm`` has no ``out``, and no CPU kernel before 2.13. Training must not give
    ``out``: code that torch 2.11 compiles then has gradients of 0 for the weights.
    """
    return torch._scaled_mm(a, b, scale_a=scale_a, scale_b=scale_b, out_dtype=dtype, out=out)


def allow_graphs(count: int) -> None:
    """Let one function be compiled this many times, for layers of different shapes and settings.

    torch refuses after 8. Of the public ``torch.compiler.config`` only 2.13 is known to have it.
    """
    limits = torch._dynamo.config
    limits.recompile_limit = max(count, limits.recompile_limit)


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


def part_of(tensor: Tensor) -> Tensor:
    """Return this rank's part itself. The public ``to_local`` makes a view of it, in 2 us."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def placed_by(tensor: DTensor) -> Any:
    """Return all that says where a DTensor's shards are, comparable. The public ``placements``
    do not say in which order axes shard one dim (``shard_order``, not in torch 2.11)."""
    return tensor._spec


def begin(model: nn.Module) -> None:
    """Do what FSDP2 does once, before the first forward that it sees."""
    _state(model)._lazy_init()


@contextmanager
def unseen(units: Iterable[Any]) -> Iterator[None]:
    """Hide from FSDP2 the forwards of its units in here, and the backwards of their results.

    It can be told publicly to gather and to reduce nothing; its hooks run all the same.
    """
    taken = []
    for unit in units:
        state = _state(unit)
        for hooks, handle, last in (
            (unit._forward_pre_hooks, state._pre_forward_hook_handle, False),
            (unit._forward_hooks, state._post_forward_hook_handle, True),
        ):
            taken.append((hooks, handle.id, hooks.pop(handle.id), last))
    try:
        yield
    finally:
        for hooks, number, hook, last in taken:
            hooks[number] = hook
            hooks.move_to_end(number, last=last)


@torch.no_grad()
def add_gradients(units: Iterable[Any]) -> None:
    """Add the gradients of a backward that FSDP2 did not see to the sums that it keeps (in the
    dtype of reductions), as its hooks would, but in few calls."""
    sums, parts = [], []
    for unit in units:
        state = _state(unit)
        groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
        for weight in (weight for group in groups if group for weight in group.fsdp_params):
            total, part = weight.unsharded_accumulated_grad, weight.unsharded_param.grad
            if total is None or part is None:
                weight.to_accumulated_grad_if_needed()
            elif isinstance(part, DTensor) and part.placements != total.placements:
                weight.accumulate_unsharded_grad_if_needed()
            else:
                weight.unsharded_param.grad = None
                sums.append(part_of(total))
                parts.append(part_of(part))
    if sums:
        torch._foreach_add_(sums, parts)


def end_backward(model: nn.Module) -> None:
    """Do what FSDP2 does when autograd has ended, for gradients that no hook of its saw."""
    _state(model)._root_post_backward_final_callback()


def _state(unit: Any) -> Any:
    """Return what FSDP2 knows of a unit."""
    return fully_shard.state(unit)  # type: ignore[attr-defined]


def cut(dim: int, parts: int) -> Placement:
    """Return a placement that cuts each of equal parts of a dim over an axis, as a fused [q|k|v].

    The public ``Shard`` cuts a dim once. FSDP2 uses this one for dims that tp has cut too.
    """
    from torch.distributed.tensor.placement_types import _StridedShard

    return Shard(dim) if parts == 1 else _StridedShard(dim, split_factor=parts)


def cuts_parts(placement: Placement) -> TypeGuard[Shard]:
    """Whether it is one that ``cut`` makes of several parts; it has a dim like a public shard."""
    from torch.distributed.tensor.placement_types import _StridedShard

    return isinstance(placement, _StridedShard)
