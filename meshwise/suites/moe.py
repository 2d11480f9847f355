"""The mixture-of-experts suites of Alpa's benchmark (suite_manual_moe.py, suite_auto_moe.py)."""

from meshwise.suites import solutions
from meshwise.suites.case import MoEModelConfig, Suite, search, uniform
from meshwise.suites.gpt import search_option

MODELS = {
    "380M": MoEModelConfig(1024, 768, 8, 16, 32000, 8, 2048),
    "690M": MoEModelConfig(1024, 768, 8, 16, 32000, 16, 2048),
    "1.3B": MoEModelConfig(1024, 768, 16, 16, 32000, 16, 2048),
    "2.4B": MoEModelConfig(1024, 1024, 16, 16, 32000, 16, 2048),
    "7.1B": MoEModelConfig(1024, 1280, 16, 16, 32000, 32, 2048),
    "10B": MoEModelConfig(1024, 1536, 16, 16, 32000, 32, 2048),
    "27B": MoEModelConfig(1024, 2048, 16, 16, 32000, 48, 2048),
    "70B": MoEModelConfig(1024, 2048, 32, 16, 32000, 64, 2048),
    "140B": MoEModelConfig(1024, 2048, 32, 16, 32000, 128, 2048),
}
_EIGHT_LAYERS = MoEModelConfig(1024, 1024, 8, 32, 25600, 8, 1024)
_FOUR_LAYERS = MoEModelConfig(1024, 1024, 4, 32, 25600, 32, 1024)

_GRID = {  # GPUs: model, microbatches, clustered layers
    2: ("690M", (16, 32, 64), (8,)),
    4: ("1.3B", (16, 32, 64), (8,)),
    8: ("2.4B", (16, 32, 64), (8,)),
    16: ("10B", (16, 32, 64), (8,)),
    32: ("27B", (32, 64, 128), (4, 8, 16)),
    64: ("70B", (64,), (8, 16, 32)),
}


def suites() -> dict[str, Suite]:
    return {
        "moe.tmp": {
            1: (uniform(8, MODELS["380M"], 1, (1, 1, 1), force_batch=False),),
            8: (uniform(16, MODELS["1.3B"], 1, (1, 4, 2), force_batch=False),),
            16: (uniform(1024, MODELS["10B"], 32, (2, 8, 1)),),
        },
        "moe.tmp_auto": {},
        "moe.perf_test_fast_2d": {
            1: (uniform(8, _EIGHT_LAYERS, 1, (1, 1, 1)),),
            8: tuple(
                uniform(16, _FOUR_LAYERS, 1, degrees, reduce_scatter=False, force_batch=False)
                for degrees in ((8, 1, 1), (4, 2, 1), (2, 4, 1))
            ),
        },
        "moe.perf_test_auto": solutions.suite("moe", MODELS),
        "moe.grid_search_auto": {
            gpus: search(1024, MODELS[size], counts, layers, search_option())
            for gpus, (size, counts, layers) in _GRID.items()
        },
    }
