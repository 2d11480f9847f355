"""Price the placements that ``intra_op`` may choose in a stage, and make layouts of what it chose.

The parts of a model meet only in the residual stream. So what a part costs depends on its own word
in ``Cuts`` and on the stream's, and a stage is a sum over its parts: of seconds, of bytes saved and
of parameters with their copies (``bound.LayerWork``). A part's cost is what a layer with this word
has more than one with the default word. The executor places a part alike in all layers of a rank:
so a part is one node for all of them, and the stream is the same at all boundaries. Three things
are no sums, and ``find`` prices what was found in full:

- data-parallel messages pass beside computation. They grow with the parameters here, from those of
  the layout given, and the search is made twice: as if none passed beside it, and as if all did;
- the most that a backward adds is that of a layer of which one part alone has another word;
- the slowest rank sets a pipeline's pace. Here each rank gets its own least time.
"""

import math
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from functools import cached_property
from typing import get_args, get_type_hints

import msgspec
import numpy as np

from meshwise.models import placement
from meshwise.models.optimizer import WHOLE_STATES
from meshwise.models.placement import is_tied
from meshwise.prices import Prices
from meshwise.search.bound import (
    NOTHING,
    again_of,
    cut_of,
    layer_work,
    layers_of,
    moments,
    stages_of,
)
from meshwise.search.intra_op import Array, Cost, GraphPiece, Question, solve
from meshwise.search.predict import memory_of, predict
from meshwise.search.simulate import ROLES
from meshwise.search.space import unchecked
from meshwise.search.stage import Layer, StageKind, stage_cost, views
from meshwise.search.traffic import sent
from meshwise.spec import AnyModel, Candidate, Cuts, LayerKind, Layout, WideResNet, Workload
from meshwise.spec.layout import Way, rank_of

# the usual word first: it is taken if others cost the same
WORDS = {field: get_args(hint) for field, hint in get_type_hints(Cuts).items()}
_ROUNDS = 4  # of choosing cuts
_SIZE = len(Cost._fields)
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
    found = dict[Layout, Candidate]()
    for exposed in (1.0, 0.0) if not isinstance(model, WideResNet) else ():
        tables, off, seen = tables_of(model, workload, layout, prices, exposed), 0.0, set[Layout]()
        for _ in range(_ROUNDS if tables else 0):
            each, size = placed(layout, tables, limit_bytes - off)
            if each is None or each in seen:
                break
            seen.add(each)
            peak = memory_of(model, workload, each, prices)[1].total_bytes
            if peak <= limit_bytes and each not in found:
                prediction = predict(model, workload, each, prices)
                found[each] = Candidate(layout=each, prediction=prediction)
            if size <= peak <= limit_bytes:
                break
            off = peak - size
    return min(found.values(), key=lambda each: each.prediction.step_time_s, default=None)


def tables_of(
    model: AnyModel, workload: Workload, layout: Layout, prices: Prices, exposed: float
) -> dict[int, "PartTable"]:
    """Return the table of each pipeline rank that has tp."""
    about = (model, workload.seq_len, layout, prices)
    ranks = [rank for rank in range(layout.pp) if layout.of_rank(rank).tp > 1]
    return {rank: PartTable(*about, rank, exposed) for rank in ranks}


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


class PartTable:
    """The costs of the parts of one pipeline rank's stages. ``exposed``: the share of data-parallel
    messages that pass beside no computation."""

    def __init__(
        self,
        model: AnyModel,
        seq_len: int,
        layout: Layout,
        prices: Prices,
        rank: int = 0,
        exposed: float = 0.0,
    ) -> None:
        self.model, self.about = model, (model, seq_len)
        self.prices, self.exposed = prices, exposed
        seen, turns, count = views(layout), layout.stages_per_rank, layout.num_microbatches
        every = stages_of(*self.about, layout.num_stages, layout.layers)
        stages = [s for s, _ in enumerate(every) if rank_of(layout.schedule, s, layout.pp) == rank]
        self.ends = [every[stage] for stage in stages]
        self.layers = Counter[Layer]()
        for stage, end in zip(stages, self.ends, strict=True):
            self.layers.update(layers_of(end.kinds, again_of(seen[stage])))
        self.inside = unchecked(seen[stages[0]], recompute=NOTHING, recompute_layers=None)
        each = [*moments(layout, rank), (0, turns)]  # in the end all gradients are there
        alive, reduced = max(each, key=self._needs)
        self.reduced = reduced / turns
        self.question = Question(count, alive / turns, np.inf)
        # a tied embedding at both ends of a pipeline stays as it is: both hold one weight
        self.keeps_ends = layout.pp > 1 and is_tied(model)

    def best(self, limit_bytes: float) -> tuple[Cuts | None, float]:
        """Return the best cuts with which this rank needs up to so many bytes, and what it needs;
        None if there are none."""
        overhead = self.prices.costs.memory_overhead_bytes
        question = self.question._replace(limit_bytes=limit_bytes - overhead)
        best = solve(self.pieces, question) if self.streams else None
        if best is None:
            return None, math.inf
        (stream, *others), words = best.placements, _Words()
        for part, at in zip(self.parts, others, strict=True):
            words |= part[at[1]]
        return _cuts(self.streams[stream[1]], words), best.num_bytes + overhead

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
    def pieces(self) -> list[GraphPiece]:
        """The stream with all parts in their default words; then for each part what it costs more
        in its other words (edge 0, 1). The stream is the same on both sides (edge 0, 2)."""
        count = len(self.streams)
        every, alike = np.zeros((count, _SIZE)), np.zeros((count, count, _SIZE))
        alike[~np.eye(count, dtype=bool), 0] = np.inf
        plain = np.asarray([self.total(_cuts(stream)) for stream in self.streams])
        found = [GraphPiece([every[:1], plain], {})]
        for part in self.parts:
            more = np.zeros((count, len(part), _SIZE))
            more[:, :, 0] = np.inf
            for at, to in np.ndindex(more.shape[:2]):
                cuts = _cuts(self.streams[at], part[to])
                with suppress(ValueError):  # was not measured
                    if self.is_legal(cuts):
                        more[at, to] = self.total(cuts) - plain[at]
                        more[at, to, -1] += plain[at, -1]
            nodes = [every, np.zeros((len(part), _SIZE)), every]
            found.append(GraphPiece(nodes, {(0, 1): more, (0, 2): alike}))
        return found

    def total(self, cuts: Cuts) -> Array:
        """Return the cost of all layers and both ends with these cuts."""
        plain, costs = _cuts(cuts.stream), list[Array]()
        for layer, count in self.layers.items():
            inner = "feed_forward" if layer[0].form == "dense" else "experts"
            here = _replaced(plain, cuts, "attention", inner)
            costs.append(self.cost(here, layer) * [*[count] * (_SIZE - 1), 1])
        for end in self.ends:
            if end.first or end.last:
                layer = end.kinds[0 if end.first else -1], NOTHING
                here = _replaced(plain, cuts, "embed", "head")
                more = self.cost(here, layer, end.first, end.last)
                more[:-1] -= self.cost(plain, layer)[:-1]
                costs.append(more)
        return np.asarray([*np.sum(costs, axis=0)[:-1], np.max(costs, axis=0)[-1]])

    def cost(self, cuts: Cuts, layer: Layer, first: bool = False, last: bool = False) -> Array:
        """Return the ``Cost`` of one layer, with the embedding (``first``) and the head (``last``).
        Bytes are those of ``bound.memory_bytes``; what ZeRO-3 gathers for a layer is transient."""
        inside, (kind, word) = self.inside, layer
        cut, shards = cut_of(with_cuts(inside, cuts)), inside.shards
        work = layer_work(*self.about, cut, self.prices, layer, first, last)
        stage = StageKind(*self.about, (kind,), first, last, (word,), cut, False, hooked=False)
        spent, size = stage_cost(stage, self.prices), work.parameter_bytes
        sent_s, copies_s = [rate * size for rate in self.rates[kind]]
        each, once = (sent_s, 0.0) if inside.zero >= 2 else (0.0, sent_s)
        gathered = work.copy_bytes if inside.zero == 3 else 0.0
        risen = spent.actions["B"][0][1].rise.get(ROLES["activation"], 0.0) + gathered
        kept = 1 + WHOLE_STATES[self.prices.costs.recipe.optimizer]
        return np.asarray(
            Cost(
                pace_s=work.both_s + copies_s + each,
                once_s=spent.optimizer.time_s / shards + once,  # with sums over tp
                resident=kept * size / shards + size * self.gradient * self.reduced
                + work.copy_bytes - gathered,
                held=work.saved_bytes,
                transient=risen if self.question.in_flight else 0.0,  # nothing runs at the end
            )
        )  # fmt: skip

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

    @cached_property
    def rates(self) -> dict[LayerKind, tuple[float, float]]:
        """Seconds for each byte of a layer's parameters: of the data-parallel messages that pass
        beside nothing, and of their copies."""
        found = dict[LayerKind, tuple[float, float]]()
        for kind, _ in self.layers:
            each, once, *_ = sent(*self.about, self.inside, self.prices, kind)
            of = layer_work(*self.about, cut_of(self.inside), self.prices, (kind, NOTHING))
            messages_s = (each if self.inside.zero >= 2 else once).messages_s * self.exposed
            found[kind] = messages_s / of.parameter_bytes, each.copies_s / of.parameter_bytes
        return found


def _cuts(stream: str, words: _Words | None = None) -> Cuts:
    return msgspec.convert({"stream": stream, **(words or {})}, Cuts)


def _replaced(cuts: Cuts, by: Cuts, *fields: str) -> Cuts:
    return msgspec.structs.replace(cuts, **{field: getattr(by, field) for field in fields})
