"""One process of two jobs that meet and refit: python -m tests.faults.apart JOB ADDRESS REFITS."""

import os
import sys

import torch

from meshwise import Refit, WeightLayout
from meshwise.jobs import join_at
from meshwise.models.catalogue import find
from meshwise.reshard.holdings import buffers, holdings

TIMEOUT_S = 15.0


def main(job: str, address: str, refits: str) -> None:
    here = join_at(address, job, ["trainer", "server"], timeout_s=TIMEOUT_S, setup_s=2 * TIMEOUT_S)
    model = find("gpt-30m")
    train = holdings(model, WeightLayout(tp=2, order="megatron"))
    serve = holdings(model, WeightLayout(first_rank=2, order="engine"))
    plan = train if job == "trainer" else serve
    weights = {
        name: torch.full(shape, 1.0 + here.rank, dtype=torch.bfloat16)
        for name, (shape, _) in buffers(plan, here.rank).items()
    }
    source, destination = (weights, None) if job == "trainer" else (None, weights)
    refit = Refit(source, train, destination, serve, ranks=here)
    for _ in range(int(refits)):
        refit()
    right = job == "trainer" or all((w == 1).logical_or(w == 2).all() for w in weights.values())
    here.leave()
    os._exit(0 if right else 5)


if __name__ == "__main__":
    main(*sys.argv[1:])
