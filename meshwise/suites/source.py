"""Read the cases of the suites from ``data/suites.toml``; their models are the catalogue's.

The inference suites (suite_inference_gpt.py, suite_inference_moe.py) have a rule instead of a list:
one microbatch, dp = 1, and every combination of pipeline stages, op degree and batch size.
"""

import functools
from collections.abc import Iterator, Mapping
from itertools import accumulate, pairwise, product
from typing import Any

from meshwise import files
from meshwise.models import catalogue
from meshwise.spec import Model, WideResNet
from meshwise.suites.case import (
    BenchmarkCase,
    GPTModelConfig,
    LoadSolutionParallelArgs,
    ModelConfig,
    MoEModelConfig,
    ParallelArgs,
    SearchParallelArgs,
    ShardParallelArgs,
    Suite,
    UniformParallelArgs,
    WResNetModelConfig,
)

_FAMILIES: dict[str, type[ModelConfig]] = {
    "gpt": GPTModelConfig,
    "moe": MoEModelConfig,
    "wresnet": WResNetModelConfig,
}
_DEGREES = (1, 2, 4, 8)  # op degrees of the inference suites
_BATCHES = (1, 2, 4, 8, 16)


@functools.cache
def configs(family: str) -> dict[str, ModelConfig]:
    """Return the sizes of a family (gpt, moe, wresnet) by the source's names, as ``1.3B``."""
    names = [name for name in catalogue.all_names() if name.startswith(f"{family}-")]
    return {name.partition("-")[2].upper(): _config(name) for name in names}


def _config(name: str) -> ModelConfig:
    """Return a model of the catalogue in the source's fields."""
    model = catalogue.find_any(name)
    if isinstance(model, WideResNet):
        depth = 3 * model.layers + 2  # a block has three convolutions; the stem and the head
        return WResNetModelConfig(
            model.image_size, depth, model.channels, model.width_factor, "fp32"
        )
    assert isinstance(model, Model)
    sizes = (model.max_seq_len, model.hidden, model.layers, model.heads, model.vocab)
    if model.experts is None:
        return GPTModelConfig(*sizes)
    return MoEModelConfig(*sizes, model.experts.num_experts, expert_group_size=2048)


@functools.cache
def data() -> dict[str, Any]:
    """Read the file: names, shapes, sweeps, cases."""
    return files.own_data("suites.toml")


@functools.cache
def suites() -> dict[str, Suite]:
    """Return every suite by name, except those of UNet."""
    found: dict[str, Suite] = {}
    for name, listed in data()["cases"].items():
        option = data()["search"]["images" if name.startswith("wresnet") else "tokens"]
        family, suite = name.partition(".")[0], dict[int, tuple[BenchmarkCase, ...]]()
        for told in listed:
            made = tuple(_cases(told, family, option))
            suite[told["gpus"]] = (*suite.get(told["gpus"], ()), *made)
        found[name] = suite
    inference = {family: _inference(family, most) for family, most in data()["inference"].items()}
    return found | {
        "gpt_inference.profile": inference["gpt"],
        "gpt_no_embedding_inference.profile": inference["gpt"],
        "moe_inference.profile": inference["moe"],
    }


def _cases(told: dict[str, Any], family: str, option: dict[str, Any]) -> Iterator[BenchmarkCase]:
    """Yield the cases of one entry of the file. An entry of a search has several."""
    size, counts = told["model"], told["num_micro_batches"]
    config = configs(family)[size] if isinstance(size, str) else _FAMILIES[family](*size)
    batch_size, scatter = told["batch_size"], told.get("reduce_scatter", True)
    if "search" in told:
        database = option.get("profiling_database_filename")
        searched = option | {"profiling_database_filename": database}
        for count, layers in product(counts, told["search"]):
            args: ParallelArgs = SearchParallelArgs(True, True, layers, searched)
            yield BenchmarkCase(batch_size, config, count, "search", args)
    elif "stages" in told:
        yield BenchmarkCase(batch_size, config, counts, "load_solution", _solution(told["stages"]))
    elif "shard" in told:
        first, second = told["shard"]
        args = ShardParallelArgs(False, False, (first, second), False)
        yield BenchmarkCase(batch_size, config, counts, "2d_shard", args)
    else:
        dp, op, pp = told["uniform"]
        args = UniformParallelArgs(scatter, True, dp, op, pp, told.get("force_batch", True))
        yield BenchmarkCase(batch_size, config, counts, "uniform", args)


def _solution(told: list[dict[str, Any]]) -> LoadSolutionParallelArgs:
    """Build the stages that Alpa's search found."""
    stages = [stage for stage in told for _ in range(stage.get("times", 1))]
    edges = list(accumulate((stage["layers"] for stage in stages), initial=0))
    meshes = [(stage["mesh"][0], stage["mesh"][1]) for stage in stages]
    pinned = [stage.get("force_batch", False) for stage in stages]
    return LoadSolutionParallelArgs(
        prefer_reduce_scatter=True,
        use_remat=True,
        num_auto_layers=edges[-1],
        forward_stage_layer_ids=[list(range(a, b)) for a, b in pairwise(edges)],
        submesh_physical_shapes=[(1, a * b) for a, b in meshes],
        submesh_logical_shapes=meshes,
        submesh_autosharding_option_dicts=[
            {"force_batch_dim_to_mesh_dim": 0} if pin else {} for pin in pinned
        ],
    )


def _inference(family: str, most: Mapping[str, int]) -> Suite:
    """Build an inference suite. ``most``: the largest number of pipeline stages of each model."""
    found: Suite = {}
    for size, stages in most.items():
        for pp, op in product((2**k for k in range(stages.bit_length())), _DEGREES):
            args = UniformParallelArgs(True, False, 1, op, pp, True)
            config = configs(family)[size]
            made = [BenchmarkCase(batch, config, 1, "uniform", args) for batch in _BATCHES]
            found[pp * op] = (*found.get(pp * op, ()), *made)
    return dict(sorted(found.items()))
