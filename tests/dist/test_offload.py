"""Offloaded activations and the choice of kernels, on one device in plain torch."""

import msgspec
import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.attention import SDPBackend

from meshwise import ranks
from meshwise.engine import frame, kernels
from meshwise.nn import gpt
from meshwise.nn.stage import cross_entropy
from meshwise.parallel import offload, recompute
from meshwise.spec import Layout, Model, Recipe, Workload, case_of

MODEL = Model(hidden=16, layers=3, heads=2, ffn=40, vocab=50, max_seq_len=8)


def gradients(move, kind="none", compiled=False, save_on_cpu=False):
    """The loss, and all gradients, of one batch."""
    torch._dynamo.reset()
    model = gpt.GPT(MODEL)
    model.init_weights(0)
    for layer in model.layers.values():
        recompute.recompute_layer(layer, kind, "eager")
        if compiled:
            layer.compile(fullgraph=True, dynamic=False, backend="aot_eager")
    if move:
        offload.offload_saved(model)
    tokens = torch.arange(24).view(3, 8)
    loss = cross_entropy(model(tokens), tokens)
    loss.backward()
    return [loss.detach(), *(parameter.grad for parameter in model.parameters())]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("kind", ["none", "selective", "full"])
def test_offloaded_layers_have_the_same_gradients(monkeypatch, kind, compiled):
    monkeypatch.setattr(offload, "MIN_BYTES", 1)
    expected = gradients(False, kind, compiled)
    for found, value in zip(gradients(True, kind, compiled), expected, strict=True):
        assert torch.equal(found, value)


class Remembering(gpt.GPTLayer):
    """Knows whether the result of its first product in the MLP still lives."""

    def compute(self, x):
        result = super().compute(x)
        self.seen = StorageWeakRef(self.kept.untyped_storage())
        del self.kept
        return result


def remembering(model):
    for layer in model.layers.values():
        layer.__class__ = Remembering
        layer.mlp.up.register_forward_hook(
            lambda _, __, output, layer=layer: setattr(layer, "kept", output)
        )


def test_between_forward_and_backward_only_copies_are_kept(monkeypatch):
    monkeypatch.setattr(offload, "MIN_BYTES", 1)
    alive = {}
    for move in (False, True):
        model = gpt.GPT(MODEL)
        model.init_weights(0)
        remembering(model)
        if move:
            offload.offload_saved(model)
        tokens = torch.arange(24).view(3, 8)
        loss = model(tokens).sum()  # holds the graph
        alive[move] = [not layer.seen.expired() for layer in model.layers.values()]
        assert loss.grad_fn is not None
    assert alive == {False: [True] * 3, True: [False, False, True]}  # the last one's stay


def test_weights_and_small_tensors_stay(monkeypatch):
    moved = []
    copy = offload._SavedByCall.copy

    def count(self, source, device):
        moved.append(source.nbytes)
        return copy(self, source, device)

    monkeypatch.setattr(offload._SavedByCall, "copy", count)
    gradients(True)
    assert moved == []
    monkeypatch.setattr(offload, "MIN_BYTES", 24 * 16 * 4)  # activations of [3, 8, 16] and more
    gradients(True)
    weights = {p.nbytes for p in gpt.GPT(MODEL).layers.parameters()}
    assert moved and not weights & set(moved)
    monkeypatch.setattr(offload, "MIN_BYTES", 3 * 8 * 48 * 4)  # those of qkv and more
    moved.clear()
    gradients(True)
    # q, k and v are one; the last of three layers keeps its own
    assert moved == [3 * 8 * 48 * 4] * (2 + 2)


def test_attention_runs_on_the_kernel_that_was_chosen():
    q = torch.randn(1, 2, 8, 4)
    cpu = torch.device("cpu")
    for name, backend in (("flash", SDPBackend.FLASH_ATTENTION), ("math", SDPBackend.MATH)):
        with kernels.choose(Recipe(attention=name), cpu, "fp32", MODEL):
            assert torch._fused_sdp_choice(q, q, q) == backend.value
    with kernels.choose(Recipe(), cpu, "fp32", MODEL):
        assert torch.backends.cuda.math_sdp_enabled()


@pytest.mark.parametrize("wanted", ["ieee", "tf32"])
def test_fp32_is_multiplied_as_the_record_says(monkeypatch, plan_of, wanted):
    """In products and convolutions, by torch's older words, of which these are the defaults."""

    def tf32() -> tuple[bool, bool]:
        return torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32

    monkeypatch.setattr(frame.mesh, "build", lambda *_: None)  # needs a process group
    workload = Workload(global_batch_size=2, seq_len=8)
    plan = plan_of(MODEL, workload, Layout(microbatch_size=2))
    plan = msgspec.structs.replace(plan, recipe=Recipe(fp32_precision=wanted))
    request = frame.RunRequest(plan=plan, run_dir="")
    seen = []

    def work(job):
        seen.append(tf32())
        return {"reason": "nothing was timed"}

    assert tf32() == (False, True)
    sample = frame.sample(ranks.alone(), request, plan, case_of(plan, "train"), work)
    assert sample.case.op.recipe.fp32_precision == wanted
    assert seen == [(wanted == "tf32",) * 2] and tf32() == (False, True)


@pytest.mark.parametrize("name", ["cudnn", "efficient"])
def test_a_kernel_that_is_not_there_is_refused_by_name(name):
    with pytest.raises(ValueError, match=f"attention = '{name}'.*CPU; use auto"):
        kernels.choose(Recipe(attention=name), torch.device("cpu"), "bf16", MODEL)


def test_kernels_of_16_bits_are_refused_in_fp32(monkeypatch):
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    with pytest.raises(ValueError, match="16 bits"):
        kernels.choose(Recipe(attention="flash"), torch.device("cuda"), "fp32", MODEL)
