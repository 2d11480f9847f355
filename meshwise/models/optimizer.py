"""Describe the end of a step: what it reads, writes, sends and keeps, as ``engine`` does it.

In: a recipe, and this rank's shares of the parameters. Bytes are per element of float32 weights,
read then written, kernel by kernel; bf16 weights have half.

    grad_norm   read for the norm; then read and written, scaled
    adamw       one fused kernel: weight, gradient, both moments; all but the gradient written
    sgd         four passes (torch's foreach): momentum scaled, gradient added to it, momentum to
                gradient, that to the weight; weight decay is a fifth, into a copy of the gradient
    adafactor   ``KERNELS`` a parameter; ten read or write it whole (``engine/adafactor.py``)

Adafactor keeps a row and a column of each matrix, and a vector whole. Where axes of the mesh cut a
parameter it sends two sums of squares over each, and the row or the column that the cut splits.
"""

from collections.abc import Mapping
from math import prod
from typing import NamedTuple

from meshwise.models.graph import BYTES, elementwise
from meshwise.models.shard import Task
from meshwise.spec import Collective, Op, Recipe

MOVED = {"grad_norm": (8, 4), "adamw": (16, 12), "sgd": (28, 16), "adafactor": (64, 40)}
DECAYED = (8, 4)  # more for SGD with weight decay
KERNELS = 30
WHOLE_STATES = {"adamw": 2, "sgd": 1, "adafactor": 0}  # states as large as the parameters


class OwnPart(NamedTuple):
    """This rank's part of a parameter: its ``shape``, and for each cut of the whole its dim, the
    ranks and their stride."""

    shape: tuple[int, ...]
    cuts: tuple[tuple[int, int, int], ...]

    @property
    def elements(self) -> int:
        return prod(self.shape)

    @property
    def factors(self) -> tuple[int, ...]:
        """The elements of what Adafactor keeps: means over the last dim and over the one before."""
        if len(self.shape) < 2:
            return (self.elements,)
        return tuple(self.elements // max(1, self.shape[dim]) for dim in (-1, -2))


def state_elements(recipe: Recipe, shares: Mapping[OwnPart, int]) -> int:
    """Return the elements of the states of these shares; each stands for so many."""
    if recipe.optimizer == "adafactor":
        return sum(count * sum(share.factors) for share, count in shares.items())
    whole = sum(count * share.elements for share, count in shares.items())
    return WHOLE_STATES[recipe.optimizer] * whole


def scratch_elements(recipe: Recipe, shares: Mapping[OwnPart, int]) -> int:
    """Return the most elements that the update allocates: SGD's copies of gradients under weight
    decay; Adafactor's squares, variance and quotient of the largest share."""
    if recipe.optimizer == "sgd" and recipe.weight_decay:
        return sum(count * share.elements for share, count in shares.items())
    if recipe.optimizer == "adafactor":
        return 3 * max(share.elements for share in shares)
    return 0


def update(recipe: Recipe, shares: Mapping[OwnPart, int]) -> list[tuple[Task, int]]:
    """Return the tasks of clipping and of the update, each with how many times it runs."""
    size, kind = BYTES[recipe.weights], recipe.optimizer
    whole = sum(count * share.elements for share, count in shares.items())
    found = [(_task("grad_norm", _moves("grad_norm", whole * size)), 1)]
    found = found if recipe.max_grad_norm else []
    if kind != "adafactor":
        more = DECAYED if kind == "sgd" and recipe.weight_decay else (0, 0)
        return [*found, (_task(kind, _moves(kind, whole * size, more)), 1)]
    for share, count in shares.items():
        each = _moves(kind, share.elements * size // KERNELS)
        found.append((_task(kind, each), count * KERNELS))
        for (dim, ranks, stride), elements in _sums(share):
            op = Collective(
                kind="all_reduce", size_bytes=elements * size, group_size=ranks,
                group_stride=stride, dtype=recipe.weights, in_place=True,
            )  # fmt: skip
            found.append((_task(f"{kind}.sum{dim}", op), count))
    return found


def _sums(share: OwnPart) -> list[tuple[tuple[int, int, int], int]]:
    """Return the cut and the elements of each of Adafactor's sums over ranks."""
    found, last = [], len(share.shape) - 1
    for cut in share.cuts:
        sizes = [1, 1]  # of weights, and of the update
        if last > 0 and cut[0] == last:
            sizes += share.factors[:1]
        elif last > 0 and cut[0] == last - 1:
            columns = share.factors[1]
            sizes += [columns, columns // max(1, share.shape[-1])]  # and the mean of the rows
        found += [(cut, elements) for elements in sizes]
    return found


def _moves(kind: str, num_bytes: int, more: tuple[int, int] = (0, 0)) -> Op:
    elements = num_bytes // BYTES["fp32"]
    read, written = (each + extra for each, extra in zip(MOVED[kind], more, strict=True))
    return elementwise(kind, read * elements, written * elements, "forward")


def _task(name: str, op: Op) -> Task:
    return Task(name, op, "compute", "optimizer", "optimizer", (), ())
