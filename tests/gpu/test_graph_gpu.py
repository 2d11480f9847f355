"""What autograd keeps on a GPU is what the graph counts, to the byte: flash attention's lse is fp32
and so are the statistics of norms, which are one kernel each."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from meshwise import models
from tests.dist.test_graph_against_torch import BATCH, FAMILIES, SEQ, WORDS, saved

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is visible"),
]


@pytest.mark.parametrize("backend", ["FLASH_ATTENTION", "CUDNN_ATTENTION"])
@pytest.mark.parametrize("words", [*((word,) * 3 for word in WORDS), WORDS], ids="-".join)
@pytest.mark.parametrize("model", FAMILIES.values(), ids=FAMILIES)
def test_saved_bytes_on_a_gpu(model, words, backend):
    with sdpa_kernel(getattr(SDPBackend, backend)):
        found = saved(model, "bf16", words, "cuda")
    assert found == sum(models.saved_activation_bytes(model, BATCH, SEQ, "bf16", words).values())
