"""Add data parallelism to a rank's program as FSDP2 does: gather, cast and reduce each unit.

In: the layout within a pipeline rank, and the parameters of each unit. Out: the tasks before and
after a unit's own tasks, and the buffers they need. ``program_of`` states the rules.

Weights that every tp rank holds whole have gradients that must also be summed over tp
(``Layout.tp_sums``). "first": each is all-reduced before its unit is reduced. "last" and
"together": they wait for the end of the step. With "together" one sum covers tp and the data ranks,
and FSDP2 does not manage these weights: each microbatch casts them, and gradients add up unsharded.
"""

from collections.abc import Iterator
from math import prod
from typing import NamedTuple

from msgspec.structs import replace

from meshwise.models.graph import BYTES, Device, elementwise, message
from meshwise.models.optimizer import OwnPart
from meshwise.models.shard import OVER_DATA, Buffer, Sharded, Task
from meshwise.spec import Collective, Layout, Op, Recipe

EXPERTS = ".experts"  # suffix of a layer's unit of experts, if ranks hold different ones


def padded_shard(shape: tuple[int, ...], ranks: int) -> int:
    """Return the elements of a parameter that each of ``ranks`` ranks holds. FSDP2 cuts its
    first dim and pads it to a multiple of the ranks."""
    return -(-shape[0] // ranks) * prod(shape[1:])


class _Groups(NamedTuple):
    """The number of ranks that shard a unit's weights and the number of copies, each with the
    stride of its group."""

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


class UnitElements(NamedTuple):
    """Elements of a unit that this rank ``keeps`` and ``gathers``. ``due``: elements of gradients
    to sum at the end of the step, over tp, and over tp and the data ranks. ``shares``: its part of
    each parameter."""

    keeps: int
    gathers: int
    due: tuple[int, int]
    shares: tuple[OwnPart, ...]


def summed(elements: int, ranks: int, recipe: Recipe) -> list[Task]:
    """Return the tasks that sum gradients over neighbouring ranks in one all-reduce at the end of a
    step."""
    held, size = BYTES[recipe.weights] * elements, BYTES[recipe.reduce] * elements
    copy_in = elementwise("copy", held, size, "backward")
    copy_out = elementwise("copy", size, held, "backward")
    op = message(
        kind="all_reduce", size_bytes=size, group_size=ranks, dtype=recipe.reduce, in_place=True
    )
    steps = (("copy_in", copy_in), ("all_reduce", op), ("copy_out", copy_out)) if elements else ()
    return [Task(f"sums.{name}", op, "compute", "dp", "backward", (), ()) for name, op in steps]


class DataParallel:
    """The gathers and reductions of FSDP2's units, and the buffers they need."""

    def __init__(
        self,
        layout: Layout,
        members: dict[str, list[str]],
        dtype: str,
        over_tp: Sharded,
        device: Device,
        recipe: Recipe,
    ) -> None:
        self.device, self.weights_dtype, self.reduce_dtype = device, recipe.weights, recipe.reduce
        self.weight_bytes, self.reduce_bytes = BYTES[recipe.weights], BYTES[recipe.reduce]
        self.layout, self.dtype, self.over_tp, self.members = layout, dtype, over_tp, members
        self.groups = {unit: _groups(layout, unit) for unit in members}
        together = over_tp.partial - over_tp.apart if layout.tp_sums == "together" else frozenset()
        last = over_tp.partial - together if layout.tp_sums != "first" else frozenset()
        seen = frozenset(over_tp.shapes) - together
        self.first, self.unseen = over_tp.partial - together - last, together

        def shards(among: frozenset[str]) -> dict[str, int]:
            """Return the elements of these parameters that a rank holds, by unit."""
            return {
                unit: sum(
                    padded_shard(over_tp.shapes[name], self.groups[unit].shards)
                    for name in names
                    if name in among
                )
                for unit, names in members.items()
            }

        self.elements = {
            unit: sum(prod(over_tp.shapes[name]) for name in names if name in seen)
            for unit, names in members.items()
        }
        self.shard_elements, self.unseen_elements = shards(seen), shards(together)
        self.last_elements = shards(last)
        self.buffers: dict[str, Buffer] = {}
        self.kept: set[str] = set()
        self.sums: dict[str, tuple[str, ...]] = {}  # unit -> buffers that hold its summed gradients
        self.current: dict[str, str] = {}  # unit -> buffer of its gathered weights
        self.unreleased: tuple[str, ...] = ()  # the last reduction's input; the next frees it
        self.era, self.microbatch = "", 0
        self.sharded = layout.zero > 0
        # FSDP2 computes on its own copy. One device that trains in fp32 runs without FSDP2.
        self.copies = layout.num_devices > 1 or dtype != "fp32"

    @property
    def sum_over(self) -> tuple[int, int]:
        return self.layout.tp, self.layout.tp * self.layout.data_ranks

    def unit(self, unit: str) -> UnitElements:
        """Return the elements of a unit."""
        unseen = self.unseen_elements[unit]
        kept = self.shard_elements[unit] + unseen
        due, shares = (self.last_elements[unit], unseen), tuple(self._shares(unit))
        return UnitElements(kept, self.padded(unit), due, shares)

    def _shares(self, unit: str) -> Iterator[OwnPart]:
        """Yield this rank's part of each parameter; ranks next to each other share what tp cuts."""
        of = self.groups[unit]
        for name in self.members[unit]:
            local, whole = self.over_tp.shapes[name], self.over_tp.whole[name]
            cuts = [(0, of.shards, of.stride)] if of.shards > 1 else []
            for dim, (part, size) in enumerate(zip(local, whole, strict=True)):
                if part < size:
                    cuts.append((dim, -(-size // part), 1))
            yield OwnPart((-(-local[0] // of.shards), *local[1:]), tuple(cuts))

    def begin(self, kind: str, microbatch: int) -> None:
        self.era = f"{'forward' if kind == 'F' else 'backward'}{microbatch}"
        self.unreleased, self.microbatch = (), microbatch
        if self.layout.zero == 3 and kind != "W":
            stays = self.current.items() if kind != "F" else ()
            self.current = {unit: name for unit, name in stays if unit == "root"}

    def summed(self, tasks: list[Task]) -> Iterator[Task]:
        """Yield the tasks. A sum over data ranks (loads of experts, statistics of norms) becomes
        one all-reduce per group of ranks."""
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
        """Return whether a microbatch runs without FSDP2's hooks, so that gradients wait for the
        end of its backward (``parallel.data.may_rest``). With several data ranks, the first and
        the last microbatch run with them."""
        layout, last = self.layout, self.layout.num_microbatches - 1
        may = self.copies and layout.zero < 2 and layout.expert_ranks == 1 and last > 0
        return may and (layout.data_ranks == 1 or microbatch not in (0, last))

    def weights(self, unit: str) -> tuple[str, ...]:
        found = (self.current[unit],) if unit in self.current else ()
        own = self._cast(unit)
        return (*found, own) if own in self.buffers else found

    def _cast(self, unit: str) -> str:
        """Return the name of a microbatch's copy of the weights that FSDP2 does not manage."""
        return f"cast.{unit}.{self.microbatch}"

    def before(self, unit: str, following: str | None) -> list[Task]:
        """Return the tasks that make a unit's weights ready and start the gather of the
        following unit."""
        tasks = self._gather(unit) + self._unpack(unit)
        wide, own = self.weight_bytes * self.unseen_elements[unit], self._cast(unit)
        if wide and self.dtype != self.weights_dtype and own not in self.buffers:
            size = self.unseen_elements[unit] * BYTES[self.dtype]
            self.buffers[own] = Buffer(size, "activation")
            op = elementwise("cast", wide, size, "forward")
            tasks.append(Task(f"{unit}.cast", op, "compute", "dp", self.era, (), (own,)))
        if following is not None:
            tasks += self._gather(following, after=self.weights(unit))
        return tasks

    def _gather(self, unit: str, after: tuple[str, ...] = ()) -> list[Task]:
        """Start the all-gather of a unit, unless its weights are there or already being sent."""
        flat = self.gathered(unit)
        known = unit in self.current or flat in self.buffers
        if not self.sharded or known or not self.elements[unit]:
            return []
        size = self.padded(unit) * BYTES[self.dtype]
        self.buffers[flat] = Buffer(size, "communication")
        gather = self._collective(unit, "all_gather", size, self.dtype)
        writes: tuple[str, ...] = (flat,)
        if self.device == "cpu":  # gloo gathers into a buffer of its own
            writes = (flat, self._passing("arriving", unit, size))
        return [Task(f"{unit}.all_gather", gather, "dp", "dp", self.era, after, writes)]

    def padded(self, unit: str) -> int:
        """Return the elements of a unit's all-gather, padding included."""
        return self.shard_elements[unit] * self.groups[unit].shards

    def gathered(self, unit: str) -> str:
        """Return the name of the buffer in which a unit's weights arrive."""
        return f"gathered.{unit}.{self.era}"

    def _unpack(self, unit: str) -> list[Task]:
        """Copy a gathered unit into its weights. Without sharding, cast the local weights."""
        if unit in self.current or not self.copies or not self.elements[unit]:
            return []
        size, full = self.padded(unit) * BYTES[self.dtype], f"weights.{unit}.{self.era}"
        self.buffers[full] = Buffer(size, "weights")
        self.current[unit] = full
        reads: tuple[str, ...] = ()
        if self.sharded:
            op, reads = elementwise("copy", size, size, "forward"), (self.gathered(unit),)
        else:
            op = elementwise("cast", self.weight_bytes * self.elements[unit], size, "forward")
        return [Task(f"{unit}.unpack", op, "compute", "dp", self.era, reads, (full,))]

    def after(self, unit: str, made: dict[str, str], last: bool) -> list[Task]:
        """Reduce a unit's gradients (``made``: buffer by parameter) after its backward, or add
        them to those of earlier microbatches."""
        zero, groups = self.layout.zero, self.groups[unit]
        tasks, gradients = list[Task](), tuple(of for n, of in made.items() if n not in self.unseen)
        if own := tuple(of for name, of in made.items() if name in self.unseen):
            size = self.unseen_elements[unit]
            name, dtype = f"{unit}.unseen", self.weights_dtype
            self.kept.update(self._add_up(name, size, dtype, own, made, tasks))
        if not gradients:
            return tasks
        if zero < 2 and (self.layout.num_microbatches > 1 or not self.copies):
            size, dtype = self.elements[unit], self.reduce_dtype
            gradients = self._add_up(unit, size, dtype, gradients, made, tasks)
            if not self.copies:
                self.kept.update(gradients)
        if not self.copies or not (last or zero >= 2):
            return tasks
        compute = BYTES[self.dtype] * self.elements[unit]

        def task(name: str, op: Op, stream: str, *writes: str) -> None:
            tasks.append(Task(f"{unit}.{name}", op, stream, "dp", self.era, gradients, writes))

        for name in made:
            if name in self.first:
                task(f"{name}.all_reduce", self._over_tp(name), "compute")
        flat, done = f"reduce_in.{unit}.{self.era}", f"gradient.{unit}"
        self.unreleased = (flat,)
        wide, of = self.reduce_bytes * self.padded(unit), self.reduce_dtype
        self.buffers[flat] = Buffer(wide, "communication")
        share = self.weight_bytes * self.padded(unit) // groups.shards
        passing: tuple[str, ...] = ()
        if self.device == "cpu" and groups.shards > 1:  # gloo reduces a full copy
            passing = (self._passing("copied", unit, wide),)
        if done in self.buffers:  # the result is added to earlier microbatches'
            passing = (*passing, self._passing("reduced", unit, share))
        result, is_cast = done, self.weights_dtype != of
        if is_cast:  # what was reduced, until it has the dtype of the weights
            result = self._passing("narrow", unit, wide // groups.shards)
        self.buffers[done] = Buffer(share, "gradient")
        self.kept.add(done)
        task("copy_in", elementwise("copy", compute, wide, "backward"), "compute", flat)
        gradients = (flat,)
        if zero:
            scatter = self._collective(unit, "reduce_scatter", wide, of)
            task("reduce_scatter", scatter, "dp", result, *passing)
            gradients, wide = (result,), self.buffers[result].num_bytes
        if groups.copies > 1 or not zero:
            task("all_reduce", self._collective(unit, "all_reduce", wide, of), "dp", result)
        if is_cast:
            gradients = (result,)
            task("cast", elementwise("cast", wide, share, "backward"), "dp", done)
        return tasks

    def _add_up(
        self,
        unit: str,
        elements: int,
        dtype: str,
        gradients: tuple[str, ...],
        made: dict[str, str],
        tasks: list[Task],
    ) -> tuple[str, ...]:
        """Add gradients to those of earlier microbatches, in ``dtype``; return the buffers of the
        sums."""
        wide, compute = BYTES[dtype] * elements, BYTES[self.dtype] * elements
        before = self.sums.get(unit, ())
        if self.dtype == dtype:  # autograd adds each to its sum as it is made
            self.sums[unit] = before or gradients
            gradients = ()
        else:
            total = f"accumulated.{unit}"
            self.buffers[total] = Buffer(wide, "gradient")
            self.sums[unit] = (total,)
        passing: tuple[str, ...] = ()
        if before and gradients and self.device == "cpu":  # CPUs cast before adding two dtypes
            largest = max(prod(self.over_tp.shapes[name]) for name in made)
            passing = (self._passing("wide", unit, BYTES[dtype] * largest),)
        if before or gradients:
            read = compute + (wide if before else 0)
            op, sums = elementwise("add", read, wide, "backward"), (*self.sums[unit], *passing)
            tasks.append(Task(f"{unit}.accumulate", op, "compute", "dp", self.era, gradients, sums))
        return self.sums[unit]

    def _passing(self, name: str, unit: str, size: int) -> str:
        """Add a scratch buffer of one task; no other task reads it."""
        full = f"{name}.{unit}.{self.era}"
        self.buffers[full] = Buffer(size, "communication")
        return full

    def _over_tp(self, name: str) -> Collective:
        """Return the all-reduce of a gradient over tp, in the dtype of reductions if it was
        accumulated before."""
        wide = self.layout.num_microbatches > 1 and self.layout.zero < 2
        dtype = self.reduce_dtype if wide else self.dtype
        return message(
            kind="all_reduce",
            size_bytes=prod(self.over_tp.shapes[name]) * BYTES[dtype],
            group_size=self.layout.tp,
            dtype=dtype,
            in_place=True,
        )

    def _collective(self, unit: str, kind: str, size_bytes: int, dtype: str) -> Collective:
        """Return a collective over a unit's shards; an all-reduce runs over their copies (with
        ZeRO-0 each rank has one)."""
        groups = self.groups[unit]
        over_copies = kind == "all_reduce"
        return message(
            kind=kind,
            size_bytes=size_bytes,
            group_size=groups.copies if over_copies else groups.shards,
            group_stride=groups.copy_stride if over_copies else groups.stride,
            dtype=dtype,
            in_place=over_copies,
        )
