"""The scope that all cases of one measurement share, and functions that list its cases."""

from collections.abc import Iterable
from typing import Any, NamedTuple

from msgspec.structs import replace

from meshwise.options.measure import MeasureOptions
from meshwise.spec import Case, Cluster, Derived, Gemm
from meshwise.spec.op import Dtype


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


def models_of(asked: MeasureOptions) -> tuple[Any, ...]:
    """Return the models asked for, as records. The verb must have looked up their names."""
    assert not any(isinstance(model, str) for model in asked.model)
    return asked.model


def distinct(rows: Iterable[Derived]) -> list[Case]:
    """Return the cases of these rows, each once."""
    return list(dict.fromkeys(row.case for row in rows))
