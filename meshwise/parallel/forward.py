"""Forward passes only: a model laid out for inference, and its microbatches through the stages.

In: a module of ``nn`` on the meta device and a ``MeshPlace``; then a ``Pipeline`` whose row holds
forwards only, and the inputs of its microbatches. Out: the module with weights in the compute
dtype, whole on all data ranks, cut by tp and ep as in training; then what the last stage made of
each microbatch, logits cut by vocabulary.
"""

from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
from torch import Tensor

from meshwise.nn import ModelStage
from meshwise.nn.stage import Layer
from meshwise.parallel import apply, tensor, torch_private
from meshwise.parallel.mesh import MeshPlace
from meshwise.parallel.pipeline import Messages, Pipeline
from meshwise.reshard.transports import p2p
from meshwise.schedule import Action


def lay_out(
    model: ModelStage, place: MeshPlace, *, dtype: torch.dtype, lowering: apply.Lowering, seed: int
) -> ModelStage:
    """The model ready for inference; its weights are those of ``Stage.init_weights(seed)``."""
    tensor.apply(model, place)
    device = apply.device_of(place.mesh)
    if lowering == "compiled":
        torch_private.allow_graphs(64)
    for index, layer in model.layers.items():
        assert isinstance(layer, Layer)
        apply.fill(model, layer, f"layers.{index}", seed, device, dtype)
        if lowering == "compiled":
            layer.compile(fullgraph=apply.is_one_graph(layer, place.layout), dynamic=False)
    for name, child in model.named_children():
        if name != "layers":
            apply.fill(model, child, name, seed, device, dtype)
    model.tie()
    return model.requires_grad_(False).eval()


class Pass(NamedTuple):
    """A batch that has gone through this rank's stages. ``results`` of the microbatches, where the
    last stage is; each action with the ``marks`` before and after it; messages that may still be
    ``sending``."""

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
    """All microbatches through this rank's stages. Nothing waits for the device.

    ``finish``: of the last stage's result what is kept. ``mark``: the time on the device, which is
    taken between messages, so that it is of the stage's own work.
    """
    messages = Messages(pipeline)
    results, marks = [], []
    for action, following in zip_longest(pipeline.row, pipeline.row[1:]):
        messages.expect(action)
        if following is not None:
            messages.expect(following)
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
