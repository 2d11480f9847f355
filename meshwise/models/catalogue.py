"""Models by name, and what to train when the user does not say.

Sizes of the GPT family from gpt-125m on: Alpa's table (OSDI'22, table 5; benchmark/alpa
suite_manual_gpt.py), sequence 1024, vocabulary 51200. Parameters here include biases, norms and
positions, which Alpa's formula leaves out. gpt-30m is for machines without an accelerator.
"""

import difflib

from meshwise.spec import Cluster, Model, Workload

_GPT = {  # hidden, layers, heads
    "gpt-30m": (384, 6, 6),
    "gpt-125m": (768, 12, 12),
    "gpt-350m": (1024, 24, 16),
    "gpt-760m": (1536, 24, 16),
    "gpt-1.3b": (2048, 24, 32),
    "gpt-2.6b": (2560, 32, 32),
    "gpt-6.7b": (4096, 32, 32),
    "gpt-15b": (5120, 48, 40),
    "gpt-39b": (8192, 48, 64),
    "gpt-76b": (10240, 60, 80),
}


def names() -> tuple[str, ...]:
    return tuple(_GPT)


def get(name: str) -> Model:
    """The model called ``name``; an unknown one suggests the nearest."""
    if name not in _GPT:
        near = difflib.get_close_matches(name, _GPT, n=1)
        hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(_GPT)}"
        raise ValueError(f"model {name!r} is not in the catalogue; {hint}")
    hidden, layers, heads = _GPT[name]
    return Model(name=name, hidden=hidden, layers=layers, heads=heads, ffn=4 * hidden)


def default_model(cluster: Cluster) -> Model:
    """A GPT that fills the cluster: on GPUs the largest that trains replicated (18 bytes a
    parameter) in half of one device, so that every degree of sharding is a real choice."""
    if cluster.device.kind == "cpu":
        return get("gpt-30m")
    fitting = [m for m in map(get, _GPT) if 18 * _approximate(m) <= cluster.device.memory_bytes / 2]
    return fitting[-1] if fitting else get("gpt-30m")


def _approximate(model: Model) -> int:
    return 12 * model.layers * model.hidden**2 + model.vocab * model.hidden


def default_workload(cluster: Cluster, model: Model) -> Workload:
    """Batch 32 x 1024 on GPUs (8 sequences a device from 4 on); 8 x 128 on CPUs."""
    if cluster.device.kind == "cpu":
        return Workload(global_batch_size=max(8, 2 * cluster.num_devices), seq_len=128)
    return Workload(
        global_batch_size=max(32, 8 * cluster.num_devices), seq_len=min(1024, model.max_seq_len)
    )
