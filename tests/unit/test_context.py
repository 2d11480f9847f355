"""Attention of ranks that share sequences: what its tasks add up to, by counting of their own."""

from collections import defaultdict

import pytest

from meshwise import models
from meshwise.models import context
from meshwise.spec import Attention, Collective, Decoder, Layout, Mla, Model

GPT = Model(hidden=64, layers=2, heads=8, ffn=128, vocab=96, max_seq_len=64)
LLAMA = Decoder(
    hidden=64, layers=2, heads=8, kv_heads=2, head_dim=8, ffn=96, vocab=96, max_seq_len=64
)
NARROW = Mla(kv_lora_rank=20, nope_head_dim=6, rope_head_dim=2, v_head_dim=4)
DENSE = {
    "gpt": GPT,
    "llama": LLAMA,
    "windows": Decoder(
        hidden=64,
        layers=3,
        heads=8,
        kv_heads=2,
        head_dim=8,
        ffn=96,
        vocab=96,
        max_seq_len=64,
        window=20,
        full_layers=(1,),
    ),
    "one kv head": Decoder(
        hidden=64, layers=2, heads=8, kv_heads=1, head_dim=8, ffn=96, vocab=96, max_seq_len=64
    ),
}
LAYOUTS = [
    Layout(cp=2),
    Layout(cp=4, zero=3, recompute="full"),
    Layout(cp=8, num_microbatches=2),
    Layout(cp=2, tp=4, sequence_parallel=True),
    Layout(dp=2, cp=4, tp=2, zero=2, recompute="selective"),
]


def program(model, layout, seq=64, **options):
    words = layout.recomputed(model.layers)
    graph = models.graph(model, layout.microbatch_size, seq, "bf16", recompute=words)
    return models.program_of(graph, layout, "bf16", **options)


def flops(tasks):
    return sum(t.op.exact_flops if isinstance(t.op, Attention) else t.op.flops for t in tasks)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
@pytest.mark.parametrize("model", DENSE.values(), ids=DENSE)
def test_ranks_together_compute_the_whole(model, layout):
    alone = Layout(num_microbatches=layout.num_microbatches, recompute=layout.recompute)
    repeats = getattr(model, "kv_heads", model.heads) < layout.tp  # keys are computed twice

    def counted(*of, **options):
        tasks = program(*of, **options).tasks
        return flops(t for t in tasks if isinstance(t.op, Attention) or not repeats)

    whole = counted(model, alone)
    ranks = [counted(model, layout, cp_rank=r) for r in range(layout.cp)]
    assert layout.tp * sum(ranks) == whole
    assert len(set(ranks)) == 1 or model is DENSE["windows"], "a zigzag makes work equal"


@pytest.mark.parametrize("cp", [2, 4])
def test_values_narrower_than_keys_are_padded(cp):
    latent = Decoder(
        hidden=64, layers=1, heads=8, kv_heads=8, head_dim=8, ffn=96, vocab=96, max_seq_len=64,
        mla=NARROW,
    )  # fmt: skip
    kernels = [t.op for t in program(latent, Layout(cp=cp)).tasks if isinstance(t.op, Attention)]
    assert {(op.head_dim, op.value_dim) for op in kernels} == {(8, 8)}


def test_without_a_zigzag_the_last_rank_is_the_busiest():
    ranks = [flops(program(LLAMA, Layout(cp=4), seq=36, cp_rank=r).tasks) for r in range(4)]
    assert flops(program(LLAMA, Layout(cp=4), seq=36).tasks) == max(ranks) == ranks[-1]
    assert ranks == sorted(ranks) and ranks[0] < ranks[-1]


def test_every_rank_receives_what_others_send():
    """A ring of four: the bytes that leave all ranks at a hop reach them."""
    op = Attention(batch=1, q_len=16, kv_len=16, heads=3, kv_heads=1, head_dim=8)
    sums = defaultdict(lambda: [0, 0])
    for rank in range(4):
        own = context.share(op, 4, 1, rank)
        assert own.way == "ring"
        steps = context.forward(own, "a", ("q", "k", "v"), ("y", "lse"))
        hops = [s for s in steps.steps if s.stream == "cp"]
        assert all(step.op.kind == "send_recv" for step in hops)
        assert [step.op.size_bytes for step in hops] == [2 * 16 * 8 * 2] * 3  # the larger of both
        for step in hops:
            sums[step.name][1] += steps.sizes[step.writes[0]]
            first = step.reads[0]
            sums[step.name][0] += steps.sizes[first]
    # rank r sends on what it holds, of which later ranks need half at least
    for held, came in sums.values():
        assert held / 2 <= came <= held


def test_messages_run_beside_the_kernels_that_do_not_need_them():
    model = DENSE["one kv head"]
    tasks = program(model, Layout(cp=2, microbatch_size=1)).tasks
    names = [
        t.name for t in tasks if t.name.startswith("layers.0.attention.") and "grad" not in t.name
    ]
    sent = next(t for t in tasks if t.name == "layers.0.attention.keys.1")
    at = names.index(sent.name)
    beside = next(t for t in tasks if t.name == "layers.0.attention.attend.0.0")
    assert names.index(beside.name) > at and not set(sent.writes) & set(beside.reads)
    after = next(t for t in tasks if t.name == "layers.0.attention.attend.1.0")
    assert set(sent.writes) & set(after.reads)
    assert isinstance(sent.op, Collective) and sent.stream == "cp"
