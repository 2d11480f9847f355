"""Weave data parallelism into a rank's program as FSDP2 does: gathers, casts, reductions of units.

In: the layout within a pipeline rank, and the parameters of each unit. Out: the tasks before and
after a unit's own, and the buffers they need. Rules: ``apply``.
"""

from collections.abc import Iterator
from math import prod
from typing import NamedTuple

from msgspec.structs import replace

from meshwise.models.graph import BYTES, Device, elementwise
from meshwise.models.shard import OVER_DATA, Buffer, Sharded, Task
from meshwise.spec import Collective, Layout, Op

EXPERTS = ".experts"  # of a layer's unit, where ranks hold different ones


def padded_shard(shape: tuple[int, ...], ranks: int) -> int:
    """Return the elements of a parameter that each of ``ranks`` ranks holds: FSDP2 cuts its
    first dim and pads it to a multiple of the ranks."""
    return -(-shape[0] // ranks) * prod(shape[1:])


class _Groups(NamedTuple):
    """The ranks over which a unit's weights are cut, and their copies, with the stride of each
    group."""

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


class DataParallel:
    """The gathers and reductions of FSDP2's units, and the buffers they need."""

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

    def begin(self, kind: str, microbatch: int) -> None:
        self.era = f"{'forward' if kind == 'F' else 'backward'}{microbatch}"
        self.unreleased = ()
        if self.layout.zero == 3 and kind != "W":
            stays = self.current.items() if kind != "F" else ()
            self.current = {unit: name for unit, name in stays if unit == "root"}

    def summed(self, tasks: list[Task]) -> Iterator[Task]:
        """Yield the tasks with their sums over data ranks filled in (loads of experts,
        statistics of norms), one per group."""
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
        """Return whether FSDP2 sees nothing of a microbatch, so that gradients wait for the end
        of its backward (``parallel.data.may_rest``). With other data ranks it sees the first and
        the last."""
        layout, last = self.layout, self.layout.num_microbatches - 1
        may = self.copies and layout.zero < 2 and layout.expert_ranks == 1 and last > 0
        return may and (layout.data_ranks == 1 or microbatch not in (0, last))

    def weights(self, unit: str) -> tuple[str, ...]:
        return (self.current[unit],) if unit in self.current else ()

    def before(self, unit: str, following: str | None) -> list[Task]:
        """Return the tasks that make a unit's weights ready, and start the gather of the
        following unit."""
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
        """Return the elements of a unit as its ranks send them, padded."""
        return self.shard_elements[unit] * self.groups[unit].shards

    def gathered(self, unit: str) -> str:
        """Return the name of the buffer in which a unit's weights arrive."""
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
        """Reduce a unit's gradients (``made`` by parameter) after its backward, or add them to
        earlier ones."""
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
        """Add a buffer that one task needs and nobody reads."""
        full = f"{name}.{unit}.{self.era}"
        self.buffers[full] = Buffer(size, "communication")
        return full

    def _over_tp(self, name: str) -> Collective:
        """Return the sum of a gradient over tp, in fp32 if it was accumulated before."""
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
        """Return a collective over a unit's shards, or over their copies (with ZeRO-0 one on
        each rank)."""
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
