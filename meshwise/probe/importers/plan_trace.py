"""Compare the NCCL calls that a plan's step should make with those in the ranks' traces.

In: a plan, the calls of each rank, and the number of steps. Out: a ``TraceCheck``. A plan has
FSDP2's gathers, scatters and all-reduces of every unit (``models/fsdp``), in the order of
``parallel/data``, and a one-element all-reduce for the gradient norm (``engine/optimizer``):

- ZeRO 3 gathers a layer for each forward and each backward, and the root for each forward;
- ZeRO 1 and 2 gather every unit once a step, ZeRO 0 (copies of one shard) never;
- ZeRO 2 and 3 reduce gradients after each microbatch, 0 and 1 after the last.

All steps issue the same calls. Groups of one rank move nothing and do not count.
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
    """List the calls of each rank in a step; None for images, and with tp, ep or pp, where ranks
    hold parts of a unit's weights and exchange activations too."""
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
    """Compare. ``traced``: the calls of each rank in rank order, over ``steps`` steps."""
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
    """Return a call's key. A line cut off before the communicator's size takes a planned size."""
    key = _Key(call.kind, call.count, call.datatype, call.num_ranks)
    if call.num_ranks:
        return key
    return next((one for one in known if one[:3] == key[:3]), key)


def _named(names: list[str]) -> str:
    """Join names: ``layers.0 to layers.31 (32 units)``. A unit of forward and backward is one."""
    names = list(dict.fromkeys(names))
    if len(names) < 3:
        return ", ".join(names)
    return f"{names[0]} to {names[-1]} ({len(names)} units)"


def _verdict(planned: int, traced: Sequence[int], steps: int, *, judged: bool) -> Verdict:
    if not judged:
        return "not judged"
    due = planned * steps
    if not planned:  # a call of the steps themselves is made at least once in each
        return "outside the steps" if max(traced) < steps else "not planned"
    if all(count == due for count in traced):
        return "as planned"
    if not any(traced):
        return "missing"
    return "too few" if min(traced) < due else "too many"
