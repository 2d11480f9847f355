"""The scope that all cases of one measurement share, and functions that list its cases."""

from collections.abc import Iterable
from typing import Any, NamedTuple

from msgspec.structs import replace

from meshwise.options.measure import MeasureOptions
from meshwise.spec import Block, Case, Cluster, Derived, Gemm, Recipe
from meshwise.spec.op import Dtype
from meshwise.spec.plan import fp8_obstacle


class Scope(NamedTuple):
    """The machine, how many of its devices take part, and the default dtype."""

    cluster: Cluster
    world_size: int
    dtype: Dtype

    @property
    def on_gpus(self) -> bool:
        return self.cluster.device.kind == "cuda"


def typed(gemm: Gemm, dtype: Dtype) -> Gemm:
    """Return the product in another dtype; fp8 is scaled by tensor."""
    return replace(gemm, dtype=dtype, scaling="tensor" if dtype == "fp8" else "none")


def in_fp8(recipe: Any, scope: Scope) -> bool:
    """Return whether layers are measured in fp8, too. Refuse what a recipe changes in them besides:
    they would be measured without it. The verb must have read the recipe."""
    recipe = recipe or Recipe()
    assert isinstance(recipe, Recipe)
    fixes = {
        "attention": (recipe.attention != "auto", "auto; measure attention times the back ends"),
        "routing": (recipe.routing == "skewed", "balanced, as experts of layers are"),
        "async_tp": (recipe.async_tp, "false, as layers are compiled"),
        "fp32_precision": (scope.dtype == "fp32" and recipe.fp32_precision == "tf32", "ieee"),
        "fp8": (recipe.fp8 and scope.dtype != "bf16", "dtype bf16, whose products it casts"),
    }
    for name, (differs, fix) in fixes.items():
        if differs:
            value = getattr(recipe, name)
            raise ValueError(f"recipe.{name} = {value}: layers are not measured so; use {fix}")
    return recipe.fp8


def with_fp8(blocks: Iterable[Block], wanted: bool) -> list[Block]:
    """Return the blocks, and behind them if ``wanted`` the layers that can be in fp8, in fp8."""
    found = list(blocks)
    return found + [
        replace(block, dtype="fp8")
        for block in found
        if wanted and block.part == "layer" and not _obstacle(block)
    ]


def refuse_none_in_fp8(cases: Iterable[Case]) -> None:
    """Raise a ValueError if no layer is in fp8, with the reason."""
    ops = [case.op for case in cases]
    layers = [op for op in ops if isinstance(op, Block) and op.part == "layer"]
    if layers and not any(layer.dtype == "fp8" for layer in layers):
        raise ValueError(f"recipe.fp8 = True: {_obstacle(layers[0])}")


def _obstacle(block: Block) -> str | None:
    return fp8_obstacle(block.model, block.seq_len, block.layout)


def models_of(asked: MeasureOptions) -> tuple[Any, ...]:
    """Return the models asked for, as records. The verb must have looked up their names."""
    assert not any(isinstance(model, str) for model in asked.model)
    return asked.model


def distinct(rows: Iterable[Derived]) -> list[Case]:
    """Return the cases of these rows, each once."""
    return list(dict.fromkeys(row.case for row in rows))
