"""Sizes of messages and shapes of products as users write them. No torch."""

import math
import re
from collections.abc import Sequence
from itertools import product

from meshwise.spec import DTYPE_BYTES, Collective
from meshwise.spec.op import WHOLE, CollectiveKind, SentDtype
from meshwise.units import parse_bytes

TABLES = re.compile(r"(\d{1,18}),(\d{1,18}(?:-\d{1,18})*),(\d{1,18})")
VECTOR_BYTES = 16  # parts of odd sizes take up to 2.3 times as long (benchmarks/2026-11-27-curves)
MOST_RANKS = 2048  # their matrix of splits has 4 million elements
_LARGEST = 2**50
_MOST = 1000  # most sizes in a range
_MOST_SHAPES = 10_000
_DIM = re.compile(r"(\d{1,12})(?::(\d{1,12}):(\d{1,12}))?", re.ASCII)


def divisible(kind: CollectiveKind, size_bytes: int, group_size: int, dtype: SentDtype) -> int:
    """Return the most bytes up to ``size_bytes`` that divide among the group as the kind needs, in
    parts that NCCL's vectors divide, if there are so many bytes."""
    parts = 1 if kind in WHOLE else group_size
    aligned = size_bytes - size_bytes % (VECTOR_BYTES * parts)
    return aligned or size_bytes - size_bytes % (DTYPE_BYTES[dtype] * parts)


def parse_sizes(given: str | float) -> tuple[int, ...]:
    """Return sizes in bytes, ascending. ``8..8G:x2`` doubles from 8 bytes to 8 GiB, ``1M..4M:+1M``
    adds, and ``64K,1M`` lists. A range without a step doubles; ``8-8G`` is a range too."""
    text, found = str(given), set[int]()
    for item in text.split(","):
        if not item.strip():
            raise ValueError(
                f"sizes = {text!r}: a size is missing; write them as 64K,1M or 8..8G:x2"
            )
        low, dots, rest = re.sub(r"^(\s*\w+)-", r"\1..", item).partition("..")
        if not dots:
            found.add(parse_bytes(item, "sizes"))
            continue
        high, _, step = rest.partition(":")
        found.update(
            _steps(text, parse_bytes(low, "sizes"), parse_bytes(high, "sizes"), step or "x2")
        )
    if min(found) < 1 or max(found) > _LARGEST:
        raise ValueError(f"sizes = {text!r}: every size must be 1 byte to 1024T")
    return tuple(sorted(found))


def _steps(text: str, low: int, high: int, step: str) -> list[int]:
    factor = float(step[1:]) if re.fullmatch(r"x\d+(\.\d+)?", step) else 0.0
    added = parse_bytes(step[1:], "sizes") if step.startswith("+") else 0
    if low > high or low < 1 or (factor <= 1 and added < 1):
        raise ValueError(
            f"sizes = {text!r}: a range is LOW..HIGH:xFACTOR or LOW..HIGH:+BYTES with "
            "1 <= LOW <= HIGH and a factor above 1, as 8..8G:x2"
        )
    found, least = [low], max(added, 1)
    if added and (high - low) / added > _MOST:
        raise ValueError(f"sizes = {text!r}: more than {_MOST} sizes; take a larger step")
    while (larger := max(int(found[-1] * factor), found[-1] + least)) <= high:
        found.append(larger)
    return found


def parse_shapes(given: Sequence[str]) -> list[tuple[int, int, int]]:
    """Return (m, n, k) of every ``M,N,K``, each dim a number or ``START:STOP:STEP``. A range ends
    before STOP and begins at STEP if START is 0, as mamf-finder's do; several give all products."""
    ranges = [[_dim(text, dim) for dim in text.split(",")] for text in given]
    for text, dims in zip(given, ranges, strict=True):
        if len(dims) != 3:
            raise ValueError(
                f"shape = {text!r}: must be M,N,K, as 4096,4096,4096 or 4096:8192:1024,4096,4096"
            )
    if (count := sum(math.prod(map(len, dims)) for dims in ranges)) > _MOST_SHAPES:
        raise ValueError(
            f"shape = {' '.join(given)!r}: {count:,} shapes, must be <= {_MOST_SHAPES:,}; take "
            "larger steps"
        )
    return [(m, n, k) for dims in ranges for m, n, k in product(*dims)]


def _dim(text: str, dim: str) -> range:
    found = _DIM.fullmatch(dim.strip())
    start, stop, step = map(int, found.groups("0")) if found else (0, 0, 0)
    if found and not found[2]:
        stop, step = start + 1, 1
    sizes = range(start or step, stop, step or 1)
    if not sizes or not (start or (found and found[2])) or not step:
        raise ValueError(
            f"shape = {text!r}: {dim!r} must be a number >= 1 or START:STOP:STEP with STEP >= 1 "
            "and STOP > START, as 4096:8192:1024"
        )
    return sizes


def embedding_splits(text: str, field: str) -> tuple[tuple[int, ...], ...]:
    """Return the bytes each rank sends to each, from ``BATCH,T0-T1-...,DIM``. Rank i looks up T_i
    tables of fp32 rows for the whole batch and sends each rank its share of the batch. ``field``:
    the option or column that holds the text, for errors."""
    found = TABLES.fullmatch(text)
    if found is None or not int(found[1]) * int(found[3]):
        told = text if len(text) <= 60 else f"{text[:60]}..."
        raise ValueError(f"{field} = {told!r}: must be BATCH,T0-T1-...,DIM, as 2048,2-3-3-5,64")
    batch, tables, dim = int(found[1]), [int(t) for t in found[2].split("-")], int(found[3])
    if len(tables) > MOST_RANKS:
        raise ValueError(f"{field} names {len(tables)} ranks: must be <= {MOST_RANKS}")
    if batch % len(tables):
        raise ValueError(f"batch = {batch}: is not divisible by {len(tables)} ranks")
    size = DTYPE_BYTES["fp32"]
    return tuple((batch // len(tables) * t * dim * size,) * len(tables) for t in tables)


def uneven(splits: tuple[tuple[int, ...], ...], group_size: int, dtype: SentDtype) -> Collective:
    """Return the all_to_all_v in which ranks send each other these bytes. Its size is the most that
    a rank sends or receives."""
    sent, received = map(sum, splits), map(sum, zip(*splits, strict=False))
    return Collective(
        kind="all_to_all_v",
        size_bytes=max([*sent, *received]),
        group_size=group_size,
        dtype=dtype,
        splits=splits,
    )
