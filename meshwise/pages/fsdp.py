"""Tables of ``measure fsdp``: the messages of every unit of a model, and nccl-tests' commands.

In: which units each case is of (``Derived``; a run directory does not keep it) and the samples.
``elements a rank`` is the count that NCCL prints in its traces, ``total`` what nccl-tests calls
size: of all ranks of a group together, of one message for all_reduce. time and busbw are of the
mean, as in nccl-tests.
"""

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import NamedTuple

from meshwise.models.fsdp import nccl_tests_command
from meshwise.pages.spread import Reading, reading
from meshwise.pages.table import ABSENT, Table, columns, listed
from meshwise.spec import DTYPE_BYTES, Case, Collective, Derived, Sample

_ORDER = ("all_gather", "reduce_scatter", "all_reduce")


class Message(NamedTuple):
    """A message of all units of equal size. ``status``: that of its sample; ``read``: its figures,
    if it has times."""

    model: str
    units: str
    op: Collective
    case: Case
    status: str | None
    read: Reading | None

    @property
    def shard(self) -> int:
        """Ranks among which a unit is cut; replicas of a part are that far apart."""
        return self.op.group_stride if self.op.kind == "all_reduce" else self.op.group_size

    @property
    def elements_per_rank(self) -> int:
        parts = 1 if self.op.kind == "all_reduce" else self.op.group_size
        return self.op.size_bytes // DTYPE_BYTES[self.op.dtype] // parts

    @property
    def arrangement(self) -> tuple[str, int, int]:
        return self.model, self.shard, self.case.world_size


def tables(rows: Iterable[Derived], samples: Sequence[Sample]) -> list[Table]:
    """Two for each model. Without ``rows`` the units have no names. A group of one rank moves
    nothing, so it is left out."""
    known = {sample.case_id: sample for sample in samples}
    named = [(row.model, row.name, row.case) for row in rows]
    found = []
    for model, units, case in named or [("", ABSENT, sample.case) for sample in samples]:
        op, sample = case.op, known.get(case.id)
        if isinstance(op, Collective) and op.kind in _ORDER and op.group_size > 1:
            status, read = (sample.status, reading(sample)) if sample else (None, None)
            found.append(Message(model, units, op, case, status, read))
    found.sort(key=lambda one: (one.arrangement, one.elements_per_rank, _ORDER.index(one.op.kind)))
    shown = []
    for (model, shard, world_size), same in groupby(found, key=lambda one: one.arrangement):
        members = list(same)
        shown += [_measured(model, shard, world_size, members), _commands(members)]
    return shown


def _measured(model: str, shard: int, world_size: int, messages: Iterable[Message]) -> Table:
    groups = world_size // shard
    title = "FSDP units" + (f" of {model}" if model else "")
    if shard == 1:
        title += f", {groups} replicas"
    else:
        title += f", {groups} groups of {shard} ranks" if groups > 1 else f", {shard} ranks"
    return listed(
        title,
        messages,
        *columns(str, "units"),
        *columns(str, {"collective": "op.kind", "type": "op.dtype", "mode": "case.regime"}),
        *columns(str, {"elements a rank": "elements_per_rank", "total(B)": "op.size_bytes"}),
        *columns(str, {"time(us)": lambda m: f"{1e6 * m.read.mean_s:.1f}" if m.read else m.status}),
        *columns("{:.2f}".format, {"busbw": lambda m: m.read and m.read.busbw / 1e9}),
        legend=(
            "Units of equal size are one row. elements a rank: count as NCCL's traces print it, "
            "each weight's dim 0 divided among ranks and rounded up; total: nccl-tests' size; "
            "time: mean over iterations of the largest over ranks; busbw in GB/s.",
        ),
        left=4,
    )


def _commands(messages: Iterable[Message]) -> Table:
    rows = dict.fromkeys((one.units, one.op.kind, nccl_tests_command(one.op)) for one in messages)
    legend = ("Of one group alone; -b and -e are the total of its ranks.",)
    heads = ("units", "collective", "command")
    return Table("The same with nccl-tests", heads, tuple(rows), legend, left=3)
