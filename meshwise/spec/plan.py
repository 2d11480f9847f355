"""A plan: a layout, its devices, its predicted cost, and the alternatives considered."""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any, Literal

import msgspec

from meshwise.spec.answers import Answers
from meshwise.spec.cluster import Cluster
from meshwise.spec.costs import PriceTier
from meshwise.spec.layout import SPLIT, Cuts, Layout, Recompute, TpSums, Way, Workload, rank_of
from meshwise.spec.model import AnyModel, LayerKind, layer_kinds
from meshwise.spec.op import FP8_ALIGNMENT, Dtype
from meshwise.spec.recipe import CP_CHOOSES, Recipe
from meshwise.spec.record import NonNegative, NonNegativeFloat, Positive, PositiveFloat, Record
from meshwise.spec.vision import WideResNet

SCHEMA_VERSION = 3  # 1 had no pipelines, 2 no placements of operations

MOST_GRAPHS = 64  # that one rank may compile
OUTSIDE_ALLOCATOR = "CUDA and NCCL, outside the allocator"  # a part of the memory
CHANNELS = "channels"  # the dim of convolutions that tp divides


class Part(Record, kw_only=True):
    """One addend of a predicted time (seconds) or memory (bytes), with its interval."""

    name: str
    value: float
    low: float
    high: float


class StageTimes(Record, kw_only=True):
    """Seconds of one microbatch in a stage. If backward is split, ``backward_s`` is its input part
    and ``weights_s`` its weight part. Otherwise they are the whole backward and 0."""

    forward_s: NonNegativeFloat
    backward_s: NonNegativeFloat
    weights_s: NonNegativeFloat

    def of_action(self, kind: str) -> float:
        """Return the seconds of an action: F, B (whole backward), I (input part) or W (weight
        part)."""
        whole_s = self.backward_s + self.weights_s
        return {"F": self.forward_s, "B": whole_s, "I": self.backward_s, "W": self.weights_s}[kind]


class Prediction(Record, kw_only=True):
    """The predicted cost of a layout. Intervals carry the held-out error of the prices used.

    ``mfu`` counts FLOPs as torchtitan does (6 per parameter and token without the embedding
    lookup, plus 12*layers*hidden*seq per token, attention not halved) against the datasheet
    peak; None if the device's peak is unknown. ``time_parts``: of the rank that ends last.
    ``stage_times``: one for every stage of a pipeline. ``tier``: the lowest tier of the prices
    used; None in older files. ``errors``: the possible errors in seconds, by group of prices and
    part of the step; they add up within a group, and groups are independent. ``p50_s``, ``p95_s``:
    quantiles of the step that waits for the slowest rank (``search.tail``); None in older files.
    """

    step_time_s: PositiveFloat
    low_s: NonNegativeFloat
    high_s: NonNegativeFloat
    time_parts: tuple[Part, ...]
    peak_memory_bytes: NonNegativeFloat
    memory_low_bytes: NonNegativeFloat
    memory_high_bytes: NonNegativeFloat
    memory_parts: tuple[Part, ...]
    tokens_per_s: NonNegativeFloat
    flops_per_device_per_s: NonNegativeFloat
    mfu: NonNegativeFloat | None = None
    stage_times: tuple[StageTimes, ...] = ()
    notes: tuple[str, ...] = ()  # prices that were extrapolated or stood in for another
    tier: PriceTier | None = None
    p50_s: PositiveFloat | None = None
    p95_s: PositiveFloat | None = None
    errors: dict[str, dict[str, NonNegativeFloat]] = {}

    @property
    def usual_s(self) -> float:
        """The seconds of a step to count on over a long training."""
        return self.p50_s or self.step_time_s

    @property
    def allocated_bytes(self) -> tuple[float, float, float]:
        """The peak that torch's allocator sees, with its interval."""
        outside = sum(part.value for part in self.memory_parts if part.name == OUTSIDE_ALLOCATOR)
        ends = self.peak_memory_bytes, self.memory_low_bytes, self.memory_high_bytes
        return ends[0] - outside, max(0.0, ends[1] - outside), ends[2] - outside

    def difference_error_s(self, other: "Prediction") -> float:
        """Return the possible error of the difference of two step times. Where both do work of one
        part by prices of one group, these are off alike, and only what one does more of it counts.
        That adds up within a group; groups are independent."""
        groups = self.errors.keys() | other.errors.keys()
        apart = []
        for group in groups:
            mine, theirs = self.errors.get(group, {}), other.errors.get(group, {})
            parts = mine.keys() | theirs.keys()
            apart.append(sum(abs(mine.get(p, 0.0) - theirs.get(p, 0.0)) for p in parts))
        return math.hypot(*apart)

    def ties(self, other: "Prediction") -> bool:
        """Whether errors that the two do not share may be larger than the difference of their
        step times. Without ``errors``, as in older files, nothing ties."""
        apart_s = abs(self.step_time_s - other.step_time_s)
        return bool(self.errors) and apart_s <= self.difference_error_s(other)


class Candidate(Record, kw_only=True):
    """A layout and its cost. ``ties``: with the chosen one (``Prediction.ties``)."""

    layout: Layout
    prediction: Prediction
    ties: bool = False


class Removal(Record, kw_only=True):
    """The number of layouts that one constraint removed."""

    constraint: str
    count: NonNegative


class Infeasible(Record, kw_only=True):
    """The layout that came nearest to fitting, and the bytes that it lacks."""

    layout: Layout
    missing_bytes: float
    reason: str


Axis = Literal["dp", "cp", "tp", "ep"]
Placement = dict[str, tuple[Axis, ...]]


class Stage(Record, kw_only=True):
    """Layers ``first_layer`` to ``last_layer`` (exclusive) on one pipeline rank.

    ``devices``: in rank order, over the axes dp, cp and tp (innermost). ``placements``: for each
    part of the model (a field of ``Cuts``), the mesh axes that divide each dim of its operations,
    the major axis first. A tensor without a dim of an axis is whole on the axis's ranks, or a sum
    over them. ``recompute``: one word per layer.
    """

    first_layer: NonNegative
    last_layer: Positive
    pipeline_rank: NonNegative
    devices: tuple[int, ...]
    dp: Positive
    cp: Positive = 1
    tp: Positive
    ep: Positive = 1
    zero: NonNegative = 0
    replicas: Positive = 1
    tp_sums: TpSums = "last"
    placements: dict[str, Placement]
    recompute: tuple[Recompute, ...]


def placements_of(inside: Layout, parts: Iterable[str]) -> dict[str, Placement]:
    """Return the placements of operations of these parts of a model within a pipeline rank."""
    found = {}
    for part in parts:
        axes: dict[str, list[Axis]] = {"batch": ["dp"], "seq": ["cp"]}
        if part == "experts":
            axes["experts"] = ["ep"]
        cuts, channels = inside.placed, part == "convolutions"
        words = {CHANNELS} if channels else {getattr(cuts, part), cuts.of(part)} - {"whole"}
        for word in words:
            axes.setdefault(word, []).append("tp")
        divided = {dim: tuple(a for a in of if getattr(inside, a) > 1) for dim, of in axes.items()}
        found[part] = {dim: of for dim, of in divided.items() if of}
    return found


def parts_of(model: AnyModel) -> tuple[str, ...]:
    """Return the parts of a model that have placements of their own."""
    if isinstance(model, WideResNet):
        return ("stream", "convolutions")
    dense = not all(map(model.has_experts, range(model.layers)))
    without = {"feed_forward": not dense, "experts": model.experts is None}
    return tuple(part for part in Cuts.__struct_fields__ if not without.get(part))


def stages_of(layout: Layout, model: AnyModel) -> tuple[Stage, ...]:
    """Return the stages of a layout."""
    stages, parts = [], parts_of(model)
    for number, layers in enumerate(layout.stage_layers(model.layers)):
        rank, inside = rank_of(layout.schedule, number, layout.pp), layout.of_stage(number)
        stages.append(
            Stage(
                first_layer=layers.start,
                last_layer=layers.stop,
                pipeline_rank=rank,
                devices=tuple(layout.devices_of(rank)),
                dp=inside.dp,
                cp=inside.cp,
                tp=inside.tp,
                ep=inside.ep,
                zero=inside.zero,
                replicas=inside.replicas,
                tp_sums=inside.tp_sums,
                placements=placements_of(inside, parts),
                recompute=inside.recomputed(len(layers)),
            )
        )
    return tuple(stages)


def layout_of(stages: tuple[Stage, ...], layout: Layout) -> Layout:
    """Return the layout with ``ways`` for stages that differ from the layout's own settings."""
    ways = []
    for number, stage in enumerate(stages):
        inside, words = layout.of_stage(number), Counter(stage.recompute)
        own: dict[str, Any] = {
            axis: getattr(stage, axis)
            for axis in ("zero", "replicas", "ep")
            if getattr(stage, axis) != getattr(inside, axis)
        }
        if stage.recompute != inside.recomputed(len(stage.recompute)):
            some = sorted(set(words) - {"none"})
            if len(some) > 1:
                raise ValueError(f"stage {number} recomputes {some[0]} and {some[1]}; use one")
            word: Recompute = some[0] if some else "none"
            own |= {"recompute": word, "recompute_layers": words[word] if len(words) > 1 else None}
        cuts: dict[str, Any] = {part: _cut(placed) for part, placed in stage.placements.items()}
        cuts = {part: word for part, word in cuts.items() if part in Cuts.__struct_fields__}
        whole = stage.tp == 1 and set(cuts.values()) <= {"whole"}
        differs = any(word != getattr(inside.placed, part) for part, word in cuts.items())
        try:
            own |= {"cuts": Cuts(**cuts)} if differs and not whole else {}
            ways.append(Way(**own))
        except ValueError as error:
            raise ValueError(f"stage {number}: {error}") from None
    if all(way == Way() for way in ways):
        return layout
    return msgspec.structs.replace(layout, ways=tuple(ways))


def _cut(placed: Placement) -> str:
    """Return the dim of a part that tp divides. If it divides two, return ``experts``."""
    return next((dim for dim, axes in reversed(placed.items()) if "tp" in axes), "whole")


def fp8_obstacle(model: AnyModel, seq_len: int, layout: Layout) -> str | None:
    """Return why a layout has no layers' products in fp8 (``Recipe.fp8``), or None."""
    if isinstance(model, WideResNet):
        return "fp8 is for linear layers, and an image model has none; use false"
    ranks = range(layout.pp) if layout.meshes else ()
    for inside in [layout.of_rank(rank) for rank in ranks] or [layout]:
        if inside.tp > 1:
            return "fp8 casts products of whole weights; use tp 1"
        if (tokens := inside.microbatch_size * seq_len // inside.cp) % FP8_ALIGNMENT:
            needed = f"{tokens} tokens on a rank: fp8 needs a multiple of {FP8_ALIGNMENT}"
            return f"{needed}; change the microbatch size or the sequence length"
    return None


class Plan(Record, kw_only=True):
    """All that is needed to run the chosen layout elsewhere. ``prediction``: None if it was not
    priced. Image workloads have sequences of length 1."""

    schema_version: Positive = SCHEMA_VERSION
    model: AnyModel
    workload: Workload
    cluster: Cluster
    dtype: Dtype
    lowering: Literal["eager", "compiled"]
    layout: Layout
    recipe: Recipe = Recipe()
    stages: tuple[Stage, ...]
    prediction: Prediction | None = None
    runners_up: tuple[Candidate, ...] = ()
    removed: tuple[Removal, ...] = ()
    nearest_infeasible: Infeasible | None = None
    num_considered: NonNegative = 0
    runs: tuple[str, ...] = ()
    answers: Answers = Answers()
    versions: dict[str, str] = {}  # under which its prices were measured, as of ``Costs``

    def check(self) -> None:
        layout, workload = self.layout, self.workload
        batch = layout.batch_size
        if batch != workload.global_batch_size:
            self.fail(
                "layout",
                f"dp * microbatch_size * num_microbatches is {batch}, but the workload's "
                f"global_batch_size is {workload.global_batch_size}; make them equal",
            )
        if layout.num_devices > self.cluster.num_devices:
            self.fail("layout", f"needs {layout.num_devices} of {self.cluster.num_devices} devices")
        if layout.schedule in SPLIT and self.lowering == "compiled":
            self.fail(
                "lowering",
                f"{layout.schedule} splits each backward in two, and compiled code has it in one "
                "piece; use eager, or another schedule",
            )
        self._check_recipe()
        times = self.prediction.stage_times if self.prediction else ()
        if len(times) not in (0, len(self.stages)):
            self.fail(
                "prediction", f"stage_times must be one for each of {len(self.stages)} stages"
            )
        self._check_stages()
        if self.graphs > MOST_GRAPHS:
            self.fail(
                "stages",
                f"a rank has {self.graphs} kinds of layers to compile, and torch takes "
                f"{MOST_GRAPHS}; use eager, or more stages",
            )

    @property
    def graphs(self) -> int:
        """The most layers of different kind or recomputation that one rank compiles."""
        found = defaultdict[int, set[tuple[LayerKind, Recompute]]](set)
        for stage in self.stages if self.lowering == "compiled" else ():
            layers = range(stage.first_layer, stage.last_layer)
            kinds = layer_kinds(self.model, self.workload.seq_len, layers)
            found[stage.pipeline_rank] |= {*zip(kinds, stage.recompute, strict=True)}
        return max(map(len, found.values()), default=0)

    def _check_stages(self) -> None:
        """Check the stages. Stages take precedence: settings of their own become the layout's
        ``ways``."""
        due = stages_of(self.layout, self.model)
        if self.stages == due:
            return
        told = ""
        if len(self.stages) == len(due):
            try:
                made = layout_of(self.stages, self.layout)
                msgspec.structs.force_setattr(self, "layout", made)
                msgspec.structs.force_setattr(self, "prediction", None)
                due = stages_of(made, self.model)
            except ValueError as error:
                told = f" ({error})"
        if len(self.stages) != len(due):
            told = f" (there are {len(due)} of them)"
        for number, (one, own) in enumerate(zip(due, self.stages, strict=False)):
            if fields := [f for f in one.__struct_fields__ if getattr(one, f) != getattr(own, f)]:
                told = told or f" ({', '.join(fields)} of stage {number})"
        if self.stages != due or told:
            raise ValueError(
                f"Plan.stages are not what layout {self.layout.name} makes of them{told}; "
                "meshwise plan --layout writes the plan of a layout"
            )

    def _check_recipe(self) -> None:
        recipe, compiled = self.recipe, self.lowering == "compiled"
        if recipe.fp8 and self.dtype != "bf16":
            self.fail("recipe", "fp8 casts products of bf16; use dtype bf16")
        if recipe.fp8 and (reason := fp8_obstacle(self.model, self.workload.seq_len, self.layout)):
            self.fail("recipe", reason)
        if recipe.async_tp and not (compiled and max(stage.tp for stage in self.stages) > 1):
            self.fail("recipe", "async_tp is for compiled layers under tp; use both, or false")
        if recipe.weights == "bf16" and self.layout.tp_sums == "together":
            self.fail("recipe", "weights of bf16 would add up in bf16 where tp_sums is together")
        if recipe.weights == "bf16" and self.dtype != "bf16":
            self.fail("recipe", "masters of bf16 are for dtype bf16; use weights fp32")
        if recipe.attention != "auto" and any(stage.cp > 1 for stage in self.stages):
            self.fail("recipe", CP_CHOOSES)
