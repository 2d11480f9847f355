"""The operation graph against the module it describes: parameters, FLOPs, bytes saved, the peak."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from meshwise import models
from meshwise.engine import memory
from meshwise.models import catalogue
from meshwise.nn import gpt
from meshwise.nn.stage import cross_entropy
from meshwise.search.simulate import peak_memory
from meshwise.spec import Attention, Gemm, Layout, Model

TINY = Model(hidden=64, layers=3, heads=4, ffn=256, vocab=512, max_seq_len=64)
BATCH, SEQ = 2, 48
WORDS = ("none", "selective", "full")

redo = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)


def selective(layer, x):
    """The mathematics of ``gpt.GPTLayer``, with a norm or gelu and the product behind it redone."""
    attention, mlp = layer.attention, layer.mlp
    qkv = redo(lambda x: attention.qkv(layer.norm1(x)), x)
    q, k, v = (
        part.transpose(1, 2) for part in qkv.unflatten(-1, (-1, 3, attention.head_dim)).unbind(-2)
    )
    attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    x = x + attention.out(attended.transpose(1, 2).flatten(-2))
    up = redo(lambda x: mlp.up(layer.norm2(x)), x)
    return x + redo(lambda up: mlp.down(F.gelu(up, approximate="tanh")), up)


def recomputing(module, words):
    for layer, word in zip(module.layers.values(), words, strict=True):
        if word == "full":
            layer.forward = partial(redo, layer.forward)
        elif word == "selective":
            layer.forward = partial(selective, layer)
    return module


def initialised(module, words):
    module.init_weights(0)
    return recomputing(module, words)


@pytest.mark.parametrize("name", ["gpt-30m", "gpt-125m", "gpt-2.6b", "gpt-76b"])
def test_parameters(name):
    model = catalogue.get(name)
    with torch.device("meta"):
        module = gpt.GPT(model)
    assert sum(p.numel() for p in module.parameters()) == models.num_parameters(model)


@pytest.mark.parametrize("layers", [range(1), range(1, 2), range(1, 3)])
def test_parameters_of_a_stage(layers):
    """The last has its own copy of the tied weight."""
    with torch.device("meta"):
        stage = gpt.GPT(TINY, layers)
    graph = models.graph(
        TINY, BATCH, SEQ, "fp32", layers=len(layers), first=stage.first, last=stage.last
    )
    counted = models.apply(graph, Layout(), "fp32").resident_bytes["parameters"]
    assert counted == sum(p.numel() * 4 for p in stage.parameters())


def test_flops():
    """torch counts products; on the meta device with the math backend, attention's too, in full."""
    with torch.device("meta"):
        module = gpt.GPT(TINY)
        tokens = torch.zeros(BATCH, SEQ, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        cross_entropy(module(tokens), tokens).backward()
    program = models.apply(
        models.graph(TINY, BATCH, SEQ, "fp32"), Layout(microbatch_size=BATCH), "fp32"
    )
    products = sum(t.op.flops for t in program.tasks if isinstance(t.op, Gemm))
    attention = sum(t.op.flops for t in program.tasks if isinstance(t.op, Attention))
    counted = counter.get_flop_counts()["Global"]
    by_torch = {str(op).split(".")[-1]: flops for op, flops in counted.items()}
    torch_products = sum(by_torch[name] for name in ("addmm", "mm") if name in by_torch)
    assert products == torch_products
    rest = sum(by_torch.values()) - torch_products
    # ours: the causal half, 2 + 5 units; the math backend: the whole square, 4 + 8 (it recomputes
    # nothing in backward)
    assert rest * 7 == attention * 12


@pytest.mark.parametrize("words", [*((word,) * 3 for word in WORDS), WORDS], ids="-".join)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_saved_bytes(dtype, words):
    module = initialised(gpt.GPT(TINY), words)
    module.to(torch.bfloat16 if dtype == "bf16" else torch.float32)
    tokens = torch.randint(TINY.vocab, (BATCH, SEQ))
    parameters = {p.untyped_storage().data_ptr() for p in module.parameters()}
    storages: dict[int, int] = {}
    kept = []

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters and tensor.dtype.is_floating_point:
            storages[storage.data_ptr()] = storage.nbytes()
            kept.append(tensor)
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = cross_entropy(module(tokens), tokens)
    assert loss.isfinite()
    counted = models.saved_activation_bytes(TINY, BATCH, SEQ, dtype, words)
    sizes = sorted(storages.values())
    scalars = sum(size for size in sizes if size <= 16)  # the mean's divisor
    narrow = 0
    if dtype == "bf16":  # the CPU's norm keeps mean and rstd in bf16, CUDA's in fp32 as counted
        narrow = (2 * words.count("none") + 1) * 2 * BATCH * SEQ * 2
    assert sum(sizes) - scalars + narrow == sum(counted.values())


@pytest.mark.parametrize("vocab", [64, 4096], ids=["peak in the layers", "peak in the head"])
@pytest.mark.parametrize("word", WORDS)
def test_peak_memory_of_a_step(word, vocab):
    """Counted from the graph and seen by torch's profiler: the same, to 0.1 %."""
    model = Model(hidden=128, layers=4, heads=4, ffn=512, vocab=vocab, max_seq_len=64)
    batch = 8
    words = (word,) * model.layers
    module = initialised(gpt.GPT(model), words)
    optimizer = torch.optim.AdamW(module.parameters(), fused=True)
    tokens = torch.randint(model.vocab, (batch, SEQ))

    def step():
        cross_entropy(module(tokens), tokens).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    states = (x for state in optimizer.state.values() for x in state.values())
    measured = memory.peak_tensor_bytes(step, [*module.parameters(), *states])
    graph = models.graph(model, batch, SEQ, "fp32", recompute=words)
    program = models.apply(graph, Layout(microbatch_size=batch), "fp32")
    assert peak_memory(program, lambda name: 1.0).total_bytes == pytest.approx(measured, rel=1e-3)


@pytest.mark.parametrize("word", WORDS)
def test_peak_memory_of_a_middle_stage(word):
    """Its input and its result's gradient arrive, its result and its input's gradient leave."""
    model = Model(hidden=128, layers=5, heads=4, ffn=512, vocab=64, max_seq_len=64)
    batch, words = 8, (word,) * 3
    stage = initialised(gpt.GPT(model, range(1, 4)), words)

    def step():
        x = torch.randn(batch, SEQ, model.hidden, requires_grad=True)
        edge = get_gradient_edge(stage(x))  # the result is sent and gone
        torch.autograd.backward(edge, torch.randn(batch, SEQ, model.hidden))
        stage.zero_grad()

    step()
    measured = memory.peak_tensor_bytes(step, stage.parameters())
    graph = models.graph(
        model, batch, SEQ, "fp32", layers=3, first=False, last=False, recompute=words
    )
    program = models.apply(graph, Layout(microbatch_size=batch), "fp32")
    counted = peak_memory(program, lambda name: 1.0).total_bytes
    counted -= program.resident_bytes["optimizer state"]
    assert counted == pytest.approx(measured, rel=1e-3)
