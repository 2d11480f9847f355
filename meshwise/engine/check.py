"""Compares three steps of a plan in fp32 with the same steps on one device.

In: the plan, this rank's place, its data. Out: the largest relative difference of the losses. Both
sides start from the same weights and see the same tokens; one device takes the whole global
batch in microbatches. On a CPU sums differ by rounding only; GPU kernels add in other orders.

Images are compared in float64: now and then one of the many inputs of ReLU and pooling is within
float32's rounding of where its gradient jumps; another order of sums then changes gradients by
1e-2, and AdamW's first steps with them.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F

from meshwise import timing
from meshwise.engine import step
from meshwise.engine.agree import together
from meshwise.engine.data import Batches, Rows
from meshwise.parallel.mesh import Place
from meshwise.ranks import Ranks
from meshwise.spec import Plan, WideResNet

NUM_STEPS = 3
TOLERANCE = {"cpu": 1e-5, "cuda": 1e-4}  # the largest relative difference that is rounding


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
    fp32 (images: fp64); ``torch.OutOfMemoryError`` is raised on all ranks when it has not.
    """

    def losses(training: step.Training) -> list[float]:
        is_of_images = isinstance(plan.model, WideResNet)
        return _losses(in_float64(training) if is_of_images else training)

    def split() -> list[float]:
        ranks.at("check: the plan")
        mine = batches(NUM_STEPS, step.rows(plan.layout, ranks.rank))
        device, dtype = ranks.device, "fp32"
        return losses(step.prepare(plan, place, mine, device, dtype=dtype, seed=seed))

    def whole() -> list[float]:
        if ranks.rank != 0:
            return []
        ranks.at("check: one device")
        everything = batches(NUM_STEPS, slice(None))
        return losses(step.prepare_alone(plan, everything, ranks.device, seed=seed))

    compiling = plan.lowering == "compiled"
    mine = together(ranks, place, "the check of the plan", split, compiling=compiling)
    timing.free(ranks.device)
    reference = together(ranks, place, "the check on one device", whole)
    replies = ranks.gather((mine, reference))
    reports = [split for split, _ in replies if split]
    means = np.mean(np.array(reports, dtype=float), 0)  # what is not finite travelled as null
    expected = np.array(replies[0][1], dtype=float)
    return float(np.max(np.abs(means / expected - 1)))  # NaN if any is, unlike Python's max()


def in_float64(training: step.Training) -> step.Training:
    """A training of images as ``step.prepare`` makes it in fp32, in float64 from now on."""
    for stage in training.pipeline.stages.values():
        stage.module.double()  # in place, so that the optimizer has the same parameters
    return replace(
        training,
        pipeline=replace(training.pipeline, dtype=torch.float64),
        inputs=training.inputs.double(),
        loss=F.cross_entropy,
    )


def _losses(training: step.Training) -> list[float]:
    """The losses of every step, where the last stage is; elsewhere none."""
    losses = [float(step.run(training, index)) for index in range(NUM_STEPS)]
    return losses if training.reports else []
