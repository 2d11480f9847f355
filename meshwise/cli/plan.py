"""``meshwise plan``."""

from dataclasses import replace
from typing import Annotated

import meshwise
from meshwise.cli.options import ANY, Json, Size, flags
from meshwise.cli.output import DONE, emit
from meshwise.options.plan import Search

USUAL = Search()


def plan(
    asked: Annotated[Search, flags(Search)] = USUAL, *, size: Size = ANY, json: Json = False
) -> int:
    """Search the legal layouts of a model, pipelines included, for the fastest that fit.

    Writes plan.json. Needs no GPU, and no measurement where the cluster's data sheet will do.
    """
    chosen = meshwise.plan(replace(asked, gpus=size.ranks))
    from meshwise.pages import tables

    emit(chosen, tables.plan(chosen), json)
    return DONE
