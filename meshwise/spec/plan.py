"""A plan: which layout, on which devices, what it should cost, and what else was considered."""

from typing import Literal

from meshwise.spec.cluster import Cluster
from meshwise.spec.layout import Layout, Workload
from meshwise.spec.model import Model
from meshwise.spec.op import Dtype
from meshwise.spec.record import NonNegative, NonNegativeFloat, Positive, PositiveFloat, Record

SCHEMA_VERSION = 1


class Part(Record, kw_only=True):
    """One addend of a predicted time (seconds) or memory (bytes), with its interval."""

    name: str
    value: float
    low: float
    high: float


class Prediction(Record, kw_only=True):
    """What a layout should cost. Intervals carry the held-out error of the prices used.

    ``mfu`` counts FLOPs as torchtitan does (6 per parameter and token without the embedding
    lookup, plus 12*layers*hidden*seq per token, attention not halved) against the datasheet
    peak; None when the device has no known peak.
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
    notes: tuple[str, ...] = ()  # prices that were extrapolated or stood in for another


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
    """Layers ``first_layer`` to ``last_layer`` (exclusive) on ``devices``, in rank order.

    ``sharding`` names the strategy of each weight operation: col, row, vocab or replicated.
    """

    first_layer: NonNegative
    last_layer: Positive
    devices: tuple[int, ...]
    sharding: dict[str, str]


class Plan(Record, kw_only=True):
    """Enough to run the chosen layout elsewhere."""

    schema_version: Positive = SCHEMA_VERSION
    model: Model
    workload: Workload
    cluster: Cluster
    dtype: Dtype
    lowering: Literal["eager", "compiled"]
    layout: Layout
    schedule: Literal["none", "gpipe", "1f1b"] = "none"
    stages: tuple[Stage, ...]
    prediction: Prediction
    runners_up: tuple[Candidate, ...] = ()
    removed: tuple[Removal, ...] = ()
    nearest_infeasible: Infeasible | None = None
    num_considered: NonNegative = 0
    runs: tuple[str, ...] = ()

    def check(self) -> None:
        layout, workload = self.layout, self.workload
        batch = layout.dp * layout.microbatch_size * layout.num_microbatches
        if batch != workload.global_batch_size:
            self.fail(
                "layout",
                f"dp * microbatch_size * num_microbatches is {batch}, but the workload's "
                f"global_batch_size is {workload.global_batch_size}; make them equal",
            )
        if layout.num_devices > self.cluster.num_devices:
            self.fail("layout", f"needs {layout.num_devices} of {self.cluster.num_devices} devices")
        devices = tuple(range(layout.num_devices))
        covered = [(stage.first_layer, stage.last_layer, stage.devices) for stage in self.stages]
        if covered != [(0, self.model.layers, devices)]:
            self.fail("stages", f"must be one stage of all {self.model.layers} layers on {devices}")
        if self.schedule != "none":
            self.fail("schedule", "must be none while there is one stage")
