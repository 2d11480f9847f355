"""The plans that Alpa's search found for AWS p3.16xlarge: 7 each of GPT, MoE and Wide-ResNet.

In: ``data/solutions.toml``, where a stage is a number of clustered layers and a logical mesh. Out:
the cases of the ``perf_test_auto`` suites.
"""

import functools
import importlib.resources
from collections.abc import Mapping
from itertools import accumulate, pairwise
from typing import Any

from meshwise import files
from meshwise.suites.case import (
    BenchmarkCase,
    LoadSolutionParallelArgs,
    ModelConfig,
    Suite,
)


def suite(family: str, models: Mapping[str, ModelConfig]) -> Suite:
    """The plans of a family, gpt, moe or wresnet, by the number of GPUs."""
    plans = _solutions()[family]
    return {plan["gpus"]: (_case(plan, models[plan["model"]]),) for plan in plans}


@functools.cache
def _solutions() -> dict[str, Any]:
    file = importlib.resources.files("meshwise") / "data" / "solutions.toml"
    return files.parse_toml(file.read_bytes(), file.name)


def _case(plan: dict[str, Any], config: ModelConfig) -> BenchmarkCase:
    stages = [stage for stage in plan["stages"] for _ in range(stage.get("times", 1))]
    edges = list(accumulate((stage["layers"] for stage in stages), initial=0))
    meshes = [(stage["mesh"][0], stage["mesh"][1]) for stage in stages]
    args = LoadSolutionParallelArgs(
        prefer_reduce_scatter=True,
        use_remat=True,
        num_auto_layers=edges[-1],
        forward_stage_layer_ids=[list(range(a, b)) for a, b in pairwise(edges)],
        submesh_physical_shapes=[(1, a * b) for a, b in meshes],
        submesh_logical_shapes=meshes,
        submesh_autosharding_option_dicts=[
            {"force_batch_dim_to_mesh_dim": 0} if stage.get("force_batch") else {}
            for stage in stages
        ],
    )
    return BenchmarkCase(
        plan["batch_size"], config, plan["num_micro_batches"], "load_solution", args
    )
