"""Training in float64, which the engine itself does not offer.

Now and then one of the many inputs of ReLU and pooling is within float32's rounding of where its
gradient jumps, and then another order of sums changes gradients by 1e-2. So Wide-ResNets are
compared in float64.
"""

from dataclasses import replace

import torch
import torch.nn.functional as F


def in_float64(training):
    """A training of images as ``step.prepare`` makes it in fp32, in float64 from now on."""
    for stage in training.pipeline.stages.values():
        stage.module.double()  # in place, so that the optimizer has the same parameters
    return replace(
        training,
        pipeline=replace(training.pipeline, dtype=torch.float64),
        inputs=training.inputs.double(),
        loss=F.cross_entropy,
    )
