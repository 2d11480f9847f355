"""The options of ``plan``."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from meshwise.options import PYTHON, File, Layouts, Options, Range, SomeLanguageModel, SomeLayout
from meshwise.options.models import DECODERS, MODELS

_COMPUTED = [name for name in DECODERS if not name.startswith(("gpt-oss", "llama-4"))]
_MODEL = (
    f"One of {', '.join((*MODELS, *_COMPUTED))}, moe-380m and Alpa's others, or a Hugging Face "
    "config.json; by default a GPT that fills the cluster."
)


@dataclass(frozen=True, kw_only=True)
class PlanOptions(Options):
    """The model to plan, for which cluster, by which prices."""

    model: SomeLanguageModel | None = field(default=None, kw_only=False, metadata={"help": _MODEL})
    gpus: Annotated[int | None, PYTHON] = None
    "Devices to use, all of the cluster by default; ranks on a CPU count as devices."
    cluster: File | None = None
    (
        "Plan by the data sheet of this cluster: a cluster.toml, or one that comes with Meshwise "
        "(b200-hgx, dgx-a100-80gb, h100-hgx, h200-hgx, p3.16xlarge, p4d.24xlarge)."
    )
    hosts: int | None = None
    "How many such hosts; the data sheet gives the links between them."
    costs: File | None = None
    "Prices of the cluster to plan for: costs.json, unless --cluster is given."
    measured_only: bool = False
    "Refuse prices of data sheets: a missing measurement is then an error."
    global_batch_size: int | None = None
    "Sequences in a step."
    seq_len: int | None = None
    "Tokens in a sequence."
    expert_load: Literal["mean", "p95"] = "mean"
    (
        "Rows of the busiest rank's experts: an equal share, or the 95th percentile if tokens "
        "choose experts at random."
    )
    top: Annotated[int, Range(1)] = 10
    "How many layouts to keep."
    layout: SomeLayout | None = None
    (
        'Price this layout instead of searching, JSON or a file of it, for example {"pp": 2, '
        '"dp": 2, "schedule": "1f1b", "num_microbatches": 4}; docs/formats.md lists the fields.'
    )
    why_not: Layouts = ()
    (
        "Also compare this layout with the plan, JSON or a file of it as for --layout: whether it "
        "is legal, fits, and in which parts of the step it loses; may be repeated."
    )
    what_if: bool = False
    (
        "Also search with 10 GB more memory a device, twice the network, twice the links within a "
        "host and twice the batch, each alone: what is best then, and how much faster."
    )
    out: File = "plan.json"
    "The file to write."
