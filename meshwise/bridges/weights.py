"""A trainer's and a server's weights, tied together by the checkpoint's names.

In: on trainers' ranks a module or another ``Source``, on servers' a model that loads checkpoints.
Out: a ``Refit`` over all of them. Each side's layout is read off its own code: transformers' when
it saves, the server's when it loads.
"""

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import msgspec
from torch import Tensor, nn

from meshwise.bridges import hugging_face
from meshwise.bridges.loader import ZEROED, Checkpoint, Loaded, holdings_of_loader, numbers
from meshwise.bridges.renamed import Same, renamed
from meshwise.ranks import Ranks
from meshwise.reshard import checks, holdings, live
from meshwise.reshard.holdings import HeldTensor, Holdings
from meshwise.reshard.transports.copies import DTYPES
from meshwise.reshard.weights import Refit

log = logging.getLogger("meshwise")
_SCALED = "fp8", "fp8_e5m2", "int8", "uint8"  # mean nothing without scales
Server = nn.Module | Mapping[str, Tensor]
Read = Callable[[Checkpoint, int], Loaded]


class Saved(NamedTuple):
    """A checkpoint: its tensors' shapes by name, and of what they are parts. ``config``: see
    ``loader.numbers``."""

    shapes: dict[str, tuple[int, ...]]
    same: list[Same]
    config: dict[str, int | bool]


class Source(NamedTuple):
    """A trainer rank's live weights. ``held`` tells what this rank, whose number it is given, holds
    (None: read off the module's DTensors), ``saved`` which checkpoint these tensors make."""

    module: nn.Module
    saved: Callable[[], Saved]
    held: Callable[[int], Holdings] | None = None


def joined(
    ranks: Ranks,
    source: nn.Module | Source | None = None,
    server: Server | None = None,
    read: Read | None = None,
    derived: Collection[str] = (),
    **options: Any,
) -> Refit:
    """Return the Refit from all trainers' weights to all servers' models; every rank calls this.

    ``source``: on trainers' ranks, a module of transformers, or what another library's tells.
    ``server``: the model that is served, on servers', or its parameters by name. ``read`` tells
    what its loader does with a checkpoint, as a rank's: by another model like it, which needs no
    memory and may be on the meta device, or of a file (``layouts``). ``derived``: parameters that
    the server makes of others; the caller has it make them anew. ``options``: of ``Refit``.
    ValueError on all ranks, by name, if a server lacks a tensor, or computes one.
    """
    if isinstance(source, nn.Module):
        source = from_module(source)
    module = source.module if source else None
    saved = _first(ranks, Saved, source.saved if source else lambda: None)
    checkpoint = renamed(_held(ranks, source), saved.shapes, saved.same)
    destination, loaded = _destination(ranks, server, read, checkpoint, saved.config, derived)
    return Refit(module, checkpoint, destination, loaded, ranks=ranks, **options)


def from_module(module: nn.Module) -> Source:
    """Return a module of transformers, plain or of DTensors, as a source."""

    def saved() -> Saved:
        shapes, same = hugging_face.saved(module)
        return Saved(dict(shapes), same, numbers(module))

    return Source(module, saved)


def _first(ranks: Ranks, kind: type, make: Callable[[], Any]) -> Any:
    """Return what the first rank that makes one has made, on all ranks."""
    mine, failed = ranks.together(make, _told)
    _refuse(failed)
    told = next(each for each in ranks.gather(mine) if each is not None)
    return msgspec.convert(told, kind)


def _held(ranks: Ranks, source: Source | None) -> Holdings:
    """Return what all ranks hold of the trainers' tensors."""
    shares = live.gathered(source.module if source else None, ranks)
    tell = source.held if source else None
    mine, failed = ranks.together(lambda: tell(ranks.rank) if tell else None, _told)
    _refuse(failed)
    told = [each and msgspec.convert(each, dict[str, HeldTensor]) for each in ranks.gather(mine)]
    return _merged(told) if any(told) else live.held(shares, as_source=True)


def _merged(told: Iterable[Holdings | None]) -> Holdings:
    """Put together what ranks say that they hold. ValueError if they differ about a dtype."""
    merged: dict[str, HeldTensor] = {}
    wrong: dict[str, str] = {}
    for each in told:
        for name, tensor in (each or {}).items():
            holdings.add(merged, name, tensor)
            if (dtype := merged[name].dtype) != tensor.dtype:
                wrong[name] = f"{name} is {dtype} on some ranks and {tensor.dtype} on others"
    checks.refuse([*wrong.values()])
    return merged


def _destination(
    ranks: Ranks,
    server: Server | None,
    read: Read | None,
    checkpoint: Holdings,
    config: Mapping[str, object],
    derived: Collection[str] = (),
) -> tuple[dict[str, Tensor] | None, Holdings]:
    """Return this rank's tensors to fill, and what all ranks hold."""
    own = dict(server.named_parameters() if isinstance(server, nn.Module) else server or {})

    def loaded() -> Loaded | None:
        if server is None:
            return None
        _check_config(config, numbers(server))
        tensors = {name: (of.shape, DTYPES[of.dtype]) for name, of in checkpoint.items()}
        if read is not None:
            found = read(tensors, ranks.rank)
        elif isinstance(server, nn.Module):
            found = holdings_of_loader(server, tensors, rank=ranks.rank)
        else:
            raise ValueError("parameters by name have no loader; read its layout from a file")
        _check_config(config, found.config)
        filled = {n: t for n, t in own.items() if n in found.parameters or n not in derived}
        _check(found, filled, checkpoint)
        return found

    mine, failed = ranks.together(loaded, _told)
    _refuse(failed)
    told = [each and msgspec.convert(each, Loaded) for each in ranks.gather(mine)]
    merged = _merged(each and each.holdings for each in told)
    lost = [name for name in checkpoint if name not in merged]
    if lost and ranks.rank == 0:
        log.warning("no server's loader uses %s", ", ".join(lost[:8]))
    if server is None or mine is None:
        return None, merged
    placed = {piece.buffer for held in mine.holdings.values() for piece in held.layout}
    return {
        name: tensor.detach().permute(mine.turned.get(name, tuple(range(tensor.ndim))))
        for name, tensor in own.items()
        if name in placed
    }, merged


def _check(loaded: Loaded, own: Mapping[str, Tensor], checkpoint: Holdings) -> None:
    """Refuse a layout that is not of these parameters and this checkpoint, and what cannot be
    filled from the checkpoint alone."""
    checks.refuse([*_unlike(loaded, own, checkpoint)])
    wrong = [
        f"{name}: the server's loader computes it ({op})"
        for name, op in loaded.computed.items()
        if op != ZEROED  # as it is served
    ]
    placed = {piece.buffer for held in loaded.holdings.values() for piece in held.layout}
    wrong += [
        f"{name}: not in the trainer's checkpoint" for name in loaded.unfilled if name not in placed
    ]
    checks.refuse(wrong)


def _check_config(trainers: Mapping[str, object], servers: Mapping[str, object]) -> None:
    """Refuse configurations that differ. Equal shapes do not show it: of heads, of tied weights."""
    wrong = []
    for name in sorted(trainers.keys() & servers.keys()):
        if (one := trainers[name]) != (other := servers[name]):
            wrong.append(f"{name}: {one} in the trainer's configuration, {other} in the server's")
    checks.refuse(wrong)


def _unlike(loaded: Loaded, own: Mapping[str, Tensor], checkpoint: Holdings) -> Iterator[str]:
    """Yield how a layout, perhaps of a file, differs from the parameters and the checkpoint."""
    planned, held = loaded.parameters, loaded.holdings
    for name, tensor in own.items():
        has = tuple(tensor.shape), live.NAMES.get(tensor.dtype, str(tensor.dtype))
        if has != planned.get(name, has):
            yield (
                f"{name}: {_said(*has)} is served, the loader fills {_said(*planned[name])}; it "
                "was changed after loading, or a saved layout is another model's"
            )
    for name in [*planned.keys() - own.keys(), *own.keys() - planned.keys()]:
        where = "layout" if name in planned else "model"
        yield f"{name}: only the {where} has such a parameter; save the layout anew"
    for name, (shape, dtype, *_) in checkpoint.items():
        if name not in held and name not in loaded.unread:
            yield f"{name}: the layout does not know this tensor of the checkpoint; save it anew"
        elif name in held and held[name].shape != shape:
            yield f"{name}: {shape} in the checkpoint, {held[name].shape} in the layout"
        elif name in held and held[name].dtype in _SCALED and dtype not in _SCALED:
            yield (
                f"{name}: {dtype} in the trainer, {held[name].dtype} in the server; quantised "
                "weights have scales, which the trainer's checkpoint has not"
            )
    for name in held.keys() - checkpoint.keys():
        yield f"{name}: the layout has this tensor, the trainer's checkpoint has not"


def _said(shape: tuple[int, ...], dtype: str) -> str:
    return f"{dtype} {list(shape)}"


def _told(error: Exception) -> str:
    """Return what the others get to know of an error, ours or a loader's."""
    is_said = isinstance(error, ValueError | RuntimeError)
    said = str(error) if is_said else f"{type(error).__name__}: {error}"
    return said.partition("\n")[0]


def _refuse(failed: list[str | None]) -> None:
    checks.refuse([f"rank {rank}: {said}" for rank, said in enumerate(failed) if said])
