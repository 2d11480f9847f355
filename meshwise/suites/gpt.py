"""The GPT suites of Alpa's benchmark (suite_manual_gpt.py, suite_auto_gpt.py)."""

from typing import Any

from meshwise.suites import solutions
from meshwise.suites.case import GPTModelConfig, Suite, search, uniform

MODELS = {
    "125M": GPTModelConfig(1024, 768, 12, 12, 51200),
    "350M": GPTModelConfig(1024, 1024, 24, 16, 51200),
    "760M": GPTModelConfig(1024, 1536, 24, 16, 51200),
    "1.3B": GPTModelConfig(1024, 2048, 24, 32, 51200),
    "2.6B": GPTModelConfig(1024, 2560, 32, 32, 51200),
    "6.7B": GPTModelConfig(1024, 4096, 32, 32, 51200),
    "15B": GPTModelConfig(1024, 5120, 48, 40, 51200),
    "39B": GPTModelConfig(1024, 8192, 48, 64, 51200),
    "76B": GPTModelConfig(1024, 10240, 60, 80, 51200),
}
_FOUR_LAYERS = GPTModelConfig(1024, 4096, 4, 32, 51200)

_GRID = {  # GPUs: model, then (microbatches, clustered layers) of each block of the grid
    2: ("760M", (((32, 64, 128, 256), (6,)), ((32, 64), (12,)))),
    4: ("1.3B", (((32, 64, 128), (6,)), ((32, 64), (12,)))),
    8: ("2.6B", (((64, 128, 256), (8,)), ((64, 128), (16,)))),
    16: ("6.7B", (((32, 64, 128, 256), (8,)),)),
    32: ("15B", (((64, 128, 256, 512), (16,)),)),
    64: ("39B", (((128, 256, 512, 1024), (8,)),)),
}


def suites() -> dict[str, Suite]:
    return {
        "gpt.tmp": {
            1: (uniform(16, MODELS["350M"], 1, (1, 1, 1)),),
            8: (uniform(128, _FOUR_LAYERS, 4, (4, 1, 2)),),
        },
        "gpt.tmp_auto": {},
        "gpt.perf_test_fast_2d": {
            1: (
                uniform(
                    8, GPTModelConfig(1024, 1024, 4, 32, 51200), 1, (1, 1, 1), reduce_scatter=False
                ),
            ),
            8: (
                uniform(32, _FOUR_LAYERS, 1, (8, 1, 1)),
                uniform(128, _FOUR_LAYERS, 4, (8, 1, 1)),
            ),
        },
        "gpt.perf_test_manual": {
            1: (uniform(16, MODELS["350M"], 1, (1, 1, 1)),),
            4: (uniform(64, MODELS["1.3B"], 4, (1, 2, 2)),),
            8: (uniform(32, MODELS["2.6B"], 4, (2, 2, 2)),),
            64: (uniform(1024, MODELS["39B"], 1024, (1, 4, 16)),),
        },
        "gpt.perf_test_auto": solutions.suite("gpt", MODELS),
        "gpt.grid_search_auto": {
            gpus: tuple(
                case
                for counts, layers in grid
                for case in search(1024, MODELS[size], counts, layers, search_option())
            )
            for gpus, (size, grid) in _GRID.items()
        },
        "gpt.correctness_test_auto": {
            8: search(1024, MODELS["2.6B"], (128,), (8,), search_option())
        },
    }


def search_option() -> dict[str, Any]:
    """How the search of GPT and MoE chooses stages."""
    return {
        "submesh_physical_shape_space": "small_power_of_two",
        "submesh_logical_shape_space": "all",
        "stage_imbalance_tolerance": 1.0,
        "use_hlo_cost_model": True,
        "profiling_database_filename": "prof_database.pkl",
    }
