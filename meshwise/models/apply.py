"""What one rank does: a graph and a layout become tasks with streams and dependencies.

``shard`` cuts the graph over tp; here the microbatches are repeated and data parallelism is
woven in. It works on units (a layer, or the root: embedding, final norm, head), as FSDP2 does:
gather the unit's weights ahead of its use, reduce its gradients behind it, on a stream of their
own. ZeRO-3 gathers for each forward and backward, 1 and 2 once a step; 0 and 1 reduce on the last
microbatch only, 2 and 3 on each. ZeRO-0 all-reduces.
"""

from typing import NamedTuple

from meshwise.models.graph import BYTES, Graph, Node, Tensor, elementwise, operation
from meshwise.models.shard import Buffer, Sharded, Task, shard
from meshwise.spec import Collective, Layout, Op

Runs = list[tuple[str, list[Task]]]


class Program(NamedTuple):
    """A rank's training step, in the order in which the host issues it.

    ``resident_bytes``: what lives through the whole step (parameters, optimizer state).
    A buffer lives from its first writer to its last reader; ``kept`` live to the end of the step.
    """

    tasks: tuple[Task, ...]
    buffers: dict[str, Buffer]
    resident_bytes: dict[str, int]
    kept: frozenset[str]


def apply(graph: Graph, layout: Layout, dtype: str) -> Program:
    """The program of one rank; ``graph`` is one microbatch of one dp rank, with backward."""
    sharded = shard(graph, layout.tp, layout.sequence_parallel)
    members: dict[str, list[str]] = {}  # unit -> its parameters
    for name in sharded.parameter_elements:
        parts = name.split(".")
        unit = ".".join(parts[:2]) if parts[0] == "layers" else "root"
        members.setdefault(unit, []).append(name)
    elements = {
        unit: sum(sharded.parameter_elements[name] for name in names)
        for unit, names in members.items()
    }
    data = _DataParallel(layout, elements, dtype)
    phases = {phase: _runs_of_units(sharded, phase) for phase in ("forward", "backward")}
    tasks: list[Task] = []
    buffers: dict[str, Buffer] = {}
    for microbatch in range(layout.num_microbatches):
        renamed = {name: f"{name}#{microbatch}" for name in sharded.buffers}
        buffers |= {renamed[name]: buffer for name, buffer in sharded.buffers.items()}
        for phase, runs in phases.items():
            data.begin(phase, microbatch)
            final = {unit: index for index, (unit, _) in enumerate(runs)}
            for index, (unit, group) in enumerate(runs):
                following = runs[index + 1][0] if index + 1 < len(runs) else None
                tasks += data.before(unit, following)
                weights = data.weights(unit)
                for task in group:
                    reads = (*[renamed[name] for name in task.reads], *weights)
                    writes = tuple([renamed[name] for name in task.writes])
                    tasks.append(task._replace(reads=reads, writes=writes))
                if phase == "backward" and final[unit] == index:
                    gradients = tuple([renamed[graph.gradients[name]] for name in members[unit]])
                    tasks += data.after(unit, gradients, microbatch + 1 == layout.num_microbatches)
    local = -(-sum(elements.values()) // (layout.dp if layout.zero else 1))
    tasks += [_optimizer_task(node, local) for node in graph.nodes if node.phase == "optimizer"]
    resident = {"parameters": 4 * local, "optimizer state": 8 * local}
    return Program(tuple(tasks), buffers | data.buffers, resident, frozenset(data.kept))


def _optimizer_task(node: Node, num_elements: int) -> Task:
    local = Tensor("local", ("elements",), "fp32", "parameter")
    op = operation(node, [local], [], {"elements": num_elements})
    return Task(node.name, op, "compute", node.part, node.phase, (), ())


def _runs_of_units(sharded: Sharded, phase: str) -> Runs:
    """Consecutive tasks of one unit, in order; the root comes first and last."""
    runs: Runs = []
    for node, group in sharded.tasks:
        if node.phase != phase:
            continue
        unit = f"layers.{node.layer}" if node.part == "layer" else "root"
        if not runs or runs[-1][0] != unit:
            runs.append((unit, []))
        runs[-1][1].extend(group)
    return runs


class _DataParallel:
    """Gathers and reductions of FSDP2's units, and the buffers they need."""

    def __init__(self, layout: Layout, unit_elements: dict[str, int], dtype: str) -> None:
        self.layout, self.elements, self.dtype = layout, unit_elements, dtype
        self.buffers: dict[str, Buffer] = {}
        self.kept: set[str] = set()
        self.current: dict[str, str] = {}  # unit -> buffer of its gathered weights
        self.era = ""
        self.sharded = layout.zero > 0
        # FSDP2 computes on a copy of its own, unless one device trains in fp32 without it.
        self.copies = layout.num_devices > 1 or dtype != "fp32"

    def begin(self, phase: str, microbatch: int) -> None:
        self.era = f"{phase}{microbatch}"
        if self.layout.zero == 3:
            self.current = {unit: name for unit, name in self.current.items() if unit == "root"}
            if phase == "forward":
                self.current = {}

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
        flat = self._gathered(unit)
        if not self.sharded or unit in self.current or flat in self.buffers:
            return []
        size = self.elements[unit] * BYTES[self.dtype]
        self.buffers[flat] = Buffer(size, "communication")
        gather = self._collective("all_gather", size, self.dtype)
        return [Task(f"{unit}.all_gather", gather, "dp", "dp", self.era, after, (flat,))]

    def _gathered(self, unit: str) -> str:
        return f"gathered.{unit}.{self.era}"

    def _unpack(self, unit: str) -> list[Task]:
        """Copy a gathered unit into its weights; without sharding, cast the local ones."""
        if unit in self.current or not self.copies:
            return []
        size, full = self.elements[unit] * BYTES[self.dtype], f"weights.{unit}.{self.era}"
        self.buffers[full] = Buffer(size, "weights")
        self.current[unit] = full
        reads: tuple[str, ...] = ()
        if self.sharded:
            op, reads = elementwise("copy", size, size, "forward"), (self._gathered(unit),)
        else:
            op = elementwise("cast", 4 * self.elements[unit], size, "forward")
        return [Task(f"{unit}.unpack", op, "compute", "dp", self.era, reads, (full,))]

    def after(self, unit: str, gradients: tuple[str, ...], last: bool) -> list[Task]:
        """Reduce a unit's gradients once its backward is done, or add them to those before."""
        zero, dp = self.layout.zero, self.layout.dp
        wide, compute = 4 * self.elements[unit], BYTES[self.dtype] * self.elements[unit]
        tasks = []

        def task(name: str, op: Op, stream: str, writes: str) -> None:
            tasks.append(Task(f"{unit}.{name}", op, stream, "dp", self.era, gradients, (writes,)))

        if zero < 2 and (self.layout.num_microbatches > 1 or not self.copies):
            total = f"accumulated.{unit}"
            read = compute + (wide if total in self.buffers else 0)
            self.buffers[total] = Buffer(wide, "gradient")
            task("accumulate", elementwise("add", read, wide, "backward"), "compute", total)
            gradients = (total,)
            if not self.copies:
                self.kept.add(total)
        if not self.copies or not (last or zero >= 2):
            return tasks
        flat, done = f"reduce_in.{unit}.{self.era}", f"gradient.{unit}"
        self.buffers[flat] = Buffer(wide, "communication")
        self.buffers[done] = Buffer(-(-wide // dp) if zero else wide, "gradient")
        self.kept.add(done)
        task("copy_in", elementwise("copy", compute, wide, "backward"), "compute", flat)
        gradients = (flat,)
        reduce = self._collective("reduce_scatter" if zero else "all_reduce", wide, "fp32")
        task(reduce.kind, reduce, "dp", done)
        return tasks

    def _collective(self, kind: str, size_bytes: int, dtype: str) -> Collective:
        return Collective(
            kind=kind,  # type: ignore[arg-type]
            size_bytes=size_bytes,
            group_size=self.layout.dp,
            group_stride=self.layout.tp,
            dtype=dtype,  # type: ignore[arg-type]
        )
