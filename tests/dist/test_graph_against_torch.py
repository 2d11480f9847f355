"""The operation graph against the module it describes: parameters, FLOPs, bytes saved by autograd."""

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from meshwise import models
from meshwise.engine import memory
from meshwise.models import catalogue
from meshwise.nn import gpt
from meshwise.search.simulate import peak_memory
from meshwise.spec import Attention, Gemm, Layout, Model

TINY = Model(hidden=64, layers=3, heads=4, ffn=256, vocab=512, max_seq_len=64)
BATCH, SEQ = 2, 48


@pytest.mark.parametrize("name", ["gpt-30m", "gpt-125m", "gpt-2.6b", "gpt-76b"])
def test_parameters(name):
    model = catalogue.get(name)
    with torch.device("meta"):
        module = gpt.GPT(model)
    assert sum(p.numel() for p in module.parameters()) == models.num_parameters(model)


def test_flops():
    """torch counts products; on the meta device with the math backend, attention's too, in full."""
    with torch.device("meta"):
        module = gpt.GPT(TINY)
        tokens = torch.zeros(BATCH, SEQ, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        gpt.loss(module(tokens), tokens).backward()
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


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_saved_bytes(dtype):
    module = gpt.GPT(TINY)
    module.init_weights(0)
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
        loss = gpt.loss(module(tokens), tokens)
    assert loss.isfinite()
    counted = models.saved_activation_bytes(TINY, BATCH, SEQ, dtype)
    sizes = sorted(storages.values())
    scalars = sum(size for size in sizes if size <= 16)  # the mean's divisor
    narrow = 0
    if dtype == "bf16":  # the CPU's norm keeps mean and rstd in bf16, CUDA's in fp32 as counted
        narrow = (2 * TINY.layers + 1) * 2 * BATCH * SEQ * 2
    assert sum(sizes) - scalars + narrow == sum(counted.values())


def test_peak_memory_of_a_step():
    """Counted from the graph and seen by torch's profiler: the same, to 1 %."""
    model = Model(hidden=128, layers=3, heads=4, ffn=512, vocab=4096, max_seq_len=64)
    module = gpt.GPT(model)
    module.init_weights(0)
    optimizer = torch.optim.AdamW(module.parameters(), fused=True)
    tokens = torch.randint(model.vocab, (BATCH, SEQ))

    def step():
        gpt.loss(module(tokens), tokens).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    states = (x for state in optimizer.state.values() for x in state.values())
    measured = memory.peak_tensor_bytes(step, [*module.parameters(), *states])
    layout = Layout(microbatch_size=BATCH)
    program = models.apply(models.graph(model, BATCH, SEQ, "fp32"), layout, "fp32")
    assert peak_memory(program, lambda name: 1.0).total_bytes == pytest.approx(measured, rel=0.01)
