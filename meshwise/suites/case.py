"""Benchmark cases: a batch, a model, and how it is laid out.

Names and fields are those of Alpa's benchmark (benchmark/alpa/benchmark_parallel_utils.py), so
that ``str(case)`` is the text in its logs and tables. ``layouts`` translates a case into our
records.
"""

from typing import Any, Literal, NamedTuple

ParallelMode = Literal["uniform", "search", "load_solution", "2d_shard"]


class GPTModelConfig(NamedTuple):
    seq_len: int
    hidden_size: int
    num_layers: int
    num_heads: int
    vocab_size: int


class MoEModelConfig(NamedTuple):
    """Every second layer has experts; tokens are dispatched in groups of ``expert_group_size``."""

    seq_len: int
    hidden_size: int
    num_layers: int
    num_heads: int
    vocab_size: int
    num_experts: int
    expert_group_size: int


class WResNetModelConfig(NamedTuple):
    image_size: int
    num_layers: int
    num_channels: int
    width_factor: int
    dtype: str


class UniformParallelArgs(NamedTuple):
    """``pp`` equal stages, each on a logical mesh of (dp, op)."""

    prefer_reduce_scatter: bool
    use_remat: bool
    dp: int
    op: int
    pp: int
    force_batch_dim_mapping: bool


class ShardParallelArgs(NamedTuple):
    """No pipeline: one logical mesh."""

    prefer_reduce_scatter: bool
    use_remat: bool
    logical_mesh_shape: tuple[int, int]
    force_batch_dim_mapping: bool


class SearchParallelArgs(NamedTuple):
    """A search for stages and their meshes, over ``num_auto_layers`` clustered layers."""

    prefer_reduce_scatter: bool
    use_remat: bool
    num_auto_layers: int
    auto_stage_option: dict[str, Any]


class LoadSolutionParallelArgs(NamedTuple):
    """The result of a search: the layers, meshes and solver options of every stage."""

    prefer_reduce_scatter: bool
    use_remat: bool
    num_auto_layers: int
    forward_stage_layer_ids: list[list[int]]
    submesh_physical_shapes: list[tuple[int, int]]
    submesh_logical_shapes: list[tuple[int, int]]
    submesh_autosharding_option_dicts: list[dict[str, int]]


ModelConfig = GPTModelConfig | MoEModelConfig | WResNetModelConfig
ParallelArgs = (
    UniformParallelArgs | ShardParallelArgs | SearchParallelArgs | LoadSolutionParallelArgs
)


class BenchmarkCase(NamedTuple):
    """A case. ``batch_size`` is the global batch size. ``str`` gives the source's text."""

    batch_size: int
    model_config: ModelConfig
    num_micro_batches: int
    parallel_mode: ParallelMode
    parallel_args: ParallelArgs


Suite = dict[int, tuple[BenchmarkCase, ...]]  # number of GPUs -> its cases
