"""One training step of a laid-out GPT: microbatches, clipping, AdamW. Nothing waits for the device.

Microbatch m of a step is rows m * microbatch_rows on of the global batch, cut evenly over dp. The
loss of each is divided by their number, so gradients are means over the global batch and do not
depend on the layout.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from meshwise import schedule
from meshwise.engine import data, optimizer
from meshwise.nn.gpt import GPT, loss
from meshwise.parallel import apply, pipeline, tensor
from meshwise.parallel.mesh import Place
from meshwise.parallel.pipeline import Pipeline
from meshwise.spec import Layout, Model, Plan


@dataclass(frozen=True)
class Training:
    """A rank's stages with their optimizer and its batches on the device."""

    pipeline: Pipeline
    optimizer: torch.optim.Optimizer
    loss: apply.Loss
    inputs: Tensor  # [steps, rows, seq]
    targets: Tensor
    max_grad_norm: float
    alone: bool  # no other rank takes part

    @property
    def reports(self) -> bool:
        """Whether the loss is known here."""
        return any(stage.module.last for stage in self.pipeline.stages.values())

    def parameters(self) -> list[nn.Parameter]:
        stages = self.pipeline.stages.values()
        return [parameter for stage in stages for parameter in stage.module.parameters()]

    def tensors(self) -> list[Tensor]:
        """Everything on the device between two steps."""
        states = (value for state in self.optimizer.state.values() for value in state.values())
        kept = [value for value in states if isinstance(value, Tensor)]
        return [*self.parameters(), *kept, self.inputs, self.targets]


def rows(layout: Layout, rank: int) -> npt.NDArray[np.int64]:
    """Which rows of the global batch a rank computes, microbatch by microbatch; the ranks of a tp
    group share them."""
    pipeline_rank = layout.pipeline_rank_of(rank)
    inside, first = layout.of_rank(pipeline_rank), layout.devices_of(pipeline_rank).start
    share = (rank - first) // inside.tp * inside.microbatch_size
    starts = np.arange(layout.num_microbatches) * layout.microbatch_rows + share
    found: npt.NDArray[np.int64] = (starts[:, None] + np.arange(inside.microbatch_size)).ravel()
    return found


def prepare(
    plan: Plan,
    place: Place,
    tokens: data.Tokens,
    device: torch.device,
    *,
    dtype: str,
    seed: int,
    max_grad_norm: float,
) -> Training:
    """Build a rank's share of the plan's model for its rows of ``tokens`` [steps, rows, seq+1]."""
    layout, inside = plan.layout, place.layout
    tensor.check(plan.model, plan.workload, inside)

    def make(layers: range) -> GPT:
        return apply.parallelize(
            _on_meta(plan.model, layers),
            inside,
            place.mesh,
            dtype=dtype,
            lowering=plan.lowering,
            seed=seed,
        )

    table = schedule.table(
        layout.schedule, layout.pp, layout.stages_per_rank, layout.num_microbatches
    )
    built = pipeline.build(
        place,
        layout,
        plan.model,
        plan.workload,
        table[place.pipeline_rank],
        make,
        dtype=torch.bfloat16 if dtype == "bf16" else torch.float32,
        device=device,
    )
    loss_function = apply.loss_function(inside, plan.lowering)
    return _training(built, loss_function, tokens, max_grad_norm, alone=layout.num_devices == 1)


def prepare_alone(
    plan: Plan, tokens: data.Tokens, device: torch.device, *, seed: int, max_grad_norm: float
) -> Training:
    """The same model and workload in fp32 on one device, in plain torch."""
    model = _on_meta(plan.model, None).to_empty(device=device)
    model.tie()
    model.init_weights(seed)
    rows = plan.layout.microbatch_size
    count = plan.workload.global_batch_size // rows
    built = pipeline.alone(model, Layout(microbatch_size=rows, num_microbatches=count), device)
    return _training(built, loss, tokens, max_grad_norm, alone=True)


def _on_meta(model: Model, layers: range | None) -> GPT:
    with torch.device("meta"):
        return GPT(model, layers)


def _training(
    built: Pipeline,
    loss_function: apply.Loss,
    tokens: data.Tokens,
    max_grad_norm: float,
    *,
    alone: bool,
) -> Training:
    stages = built.stages.values()
    return Training(
        pipeline=built,
        optimizer=optimizer.adamw(p for stage in stages for p in stage.module.parameters()),
        loss=loss_function,
        inputs=_on(built.device, tokens[:, :, :-1]),
        targets=_on(built.device, tokens[:, :, 1:]),
        max_grad_norm=max_grad_norm,
        alone=alone,
    )


def _on(device: torch.device, tokens: npt.NDArray[np.int64]) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(tokens)).to(device)


def run(training: Training, index: int) -> Tensor:
    """One optimizer step on batch ``index``; this rank's mean loss, on the device (0 where the
    last stage is not)."""
    built = training.pipeline
    size = built.layout.microbatch_size
    inputs, targets = (batch[index].split(size) for batch in (training.inputs, training.targets))
    with apply.loss_context(built.layout):
        total = pipeline.run(built, inputs, targets, training.loss)
    optimizer.clip_gradients(
        training.parameters(),
        training.max_grad_norm,
        alone=training.alone,
        copy=built.tied.copy if built.tied else None,
    )
    training.optimizer.step()
    training.optimizer.zero_grad()
    return total
