"""The records that stages exchange: operations, models, clusters, samples, prices, plans."""

from meshwise.spec.cluster import Cluster, Device, Tier
from meshwise.spec.costs import (
    TIERS,
    Costs,
    Curve,
    Factor,
    HeldOut,
    PriceTier,
    Surface,
)
from meshwise.spec.layout import Layout, Recompute, ScheduleName, Workload, rank_of
from meshwise.spec.long_attention import Dilation, LongAttention
from meshwise.spec.model import Decoder, Experts, LanguageModel, Mla, Model, RopeScaling
from meshwise.spec.op import (
    DTYPE_BYTES,
    Attention,
    Block,
    Collective,
    Elementwise,
    Gemm,
    Op,
    Overlap,
)
from meshwise.spec.plan import (
    AnyModel,
    Candidate,
    Infeasible,
    Part,
    Plan,
    Prediction,
    Removal,
    Stage,
    StageTimes,
    stages_of,
)
from meshwise.spec.recipe import Recipe
from meshwise.spec.record import Record, digest
from meshwise.spec.refit import Resharding
from meshwise.spec.run import (
    Case,
    Derived,
    DeviceState,
    Regime,
    RunInfo,
    Sample,
    Step,
    StepLine,
    case_of,
    ending,
)
from meshwise.spec.vision import WideResNet
from meshwise.spec.weights import WeightLayout

__all__ = [
    "DTYPE_BYTES",
    "TIERS",
    "AnyModel",
    "Attention",
    "Block",
    "Candidate",
    "Case",
    "Cluster",
    "Collective",
    "Costs",
    "Curve",
    "Decoder",
    "Derived",
    "Device",
    "DeviceState",
    "Dilation",
    "Elementwise",
    "Experts",
    "Factor",
    "Gemm",
    "HeldOut",
    "Infeasible",
    "LanguageModel",
    "Layout",
    "LongAttention",
    "Mla",
    "Model",
    "Op",
    "Overlap",
    "Part",
    "Plan",
    "Prediction",
    "PriceTier",
    "Recipe",
    "Recompute",
    "Record",
    "Regime",
    "Removal",
    "Resharding",
    "RopeScaling",
    "RunInfo",
    "Sample",
    "ScheduleName",
    "Stage",
    "StageTimes",
    "Step",
    "StepLine",
    "Surface",
    "Tier",
    "WeightLayout",
    "WideResNet",
    "Workload",
    "case_of",
    "digest",
    "ending",
    "rank_of",
    "stages_of",
]
