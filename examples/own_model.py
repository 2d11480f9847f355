"""A model of your own, laid out over ranks by a map from names to strategies.

    torchrun --nproc-per-node 2 examples/own_model.py
    torchrun --nproc-per-node 4 examples/own_model.py

On 2 ranks by tp, on 4 by tp and FSDP. The map says how tp cuts each weight; what it leaves out is
replicated, and the report says so. The loop is plain torch, and its losses are the same on both.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import meshwise
from meshwise import ranks

STRATEGIES = {"words": "vocab", "wide": "col", "slim": "row", "guess": "vocab"}


class Guesser(nn.Module):
    """Guesses the next token from this one."""

    def __init__(self, vocab: int, width: int) -> None:
        super().__init__()
        self.words = nn.Embedding(vocab, width)
        self.calm = nn.LayerNorm(width)
        self.wide, self.slim = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.guess = nn.Linear(width, vocab)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        x = x + self.slim(F.gelu(self.wide(self.calm(x))))
        return self.guess(x)  # type: ignore[no-any-return]


def main() -> None:
    joined = ranks.join()
    dp = joined.world_size // 2
    layout = meshwise.Layout(dp=dp, tp=2, zero=3 if dp > 1 else 0)
    torch.manual_seed(0)  # the same weights on every rank
    model = Guesser(vocab=97, width=64)
    applied = meshwise.apply(layout, model, strategies=STRATEGIES)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    if joined.rank == 0:
        print(applied)

    for step in range(1, 21):
        starts = torch.randint(97, (8, 1), generator=torch.Generator().manual_seed(step))
        rows = (starts + 7 * torch.arange(33)) % 97  # the next token is this one plus 7
        mine = rows.chunk(dp)[applied.data_rank].to(joined.device)
        loss = F.cross_entropy(model(mine[:, :-1]).flatten(0, 1), mine[:, 1:].flatten())
        loss.backward()
        applied.clip_gradients(1.0)
        optimizer.step()
        optimizer.zero_grad()
        mean = sum(joined.gather(loss.item())) / joined.world_size
        if joined.rank == 0:
            print(f"step {step}: loss {mean:.4f}")
    joined.leave()


if __name__ == "__main__":
    main()
