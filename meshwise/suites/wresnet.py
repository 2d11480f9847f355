"""The Wide-ResNet suites of Alpa's benchmark (suite_wresnet.py)."""

from meshwise.suites import solutions
from meshwise.suites.case import (
    BenchmarkCase,
    ShardParallelArgs,
    Suite,
    WResNetModelConfig,
    search,
)

BLOCKS = {50: (3, 4, 6, 3), 101: (3, 4, 23, 3)}  # residual blocks by depth

MODELS = {
    "250M": WResNetModelConfig(224, 50, 160, 2, "fp32"),
    "500M": WResNetModelConfig(224, 50, 224, 2, "fp32"),
    "1B": WResNetModelConfig(224, 50, 320, 2, "fp32"),
    "2B": WResNetModelConfig(224, 50, 448, 2, "fp32"),
    "4B": WResNetModelConfig(224, 50, 640, 2, "fp32"),
    "6.8B": WResNetModelConfig(224, 50, 320, 16, "fp32"),
    "13B": WResNetModelConfig(224, 101, 320, 16, "fp32"),
}

_GRID = {  # GPUs: model, (batch size, microbatches) of each case
    1: ("250M", ((1536, 24), (1536, 32))),
    2: ("500M", ((1536, 24), (1536, 32))),
    4: ("1B", ((1536, 24), (1536, 32))),
    8: ("2B", ((1536, 24), (1536, 32))),
    16: ("4B", ((1536, 24), (1536, 32))),
    32: ("6.8B", ((1520, 38), (1512, 42))),
    64: ("13B", ((1520, 38),)),
}
_SEARCH_OPTION = {
    "submesh_physical_shape_space": "small_power_of_two",
    "submesh_logical_shape_space": "single_node_model_parallel",
    "stage_imbalance_tolerance": 0.25,
    "use_hlo_cost_model": False,
    "profiling_database_filename": None,
}


def suites() -> dict[str, Suite]:
    return {
        "wresnet.perf_test_2d": {
            1: tuple(_sharded(b, "250M", n, (1, 1)) for b, n in ((32, 1), (1536, 48))),
            4: tuple(
                _sharded(b, "1B", n, (4, 1)) for b, n in ((32, 1), (1536, 48), (64, 1), (1536, 24))
            ),
            8: (_sharded(64, "1B", 1, (8, 1)),),
        },
        "wresnet.perf_test_auto": solutions.suite("wresnet", MODELS),
        "wresnet.grid_search_auto": {
            gpus: tuple(
                case
                for batch_size, count in grid
                for case in search(
                    batch_size,
                    MODELS[size],
                    (count,),
                    (sum(BLOCKS[MODELS[size].num_layers]),),
                    dict(_SEARCH_OPTION),
                )
            )
            for gpus, (size, grid) in _GRID.items()
        },
    }


def _sharded(
    batch_size: int, size: str, num_micro_batches: int, mesh: tuple[int, int]
) -> BenchmarkCase:
    args = ShardParallelArgs(False, False, mesh, False)
    return BenchmarkCase(batch_size, MODELS[size], num_micro_batches, "2d_shard", args)
