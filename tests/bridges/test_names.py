"""vLLM's names and shapes as ``holdings`` plans them without vLLM, against its own modules."""

import socket

import pytest

pytest.importorskip("vllm", reason="make test-bridges installs vLLM")

from meshwise.models.hugging_face import read_config
from meshwise.reshard.holdings import buffers, holdings
from meshwise.spec import WeightLayout
from tests.bridges.models import MODELS, written
from tests.bridges.worker import built

# Gemma 2's logits are capped and GPT-OSS has sinks: no Decoder is made of them.
# vLLM makes its groups for experts with the first model, which must have some.
KNOWN = ["deepseek-v3", *sorted({*MODELS} - {"deepseek-v3", "gemma2", "gpt-oss"})]


@pytest.fixture(scope="module")
def meeting() -> str:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{sock.getsockname()[1]}"


@pytest.mark.parametrize("name", KNOWN)
def test_a_planned_server_has_vllms_parameters(name, meeting, tmp_path):
    folder = written(name, tmp_path)
    layout = WeightLayout(order="engine", vocab_multiple=64)
    planned = buffers(holdings(read_config(folder), layout), 0)
    _, model = built(str(folder), 0, 1, meeting)
    theirs = {name: tuple(tensor.shape) for name, tensor in model.named_parameters()}
    assert {name: shape for name, (shape, _) in planned.items()} == theirs
