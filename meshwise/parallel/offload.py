"""Activation offload: keep the tensors that layers save for backward in host memory.

In: a laid-out stage. Afterwards every storage of at least 1 MiB that a layer saves, other than its
parameters and buffers, is copied to pinned host memory while the next layer computes. Its device
memory is free once that next layer has ended. It comes back while that next layer computes its
backward. The last layer copies nothing and keeps its tensors on the device: the stage computes
nothing that could hide their way back. What the stage receives stays, too, because the pipeline
holds it until its backward. So a stage of one layer saves no memory.

Memory is released in stream order: the compute stream waits for a copy before its source may be
used again. Each storage is moved once and whole, so views of it keep their strides. On a CPU the
same moves are plain copies.
"""

import weakref
from collections.abc import Callable
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor

from meshwise.models.offload import MIN_BYTES
from meshwise.nn.stage import Layer, ModelStage, nothing

Side = torch.cuda.Stream | None


class _SavedByCall:
    """The storages that one call of a layer saved: on the device, on the host, or on both."""

    def __init__(self, home: torch.device, side: Side) -> None:
        self.home, self.side = home, side
        self.device: list[Tensor] = []  # empty: on the host only
        self.host: list[Tensor] = []
        self.numbers: dict[tuple[int, int], int] = {}  # by address and version
        self.moved: torch.cuda.Event | None = None  # recorded after the last copy, either way

    def add(self, storage: torch.UntypedStorage, version: int) -> int:
        """Start copying a storage to the host, unless it is there already; return its number."""
        key = storage.data_ptr(), version
        if key not in self.numbers:
            self.numbers[key] = len(self.host)
            whole = torch.empty(0, dtype=torch.uint8, device=self.home).set_(storage)
            self.device.append(whole)
            self.host.append(self.copy(whole, torch.device("cpu")))
        return self.numbers[key]

    def leave(self) -> None:
        """Free the device memory. The compute stream first waits for the copies to the host."""
        self.wait()
        self.device = []

    def fetch(self) -> None:
        """Start copying the storages back, unless they are on the device."""
        if not self.device:
            self.device = [self.copy(whole, self.home) for whole in self.host]

    def take(self, number: int) -> torch.UntypedStorage:
        """Return a storage for backward."""
        self.fetch()
        self.wait()
        return self.device[number].untyped_storage()

    def copy(self, source: Tensor, device: torch.device) -> Tensor:
        if self.side is None:
            return source.clone()
        target = torch.empty_like(source, device=device, pin_memory=device.type == "cpu")
        self.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side):
            target.copy_(source, non_blocking=True)
            self.moved = torch.cuda.Event()
            self.moved.record()
        if target.is_cuda:
            target.record_stream(self.side)  # the target may be freed before the copy ends
        return target

    def wait(self) -> None:
        if self.moved is not None:
            torch.cuda.current_stream().wait_event(self.moved)
            self.moved = None


class _View(NamedTuple):
    """A saved tensor as a view of a storage. ``wrap`` makes it a DTensor again if it was one."""

    group: _SavedByCall
    number: int
    dtype: torch.dtype
    offset: int
    size: torch.Size
    stride: tuple[int, ...]
    wrap: Callable[[Tensor], Tensor]


class _Calls:
    """The calls of one stage's layers, one after the other."""

    def __init__(self, model: ModelStage) -> None:
        layers = [*model.layers.values()]
        self.last, self.receiver = layers[-1], None if model.first else layers[0]
        self.side: Side = None
        # weak: the graph owns it
        self.latest: Callable[[], _SavedByCall | None] = nothing

    def run(self, call: Callable[[Tensor], Any], layer: nn.Module, x: Tensor) -> Any:
        if not torch.is_grad_enabled():
            return call(x)
        earlier = self.latest
        if layer is self.last:
            self.latest, out = nothing, call(x)
        else:
            out = self.moving(call, layer, x)
        if (group := earlier()) is not None:
            group.leave()  # its copies ran while this layer computed

            def fetch(_: Tensor) -> None:  # as this layer's backward begins
                if (group := earlier()) is not None:
                    group.fetch()

            out.register_hook(fetch)
        return out

    def moving(self, call: Callable[[Tensor], Any], layer: nn.Module, x: Tensor) -> Any:
        """Call a layer whose saved tensors go to the host."""
        if x.is_cuda and self.side is None:
            self.side = torch.cuda.Stream()
        group = _SavedByCall(x.device, self.side)
        self.latest = weakref.ref(group)
        received = [x] if layer is self.receiver else []
        staying: set[int] = set()

        def pack(value: Tensor) -> Tensor | _View:
            if not staying:  # not earlier, because FSDP2 has only just gathered the weights
                owned = chain(layer.parameters(), layer.buffers(), received)
                staying.update(map(_address, owned))
            return _pack(value, group, staying)

        with saved_tensors_hooks(pack, _unpack):
            return call(x)


def offload_saved(model: ModelStage) -> None:
    """Wrap every layer, before or after it is compiled and sharded.

    The layers' class gets a ``__call__`` around torch's, outside compiled code and outside FSDP2's
    hooks. Layers of one class share one new class; otherwise each would be compiled separately.
    """
    calls, kinds = _Calls(model), dict[type, type]()
    for layer in model.layers.values():
        assert isinstance(layer, Layer)
        if (kind := type(layer)) not in kinds:
            wrapped = {"__call__": _around(kind, calls)}
            kinds[kind] = type(f"Offloaded{kind.__name__}", (kind,), wrapped)
        layer.__class__ = kinds[kind]


def _around(kind: type[nn.Module], calls: _Calls) -> Callable[..., Any]:
    def call(layer: nn.Module, x: Tensor) -> Any:
        return calls.run(lambda x: kind.__call__(layer, x), layer, x)

    return call


def _pack(value: Tensor, group: _SavedByCall, staying: set[int]) -> Tensor | _View:
    """Return what autograd keeps: the tensor itself if it stays, else a record of where it is."""
    local, wrap = _unwrapped(value)
    if type(local) is not Tensor or local.layout != torch.strided or local.device != group.home:
        return value
    storage = local.untyped_storage()
    if storage.nbytes() < MIN_BYTES or storage.data_ptr() in staying:
        return value
    number = group.add(storage, local._version)
    offset = int(local.storage_offset())
    return _View(group, number, local.dtype, offset, local.size(), local.stride(), wrap)


def _unpack(kept: Tensor | _View) -> Tensor:
    if isinstance(kept, Tensor):
        return kept
    storage = kept.group.take(kept.number)
    view = torch.empty(0, dtype=kept.dtype, device=kept.group.home)
    return kept.wrap(view.set_(storage, kept.offset, kept.size, kept.stride))


def _unwrapped(value: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Return this rank's part of a DTensor, and a function that makes the part a DTensor again."""
    if not isinstance(value, DTensor):
        return value, lambda local: local
    mesh, placements, shape, stride = (
        value.device_mesh,
        value.placements,
        value.shape,
        value.stride(),
    )

    def wrap(local: Tensor) -> Tensor:
        return DTensor.from_local(
            local, mesh, placements, run_check=False, shape=shape, stride=stride
        )

    return value.to_local(), wrap


def _address(tensor: Tensor) -> int:
    return _unwrapped(tensor)[0].untyped_storage().data_ptr()
