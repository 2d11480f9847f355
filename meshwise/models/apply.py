"""What one rank does: a graph and a layout become tasks with streams and dependencies.

``shard`` cuts the graph over tp and cp; here the microbatches are repeated and data parallelism is
woven in. It works on units (a layer, or the root: embedding, final norm, head), as FSDP2 does:
gather the unit's weights ahead of its use, reduce its gradients behind it, on a stream of their
own. Experts that ranks divide are units of their own, over the ranks that hold the same ones.
ZeRO-3 gathers for each forward and backward, 1 and 2 once a step; 0 and 1 reduce on the last
microbatch only, 2 and 3 on each. ZeRO-0 all-reduces. With replicas (HSDP) shards are gathered
and reduced within one replica, then all-reduced over the replicas.

The backward of a pipeline stage may be split into I, all but the weights' gradients, and W, these.
FSDP2's hooks know nothing of that: all weights are gathered before I, freed and reduced after W.
"""

from collections.abc import Iterator, Mapping
from functools import lru_cache
from math import prod
from typing import Any, Literal, NamedTuple

from msgspec.structs import replace

from meshwise.models.graph import BYTES, Device, Graph, Node, Tensor, elementwise, operation
from meshwise.models.shard import OVER_DATA, Buffer, Sharded, Task, shard
from meshwise.spec import Collective, Layout, Op

Runs = list[tuple[str, list[Task]]]
Kind = Literal["F", "B", "I", "W"]
Actions = dict[Kind, Runs]
Names = dict[Any, tuple[str, ...]]
EXPERTS = ".experts"  # of a layer's unit, where ranks hold different ones


class ActionSpan(NamedTuple):
    """An action of a pipeline schedule: ``tasks[start:stop]`` of a program.

    ``kind``: F forward, B backward, or B in two: I and then W, the weights' gradients.
    """

    kind: Kind
    microbatch: int
    start: int
    stop: int


class Loop(NamedTuple):
    """``tasks[start:stop]``, of a layer or of a few in a row, stand for ``times`` as many in a row.
    Each turn finds as ``here`` the gathered weights that the one before it left as ``there``.
    ``layer``: the first of them."""

    start: int
    stop: int
    times: int
    here: str
    there: str
    layer: str


class Program(NamedTuple):
    """A rank's training step, in the order in which the host issues it.

    ``resident_bytes``: what lives through the whole step (parameters, optimizer state).
    ``gathered``: elements of all weights that this rank gathers to compute with. A buffer lives
    from its first writer to its last reader; ``kept`` live to the end of the step. ``units``: the
    elements of each that this rank keeps, and gathers."""

    tasks: tuple[Task, ...]
    buffers: dict[str, Buffer]
    resident_bytes: dict[str, int]
    kept: frozenset[str]
    actions: tuple[ActionSpan, ...] = ()
    loops: tuple[Loop, ...] = ()
    gathered: int = 0
    units: Mapping[str, tuple[int, int]] = {}
    optimizer: tuple[Node, ...] = ()


def apply(
    graph: Graph,
    layout: Layout,
    dtype: str,
    *,
    split: bool = False,
    times: Mapping[int, int] | None = None,
    device: Device = "cuda",
    cp_rank: int | None = None,
) -> Program:
    """The program of one rank; ``graph`` is one microbatch of one dp rank, with backward.

    ``layout``: within the stage's pipeline rank. ``actions`` cover all tasks but the optimizer's;
    ``split`` halves backwards. ``times``: layers, by index, that stand for so many; neighbours do
    so in turns. ``cp_rank``: by default the busiest."""
    over = (layout.tp, layout.placed, layout.ep, layout.cp, cp_rank, device)
    sharded, members, runs, received, retained = _parts(graph, split, *over)
    data = _DataParallel(layout, members, dtype, sharded, device)
    several = {f"layers.{index}" for index in times or ()}
    tasks, actions, loops = list[Task](), list[ActionSpan](), list[Loop]()

    def loop(start: int, unit: str, following: str | None = None) -> None:
        """Note that what was added since ``start`` is of a layer that stands for several."""
        if (layer := _layer_of(unit)) in several and start < len(tasks):
            names = (data.gathered(layer), data.gathered(following or layer), layer)
            _note(loops, Loop(start, len(tasks), 1, *names))

    buffers: dict[str, Buffer] = {}
    for microbatch in range(layout.num_microbatches):
        last = microbatch + 1 == layout.num_microbatches
        renamed = {name: f"{name}#{microbatch}" for name in sharded.buffers}
        buffers |= {renamed[name]: buffer for name, buffer in sharded.buffers.items()}
        for kind, groups in runs.items():
            start = len(tasks)
            data.begin(kind, microbatch)
            for unit, _ in groups if kind == "I" or (kind == "W" and not runs["I"]) else ():
                tasks += (gathers := data.before(unit, None))
                loop(len(tasks) - len(gathers), unit)
            each = kind == "B" and not data.rests(microbatch)
            due = _due(groups, each=each) if kind in ("B", "W") else {}
            for index, (unit, group) in enumerate(groups):
                if index == 0 or _layer_of(groups[index - 1][0]) != _layer_of(unit):
                    begin = len(tasks)
                following = groups[index + 1][0] if index + 1 < len(groups) else None
                if kind in ("F", "B"):
                    tasks += data.before(unit, following)
                weights = (*data.weights(unit), *data.unreleased)
                tasks += [_of_microbatch(task, renamed, weights) for task in data.summed(group)]
                ends = following is None or _layer_of(following) != _layer_of(unit)
                if kind == "W" and ends:
                    tasks[-1] = _reading(tasks[-1], renamed, retained.get(_layer_of(unit), ()))
                for done in due.get(index, ()):
                    at = len(tasks)
                    gradients = {name: renamed[graph.gradients[name]] for name in members[done]}
                    tasks += data.after(done, gradients, last)
                    if _layer_of(done) != _layer_of(unit):
                        loop(at, done)
                if ends:
                    loop(begin, unit, following)
            if groups:
                arrived = [renamed[name] for name in received[kind]]
                tasks[start] = replace(tasks[start], writes=(*tasks[start].writes, *arrived))
                tasks[-1] = _reading(tasks[-1], renamed, received[kind])
            actions.append(ActionSpan(kind, microbatch, start, len(tasks)))
    units = {unit: (data.shard_elements[unit], data.padded(unit)) for unit in members}
    optimizer = tuple(node for node in graph.nodes if node.phase == "optimizer")
    buffers |= data.buffers
    found = Program(tuple(tasks), buffers, {}, frozenset(data.kept), tuple(actions), tuple(loops))
    return repeated(found._replace(units=units, optimizer=optimizer), times or {})


def repeated(program: Program, times: Mapping[int, int]) -> Program:
    """The same program where the layers that stand for several stand for so many ``times``."""
    count = {f"layers.{index}": number for index, number in times.items()}
    held = [(*of, count.get(_layer_of(unit), 1)) for unit, of in program.units.items()]
    local = sum(own * number for own, _, number in held)
    optimizer = [_optimizer_task(node, local) for node in program.optimizer]
    return program._replace(
        tasks=(*program.tasks[: program.actions[-1].stop], *optimizer),
        resident_bytes={"parameters": 4 * local, "optimizer state": 8 * local},
        loops=tuple([loop._replace(times=count[loop.layer]) for loop in program.loops]),
        gathered=sum(whole * number for _, whole, number in held),
    )


def _note(loops: list[Loop], loop: Loop) -> None:
    """Append a loop; where the last one ends at its start, both are one turn of a pattern."""
    if loops and loops[-1].stop == loop.start:
        before = loops.pop()
        loop = loop._replace(start=before.start, here=before.here, layer=before.layer)
    loops.append(loop)


def _of_microbatch(task: Task, renamed: Mapping[str, str], weights: tuple[str, ...]) -> Task:
    reads = (*map(renamed.__getitem__, task.reads), *weights)
    writes = (*map(renamed.__getitem__, task.writes),)
    return Task(task.name, task.op, task.stream, task.part, task.phase, reads, writes)


def _reading(task: Task, renamed: Mapping[str, str], names: tuple[str, ...]) -> Task:
    """The same, which also reads what a microbatch calls by these names."""
    return replace(task, reads=(*task.reads, *[renamed[name] for name in names]))


def _layer_of(unit: str) -> str:
    return unit.removesuffix(EXPERTS)


def _optimizer_task(node: Node, num_elements: int) -> Task:
    local = Tensor("local", ("elements",), "fp32", "parameter")
    op = operation(node, [local], [], {"elements": num_elements})
    return Task(node.name, op, "compute", node.part, node.phase, (), ())


@lru_cache(maxsize=2048)
def _parts(
    graph: Graph, split: bool, *over: Any
) -> tuple[Sharded, dict[str, list[str]], Actions, Names, Names]:
    """Keep what data parallelism does not change: shards, members, runs, what these read."""
    sharded = shard(graph, *over)
    runs = _runs(graph, sharded, split)
    return sharded, _members(sharded), runs, _received(runs), _retained(runs, sharded)


def _members(sharded: Sharded) -> dict[str, list[str]]:
    """The parameters of each unit."""
    members: dict[str, list[str]] = {}
    for name in sharded.shapes:
        parts = name.split(".")
        unit = ".".join(parts[:2]) if parts[0] == "layers" else "root"
        members.setdefault(f"{unit}{EXPERTS}" if name in sharded.apart else unit, []).append(name)
    return members


def _runs(graph: Graph, sharded: Sharded, split: bool) -> Actions:
    """Each action's tasks. A first stage has no gradient to send on: all its backward is W."""
    if not split:
        return {kind: _runs_of_units(graph, sharded, kind) for kind in ("F", "B")}
    if "stage.in" not in graph.tensors:
        forward, backward = (_runs_of_units(graph, sharded, kind) for kind in ("F", "B"))
        return {"F": forward, "I": [], "W": backward}
    return {kind: _runs_of_units(graph, sharded, kind) for kind in ("F", "I", "W")}


def _runs_of_units(graph: Graph, sharded: Sharded, kind: Kind) -> Runs:
    """Consecutive tasks of one unit in an action, in order; the root comes first and last."""
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
    """Whether a node is part of an action. A norm's one kernel makes dx, dw and db, all in I."""
    if kind == "F" or node.phase == "forward":
        return kind == "F" and node.phase == "forward"
    weights_only = all(graph.tensors[name].role == "gradient" for name in node.outputs)
    return kind == "B" or (kind == "W") == weights_only


def _received(runs: Actions) -> Names:
    """What arrives at each action: read there, and never written.

    The action's first task is said to write it and its last to read it, so that its life has a
    beginning, and spans the action: whoever calls backward holds the gradient that long."""
    groups = {kind: [task for _, group in runs[kind] for task in group] for kind in runs}
    known = {name for group in groups.values() for task in group for name in task.writes}
    received: Names = {}
    for kind, group in groups.items():
        read = dict.fromkeys(name for task in group for name in task.reads)
        received[kind] = tuple(name for name in read if name not in known)
        known |= read.keys()
    return received


def _retained(runs: Actions, sharded: Sharded) -> Names:
    """By layer, what autograd keeps from I until the end of W, since it keeps the graph: all that I
    reads of the forward pass, and a norm's gradients, which its weights need once more."""
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


def _due(runs: Runs, *, each: bool) -> dict[int, list[str]]:
    """After which run which units' gradients are taken up: ``each`` at its last, or all at once."""
    due: dict[int, list[str]] = {}
    for unit, index in {unit: index for index, (unit, _) in enumerate(runs)}.items():
        due.setdefault(index if each else len(runs) - 1, []).append(unit)
    return due


def padded_shard(shape: tuple[int, ...], ranks: int) -> int:
    """Elements that each of so many ranks holds of a parameter: FSDP2 cuts its first dim and pads
    it to a multiple of the ranks."""
    return -(-shape[0] // ranks) * prod(shape[1:])


class _Groups(NamedTuple):
    """Over how many ranks a unit's weights are cut, how far apart; and their copies."""

    shards: int
    stride: int
    copies: int
    copy_stride: int


def _groups(layout: Layout, unit: str) -> _Groups:
    shards, tp = layout.shards, layout.tp
    copies = layout.data_ranks // shards
    if not unit.endswith(EXPERTS):
        return _Groups(shards, tp, copies, tp * shards)
    ep = layout.ep
    if layout.zero:
        return _Groups(shards // ep, tp * ep, copies, tp * shards)
    return _Groups(1, tp * ep, copies // ep, tp * ep)


class _DataParallel:
    """Gathers and reductions of FSDP2's units, and the buffers they need."""

    def __init__(
        self,
        layout: Layout,
        members: dict[str, list[str]],
        dtype: str,
        over_tp: Sharded,
        device: Device,
    ) -> None:
        self.device = device
        self.layout, self.dtype, self.over_tp = layout, dtype, over_tp
        shapes = {unit: [over_tp.shapes[name] for name in names] for unit, names in members.items()}
        self.elements = {unit: sum(map(prod, of)) for unit, of in shapes.items()}
        self.groups = {unit: _groups(layout, unit) for unit in members}
        self.shard_elements = {
            unit: sum(padded_shard(shape, self.groups[unit].shards) for shape in of)
            for unit, of in shapes.items()
        }
        self.buffers: dict[str, Buffer] = {}
        self.kept: set[str] = set()
        self.sums: dict[str, tuple[str, ...]] = {}  # unit -> buffers that its gradients add up in
        self.current: dict[str, str] = {}  # unit -> buffer of its gathered weights
        self.unreleased: tuple[str, ...] = ()  # what the last unit reduced: until the next reduces
        self.era = ""
        self.sharded = layout.zero > 0
        # FSDP2 computes on a copy of its own, unless one device trains in fp32 without it.
        self.copies = layout.num_devices > 1 or dtype != "fp32"

    def begin(self, kind: Kind, microbatch: int) -> None:
        self.era = f"{'forward' if kind == 'F' else 'backward'}{microbatch}"
        self.unreleased = ()
        if self.layout.zero == 3 and kind != "W":
            stays = self.current.items() if kind != "F" else ()
            self.current = {unit: name for unit, name in stays if unit == "root"}

    def summed(self, tasks: list[Task]) -> Iterator[Task]:
        """The same with what is added up over all data ranks (loads of experts, statistics of
        norms), group by group."""
        whole = _groups(self.layout, "")
        sums = ((whole.copies, whole.copy_stride), (whole.shards, whole.stride))
        for task in tasks:
            if not task.name.endswith(f".{OVER_DATA}"):
                yield task
                continue
            for ranks, stride in sums:
                if ranks > 1:
                    op = replace(task.op, group_size=ranks, group_stride=stride)
                    yield replace(task, op=op)

    def rests(self, microbatch: int) -> bool:
        """Whether FSDP2 sees nothing of a microbatch, so that gradients wait for the end of its
        backward (``parallel.data.may_rest``); other data ranks need it in the first and the last.
        """
        layout, last = self.layout, self.layout.num_microbatches - 1
        may = self.copies and layout.zero < 2 and layout.expert_ranks == 1 and last > 0
        return may and (layout.data_ranks == 1 or microbatch not in (0, last))

    def weights(self, unit: str) -> tuple[str, ...]:
        return (self.current[unit],) if unit in self.current else ()

    def before(self, unit: str, following: str | None) -> list[Task]:
        """This unit's weights, ready to use; the following unit's on their way meanwhile."""
        tasks = self._gather(unit) + self._unpack(unit)
        if following is not None:
            tasks += self._gather(following, after=self.weights(unit))
        return tasks

    def _gather(self, unit: str, after: tuple[str, ...] = ()) -> list[Task]:
        """Start the all-gather of a unit, unless its weights are there or on their way."""
        flat = self.gathered(unit)
        if not self.sharded or unit in self.current or flat in self.buffers:
            return []
        size = self.padded(unit) * BYTES[self.dtype]
        self.buffers[flat] = Buffer(size, "communication")
        gather = self._collective(unit, "all_gather", size, self.dtype)
        writes: tuple[str, ...] = (flat,)
        if self.device == "cpu":  # gloo gathers into a buffer of its own
            writes = (flat, self._passing("arriving", unit, size))
        return [Task(f"{unit}.all_gather", gather, "dp", "dp", self.era, after, writes)]

    def padded(self, unit: str) -> int:
        """Elements of a unit as its ranks send them."""
        return self.shard_elements[unit] * self.groups[unit].shards

    def gathered(self, unit: str) -> str:
        """The buffer that a unit's weights arrive in."""
        return f"gathered.{unit}.{self.era}"

    def _unpack(self, unit: str) -> list[Task]:
        """Copy a gathered unit into its weights; without sharding, cast the local ones."""
        if unit in self.current or not self.copies:
            return []
        size, full = self.padded(unit) * BYTES[self.dtype], f"weights.{unit}.{self.era}"
        self.buffers[full] = Buffer(size, "weights")
        self.current[unit] = full
        reads: tuple[str, ...] = ()
        if self.sharded:
            op, reads = elementwise("copy", size, size, "forward"), (self.gathered(unit),)
        else:
            op = elementwise("cast", 4 * self.elements[unit], size, "forward")
        return [Task(f"{unit}.unpack", op, "compute", "dp", self.era, reads, (full,))]

    def after(self, unit: str, made: dict[str, str], last: bool) -> list[Task]:
        """Reduce a unit's gradients, ``made`` by parameter, once its backward is done, or add them
        to those before."""
        zero, groups = self.layout.zero, self.groups[unit]
        gradients = tuple(made.values())
        wide, compute = 4 * self.elements[unit], BYTES[self.dtype] * self.elements[unit]
        tasks = []

        def task(name: str, op: Op, stream: str, *writes: str) -> None:
            tasks.append(Task(f"{unit}.{name}", op, stream, "dp", self.era, gradients, writes))

        if zero < 2 and (self.layout.num_microbatches > 1 or not self.copies):
            before = self.sums.get(unit, ())
            if self.dtype == "fp32":  # autograd adds each to its sum as it is made
                self.sums[unit] = before or gradients
                gradients = ()
            else:
                total = f"accumulated.{unit}"
                self.buffers[total] = Buffer(wide, "gradient")
                self.sums[unit] = (total,)
            passing: tuple[str, ...] = ()
            if before and gradients and self.device == "cpu":  # its sum of two dtypes casts first
                largest = max(prod(self.over_tp.shapes[name]) for name in made)
                passing = (self._passing("wide", unit, 4 * largest),)
            if before or gradients:
                read = compute + (wide if before else 0)
                op = elementwise("add", read, wide, "backward")
                task("accumulate", op, "compute", *self.sums[unit], *passing)
            gradients = self.sums[unit]
            if not self.copies:
                self.kept.update(gradients)
        if not self.copies or not (last or zero >= 2):
            return tasks
        for name in made:
            if name in self.over_tp.partial:
                task(f"{name}.all_reduce", self._over_tp(name), "compute")
        flat, done = f"reduce_in.{unit}.{self.era}", f"gradient.{unit}"
        self.unreleased = (flat,)
        wide = 4 * self.padded(unit)
        self.buffers[flat] = Buffer(wide, "communication")
        share = wide // groups.shards
        passing = ()
        if self.device == "cpu" and groups.shards > 1:  # gloo reduces all of a copy
            passing = (self._passing("copied", unit, wide),)
        if done in self.buffers:  # it is added to what earlier microbatches left
            passing = (*passing, self._passing("reduced", unit, share))
        self.buffers[done] = Buffer(share, "gradient")
        self.kept.add(done)
        task("copy_in", elementwise("copy", compute, wide, "backward"), "compute", flat)
        gradients = (flat,)
        if zero:
            scatter = self._collective(unit, "reduce_scatter", wide, "fp32")
            task("reduce_scatter", scatter, "dp", done, *passing)
            gradients, wide = (done,), self.buffers[done].num_bytes
        if groups.copies > 1 or not zero:
            task("all_reduce", self._collective(unit, "all_reduce", wide, "fp32"), "dp", done)
        return tasks

    def _passing(self, name: str, unit: str, size: int) -> str:
        """A buffer that one task needs and nobody reads."""
        full = f"{name}.{unit}.{self.era}"
        self.buffers[full] = Buffer(size, "communication")
        return full

    def _over_tp(self, name: str) -> Collective:
        """The sum over tp of a gradient, in fp32 where it was added up before."""
        wide = self.layout.num_microbatches > 1 and self.layout.zero < 2
        dtype = "fp32" if wide else self.dtype
        return Collective(
            kind="all_reduce",
            size_bytes=prod(self.over_tp.shapes[name]) * BYTES[dtype],
            group_size=self.layout.tp,
            dtype=dtype,  # type: ignore[arg-type]
            in_place=True,
        )

    def _collective(self, unit: str, kind: str, size_bytes: int, dtype: str) -> Collective:
        """Over a unit's shards, or over their copies (of which ZeRO-0 has one on each rank)."""
        groups = self.groups[unit]
        over_copies = kind == "all_reduce"
        return Collective(
            kind=kind,  # type: ignore[arg-type]
            size_bytes=size_bytes,
            group_size=groups.copies if over_copies else groups.shards,
            group_stride=groups.copy_stride if over_copies else groups.stride,
            dtype=dtype,  # type: ignore[arg-type]
            in_place=over_copies,
        )
