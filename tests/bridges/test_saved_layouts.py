"""A worker's saved layout: the one it reads off vLLM's loader, and only of its own place."""

import os
import re
import socket

import pytest

os.environ["VLLM_TARGET_DEVICE"] = "cpu"  # read when its modules are imported
pytest.importorskip("vllm", reason="make test-bridges installs vLLM")

import torch
from transformers import AutoModelForCausalLM
from vllm.config import set_current_vllm_config

from meshwise.bridges import layouts
from meshwise.bridges.hugging_face import saved
from meshwise.bridges.vllm import WorkerEngine
from tests.bridges.models import MODELS, written
from tests.bridges.worker import built


def test_a_saved_layout_is_what_the_loader_does_at_this_place(tmp_path, monkeypatch):
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        meeting = f"tcp://127.0.0.1:{sock.getsockname()[1]}"
    # with experts, for which vLLM makes groups with the first model
    config, model = built(str(written("deepseek-v3", tmp_path)), 0, 1, meeting)
    engine = WorkerEngine(config.weight_transfer_config, config, torch.device("cpu"), model)
    with torch.device("meta"):
        trained = AutoModelForCausalLM.from_config(MODELS["deepseek-v3"][0])
    checkpoint = {name: (shape, torch.bfloat16) for name, shape in saved(trained)[0].items()}
    engine.layout = ""
    monkeypatch.setenv("MESHWISE_SAVE_LAYOUT", str(tmp_path / "layouts"))
    with set_current_vllm_config(config):
        read = engine._read(checkpoint, 5)
    engine.layout, engine._new = str(tmp_path / "layouts"), None
    assert engine._read(checkpoint, 5) == read
    path = tmp_path / "layouts" / "rank-0.json"
    assert layouts.read(path).loader.endswith("DeepseekV3ForCausalLM, tp 0 of 1, pp 0 of 1")
    path.write_text(path.read_text().replace("tp 0 of 1", "tp 1 of 2"))
    with pytest.raises(ValueError, match=r"rank-0\.json is of '.*tp 1 of 2") as error:
        engine._read(checkpoint, 5)
    assert re.search("this is '.*tp 0 of 1, pp 0 of 1'; save it anew$", str(error.value))
