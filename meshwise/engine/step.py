"""One training step of a laid-out GPT: microbatches, clipping, AdamW. Nothing waits for the device.

Every rank holds its rows of the global batch; microbatches are taken from them in order. The loss
of each is divided by their number, so gradients are means over the global batch and do not depend
on the layout.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from meshwise.engine import data, optimizer
from meshwise.nn.gpt import GPT, loss
from meshwise.parallel import apply, tensor
from meshwise.parallel.data import before_microbatch
from meshwise.spec import Layout, Model, Plan


@dataclass(frozen=True)
class Training:
    """A model with its optimizer and this rank's batches on the device."""

    layout: Layout
    model: GPT
    optimizer: torch.optim.Optimizer
    loss: apply.Loss
    inputs: Tensor  # [steps, rows, seq]
    targets: Tensor
    max_grad_norm: float

    def tensors(self) -> list[Tensor]:
        """Everything on the device between two steps."""
        states = (value for state in self.optimizer.state.values() for value in state.values())
        kept = [value for value in states if isinstance(value, Tensor)]
        return [*self.model.parameters(), *kept, self.inputs, self.targets]


def rows(layout: Layout, rank: int) -> slice:
    """Which rows of the global batch a rank computes; the ranks of a tp group share them."""
    count = layout.microbatch_size * layout.num_microbatches
    first = rank // layout.tp * count
    return slice(first, first + count)


def prepare(
    plan: Plan,
    mesh: DeviceMesh,
    tokens: data.Tokens,
    device: torch.device,
    *,
    dtype: str,
    seed: int,
    max_grad_norm: float,
) -> Training:
    """Build a rank's share of the plan's model for its rows of ``tokens`` [steps, rows, seq+1]."""
    layout = plan.layout
    tensor.check(plan.model, plan.workload, layout)
    model = apply.parallelize(
        _on_meta(plan.model), layout, mesh, dtype=dtype, lowering=plan.lowering, seed=seed
    )
    loss_function = apply.loss_function(layout, plan.lowering)
    return _training(layout, model, loss_function, tokens, device, max_grad_norm)


def prepare_alone(
    plan: Plan, tokens: data.Tokens, device: torch.device, *, seed: int, max_grad_norm: float
) -> Training:
    """The same model and workload in fp32 on one device, in plain torch."""
    size = plan.layout.microbatch_size
    count = plan.workload.global_batch_size // size
    model = _on_meta(plan.model).to_empty(device=device)
    model.tie()
    model.init_weights(seed)
    layout = Layout(microbatch_size=size, num_microbatches=count)
    return _training(layout, model, loss, tokens, device, max_grad_norm)


def _on_meta(model: Model) -> GPT:
    with torch.device("meta"):
        return GPT(model)


def _training(
    layout: Layout,
    model: GPT,
    loss_function: apply.Loss,
    tokens: data.Tokens,
    device: torch.device,
    max_grad_norm: float,
) -> Training:
    return Training(
        layout=layout,
        model=model,
        optimizer=optimizer.adamw(model.parameters()),
        loss=loss_function,
        inputs=_on(device, tokens[:, :, :-1]),
        targets=_on(device, tokens[:, :, 1:]),
        max_grad_norm=max_grad_norm,
    )


def _on(device: torch.device, tokens: npt.NDArray[np.int64]) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(tokens)).to(device)


def run(training: Training, index: int) -> Tensor:
    """One optimizer step on batch ``index``; returns this rank's mean loss, on the device."""
    layout, model = training.layout, training.model
    size, count = layout.microbatch_size, layout.num_microbatches
    inputs = training.inputs[index].split(size)
    targets = training.targets[index].split(size)
    total = torch.zeros((), device=training.inputs.device)
    for number in range(count):
        before_microbatch(model, layout, last=number == count - 1)
        with apply.loss_context(layout):
            part = training.loss(model(inputs[number]), targets[number]) / count
            part.backward()
        total += part.detach()
    optimizer.clip_gradients(model.parameters(), training.max_grad_norm)
    training.optimizer.step()
    training.optimizer.zero_grad()
    return total
