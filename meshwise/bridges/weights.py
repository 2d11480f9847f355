"""A trainer's and a server's weights, tied together by the checkpoint's names.

In: on trainers' ranks a module, on servers' a model that loads checkpoints. Out: a ``Refit`` over
all of them. Each side's layout is read off its own code: transformers' when it saves, the server's
when it loads.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
from torch import Tensor, nn

from meshwise.bridges.hugging_face import saved
from meshwise.bridges.loader import ZEROED, Loaded, holdings_of_loader
from meshwise.bridges.renamed import Same, renamed
from meshwise.ranks import Ranks
from meshwise.reshard import checks, live
from meshwise.reshard.holdings import HeldTensor, Holdings
from meshwise.reshard.transports.copies import DTYPES
from meshwise.reshard.weights import Refit


class Saved(NamedTuple):
    """A trainer's module in its checkpoint: shapes and dtypes by name, and where the module has the
    same elements."""

    tensors: dict[str, tuple[tuple[int, ...], str]]
    same: list[Same]


def joined(
    ranks: Ranks,
    source: nn.Module | None = None,
    server: nn.Module | None = None,
    new: Callable[[], nn.Module] | None = None,
    **options: Any,
) -> Refit:
    """Return the Refit from all trainers' modules to all servers' models; every rank calls this.

    ``source``: the module, on trainers' ranks. ``server``: the model that is served, on servers'.
    ``new`` makes another one like it, whose loader is read; no memory is needed, so it may be on
    the meta device. ``options``: of ``Refit``. ValueError on all ranks, by name, if a server lacks
    a tensor, or computes one.
    """
    checkpoint = _first(ranks, Saved, lambda: _checkpoint(source) if source else None)
    shares = live.gathered(source, ranks)
    shapes = {name: shape for name, (shape, _) in checkpoint.tensors.items()}
    held = renamed(live.held(shares, as_source=True), shapes, checkpoint.same)
    destination, loaded = _destination(ranks, server, new, checkpoint)
    return Refit(source, held, destination, loaded, ranks=ranks, **options)


def _first(ranks: Ranks, kind: type, make: Callable[[], Any]) -> Any:
    """Return what the first rank that makes one has made, on all ranks."""
    mine, failed = ranks.together(make, _told)
    _refuse(failed)
    told = next(each for each in ranks.gather(mine) if each is not None)
    return msgspec.convert(told, kind)


def _checkpoint(module: nn.Module) -> Saved:
    shapes, same = saved(module)
    dtypes = {name: live.NAMES[tensor.dtype] for name, tensor in live.named(module).items()}
    of = {each.name: dtypes[each.of] for each in same}
    return Saved({name: (shape, of[name]) for name, shape in shapes.items()}, same)


def _destination(
    ranks: Ranks,
    server: nn.Module | None,
    new: Callable[[], nn.Module] | None,
    checkpoint: Saved,
) -> tuple[dict[str, Tensor] | None, Holdings]:
    """Return this rank's tensors to fill, and what all ranks hold."""

    def read() -> Loaded | None:
        if server is None:
            return None
        tensors = {n: (s, DTYPES[d]) for n, (s, d) in checkpoint.tensors.items()}
        found = holdings_of_loader(new() if new else server, tensors, rank=ranks.rank)
        _check(found)
        return found

    mine, failed = ranks.together(read, _told)
    _refuse(failed)
    told = [each and msgspec.convert(each, Loaded) for each in ranks.gather(mine)]
    merged: dict[str, HeldTensor] = {}
    for each in told:
        for name, tensor in (each.holdings if each else {}).items():
            old = merged.get(name)
            merged[name] = (
                tensor
                if old is None
                else old._replace(
                    layout=old.layout + tensor.layout, padded=old.padded + tensor.padded
                )
            )
    if server is None or mine is None:
        return None, merged
    placed = {piece.buffer for held in mine.holdings.values() for piece in held.layout}
    return {
        name: tensor.detach().permute(mine.turned.get(name, tuple(range(tensor.ndim))))
        for name, tensor in server.named_parameters()
        if name in placed
    }, merged


def _check(loaded: Loaded) -> None:
    """Refuse what cannot be filled from the checkpoint alone."""
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


def _told(error: Exception) -> str | None:
    """Return what the others get to know of an error, ours or a loader's."""
    is_known = isinstance(error, ValueError | RuntimeError | KeyError)
    said = f"{type(error).__name__}: {error}" if isinstance(error, KeyError) else str(error)
    return said.partition("\n")[0] if is_known else None


def _refuse(failed: list[str | None]) -> None:
    checks.refuse([f"rank {rank}: {said}" for rank, said in enumerate(failed) if said])
