"""Compare the NCCL calls that training steps should make with those in the ranks' traces.

In: a plan, or a model and its layout; the calls of each rank; the number of steps, if it is known.
Out: a ``TraceCheck``. A step has FSDP2's gathers, scatters and all-reduces of every unit
(``models/fsdp``), in the order of ``parallel/data``, and a one-element all-reduce for the gradient
norm (``engine/optimizer``):

- ZeRO 3 gathers a layer for each forward and each backward, and the root for each forward;
- ZeRO 1 and 2 gather every unit once a step, ZeRO 0 (copies of one shard) never;
- ZeRO 2 and 3 reduce gradients after each microbatch, 0 and 1 after the last.

Over tp, ep, cp and in pipelines it has what the programs of its stages send, and activations and
their gradients at the ends of stages; ranks of different stages then count by their mean.

All steps issue the same calls. Groups of one rank move nothing and do not count.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from math import prod
from typing import NamedTuple

from meshwise.models import fsdp, placement, programs_of, stream_shape
from meshwise.models.fsdp import Planned
from meshwise.probe.importers.nccl_trace import ITEM_BYTES, Traced
from meshwise.spec import DTYPE_BYTES, AnyModel, Collective, Layout, Plan, Recipe, WideResNet
from meshwise.spec.layout import rank_of
from meshwise.spec.op import WHOLE, Dtype
from meshwise.spec.trace import TraceCheck, TraceLine, Verdict

SPLIT_LOSS = 3  # numbers a row that torch and Megatron sum one after the other
CLOSE = 0.5  # calls; shares of ranks of a pipeline add up to whole numbers with rounding


class _Key(NamedTuple):
    kind: str
    elements: int
    dtype: str
    num_ranks: int

    @property
    def size_bytes(self) -> int:
        """nccl-tests' size; of one part if the log does not say how many ranks there were."""
        parts = 1 if self.kind in WHOLE else max(self.num_ranks, 1)
        return self.elements * parts * ITEM_BYTES.get(self.dtype, 1)


def planned(plan: Plan) -> list[Planned] | None:
    """List the calls of each rank in a step; None for images, and with tp, ep, cp or pp, where they
    were never held against a trace."""
    if isinstance(plan.model, WideResNet) or _divides_more(plan.layout):
        return None
    return expected(plan.model, plan.layout, plan.workload.seq_len, plan.dtype, plan.recipe)


def expected(
    model: AnyModel, layout: Layout, seq_len: int, dtype: Dtype, recipe: Recipe
) -> list[Planned]:
    """List the calls of a rank in a step, or of the mean rank of a pipeline."""
    if isinstance(model, WideResNet) or _divides_more(layout):
        found = list(_programmed(model, layout, seq_len, dtype, recipe))
    else:
        found = fsdp.planned(
            model,
            shard=layout.shards,
            replicas=layout.data_ranks // layout.shards,
            param_dtype=dtype,
            reduce_dtype=recipe.reduce,
            reshard=layout.zero == 3,
            microbatches=layout.num_microbatches if layout.zero >= 2 else 1,
        )
    if layout.num_devices > 1 and recipe.max_grad_norm:
        norm = Collective(
            kind="all_reduce", size_bytes=4, group_size=layout.num_devices, dtype="fp32"
        )
        found.append(Planned("gradient norm", "optimizer", norm, 1, 1))
    return found


def each_once(due: Sequence[Planned]) -> list[Planned]:
    """Return the calls with counts that add up to one for each message."""
    same = Counter(map(_planned_key, due))
    return [one._replace(count=1 / same[_planned_key(one)]) for one in due]


def _divides_more(layout: Layout) -> bool:
    return layout.tp * layout.pp * layout.ep * layout.cp > 1


def _programmed(
    model: AnyModel, layout: Layout, seq_len: int, dtype: Dtype, recipe: Recipe
) -> Iterator[Planned]:
    """Yield what the ranks of each stage send, times the stage's share of all ranks."""
    for stage in range(layout.num_stages):
        if reason := placement.obstacle(model, seq_len, layout.of_stage(stage)):
            raise ValueError(f"Layout.{reason}")
    ends = list[tuple[int, int, float]]()  # a stage's pipeline rank, elements it hands on, share
    for stage, (inside, layers, program) in enumerate(programs_of(model, layout, seq_len, dtype)):
        rank = rank_of(layout.schedule, stage, layout.pp)
        share = len(layout.devices_of(rank)) / layout.num_devices
        for task in program.tasks:
            op, (*words, _) = task.op, task.name.split(".")
            if not isinstance(op, Collective) or op.group_size == 1 or not op.size_bytes:
                continue
            unit = f"layers.{int(words[1]) + layers.start}" if words[0] == "layers" else "root"
            elements = op.size_bytes // DTYPE_BYTES[op.dtype]
            if task.stream == "dp" and op.kind != "all_gather":
                op = Collective(
                    kind=op.kind, size_bytes=elements * DTYPE_BYTES[recipe.reduce],
                    group_size=op.group_size, dtype=recipe.reduce,
                )  # fmt: skip
            apart = SPLIT_LOSS if words[0] == "loss" and inside.placed.head == "vocab" else 1
            parts = 1 if op.kind in WHOLE else op.group_size
            yield Planned(unit, task.phase, op, elements // parts // apart, share * apart)
        shape = stream_shape(model, inside.microbatch_size, seq_len, layers.stop)
        cut = inside.cp * (inside.tp if inside.placed.stream != "whole" else 1)
        ends.append((rank, prod(shape) // cut, share * inside.num_microbatches))
    for (here, elements, sends), (there, _, returns) in pairwise(ends):
        op = Collective(
            kind="send", size_bytes=elements * DTYPE_BYTES[dtype], group_size=2, dtype=dtype
        )
        if here != there:
            yield Planned("between stages", "forward", op, elements, sends)
            yield Planned("between stages", "backward", op, elements, returns)


def compare(
    due: Sequence[Planned] | None,
    traced: Sequence[Sequence[Traced]],
    steps: int | None,
    *,
    alike: bool = True,
) -> TraceCheck:
    """Compare. ``traced``: the calls of each rank in rank order, over ``steps`` steps; None: as
    many as fit best. Unless ranks are ``alike``, their sums are judged."""
    units: dict[_Key, list[str]] = {}
    times = defaultdict[_Key, float](float)
    for one in due or ():
        units.setdefault(_planned_key(one), []).append(one.unit)
        times[_planned_key(one)] += one.count
    counts = [
        Counter(_key(call, units) for call in of_rank if call.num_ranks != 1) for of_rank in traced
    ]
    judged = counts if alike else [sum(counts, Counter[_Key]())]
    weight = 1 if alike else len(counts)
    steps = steps or _steps(times, judged, weight)
    others = sorted(set().union(*counts) - set(units))
    lines = tuple(
        TraceLine(
            units=_named(units.get(key, [])),
            kind=key.kind,
            elements=key.elements,
            size_bytes=key.size_bytes,
            dtype=key.dtype,
            num_ranks=key.num_ranks,
            planned=round(times[key], 6),
            traced=tuple(count[key] for count in counts),
            verdict="not judged"
            if due is None
            else _verdict(times[key], [count[key] for count in judged], steps * weight),
        )
        for key in [*units, *others]
    )
    if due is None:
        why = "under context, expert or tensor parallelism and in pipelines calls are not judged"
        return TraceCheck(steps=steps, lines=lines, agrees=None, notes=(why,))
    agrees = all(line.verdict in ("as planned", "outside the steps") for line in lines)
    return TraceCheck(steps=steps, lines=lines, agrees=agrees)


def _steps(times: Mapping[_Key, float], counts: Sequence[Mapping[_Key, int]], weight: int) -> int:
    """Return the number of steps for which planned messages of the most bytes are traced as often
    as planned, and of these numbers the one that leaves the fewest bytes too few or too many; 1 if
    no planned message was traced."""
    pairs = [
        (key.size_bytes, sum(count[key] for count in counts) / len(counts), due * weight)
        for key, due in times.items()
    ]
    pairs = [pair for pair in pairs if pair[1]]

    def misfit(steps: int) -> tuple[float, float]:
        apart = [(size, abs(count - due * steps)) for size, count, due in pairs]
        agreeing = sum(size for size, by in apart if by < CLOSE)
        return -agreeing, sum(size * by for size, by in apart)

    return min({max(1, round(count / due)) for _, count, due in pairs}, key=misfit, default=1)


def _planned_key(one: Planned) -> _Key:
    op = one.collective
    return _Key(op.kind, one.elements_per_rank, op.dtype, op.group_size)


def _key(call: Traced, known: Mapping[_Key, list[str]]) -> _Key:
    """Return a call's key. A line cut off before the communicator's size takes a planned size. A
    send has two ranks, whichever communicator it uses."""
    ranks = 2 if call.kind == "send" else call.num_ranks
    key = _Key(call.kind, call.count, call.datatype, ranks)
    if ranks:
        return key
    return next((one for one in known if one[:3] == key[:3]), key)


def _named(names: list[str]) -> str:
    """Join names: ``layers.0 to layers.31 (32 units)``. A unit of forward and backward is one."""
    names = list(dict.fromkeys(names))
    if len(names) < 3:
        return ", ".join(names)
    return f"{names[0]} to {names[-1]} ({len(names)} units)"


def _verdict(planned: float, traced: Sequence[int], steps: int) -> Verdict:
    due = planned * steps
    if not planned:  # a call of the steps themselves is made at least once in each
        return "outside the steps" if max(traced) < steps else "not planned"
    if all(abs(count - due) < CLOSE for count in traced):
        return "as planned"
    if not any(traced):
        return "missing"
    return "too few" if min(traced) < due else "too many"
