"""Price the placements that ``intra_op`` may choose in a stage, and make layouts of what it chose.

The parts of a model meet only in the residual stream. So what a part costs depends on its own word
in ``Cuts`` and on the stream's, and a stage is a sum over its parts: of seconds, of bytes saved, of
parameters with their copies (``layer.LayerWork``) and of messages (``traffic``). A part's cost is
what a layer with this word has more than one with the default word. The executor places a part
alike in all layers of a rank: so a part is one node for all of them, on an edge to the stream.

Windows (``windows_of``) are FSDP2's: units and what their work hides. In a window with work c, of
which q passes between tp ranks, and data-parallel messages m, both are slowed (``Beside``):

    max(c + a m, m + b (c - q) + d q) = c + a m + max(0, (1 - a) m - (1 - b) (c - q) - (1 - d) q)

with a, b and d as of ``slows``. FSDP2's own copies hide nothing here. These are no sums, and
``find`` prices what was found in full:

- which work of a window the messages pass beside; here all of them pass where they slow the least;
- the most that a backward adds is that of a layer of which one part alone has another word;
- a sum over tp at the end of a step is one message. Here each layer's has a latency of its own;
- the slowest rank sets a pipeline's pace. Here each rank gets its own least time.
"""

import math
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple, get_args, get_type_hints

import msgspec
import numpy as np

from meshwise.models import placement
from meshwise.models.optimizer import WHOLE_STATES
from meshwise.models.placement import is_tied
from meshwise.prices import Prices
from meshwise.search.bound import again_of, layers_of, moments, stages_of
from meshwise.search.charges import MESSAGES, NO_HOOKS, beside_of, hooks_of
from meshwise.search.intra_op import SECONDS, TRANSIENT, Array, CostGraph, Placements, solve
from meshwise.search.layer import NOTHING, cut_of, layer_work, slower_by
from meshwise.search.predict import memory_of, predict
from meshwise.search.simulate import ROLES, Spent
from meshwise.search.space import unchecked
from meshwise.search.stage import Layer, StageKind, stage_cost, views
from meshwise.search.traffic import sent
from meshwise.spec import AnyModel, Candidate, Cuts, Layout, WideResNet, Workload
from meshwise.spec.layout import Way, rank_of

# the usual word first: it is taken if others cost the same
WORDS = {field: get_args(hint) for field, hint in get_type_hints(Cuts).items()}
_ROUNDS = 4  # of choosing cuts
_Words = dict[str, str]  # of a part, or of both ends


def with_cuts(layout: Layout, cuts: Cuts) -> Layout:
    """Return the layout with other cuts. Sequence parallelism alone is written as such."""
    usual = cuts == Cuts(stream="seq")
    return unchecked(layout, sequence_parallel=usual, cuts=Cuts() if usual else cuts)


def fastest(
    model: AnyModel, workload: Workload, layout: Layout, prices: Prices, limit_bytes: float
) -> Candidate | None:
    """Return ``layout`` with the fastest cuts that are found and fit, priced in full, or None. The
    bytes that cuts are chosen by are not exact: from what they are off for one choice follows the
    limit for the next. Images are cut by channel alone."""
    if isinstance(model, WideResNet) or not (tables := tables_of(model, workload, layout, prices)):
        return None
    found, seen, off = list[Candidate](), set[Layout](), 0.0
    for _ in range(_ROUNDS):
        each, size = placed(layout, tables, limit_bytes - off)
        if each is None or each in seen:
            break
        seen.add(each)
        peak = memory_of(model, workload, each, prices)[1].total_bytes
        if peak <= limit_bytes:
            found.append(Candidate(layout=each, prediction=predict(model, workload, each, prices)))
        if size <= peak <= limit_bytes:
            break
        off = peak - size
    return min(found, key=lambda each: each.prediction.step_time_s, default=None)


def tables_of(
    model: AnyModel, workload: Workload, layout: Layout, prices: Prices
) -> dict[int, "PartTable"]:
    """Return the table of each pipeline rank that has tp."""
    about = (model, workload.seq_len, layout, prices)
    ranks = [rank for rank in range(layout.pp) if layout.of_rank(rank).tp > 1]
    return {rank: PartTable(*about, rank) for rank in ranks}


def placed(
    layout: Layout, tables: Mapping[int, "PartTable"], limit_bytes: float
) -> tuple[Layout | None, float]:
    """Return ``layout`` with the best cuts of each pipeline rank, and the fullest's bytes. None if
    one does not fit."""
    found, most = dict[int, Cuts](), 0.0
    for rank, table in tables.items():
        cuts, size = table.best(limit_bytes)
        if cuts is None:
            return None, size
        found[rank], most = cuts, max(most, size)
    return _laid_out(layout, found), most


def _laid_out(layout: Layout, of_ranks: dict[int, Cuts]) -> Layout:
    """Return the layout with these cuts on its ranks. The most usual ones are the layout's."""
    usual = Counter(of_ranks.values()).most_common(1)[0][0]
    ways = list[Way]()
    for stage, way in enumerate(layout.ways or (Way(),) * layout.num_stages):
        own = of_ranks.get(rank_of(layout.schedule, stage, layout.pp), usual)
        ways.append(msgspec.structs.replace(way, cuts=own if own != usual else None))
    given = tuple(ways) if any(way.given for way in ways) else ()
    return msgspec.structs.replace(with_cuts(layout, usual), ways=given)


class UnitCost(NamedTuple):
    """The cost of a unit: of a layer, or of the embedding and the head. Seconds of a microbatch's
    forward and backward, seconds of messages that each hides, of its gather and its reduction, and
    of what a step has once."""

    forward_s: float = 0.0
    backward_s: float = 0.0
    forward_hides_s: float = 0.0
    backward_hides_s: float = 0.0
    gather_s: float = 0.0
    reduce_s: float = 0.0
    once_s: float = 0.0
    num_bytes: float = 0.0
    transient: float = 0.0


_Units = tuple[Layer | None, ...]  # None: the embedding and the head


class Window(NamedTuple):
    """The units whose forwards and backwards hide messages, and those whose gathers and reductions
    they hide. Without the former, nothing hides the latter."""

    forward: _Units = ()
    backward: _Units = ()
    gathers: _Units = ()
    reduces: _Units = ()


def windows_of(layers: _Units, last: bool, zero: int, count: int) -> Counter[Window]:
    """Return the windows of a stage in a step of ``count`` microbatches, and how often each comes:

    - forward: layer u hides the gather of u + 1; with ZeRO-1 and 2, that of the first microbatch;
    - backward with ZeRO-3: u hides the gather of u - 1 and the reduction of u + 1; the head hides
      the last layer's gather;
    - backward with less: nothing waits for a reduction but the optimizer. All microbatches after
      the first hide those of the one before, the last backward its own;
    - exposed: the gathers of the first layer and of the root, and both reductions."""
    found, gathered = Counter[Window](), count if zero == 3 else min(zero, 1)
    found[Window(gathers=(None, layers[0]))] = gathered
    for layer, after in pairwise(layers):
        found[Window(forward=(layer,), gathers=(after,))] += gathered
    if zero == 3:
        found[Window(backward=(None,) * last, gathers=layers[-1:])] = count
        for u, layer in enumerate(layers):
            beside = layers[u - 1 : u] if u else (), layers[u + 1 : u + 2]
            found[Window((), (layer,), *beside)] += count
    else:
        found[Window(backward=layers[:-1], reduces=layers[1:])] = 1
        every = (*layers, None)
        found[Window(every, every, reduces=every)] = (count - 1) * (zero == 2)
    found[Window(reduces=(layers[0], None))] = count if zero == 3 else 1
    return found


class PartTable:
    """The costs of the parts of one pipeline rank's stages."""

    def __init__(
        self, model: AnyModel, seq_len: int, layout: Layout, prices: Prices, rank: int = 0
    ) -> None:
        self.model, self.about, self.prices = model, (model, seq_len), prices
        seen, turns, self.count = views(layout), layout.stages_per_rank, layout.num_microbatches
        every = stages_of(*self.about, layout.num_stages, layout.layers)
        stages = [s for s, _ in enumerate(every) if rank_of(layout.schedule, s, layout.pp) == rank]
        self.ends = [every[stage] for stage in stages]
        self.inside = unchecked(seen[stages[0]], recompute=NOTHING, recompute_layers=None)
        self.layers, self.windows = Counter[Layer](), Counter[Window]()
        for stage, end in zip(stages, self.ends, strict=True):
            layers = layers_of(end.kinds, again_of(seen[stage]))
            self.layers.update(layers)
            if self.inside.data_ranks > 1:
                self.windows += windows_of(layers, end.last, self.inside.zero, self.count)
        each = [*moments(layout, rank), (0, turns)]  # in the end all gradients are there
        alive, reduced = max(each, key=self._needs)
        self.reduced, self.in_flight = reduced / turns, alive / turns
        self.hooks = hooks_of(self.inside, prices)
        # a tied embedding at both ends of a pipeline stays as it is: both hold one weight
        self.keeps_ends = layout.pp > 1 and is_tied(model)

    def best(self, limit_bytes: float) -> tuple[Cuts | None, float]:
        """Return the best cuts with which this rank needs up to so many bytes, and what it needs;
        None if there are none."""
        overhead = self.prices.costs.memory_overhead_bytes
        for _, size, (stream, *others) in self.found:
            if size + overhead <= limit_bytes:
                words = _Words()
                for part, at in zip(self.parts, others, strict=True):
                    words |= part[at]
                return _cuts(self.streams[stream], words), size + overhead
        return None, math.inf

    @cached_property
    def found(self) -> list[Placements]:
        """The best placements for every limit of bytes."""
        return solve(self.graph) if self.streams else []

    @cached_property
    def streams(self) -> list[str]:
        """The legal words of the stream."""
        return [word for word in WORDS["stream"] if self.is_legal(_cuts(word))]

    @cached_property
    def parts(self) -> list[list[_Words]]:
        """The words of each part that the rank has; a tied embedding and head are one part."""
        forms = {kind.form for kind, _ in self.layers}
        first, last = (any(getattr(end, at) for end in self.ends) for at in ("first", "last"))
        own, tied = not self.keeps_ends, is_tied(self.model)
        has = {
            "attention": True, "feed_forward": "dense" in forms, "experts": "experts" in forms,
            "embed": first and own, "head": last and own,
        }  # fmt: skip
        found = {
            part: [{part: word} for word in WORDS[part]] for part, is_here in has.items() if is_here
        }
        if tied and "embed" in found:
            heads = found.pop("head")
            found["embed"] = [embed | head for embed in found["embed"] for head in heads]
        return [*found.values()]

    def is_legal(self, cuts: Cuts) -> bool:
        return placement.obstacle(*self.about, with_cuts(self.inside, cuts)) is None

    @cached_property
    def graph(self) -> CostGraph:
        """The stream with all parts in their default words, and the parts: what each costs more in
        its other words is on its edge to the stream."""
        plain = np.asarray([self.total(_cuts(stream)) for stream in self.streams])
        nodes, edges = [plain], dict[tuple[int, int], Array]()
        for part in self.parts:
            more = np.zeros((len(plain), len(part), plain.shape[1]))
            more[..., SECONDS] = np.inf
            for at, to in np.ndindex(more.shape[:2]):
                cuts = _cuts(self.streams[at], part[to])
                with suppress(ValueError):  # was not measured
                    if self.is_legal(cuts):
                        more[at, to] = self.total(cuts) - plain[at]
                        more[at, to, TRANSIENT] += plain[at, TRANSIENT]
            edges[0, len(nodes)] = more
            nodes.append(np.zeros(more.shape[1:]))
        return CostGraph(nodes, edges)

    def total(self, cuts: Cuts) -> Array:
        """Return the cost of a step with these cuts: seconds, bytes, transient bytes, and the
        excess of each window."""
        units = self.units(cuts)
        times = [self.layers[unit] if unit else 1 for unit in units]
        of = UnitCost(*np.asarray(times) @ np.asarray([*units.values()]))
        seconds, excess = self.count * (of.forward_s + of.backward_s) + of.once_s, list[float]()

        def sums(field: str, among: _Units) -> float:
            return float(sum([getattr(units[unit], field) for unit in among]))

        for window, number in self.windows.items():
            sent_s = sums("gather_s", window.gathers) + sums("reduce_s", window.reduces)
            hides_s = sums("forward_hides_s", window.forward)
            hides_s += sums("backward_hides_s", window.backward)
            slows = self.slows[0] if window.forward or window.backward else 1.0
            seconds += number * slows * sent_s
            excess.append(number * ((1 - slows) * sent_s - hides_s))
        transient = max(unit.transient for unit in units.values())
        return np.asarray([seconds, of.num_bytes, transient, *excess])

    def units(self, cuts: Cuts) -> dict[Layer | None, UnitCost]:
        """Return what each unit costs with these cuts."""
        plain, found = _cuts(cuts.stream), dict[Layer | None, UnitCost]()
        for layer in self.layers:
            inner = "feed_forward" if layer[0].form == "dense" else "experts"
            here = _replaced(plain, cuts, "attention", inner)
            found[layer] = self.cost(here, layer, hooks=self.hooks)
        found[None] = UnitCost()
        for end in self.ends:
            if end.first or end.last:
                layer = end.kinds[0 if end.first else -1], NOTHING
                here = _replaced(plain, cuts, "embed", "head")
                whole, bare = self.cost(here, layer, end.first, end.last), self.cost(plain, layer)
                more = [a + b - c for a, b, c in zip(found[None], whole, bare, strict=True)]
                most = max(found[None].transient, whole.transient)
                found[None] = UnitCost(*more)._replace(transient=most)
        return found

    def cost(
        self,
        cuts: Cuts,
        layer: Layer,
        first: bool = False,
        last: bool = False,
        hooks: tuple[float, float] = NO_HOOKS,
    ) -> UnitCost:
        """Return the cost of one layer, with the embedding (``first``) and the head (``last``).
        Bytes are those of ``bound.memory_bytes``; what ZeRO-3 gathers for a layer is transient."""
        way, (kind, word) = with_cuts(self.inside, cuts), layer
        cut, shards = cut_of(way), way.shards
        work = layer_work(*self.about, cut, self.prices, layer, first, last)
        of = sent(*self.about, way, self.prices, kind, first, last)
        stage = StageKind(*self.about, (kind,), first, last, (word,), cut, False, hooked=False)
        actions = stage_cost(stage, self.prices).actions
        (forward, _), (backward, live) = actions["F"][0], actions["B"][0]
        ahead, back = slower_by(*self.about, cut, self.prices, kind, hooks)
        again_s = backward.parts.get("recompute layer", 0.0)
        forward_s = ahead * work.forward_s
        backward_s = back * work.backward_s + (ahead - back) * again_s
        gathered = work.copy_bytes if way.zero == 3 else 0.0
        kept = 1 + WHOLE_STATES[self.prices.costs.recipe.optimizer]
        state = work.parameter_bytes * (kept / shards + self.gradient * self.reduced)
        risen = live.rise.get(ROLES["activation"], 0.0) + gathered
        return UnitCost(
            forward_s=forward_s,
            backward_s=backward_s,
            forward_hides_s=forward_s * self.hides(forward),
            backward_hides_s=backward_s * self.hides(backward),
            gather_s=of.ahead_s,
            reduce_s=of.layer_s + of.root_s,
            once_s=(self.count - 1) * of.each.copies_s + of.once.copies_s + of.ending_s,
            num_bytes=state + work.copy_bytes - gathered + self.in_flight * work.saved_bytes,
            transient=risen if self.in_flight else 0.0,  # nothing runs at the end
        )

    def hides(self, spent: Spent) -> float:
        """Return the share of an action's work that is saved where it hides messages."""
        _, products, messages = self.slows
        share = sum([spent.parts.get(part, 0.0) for part in MESSAGES]) / spent.time_s
        return (1 - products) * (1 - share) + (1 - messages) * share

    @cached_property
    def slows(self) -> tuple[float, float, float]:
        """Return the seconds that data-parallel messages add to work beside them, for each of
        theirs; and those that work adds to messages, and messages between tp ranks."""
        if (beside := beside_of(self.inside, self.prices)) is None:
            return 1.0, 1.0, 1.0
        speed, sending = beside.fastest
        messages = min(1.0, 1 / beside.messages - 1)
        return min(messages, (1 - speed) / sending), min(1.0, (1 - sending) / speed), messages

    @property
    def gradient(self) -> float:
        """Bytes of gradients for each of the parameters."""
        inside = self.inside
        if inside.zero < 2 and inside.num_microbatches > 1:  # added up before they are reduced
            return self.prices.costs.recipe.widening
        return 1 / inside.shards

    def _needs(self, moment: tuple[int, int]) -> float:
        """Return the bytes of layers with the cuts given: saved, and gradients."""
        cut, needs = cut_of(self.inside), 0.0
        for layer, count in self.layers.items():
            of = layer_work(*self.about, cut, self.prices, layer)
            held, reduced = moment[0] * of.saved_bytes, moment[1] * of.parameter_bytes
            needs += count * (held + reduced * self.gradient)
        return needs


def _cuts(stream: str, words: _Words | None = None) -> Cuts:
    return msgspec.convert({"stream": stream, **(words or {})}, Cuts)


def _replaced(cuts: Cuts, by: Cuts, *fields: str) -> Cuts:
    return msgspec.structs.replace(cuts, **{field: getattr(by, field) for field in fields})
