"""Run a step's action table on this rank: forwards and backwards of its stages, and the messages
between them. Without a pipeline the table is forward, backward, forward, backward, ...

In: a rank's ``MeshPlace``, its stages (each already laid out), its row of the table, the tokens of
its microbatches. Out: gradients in the parameters, and the loss where the last stage is.

Two neighbouring stages may have different meshes. Each mesh cuts an activation's rows over dp and
its positions over cp, and over tp too with sequence parallelism; without it tp ranks hold copies.
``reshard`` plans who sends which part to whom. With equal meshes each rank sends one message to its
counterpart. Gradients go the other way. Receives start one action ahead, and sends are waited for
only at the end of the step, so messages overlap computation.

Each stage's data parallelism takes the mean over its own dp ranks, so a gradient that crosses from
dp = a to dp = b ranks is scaled by b / a.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from meshwise import models, nn, torch_private
from meshwise.parallel import tied
from meshwise.parallel.data import (
    after_rest,
    after_split_backward,
    at_rest,
    before_backward,
    before_split_backward,
    gather,
    may_rest,
)
from meshwise.parallel.mesh import Link, MeshPlace
from meshwise.reshard.regions import Layout as Regions
from meshwise.reshard.regions import placed
from meshwise.reshard.transports import p2p
from meshwise.schedule import Action, stages_of, table
from meshwise.spec import Layout, Plan, rank_of

Loss = Callable[[Tensor, Tensor], Tensor]
Mark = Callable[[str], object]


def unmarked(_: str) -> None:
    """Ignore the mark."""


@dataclass(frozen=True)
class Boundary:
    """The boundary between a stage and the next one, if they are on different pipeline ranks."""

    forward: p2p.Route  # of activations
    backward: p2p.Route  # of their gradients
    shape: tuple[int, ...]  # of a microbatch's activation on this rank
    scale: float  # multiplies a gradient that has crossed

    def route(self, action: Action) -> p2p.Route:
        """Return the route of the action's input: activations for a forward, else gradients."""
        return self.forward if action.kind == "F" else self.backward


@dataclass(frozen=True)
class LinkedStage:
    number: int
    module: nn.ModelStage
    before: Boundary | None  # None: there is no stage before, or it is on this rank
    after: Boundary | None


@dataclass(frozen=True)
class Pipeline:
    """A rank's share of the pipeline, ready to run."""

    layout: Layout  # within this pipeline rank
    stages: dict[int, LinkedStage]
    row: tuple[Action, ...]
    dtype: torch.dtype
    device: torch.device
    tied: tied.Tie | None


def build(
    plan: Plan,
    place: MeshPlace,
    row: tuple[Action, ...],
    make: Callable[[int, range], nn.ModelStage],
    *,
    dtype: torch.dtype,
    device: torch.device,
) -> Pipeline:
    """Make the stages of this rank by ``make(number, layers)``, and link them to other ranks."""
    layout, model, seq_len = plan.layout, plan.model, plan.workload.seq_len
    mine = stages_of(layout.schedule, place.pipeline_rank, layout.pp, layout.stages_per_rank)
    layers = layout.stage_layers(model.layers)
    modules = {number: make(number, layers[number]) for number in mine}
    boundaries = {}
    # All ranks must connect in the same order, the tie last: see p2p.connected.
    for stage, link in sorted(place.links.items()):
        if stage >= 0:
            shape = models.stream_shape(model, layout.microbatch_rows, seq_len, layers[stage].stop)
            boundaries[stage] = _boundary(layout, stage, shape, link, device)
    tie = tied.tie(place, layout, model, modules, device) if layout.pp > 1 else None
    stages = {
        number: LinkedStage(number, module, boundaries.get(number - 1), boundaries.get(number))
        for number, module in modules.items()
    }
    return Pipeline(place.layout, stages, row, dtype, device, tie)


def alone(model: nn.ModelStage, layout: Layout, device: torch.device) -> Pipeline:
    """Return the pipeline of a whole model on one device, in fp32."""
    row = table("none", 1, 1, layout.num_microbatches)[0]
    stages = {0: LinkedStage(0, model, None, None)}
    return Pipeline(layout, stages, row, torch.float32, device, None)


def _boundary(
    layout: Layout, stage: int, shape: tuple[int, ...], link: Link, device: torch.device
) -> Boundary:
    ends = [rank_of(layout.schedule, s, layout.pp) for s in (stage, stage + 1)]
    here, there = [activations(layout, rank, shape) for rank in ends]
    dp = [layout.of_rank(rank).dp for rank in ends]
    mine = [piece for piece in (*here, *there) if piece.rank == dist.get_rank()]
    return Boundary(
        shape=mine[0].box.shape,
        forward=p2p.connected(here, there, link.forward, device),
        backward=p2p.connected(there, here, link.backward, device),
        scale=dp[0] / dp[1],
    )


def activations(layout: Layout, pipeline_rank: int, shape: tuple[int, ...]) -> Regions:
    """Return which rank holds which part of a microbatch's activation [rows, seq, hidden]
    (images: [rows, channels, height, width])."""
    inside = layout.of_rank(pipeline_rank)
    over_tp = {"batch": 0, "seq": 1}.get(inside.placed.stream)
    over_cp = 1 if inside.cp > 1 else None
    pieces = placed(shape, (inside.dp, inside.cp, inside.tp), (0, over_cp, over_tp))
    devices = layout.devices_of(pipeline_rank)
    return tuple(piece._replace(rank=devices[piece.rank]) for piece in pieces)


def run(
    pipeline: Pipeline,
    inputs: Sequence[Tensor],
    targets: Sequence[Tensor],
    loss: Loss,
    mark: Mark = unmarked,
) -> Tensor:
    """Run forward and backward of all microbatches; return the mean loss, 0 without the last stage.

    ``inputs`` and ``targets``: this rank's rows of each microbatch. ``mark`` is called with what
    begins: an action (``F 0.3``: forward of stage 0, microbatch 3), ``wait`` (for its message) or
    ``exchange`` (unfinished sends, sums of gradients over tp, the tied weight's gradients).
    """
    step = _RunningStep(pipeline, inputs, targets, loss)
    step.mark = mark
    for action in step.actions():
        step.work(action)
    mark("exchange")
    for sending in step.sending:
        sending.wait()
    for stage in pipeline.stages.values():
        stage.module.sum_gradients()
    if pipeline.tied is not None:
        pipeline.tied.add_gradients()
    return step.total


def _name(action: Action) -> str:
    return f"{action.kind} {action.stage}.{action.microbatch}"


def _needed(action: Action) -> tuple[bool, int, int]:
    """Return a key for the tensor an action needs: is it an activation (or a gradient)? Then stage
    and microbatch. dualpipev splits only some backwards, so a B may hand its gradient to an I."""
    return action.kind == "F", action.stage, action.microbatch


class Messages:
    """The messages between stages: to and from other ranks, and between the stages of this rank."""

    mark: Mark = staticmethod(unmarked)

    def __init__(self, pipeline: Pipeline) -> None:
        self.pipeline = pipeline
        self.received: dict[Action, p2p.Receiving] = {}
        self.handed: dict[tuple[bool, int, int], Tensor] = {}  # between stages of this rank
        self.sending: list[p2p.Sending] = []

    def actions(self) -> Iterator[Action]:
        """Yield the row's actions. First start the receives of each action and the next one.

        Of the same microbatch the next receive waits for this action's result: started now, it
        would stand before this action in a queue of the device that their streams may share.
        """
        row = self.pipeline.row
        for action, following in zip_longest(row, row[1:]):
            self.expect(action)
            if following is not None and following.microbatch != action.microbatch:
                self.expect(following)
            yield action

    def expect(self, action: Action) -> None:
        """Start receiving what an action needs from another rank."""
        stage = self.pipeline.stages[action.stage]
        boundary = stage.before if action.kind == "F" else stage.after
        if boundary is None or action.kind == "W" or action in self.received:
            return
        built, route = self.pipeline, boundary.route(action)
        self.received[action] = p2p.receive(route, boundary.shape, built.dtype, built.device)

    def take(self, action: Action) -> Tensor:
        """Return the tensor that ``expect`` receives, or that another stage of this rank gave."""
        if action in self.received:
            self.mark("wait")
            value = self.received.pop(action).wait()
            self.mark(_name(action))
            return value
        return self.handed.pop(_needed(action))

    def give(self, value: Tensor, action: Action, boundary: Boundary | None) -> None:
        """Pass a result or a gradient to the ``action`` that needs it, here or on another rank."""
        if boundary is None:
            self.handed[_needed(action)] = value
            return
        assert value.dtype == self.pipeline.dtype and value.shape == boundary.shape
        self.sending = [sending for sending in self.sending if not sending.is_done()]
        self.sending.append(p2p.send(boundary.route(action), value))


class _RunningStep(Messages):
    """One step while it runs: its graphs and its messages."""

    def __init__(
        self, pipeline: Pipeline, inputs: Sequence[Tensor], targets: Sequence[Tensor], loss: Loss
    ) -> None:
        super().__init__(pipeline)
        self.inputs, self.targets, self.loss = inputs, targets, loss
        self.total = torch.zeros((), device=pipeline.device)
        self.split = any(action.kind == "I" for action in pipeline.row)
        self.last_of = {(action.kind, action.stage): action for action in pipeline.row}
        self.first_of = {a.stage: a for a in reversed(pipeline.row) if a.kind == "F"}
        self.resting = self.find_resting()
        self.saved: dict[tuple[int, int], tuple[Tensor, Tensor | GradientEdge]] = {}
        self.postponed: dict[tuple[int, int], Callable[[], None]] = {}

    def find_resting(self) -> set[tuple[int, int]]:
        """Find the (stage, microbatch) whose forward and backward FSDP2 need not see. With one data
        rank these are all. Otherwise FSDP2 must see the first, to overlap the gathering of weights
        with computation, and the last, to overlap the reduction of gradients."""
        layout = self.pipeline.layout
        if self.split or not may_rest(layout):
            return set()
        found = {(action.stage, action.microbatch) for action in self.pipeline.row}
        if layout.dp * layout.cp > 1:
            ends = [*self.first_of.values(), *(a for a in self.last_of.values() if a.kind == "B")]
            found -= {(action.stage, action.microbatch) for action in ends}
        return found

    def work(self, action: Action) -> None:
        stage, key = self.pipeline.stages[action.stage], (action.stage, action.microbatch)
        layout, module = self.pipeline.layout, stage.module
        last = self.last_of[action.kind, action.stage] == action
        self.mark(_name(action))
        if action.kind == "F":
            self.saved[key] = self.forward(stage, action)
        elif action.kind == "B":
            rests = key in self.resting
            if not rests:
                before_backward(module, layout, last=last)
            x, result = self.saved.pop(key)
            torch.autograd.backward(result, self.gradient(stage, action))
            self.send_back(stage, action, x)
            if rests:
                after_rest(module, layout, last=last)
        elif action.kind == "I":
            before_split_backward(module)
            self.postponed[key] = self.backward_of_input(stage, action)
        else:
            before_split_backward(module)
            self.postponed.pop(key)()
            after_split_backward(module, layout, last=last)

    def forward(self, stage: LinkedStage, action: Action) -> tuple[Tensor, Tensor | GradientEdge]:
        """Return the stage's input and what its backward starts from."""
        number = action.microbatch
        module = stage.module
        x = self.inputs[number] if module.first else self.take(action).requires_grad_()
        result = self.compute(module, x, action)
        if module.last:
            loss = self.loss(result, self.targets[number]) / len(self.inputs)
            self.total += loss.detach()
            return x, loss
        self.give(result.detach(), Action("F", stage.number + 1, number), stage.after)
        # An unsplit backward starts from the result's edge in the graph, so the result's memory may
        # be freed once it is sent.
        return x, result if self.split else get_gradient_edge(result)

    def compute(self, module: nn.ModelStage, x: Tensor, action: Action) -> Tensor:
        if (action.stage, action.microbatch) not in self.resting:
            return module(x)  # type: ignore[no-any-return]
        if self.first_of[action.stage] == action:
            gather(module)
        if x.is_floating_point():  # images; FSDP2 would cast them
            x = x.to(self.pipeline.dtype)
        with at_rest(module):
            return module(x)  # type: ignore[no-any-return]

    def gradient(self, stage: LinkedStage, action: Action) -> Tensor | None:
        """Return the gradient of the stage's result; None for the loss, whose gradient is 1."""
        if stage.module.last:
            return None
        gradient = self.take(action)
        if stage.after is not None and stage.after.scale != 1:
            gradient *= stage.after.scale
        return gradient

    def send_back(self, stage: LinkedStage, action: Action, x: Tensor) -> None:
        if not stage.module.first:
            assert x.grad is not None
            before = action._replace(stage=stage.number - 1)
            self.give(x.grad, before, stage.before)
            x.grad = None

    def backward_of_input(self, stage: LinkedStage, action: Action) -> Callable[[], None]:
        """Send the input's gradient back; return a function that makes the weights' gradients.

        The first stage's input has no gradient, so the function does its whole backward.
        """
        x, result = self.saved.pop((action.stage, action.microbatch))
        assert isinstance(result, Tensor)
        gradient = self.gradient(stage, action)
        if stage.module.first:
            return partial(torch.autograd.backward, result, gradient)
        weights = list(stage.module.parameters())
        postponed = torch_private.backward_of_input(result, gradient, x, weights)
        self.send_back(stage, action, x)
        return partial(torch_private.backward_of_weights, weights, postponed)
