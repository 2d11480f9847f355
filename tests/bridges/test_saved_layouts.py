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
from vllm.model_executor.model_loader.utils import is_deferred_attention_layer

from meshwise.bridges import layouts
from meshwise.bridges.hugging_face import saved
from meshwise.bridges.vllm import WorkerEngine
from meshwise.bridges.weights import _check
from meshwise.reshard.holdings import HeldTensor
from tests.bridges.models import MODELS, written
from tests.bridges.worker import built


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        meeting = f"tcp://127.0.0.1:{sock.getsockname()[1]}"
    # with experts, for which vLLM makes groups with the first model
    folder = written("deepseek-v3", tmp_path_factory.mktemp("model"))
    config, model = built(str(folder), 0, 1, meeting)
    return WorkerEngine(config.weight_transfer_config, config, torch.device("cpu"), model)


@pytest.fixture(scope="module")
def checkpoint():
    with torch.device("meta"):
        trained = AutoModelForCausalLM.from_config(MODELS["deepseek-v3"][0])
    return {name: (shape, torch.bfloat16) for name, shape in saved(trained)[0].items()}


def test_a_saved_layout_is_what_the_loader_does_at_this_place(
    engine, checkpoint, tmp_path, monkeypatch
):
    engine.layout = ""
    monkeypatch.setenv("MESHWISE_SAVE_LAYOUT", str(tmp_path / "layouts"))
    with set_current_vllm_config(engine.vllm_config):
        read = engine._read(checkpoint, 5)
    engine.layout = str(tmp_path / "layouts")
    monkeypatch.setattr(engine, "_new", None)
    assert engine._read(checkpoint, 5) == read
    path = tmp_path / "layouts" / "rank-0.json"
    assert layouts.read(path).loader.endswith("DeepseekV3ForCausalLM, tp 0 of 1, pp 0 of 1")
    path.write_text(path.read_text().replace("tp 0 of 1", "tp 1 of 2"))
    with pytest.raises(ValueError, match=r"rank-0\.json is of '.*tp 1 of 2") as error:
        engine._read(checkpoint, 5)
    assert re.search("this is '.*tp 0 of 1, pp 0 of 1'; save it anew$", str(error.value))


def test_what_vllm_derives_from_weights_is_derived_anew(engine, checkpoint, tmp_path):
    """MLA keeps parts of kv_b_proj in parameters of its own. The judge is a fresh derivation."""
    assert not engine._deriving()
    for module in filter(is_deferred_attention_layer, engine.model.modules()):
        module.is_amx_bmm_enabled = False  # some CPUs pack, by operators that the wheel lacks
        module.impl.process_weights_after_loading = lambda _: None
        module.process_weights_after_loading(torch.bfloat16)
    of = dict(engine.model.named_parameters())
    made = [name for name in of if name.endswith(("W_UV", "W_UK_T"))]
    assert len(made) == 4
    engine.layout = ""
    with set_current_vllm_config(engine.vllm_config):
        found = engine._read(checkpoint, 0)
    tensors = {name: HeldTensor(shape, "bf16", ()) for name, (shape, _) in checkpoint.items()}
    with pytest.raises(ValueError, match="W_UV: only the model has such a parameter"):
        _check(found, of, tensors)
    derived = {f"{at}.{own}" for at, module in engine._deriving() for own in module._parameters}
    assert derived >= {*made}
    for name in made:  # here views of kv_b_proj; some back ends copy
        of[name].data = of[name].data.clone()
    before = [of[name].clone() for name in made]
    torch.manual_seed(0)
    with torch.no_grad():  # as a version arrives
        for name, tensor in of.items():
            if name not in made:
                tensor.copy_(torch.randn_like(tensor, dtype=torch.float32))
    engine.arrived = True
    engine.finish_weight_update()
    now = dict(engine.model.named_parameters())
    for name, old in zip(made, before, strict=True):
        at = name.partition("mla_attn.")[0]
        b = of[next(key for key in of if key.startswith(at) and "kv_b_proj.weight" in key)]
        parts = b.view(4, 32, 32).split([16, 16], 1)  # heads, of keys and of values, rank
        theirs = parts[1].transpose(1, 2) if name.endswith("W_UV") else parts[0]
        assert torch.equal(now[name], theirs) and not torch.equal(now[name], old)
