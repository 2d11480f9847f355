"""Make a foreign module compute with this rank's part of its weights.

In: a module, its strategy, and where this rank is on the tp and ep axes. Out: the same module with
DTensor parameters and hooks. While forward runs, each parameter name holds a plain tensor, this
rank's part, so the module's own code computes with it. No operator sees a DTensor.

A module cut by outputs reads a whole activation, and that activation's gradient is summed over tp
ranks. A module cut by inputs returns a partial sum (Shoeybi et al. 2019); only the first rank adds
the bias.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from meshwise import torch_private
from meshwise.models.strategies import WHOLE, Strategy
from meshwise.parallel.experts import AllToAll
from meshwise.parallel.mesh import MeshPlace

Placements = tuple[Placement, ...]
View = Callable[[DTensor], Tensor]
# The ffn dim of each stacked expert weight, and how many equal parts lie along it.
STACKED = {"gate_up_proj": (1, 2), "up_proj": (1, 1), "gate_proj": (1, 1), "down_proj": (2, 1)}
# Their forward reads the weights of submodules directly, so hooks on those do not run.
UNCUTTABLE = (nn.MultiheadAttention, nn.RNNBase)


class Parameters(NamedTuple):
    """The placement of each of a module's parameters, and the view of it that forward sees."""

    mesh: DeviceMesh
    placements: dict[str, Placements]
    views: dict[str, View]


def parameters(
    name: str, module: nn.Module, strategies: Mapping[str, tuple[Strategy, int]], place: MeshPlace
) -> Parameters:
    """Cut the module's own parameters. ``strategies`` maps each parameter name to its strategy."""
    mesh = place.mesh["tp"]
    kinds = set(strategies.values())
    cut = {kind for kind in kinds if kind[0] not in WHOLE}
    if not cut:
        placed: dict[str, Placements] = dict.fromkeys(strategies, (Replicate(),))
        return Parameters(mesh, placed, {n: _whole(kind) for n, (kind, _) in strategies.items()})
    (kind, parts), *others = kinds
    if others:
        raise ValueError(
            f"{name}: its parameters have several strategies, and one is {cut.pop()[0]}; give the "
            "module one by its own name"
        )
    if kind == "expert":
        return _experts(name, module, place)
    shards = place.layout.shards
    if parts > 1 and isinstance(module, nn.Linear) and module.in_features % shards:
        raise ValueError(
            f"{name} ({kind}/{parts}): {shards} shards must divide dim 1 of "
            f"{list(module.weight.shape)}; map it and its counterpart as replicated"
        )
    return _product(name, module, kind, parts, mesh)


def _whole(kind: Strategy) -> View:
    gradient = Partial() if kind == "summed" else Replicate()
    return lambda weight: weight.to_local(grad_placements=[gradient])


def _product(
    name: str, module: nn.Module, kind: Strategy, parts: int, mesh: DeviceMesh
) -> Parameters:
    (out, into), tp, rank = _dims(name, module, kind), mesh.size(), mesh.get_local_rank()
    rows = kind in ("row", "channel_row")
    dim = into if rows else out
    weight = module.weight
    assert isinstance(weight, Tensor)
    _check_divides(name, kind, weight, dim, tp, parts)
    placements: dict[str, Placements] = {"weight": (torch_private.cut(dim, parts),)}
    views: dict[str, View] = {"weight": DTensor.to_local}
    if getattr(module, "bias", None) is not None:
        if rows:
            first = float(rank == 0)
            views["bias"] = lambda bias: bias.to_local(grad_placements=[Partial()]) * first
        else:
            views["bias"] = partial(_pieces, parts=parts, tp=tp, rank=rank)
        placements["bias"] = (Replicate(),)
    return Parameters(mesh, placements, views)


def _pieces(bias: DTensor, parts: int, tp: int, rank: int) -> Tensor:
    """Return this rank's share of each part of a bias. Every rank holds the (small) bias whole."""
    whole = bias.to_local(grad_placements=[Partial()])
    cut = [part.tensor_split(_edges(len(part), tp)) for part in whole.chunk(parts)]
    return torch.cat([pieces[rank] for pieces in cut])


def _edges(size: int, tp: int) -> list[int]:
    """Return where DTensor cuts ``size`` rows into tp pieces: equal, and the last may be less."""
    step = -(-size // tp)
    return [min(size, step * rank) for rank in range(1, tp)]


def _dims(name: str, module: nn.Module, kind: Strategy) -> tuple[int, int]:
    """Return the weight's output dim and its input dim."""
    known = None
    if kind.startswith("channel"):
        if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d) and module.groups == 1:
            known = 0, 1
    elif isinstance(module, nn.Linear) or (isinstance(module, nn.Embedding) and kind == "vocab"):
        known = 0, 1
    elif type(module).__name__ == "Conv1D" and hasattr(module, "nf"):  # GPT-2's
        known = 1, 0
    if known is None:
        raise ValueError(
            f"{name}: {kind} is not known of a {type(module).__name__}; map it as replicated"
        )
    if isinstance(module, nn.Embedding) and (
        module.max_norm is not None or module.scale_grad_by_freq or module.sparse
    ):
        raise ValueError(
            f"{name}: vocab has no max_norm, scale_grad_by_freq or sparse; map it as replicated"
        )
    return known


def _check_divides(
    name: str, kind: Strategy, weight: Tensor, dim: int, tp: int, parts: int
) -> None:
    size = weight.shape[dim]
    if kind != "vocab" and size % (tp * parts):
        pieces = f"{parts} * tp = {tp}" if parts > 1 else f"tp = {tp}"
        raise ValueError(
            f"{name} ({kind}): {pieces} must divide dim {dim} of {list(weight.shape)}; choose "
            "another tp, or map it and its counterpart as replicated"
        )


def _experts(name: str, module: nn.Module, place: MeshPlace) -> Parameters:
    """Cut experts stacked as in transformers 5 and later: gate_up_proj [experts,2*ffn,hidden],
    down_proj [experts,hidden,ffn], called with (rows, chosen experts, their weights)."""
    own = dict(module.named_parameters(recurse=False))
    usual = set(own) <= set(STACKED) and "down_proj" in own and len(own) > 1
    if not usual or any(p.ndim != 3 for p in own.values()) or not hasattr(module, "num_experts"):
        raise ValueError(
            f"{name}: expert needs stacked gate_up_proj and down_proj without biases, and "
            f"{type(module).__name__} has {', '.join(own) or 'none'}; map it as replicated"
        )
    tp, ep = place.layout.tp, place.layout.ep
    for parameter, weight in own.items():
        dim, parts = STACKED[parameter]
        _check_divides(f"{name}.{parameter}", "expert", weight, dim, tp, parts)
        if len(weight) % ep:
            raise ValueError(f"{name}: ep = {ep} must divide its {len(weight)} experts")
    # torch mishandles a cut in parts on an axis of one rank
    over_ffn = {n: torch_private.cut(STACKED[n][0], STACKED[n][1] if tp > 1 else 1) for n in own}
    views: dict[str, View] = dict.fromkeys(own, DTensor.to_local)
    if place.experts is None:
        return Parameters(place.mesh["tp"], {n: (cut,) for n, cut in over_ffn.items()}, views)
    divided = {n: (Shard(0), cut) for n, cut in over_ffn.items()}
    return Parameters(place.experts["ep", "tp"], divided, views)  # type: ignore[arg-type]


@dataclass
class Fetched:
    """The last activation read by a module cut by outputs. Modules with the same input reuse it,
    so their gradients take one sum instead of one each. The module that sums results forgets it."""

    key: tuple[Any, ...] = ()
    result: Tensor | None = None

    def fetch(self, x: Tensor, mesh: DeviceMesh) -> Tensor:
        if torch.compiler.is_compiling():
            return _fetch(x, mesh)
        state = (x._version, torch.is_grad_enabled())
        if self.result is None or self.key[0] is not x or self.key[1:] != state:
            self.key, self.result = (x, *state), _fetch(x, mesh)
        return self.result

    def forget(self) -> None:
        if not torch.compiler.is_compiling():
            self.key, self.result = (), None


def _fetch(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return x, which is whole on every rank; backward sums its gradient over the ranks."""
    whole = DTensor.from_local(x, mesh, [Replicate()])
    return whole.to_local(grad_placements=[Partial()])


class _Gather(torch.autograd.Function):
    """x [...,this rank's share of size] -> [...,size]. DTensor would return a view; this is none,
    because users may change a model's result in place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: DeviceMesh, size: int) -> Tensor:
        ctx.edges, ctx.rank = _edges(size, mesh.size()), mesh.get_local_rank()
        shape = torch.Size([*x.shape[:-1], size])
        stride = torch.empty(shape, device="meta").stride()
        split = DTensor.from_local(
            x.contiguous(), mesh, [Shard(x.ndim - 1)], shape=shape, stride=stride
        )
        return split.redistribute(mesh, [Replicate()]).to_local()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return gradients[0].tensor_split(ctx.edges, -1)[ctx.rank], None, None


def connect(
    module: nn.Module, kind: Strategy, views: Mapping[str, View], place: MeshPlace, fetched: Fetched
) -> None:
    """Hook the module's inputs, parameters and result, as its strategy needs."""
    mesh, tp = place.mesh["tp"], place.layout.tp
    if kind == "vocab" and isinstance(module, nn.Embedding):
        _look_up(module, mesh)
    elif kind in ("col", "channel_col", "vocab"):
        _before(module, lambda x: fetched.fetch(x, mesh), first_only=True)
        if type(module).__name__ == "Conv1D":
            module.nf //= tp  # type: ignore[operator, assignment]
    elif kind == "expert" and tp > 1:
        _before(module, lambda x: _fetch(x, mesh), first_only=False)
    if kind == "expert" and place.experts is not None:
        _send_tokens(module, place)
    _see(module, views)
    if kind == "vocab" and not isinstance(module, nn.Embedding):
        dim = _dims("", module, "vocab")[0]
        size = dict(module.named_parameters())["weight"].shape[dim]
        _behind(module, lambda x: _Gather.apply(x, mesh, size))  # type: ignore[no-untyped-call]
    elif kind in ("row", "channel_row", "vocab") or (kind == "expert" and tp > 1):

        def add_up(x: Tensor) -> Tensor:
            fetched.forget()
            parts = DTensor.from_local(x, mesh, [Partial()])
            return parts.redistribute(mesh, [Replicate()]).to_local()

        _behind(module, add_up)


def _before(module: nn.Module, change: Callable[[Tensor], Tensor], *, first_only: bool) -> None:
    def changed(x: Any) -> Any:
        return change(x) if isinstance(x, Tensor) and x.is_floating_point() else x

    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if first_only and args:
            return (changed(args[0]), *args[1:]), kwargs
        return tuple(map(changed, args)), {key: changed(value) for key, value in kwargs.items()}

    module.register_forward_pre_hook(hook, with_kwargs=True)


def _behind(module: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
    module.register_forward_hook(lambda _, __, output: change(output))


def _see(module: nn.Module, views: Mapping[str, View]) -> None:
    """Hide the parameters behind plain tensors while forward runs. This works because python looks
    in an object's own dict first, and torch keeps parameters elsewhere. It wraps forward because
    hooks would not run when a forward is recomputed."""
    compute = module.forward

    @wraps(compute)
    def forward(*args: Any, **kwargs: Any) -> Any:
        for name, view in views.items():
            object.__setattr__(module, name, view(module._parameters[name]))  # type: ignore[arg-type]
        try:
            return compute(*args, **kwargs)
        finally:  # recomputation stops in the middle of a forward, by raising an exception
            for name in views:
                object.__delattr__(module, name)

    module.forward = forward


def _look_up(module: nn.Embedding, mesh: DeviceMesh) -> None:
    """Look up the vocabulary rows on this rank; other tokens give 0. Tokens outside the vocabulary
    fail on the first or last rank, as they do without tp."""
    tp, rank, size = mesh.size(), mesh.get_local_rank(), module.num_embeddings
    edges = [0, *_edges(size, tp), size]
    low, high = edges[rank], edges[rank + 1]
    padding = module.padding_idx

    def forward(tokens: Tensor) -> Tensor:
        elsewhere = torch.zeros_like(tokens, dtype=torch.bool)
        if rank > 0:
            elsewhere |= tokens < low
        if rank < tp - 1:
            elsewhere |= tokens >= high
        here = (tokens - low).masked_fill(elsewhere, 0)
        pad = padding - low if padding is not None and low <= padding < high else None
        found = F.embedding(here, module.weight, padding_idx=pad)
        return found.masked_fill(elsewhere.unsqueeze(-1), 0.0)

    module.forward = forward  # type: ignore[method-assign, assignment]


def _send_tokens(module: nn.Module, place: MeshPlace) -> None:
    """Send rows to the ranks of their experts and back; the sender then applies their weights."""
    assert place.experts is not None
    exchange = AllToAll(place.experts["ep"].get_group(), place.layout.ep)
    compute, n = module.forward, int(module.num_experts)  # type: ignore[arg-type]
    module.num_experts = n // place.layout.ep  # type: ignore[assignment]

    def forward(x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        flat, top_k = chosen.flatten(), chosen.shape[-1]
        order = flat.argsort(stable=True)
        counts = torch.zeros(n, dtype=torch.int64, device=x.device)
        counts = counts.scatter_add(0, flat, torch.ones_like(flat))
        rows, here, ticket = exchange.out(x.index_select(0, order // top_k), counts)
        expert = torch.arange(len(here), device=x.device).repeat_interleave(here)
        ones = torch.ones(len(rows), 1, dtype=weights.dtype, device=x.device)
        rows = exchange.back(compute(rows, expert.unsqueeze(-1), ones), ticket)
        picked = rows.index_select(0, order.argsort()).view(len(x), top_k, -1)
        return (picked * weights.to(x.dtype).unsqueeze(-1)).sum(1)

    module.forward = forward
