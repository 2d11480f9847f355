"""Run one training step of a laid-out model: microbatches, clipping, optimizer. The host never
waits for the device.

Microbatch m of a step starts at row m * microbatch_rows of the global batch. Its rows are cut
evenly over dp, and each sequence over cp. Each microbatch's loss is divided by the number of
microbatches, so gradients are means over the global batch and do not depend on the layout.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from meshwise import schedule
from meshwise.attention import shards
from meshwise.attention.dense import ring_attention
from meshwise.engine import data, optimizer
from meshwise.models import placement
from meshwise.nn import ModelStage, build
from meshwise.nn.experts import MoE
from meshwise.nn.stage import Attend, causal, cross_entropy
from meshwise.parallel import apply, pipeline
from meshwise.parallel.mesh import MeshPlace
from meshwise.parallel.pipeline import Pipeline
from meshwise.spec import AnyModel, Layout, Plan, Recipe


@dataclass(frozen=True)
class TrainingState:
    """A rank's stages with their optimizer, and its batches on the device."""

    pipeline: Pipeline
    optimizer: torch.optim.Optimizer
    loss: apply.Loss
    inputs: Tensor  # [steps, rows, seq], or images [steps, rows, channels, height, width]
    targets: Tensor  # [steps, rows, seq] or [steps, rows]
    max_grad_norm: float  # 0: no clipping
    alone: bool  # no other rank takes part
    norm: Tensor  # of the last step's gradients if they are clipped; nan if its loss is not finite

    @property
    def reports(self) -> bool:
        """Whether this rank computes the loss."""
        return any(stage.module.last for stage in self.pipeline.stages.values())

    def parameters(self) -> list[nn.Parameter]:
        stages = self.pipeline.stages.values()
        return [parameter for stage in stages for parameter in stage.module.parameters()]

    def tensors(self) -> list[Tensor]:
        """Return all tensors on the device between two steps."""
        states = (value for state in self.optimizer.state.values() for value in state.values())
        kept = [value for value in states if isinstance(value, Tensor)]
        return [*self.parameters(), *kept, self.inputs, self.targets]


def rows(layout: Layout, rank: int) -> npt.NDArray[np.int64]:
    """Return the rows of the global batch that a rank computes, microbatch by microbatch. Ranks of
    one tp group, and of one cp group, have the same rows."""
    pipeline_rank = layout.pipeline_rank_of(rank)
    inside, first = layout.of_rank(pipeline_rank), layout.devices_of(pipeline_rank).start
    share = (rank - first) // (inside.tp * inside.cp) * inside.microbatch_size
    starts = np.arange(layout.num_microbatches) * layout.microbatch_rows + share
    found: npt.NDArray[np.int64] = (starts[:, None] + np.arange(inside.microbatch_size)).ravel()
    return found


def prepare(
    plan: Plan,
    place: MeshPlace,
    batches: data.Batches,
    device: torch.device,
    *,
    dtype: str,
    seed: int,
) -> TrainingState:
    """Build a rank's share of the plan's model for its rows of the batches."""
    inside = place.layout
    shares = 1 if inside.placed.experts == "whole" else inside.tp

    def lay_out(module: ModelStage, place: MeshPlace) -> ModelStage:
        module = apply.parallelize(
            module, place, dtype=dtype, lowering=plan.lowering, recipe=plan.recipe, seed=seed
        )
        balance(module, plan.recipe.aux_loss / plan.layout.num_microbatches / shares)
        return module

    numbers = torch.bfloat16 if dtype == "bf16" else torch.float32
    built, mine = built_stages(plan, place, batches, device, numbers, lay_out)
    loss_function = apply.loss_function(inside, plan.lowering, place.mesh["tp"])
    alone = plan.layout.num_devices == 1
    return _training(built, loss_function, mine, plan.recipe, alone=alone)


def built_stages(
    plan: Plan,
    place: MeshPlace,
    batches: data.Batches,
    device: torch.device,
    dtype: torch.dtype,
    lay_out: Callable[[ModelStage, MeshPlace], ModelStage],
    *,
    forward_only: bool = False,
) -> tuple[Pipeline, data.Batches]:
    """Build a rank's stages, laid out by ``lay_out``; return them and its tokens of the batches."""
    layout = plan.layout
    placement.check(plan.model, plan.workload, place.layout)
    seq_len = plan.workload.seq_len
    at, attend = positions(seq_len, place), attention(seq_len, place)

    def make(number: int, layers: range) -> ModelStage:
        inside = place._replace(layout=layout.of_stage(number))
        module = lay_out(on_meta(plan.model, layers, plan.recipe, attend), inside)
        if at is not None:
            module.at(torch.from_numpy(at).to(device))
        return module

    table = schedule.table(
        layout.schedule, layout.pp, layout.stages_per_rank, layout.num_microbatches
    )
    row = [x for x in table[place.pipeline_rank] if x.kind == "F" or not forward_only]
    built = pipeline.build(plan, place, tuple(row), make, dtype=dtype, device=device)
    return built, batches if at is None else batches.at(at)


def prepare_alone(
    plan: Plan, batches: data.Batches, device: torch.device, *, seed: int
) -> TrainingState:
    """Build the same model and workload in fp32 on one device, in plain torch."""
    model = on_meta(plan.model, None, plan.recipe, causal).to_empty(device=device)
    model.tie()
    model.init_weights(seed)
    rows = plan.layout.microbatch_rows
    layout = Layout(microbatch_size=rows, num_microbatches=plan.layout.num_microbatches)
    balance(model, plan.recipe.aux_loss / layout.num_microbatches)
    built = pipeline.alone(model, layout, device)
    return _training(built, cross_entropy, batches, plan.recipe, alone=True)


def positions(seq_len: int, place: MeshPlace) -> npt.NDArray[np.int64] | None:
    """Return the positions of this rank's tokens in their sequences, or None if ranks share no
    sequences. A rank's two chunks, one early and one late, make causal work equal."""
    if place.context is None:
        return None
    return shards.positions(_shards(seq_len, place), torch.distributed.get_rank(place.context))


def _shards(seq_len: int, place: MeshPlace) -> shards.Shards:
    return shards.balanced(seq_len, place.layout.cp)


def attention(seq_len: int, place: MeshPlace) -> Attend:
    """Return causal attention; if there is a context group, over the sequences that it shares."""
    if place.context is None:
        return causal
    over = _shards(seq_len, place)
    attend = partial(ring_attention, group=place.context, causal=True, shards=over)

    def alike(q: Tensor, k: Tensor, v: Tensor, window: int | None = None) -> Tensor:
        """Pad narrower values (latent attention): ring attention needs equal widths."""
        width = v.shape[-1]
        out: Tensor = attend(q, k, F.pad(v, (0, q.shape[-1] - width)), window=window)
        return out[..., :width]

    return alike


def on_meta(model: AnyModel, layers: range | None, recipe: Recipe, attend: Attend) -> ModelStage:
    """Build the module of a model, or of one of its stages, without memory."""
    with torch.device("meta"):
        return build(model, layers, attend=attend, routing=recipe.routing)


def balance(module: ModelStage, scale: float) -> None:
    """Add the experts' load balancing losses, times ``scale``, to the loss of a microbatch."""
    for part in module.modules():
        if isinstance(part, MoE):
            part.balance_scale = scale


def _training(
    built: Pipeline,
    loss_function: apply.Loss,
    batches: data.Batches,
    recipe: Recipe,
    *,
    alone: bool,
) -> TrainingState:
    stages = built.stages.values()
    return TrainingState(
        pipeline=built,
        optimizer=optimizer.build(recipe, (p for s in stages for p in s.module.parameters())),
        loss=loss_function,
        inputs=_on(built.device, batches.inputs),
        targets=_on(built.device, batches.targets),
        max_grad_norm=recipe.max_grad_norm,
        alone=alone,
        norm=torch.zeros((), device=built.device),
    )


def _on(device: torch.device, values: npt.NDArray[np.generic]) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values)).to(device)


def run(training: TrainingState, index: int, mark: pipeline.Mark = pipeline.unmarked) -> Tensor:
    """Run one optimizer step on batch ``index``; return this rank's mean loss, on the device (0 on
    ranks without the last stage). ``mark`` is called with the name of each part as it begins: those
    of ``pipeline.run``, then ``clip``, ``optimizer`` and ``end``.

    ``training.norm`` becomes nan on all ranks if the loss of any rank is not finite. The sum of the
    gradients' squares carries it; without clipping a separate sum runs beside the optimizer.
    """
    built = training.pipeline
    size = built.layout.microbatch_size
    inputs, targets = (batch[index].split(size) for batch in (training.inputs, training.targets))
    with apply.loss_context(built.layout):
        total = pipeline.run(built, inputs, targets, training.loss, mark)
    norm, summed = optimizer.nothing(total), None
    if training.max_grad_norm:
        mark("clip")
        norm = optimizer.clip_gradients(
            training.parameters(),
            training.max_grad_norm,
            alone=training.alone,
            copy=built.tied.copy if built.tied else None,
            loss=total,
        )
    elif not training.alone:
        summed = dist.all_reduce(norm, async_op=True)
    mark("optimizer")
    training.optimizer.step()
    training.optimizer.zero_grad()
    if summed is not None:
        summed.wait()
    training.norm.copy_(norm)
    mark("end")
    return total
