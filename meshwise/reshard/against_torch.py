"""Check that both models have the same weights, by torch's own ``full_tensor``.

In: on every rank both models as the user has them. Out: the tensors that differ, in words. The
plan, its holdings and the hashes of tiles play no part: torch gathers each DTensor over its own
mesh, any other tensor counts as whole, and ranks compare the SHA-256 of all bytes.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from meshwise.ranks import Ranks
from meshwise.reshard import live
from meshwise.reshard.checks import SIDES
from meshwise.reshard.holdings import Holdings
from meshwise.reshard.transfer import Transfer
from meshwise.reshard.transports.copies import DTYPES

Models = Sequence[live.Model]
_BITS = {1: torch.uint8, 2: torch.float16, 4: torch.int32, 8: torch.int64}  # gloo gathers these


def check(ranks: Ranks, planned: Transfer, plans: Sequence[Holdings], models: Models) -> list[str]:
    """List why torch cannot gather this rank's tensors to the planned shapes."""
    mine = [_chosen(planned, model) for model in models]
    meshes = [{n: _mesh(t) for n, t in of.items() if _inside(t)} for of in mine]
    told = ranks.gather(meshes)
    wrong = []
    for number, (side, plan) in enumerate(zip(SIDES, plans, strict=True)):
        for name, tensor in mine[number].items():
            if tuple(tensor.shape) != tuple(plan[name].shape):
                wrong.append(
                    f"{side} {name} is {tuple(tensor.shape)} of {tuple(plan[name].shape)} and no "
                    "DTensor"
                )
            elif isinstance(tensor, DTensor) and _inside(tensor):
                size = tensor.device_mesh.size()
                if sum(of[number].get(name) == meshes[number][name] for of in told) % size:
                    wrong.append(f"{side} {name} is not on all {size} ranks of its mesh")
                elif (local := tuple(tensor.to_local().shape)) != (cut := _cut(tensor, local)):
                    wrong.append(f"{side} {name} has {local} on this rank, its mesh says {cut}")
    return wrong


def digests(planned: Transfer, model: live.Model) -> dict[str, str]:
    """Hash the whole of each tensor that this rank has. All ranks of a mesh call it together."""
    mine, found = _chosen(planned, model), {}
    with torch.no_grad():
        for name, (before, after) in zip(planned.names, planned.dtypes, strict=True):
            if name in mine and (values := _whole(mine[name])) is not None:
                if before != after:  # make all NaNs one: torch's bits depend on its vector code
                    values = values.to(DTYPES[after]).double()
                    values[values.isnan()] = torch.nan
                dense = values.cpu().clone(memory_format=torch.contiguous_format).view(-1)
                found[name] = hashlib.sha256(dense.view(torch.uint8).numpy().data).hexdigest()
    return found


def differences(told: Sequence[Sequence[Mapping[str, str]]]) -> Iterator[str]:
    """List the tensors whose digests differ between ranks or sides."""
    first: dict[str, tuple[str, str]] = {}
    for side, who in enumerate(SIDES):
        for rank, of in enumerate(told):
            for name, digest in of[side].items():
                known, where = first.setdefault(name, (digest, f"{who} on rank {rank}"))
                if digest != known:
                    yield f"{name}: the {who} on rank {rank} is not the {where}"


def _chosen(planned: Transfer, model: live.Model) -> dict[str, Tensor]:
    mine = live.named(model)
    return {name: mine[name] for name in planned.names if name in mine}


def _inside(tensor: Tensor) -> bool:
    """Whether this rank is in the tensor's mesh; only such ranks gather."""
    return isinstance(tensor, DTensor) and tensor.device_mesh.get_coordinate() is not None


def _mesh(tensor: Tensor) -> str:
    assert isinstance(tensor, DTensor)
    return f"{tensor.device_mesh.mesh.tolist()} {tensor.placements}"


def _cut(tensor: DTensor, local: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape that mesh and placements give this rank's part, if they are plain. FSDP2
    gives a part that tensor parallelism left empty another shape, and torch then waits forever."""
    shape, place = list(tensor.shape), tensor.device_mesh.get_coordinate() or ()
    for axis, (at, placement) in enumerate(zip(place, tensor.placements, strict=True)):
        if type(placement) is Shard:
            step = -(-shape[placement.dim] // tensor.device_mesh.size(axis))
            shape[placement.dim] = min(step, max(0, shape[placement.dim] - at * step))
        elif not placement.is_replicate():
            return local
    return tuple(shape)


def _whole(tensor: Tensor) -> Tensor | None:
    """Gather the tensor by torch; None on ranks outside its mesh. Raw bits are sent, because not
    all of torch's collectives support all dtypes."""
    if not isinstance(tensor, DTensor):
        return tensor.detach()
    if not _inside(tensor):
        return None
    bits = DTensor.from_local(
        tensor.to_local().view(_BITS[tensor.dtype.itemsize]), tensor.device_mesh,
        tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride(),
    )  # fmt: skip
    return bits.full_tensor().view(tensor.dtype)
