"""Compare three steps of a plan in fp32 with the same steps on one device.

In: a rank's job and its data. Out: the largest relative difference of the losses. Both sides start
from the same weights and see the same tokens. The one device runs the whole global batch in
microbatches. On a CPU sums differ by rounding only; GPU kernels add in different orders.

Images are compared in float64. Sometimes an input of ReLU or pooling is within float32's rounding
of a point where the gradient jumps. A different order of sums then changes gradients by 1e-2, and
with them AdamW's first steps.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F

from meshwise import timing
from meshwise.engine import step
from meshwise.engine.data import Batches, Rows
from meshwise.engine.frame import RankJob
from meshwise.spec import WideResNet

NUM_STEPS = 3
TOLERANCE = {"cpu": 1e-5, "cuda": 1e-4}  # the largest relative difference due to rounding


def loss_error(job: RankJob, batches: Callable[[int, Rows], Batches]) -> float:
    """Return max |loss / loss on one device - 1| over three steps, the same on every rank.

    ``batches(steps, rows)`` returns the run's batches. Rank 0 needs memory for the whole model in
    fp32 (images: fp64). If it lacks it, all ranks raise ``torch.OutOfMemoryError``.
    """
    ranks, plan, seed = job.ranks, job.plan, job.request.asked.seed

    def losses(training: step.TrainingState) -> list[float]:
        is_of_images = isinstance(plan.model, WideResNet)
        return _losses(in_float64(training) if is_of_images else training)

    def split() -> list[float]:
        ranks.at("check: the plan")
        mine = batches(NUM_STEPS, step.rows(plan.layout, ranks.rank))
        made = step.prepare(plan, job.place, mine, ranks.device, dtype="fp32", seed=seed)
        return losses(made)

    def whole() -> list[float]:
        if ranks.rank != 0:
            return []
        ranks.at("check: one device")
        everything = batches(NUM_STEPS, slice(None))
        return losses(step.prepare_alone(plan, everything, ranks.device, seed=seed))

    mine = job.together("the check of the plan", split, compiling=True)
    timing.free(ranks.device)
    reference = job.together("the check on one device", whole)
    replies = ranks.gather((mine, reference))
    reports = [split for split, _ in replies if split]
    means = np.mean(np.array(reports, dtype=float), 0)  # JSON has null for what is not finite
    expected = np.array(replies[0][1], dtype=float)
    return float(np.max(np.abs(means / expected - 1)))  # NaN if any is, unlike Python's max()


def in_float64(training: step.TrainingState) -> step.TrainingState:
    """Turn a training of images, made in fp32 by ``step.prepare``, into float64."""
    for stage in training.pipeline.stages.values():
        stage.module.double()  # in place, so that the optimizer has the same parameters
    return replace(
        training,
        pipeline=replace(training.pipeline, dtype=torch.float64),
        inputs=training.inputs.double(),
        loss=F.cross_entropy,
    )


def _losses(training: step.TrainingState) -> list[float]:
    """Return the loss of every step on ranks with the last stage, [] on others."""
    losses = [float(step.run(training, index)) for index in range(NUM_STEPS)]
    return losses if training.reports else []
