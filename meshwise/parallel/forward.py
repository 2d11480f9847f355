"""Forward passes only: lay a model out for inference, and run microbatches through its stages.

``lay_out`` takes a module of ``nn`` on the meta device and a ``MeshPlace``. It returns the module
with weights in the compute dtype, whole on all data ranks, cut by tp and ep as in training.
``run`` takes a ``Pipeline`` whose row holds forwards only, and the inputs of its microbatches. It
returns the last stage's result for each microbatch, logits cut by vocabulary.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from meshwise import torch_private
from meshwise.nn import ModelStage
from meshwise.parallel import apply
from meshwise.parallel.mesh import MeshPlace
from meshwise.parallel.pipeline import Messages, Pipeline
from meshwise.reshard.transports import p2p
from meshwise.schedule import Action


def lay_out(
    model: ModelStage, place: MeshPlace, *, dtype: torch.dtype, lowering: apply.Lowering, seed: int
) -> ModelStage:
    """Lay the model out for inference. Its weights equal those of ``init_weights(seed)``."""
    if lowering == "compiled":
        torch_private.allow_graphs(64)
    for layer in apply.filled(model, place, dtype, seed):
        if lowering == "compiled":
            layer.compile(fullgraph=apply.is_one_graph(layer, place.layout), dynamic=False)
    return model.requires_grad_(False).eval()


class Pass(NamedTuple):
    """A batch that has gone through this rank's stages. ``results``: one for each microbatch, empty
    without the last stage. ``marks``: each action with the times before and after it. ``sending``:
    messages that may still be under way."""

    results: list[Tensor]
    marks: list[tuple[Action, Any, Any]]
    sending: list[p2p.Sending]

    def wait(self) -> None:
        """Wait for the messages."""
        for sending in self.sending:
            sending.wait()


@torch.no_grad()
def run(
    pipeline: Pipeline,
    inputs: Sequence[Tensor],
    *,
    finish: Callable[[Tensor], Tensor],
    mark: Callable[[], Any],
) -> Pass:
    """Run all microbatches through this rank's stages. Nothing waits for the device.

    ``finish`` turns the last stage's result into what is kept. ``mark`` returns the time on the
    device. It is called after receiving and before sending, to time only the stage's own work.
    """
    messages = Messages(pipeline)
    results, marks = [], []
    for action in messages.actions():
        stage, number = pipeline.stages[action.stage], action.microbatch
        x = inputs[number] if stage.module.first else messages.take(action)
        start = mark()
        result: Tensor = stage.module(x)
        if stage.module.last:
            results.append(finish(result))
        marks.append((action, start, mark()))
        if not stage.module.last:
            messages.give(result, Action("F", stage.number + 1, number), stage.after)
    return Pass(results, marks, messages.sending)
