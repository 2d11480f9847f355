"""The inference suites of Alpa's benchmark (suite_inference_gpt.py, suite_inference_moe.py).

One microbatch and dp = 1; every pipeline, operator degree and batch size of a model. The suite
without embeddings has the same cases: it runs the layers alone.
"""

from collections.abc import Mapping

from meshwise.suites import gpt, moe
from meshwise.suites.case import ModelConfig, Suite, uniform

_DEGREES = (1, 2, 4, 8)
_BATCHES = (1, 2, 4, 8, 16)
_GPT_STAGES = {  # of each model: the largest number of pipeline stages
    "1.3B": 8,
    "2.6B": 32,
    "6.7B": 32,
    "15B": 16,
}
_MOE_STAGES = {"1.3B": 16, "2.4B": 16, "7.1B": 16, "10B": 16}


def suites() -> dict[str, Suite]:
    return {
        "gpt_inference.profile": _profile(gpt.MODELS, _GPT_STAGES),
        "gpt_no_embedding_inference.profile": _profile(gpt.MODELS, _GPT_STAGES),
        "moe_inference.profile": _profile(moe.MODELS, _MOE_STAGES),
    }


def _profile(models: Mapping[str, ModelConfig], stages: Mapping[str, int]) -> Suite:
    found: Suite = {}
    for size, most in stages.items():
        for pp in (2**k for k in range(most.bit_length())):
            for op in _DEGREES:
                cases = (uniform(b, models[size], 1, (1, op, pp), remat=False) for b in _BATCHES)
                found[pp * op] = (*found.get(pp * op, ()), *cases)
    return dict(sorted(found.items()))
