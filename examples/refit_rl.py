"""Reinforcement learning in miniature: generate, train, refit, on the same GPUs or CPU cores.

    torchrun --nproc-per-node 2 examples/refit_rl.py
    torchrun --nproc-per-node 4 examples/refit_rl.py --train tp --infer whole

A small GPT learns to say even tokens. Its training copy is sharded by FSDP2 (or cut by tensor
parallelism), its inference copy is cut by tensor parallelism (or whole on every rank). After each
step ``refit()`` moves the new weights from the one to the other, in place, and the inference copy's
logits are compared with the training copy's.
"""

import argparse

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from meshwise import ranks
from meshwise.nn.gpt import GPT
from meshwise.parallel import apply, mesh
from meshwise.reshard.weights import Refit
from meshwise.spec import Layout, Model

MODEL = Model(hidden=64, layers=2, heads=4, ffn=256, vocab=64, max_seq_len=16)
PROMPTS, NEW_TOKENS = 16, 8


def build(kind: str, joined: ranks.Ranks, seed: int) -> GPT:
    """The model laid out over all ranks: whole, cut by tp, or sharded by fsdp."""
    with torch.device("meta"):
        model = GPT(MODEL)
    if kind == "whole":
        model.to_empty(device=joined.device).init_weights(seed)
        return model
    n = joined.world_size
    layout = Layout(tp=n) if kind == "tp" else Layout(dp=n, zero=3 if n > 1 else 0)
    place = mesh.build(layout, joined.device.type)
    apply.parallelize(model, place, dtype="fp32", lowering="eager", seed=seed)
    return model


def logits_of(model: GPT, tokens: Tensor) -> Tensor:
    """[batch, seq, vocab], gathered where tp splits them."""
    logits = model(tokens)
    return logits.full_tensor() if isinstance(logits, DTensor) else logits


@torch.no_grad()
def generate(model: GPT, tokens: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Greedy, or sampled with a generator; ranks with equal ones get equal tokens."""
    for _ in range(NEW_TOKENS):
        logits = logits_of(model, tokens)[:, -1]
        if generator is None:
            new = logits.argmax(-1, keepdim=True)
        else:
            new = logits.softmax(-1).multinomial(1, generator=generator)
        tokens = torch.cat([tokens, new], 1)
    return tokens


def step(model: GPT, optimizer: torch.optim.Optimizer, rollouts: Tensor) -> float:
    """One step of REINFORCE; the mean reward of the rollouts."""
    said = rollouts[:, -NEW_TOKENS:]
    reward = (said % 2 == 0).float()
    scores = logits_of(model, rollouts[:, :-1])[:, -NEW_TOKENS:].log_softmax(-1)
    chosen = scores.gather(-1, said[..., None]).squeeze(-1)
    optimizer.zero_grad()
    (-(reward - reward.mean()) * chosen).mean().backward()
    optimizer.step()
    return reward.mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--train", choices=("fsdp", "tp"), default="fsdp")
    parser.add_argument("--infer", choices=("tp", "whole"), default="tp")
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()

    joined = ranks.join()
    trained, served = build(options.train, joined, seed=0), build(options.infer, joined, seed=1)
    optimizer = torch.optim.AdamW(trained.parameters(), lr=3e-3)
    refit = Refit(trained, None, served, None, ranks=joined)
    refit()  # until now the two copies differ

    dice = torch.Generator(joined.device).manual_seed(0)
    prompts = torch.arange(PROMPTS, device=joined.device)[:, None] % MODEL.vocab
    for number in range(1, options.steps + 1):
        rollouts = generate(served, prompts, dice)
        mine = rollouts.chunk(joined.world_size)[joined.rank]
        reward = step(trained, optimizer, mine if options.train == "fsdp" else rollouts)
        moved = refit()
        with torch.no_grad():
            torch.testing.assert_close(logits_of(served, rollouts), logits_of(trained, rollouts))
        if joined.rank == 0 and number % 5 == 0:
            print(
                f"step {number}: reward {reward:.2f}, weights of version {moved.version} "
                f"in {1e3 * moved.seconds:.1f} ms"
            )
    said = generate(served, prompts[:1])[0, 1:].tolist()
    if joined.rank == 0:
        print(f"greedy: {' '.join(map(str, said))}")
    refit.close()
    joined.leave()


if __name__ == "__main__":
    main()
