"""A plan: which layout, on which devices, what it should cost, and what else was considered."""

from typing import Literal

import msgspec

from meshwise.spec.cluster import Cluster
from meshwise.spec.costs import PriceTier
from meshwise.spec.layout import SPLIT, Layout, Recompute, Workload, rank_of
from meshwise.spec.model import Decoder, Model
from meshwise.spec.op import Dtype
from meshwise.spec.recipe import Recipe
from meshwise.spec.record import NonNegative, NonNegativeFloat, Positive, PositiveFloat, Record
from meshwise.spec.vision import WideResNet

SCHEMA_VERSION = 2  # 1 had no pipelines

AnyModel = Model | Decoder | WideResNet


class Part(Record, kw_only=True):
    """One addend of a predicted time (seconds) or memory (bytes), with its interval."""

    name: str
    value: float
    low: float
    high: float


class StageTimes(Record, kw_only=True):
    """Seconds of one microbatch in a stage. Where backward is split, ``backward_s`` is that of the
    input and ``weights_s`` that of the weights; else the whole and 0."""

    forward_s: NonNegativeFloat
    backward_s: NonNegativeFloat
    weights_s: NonNegativeFloat

    def of_action(self, kind: str) -> float:
        """Of a schedule's action: F, B (the whole backward), I (of the input), W (of weights)."""
        whole_s = self.backward_s + self.weights_s
        return {"F": self.forward_s, "B": whole_s, "I": self.backward_s, "W": self.weights_s}[kind]


class Prediction(Record, kw_only=True):
    """What a layout should cost. Intervals carry the held-out error of the prices used.

    ``mfu`` counts FLOPs as torchtitan does (6 per parameter and token without the embedding
    lookup, plus 12*layers*hidden*seq per token, attention not halved) against the datasheet
    peak; None when the device has no known peak. ``time_parts`` are of the rank that ends last,
    ``stage_times`` of every stage of a pipeline. ``tier`` is the lowest of the prices it rests on;
    None in files that did not say.
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


class Candidate(Record, kw_only=True):
    layout: Layout
    prediction: Prediction


class Removal(Record, kw_only=True):
    """How many layouts one constraint removed."""

    constraint: str
    count: NonNegative


class Infeasible(Record, kw_only=True):
    """The layout that came nearest to fitting, and what it lacked."""

    layout: Layout
    missing_bytes: float
    reason: str


class Stage(Record, kw_only=True):
    """Layers ``first_layer`` to ``last_layer`` (exclusive) on one pipeline rank.

    ``devices`` in rank order hold the axes dp, cp and tp (innermost). ``sharding`` names the
    strategy of each weight operation: col, row, vocab or replicated. ``recompute``: one word a
    layer.
    """

    first_layer: NonNegative
    last_layer: Positive
    pipeline_rank: NonNegative
    devices: tuple[int, ...]
    dp: Positive
    cp: Positive = 1
    tp: Positive
    ep: Positive = 1
    sharding: dict[str, str]
    recompute: tuple[Recompute, ...]


def stages_of(layout: Layout, num_layers: int, sharding: dict[str, str]) -> tuple[Stage, ...]:
    """The stages of a layout; ``sharding`` holds where tp is more than 1."""
    stages = []
    for number, layers in enumerate(layout.stage_layers(num_layers)):
        rank = rank_of(layout.schedule, number, layout.pp)
        inside = layout.of_rank(rank)
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
                sharding=sharding if inside.tp > 1 else dict.fromkeys(sharding, "replicated"),
                recompute=layout.recomputed(len(layers)),
            )
        )
    return tuple(stages)


class Plan(Record, kw_only=True):
    """Enough to run the chosen layout elsewhere. Without a ``prediction`` it was not priced. The
    workload of images has sequences of length 1."""

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

    def check(self) -> None:
        layout, workload = self.layout, self.workload
        batch = layout.microbatch_rows * layout.num_microbatches
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
        due = stages_of(layout, self.model.layers, {})
        found = [msgspec.structs.replace(stage, sharding={}) for stage in self.stages]
        if found != list(due):
            pairs = zip(due, found, strict=False)
            number = next(
                (i for i, (a, b) in enumerate(pairs) if a != b), min(len(due), len(found))
            )
            raise ValueError(
                f"Plan.stages: stage {number} of {len(due)} is not what layout {layout.name} makes "
                "of it; meshwise plan --layout writes the plan of a layout"
            )

    def _check_recipe(self) -> None:
        recipe, compiled = self.recipe, self.lowering == "compiled"
        if recipe.fp8 and (self.dtype != "bf16" or any(stage.tp > 1 for stage in self.stages)):
            self.fail("recipe", "fp8 casts bf16 products of whole weights; use dtype bf16 and tp 1")
        if recipe.async_tp and not (compiled and max(stage.tp for stage in self.stages) > 1):
            self.fail("recipe", "async_tp is for compiled layers under tp; use both, or false")
        if recipe.weights == "bf16" and self.dtype != "bf16":
            self.fail("recipe", "masters of bf16 are for dtype bf16; use weights fp32")
