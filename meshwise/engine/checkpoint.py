"""Save a training, and load it under any layout. Under the same layout it resumes bit for bit.

In: on all ranks a ``TrainingState`` and a folder that all of them see. Out: in the folder
``checkpoint.json`` (a ``Checkpoint``) and, in the subfolder it names, safetensors files. Each
parameter, persistent buffer and tensor of optimizer state (``optimizer.<state>.<parameter>``) is
stored once, under its name in the whole model, cut as the ranks hold it. Ranks that hold the same
part share the writing. A tensor without dims (a counter) is a number in the JSON. The tied copy of
a weight is not stored: after loading it equals its original again. Before, it may differ from it by
rounding, if the ends of a pipeline are cut unequally.

A new subfolder becomes the checkpoint when its JSON replaces the old one, by one rename after all
ranks have written and synced. Until then the old checkpoint stays. Each rank verifies the hashes of
the blocks that it reads (``engine.blocks``). One run at a time saves into a folder
(``engine.folder``). Tokens are a function of (seed, step), so the step is enough to resume the
data.

The files have the format of torch.distributed.checkpoint's sharded Hugging Face storage; its reader
reads them, too. Its writer is not used: it asks DTensor where a share begins, and DTensor does not
know where FSDP2 cuts an uneven part of tp (50257 rows over tp 2, dp 4), so it refuses to save.
"""

import contextlib
import functools
import json
import os
import secrets
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from math import isclose, isfinite, nan, prod, sqrt
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec
import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from meshwise import files
from meshwise.engine import blocks
from meshwise.engine import folder as folders
from meshwise.engine.step import TrainingState
from meshwise.parallel import mesh
from meshwise.ranks import Ranks
from meshwise.reshard.regions import Box, chunk_of, whole
from meshwise.spec import AnyModel, Plan, Record
from meshwise.spec.checkpoint import Checkpoint, Stored, Whole

SAME_NORM = 1e-4  # relative tolerance: sums in a different order
FILE_BYTES = 2**30  # the most that a rank copies to the host at once, or one larger tensor

T = TypeVar("T")
Targets = dict[str, list[tuple[Box, Tensor]]]  # by name, this rank's parts of each tensor


class TensorShare(NamedTuple):
    """A rank's part of a tensor. ``norm``: of this part; None if it is not finite."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    box: Box
    norm: float | None


Save = Callable[..., None]  # (training, plan, step=, seed=): all ranks call it together


@contextlib.contextmanager
def saving(ranks: Ranks, folder: Path | str) -> Iterator[Save]:
    """Hold ``folder`` for the saves of this run. Each save replaces the checkpoint there by the
    training as it is before step ``step``.

    Raises a ValueError on all ranks if another run holds the folder or has written into it since,
    or if one rank cannot write. The old checkpoint then stays.
    """
    folder = Path(folder)
    held: folders.HeldFolder | None = None

    def hold() -> None:
        nonlocal held
        held = folders.HeldFolder(folder) if ranks.rank == 0 else None

    _on_all_ranks(ranks, f"saving into {folder}", hold)
    try:
        yield functools.partial(_save, ranks, folder, held)
    finally:
        if held is not None:
            held.close()


def _save(
    ranks: Ranks,
    folder: Path,
    held: folders.HeldFolder | None,
    training: TrainingState,
    plan: Plan,
    *,
    step: int,
    seed: int,
) -> None:
    tensors = {name: tensor for name, tensor, is_copy in _tensors(training) if not is_copy}
    numbers = {name: _local(value).item() for name, value in tensors.items() if value.ndim == 0}
    told = ranks.gather((secrets.token_hex(4), numbers, _shares(tensors)))
    everyone = msgspec.convert([shares for _, _, shares in told], list[list[TensorShare]])
    _check_shares(everyone)
    names = _share_writing(everyone)[ranks.rank]
    data = f"step-{step}-{told[0][0]}"
    try:
        told_written = _on_all_ranks(
            ranks,
            f"writing {folder}",
            lambda: _write(folder / data, ranks.rank, {name: tensors[name] for name in names}),
        )
    except ValueError:
        if held is not None:
            shutil.rmtree(folder / data, ignore_errors=True)
        raise
    written = msgspec.convert(told_written, list[dict[str, Stored]])
    record = Checkpoint(
        step=step,
        seed=seed,
        layout=plan.layout.name,
        optimizer=type(training.optimizer).__name__,
        model=plan.model,
        workload=plan.workload,
        data=data,
        files={file: stored for of_rank in written for file, stored in of_rank.items()},
        tensors={s.name: Whole(shape=s.shape, dtype=s.dtype) for some in everyone for s in some},
        numbers={name: number for _, some, _ in told for name, number in some.items()},
        norms=_norms(everyone),
    )
    commit = (lambda: None) if held is None else (lambda: held.replace(record))
    _on_all_ranks(ranks, f"writing {folder / folders.JSON}", commit)


def checked(folder: Path | str, plan: Plan, seed: int, optimizer: str | None = None) -> Checkpoint:
    """Read the folder's checkpoint. Raises a ValueError if it is incomplete, or of another model,
    workload, ``optimizer`` (by default the plan's) or seed."""
    folder = Path(folder)
    record = folders.read(folder / folders.JSON)
    pairs: list[tuple[str, object, object]] = [
        ("family", _tag(record.model), _tag(plan.model)),
        *_fields("model", record.model, plan.model),
        *_fields("workload", record.workload, plan.workload),
        ("optimizer", record.optimizer.lower(), optimizer or plan.recipe.optimizer),
        ("seed", record.seed, seed),
    ]
    for name, saved, given in pairs:
        if saved != given:  # it would not continue the saved training
            raise ValueError(f"{name} = {given!r}: the checkpoint has {saved!r}; resume with that")
    folders.check_files(folder, record)
    return record


def load(
    ranks: Ranks, training: TrainingState, folder: Path | str, plan: Plan, *, seed: int
) -> int:
    """Fill a new training from ``folder``; return the next step.

    All ranks call it together. All raise a ValueError if the checkpoint is damaged, or of another
    model, workload, optimizer or seed. The optimizer keeps the settings of the training.
    """
    folder = Path(folder)
    found: list[Checkpoint] = []
    seen = ranks.gather(files.appeared(folder / folders.JSON, 0.0))[0]

    def look() -> None:
        name = type(training.optimizer).__name__.lower()
        if seen:  # by rank 0: another host may see it late
            files.appeared(folder / folders.JSON)
        found.append(checked(folder, plan, seed, name))

    _on_all_ranks(ranks, f"reading {folder / folders.JSON}", look)
    (record,) = found
    if any(name.startswith("optimizer.") for name in (*record.tensors, *record.numbers)):
        _make_states(training.optimizer)
    _on_all_ranks(ranks, f"reading {folder}", lambda: _read(folder, record, training))
    tensors = {name: tensor for name, tensor, is_copy in _tensors(training) if not is_copy}
    everyone = msgspec.convert(ranks.gather(_shares(tensors)), list[list[TensorShare]])
    for name, norm in _norms(everyone).items():
        if not isclose(norm, record.norms.get(name, norm), rel_tol=SAME_NORM):
            raise ValueError(
                f"{folder}: {name} has the norm {norm:.6g}, saved was {record.norms[name]:.6g}; "
                f"a file is damaged; {blocks.FIX}"
            )
    return record.step


def _tensors(training: TrainingState) -> Iterator[tuple[str, Tensor, bool]]:
    """Yield this rank's tensors with their names in the whole model, and whether each is a tied
    copy."""
    for stage in training.pipeline.stages.values():
        module = stage.module
        for unit in module.modules():
            if isinstance(unit, FSDPModule):
                unit.reshard()  # otherwise it holds gathered parameters, soon out of date
        for name, parameter in module.named_parameters():
            origin = module.origin(name)
            yield origin, parameter, origin != name
            for key, value in training.optimizer.state.get(parameter, {}).items():
                assert value is None or isinstance(value, Tensor), f"{key} of {name} is {value!r}"
                if value is not None:
                    yield f"optimizer.{key}.{origin}", value, origin != name
        kept = module.state_dict(keep_vars=True).keys()
        for name, buffer in module.named_buffers():
            if name in kept:
                yield name, buffer, False


def _local(tensor: Tensor) -> Tensor:
    return mesh.share(tensor.detach())


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _box(tensor: Tensor) -> Box:
    """Return the indices that this rank holds. Every cut is torch.chunk's.

    ``_StridedShard`` marks an axis that cuts after axes to its right (FSDP2's after tp's). DTensor
    itself cuts in another order and corrects the result, which fails for uneven parts.
    """
    box = whole(tensor.shape)
    if not isinstance(tensor, DTensor):
        return box
    place = tensor.device_mesh.get_coordinate()
    assert place is not None
    cuts = [(axis, p) for axis, p in enumerate(tensor.placements) if not p.is_replicate()]
    at_once = [cut for cut in cuts if not hasattr(cut[1], "split_factor")]
    afterwards = [cut for cut in reversed(cuts) if hasattr(cut[1], "split_factor")]
    for axis, placement in at_once + afterwards:
        assert not placement.is_partial()
        dim = placement.dim  # type: ignore[attr-defined]
        box = chunk_of(box, dim, tensor.device_mesh.size(axis), place[axis])
    shape = tuple(_local(tensor).shape)
    assert shape == box.shape or not prod(shape) + box.num_elements, (tensor.placements, shape, box)
    return box


def _shares(tensors: Mapping[str, Tensor]) -> list[TensorShare]:
    found = []
    for name, tensor in tensors.items():
        box = _box(tensor)
        if tensor.ndim and box.num_elements:
            norm = float(_local(tensor).float().norm())
            known = norm if isfinite(norm) else None
            found.append(TensorShare(name, tuple(tensor.shape), _dtype(tensor), box, known))
    return found


def _check_shares(everyone: Sequence[Sequence[TensorShare]]) -> None:
    """Check that all tensors are finite, and that ranks with the same part of a tensor hold the
    same values: otherwise the parts only look alike. Rounding changes norms less than 1e-3."""
    whole_of: dict[str, TensorShare] = {}
    part_of: dict[tuple[str, Box], TensorShare] = {}
    for rank, shares in enumerate(everyone):
        for share in shares:
            if share.norm is None:
                raise ValueError(f"{share.name} is not finite on rank {rank}; it is not saved")
            one = whole_of.setdefault(share.name, share)
            other = part_of.setdefault((share.name, share.box), share)
            assert other.norm is not None
            if share[:3] != one[:3] or not isclose(share.norm, other.norm, rel_tol=1e-3):
                raise ValueError(
                    f"{share.name} on rank {rank} is not what another rank has under this name; "
                    "make its parts DTensors, or a buffer not persistent"
                )


def _norms(everyone: Sequence[Sequence[TensorShare]]) -> dict[str, float]:
    """Return the norms of whole tensors, for any cut. A tensor that is not finite has NaN."""
    parts = {(share.name, share.box): share.norm for shares in everyone for share in shares}
    squares: dict[str, float] = defaultdict(float)
    for (name, _), norm in parts.items():
        squares[name] += nan if norm is None else norm**2
    return {name: sqrt(square) for name, square in squares.items()}


def _share_writing(everyone: Sequence[Sequence[TensorShare]]) -> list[list[str]]:
    """Return the names that each rank writes: the least loaded rank that holds a part writes it."""
    holders: dict[tuple[str, Box], list[int]] = defaultdict(list)
    lacking: dict[str, int] = {}
    for rank, shares in enumerate(everyone):
        for share in shares:
            holders[share.name, share.box].append(rank)
            lacking[share.name] = prod(share.shape)
    loads = [0] * len(everyone)
    names: list[list[str]] = [[] for _ in everyone]
    for (name, box), among in holders.items():
        rank = min(among, key=loads.__getitem__)
        loads[rank] += box.num_elements
        lacking[name] -= box.num_elements
        names[rank].append(name)
    assert not any(lacking.values()), lacking
    return names


def _on_all_ranks(ranks: Ranks, phase: str, work: Callable[[], T]) -> list[T]:
    """Return the results of ``work`` on all ranks. If it fails on one, all raise a ValueError."""
    from safetensors import SafetensorError

    def told(error: Exception) -> str | None:
        known = isinstance(error, OSError | SafetensorError | ValueError)
        return (str(error) or type(error).__name__) if known else None

    result, failures = ranks.together(work, told, f"the end of {phase}")
    errors = list(dict.fromkeys(filter(None, failures)))
    if errors:
        more = f" (and {len(errors) - 1} more errors)" if len(errors) > 1 else ""
        raise ValueError(f"{phase}: {errors[0]}{more}")
    return ranks.gather(result)


def _write(folder: Path, rank: int, tensors: Mapping[str, Tensor]) -> dict[str, Stored]:
    """Write this rank's parts into files. They are synced to disk when this returns."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    groups: dict[int, list[str]] = defaultdict(list)
    total = 0
    for name, tensor in tensors.items():
        groups[total // FILE_BYTES].append(name)
        total += _local(tensor).nbytes
    written = {}
    for number, names in groups.items():
        path = folder / f"{rank:05d}-{number:03d}.safetensors"
        parts = {name: _local(tensors[name]).cpu().contiguous() for name in names}
        offsets = {name: {"saved_offsets": _box(tensors[name]).low} for name in names}
        about = {"format": "pt", "DCP_VERSION": "1.0", blocks.OFFSETS: json.dumps(offsets)}
        with files.replacing(path) as file:
            try:
                save_file(parts, file.name, about)
            except SafetensorError as error:
                raise ValueError(f"{path} cannot be written: {error}") from None
            with open(file.name, "rb") as again:  # safetensors replaces the file of that name
                os.fsync(again.fileno())
            written[path.name] = blocks.stored(Path(file.name))
    return written


def _tag(model: AnyModel) -> object:
    return type(model).__struct_config__.tag


def _fields(name: str, saved: Record, given: Record) -> list[tuple[str, object, object]]:
    return [
        (f"{name}.{field}", getattr(saved, field), getattr(given, field, None))
        for field in saved.__struct_fields__
        if field != "name"
    ]


def _make_states(optimizer: torch.optim.Optimizer) -> None:
    """Make the optimizer allocate its states by a step. Loading overwrites all its effects."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()


def _read(folder: Path, record: Checkpoint, training: TrainingState) -> None:
    """Fill this rank's tensors from all files that hold parts of them."""
    wanted: dict[str, list[Tensor]] = defaultdict(list)
    for name, tensor, _ in _tensors(training):
        wanted[name].append(tensor)
    _check_tensors(record, wanted)
    targets: Targets = {
        name: [(_box(tensor), _local(tensor)) for tensor in tensors if tensor.ndim]
        for name, tensors in wanted.items()
    }
    lacking = {name: sum(box.num_elements for box, _ in of) for name, of in targets.items()}
    for name_of_file, stored in record.files.items():
        file = blocks.DataFile(folder / record.data / name_of_file, stored)
        names = list(file.parts.keys() & targets.keys())
        with ThreadPoolExecutor(2) as readers:  # a third faster than one
            counts = readers.map(functools.partial(_copy_part, file, targets), names)
            lacking |= {n: lacking[n] - count for n, count in zip(names, counts, strict=True)}
    if lacks := [name for name, elements in lacking.items() if elements]:
        raise ValueError(f"the files lack a part of {lacks[0]}; {blocks.FIX}")
    for name, tensors in wanted.items():
        for tensor in tensors:
            if not tensor.ndim:
                _local(tensor).fill_(record.numbers[name])


def _copy_part(file: blocks.DataFile, targets: Targets, name: str) -> int:
    """Copy a file's part of a tensor into this rank's boxes. Return the number of elements."""
    part, count = file.parts[name], 0
    for _, local in targets[name]:
        saved_bytes = part.last - part.first
        if len(part.shape) != local.ndim or saved_bytes != prod(part.shape) * local.itemsize:
            raise ValueError(f"{file.path}: {name} has other dims or another dtype; {blocks.FIX}")
    for piece, first, last in part.pieces():
        saved = piece.shifted(part.low)
        for box, local in targets[name]:
            if common := box.intersect(saved):
                values = torch.frombuffer(file.read(first, last), dtype=local.dtype)
                values = values.view(piece.shape)[_slices(common, saved)]
                local[_slices(common, box)].copy_(values)
                count += common.num_elements
    return count


def _slices(part: Box, of: Box) -> tuple[slice, ...]:
    """Return the slices of ``part`` in a tensor that holds the box ``of``."""
    return tuple(map(slice, *part.shifted([-low for low in of.low])))


def _check_tensors(record: Checkpoint, wanted: Mapping[str, list[Tensor]]) -> None:
    missing = [
        name
        for name, tensors in wanted.items()
        if any(name not in (record.tensors if t.ndim else record.numbers) for t in tensors)
    ]
    if missing:
        more = f" and {len(missing) - 1} more tensors" if len(missing) > 1 else ""
        raise ValueError(f"the checkpoint lacks {missing[0]}{more}; save it with this version")
    for name, tensors in wanted.items():
        for tensor in tensors if name in record.tensors else ():
            saved, given = record.tensors[name], (tuple(tensor.shape), _dtype(tensor))
            if (saved.shape, saved.dtype) != given:
                raise ValueError(
                    f"{name} is {given[1]} {list(given[0])}, but the checkpoint's is {saved.dtype} "
                    f"{list(saved.shape)}; resume with the recipe and sizes that it was saved with"
                )
