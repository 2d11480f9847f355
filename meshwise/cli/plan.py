"""``meshwise plan``."""

from typing import Annotated

from cyclopts import Parameter

import meshwise
from meshwise.cli.options import ANY, DECODERS, MODELS, Json, Size
from meshwise.cli.output import DONE, emit

_COMPUTED = [name for name in DECODERS if not name.startswith(("gpt-oss", "llama-4"))]
_HELP = (
    f"One of {', '.join((*MODELS, *_COMPUTED))}, moe-380m and Alpa's others, or a Hugging Face "
    "config.json; by default a GPT that fills the cluster."
)
Model = Annotated[str | None, Parameter(help=_HELP)]


def plan(
    model: Model = None,
    *,
    size: Size = ANY,
    cluster: str | None = None,
    hosts: int | None = None,
    costs: str | None = None,
    measured_only: bool = False,
    global_batch_size: int | None = None,
    seq_len: int | None = None,
    top: int = 10,
    layout: str | None = None,
    out: str = "plan.json",
    json: Json = False,
) -> int:
    """Search the legal layouts of a model, pipelines included, for the fastest that fit.

    Writes plan.json. Needs no GPU, and no measurement where the cluster's data sheet will do.

    Parameters
    ----------
    cluster
        Plan by the data sheet of this cluster: a cluster.toml, or one that comes with Meshwise
        (b200-hgx, dgx-a100-80gb, h100-hgx, h200-hgx, p3.16xlarge, p4d.24xlarge).
    hosts
        So many hosts of the cluster; between them counts its data sheet.
    costs
        Prices of the cluster to plan for: costs.json, unless --cluster is given.
    measured_only
        Refuse prices of data sheets: a measurement that is missing is an error.
    global_batch_size
        Sequences in a step.
    seq_len
        Tokens in a sequence.
    top
        How many layouts to keep.
    layout
        Price this layout instead of searching, JSON or a file of it, for example {"pp": 2, "dp": 2,
        "schedule": "1f1b", "num_microbatches": 4}; docs/formats.md lists the fields.
    out
        The file to write.
    """
    chosen = meshwise.plan(
        model,
        gpus=size.ranks,
        cluster=cluster,
        hosts=hosts,
        costs=costs,
        measured_only=measured_only,
        global_batch_size=global_batch_size,
        seq_len=seq_len,
        top=top,
        layout=layout,
        out=out,
    )
    from meshwise.pages import tables

    emit(chosen, tables.plan(chosen), json)
    return DONE
