"""Long context in miniature: a GPT learns one text, of whose tokens each rank holds some.

    python examples/long_context.py
    torchrun --nproc-per-node 4 examples/long_context.py
    torchrun --nproc-per-node 4 examples/long_context.py --attention dilated

Ranks meet in attention only, which is dense (``ring_attention``) or LongNet's
(``RingDilatedAttention``) over all tokens. FSDP2 shards the weights over the same ranks and means
their gradients. Losses are the same on any number of ranks.
"""

import argparse
import functools

import torch
from torch.distributed.fsdp import fully_shard

from meshwise import ranks
from meshwise.attention import RingDilatedAttention, ring_attention
from meshwise.attention.shards import (
    Shards,
    contiguous,
    loss_weight,
    next_tokens,
    positions,
    zigzag,
)
from meshwise.launcher import Job
from meshwise.nn.gpt import GPT
from meshwise.nn.stage import Attend, cross_entropy
from meshwise.spec import Model


def attention(kind: str, shards: Shards) -> Attend:
    """q, k, v -> out, each [batch, tokens of this rank, heads, head_dim]"""
    if kind == "dense":
        return functools.partial(ring_attention, causal=True, shards=shards)
    n = shards.seq_len
    return RingDilatedAttention([n // 8, n // 2, n], [1, 2, 4], causal=True, shards=shards)


def build(attend: Attend, seq_len: int, joined: ranks.Ranks) -> GPT:
    model = Model(hidden=64, layers=2, heads=4, ffn=256, vocab=64, max_seq_len=seq_len)
    with joined.device:
        gpt = GPT(model, attend=attend)
    gpt.init_weights(seed=0)  # the same on every rank
    if joined.world_size > 1:
        for unit in (*gpt.layers.values(), gpt):
            fully_shard(unit)
    return gpt


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--attention", choices=("dense", "dilated"), default="dense")
    parser.add_argument("--order", choices=("contiguous", "zigzag"))
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args()
    # zigzag evens out causal work; dilated attention is even, and wants its segments in one piece
    order = options.order or ("zigzag" if options.attention == "dense" else "contiguous")

    gpu = "cuda" if torch.cuda.is_available() else "cpu"
    joined = ranks.join() if Job.here().launched else ranks.alone(gpu)
    size, rank, device = joined.world_size, joined.rank, joined.device
    shards = {"contiguous": contiguous, "zigzag": zigzag}[order](options.seq_len, size)
    mine, following = (
        torch.from_numpy(of(shards, rank)).to(device) for of in (positions, next_tokens)
    )
    text = torch.randint(64, (1, options.seq_len), generator=torch.Generator().manual_seed(0))
    text = text.to(device)
    inputs = text[:, mine]
    labels = text[:, following].masked_fill(following < 0, -100)  # the last token has none

    model = build(attention(options.attention, shards), options.seq_len, joined)
    model.at(mine)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(1, options.steps + 1):
        share = cross_entropy(model(inputs), labels) * loss_weight(shards, rank)
        (share * size).backward()  # FSDP2 divides the sum over ranks by their number
        optimizer.step()
        optimizer.zero_grad()
        total = sum(joined.gather(share.item()))
        if rank == 0:
            print(f"step {step}: loss {total:.4f}")
    joined.leave()


if __name__ == "__main__":
    main()
