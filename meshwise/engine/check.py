"""Is the plan right? Three steps of it in fp32 against the same steps on one device.

In: the plan, this rank's place, its data. Out: the largest relative difference of the losses. Both
sides start from the same weights and see the same tokens; one device takes the whole global
batch in microbatches. On a CPU sums differ by rounding only; GPU kernels add in other orders.
"""

import gc
from collections.abc import Callable

import numpy as np
import torch

from meshwise.engine import step
from meshwise.engine.agree import together
from meshwise.engine.data import Batches, Rows
from meshwise.parallel.mesh import Place
from meshwise.ranks import Ranks
from meshwise.spec import AnyModel, Plan, WideResNet

NUM_STEPS = 3
TOLERANCE = {"cpu": 1e-5, "cuda": 1e-4}
# Where an input of a ReLU or of a pooling lies within rounding of its kink, the order of a sum
# decides a gradient: in fp32 the plain module itself is that far from its float64.
OF_IMAGES = 1e-3


def tolerance(model: AnyModel, device_type: str) -> float:
    """The largest relative difference of losses that is rounding."""
    return OF_IMAGES if isinstance(model, WideResNet) else TOLERANCE[device_type]


def loss_error(
    ranks: Ranks,
    plan: Plan,
    place: Place,
    batches: Callable[[int, Rows], Batches],
    *,
    seed: int,
) -> float:
    """max |loss / loss on one device - 1| over three steps, the same number on every rank.

    ``batches(steps, rows)`` are those of the run. Rank 0 needs the memory for the whole model in
    fp32; ``torch.OutOfMemoryError`` is raised on all ranks when it has not.
    """

    def split() -> list[float]:
        ranks.at("check: the plan in fp32")
        mine = batches(NUM_STEPS, step.rows(plan.layout, ranks.rank))
        device, dtype = ranks.device, "fp32"
        return _losses(step.prepare(plan, place, mine, device, dtype=dtype, seed=seed))

    def whole() -> list[float]:
        if ranks.rank != 0:
            return []
        ranks.at("check: one device")
        everything = batches(NUM_STEPS, slice(None))
        return _losses(step.prepare_alone(plan, everything, ranks.device, seed=seed))

    compiling = plan.lowering == "compiled"
    mine = together(ranks, place, "the check of the plan", split, compiling=compiling)
    free(ranks.device)
    reference = together(ranks, place, "the check on one device", whole)
    replies = ranks.gather((mine, reference))
    reports = [split for split, _ in replies if split]
    means = np.mean(np.array(reports, dtype=float), 0)  # what is not finite travelled as null
    expected = np.array(replies[0][1], dtype=float)
    return float(np.max(np.abs(means / expected - 1)))  # NaN if any is, unlike Python's max()


def _losses(training: step.Training) -> list[float]:
    """Of every step, where the last stage is; elsewhere none."""
    losses = [float(step.run(training, index)) for index in range(NUM_STEPS)]
    return losses if training.reports else []


def free(device: torch.device) -> None:
    """Give what dropped models held back to the device."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
