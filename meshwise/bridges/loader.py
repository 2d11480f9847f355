"""Read off a model's own loader where every element of a checkpoint goes.

In: a model whose ``load_weights`` places a checkpoint's tensors in its parameters (as vLLM's models
do: fused, cut over ranks, padded, stacked by expert), and the checkpoint's names, shapes and
dtypes. Out: ``Loaded``, with the ``Holdings`` of this rank in the checkpoint's names.

``load_weights`` runs once on stand-ins: tensors of the checkpoint's shapes without memory (torch's
meta device). A dispatch mode sees every operation. Views keep their storage, offset and strides, so
a ``copy_`` into a parameter says which box of which tensor goes where. It is noted and not done: no
weight changes. Copies that a loader makes on its way (``to``, ``contiguous``, ``cat``) are
followed. What a loader computes (a scale, a quantised weight) is named with the operation, since no
box says where it comes from. There is no table of names: an unknown architecture is one more
loader.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from meshwise.bridges.strides import Region, Strided, Two, flattened, pairs, through
from meshwise.reshard.holdings import HeldTensor, Holdings, Padded
from meshwise.reshard.live import NAMES
from meshwise.reshard.regions import Box, Piece
from meshwise.torch_private import storage_of

Checkpoint = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
Load = Callable[[Iterable[tuple[str, Tensor]]], object]
ZEROED = "zero_"  # the operation of a loader that puts zeros in a tensor's place
_ATEN = torch.ops.aten
_COUNTED = re.compile("^(num|n|tie)_|_(dim|heads|rank|size)$")


class Loaded(NamedTuple):
    """A loader's use of a checkpoint on this rank.

    ``holdings``: of the checkpoint's tensors that it places. ``turned``: the order of dims in which
    a parameter is as in the checkpoint, if it is transposed. ``computed``: parameters that it
    computes, each with the operation. ``unread``: tensors of the checkpoint that it does not use.
    ``unfilled``: how many elements of a parameter are filled from nowhere: padding, or what is not
    in the checkpoint. ``parameters``: shape and dtype of each. ``config``: see ``numbers``.
    """

    holdings: Holdings
    turned: dict[str, tuple[int, ...]]
    computed: dict[str, str]
    unread: tuple[str, ...]
    unfilled: dict[str, int]
    parameters: dict[str, tuple[tuple[int, ...], str]]
    config: dict[str, int | bool]


def numbers(model: object) -> dict[str, int | bool]:
    """Return the sizes and counts of a model's configuration, as Hugging Face's: both sides must
    have the same, or the same elements mean something else."""
    config: Any = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    return counted(config.to_dict() if hasattr(config, "to_dict") else {})


def counted(config: Mapping[str, Any]) -> dict[str, int | bool]:
    """Return the sizes and counts of a config.json."""
    return {k: v for k, v in config.items() if isinstance(v, int) and _COUNTED.search(k)}


def padding(rank: int, buffer: str, shape: Sequence[int], dims: int) -> Padded:
    """Tell how large a parameter is of which not all is filled. ``shape``: in the checkpoint's
    order; ``dims`` of the checkpoint's tensor."""
    extra = max(len(shape) - dims, 0)
    return Padded(rank, (prod(shape[: extra + 1]), *shape[extra + 1 :]), buffer)


def holdings_of_loader(
    model: nn.Module, checkpoint: Checkpoint, *, rank: int = 0, load: Load | None = None
) -> Loaded:
    """Return what ``model.load_weights`` (or ``load``) does with a checkpoint, as ``rank``'s.

    The model's weights stay as they are, but a loader may set other things in it: give a model
    that is thrown away. ValueError if the loader reads values, which stand-ins do not have.
    """
    recorder = Recorder({storage_of(tensor) for tensor in model.parameters()})
    at = ""  # the tensor that the loader asked for last

    def stand_ins() -> Iterator[tuple[str, Tensor]]:
        nonlocal at
        for name, (shape, dtype) in checkpoint.items():
            at = f"{name} {list(shape)}: "
            yield name, recorder.stand_in(name, shape, dtype)
        at = ""

    with recorder:
        try:
            (load or model.load_weights)(stand_ins())  # type: ignore[operator]
        except ValueError:
            raise  # it says what it does not take
        except Exception as error:
            said = f"{type(error).__name__} {error}".partition("\n")[0].strip()
            raise ValueError(f"{at}the server's loader does not take it ({said})") from error
    reading = _Reading(rank, recorder)
    for buffer, parameter in model.named_parameters():
        reading.parameter(buffer, parameter)
    return reading.told(checkpoint)._replace(config=numbers(model))


class _Origin(NamedTuple):
    """The source of a storage's elements: a tensor of the checkpoint, or copies into parts of it,
    each with the storage that is copied."""

    whole: Strided
    name: str = ""
    computed: str = ""
    copies: tuple[tuple[Two, int], ...] = ()


class Recorder(TorchDispatchMode):
    """Follows stand-ins through operations. ``targets``: storages whose copies are wanted."""

    def __init__(self, targets: set[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.targets = targets
        self.origins: dict[int, _Origin] = {}
        self.copied: list[tuple[int, Two, int]] = []  # into which storage, the views, of which
        self.kept: list[Tensor] = []  # so that no storage's number comes again

    def stand_in(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        made = torch.empty(shape, dtype=dtype, device="meta")
        return self._know(made, _Origin(view_of(made), name))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        known = [each for each in _tensors((args, kwargs)) if storage_of(each) in self.origins]
        if not known:
            return func(*args, **kwargs)
        if func is _ATEN.copy_.default and storage_of(args[1]) in self.origins:
            return self._copy(args[0], args[1])
        if func._schema.is_mutable:  # in place: what it had is gone
            self._spoil(args[0], func, known)
        if func is _ATEN._to_copy.default:
            kwargs |= {"device": torch.device("meta")}
        try:
            made = func(*args, **kwargs)
        except (RuntimeError, NotImplementedError) as error:
            said = str(error).partition("\n")[0]
            raise ValueError(
                f"{self._named(known[0])}: the loader does {func} with it, which needs its values "
                f"({said}); no layout says where they go"
            ) from None
        for each in _tensors(made):
            if storage_of(each) not in self.origins:  # no view
                self._know(each, _made(func, each, args, known))
        return made

    def _spoil(self, changed: object, func: Any, known: list[Tensor]) -> None:
        """Forget where elements came from that an operation changed in place. A parameter is then
        computed."""
        for tensor in _tensors(changed):
            storage = storage_of(tensor)
            if origin := self.origins.get(storage):
                self.origins[storage] = origin._replace(name="", computed=_name(func), copies=())
            elif storage in self.targets:
                made = self._know(torch.empty(1, device="meta"), _computed(func, tensor, known))
                self.copied.append((storage, (view_of(tensor),) * 2, storage_of(made)))

    def _copy(self, to: Tensor, of: Tensor) -> Tensor:
        """Note a copy, of a source that is broadcast as ``copy_`` does, and leave it undone."""
        two, source = (view_of(to), view_of(of.expand(to.shape))), storage_of(of)
        storage = storage_of(to)
        if storage in self.targets:
            self.copied.append((storage, two, source))
        else:  # the loader's own buffer
            origin = self.origins.get(storage, _Origin(view_of(to)))
            self._know(to, origin._replace(copies=(*origin.copies, (two, source))))
        return to

    def _know(self, tensor: Tensor, origin: _Origin) -> Tensor:
        self.kept.append(tensor)
        self.origins[storage_of(tensor)] = origin
        return tensor

    def _named(self, tensor: Tensor) -> str:
        names = set[str]()
        todo = [storage_of(tensor)]
        while todo:
            if origin := self.origins.get(todo.pop()):
                names |= {origin.name} - {""}
                todo += [of for _, of in origin.copies]
        return ", ".join(sorted(names))

    def sources(self, two: Two, of: Tensor | int) -> Iterator[tuple[Two, _Origin]]:
        """Follow a copy of ``of``, a tensor or its storage, to stand-ins or what is computed."""
        origin = self.origins[storage_of(of) if isinstance(of, Tensor) else of]
        if origin.name or origin.computed:
            yield two, origin
            return
        for copy, source in origin.copies:
            for part in through(two, origin.whole, copy):
                yield from self.sources(part, source)


def _made(func: Any, made: Tensor, args: Any, known: list[Tensor]) -> _Origin:
    """Describe a new storage that is made of stand-ins."""
    view = view_of(made)
    if func in (_ATEN._to_copy.default, _ATEN.clone.default):
        return _Origin(view, copies=(((view, view_of(args[0])), storage_of(args[0])),))
    if func is _ATEN.cat.default:
        dim = (args[1] if len(args) > 1 else 0) % made.ndim
        ends = accumulate((each.shape[dim] for each in args[0]), initial=0)
        parts = [
            made.narrow(dim, at, each.shape[dim]) for at, each in zip(ends, args[0], strict=False)
        ]
        pieces = zip(map(view_of, parts), map(view_of, args[0]), strict=True)
        return _Origin(view, copies=tuple(zip(pieces, map(storage_of, args[0]), strict=True)))
    return _computed(func, made, known)


def _computed(func: Any, made: Tensor, known: list[Tensor]) -> _Origin:
    """Describe what an operation computes, with what it comes from for messages."""
    view = view_of(made)
    named = tuple(((view, view_of(each)), storage_of(each)) for each in known)
    return _Origin(view, computed=_name(func), copies=named)


class _Reading:
    """Collects what recorded copies say of a rank's parameters."""

    def __init__(self, rank: int, recorder: Recorder) -> None:
        self.rank, self.recorder = rank, recorder
        self.copied: dict[int, list[tuple[Two, int]]] = {}
        for into, two, of in recorder.copied:
            self.copied.setdefault(into, []).append((two, of))
        self.layouts: dict[str, list[Piece]] = {}
        self.padded: dict[str, list[Padded]] = {}
        self.dtypes: dict[str, torch.dtype] = {}
        self.loaded = Loaded({}, {}, {}, (), {}, {}, {})

    def parameter(self, buffer: str, parameter: Tensor) -> None:
        """Add where a parameter's elements come from."""
        dtype = NAMES.get(parameter.dtype, str(parameter.dtype))
        self.loaded.parameters[buffer] = tuple(parameter.shape), dtype
        storage, whole = storage_of(parameter), view_of(parameter)
        copies = self.copied.get(storage, [])
        if storage in self.recorder.origins:  # param.data = stand-in
            copies = [*copies, ((whole, whole), storage)]
        orders, names, left = set[tuple[int, ...]](), dict[str, int](), parameter.numel()
        for name, local, box in self._boxes(buffer, whole, copies):
            order, piece = _piece(self.rank, buffer, local, box, parameter.shape)
            orders.add(order)
            self.layouts.setdefault(name, []).append(piece)
            names[name] = len(box.sizes)
            left -= piece.box.num_elements
        if len(orders) > 1:
            raise ValueError(f"{buffer}: the loader transposes parts of it; no view says so")
        for order in orders:
            if order != tuple(sorted(order)):
                self.loaded.turned[buffer] = order
        for name in names:
            if self.dtypes.setdefault(name, parameter.dtype) != parameter.dtype:
                raise ValueError(f"{name} is loaded as {self.dtypes[name]} and {parameter.dtype}")
        if left and buffer not in self.loaded.computed:
            self.loaded.unfilled[buffer] = left
            for name, dims in [*names.items()][:1]:
                (order,) = orders
                shape = [parameter.shape[dim] for dim in order]
                self.padded.setdefault(name, []).append(padding(self.rank, buffer, shape, dims))

    def _boxes(
        self, buffer: str, whole: Strided, copies: Iterable[tuple[Two, int]]
    ) -> Iterator[tuple[str, Region, Region]]:
        """Yield what a parameter gets of which tensor, as boxes of both; note what is computed."""
        try:
            for two, of in copies:
                for (to, source), origin in self.recorder.sources(two, of):
                    if origin.computed:
                        self.loaded.computed[buffer] = origin.computed
                        continue
                    for local, box in pairs(to, whole, source, origin.whole):
                        yield origin.name, local, box
        except (ValueError, AssertionError) as error:
            said = error if isinstance(error, ValueError) else "its elements overlap"
            raise ValueError(f"{buffer}: the loader copies no boxes of tensors ({said})") from None

    def told(self, checkpoint: Checkpoint) -> Loaded:
        held = {
            name: HeldTensor(
                shape, NAMES[self.dtypes[name]], tuple(self.layouts[name]),
                tuple(self.padded.get(name, ())),
            )
            for name, (shape, _) in checkpoint.items()
            if name in self.layouts
        }  # fmt: skip
        unread = tuple(name for name in checkpoint if name not in held)
        return self.loaded._replace(holdings=held, unread=unread)


def _piece(
    rank: int, buffer: str, local: Region, box: Region, shape: torch.Size
) -> tuple[tuple[int, ...], Piece]:
    """Return the order of a parameter's dims that is the checkpoint's, and the piece in it."""
    behind = {b: a for a, b in zip(local.dims, box.dims, strict=True)}
    free = [dim for dim in range(len(shape)) if dim not in behind.values()]
    extra = max(len(shape) - len(box.sizes), 0)
    missing = max(len(box.sizes) - len(shape), 0)  # leading dims of the checkpoint's
    leading, free = free[:extra], free[extra:]
    order = [*leading]
    for dim in range(missing, len(box.sizes)):
        order.append(behind[dim] if dim in behind else free.pop(0))
    low = [local.low[dim] for dim in order]
    offset = (*(0,) * missing, *flattened(low, [shape[dim] for dim in order], extra))
    high = tuple(a + b for a, b in zip(box.low, box.sizes, strict=True))
    return tuple(order), Piece(rank, Box(box.low, high), offset[: len(box.sizes)], buffer)


def _name(func: Any) -> str:
    return str(func.name()).removeprefix("aten::")


def _tensors(values: object) -> Iterator[Tensor]:
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, Mapping):
        yield from _tensors([*values.values()])
    elif isinstance(values, list | tuple):
        for each in values:
            yield from _tensors(each)


def view_of(tensor: Tensor) -> Strided:
    return Strided(int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride())
