"""Batches of tokens: the same global batch at the same step under every layout.

In: a workload, a vocabulary, a seed and, if the user has one, a token file. Out: int64 arrays
[global_batch, seq + 1]; the inputs are all columns but the last, the targets all but the first.
Without a file tokens are uniform over the vocabulary. With one they are windows at random places.

Token files: ``.npy`` (one-dimensional, any integer type), ``.uint32.bin``, or ``.bin`` (raw
uint16, as nanoGPT writes them). They are mapped, not read.
"""

from pathlib import Path

import numpy as np
import numpy.typing as npt

from meshwise.spec import Workload

Tokens = npt.NDArray[np.int64]
Rows = slice | npt.NDArray[np.int64]


def batches(
    workload: Workload, *, vocab: int, steps: int, seed: int, file: str | None, rows: Rows
) -> Tokens:
    """[steps, rows, seq + 1]: rows ``rows`` of the global batch of every step.

    A file that is missing, too short or holds a token outside the vocabulary is a ValueError.
    """
    source = None if file is None else open_tokens(file, workload.seq_len)
    found = np.stack([_batch(workload, vocab, seed, step, source) for step in range(steps)])
    low, high = int(found.min()), int(found.max())
    if low < 0 or high >= vocab:
        raise ValueError(
            f"{file} holds token {low if low < 0 else high}, but the model's vocab is {vocab}; "
            "use a file of its tokenizer or a model with a larger vocab"
        )
    return found[:, rows]


def open_tokens(file: str, seq_len: int) -> npt.NDArray[np.integer]:
    """Map a token file that holds at least one window."""
    path = Path(file)
    if not path.is_file():
        raise ValueError(f"data = {file!r}: no such file; name a .bin or .npy file of tokens")
    tokens = _map(path)
    if len(tokens) < seq_len + 1:
        raise ValueError(
            f"{path} holds {len(tokens)} tokens, but one sequence needs {seq_len + 1}; "
            "use a longer file or a shorter --seq-len"
        )
    return tokens


def _map(path: Path) -> npt.NDArray[np.integer]:
    if path.suffix == ".npy":
        try:
            tokens = np.load(path, mmap_mode="r", allow_pickle=False)
        except (ValueError, EOFError):
            raise ValueError(f"{path} is not an array; write it with numpy.save") from None
        if tokens.ndim != 1 or not np.issubdtype(tokens.dtype, np.integer):
            raise ValueError(
                f"{path} holds {tokens.dtype} of shape {tokens.shape}; "
                "write a one-dimensional integer array"
            )
        return tokens  # type: ignore[no-any-return]
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
    random = np.random.default_rng((seed, step))
    shape = (workload.global_batch_size, workload.seq_len + 1)
    if source is None:
        return random.integers(vocab, size=shape)
    starts = random.integers(len(source) - workload.seq_len, size=shape[0])
    return np.stack([source[start : start + shape[1]] for start in starts]).astype(np.int64)
