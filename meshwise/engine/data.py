"""Batches of tokens or images: the same global batch at the same step under every layout.

In: a model, a workload, a seed and, if the user has one, a token file. Out: for every step inputs
and targets of some rows of the global batch. In a window of seq + 1 tokens the inputs are all but
the last token, the targets all but the first. Without a file, tokens are uniform over the
vocabulary. With a file, windows start at random places. Images are normal, their labels uniform.

Token files: ``.npy`` (one-dimensional, any integer type), ``.uint32.bin``, or ``.bin`` (raw uint16,
as nanoGPT writes them). They are mapped, not read.
"""

import itertools
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from meshwise.spec import AnyModel, WideResNet, Workload

Tokens = npt.NDArray[np.int64]
Rows = slice | npt.NDArray[np.int64]
EVERY = slice(None)


class Batches(NamedTuple):
    """Batches of some steps. ``inputs``: [steps, rows, seq] of int64 or [steps, rows, 3, height,
    width] of float32. ``targets``: [steps, rows, seq] or [steps, rows] of int64."""

    inputs: npt.NDArray[Any]
    targets: npt.NDArray[np.int64]

    def at(self, positions: npt.NDArray[np.int64]) -> "Batches":
        """Pick the tokens at these positions, for ranks that share sequences."""
        return Batches(self.inputs[:, :, positions], self.targets[:, :, positions])


def batches(
    model: AnyModel,
    workload: Workload,
    *,
    steps: int,
    seed: int,
    file: Path | str | None,
    rows: Rows,
    first: int = 0,
) -> Batches:
    """Make ``rows`` of the global batches of ``steps`` steps, from step ``first`` on.

    Raises a ValueError if the file is missing, too short or holds a token outside the vocabulary.
    """
    if isinstance(model, WideResNet):
        if file is not None:
            raise ValueError(f"data = {file!r}: images are random numbers here; leave it out")
        return _images(model, workload, range(first, first + steps), seed, rows)
    source = None if file is None else open_tokens(file, workload.seq_len)
    numbers = range(first, first + steps)
    found = np.stack([_batch(workload, model.vocab, seed, step, source) for step in numbers])
    low, high = int(found.min()), int(found.max())
    if low < 0 or high >= model.vocab:
        raise ValueError(
            f"{file} holds token {low if low < 0 else high}, but the model's vocab is "
            f"{model.vocab}; use a file of its tokenizer or a model with a larger vocab"
        )
    mine = found[:, rows]
    return Batches(mine[:, :, :-1], mine[:, :, 1:])


def _images(model: WideResNet, workload: Workload, steps: range, seed: int, rows: Rows) -> Batches:
    """Make each image with its own generator, so that a rank makes only its rows."""
    numbers = np.arange(workload.global_batch_size)[rows]
    shape = (3, model.image_size, model.image_size)
    inputs = np.empty((len(steps), len(numbers), *shape), dtype=np.float32)
    targets = np.empty((len(steps), len(numbers)), dtype=np.int64)
    for (at, step), (place, number) in itertools.product(enumerate(steps), enumerate(numbers)):
        random = np.random.default_rng((seed, step, int(number)))
        inputs[at, place] = random.standard_normal(shape, dtype=np.float32)
        targets[at, place] = random.integers(model.num_classes)
    return Batches(inputs, targets)


def open_tokens(file: Path | str, seq_len: int) -> npt.NDArray[np.integer]:
    """Map a token file that holds at least one window."""
    path = Path(file)
    if not path.is_file():
        raise ValueError(f"data = {file!r}: no such file; name a .bin or .npy file of tokens")
    tokens = _map(path)
    if len(tokens) < seq_len + 1:
        raise ValueError(
            f"{path} holds {len(tokens)} tokens, but one sequence needs {seq_len + 1}; "
            "use a longer file or a shorter seq_len"
        )
    return tokens


def _map(path: Path) -> npt.NDArray[np.integer]:
    if path.suffix == ".npy":
        try:
            tokens = np.load(path, mmap_mode="r", allow_pickle=False)
        except Exception:  # numpy reads a header as Python text: a damaged one raises anything
            tokens = None
        if not isinstance(tokens, np.ndarray):
            raise ValueError(f"{path} is not an array; write it with numpy.save")
        if tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer):
            raise ValueError(
                f"{path} holds {tokens.dtype} of shape {tokens.shape}; "
                "write a one-dimensional integer array"
            )
        return tokens
    if path.suffix != ".bin":
        raise ValueError(f"{path} ends in {path.suffix!r}; name a .bin or .npy file of tokens")
    dtype = np.dtype(np.uint32 if path.name.endswith(".uint32.bin") else np.uint16)
    size_bytes = path.stat().st_size
    if size_bytes == 0 or size_bytes % dtype.itemsize:
        raise ValueError(f"{path} is {size_bytes} bytes, which is not a whole number of {dtype}")
    return np.memmap(path, dtype, mode="r")


def _batch(
    workload: Workload, vocab: int, seed: int, step: int, source: npt.NDArray[np.integer] | None
) -> Tokens:
    if source is not None:
        return windows(source, workload, seed, step)
    shape = (workload.global_batch_size, workload.seq_len + 1)
    return np.random.default_rng((seed, step)).integers(vocab, size=shape)


def windows(
    source: npt.NDArray[np.integer], workload: Workload, seed: int, step: int, rows: Rows = EVERY
) -> Tokens:
    """Cut some rows of a step's global batch from random places of a token file."""
    size = workload.global_batch_size
    starts = np.random.default_rng((seed, step)).integers(len(source) - workload.seq_len, size=size)
    cut = [source[start : start + workload.seq_len + 1] for start in starts[rows]]
    return np.stack(cut).astype(np.int64)
