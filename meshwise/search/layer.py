"""Price one layer, the embedding and the head alone, for each way to cut them (tp, sequence
parallelism, microbatch size, recomputation). ``bound`` and others add these up.
"""

import math
from collections import Counter
from functools import lru_cache
from typing import NamedTuple

from meshwise.models import ENTRY
from meshwise.models.graph import num_bytes
from meshwise.prices import Prices
from meshwise.search.charges import MESSAGES, NO_HOOKS, corrections
from meshwise.search.simulate import (
    COPIES,
    ROLES,
    SLOWED,
    SUMS,
    TO_HOST,
    WAITING,
    WEIGHTS,
    Live,
    Spent,
)
from meshwise.search.space import unchecked
from meshwise.search.stage import (
    Layer,
    StageKind,
    blocks_in,
    graph_of,
    layers_ahead,
    pieces_of,
    priced,
    stage_cost,
    stage_memory,
)
from meshwise.spec import AnyModel, Cuts, LayerKind, Layout, WideResNet
from meshwise.spec.layout import Recompute

NOTHING: Recompute = "none"
_APART = (COPIES, SLOWED, SUMS, WAITING, TO_HOST)  # of data parallelism and offload


class LayerWork(NamedTuple):
    """The work of some layers on one microbatch: seconds (``messages_s`` of them in messages
    between tp ranks or to experts), bytes saved for the backward, bytes of parameters, and
    bytes of the copies that compute reads. ``idle_s``: the least that a stage waits for copies to
    and from the host if nothing slows its layers down."""

    forward_s: float = 0.0
    backward_s: float = 0.0
    messages_s: float = 0.0
    saved_bytes: float = 0.0
    parameter_bytes: float = 0.0
    copy_bytes: float = 0.0
    idle_s: float = 0.0

    @property
    def both_s(self) -> float:
        return self.forward_s + self.backward_s

    @property
    def whole_s(self) -> float:
        return self.both_s + self.idle_s

    def exceeds(self, other: "LayerWork") -> bool:
        return self.both_s > other.both_s or self.whole_s > other.whole_s

    def plus(self, other: "LayerWork", times: int = 1) -> "LayerWork":
        forward_s, backward_s, messages_s, saved, parameters, copies, idle_s = other
        return LayerWork(
            self.forward_s + times * forward_s,
            self.backward_s + times * backward_s,
            self.messages_s + times * messages_s,
            self.saved_bytes + times * saved,
            self.parameter_bytes + times * parameters,
            self.copy_bytes + times * copies,
            self.idle_s + times * idle_s,
        )


@lru_cache(maxsize=4096)
def _cut(
    tp: int, cp: int, sequence_parallel: bool, microbatch_size: int, ep: int, cuts: Cuts
) -> Layout:
    """Return the smallest layout with these cuts: one microbatch, and just enough dp ranks to share
    its sequences and to hold all experts."""
    return Layout(
        dp=ep // math.gcd(ep, cp),
        cp=cp,
        ep=ep,
        tp=tp,
        sequence_parallel=sequence_parallel,
        cuts=cuts,
        microbatch_size=microbatch_size,
    )


def cut_of(layout: Layout) -> Layout:
    """Keep the fields of a layout that a layer's work depends on."""
    shape = (layout.tp, layout.cp, layout.sequence_parallel, layout.microbatch_size, layout.ep)
    return _cut(*shape, layout.cuts)


def layer_work(
    model: AnyModel,
    seq_len: int,
    cut: Layout,
    prices: Prices,
    of: Layer,
    first: bool = False,
    last: bool = False,
) -> LayerWork:
    """Return the work of one layer, with the embedding (``first``) and the head (``last``)."""
    kind, word = of
    stage = StageKind(model, seq_len, (kind,), first, last, (word,), cut, False, hooked=False)
    return _work(stage, prices)


@lru_cache(maxsize=65536)
def added_bytes(model: AnyModel, seq_len: int, cut: Layout, prices: Prices, of: Layer) -> float:
    """Return the bytes that a layer behind other such layers saves: of compiled layers only the
    first one's input is saved whole."""
    kind, word = of
    one = StageKind(model, seq_len, (kind,), False, False, (word,), cut, False, hooked=False)
    counts = layers_ahead(prices), layers_ahead(prices) + 1
    each = [one._replace(layers=one.layers * n, recompute=one.recompute * n) for n in counts]
    less, more = (_left(stage_memory(some, prices).actions["F"][0][1]) for some in each)
    return more - less


def end_work(
    model: AnyModel,
    seq_len: int,
    cut: Layout,
    prices: Prices,
    kind: LayerKind,
    *,
    first: bool = False,
    last: bool = False,
) -> LayerWork:
    """Return the work of the embedding, the head, or both, next to a layer of this kind."""
    about, layer = (model, seq_len, cut, prices), (kind, NOTHING)
    return layer_work(*about, layer, first, last).plus(layer_work(*about, layer), -1)


@lru_cache(maxsize=65536)
def _work(kind: StageKind, prices: Prices) -> LayerWork:
    """Price a stage of one layer on one device or its tp group, without data parallelism. If its
    result is saved, the next layer counts it as its saved input. So it is subtracted here, twice:
    a stage alone counts it twice, as the input that it receives and as a copy."""
    cost = stage_cost(kind, prices)
    some_bytes(kind, prices)  # is asked for later, and known as long as ``cost`` is
    (forward, kept), (backward, _) = cost.actions["F"][0], cost.actions["B"][0]
    size, one = kind.layout.microbatch_size, unchecked(kind.layout, microbatch_size=1)
    whole = graph_of(kind._replace(layout=one), prices.costs)
    *_, result = (node.outputs[0] for node in whole.nodes if node.phase == "forward")
    is_kept = any(result in node.inputs for node in whole.nodes if node.phase != "forward")
    entry_s = [0.0, 0.0]  # a stage of images copies its input once, not once a layer
    if isinstance(kind.model, WideResNet):
        program, charge = priced(kind, prices)
        for at, (_, _, start, stop) in enumerate(program.actions):
            entry = [task for task in program.tasks[start:stop] if task.name.startswith(ENTRY[0])]
            entry_s[at] = sum(charge(task).time_s for task in entry)
    passed_on = 2 * size * num_bytes(whole.tensors[result], whole.sizes) if is_kept else 0

    def own_s(action: int, spent: Spent) -> float:
        return spent.time_s - sum(spent.parts.get(part, 0.0) for part in _APART) - entry_s[action]

    return LayerWork(
        forward_s=own_s(0, forward),
        backward_s=own_s(1, backward),
        messages_s=sum(
            spent.parts.get(part, 0.0) for spent in (forward, backward) for part in MESSAGES
        ),
        saved_bytes=_left(kept) - passed_on,
        parameter_bytes=cost.resident["parameters"],
        copy_bytes=kept.left.get(WEIGHTS, 0.0),
    )


def idle_s(
    model: AnyModel,
    seq_len: int,
    cut: Layout,
    prices: Prices,
    layers: tuple[Layer, ...],
    first: bool,
) -> float:
    """Return the least seconds in which a stage's layers wait for copies to and from the host:
    while a layer runs, forward or backward, the tensors of the layer before it move. ``first``:
    whether the stage has the embedding."""
    about, total_s = (model, seq_len, cut, prices), 0.0
    aheads = [None, *[kind for kind, _ in layers]]
    triples = Counter(zip(aheads, layers, layers[1:], strict=False))
    for (ahead, moving, running), times in triples.items():
        copies_s = _copies_s(*about, moving, ahead, first and ahead is None)
        work = layer_work(*about, running)
        for run_s, copy_s in zip((work.forward_s, work.backward_s), copies_s, strict=True):
            total_s += times * max(0.0, copy_s - run_s)
    return total_s


@lru_cache(maxsize=65536)
def _copies_s(
    model: AnyModel,
    seq_len: int,
    cut: Layout,
    prices: Prices,
    of: Layer,
    ahead: LayerKind | None,
    first: bool,
) -> tuple[float, float]:
    """Return the seconds in which a layer's tensors move to the host, and back. ``ahead``: the
    layer that makes what it reads; None: the embedding (``first``), or another stage, and then it
    stays."""
    kinds = (*([ahead] if ahead else []), of[0], of[0])
    words = (of[1],) * len(kinds)
    stage = StageKind(model, seq_len, kinds, first, False, words, cut, False, hooked=False)
    program, charge = priced(stage, prices)
    names = [f"layers.{len(kinds) - 2}.{way}" for way in ("d2h", "h2d")]
    to_host_s, back_s = (
        sum(charge(task).time_s for task in program.tasks if task.name == name) for name in names
    )
    return to_host_s, back_s


@lru_cache(maxsize=65536)
def some_bytes(kind: StageKind, prices: Prices) -> tuple[float, ...]:
    """Return the bytes of a stage of a layer or two: parameters, held per microbatch, the most that
    an action adds, and the least that a backward adds."""
    cost = stage_memory(kind, prices)
    live = {action: of[0][1] for action, of in cost.actions.items()}
    copies = live["F"].left.get(WEIGHTS, 0.0)
    left = {action: _left(of) for action, of in live.items()}
    held = left["F"] + max(0.0, left.get("I", 0.0))  # I leaves what W needs
    rises = [sum(of.rise.values()) - held * (action == "F") for action, of in live.items()]
    least = live["I" if kind.split else "B"].rise.get(ROLES["activation"], 0.0)
    return cost.resident["parameters"], held, max(rises) - copies, max(0.0, least)


def _left(live: Live) -> float:
    """Return the bytes that an action leaves, without gathered weights."""
    return sum(live.left.values()) - live.left.get(WEIGHTS, 0.0)


@lru_cache(maxsize=4096)
def slower_by(
    model: AnyModel,
    seq_len: int,
    cut: Layout,
    prices: Prices,
    kind: LayerKind,
    hooks: tuple[float, float],
) -> tuple[float, float]:
    """Return what FSDP2's calls on the host multiply a layer's forward by, and its backward
    (``charges.hooks_of``)."""
    stage = StageKind(model, seq_len, (kind,), False, False, (NOTHING,), cut, False, hooked=False)
    blocks, pieces = blocks_in(stage, prices.costs), pieces_of(stage)
    plain, hooked = (corrections(blocks, pieces, prices, of).factors for of in (NO_HOOKS, hooks))
    ratios = {key[1]: hooked[key][0] / plain[key][0] for key in blocks if key[0][0] == "layer"}
    return ratios.get("forward", 1.0), ratios.get("backward", 1.0)
