"""Compares what a step of a plan should send through NCCL with what the ranks' traces show.

In: a plan, the calls of each rank, and over how many steps. Out: a ``TraceCheck``. Planned are
FSDP2's gathers, scatters and all-reduces of every unit (``models/fsdp``), as ``parallel/data``
orders them, and the one number that the gradients' norm takes (``engine/optimizer``):

- ZeRO 3 gathers a layer for each forward and each backward, and the root for each forward;
- ZeRO 1 and 2 gather every unit once a step, ZeRO 0 (copies of one shard) never;
- ZeRO 2 and 3 reduce gradients after each microbatch, 0 and 1 after the last.

All steps issue the same. Groups of one rank move nothing and do not count.
"""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from meshwise.models import fsdp
from meshwise.models.fsdp import Planned
from meshwise.probe.importers.nccl_trace import Traced
from meshwise.spec import Collective, Plan, WideResNet
from meshwise.spec.trace import TraceCheck, TraceLine, Verdict


class _Key(NamedTuple):
    kind: str
    elements: int
    dtype: str
    num_ranks: int


def planned(plan: Plan) -> list[Planned] | None:
    """List what each rank issues in a step; None for images, under tp and ep and in pipelines,
    whose ranks hold parts of a unit's weights and exchange activations besides."""
    layout = plan.layout
    divided = layout.tp > 1 or layout.pp > 1 or layout.ep > 1
    if divided or isinstance(plan.model, WideResNet):
        return None
    found = fsdp.planned(
        plan.model,
        shard=layout.shards,
        replicas=layout.data_ranks // layout.shards,
        param_dtype=plan.dtype,
        reduce_dtype="fp32",
        reshard=layout.zero == 3,
        microbatches=layout.num_microbatches if layout.zero >= 2 else 1,
    )
    if layout.num_devices > 1:
        norm = Collective(
            kind="all_reduce", size_bytes=4, group_size=layout.num_devices, dtype="fp32"
        )
        found.append(Planned("gradient norm", "optimizer", norm, 1, 1))
    return found


def compare(
    expected: Sequence[Planned] | None, traced: Sequence[Sequence[Traced]], steps: int
) -> TraceCheck:
    """``traced``: the calls of each rank in rank order, over ``steps`` steps."""
    units: dict[_Key, list[str]] = {}
    times: Counter[_Key] = Counter()
    for one in expected or ():
        op = one.collective
        key = _Key(op.kind, one.elements_per_rank, op.dtype, op.group_size)
        units.setdefault(key, []).append(one.unit)
        times[key] += one.count
    counts = [
        Counter(_key(call, units) for call in of_rank if call.num_ranks != 1) for of_rank in traced
    ]
    others = sorted(set().union(*counts) - set(units))
    lines = tuple(
        TraceLine(
            units=_named(units.get(key, [])),
            kind=key.kind,
            elements=key.elements,
            dtype=key.dtype,
            num_ranks=key.num_ranks,
            planned=times[key],
            traced=tuple(count[key] for count in counts),
            verdict=_verdict(
                times[key], [count[key] for count in counts], steps, judged=expected is not None
            ),
        )
        for key in [*units, *others]
    )
    if expected is None:
        why = "under tensor parallelism and in pipelines the calls are listed, not judged"
        return TraceCheck(steps=steps, lines=lines, agrees=None, notes=(why,))
    agrees = all(line.verdict in ("as planned", "outside the steps") for line in lines)
    return TraceCheck(steps=steps, lines=lines, agrees=agrees)


def _key(call: Traced, known: dict[_Key, list[str]]) -> _Key:
    """A call whose line was cut off before the communicator's size is the planned one like it."""
    key = _Key(call.kind, call.count, call.datatype, call.num_ranks)
    if call.num_ranks:
        return key
    return next((one for one in known if one[:3] == key[:3]), key)


def _named(names: list[str]) -> str:
    """``layers.0 to layers.31 (32 units)``; the same unit may come forward and backward."""
    names = list(dict.fromkeys(names))
    if len(names) < 3:
        return ", ".join(names)
    return f"{names[0]} to {names[-1]} ({len(names)} units)"


def _verdict(planned: int, traced: Sequence[int], steps: int, *, judged: bool) -> Verdict:
    if not judged:
        return "not judged"
    due = planned * steps
    if not planned:  # what happens in every step happens at least once in each
        return "outside the steps" if max(traced) < steps else "not planned"
    if all(count == due for count in traced):
        return "as planned"
    if not any(traced):
        return "missing"
    return "too few" if min(traced) < due else "too many"
