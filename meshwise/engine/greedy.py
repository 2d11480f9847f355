"""Decode greedily in this rank's stage: choose the likeliest next token, again and again.

In: a plan whose microbatches are groups of rows, a ``MeshPlace``, prompts. Out: the tokens, on
ranks with the last stage. Keys and values are cached (``nn.cache``); weights are plain tensors
(``parallel.local``).

Groups take turns: a stage works on one group while other stages work on the others. The last stage
chooses the tokens and sends them to the first. The host never waits for a token; it fills tensors
of positions. On a GPU a stage's step is a CUDA graph, one for each length of cache that is read;
lengths double from ``SHORTEST``. Messages between stages are outside the graphs.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Module

from meshwise import timing, torch_private
from meshwise.models import placement
from meshwise.nn import ModelStage
from meshwise.nn.cache import Cache, Now
from meshwise.nn.gpt import GPTLayer
from meshwise.nn.llama import DecoderLayer, LatentAttention
from meshwise.parallel import apply, local
from meshwise.parallel.local import Choice
from meshwise.parallel.mesh import MeshPlace
from meshwise.parallel.pipeline import activations
from meshwise.reshard.transports import p2p
from meshwise.spec import Decoder, Layout, Model, Plan, WideResNet

SHORTEST = 256  # the fewest tokens of the cache that a step reads


class Routes(NamedTuple):
    """This rank's messages of one kind: to the next stage (``out``) and from the one before
    (``back``). The last stage sends tokens to the first. None: this rank has no such message."""

    out: p2p.Route | None
    back: p2p.Route | None
    shape: tuple[int, ...]  # of the received tensor


class CapturedStep(NamedTuple):
    """A step as a CUDA graph: a replay turns ``x`` into ``y``."""

    graph: torch.cuda.CUDAGraph
    x: Tensor
    y: Tensor


@dataclass(frozen=True)
class Decoding:
    """A rank's stage, ready to decode groups of rows [rows, prompt_len]."""

    stage: ModelStage
    choose: Choice
    now: Now
    prompts: Routes
    tokens: Routes  # one activation per row
    chosen: Routes  # from the last stage to the first
    layout: Layout
    prompt_at: Tensor  # positions of the prompt
    token_at: Tensor  # position of the incoming token; refilled in place: graphs hold it
    new_tokens: int
    shortest: int
    dtype: torch.dtype
    device: torch.device
    caches: list[Cache]
    is_static: bool  # no step waits for the device, so a graph can capture it
    graphs: dict[tuple[int, int], CapturedStep] = field(default_factory=dict)


class Generated(NamedTuple):
    """Generated ``tokens`` [groups, rows, new_tokens], on ranks with the last stage. ``marks``: one
    at the start and one after each token of all groups."""

    tokens: Tensor | None
    marks: list[Any]


def prepare(
    plan: Plan,
    place: MeshPlace,
    device: torch.device,
    *,
    new_tokens: int,
    seed: int,
    shortest: int = SHORTEST,
) -> Decoding:
    """Build a rank's stage of a plan from ``decode.plan_for``, with room for keys and values."""
    model, layout, workload = plan.model, plan.layout, plan.workload
    assert not isinstance(model, WideResNet)
    _check(plan, place)
    dtype = torch.bfloat16 if plan.dtype == "bf16" else torch.float32
    stage = local.localized(
        model,
        layout.stage_layers(model.layers)[place.pipeline_rank],
        place,
        routing=plan.recipe.routing,
        dtype=dtype,
        device=device,
        seed=seed,
    )
    prompt_at = torch.arange(workload.seq_len, device=device)
    now = Now(prompt_at, workload.seq_len + new_tokens)
    groups, rows = layout.num_microbatches, place.layout.microbatch_size
    room = (groups, rows, _length(now.length, shortest), _kv_heads(model, place.layout.tp))
    caches = [_cached(layer, now, room, dtype, device) for layer in stage.layers.values()]
    if plan.lowering == "compiled":
        torch_private.allow_graphs(64)  # one for each length of the cache
        for layer in stage.layers.values():
            layer.compile(fullgraph=apply.is_one_graph(layer, place.layout), dynamic=False)
    total = layout.microbatch_rows
    routes = functools.partial(_routes, place, layout, device)
    is_known = model.experts is None or (plan.dtype == "bf16" and place.layout.ep == 1)
    return Decoding(
        stage=stage,
        choose=Choice(place, model.vocab),
        now=now,
        prompts=routes((total, workload.seq_len, model.hidden)),
        tokens=routes((total, 1, model.hidden)),
        chosen=routes((total,), around=True),
        layout=layout,
        prompt_at=prompt_at,
        token_at=torch.zeros_like(prompt_at[:1]),
        new_tokens=new_tokens,
        shortest=shortest,
        dtype=dtype,
        device=device,
        caches=caches,
        is_static=device.type == "cuda" and is_known,
    )


def _check(plan: Plan, place: MeshPlace) -> None:
    """Refuse dtypes that decoding does not support, and illegal layouts."""
    if plan.dtype not in ("fp32", "bf16"):
        raise ValueError(
            f"dtype = {plan.dtype!r}: decoding runs in fp32 or bf16; plan for one of them"
        )
    placement.check(plan.model, plan.workload, place.layout)


def _cached(
    layer: Module, now: Now, room: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> Cache:
    """Give a layer a cache of ``room`` [groups, rows, tokens, heads] to attend with."""
    assert isinstance(layer, GPTLayer | DecoderLayer)
    attention: Any = layer.attention
    if isinstance(attention, LatentAttention):
        mla = attention.mla
        widths = mla.nope_head_dim + mla.rope_head_dim, mla.v_head_dim
    else:
        widths = attention.head_dim, attention.head_dim
    k, v = (torch.zeros(*room, width, dtype=dtype, device=device) for width in widths)
    window = getattr(attention, "window", None)
    cache = Cache(now, k, v, local.attend_one(device), window)
    attention.heads = cache
    return cache


def _length(tokens: int, shortest: int) -> int:
    """Round up the length of cache to read. Few lengths are used, since each is its own graph."""
    return shortest << max(0, math.ceil(math.log2(tokens / shortest)))


def _kv_heads(model: Model | Decoder, tp: int) -> int:
    """Return the number of key heads that one rank keeps."""
    if isinstance(model, Decoder) and model.mla is None:
        return max(1, model.kv_heads // tp)
    return model.heads // tp


def _routes(
    place: MeshPlace,
    layout: Layout,
    device: torch.device,
    shape: tuple[int, ...],
    *,
    around: bool = False,
) -> Routes:
    """Route tensors of this shape from every stage to the next, or ``around`` from the last to
    the first. All ranks make routes in the same order: see ``p2p.connected``."""
    out = back = None
    for number, link in sorted(place.links.items()):
        if (number < 0) != around:
            continue
        ends = [number % layout.pp, number + 1]
        source, target = (activations(layout, rank, shape) for rank in ends)
        route = p2p.connected(source, target, link.forward, device)
        if place.pipeline_rank == ends[0]:
            out = route
        else:
            back = route
    mine = activations(layout, place.pipeline_rank, shape)
    here = next(piece for piece in mine if piece.rank == dist.get_rank())
    return Routes(out, back, here.box.shape)


@torch.no_grad()
def generate(
    decoding: Decoding, prompts: Tensor, mark: Callable[[], Any], wait: Callable[[Any], None]
) -> Generated:
    """Decode ``prompts`` [groups, rows, prompt_len].

    ``wait(mark)`` keeps the host at most one token ahead.
    """
    stage, groups = decoding.stage, decoding.layout.num_microbatches
    sending: list[p2p.Sending | None] = [None] * groups
    latest: list[Tensor] = list(prompts)
    chosen: list[list[Tensor]] = [[] for _ in range(groups)]
    marks = [mark()]
    for index in range(decoding.new_tokens):
        _turn_to(decoding, index)
        for group in range(groups):
            x = _receive(decoding, index, latest[group])
            previous = sending[group]
            if previous is not None:  # it was received: the input depends on it
                previous.wait()
            y = _step(decoding, x, group, index)
            sending[group] = _send(decoding, index, y)
            if stage.last:
                chosen[group].append(y.clone())
                latest[group] = y[:, None]
        marks.append(mark())
        if index:
            wait(marks[-2])
    for message in sending:
        if message is not None:
            message.wait()
    tokens = [torch.stack(of_group, -1) for of_group in chosen if of_group]
    return Generated(torch.stack(tokens) if tokens else None, marks)


def _turn_to(decoding: Decoding, index: int) -> None:
    """Set the stage's positions to the tokens before new token ``index``."""
    now, at = decoding.now, len(decoding.prompt_at) + index - 1
    decoding.token_at.fill_(at)
    if index < 2:
        now.at = decoding.token_at if index else decoding.prompt_at
        decoding.stage.at(now.at)
    now.fresh = index == 0
    now.length = _length(at + 1, decoding.shortest)


def _receive(decoding: Decoding, index: int, latest: Tensor) -> Tensor:
    """Return the stage's input: a prompt, the token chosen last, or the stage before's result."""
    if decoding.stage.first and (index == 0 or decoding.chosen.back is None):
        return latest
    routes = decoding.tokens if index else decoding.prompts
    dtype = decoding.dtype
    if decoding.stage.first:
        routes, dtype = decoding.chosen, torch.int64
    assert routes.back is not None
    x = p2p.receive(routes.back, routes.shape, dtype, decoding.device).wait()
    return x[:, None] if decoding.stage.first else x


def _send(decoding: Decoding, index: int, y: Tensor) -> p2p.Sending | None:
    """Start sending to the next stage, or the chosen tokens to the first."""
    routes = decoding.tokens if index else decoding.prompts
    if decoding.stage.last:
        routes = decoding.chosen
        if index == decoding.new_tokens - 1:
            return None
    return None if routes.out is None else p2p.send(routes.out, y)


def _step(decoding: Decoding, x: Tensor, group: int, index: int) -> Tensor:
    """Return the stage's result for a group; it stays until the group's next turn."""
    key = group, decoding.now.length
    found = decoding.graphs.get(key) if index else None
    if found is None:
        for cache in decoding.caches:
            cache.turn_to(group)
        if not index or not decoding.is_static:
            return _forward(decoding, x)
        # eager runs before the capture write the same cache entries that the graph writes again
        work = functools.partial(_forward, decoding, x.clone())
        graph, y = timing.captured(work, work, times=2)
        found = decoding.graphs[key] = CapturedStep(graph, work.args[1], y)
    found.x.copy_(x)
    found.graph.replay()
    return found.y


def _forward(decoding: Decoding, x: Tensor) -> Tensor:
    """Turn tokens or activations [rows, s] into activations, or the chosen tokens [rows]."""
    stage = decoding.stage
    if stage.first:
        x = stage.begin(x)
    for layer in stage.layers.values():
        x = layer(x)
    return decoding.choose(stage.end(x[:, -1:])[:, 0]) if stage.last else x
