"""The scope that all cases of one measurement share, and listings of cases made of named ones."""

import functools
from collections.abc import Callable
from typing import NamedTuple, ParamSpec

from msgspec.structs import replace

from meshwise.spec import Case, Cluster, Derived, Gemm
from meshwise.spec.op import Dtype

P = ParamSpec("P")


class Scope(NamedTuple):
    """The machine, how many of its devices take part, and the dtype unless another is asked."""

    cluster: Cluster
    world_size: int
    dtype: Dtype

    @property
    def on_gpus(self) -> bool:
        return self.cluster.device.kind == "cuda"


def typed(gemm: Gemm, dtype: Dtype) -> Gemm:
    """The product in another dtype; of fp8 scaled by tensor."""
    return replace(gemm, dtype=dtype, scaling="tensor" if dtype == "fp8" else "none")


def distinct(derived: Callable[P, list[Derived]]) -> Callable[P, list[Case]]:
    """Turn a listing of named cases into one of the cases, each once."""

    @functools.wraps(derived)
    def cases(*args: P.args, **options: P.kwargs) -> list[Case]:
        return list(dict.fromkeys(row.case for row in derived(*args, **options)))

    return cases
