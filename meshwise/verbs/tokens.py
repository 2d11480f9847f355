"""tokens: batches from a token file for your own training loop, the same under every layout.

In: a file that ``engine.data`` reads, sizes, and which share of each batch this rank computes. Out:
(inputs, targets) of one optimizer step after another, without end. Step s depends only on the seed
and s, so you can start again at any step, with any number of data ranks.
"""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from meshwise.spec import Workload

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from torch import Tensor


def tokens(
    file: Path | str,
    *,
    seq_len: int,
    global_batch_size: int,
    rank: int = 0,
    world_size: int = 1,
    seed: int = 0,
    start_step: int = 0,
) -> Iterator[tuple["Tensor", "Tensor"]]:
    """Yield (inputs, targets), int64 [global_batch_size / world_size, seq_len] each; targets are
    one token ahead of inputs.

    ``rank`` and ``world_size`` count data ranks (``Applied.data_rank``,
    ``Applied.layout.data_ranks``): tp ranks read the same. Windows lie at random places of the
    file. Arguments that do not fit raise a ValueError at once.
    """
    from meshwise.engine import data

    workload = Workload(global_batch_size=global_batch_size, seq_len=seq_len)
    if world_size < 1 or global_batch_size % world_size:
        raise ValueError(
            f"world_size = {world_size}: must divide global_batch_size = {global_batch_size}"
        )
    if not 0 <= rank < world_size:
        raise ValueError(f"rank = {rank}: must be >= 0 and < world_size = {world_size}")
    for name, value in (("seed", seed), ("start_step", start_step)):
        if value < 0:
            raise ValueError(f"{name} = {value}: must be >= 0")
    share = global_batch_size // world_size
    rows = slice(rank * share, (rank + 1) * share)
    source = data.open_tokens(str(file), seq_len)
    return _steps(source, workload, seed, start_step, rows)


def _steps(
    source: "npt.NDArray[np.integer]", workload: Workload, seed: int, start_step: int, rows: slice
) -> Iterator[tuple["Tensor", "Tensor"]]:
    import torch

    from meshwise.engine import data

    for step in itertools.count(start_step):
        found = torch.from_numpy(data.windows(source, workload, seed, step, rows))
        yield found[:, :-1], found[:, 1:]
