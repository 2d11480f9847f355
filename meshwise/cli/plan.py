"""``meshwise plan``."""

from typing import Annotated

from cyclopts import Parameter

import meshwise
from meshwise.cli.options import ANY, DECODERS, MODELS, Json, Size
from meshwise.cli.output import DONE, emit

_DENSE = (*MODELS, *(name for name in DECODERS if name.startswith(("llama-2", "llama-3"))))
_HELP = (
    f"One of {', '.join(_DENSE)}, or the Hugging Face config.json of a dense decoder; by default a "
    "GPT that fills the cluster."
)
Model = Annotated[str | None, Parameter(help=_HELP)]


def plan(
    model: Model = None,
    *,
    size: Size = ANY,
    costs: str = "costs.json",
    global_batch_size: int | None = None,
    seq_len: int | None = None,
    top: int = 10,
    layout: str | None = None,
    out: str = "plan.json",
    json: Json = False,
) -> int:
    """Search the legal layouts of a model, pipelines included, for the fastest that fit.

    Writes plan.json. Needs no GPU.

    Parameters
    ----------
    costs
        Prices of the cluster to plan for.
    global_batch_size
        Sequences in a step.
    seq_len
        Tokens in a sequence.
    top
        How many layouts to keep.
    layout
        Price the layout in this JSON file instead of searching, for example {"pp": 2, "dp": 2,
        "schedule": "1f1b", "num_microbatches": 4}; docs/formats.md lists the fields.
    out
        The file to write.
    """
    chosen = meshwise.plan(
        model,
        gpus=size.ranks,
        costs=costs,
        global_batch_size=global_batch_size,
        seq_len=seq_len,
        top=top,
        layout=layout,
        out=out,
    )
    from meshwise.pages import tables

    emit(chosen, tables.plan(chosen), json)
    return DONE
