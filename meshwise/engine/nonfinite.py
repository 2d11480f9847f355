"""Find the module that first computes a value that is not finite.

In: a rank's training as it was before the step in question, and the index of its batch. Out: one
line on every rank. The parameters are checked first: the update before may have spoiled them. Then
forward and backward run once more, in eager mode. Every module's output and its gradient are
checked, then the gradients of the parameters. The optimizer does not run.

A step whose loss is not finite spoils all weights. So prepare the training anew and run it up to
that step first.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import chain, count
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from meshwise.engine.step import TrainingState
from meshwise.parallel import apply, pipeline
from meshwise.parallel.mesh import share
from meshwise.parallel.pipeline import LinkedStage
from meshwise.ranks import Ranks

KINDS = ("value before the step", "output", "gradient", "gradient of the parameter")
VALUE, OUTPUT, GRADIENT, OF_PARAMETER = range(len(KINDS))


class NonfiniteValue(NamedTuple):
    """A value that is not finite. Values sort in the order in which the ranks reach them: in a
    forward by microbatch and stage, in a backward with the last stage first."""

    kind: int  # of KINDS
    microbatch: int
    order: int  # the stage, or its negative
    rank: int
    name: str

    def __str__(self) -> str:
        stage = f"stage {abs(self.order)}"
        if self.kind in (OUTPUT, GRADIENT):
            stage += f", microbatch {self.microbatch}"
        return f"the {KINDS[self.kind]} of {self.name} ({stage}, rank {self.rank})"


class _Watch:
    """Watches one forward and backward. ``found``: this rank's first value of each kind."""

    def __init__(self, rank: int) -> None:
        self.rank, self.found = rank, dict[int, NonfiniteValue]()

    def look(self, value: Any, kind: int, stage: int, microbatch: int, name: str) -> None:
        if kind not in self.found and not all(map(_is_finite, _tensors(value))):
            order = stage if kind <= OUTPUT else -stage
            self.found[kind] = NonfiniteValue(kind, microbatch, order, self.rank, name)

    def over(self, stage: LinkedStage, hold: ExitStack) -> None:
        """Check every module of a stage, but not the recomputation in backward."""
        microbatch, running = -1, False

        def begin(*_: Any) -> None:
            nonlocal microbatch, running
            microbatch, running = microbatch + 1, True

        def end(*_: Any) -> None:
            nonlocal running
            running = False

        def hook_of(name: str) -> Callable[..., None]:
            def after(_: nn.Module, __: Any, output: Any) -> None:
                if not running:
                    return
                number = microbatch
                self.look(output, OUTPUT, stage.number, number, name)
                for value in _tensors(output):
                    if value.requires_grad:
                        value.register_hook(
                            lambda g: self.look(g, GRADIENT, stage.number, number, name)
                        )

            return after

        hold.callback(stage.module.register_forward_pre_hook(begin, prepend=True).remove)
        for name, module in stage.module.named_modules():
            if not isinstance(module, nn.ModuleDict):
                hook = hook_of(name or "the stage")
                hold.callback(module.register_forward_hook(hook).remove)
        hold.callback(stage.module.register_forward_hook(end).remove)


def first_module(ranks: Ranks, training: TrainingState, index: int) -> str | None:
    """Return ``the output of layers.3.mlp.up (stage 1, microbatch 0, rank 2)``; None if all is
    finite.

    All ranks call it with their own ``training`` and get the same. It zeroes the gradients.
    """
    built, watch = training.pipeline, _Watch(ranks.rank)
    size = built.layout.microbatch_size
    inputs, targets = (batch[index].split(size) for batch in (training.inputs, training.targets))
    microbatches = count()

    def loss(logits: Tensor, labels: Tensor) -> Tensor:
        value = training.loss(logits, labels)
        watch.look(value, OUTPUT, max(built.stages), next(microbatches), "the loss")
        return value

    with ExitStack() as hold:
        hold.enter_context(apply.loss_context(built.layout))
        hold.enter_context(torch.compiler.set_stance("force_eager"))  # compiled code has no hooks
        for stage in built.stages.values():
            for name, parameter in stage.module.named_parameters():
                watch.look(parameter, VALUE, stage.number, 0, name)
            watch.over(stage, hold)
        pipeline.run(built, inputs, targets, loss)
    for stage in built.stages.values():
        for name, parameter in stage.module.named_parameters():
            watch.look(parameter.grad, OF_PARAMETER, stage.number, 0, name)
    training.optimizer.zero_grad()
    told = chain.from_iterable(ranks.gather(list(watch.found.values())))
    found = [NonfiniteValue(*finding) for finding in told]
    return str(min(found)) if found else None


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _tensors(item)


def _is_finite(value: Tensor) -> bool:
    local = share(value)
    return not local.is_floating_point() or bool(local.detach().isfinite().all())
