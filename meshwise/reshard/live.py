"""Read what live models hold: their tensors by name, and every rank's share of each DTensor.

In: on every rank a module, tensors by name, or None. Out: this rank's storage of each parameter and
persistent buffer, without a copy; ``Holdings`` of all ranks, from the mesh and placements of
DTensors (any other tensor counts as whole); and how each buffer lies in its rank's memory.

The share of a dim follows DTensor's definition, placement by placement. ``Shard`` takes a rank's
part of torch.chunk. ``_StridedShard(split_factor)``, which FSDP2 makes of tp's shards, cuts the dim
into that many chunks and takes the rank's part of each. torch's own helper
(``compute_local_shape_and_global_offset``) gives only the first index, which is not enough if a
share is in several places.

A mesh whose ranks do not ascend along an axis is refused if that axis shards, because torch
contradicts itself there. Its groups sort their ranks. ``full_tensor``, FSDP2 and
``distribute_tensor`` find a rank's chunk by its number in the group; ``redistribute``,
``src_data_rank=None`` and distributed checkpoints by its coordinate (tried on 2.13, gloo). A
DTensor does not tell which of them made it.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from meshwise.ranks import Ranks
from meshwise.reshard import holdings as held_by
from meshwise.reshard.holdings import Holdings
from meshwise.reshard.overlaps import is_folded
from meshwise.reshard.regions import Box, Piece, chunks, whole
from meshwise.reshard.tiles import Memory, TileBuffer, alignment_of
from meshwise.reshard.transports.copies import DTYPES
from meshwise.torch_private import part_of, placed_by

Model = nn.Module | Mapping[str, Tensor] | None
Runs = list[tuple[int, int]]  # index ranges [low, high) of one dim, in the order of the buffer

NAMES = {dtype: name for name, dtype in DTYPES.items() if name != "tf32"}


class LocalPart(NamedTuple):
    """One rank's share of a tensor. ``buffer``: the first name of this storage (tied weights have
    several). ``runs`` of each dim; none if the rank has nothing. ``memory`` of its part.
    ``placements`` of a DTensor."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    buffer: str
    runs: list[Runs]
    memory: Memory
    placements: str = ""


Shares = list[list[LocalPart]]  # of each rank


def tensors(model: Model) -> dict[str, Tensor]:
    """This rank's storage of each parameter and persistent buffer; tied ones under every name."""
    with torch.no_grad():
        return {name: _local(tensor).detach() for name, tensor in named(model).items()}


def gathered(model: Model, ranks: Ranks) -> Shares:
    """Gather every rank's shares. ValueError on all ranks for what one of them cannot describe."""

    def told(error: Exception) -> str | None:  # also torch's errors: the others wait for this rank
        is_ours = isinstance(error, ValueError | RuntimeError)
        return str(error).partition("\n")[0] if is_ours else None

    mine, failed = ranks.together(lambda: list(_shares(model)), told)
    if wrong := [f"rank {rank}: {said}" for rank, said in enumerate(failed) if said]:
        raise ValueError("; ".join(wrong[:8]))
    return [msgspec.convert(shares, list[LocalPart]) for shares in ranks.gather(mine)]


def held(everyone: Shares, *, as_source: bool = False) -> Holdings:
    """Return each tensor's layout. A weight that is tied on a rank appears under its first name
    only, so that it is written once; with ``as_source`` it can be read under each name.

    ValueError if ranks differ about the shape or dtype of a tensor.
    """
    found: dict[str, dict[int, LocalPart]] = {}
    for rank, shares in enumerate(everyone):
        for share in shares:
            if as_source or share.buffer == share.name:
                found.setdefault(share.name, {})[rank] = share
    wrong = [text for name, of in found.items() if (text := _difference(name, of))]
    if wrong:
        more = f"; and {len(wrong) - 4} more tensors" if len(wrong) > 4 else ""
        raise ValueError("; ".join(wrong[:4]) + more)
    return {
        name: held_by.HeldTensor(
            next(iter(of.values())).shape,
            next(iter(of.values())).dtype,
            tuple(piece for rank, share in of.items() for piece in pieces(rank, share)),
        )
        for name, of in found.items()
    }


def tied(everyone: Shares) -> dict[str, str]:
    """Map each name that is tied to another on some rank to that other name."""
    return {
        share.name: share.buffer
        for shares in everyone
        for share in shares
        if share.buffer != share.name
    }


def memory(everyone: Shares, side: int) -> dict[TileBuffer, Memory]:
    """Describe how the buffers of all ranks lie in memory; tied ones under every name."""
    return {
        TileBuffer(side, rank, share.name): share.memory
        for rank, shares in enumerate(everyone)
        for share in shares
    }


class Watch:
    """Watches whether a tensor's memory, or how it lies there, has changed since this was made.

    FSDP2's gathered copies do not count and are dropped: after a refit they would be out of date. A
    storage's size and offset need no check: equal address, shape and strides mean equal memory.
    """

    def __init__(self, model: Model) -> None:
        self._units = _units(model)
        for unit in self._units:
            unit.reshard()
        self._modules: list[tuple[Mapping[str, Any], str, str, Any]] = []
        self._tensors: list[tuple[Mapping[str, Any], str, str, Any, list[Any]]] = []
        for of, key, name in _kept(model):
            if isinstance(of[key], Tensor):
                self._tensors.append((of, key, name, *_described(of[key])))
            else:
                self._modules.append((of, key, name, of[key]))

    def replaced(self) -> str | None:
        """Return the first tensor, or module of tensors, that was replaced or removed."""
        for unit in self._units:
            unit.reshard()
        for siblings, key, name, module in self._modules:
            if siblings.get(key) is not module:
                return name
        for of, key, name, placed, lies in self._tensors:  # 0.5 us each
            tensor = of.get(key)
            if isinstance(tensor, DTensor):
                if (now := placed_by(tensor)) is not placed and now != placed:
                    return name
                tensor = part_of(tensor)
            elif placed is not None:
                return name
            if tensor is None or _lies(tensor) != lies:
                return name
        return None


def _described(tensor: Tensor) -> tuple[Any, list[Any]]:
    """Describe how a DTensor is placed, and how the local part lies in memory."""
    if isinstance(tensor, DTensor):
        return placed_by(tensor), _lies(part_of(tensor))
    return None, _lies(tensor)


def _lies(tensor: Tensor) -> list[Any]:
    return [tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.is_neg()]


def _units(model: Model) -> list[FSDPModule]:
    modules = model.modules() if isinstance(model, nn.Module) else ()
    return [module for module in modules if isinstance(module, FSDPModule)]


def _kept(model: Model) -> Iterator[tuple[Mapping[str, Any], str, str]]:
    """Yield every module that has tensors below it, and every tensor: the dict that keeps it, where
    looking is cheap, its key there, and its name."""
    if not isinstance(model, nn.Module):
        yield from ((model, name, name) for name in model or ())  # type: ignore[misc]
        return
    modules = dict(model.named_modules(remove_duplicate=False))
    names = named(model)
    parts = [name.split(".")[:-1] for name in names]
    paths = dict.fromkeys(".".join(p[:i]) for p in parts for i in range(1, len(p) + 1))
    for name in (*paths, *names):
        path, _, key = name.rpartition(".")
        of = modules[path]
        kept: tuple[Any, ...] = of._modules, of._parameters, of._buffers
        yield next(each for each in kept if key in each), key, name


def named(model: Model) -> dict[str, Tensor]:
    """Parameters and persistent buffers by name, as FSDP2 shards them where it does."""
    if not isinstance(model, nn.Module):
        if not isinstance(model, Mapping | None):
            raise ValueError(f"a model is a module or tensors by name, not {type(model).__name__}")
        for name, tensor in (model or {}).items():
            if not isinstance(tensor, Tensor):
                raise ValueError(f"{name} is no tensor but {type(tensor).__name__}; leave it out")
        return dict(model or {})
    for unit in _units(model):
        unit.reshard()  # else the module holds the gathered parameters
    named: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    kept = model.state_dict(keep_vars=True).keys()
    buffers = model.named_buffers(remove_duplicate=False)
    return named | {name: buffer for name, buffer in buffers if name in kept}


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _shares(model: Model) -> Iterator[LocalPart]:
    """Yield this rank's shares; refuse by name what has no storage or cannot be described."""
    storages: dict[tuple[Any, ...], str] = {}
    local = tensors(model)
    for name, tensor in named(model).items():
        mine = local[name]
        _check_plain(name, mine)
        runs = _runs(name, tensor)
        lies = *_lies(mine), tensor.shape, str(runs)  # memory may be shared without being tied
        yield LocalPart(
            name,
            tuple(tensor.shape),
            NAMES[mine.dtype],
            storages.setdefault(lies if mine.numel() else (id(tensor),), name),
            runs,
            Memory(tuple(mine.shape), mine.stride(), mine.itemsize, alignment_of(mine.data_ptr())),
            str(tensor.placements) if isinstance(tensor, DTensor) else "",
        )


def _check_plain(name: str, mine: Tensor) -> None:
    """Raise ValueError unless the tensor's values are plain memory at its address, each once."""
    if type(mine) is not Tensor:
        raise ValueError(
            f"{name} is a {type(mine).__name__}, which is no plain memory; give the tensors inside"
        )
    if mine.dtype not in NAMES:
        raise ValueError(
            f"{name} is {mine.dtype}, and only {', '.join(map(str, NAMES))} can be moved; "
            "register it with persistent=False, or give a mapping without it"
        )
    if mine.is_meta:
        raise ValueError(f"{name} is on the meta device; allocate it first (to_empty)")
    if mine.layout != torch.strided or mine.is_neg() or mine.is_conj():
        raise ValueError(
            f"{name} is no plain memory ({mine.layout}); give a copy, dense or resolved"
        )
    if is_folded(mine.shape, mine.stride()):
        how = "expanded (a stride of 0)" if 0 in mine.stride() else f"strided by {mine.stride()}"
        raise ValueError(
            f"{name} is {how} in shape {tuple(mine.shape)}: several of its elements may be one; "
            "give a copy, .contiguous()"
        )


def _runs(name: str, tensor: Tensor) -> list[Runs]:
    """Return the index ranges of each dim that this rank has."""
    box = whole(tensor.shape)
    runs: list[Runs] = [[edges] for edges in zip(box.low, box.high, strict=True)]
    if not isinstance(tensor, DTensor):
        return runs
    mesh = tensor.device_mesh
    place = mesh.get_coordinate()
    if place is None:
        return []
    _check_order(name, tensor)
    for axis, placement in enumerate(tensor.placements):
        if not isinstance(placement, Replicate):
            dim = _dim(name, placement)
            if mesh.get_local_rank(axis) != place[axis]:
                line = mesh.mesh.movedim(axis, -1)[place[:axis] + place[axis + 1 :]].tolist()
                raise ValueError(
                    f"{name} is sharded over ranks {line} of its mesh, which do not ascend: torch "
                    "sorts a group's ranks, so that by its mesh and by its group a rank has "
                    "different shards; make the mesh of ascending ranks, or give local tensors "
                    "with Holdings"
                )
            parts = mesh.size(axis)
            blocks = _cut(runs[dim], getattr(placement, "split_factor", 1))
            runs[dim] = [run for block in blocks for run in _cut(block, parts)[place[axis]]]
    extents = tuple(sum(high - low for low, high in of_dim) for of_dim in runs)
    mine = _local(tensor)
    if extents != tuple(mine.shape) and (0 not in extents or mine.numel()):
        raise ValueError(
            f"{name} has {tuple(mine.shape)} of {tuple(tensor.shape)} here, but by its placements "
            f"{tensor.placements} it would be {extents}; make the DTensor anew, or give Holdings"
        )
    return [_joined(of_dim) for of_dim in runs]


def _check_order(name: str, tensor: DTensor) -> None:
    """Check that axes that shard one dim cut it in ascending order; newer torch allows others."""
    for entry in getattr(placed_by(tensor), "shard_order", None) or ():
        if list(entry.mesh_dims) != sorted(entry.mesh_dims):
            raise ValueError(
                f"{name} has dim {entry.tensor_dim} sharded by the mesh's axes in the order "
                f"{tuple(entry.mesh_dims)}; redistribute it to plain Shards, in ascending order"
            )


def _dim(name: str, placement: Placement) -> int:
    """Return the sharded dim; refuse other placements, which may cut it in their own way."""
    if type(placement) is not Shard and type(placement).__name__ != "_StridedShard":
        why = "which has no value to move yet" if placement.is_partial() else "whose cut is unknown"
        raise ValueError(
            f"{name} is placed as {type(placement).__name__}, {why}; redistribute it to Shard or "
            "Replicate"
        )
    return int(placement.dim)  # type: ignore[attr-defined]


def _cut(runs: Runs, parts: int) -> list[Runs]:
    """Cut the indices, in their order, as torch.chunk does."""
    indices = sum(high - low for low, high in runs)
    found: list[Runs] = []
    position = 0
    for size in chunks(indices, parts):
        found.append(_slice(runs, position, position + size))
        position += size
    return found


def _slice(runs: Runs, first: int, last: int) -> Runs:
    """Return the indices at the positions [first, last)."""
    starts = itertools.accumulate((high - low for low, high in runs), initial=0)
    cut = [
        (low + max(first - at, 0), min(high, low + last - at))
        for at, (low, high) in zip(starts, runs, strict=False)
    ]
    return [(low, high) for low, high in cut if low < high]


def _joined(runs: Runs) -> Runs:
    joined: Runs = []
    for low, high in runs:
        if joined and joined[-1][1] == low:
            joined[-1] = joined[-1][0], high
        else:
            joined.append((low, high))
    return joined


def pieces(rank: int, share: LocalPart) -> Iterator[Piece]:
    """Yield a piece for each combination of the dims' runs."""
    if not prod(share.memory.shape):
        return
    positions = [
        zip(runs, itertools.accumulate((b - a for a, b in runs), initial=0), strict=False)
        for runs in share.runs
    ]
    buffer = "" if share.buffer == share.name else share.buffer
    for picked in itertools.product(*positions):
        box = Box(tuple(low for (low, _), _ in picked), tuple(high for (_, high), _ in picked))
        yield Piece(rank, box, tuple(at for _, at in picked), buffer)


def _difference(name: str, of: Mapping[int, LocalPart]) -> str:
    """Say how ranks disagree about a tensor, if they do."""
    versions: dict[tuple[tuple[int, ...], str], list[int]] = {}
    for rank, share in of.items():
        versions.setdefault((share.shape, share.dtype), []).append(rank)
    if len(versions) == 1:
        return ""
    said = [f"{shape} {dtype} on {_ranks(ranks)}" for (shape, dtype), ranks in versions.items()]
    return (
        f"{name} is {', '.join(said)}; a tensor that is cut without DTensor needs Holdings that "
        "say how"
    )


def _ranks(ranks: Sequence[int]) -> str:
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:8]))}{more}"
