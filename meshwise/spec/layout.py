"""Layouts: the degree of every mesh axis, and how model and batch are cut.

Ranks are numbered with tp innermost, then cp, then the shards of a dp group, its replicas, and the
pipeline outermost: every pipeline rank is a range of neighbouring ranks. ``Layout.of_rank`` is the
view with pp=1; data and tensor parallelism within a pipeline rank need nothing else.
"""

from collections.abc import Iterable
from itertools import accumulate, groupby, pairwise
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from meshwise.spec.record import Count, Length, Record

Recompute = Literal["none", "selective", "full"]
TpSums = Literal["first", "last", "together"]
ScheduleName = Literal[
    "none",
    "gpipe",
    "1f1b",
    "interleaved_1f1b",
    "looped_bfs",
    "interleaved_zero_bubble",
    "zbv",
    "dualpipev",
]


V_SHAPED: frozenset[ScheduleName] = frozenset({"zbv", "dualpipev"})
# Each backward runs in two parts: first the input's gradient, later the weights' gradients.
SPLIT: frozenset[ScheduleName] = V_SHAPED | {"interleaved_zero_bubble"}


class Cuts(Record, kw_only=True):
    """The dim of each part of a model that the tp ranks divide.

    Cut by ``heads``, ``ffn`` or ``vocab``, each rank holds a part of the weights. Cut by ``seq`` or
    ``batch``, it holds a part of the tokens and all weights, whose gradients are summed. ``whole``:
    every rank computes everything. ``stream``: the activations between layers, with their norms;
    ``seq`` is sequence parallelism there. ``attention`` covers q, k, v to the output projection.
    ``experts`` covers the router to the sum of the chosen experts, shared experts included.

    ``experts`` cut by ``experts``: tp ranks hold different whole experts, tp inside ep, so
    ep * tp ranks exchange rows (Megatron's etp = 1). This is not a larger ``ep``: gradients are a
    mean over the ranks that ep divides, and a sum over tp's. Tokens are placed as in the stream, so
    nothing is gathered. With a whole stream, ranks have no tokens of their own: it is refused.
    """

    stream: Literal["whole", "seq", "batch"] = "whole"
    embed: Literal["vocab", "whole", "seq", "batch"] = "vocab"
    attention: Literal["heads", "whole", "batch"] = "heads"
    feed_forward: Literal["ffn", "whole", "seq", "batch"] = "ffn"
    experts: Literal["ffn", "whole", "seq", "batch", "experts"] = "ffn"
    head: Literal["vocab", "whole", "seq", "batch"] = "vocab"

    def of(self, part: str) -> str:
        """Return the dim that a part divides. For ``experts`` cut by ``experts`` it is the
        stream's."""
        word: str = getattr(self, part)
        return self.stream if word == "experts" else word

    def expert_ranks(self, ep: int, tp: int) -> int:
        """Return the number of ranks that hold different experts and exchange rows."""
        return ep * tp if self.experts == "experts" else ep

    @property
    def name(self) -> str:
        """The cuts that differ from the default: ``attention:batch,head:whole``."""
        fields = self.__struct_fields__
        return ",".join(
            f"{of}:{getattr(self, of)}" for of in fields if getattr(self, of) != getattr(_CUTS, of)
        )


_CUTS = Cuts()


def _in_words(each: Iterable[int | str], between: str = ",") -> str:
    """Return ``7,8x14,7``, or ``(1x4)x6,2x4``: four or more equal in a row are written once."""
    found = list[str]()
    for one, run in groupby(map(str, each)):
        times = len(list(run))
        short = f"{one}x{times}" if one.isdigit() else f"({one})x{times}"
        found += [short] if times > 3 else [one] * times
    return between.join(found)


def _again(word: str, layers: int | None) -> str:
    """Return ``full:3``: what backward computes again, and in how many layers if not in all."""
    return f"{word}:{layers}" if layers else word


class Way(Record, kw_only=True):
    """One stage's own settings. None: the layout's."""

    zero: Annotated[int, Meta(ge=0, le=3)] | None = None
    replicas: Count | None = None
    ep: Count | None = None
    cuts: Cuts | None = None
    recompute: Recompute | None = None
    recompute_layers: Count | None = None

    @property
    def given(self) -> dict[str, Any]:
        fields = {field: getattr(self, field) for field in self.__struct_fields__}
        return {field: value for field, value in fields.items() if value is not None}

    @property
    def name(self) -> str:
        given = self.given
        words = [f"{field}{given[field]}" for field in ("zero", "replicas", "ep") if field in given]
        words += [self.cuts.name or "plain"] if self.cuts else []
        if self.recompute or self.recompute_layers:
            words.append(_again(self.recompute or "", self.recompute_layers))
        return "+".join(words) or "same"


def rank_of(schedule: ScheduleName, stage: int, pp: int) -> int:
    """Return the pipeline rank of a stage. Stages go round and round over the ranks, or down and up
    again in a V."""
    turn, place = divmod(stage, pp)
    return pp - 1 - place if schedule in V_SHAPED and turn % 2 else place


class Workload(Record, kw_only=True):
    """One training step: ``global_batch_size`` sequences of ``seq_len`` tokens."""

    global_batch_size: Count
    seq_len: Length

    @property
    def tokens(self) -> int:
        return self.global_batch_size * self.seq_len


class Layout(Record, kw_only=True):
    """Degrees of the mesh axes and the cut of the batch.

    ``cp``: ranks that share each sequence. The dp * cp data ranks hold copies of the model, or
    shards of one. ``zero``: 0 replicates the model over them, 1 shards optimizer state, 2 also
    gradients, 3 also parameters. ``replicas``: groups of ranks that repeat the shards (HSDP).
    ``ep``: data ranks over which the experts are divided; it divides dp * cp / replicas.
    ``cuts``: the dim of each part of the model that tp divides. ``sequence_parallel``: short for a
    stream cut by ``seq``. ``tp_sums``: when gradients of weights that all tp ranks hold are summed
    over tp: first (before the sum over the data ranks), last (after it, once a step), or together
    with it (in one all-reduce a step; needs ``zero`` 0). ``schedule``: the pipeline's, see
    ``meshwise.schedule``. ``stages_per_rank``: stages on each pipeline rank. ``recompute``: what
    backward recomputes: nothing, norms and activation functions (selective) or whole layers (full),
    in the first ``recompute_layers`` layers of each stage, by default in all. The batch of a step
    is ``dp * microbatch_size * num_microbatches``.

    Pipelines may be uneven. ``layers``: number of layers of each stage. ``meshes``: (dp, tp) of
    each pipeline rank; ``dp`` and ``tp`` are then 1, and ``microbatch_size`` counts the whole
    pipeline. ``ways``: settings of each stage; stages of one rank may differ in recomputation only.
    """

    dp: Count = 1
    cp: Count = 1
    tp: Count = 1
    pp: Count = 1
    ep: Count = 1
    zero: Annotated[int, Meta(ge=0, le=3)] = 0
    replicas: Count = 1
    sequence_parallel: bool = False
    cuts: Cuts = _CUTS
    tp_sums: TpSums = "last"
    microbatch_size: Count = 1
    num_microbatches: Count = 1
    schedule: ScheduleName = "none"
    stages_per_rank: Count = 1
    recompute: Recompute = "none"
    recompute_layers: Count | None = None
    layers: tuple[Count, ...] = ()
    meshes: tuple[tuple[Count, Count], ...] = ()
    ways: tuple[Way, ...] = ()

    def check(self) -> None:
        widest_dp, widest_tp = map(max, zip(*self.meshes or ((self.dp, self.tp),), strict=True))
        if self.zero and widest_dp * self.cp == 1:
            self.fail("zero", "shards over dp and cp, which are 1; use zero = 0")
        if self.sequence_parallel and widest_tp == 1:
            self.fail("sequence_parallel", "shards over tp, which is 1; set it to false")
        if self.sequence_parallel and self.cuts.stream != "whole":
            self.fail("cuts", "the stream is cut by seq already; leave out sequence_parallel")
        if widest_tp == 1 and self.cuts != _CUTS:
            self.fail("cuts", "tp divides nothing where it is 1; leave them out")
        if widest_tp == 1 and self.tp_sums != "last":
            self.fail("tp_sums", "tp is 1 and repeats no weight; leave it out")
        if self.tp_sums == "together" and (self.zero or widest_dp * self.cp == 1):
            self.fail("tp_sums", "together needs zero = 0 and dp or cp > 1; leave it out")
        if self.dp % self.replicas or (self.replicas > 1 and self.replicas == self.data_ranks):
            self.fail("replicas", f"must divide dp = {self.dp} and leave shards")
        if self.replicas > 1 and not self.zero:
            self.fail("replicas", "repeat shards, and zero = 0 has none; use zero = 1 to 3")
        if (self.pp == 1) != (self.schedule == "none"):
            fit = "1f1b" if self.pp > 1 else "none"
            self.fail("schedule", f"does not go with pp = {self.pp}; for example {fit} does")
        if self.pp == 1 and self.stages_per_rank > 1:
            self.fail("stages_per_rank", "must be 1 without a pipeline")
        if self.recompute_layers and self.recompute == "none":
            self.fail("recompute_layers", "recompute is none; use selective or full")
        if self.layers or self.ways or self.meshes:
            self._check_uneven()
        for dp, _ in self.meshes or ((self.dp, self.tp),):
            copies = dp * self.cp // self.replicas
            if copies % self.ep:
                self.fail("ep", f"must divide the {copies} ranks over which a stage's copy lies")

    def _check_uneven(self) -> None:
        if self.layers and len(self.layers) != self.num_stages:
            self.fail("layers", f"must be one number for each of {self.num_stages} stages")
        if self.ways and len(self.ways) != self.num_stages:
            self.fail("ways", f"must be one for each of {self.num_stages} stages")
        shared: dict[int, Layout] = {}
        for stage, way in enumerate(self.ways):
            if way.zero and self.tp_sums == "together":
                self.fail("ways", f"stage {stage} has shards; tp_sums together needs zero = 0")
            rank, inside = rank_of(self.schedule, stage, self.pp), self.of_stage(stage)
            if (way.zero or way.replicas) and not inside.zero:
                self.fail("ways", f"stage {stage} has no shards: zero is 0, or dp and cp are 1")
            if way.cuts not in (None, inside.cuts):
                self.fail("ways", f"stage {stage} has cuts, and tp divides nothing where it is 1")
            inside = msgspec.structs.replace(inside, recompute="none", recompute_layers=None)
            if shared.setdefault(rank, inside) != inside:
                self.fail("ways", f"stage {stage} shares its ranks with another; give both one way")
        if not self.meshes:
            return
        if len(self.meshes) != self.pp or self.dp * self.tp * self.cp > 1:
            self.fail("meshes", f"must be (dp, tp) for each of pp = {self.pp}; dp, cp, tp 1")
        if any(self.microbatch_size % dp for dp, _ in self.meshes):
            self.fail("meshes", f"every dp must divide microbatch_size = {self.microbatch_size}")

    @property
    def num_stages(self) -> int:
        return self.pp * self.stages_per_rank

    @property
    def num_devices(self) -> int:
        return sum(dp * tp for dp, tp in self.meshes) or self.data_ranks * self.tp * self.pp

    @property
    def data_ranks(self) -> int:
        """Number of ranks that see different tokens, for one tp rank: dp * cp."""
        return self.dp * self.cp

    @property
    def shards(self) -> int:
        """Number of ranks that one copy of the state is cut over."""
        return self.data_ranks // self.replicas if self.zero else 1

    @property
    def placed(self) -> Cuts:
        """``cuts``, with the stream cut by ``seq`` if ``sequence_parallel``."""
        if not self.sequence_parallel:
            return self.cuts
        return msgspec.structs.replace(self.cuts, stream="seq")

    @property
    def expert_ranks(self) -> int:
        return self.cuts.expert_ranks(self.ep, self.tp)

    @property
    def microbatch_rows(self) -> int:
        """Sequences in one microbatch over all dp ranks."""
        return self.dp * self.microbatch_size

    @property
    def batch_size(self) -> int:
        """Sequences in one step."""
        return self.microbatch_rows * self.num_microbatches

    def of_rank(self, pipeline_rank: int) -> "Layout":
        """Return the layout within one pipeline rank: no pipeline, its own degrees, and the
        recomputation of its first stage."""
        return self.of_stage(pipeline_rank)

    def of_stage(self, stage: int) -> "Layout":
        """Return the layout within a stage's pipeline rank, with the stage's own settings."""
        rank = rank_of(self.schedule, stage, self.pp)
        dp, tp = self.meshes[rank] if self.meshes else (self.dp, self.tp)
        own = self.ways[stage].given if self.ways else {}
        sharded = own.get("zero", self.zero) if dp * self.cp > 1 else 0
        placed = own.get("cuts", self.cuts) if tp > 1 else _CUTS
        return msgspec.structs.replace(
            self,
            dp=dp,
            tp=tp,
            pp=1,
            ep=own.get("ep", self.ep),
            zero=sharded,
            replicas=own.get("replicas", self.replicas) if sharded else 1,
            sequence_parallel=self.sequence_parallel and tp > 1 and "cuts" not in own,
            cuts=placed,
            tp_sums=self._sums_of(dp * self.cp, tp),
            recompute=own.get("recompute", self.recompute),
            recompute_layers=own.get(
                "recompute_layers", None if "recompute" in own else self.recompute_layers
            ),
            microbatch_size=self.microbatch_rows // dp,
            schedule="none",
            stages_per_rank=1,
            layers=(),
            meshes=(),
            ways=(),
        )

    def _sums_of(self, data_ranks: int, tp: int) -> TpSums:
        is_alone = tp == 1 or (self.tp_sums == "together" and data_ranks == 1)
        return "last" if is_alone else self.tp_sums

    def devices_of(self, pipeline_rank: int) -> range:
        """Return the ranks of one pipeline rank."""
        meshes = self.meshes or ((self.data_ranks, self.tp),) * self.pp
        edges = list(accumulate((dp * tp for dp, tp in meshes), initial=0))
        return range(edges[pipeline_rank], edges[pipeline_rank + 1])

    def pipeline_rank_of(self, rank: int) -> int:
        """Return the pipeline rank that a rank belongs to."""
        return next(p for p in range(self.pp) if rank in self.devices_of(p))

    def stage_layers(self, num_layers: int) -> tuple[range, ...]:
        """Return the layers of each stage; equal shares unless ``layers`` is given."""
        stages = self.num_stages
        if not self.layers and num_layers % stages:
            raise ValueError(
                f"Layout.pp = {self.pp}: {stages} stages do not divide {num_layers} layers; give "
                "layers, one number a stage"
            )
        counts = self.layers or (num_layers // stages,) * stages
        if sum(counts) != num_layers:
            self.fail("layers", f"must add up to the model's {num_layers}")
        return tuple(range(a, b) for a, b in pairwise(accumulate(counts, initial=0)))

    def recomputed(self, num_layers: int) -> tuple[Recompute, ...]:
        """Return the recomputation of each layer in a stage of ``num_layers`` layers."""
        count = min(num_layers, self.recompute_layers or num_layers)
        return tuple(self.recompute if i < count else "none" for i in range(num_layers))

    @property
    def name(self) -> str:
        """The layout in short: ``dp4 zero3 mb8x1``, ``pp2x2 interleaved_1f1b dp2 tp2+sp zero1 mb4x8
        full``. mb is microbatch size x count."""
        parts = []
        if self.pp > 1:
            looped = f"x{self.stages_per_rank}" if self.stages_per_rank > 1 else ""
            parts.append(f"pp{self.pp}{looped} {self.schedule}")
        if self.meshes:
            parts.append("meshes " + _in_words(f"{dp}x{tp}" for dp, tp in self.meshes))
        elif self.dp > 1 or self.num_devices == 1:
            parts.append(f"dp{self.dp}" + (f"/{self.replicas}" if self.replicas > 1 else ""))
        sequence_parallel = "+sp" if self.sequence_parallel else ""
        parts += [f"cp{self.cp}"] if self.cp > 1 else []
        parts += [f"ep{self.ep}"] if self.ep > 1 else []
        if self.tp > 1 or (self.meshes and sequence_parallel):
            parts.append((f"tp{self.tp}" if self.tp > 1 else "") + sequence_parallel)
        if self.cuts.name:
            parts.append(f"cuts {self.cuts.name}")
        if self.tp_sums != "last":
            parts.append(f"sums:{self.tp_sums}")
        if self.ways:
            each = [way.name for way in self.ways]
            by_rank = each[: self.pp]  # of loops, whose ranks have one way each
            same = each == by_rank * self.stages_per_rank
            parts.append("ways " + _in_words(by_rank if same else each, "/"))
        if self.layers:
            parts.append("layers " + _in_words(self.layers))
        if self.zero:
            parts.append(f"zero{self.zero}")
        parts.append(f"mb{self.microbatch_size}x{self.num_microbatches}")
        if self.recompute != "none":
            parts.append(_again(self.recompute, self.recompute_layers))
        return " ".join(parts)
