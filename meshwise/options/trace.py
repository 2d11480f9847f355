"""The options of ``measure import --model``: what the calls in a trace are compared with."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from meshwise.options import File, Options, Range, SomeLayout, SomeModel
from meshwise.options.models import DECODERS, MODELS

_MODEL = (
    "Compare the calls in traces with those of a training step of this model: of "
    f"{', '.join((*MODELS, *DECODERS))}, or of a Hugging Face config.json."
)


@dataclass(frozen=True, kw_only=True)
class TraceOptions(Options):
    """A step of a model or of a plan, and how many of them a trace has."""

    model: SomeModel | None = field(default=None, metadata={"help": _MODEL})
    plan: File | None = None
    "Compare with a step of this plan.json instead."
    layout: SomeLayout | None = None
    (
        'Of --model, JSON or a file of it, as {"dp": 2, "tp": 4, "zero": 1, "num_microbatches": '
        "8}; by default FSDP2 (ZeRO 3) over the ranks of the largest communicator."
    )
    seq_len: Annotated[int | None, Range(1)] = None
    "Of --model: tokens in a sequence; by default its longest."
    param_dtype: Literal["fp32", "bf16", "fp16"] = "bf16"
    "Of --model: of gathered weights and activations."
    reduce_dtype: Literal["fp32", "bf16"] = "fp32"
    "Of --model: of reduced gradients."
    steps: Annotated[int | None, Range(1)] = None
    "Steps in the trace; by default as many as make the counts agree best."
