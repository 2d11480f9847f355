"""Lay out a module that somebody else wrote, in place: tp and ep, recomputation, compilation, data
parallelism.

In: the module with its weights, a place, and strategies from ``models.strategies`` or from the
user. Out: the same module, whose parameters are DTensors with this rank's share, and a report. An
error names what cannot be laid out, before anything is changed.

Every parameter is a DTensor on the tp axis, even if whole on every rank, for stock optimizers and
clipping, which then work on all of them at once.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.utils.checkpoint import checkpoint

from meshwise.models import strategies
from meshwise.models.strategies import WHOLE, Assigned, Known
from meshwise.parallel import cuts, data
from meshwise.parallel.apply import device_of
from meshwise.parallel.mesh import MeshPlace
from meshwise.spec import Recipe

# (name, meta tensor) -> the whole value of a parameter or buffer, the same on every rank.
Init = Callable[[str, Tensor], Tensor]
OF_OWN_ROWS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
DIFFERENT = 0.05  # largest difference of gradients that should be equal, relative to their mean


class Laid(NamedTuple):
    """The report: strategies by parameter, units by name."""

    assigned: Assigned
    units: tuple[str, ...]
    idle: tuple[str, ...]  # patterns of units and attributes that match nothing
    notes: tuple[str, ...]


class _ModuleCut(NamedTuple):
    """A module with parameters of its own, its strategy, and their cut; None: not cut."""

    path: str
    module: nn.Module
    kind: strategies.Strategy
    cut: cuts.Parameters | None


def lay_out(
    model: nn.Module,
    place: MeshPlace,
    wishes: Known,
    *,
    dtype: str,
    compiled: bool,
    recipe: Recipe,
    init: Init | None,
) -> Laid:
    """Lay the module out, in the order of ``parallel.apply``."""
    assigned = strategies.assign(wishes.strategies, [name for name, _ in _parameters(model)])
    units = {
        name: module
        for name, module in model.named_modules()
        if any(strategies.selects(pattern, name) for pattern in wishes.units)
    }
    check(model, place, assigned, units, init)
    if data.is_needed(place.layout, dtype):
        _check_scalars(model)
    todo = [
        _cut_of(path, module, assigned, place)
        for path, module in model.named_modules()
        if module._parameters
    ]
    divided = _divided(model, wishes.divided, place.layout.tp)
    values = _Values(place, dtype, recipe, init)
    values.check(model, todo)  # the last refusal: from here on the module changes
    for name, (module, share) in divided.items():
        setattr(module, name.rpartition(".")[2], share)
    kinds = place.layout.recomputed(len(units))
    notes = _without_cache(model, compiled or "full" in kinds)
    _place(model, place, todo, values)
    for unit, kind in zip(units.values(), kinds, strict=True):
        if kind == "full":
            again = partial(checkpoint, unit.forward, use_reentrant=False)
            unit.forward = again
        if compiled:
            unit.compile(dynamic=False)
    if data.is_needed(place.layout, dtype):
        _shard(model, list(units.values()), todo, place, dtype, recipe)
    if place.layout.tp > 1:
        _watch(model, assigned, place)
    patterns = (*wishes.units, *wishes.divided)
    found = [*units, *divided]
    idle = [p for p in patterns if not any(strategies.selects(p, name) for name in found)]
    return Laid(assigned, tuple(units), tuple(idle), notes)


def _without_cache(model: nn.Module, needed: bool) -> tuple[str, ...]:
    """Switch off the cache of keys and values: a recomputed layer would add to it twice."""
    config: Any = getattr(model, "config", None)
    if not needed or not getattr(config, "use_cache", False):
        return ()
    config.use_cache = False
    return ("config.use_cache is now false",)


def _parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """List the parameters, tied ones under each of their names."""
    return list(model.named_parameters(remove_duplicate=False))


def check(
    model: nn.Module,
    place: MeshPlace,
    assigned: Assigned,
    units: Mapping[str, nn.Module],
    init: Init | None,
) -> None:
    """Raise a ValueError that names the first thing that would go wrong or could not run."""
    layout = place.layout
    first: dict[int, str] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        other = first.setdefault(id(module), name)
        if other != name and layout.num_devices > 1 and any(True for _ in module.parameters()):
            raise ValueError(f"{name}: is {other} once more; give each place a module of its own")
        _check_module(name, module, place)
    for name, value in [*_parameters(model), *model.named_buffers()]:
        if isinstance(value, DTensor):
            raise ValueError(f"{name}: is a DTensor already; give a module that is not laid out")
        if value.is_meta and init is None:
            raise ValueError(f"{name}: is on the meta device; give init, which makes its value")
    kinds = {kind for kind in assigned.strategies.values() if kind}
    if layout.ep > 1 and "expert" not in kinds:
        raise ValueError(f"Layout.ep = {layout.ep}: no parameter is mapped as expert; use 1")
    _check_heads(model, layout.tp, kinds)
    _check_tied(model, assigned, units)
    nested = [b for a in units for b in units if b.startswith(f"{a}.")]
    if nested:
        raise ValueError(f"units: {nested[0]} lies within another unit; name one of them")


def _check_scalars(model: nn.Module) -> None:
    """Refuse scalars now; FSDP2 would refuse them halfway through its work."""
    for name, parameter in _parameters(model):
        if parameter.ndim == 0:
            raise ValueError(
                f"{name}: is a scalar, which cannot be sharded; make it 1-D, of one element"
            )


def _check_module(name: str, module: nn.Module, place: MeshPlace) -> None:
    layout, kind = place.layout, type(module).__name__
    if isinstance(module, OF_OWN_ROWS) and layout.data_ranks > 1:
        raise ValueError(
            f"{name}: {kind} would take the statistics of each rank's rows alone; use "
            "nn.SyncBatchNorm.convert_sync_batchnorm (GPUs) or another norm"
        )
    if isinstance(module, cuts.UNCUTTABLE) and layout.tp > 1:
        raise ValueError(f"{name}: {kind} reads weights past its parts; write it with nn.Linear")
    if isinstance(module, FSDPModule):
        raise ValueError(f"{name}: is sharded already; give a module that is not laid out")


def _check_heads(model: nn.Module, tp: int, kinds: Iterable[str]) -> None:
    """Check that tp divides the heads in a transformers config, if products are split by heads."""
    config = getattr(model, "config", None)
    if not any(kind.startswith(("col", "row")) for kind in kinds):
        return
    for field in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config, field, None)
        if isinstance(heads, int) and heads % tp:
            raise ValueError(f"Layout.tp = {tp}: must divide {field} = {heads} of the model")


def _check_tied(model: nn.Module, assigned: Assigned, units: Mapping[str, nn.Module]) -> None:
    """Check that a weight with two names is cut once and belongs to one unit."""
    seen: dict[int, tuple[str, str | None, str]] = {}
    for name, parameter in _parameters(model):
        unit = next((unit for unit in units if name.startswith(f"{unit}.")), "")
        strategy = assigned.strategies[name]
        other, theirs, where = seen.setdefault(id(parameter), (name, strategy, unit))
        if (strategy or "replicated") != (theirs or "replicated"):
            raise ValueError(
                f"{name}: is tied to {other}, but one is {strategy} and the other {theirs}; "
                "map them alike"
            )
        if unit != where:
            raise ValueError(
                f"{name}: is tied to {other} in another unit; give units that hold both or neither"
            )


def _divided(
    model: nn.Module, patterns: Sequence[str], tp: int
) -> dict[str, tuple[nn.Module, int]]:
    """Return this rank's share of the attributes that count heads or features, by name."""
    found: dict[str, tuple[nn.Module, int]] = {}
    for path, module in model.named_modules():
        for attribute, value in vars(module).items():
            name = _join(path, attribute)
            if not any(strategies.selects(pattern, name) for pattern in patterns):
                continue
            if not isinstance(value, int) or value % tp:
                raise ValueError(f"{name} = {value}: tp = {tp} must divide it; choose another tp")
            found[name] = module, value // tp
    return found


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _cut_of(path: str, module: nn.Module, assigned: Assigned, place: MeshPlace) -> _ModuleCut:
    found = {}
    for name, _ in module.named_parameters(recurse=False):
        strategy = assigned.strategies[_join(path, name)]
        found[name] = strategies.parse(strategy or "replicated")
    cutting = (kind for kind, _ in found.values() if kind not in WHOLE)
    kind: strategies.Strategy = next(cutting, "replicated")
    divided = place.layout.tp > 1 or (kind == "expert" and place.experts is not None)
    cut = cuts.parameters(path, module, found, place) if divided and found else None
    return _ModuleCut(path, module, kind, cut)


class _Values:
    """The values of a module's tensors: read once for ``check``, then placed one by one.

    A value that ``init`` makes is placed at once, since its tensor on the meta device takes no
    memory. Any other is placed when it replaces its tensor, so that there are never two models.
    """

    def __init__(self, place: MeshPlace, dtype: str, recipe: Recipe, init: Init | None) -> None:
        self.place, self.init = place, init
        self.device = device_of(place.mesh)
        in_bf16 = recipe.weights == "bf16" and dtype == "bf16"
        self.masters = torch.bfloat16 if in_bf16 else torch.float32
        self.sums: dict[str, Tensor] = {}  # of a tensor's values and of their absolute values
        self.made: dict[int, nn.Parameter] = {}  # by the id of the parameter that each replaces
        self.buffers: dict[str, Tensor] = {}  # those that ``init`` made

    def check(self, model: nn.Module, todo: Sequence[_ModuleCut]) -> None:
        """Raise a ValueError if ``init`` gave another shape, or if values differ between ranks."""
        seen = set[int]()
        for path, module, _, cut in todo:
            for name, old in module.named_parameters(recurse=False):
                if id(old) not in seen:
                    seen.add(id(old))
                    value = self._read(_join(path, name), old)
                    if old.is_meta:
                        self.made[id(old)] = self.placed(name, old, value, cut)
        for name, buffer in model.named_buffers(remove_duplicate=False):
            value = self._read(name, buffer)
            if buffer.is_meta:
                self.buffers[name] = value.to(self.device, buffer.dtype)
        if self.place.layout.num_devices > 1 and self.sums:
            _check_same(list(self.sums), torch.stack([*self.sums.values()]))

    def _read(self, name: str, old: Tensor) -> Tensor:
        value = self.init(name, old) if old.is_meta and self.init is not None else old.detach()
        if value.shape != old.shape:
            raise ValueError(f"{name}: init gave {list(value.shape)}, not {list(old.shape)}")
        numbers = value.double()
        self.sums[name] = torch.stack([numbers.sum(), numbers.abs().sum()]).to(self.device)
        return value

    def placed(
        self, name: str, old: nn.Parameter, value: Tensor, cut: cuts.Parameters | None
    ) -> nn.Parameter:
        value = value.to(self.device, self.masters if old.is_floating_point() else old.dtype)
        if cut is not None:
            value = distribute_tensor(value, cut.mesh, cut.placements[name], src_data_rank=None)
        kept = cut is None and not old.is_meta and value.data_ptr() == old.data_ptr()
        return old if kept else nn.Parameter(value, old.requires_grad)


def _check_same(names: Sequence[str], sums: Tensor) -> None:
    """Check that all ranks have the same weights, since each keeps a part of its own copy."""
    values, sizes = sums.nan_to_num().unbind(1)
    ends = torch.cat([values, -values, sizes, -sizes])
    dist.all_reduce(ends, dist.ReduceOp.MAX)
    most, least, largest, smallest = ends.chunk(4)
    apart = torch.maximum(most + least, largest + smallest) > 1e-9 * largest
    wrong = [name for name, differs in zip(names, apart.tolist(), strict=True) if differs]
    if wrong:
        raise ValueError(
            f"{wrong[0]}: its values differ between ranks, as those of {len(wrong)} tensors do; "
            "load the same weights everywhere, or seed every rank alike before the model is made"
        )


def _place(model: nn.Module, place: MeshPlace, todo: Sequence[_ModuleCut], values: _Values) -> None:
    """Move every tensor to the device, cut it if due, and connect the modules that use it."""
    fetched = cuts.Fetched()
    for _, module, kind, cut in todo:
        for name, old in list(module.named_parameters(recurse=False)):
            if id(old) not in values.made:  # tied ones have the same
                values.made[id(old)] = values.placed(name, old, old.detach(), cut)
            module.register_parameter(name, values.made[id(old)])
        if cut is not None:
            cuts.connect(module, kind, cut.views, place, fetched)
    for path, module in model.named_modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            made = values.buffers.get(_join(path, name))
            setattr(module, name, buffer.to(values.device) if made is None else made)


def _shard(
    model: nn.Module,
    units: Sequence[nn.Module],
    todo: Sequence[_ModuleCut],
    place: MeshPlace,
    dtype: str,
    recipe: Recipe,
) -> None:
    if place.experts is not None:
        theirs = place._replace(mesh=place.experts, experts=None)
        for module in (one.module for one in todo if one.kind == "expert"):
            data.shard(module, theirs, dtype, recipe, root=False)
    for unit in units:
        data.shard(unit, place, dtype, recipe, root=False)
    data.shard(model, place, dtype, recipe, root=True)
    if recipe.prefetch > 1:
        data.prefetch(list(units), recipe.prefetch)


def _watch(model: nn.Module, assigned: Assigned, place: MeshPlace) -> None:
    """Check after the first backward that uncut parameters have equal gradients on all tp ranks."""
    group = place.mesh["tp"].get_group()
    for name, parameter in model.named_parameters():
        kind = assigned.strategies[name] or "replicated"
        assert isinstance(parameter, DTensor)
        if kind in WHOLE and parameter.requires_grad and parameter.placements[-1] == Replicate():
            _look_once(name, parameter, group)


def _look_once(name: str, parameter: nn.Parameter, group: dist.ProcessGroup) -> None:
    seen = False

    def look(parameter: Tensor) -> None:
        nonlocal seen
        if seen:  # the hook cannot remove itself: torch is iterating over the hooks
            return
        seen = True
        gradient = parameter.grad
        assert isinstance(gradient, DTensor)
        mine = gradient.to_local().detach().float()
        mean = mine.clone()
        dist.all_reduce(mean, group=group)
        mean /= dist.get_world_size(group)
        apart = torch.stack([(mine - mean).square().sum(), mean.square().sum()])
        dist.all_reduce(apart, group=group)
        difference, size = apart.sqrt().tolist()
        if difference > DIFFERENT * size:
            raise ValueError(
                f"{name}: its gradient differs between tp ranks; map it as summed if it computes "
                "with split activations, and seed the ranks of a tp group alike if there is dropout"
            )

    parameter.register_post_accumulate_grad_hook(look)
