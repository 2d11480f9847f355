"""Configurations of other trainers: plans written as them, and planned from them."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Literal

import msgspec

from meshwise import store
from meshwise.files import read_text
from meshwise.models import catalogue
from meshwise.options.plan import PlanOptions
from meshwise.spec import Costs, Plan, Recipe
from meshwise.spec.costs import UNPRICED

log = logging.getLogger("meshwise")


def config(
    path: Path | str, tool: Literal["megatron", "torchtitan"]
) -> tuple[str, tuple[str, ...]]:
    """Return the plan in a file as a configuration of ``tool``, and what of it that does not say,
    which is logged too."""
    from meshwise.models.configured import megatron, torchtitan

    text, notes = (megatron if tool == "megatron" else torchtitan).text(store.read(path, Plan))
    for note in notes:
        log.warning("not said to %s: %s", tool, note)
    return text, notes


def taken(asked: PlanOptions, prices: Costs) -> tuple[PlanOptions, Costs]:
    """Read the configuration that was asked for. Return options with its model, layout,
    workload and recipe, and prices as it runs; log what is planned otherwise, or ignored."""
    from meshwise.models.configured import megatron, torchtitan
    from meshwise.search.space import recipe_obstacle

    tool, source = (megatron, asked.megatron_args) if asked.torchtitan is None else (
        torchtitan, asked.torchtitan)  # fmt: skip
    source = str(source)
    model = None if asked.model is None else catalogue.find(asked.model)
    is_text = tool is megatron and ("\n" in source or source.lstrip().startswith("--"))
    text = source if is_text else read_text(source)
    found = tool.read(text, asked.gpus, prices.cluster.num_devices, model)
    notes, recipe, usual = list(found.notes), found.recipe, Recipe()
    if found.lowering == "eager":
        prices = msgspec.structs.replace(prices, lowering="eager")
    for name, said, here in (
        ("dtype", found.dtype, prices.dtype),
        ("lowering", found.lowering or prices.lowering, prices.lowering),
    ):
        notes += [f"{name} {said}: planned as {here}"] if said != here else []
    for name in UNPRICED:
        if (value := getattr(recipe, name)) != getattr(usual, name):
            notes.append(f"{name} {value}: has no price; planned without")
            recipe = msgspec.structs.replace(recipe, **{name: getattr(usual, name)})
    about = found.model, found.workload.seq_len, found.layout
    lacking = {"fp8": False, "attention": "auto"}
    for name, value in lacking.items():
        alone = msgspec.structs.replace(usual, **{name: getattr(recipe, name)})
        if lacks := recipe_obstacle(*about, msgspec.structs.replace(prices, recipe=alone)):
            notes.append(f"{name}: planned without; {lacks}")
            recipe = msgspec.structs.replace(recipe, **{name: value})
    for note in notes:
        log.warning("%s", note)
    if found.ignored:
        log.info("ignored, as no plan depends on it: %s", ", ".join(found.ignored))
    options = replace(
        asked, megatron_args=None, torchtitan=None, model=found.model,
        layout=found.layout, recipe=recipe,
        seq_len=found.workload.seq_len,
    )  # fmt: skip
    return options, prices
