"""Add to a rank's program what ``parallel.offload`` does: saved tensors wait in host memory.

In: the runs of each action, and the bytes of the buffers. After a layer's forward one copy to the
host takes the large tensors that the layer saves; their memory is free once the next layer's
forward and this copy have ended. A layer's backward begins when its tensors are back, and starts
the copy of those of the layer before it. They are held until the layer's backward ends. A stage's
last layer copies nothing and keeps its tensors. What a stage receives stays, too.

All copies are on one stream. Who waits for it waits for all copies issued before (``ISSUED``). On a
CPU the host's copies are memory of the rank.
"""

from collections.abc import Collection, Mapping, Sequence

from msgspec.structs import replace

from meshwise.models.graph import Device, elementwise
from meshwise.models.shard import Buffer, Task

MIN_BYTES = 2**20  # smaller tensors stay on the device
ISSUED = "host.issued"  # the buffer that stands for all copies issued so far


class Offload:
    """The copies of one stage. ``forward``, ``backward``: the tasks of each layer, in order.
    ``received``: buffers that arrive from outside."""

    def __init__(
        self,
        forward: Mapping[str, Sequence[Task]],
        backward: Mapping[str, Sequence[Task]],
        sizes: Mapping[str, Buffer],
        received: Collection[str],
        device: Device,
    ) -> None:
        self.device = device
        layers = [*forward]
        self.before = dict(zip(layers, [None, *layers], strict=False))
        moving = {name for name, of in sizes.items() if of.num_bytes >= MIN_BYTES} - {*received}
        self.saved = {
            layer: _saved(of, backward[layer], moving if layer != layers[-1] else ())
            for layer, of in forward.items()
        }
        self.size = {
            layer: sum(sizes[name].num_bytes for name in of) for layer, of in self.saved.items()
        }
        self.buffers: dict[str, Buffer] = {}

    def begin(self, microbatch: int, renamed: Mapping[str, str]) -> None:
        """Go on with a microbatch; ``renamed``: its buffers."""
        self.microbatch, self.renamed = microbatch, renamed

    def kept(self, layer: str) -> dict[str, str]:
        """Return which buffers a layer's backward reads for those that the layer saved."""
        return dict.fromkeys(self.saved.get(layer, ()), self._name(layer, "back"))

    def after_forward(self, tasks: list[Task], layer: str) -> None:
        """Let the memory of the layer before go, and copy this layer's tensors to the host."""
        before = self.before[layer]
        leaving = [self.renamed[name] for name in self.saved[before]] if before else []
        if leaving:
            tasks[-1] = reading(tasks[-1], (ISSUED, *leaving))
        names = [self.renamed[name] for name in self.saved[layer]]
        host = self._add(layer, "host") if self.device == "cpu" else ()
        self._copy(tasks, layer, "d2h", (*leaving, *names), host, len(tasks))

    def before_backward(self, tasks: list[Task], start: int, layer: str) -> None:
        """Let the layer's first task, at ``start``, wait for its tensors, and fetch those of the
        layer before."""
        if self.saved[layer]:
            tasks[start] = reading(tasks[start], (ISSUED,))
        if before := self.before[layer]:
            host = (self._name(before, "host"),) if self.device == "cpu" else ()
            self._copy(tasks, before, "h2d", host, self._add(before, "back"), start + 1)

    def after_backward(self, tasks: list[Task], layer: str) -> None:
        """Hold the layer's tensors until its last task."""
        held = [*dict.fromkeys(self.kept(layer).values())]
        if self.device == "cpu" and held:
            held.append(self._name(layer, "host"))
        tasks[-1] = reading(tasks[-1], tuple(held))

    def _copy(
        self,
        tasks: list[Task],
        layer: str,
        kind: str,
        reads: tuple[str, ...],
        writes: tuple[str, ...],
        at: int,
    ) -> None:
        size, host = self.size[layer], self.device == "cpu"
        if size:
            op = elementwise("copy" if host else kind, size, size, "forward")
            self.buffers[ISSUED] = Buffer(0, "activation")
            about = f"{layer}.{kind}", op, "host", "layer", "forward"
            tasks.insert(at, Task(*about, reads, (*writes, ISSUED)))

    def _add(self, layer: str, where: str) -> tuple[str, ...]:
        if not self.size[layer]:
            return ()
        self.buffers[name := self._name(layer, where)] = Buffer(self.size[layer], "activation")
        return (name,)

    def _name(self, layer: str, where: str) -> str:
        return f"{layer}.{where}#{self.microbatch}"


def reading(task: Task, more: tuple[str, ...]) -> Task:
    """Return the task with more reads."""
    return replace(task, reads=(*task.reads, *more))


def _saved(
    forward: Sequence[Task], backward: Sequence[Task], moving: Collection[str]
) -> tuple[str, ...]:
    """Return the buffers of a layer's forward that its backward reads, of those that may move."""
    made = {name for task in forward for name in (*task.reads, *task.writes)}
    read = dict.fromkeys(name for task in backward for name in task.reads)
    return tuple(name for name in read if name in made and name in moving)
