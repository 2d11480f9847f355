"""Turn a graph and a layout into one rank's program: tasks with streams and dependencies.

``shard`` cuts the graph over tp and cp. This module repeats it for each microbatch and adds data
parallelism, unit by unit as FSDP2 does. A unit is a layer, or the root (embedding, final norm,
head). Its weights are gathered before its tasks and its gradients are reduced after them, both on a
separate stream. If ranks hold different experts, a layer's experts are a separate unit, shared by
the ranks that hold the same ones. ZeRO-3 gathers for each forward and each backward, ZeRO-1 and 2
once a step. ZeRO-0 and 1 reduce after the last microbatch, ZeRO-2 and 3 after each; ZeRO-0
all-reduces. With replicas (HSDP), shards are gathered and reduced within one replica, and gradients
are then all-reduced over the replicas.

A pipeline stage's backward may be split into I (all but the weights' gradients) and W (these).
FSDP2's hooks ignore this split: all weights are gathered before I, and freed and reduced after W.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal, NamedTuple

from msgspec.structs import replace

from meshwise.models import optimizer
from meshwise.models.data_parallel import EXPERTS, DataParallel, UnitElements, summed
from meshwise.models.graph import BYTES, Device, Graph, Node
from meshwise.models.offload import Offload, reading
from meshwise.models.optimizer import OwnPart
from meshwise.models.shard import Buffer, Sharded, Task, shard
from meshwise.spec import Layout, Recipe

Runs = list[tuple[str, list[Task]]]
Kind = Literal["F", "B", "I", "W"]
Actions = dict[Kind, Runs]
Names = dict[Any, tuple[str, ...]]


class ActionSpan(NamedTuple):
    """An action of a pipeline schedule: ``tasks[start:stop]`` of a program.

    ``kind``: F forward, B backward, or a split backward: I, then W, the weights' gradients.
    """

    kind: Kind
    microbatch: int
    start: int
    stop: int


class Loop(NamedTuple):
    """The tasks ``tasks[start:stop]`` of a layer, or of a few in a row; they run ``times`` times.
    Each turn reads its gathered weights from buffer ``here``; the turn before left them in buffer
    ``there``. ``layer``: the name of the first layer."""

    start: int
    stop: int
    times: int
    here: str
    there: str
    layer: str


class Program(NamedTuple):
    """A rank's training step, in the order in which the host issues it.

    ``resident_bytes``: memory held through the whole step (parameters, optimizer state).
    ``gathered``: elements of all weights that this rank gathers. A buffer lives from its first
    writer to its last reader; ``kept`` buffers live to the end of the step. ``sum_over``: ranks
    in the two sums of gradients at the end of the step (``UnitElements.due``). ``recipe``: with
    the optimizer and the dtypes in which weights are kept and gradients are reduced.
    ``scratch_bytes``: what the optimizer allocates while it updates.
    """

    tasks: tuple[Task, ...]
    buffers: dict[str, Buffer]
    resident_bytes: dict[str, int]
    kept: frozenset[str]
    actions: tuple[ActionSpan, ...] = ()
    loops: tuple[Loop, ...] = ()
    gathered: int = 0
    units: Mapping[str, UnitElements] = {}
    sum_over: tuple[int, int] = (1, 1)
    recipe: Recipe = Recipe()
    scratch_bytes: int = 0


def program_of(
    graph: Graph,
    layout: Layout,
    dtype: str,
    *,
    split: bool = False,
    times: Mapping[int, int] | None = None,
    device: Device = "cuda",
    cp_rank: int | None = None,
    idle: bool = False,
    recipe: Recipe | None = None,
) -> Program:
    """Build the program of one rank; ``graph`` is one microbatch of one dp rank, with backward.

    ``layout``: the layout within a pipeline rank. The program's ``actions`` cover all tasks but the
    optimizer's. ``split``: each backward is an I and a W. ``times``: how many layers each of these
    layers stands for, by index; neighbours form one loop. ``cp_rank``: by default the busiest.
    ``idle``: without the tasks of layers, so that data parallelism's are left. ``recipe``: it
    may keep weights and reduce gradients in bf16 where ``dtype`` is bf16.
    """
    over = (split, layout.tp, layout.placed, layout.ep, layout.cp, cp_rank, device)
    parts = (_idle_parts if idle else _parts)(graph, *over)
    recipe = recipe or Recipe()
    if dtype != "bf16":
        recipe = replace(recipe, weights="fp32", reduce="fp32")
    data = DataParallel(layout, parts.members, dtype, parts.sharded, device, recipe)
    weave = _Weave(graph, parts, data, {f"layers.{index}" for index in times or ()})
    if recipe.offload:
        sizes, received = parts.sharded.buffers, parts.received["F"]
        weave.offload = Offload(*_of_layers(parts.runs), sizes, received, device)
    for microbatch in range(layout.num_microbatches):
        weave.begin(microbatch)
        for kind in parts.runs:
            weave.action(kind, microbatch, last=microbatch + 1 == layout.num_microbatches)
    found = Program(
        tasks=tuple(weave.tasks),
        buffers=weave.buffers | data.buffers | (weave.offload.buffers if weave.offload else {}),
        resident_bytes={},
        kept=frozenset(data.kept),
        actions=tuple(weave.actions),
        loops=tuple(weave.loops),
        units={unit: data.unit(unit) for unit in parts.members},
        sum_over=data.sum_over,
        recipe=recipe,
    )
    return repeated(found, times or {})


class _Weave:
    """A program under way: tasks of microbatches, with those of data parallelism between them.
    ``several``: layers that stand for several."""

    def __init__(
        self, graph: Graph, parts: "_Parts", data: DataParallel, several: set[str]
    ) -> None:
        self.graph, self.parts, self.data, self.several = graph, parts, data, several
        self.tasks, self.actions, self.loops = list[Task](), list[ActionSpan](), list[Loop]()
        self.buffers: dict[str, Buffer] = {}
        self.renamed: dict[str, str] = {}  # buffers of the microbatch
        self.offload: Offload | None = None
        self.began = 0  # where the layer's tasks begin

    def begin(self, microbatch: int) -> None:
        """Go on with a microbatch."""
        made = self.parts.sharded.buffers
        self.renamed = {name: f"{name}#{microbatch}" for name in made}
        self.buffers |= zip(self.renamed.values(), made.values(), strict=True)
        if self.offload:
            self.offload.begin(microbatch, self.renamed)

    def action(self, kind: Kind, microbatch: int, *, last: bool) -> None:
        """Append an action of a microbatch."""
        tasks, data, runs = self.tasks, self.data, self.parts.runs
        groups, start = runs[kind], len(tasks)
        data.begin(kind, microbatch)
        for unit, _ in groups if kind == "I" or (kind == "W" and not runs["I"]) else ():
            tasks += (gathers := data.before(unit, None))
            self.loop(len(tasks) - len(gathers), unit)
        each = kind == "B" and not data.rests(microbatch)
        due = _due(groups, each=each) if kind in ("B", "W") else {}
        for index in range(len(groups)):
            self.run(kind, index, due.get(index, ()), last)
        if start < len(tasks):
            received = self.parts.received[kind]
            arrived = [self.renamed[name] for name in received]
            tasks[start] = replace(tasks[start], writes=(*tasks[start].writes, *arrived))
            tasks[-1] = _reading(tasks[-1], self.renamed, received)
        self.actions.append(ActionSpan(kind, microbatch, start, len(tasks)))

    def run(self, kind: Kind, index: int, due: Sequence[str], last: bool) -> None:
        """Append a run of one unit's tasks, and the reductions that are ``due`` after it."""
        tasks, data, groups = self.tasks, self.data, self.parts.runs[kind]
        unit, group = groups[index]
        layer = _layer_of(unit)
        if begins := index == 0 or _layer_of(groups[index - 1][0]) != layer:
            self.began = len(tasks)
        following = groups[index + 1][0] if index + 1 < len(groups) else None
        if kind in ("F", "B"):
            tasks += data.before(unit, following)
        weights = (*data.weights(unit), *data.unreleased)
        start, renamed, host = len(tasks), self.renamed, self.offload
        if host and kind != "F":
            renamed = renamed | host.kept(layer)
        tasks += [_of_microbatch(task, renamed, weights) for task in data.summed(group)]
        ends = following is None or _layer_of(following) != layer
        if kind == "W" and ends:
            tasks[-1] = _reading(tasks[-1], renamed, self.parts.retained.get(layer, ()))
        if host and layer in host.saved:
            if kind == "F" and ends:
                host.after_forward(tasks, layer)
            if kind in ("B", "W") and ends:
                host.after_backward(tasks, layer)
            if begins and (kind in ("B", "I") or (kind == "W" and not self.parts.runs["I"])):
                host.before_backward(tasks, start, layer)
        for done in due:
            at, names = len(tasks), self.parts.members[done]
            gradients = {name: self.renamed[self.graph.gradients[name]] for name in names}
            tasks += data.after(done, gradients, last)
            if _layer_of(done) != layer:
                self.loop(at, done)
        if ends:
            self.loop(self.began, unit, following)

    def loop(self, start: int, unit: str, following: str | None = None) -> None:
        """Note that the tasks added since ``start`` belong to a layer that stands for several."""
        if (layer := _layer_of(unit)) in self.several and start < len(self.tasks):
            names = (self.data.gathered(layer), self.data.gathered(following or layer), layer)
            _note(self.loops, Loop(start, len(self.tasks), 1, *names))


def repeated(program: Program, times: Mapping[int, int]) -> Program:
    """Return the program with other ``times`` for the layers that stand for several."""
    count = {f"layers.{index}": number for index, number in times.items()}
    held = [(of, count.get(_layer_of(unit), 1)) for unit, of in program.units.items()]
    local = sum(of.keeps * number for of, number in held)
    recipe, size = program.recipe, BYTES[program.recipe.weights]
    shares, tasks = Counter[OwnPart](), [*program.tasks[: (done := program.actions[-1].stop)]]
    for of, number in held:
        for share in of.shares:
            shares[share] += number
    for at, ranks in reversed([*enumerate(program.sum_over)]):
        tasks += summed(sum(of.due[at] * number for of, number in held), ranks, recipe)
    loops = [loop._replace(times=count[loop.layer]) for loop in program.loops if loop.stop <= done]
    for task, turns in optimizer.update(recipe, shares):
        if turns > 1:
            loops.append(Loop(len(tasks), len(tasks) + 1, turns, "", "", ""))
        tasks.append(task)
    states = size * optimizer.state_elements(recipe, shares)
    return program._replace(
        tasks=tuple(tasks),
        resident_bytes={"parameters": size * local, "optimizer state": states},
        scratch_bytes=size * optimizer.scratch_elements(recipe, shares),
        loops=tuple(loops),
        gathered=sum(of.gathers * number for of, number in held),
    )


def _note(loops: list[Loop], loop: Loop) -> None:
    """Append a loop. If the last one ends where it starts, both form one turn of a pattern."""
    if loops and loops[-1].stop == loop.start:
        before = loops.pop()
        loop = loop._replace(start=before.start, here=before.here, layer=before.layer)
    loops.append(loop)


def _of_microbatch(task: Task, renamed: Mapping[str, str], weights: tuple[str, ...]) -> Task:
    reads = (*map(renamed.__getitem__, task.reads), *weights)
    writes = (*map(renamed.__getitem__, task.writes),)
    return Task(task.name, task.op, task.stream, task.part, task.phase, reads, writes)


def _reading(task: Task, renamed: Mapping[str, str], names: tuple[str, ...]) -> Task:
    """Return the task with more reads, given by their names within a microbatch."""
    return reading(task, tuple(renamed[name] for name in names))


def _layer_of(unit: str) -> str:
    return unit.removesuffix(EXPERTS)


class _Parts(NamedTuple):
    """The parts that data parallelism does not change: parameters by unit (``members``), the
    tasks of each action, and the tensors that actions receive and layers retain."""

    sharded: Sharded
    members: dict[str, list[str]]
    runs: Actions
    received: Names
    retained: Names


@lru_cache(maxsize=256)
def _parts(graph: Graph, split: bool, *over: Any) -> _Parts:
    sharded = shard(graph, *over)
    runs = _runs(graph, sharded, split)
    return _Parts(sharded, _members(sharded), runs, _received(runs), _retained(runs, sharded))


@lru_cache(maxsize=2048)
def _idle_parts(graph: Graph, *over: Any) -> _Parts:
    """Return the parts without tasks, and with the buffers of gradients alone."""
    parts = _parts(graph, *over)
    buffers = {name: parts.sharded.buffers[name] for name in graph.gradients.values()}
    return parts._replace(
        sharded=parts.sharded._replace(tasks=(), buffers=buffers),
        runs={kind: [(unit, []) for unit, _ in runs] for kind, runs in parts.runs.items()},
        received=dict.fromkeys(parts.runs, ()),
    )


def _members(sharded: Sharded) -> dict[str, list[str]]:
    """Return the parameters of each unit."""
    members: dict[str, list[str]] = {}
    for name in sharded.shapes:
        parts = name.split(".")
        unit = ".".join(parts[:2]) if parts[0] == "layers" else "root"
        members.setdefault(f"{unit}{EXPERTS}" if name in sharded.apart else unit, []).append(name)
    return members


def _runs(graph: Graph, sharded: Sharded, split: bool) -> Actions:
    """Return each action's tasks. A first stage sends no gradient, so its whole backward is
    W."""
    if not split:
        return {kind: _runs_of_units(graph, sharded, kind) for kind in ("F", "B")}
    if "stage.in" not in graph.tensors:
        forward, backward = (_runs_of_units(graph, sharded, kind) for kind in ("F", "B"))
        return {"F": forward, "I": [], "W": backward}
    return {kind: _runs_of_units(graph, sharded, kind) for kind in ("F", "I", "W")}


def _runs_of_units(graph: Graph, sharded: Sharded, kind: Kind) -> Runs:
    """Return an action's tasks as runs of one unit each, in order; the root comes first and
    last."""
    runs: Runs = []
    apart = sharded.apart | {graph.gradients[name] for name in sharded.apart}
    for node, group in sharded.tasks:
        if not _belongs(graph, node, kind):
            continue
        unit = f"layers.{node.layer}" if node.part == "layer" else "root"
        if not apart.isdisjoint((*node.inputs, *node.outputs)):
            unit += EXPERTS
        if not runs or runs[-1][0] != unit:
            runs.append((unit, []))
        runs[-1][1].extend(group)
    return runs


def _belongs(graph: Graph, node: Node, kind: Kind) -> bool:
    """Return whether a node is part of an action. A norm's one kernel makes dx, dw and db, all
    in I."""
    if kind == "F" or node.phase == "forward":
        return kind == "F" and node.phase == "forward"
    weights_only = all(graph.tensors[name].role == "gradient" for name in node.outputs)
    return kind == "B" or (kind == "W") == weights_only


def _received(runs: Actions) -> Names:
    """Return, for each action, the tensors that it reads and no task writes. They arrive from
    outside.

    ``program_of`` lets the action's first task write them and its last task read them. So they live
    through the whole action, as they do in PyTorch: the caller of backward holds the gradient.
    """
    groups = {kind: [task for _, group in runs[kind] for task in group] for kind in runs}
    known = {name for group in groups.values() for task in group for name in task.writes}
    received: Names = {}
    for kind, group in groups.items():
        read = dict.fromkeys(name for task in group for name in task.reads)
        received[kind] = tuple(name for name in read if name not in known)
        known |= read.keys()
    return received


def _retained(runs: Actions, sharded: Sharded) -> Names:
    """Return the tensors that autograd keeps from I until the end of W, by layer. It keeps the
    graph, and so every forward tensor that I reads. It also keeps all that a norm's backward
    reads, because the norm's weights need it again."""
    of_forward = {
        name for _, group in runs["F"] for task in group for name in (*task.reads, *task.writes)
    }
    found: Names = {}
    for unit, group in runs.get("I", ()):
        for task in group:
            again = any(sharded.buffers[name].role == "gradient" for name in task.writes)
            held = [name for name in task.reads if again or name in of_forward]
            found[_layer_of(unit)] = (*found.get(_layer_of(unit), ()), *held)
    return found


def _of_layers(runs: Actions) -> tuple[dict[str, list[Task]], dict[str, list[Task]]]:
    """Return each layer's tasks, forward and backward; none if the program is idle."""
    found: tuple[dict[str, list[Task]], dict[str, list[Task]]] = ({}, {})
    for kind, of in runs.items():
        for unit, group in of:
            if unit != "root" and group:
                found[kind != "F"].setdefault(_layer_of(unit), []).extend(group)
    return found


def _due(runs: Runs, *, each: bool) -> dict[int, list[str]]:
    """Return the units to reduce after each run, by the run's index. With ``each``, a unit is
    reduced after its own last run; otherwise all are reduced after the last run."""
    due: dict[int, list[str]] = {}
    for unit, index in {unit: index for index, (unit, _) in enumerate(runs)}.items():
        due.setdefault(index if each else len(runs) - 1, []).append(unit)
    return due
