"""Loaders that are not followed, and a vLLM that is not the known one: refused in one line each."""

import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch
from torch import nn

from meshwise.bridges.loader import holdings_of_loader
from meshwise.bridges.weights import _check
from meshwise.reshard.holdings import HeldTensor


class Served(nn.Module):
    def __init__(self, load) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 4))
        self.load = load

    def load_weights(self, weights):
        for _, tensor in weights:
            self.load(self.weight.data, tensor)


def fails(weight, tensor):
    raise KeyError("layers.2.weight")


def asserts(weight, tensor):
    assert tensor.shape[0] == 9


REFUSED = {
    "by index": (lambda w, t: w.__setitem__(torch.tensor([1, 0, 2, 3]), t), "index_put_"),
    "added": (lambda w, t: w.add_(t), "add_"),
    "scaled": (lambda w, t: w.copy_(t * 2), "mul"),
    "into a part": (lambda w, t: (w[2:].copy_(t[2:]), w[:2].add_(t[:2])), "add_"),
    "by value": (lambda w, t: w.copy_(t) if t[0, 0].item() else None, "which needs its values"),
    "asserted": (asserts, "one [4, 4]: the server's loader does not take it (AssertionError"),
    "unknown": (fails, "one [4, 4]: the server's loader does not take it (KeyError 'layers.2"),
    "overlapping": (
        lambda w, t: w.copy_(t.as_strided((4, 4), (1, 1))),
        "weight: the loader copies no boxes of tensors",
    ),
    "nothing": (lambda w, t: None, "weight: not in the trainer's checkpoint"),
}


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("kind", REFUSED)
def test_a_loader_that_is_not_followed_is_refused_by_name(kind, device):
    load, said = REFUSED[kind]
    with torch.device(device):
        served = Served(load)
    checkpoint = {"one": ((4, 4), torch.float32)}
    with pytest.raises(ValueError) as error:
        found = holdings_of_loader(served, checkpoint)
        saved = {"one": HeldTensor((4, 4), "fp32", ())}
        _check(found, dict(served.named_parameters()), saved)
    text = str(error.value)
    assert said in text and ("weight" in text or "one" in text) and "\n" not in text


def test_a_quantised_server_is_refused_by_name():
    """With scales that the trainer has not, and weights that were quantised after loading."""
    served = Served(lambda w, t: w.copy_(t))
    served.weight = nn.Parameter(torch.zeros(4, 4, dtype=torch.float8_e4m3fn), requires_grad=False)
    served.weight_scale = nn.Parameter(torch.ones(1))
    checkpoint = {"one": ((4, 4), torch.bfloat16)}
    saved = {"one": HeldTensor((4, 4), "bf16", ())}
    found = holdings_of_loader(served, checkpoint)
    with pytest.raises(ValueError, match="one: bf16 in the trainer, fp8 in the server; quantised"):
        _check(found, dict(served.named_parameters()), saved)
    fresh = holdings_of_loader(Served(lambda w, t: w.copy_(t)), checkpoint)
    said = r"weight: fp8 \[4, 4\] is served, the loader fills fp32 \[4, 4\]; it was changed after"
    with pytest.raises(ValueError, match=said):
        _check(fresh, dict(served.named_parameters()), saved)


BASE = """
class ModuleSource: pass
class TrainerInitInfo: pass
class TrainerWeightTransferEngine: pass
class WeightTransferInitInfo: pass
class WeightTransferUpdateInfo: pass
class WeightTransferEngine({base}):
    {body}
"""
VLLMS = {  # vllm.distributed.weight_transfer.base
    "none": (None, "(import of vllm halted"),
    "older": ("class WeightTransferEngine: pass", "cannot import name 'ModuleSource'"),
    "newer": (
        "from abc import ABC, abstractmethod"
        + BASE.format(base="ABC", body="@abstractmethod\n    def pause(self): ..."),
        "WeightTransferEngine wants pause",
    ),
}


@pytest.mark.parametrize("kind", VLLMS)
def test_a_vllm_that_is_not_known_is_named_with_the_known_one(kind, tmp_path):
    base, said = VLLMS[kind]
    code = "import sys; sys.path.insert(0, sys.argv[1])\n"
    if base is None:
        code += "sys.modules['vllm'] = None\n"
    else:
        folder = tmp_path / "vllm" / "distributed" / "weight_transfer"
        folder.mkdir(parents=True)
        for part in (folder, folder.parent, folder.parent.parent):
            (part / "__init__.py").write_text("")
        (folder.parent / "parallel_state.py").write_text("")
        (folder / "base.py").write_text(base)
    code += (
        "from meshwise.bridges import plugin\n"
        "plugin.register()\n"
        "try:\n    import meshwise.bridges.vllm\n"
        "except ImportError as error:\n    print(error)\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True
    )
    (line,) = ran.stdout.splitlines()
    here = "here is " if find_spec("vllm") else "vLLM is not installed"
    assert line.startswith(f"meshwise knows the weight transfer of vLLM 0.33; {here}")
    assert said in line
    (warning,) = ran.stderr.splitlines()
    assert "no weight transfer by meshwise: meshwise knows" in warning and "0.33" in warning
