"""``measure collectives``: kinds x sizes x ways to call them. No torch.

Sizes come from a list, from a model's exchanges or from a plan. Lists and plans are ordered by
size, so a run cut short has every kind. ``between`` adds sizes where a measured curve bends.
"""

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple, cast

import msgspec

from meshwise.models import catalogue, primus, programs_of, stream_shape
from meshwise.models.decoder import exchanges
from meshwise.options.measure import CollectivesOptions
from meshwise.probe.cases.scope import Scope, models_of
from meshwise.probe.cases.sizes import divisible, embedding_splits, parse_sizes, uneven
from meshwise.spec import (
    DTYPE_BYTES,
    Case,
    Collective,
    Decoder,
    Derived,
    Model,
    Plan,
    Sample,
)
from meshwise.spec.op import (
    IN_PLACE_ONLY,
    REDUCING,
    ROOTED,
    WHOLE,
    WHOLE_NUMBERS,
    CollectiveKind,
    SentDtype,
)
from meshwise.stats import median_interval

KINDS: tuple[CollectiveKind, ...] = (
    "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv",
)  # fmt: skip
SYMMETRIC = {  # back ends of symmetric memory, and what they do
    "one_shot": ("all_reduce",),
    "two_shot": ("all_reduce",),
    "peer_copy": ("all_gather", "all_to_all", "send_recv"),
}
BACKENDS = ("", "gloo", "nccl", *SYMMETRIC)
PLACES = {"out": (False,), "in": (True,), "both": (False, True)}
_IN_PLACE = (*IN_PLACE_ONLY, "all_gather", "reduce_scatter")
_BEND = 0.15  # a point this far off the line through its neighbours is a bend
_DROP = 0.05  # so is a larger message that is faster by this much
_WIDE = 1.9  # gaps of a smaller factor are not filled


Listed = tuple[Model | Decoder, int, tuple[CollectiveKind, ...]]


class Group(NamedTuple):
    """A group of ranks, or several equal groups that work at once."""

    size: int
    stride: int = 1
    ranks: tuple[int, ...] = ()

    def of(self, op: Collective) -> Collective:
        """Return the operation over this group."""
        return msgspec.structs.replace(op, group_stride=self.stride, ranks=self.ranks)


def cases(scope: Scope, asked: CollectivesOptions) -> list[Case]:
    """List every operation asked for, in each way asked for that its back end supports.

    Sizes are ``sizes``, or what models, a plan, uneven splits or embedding tables exchange.
    """
    _check(scope, asked)
    return list(
        dict.fromkeys(case for op in _ops(scope, asked) for case in _called(scope, asked, op))
    )


def derived(scope: Scope, asked: CollectivesOptions) -> list[Derived]:
    """List each model's exchanges if its layers are split over the group, with their names."""
    return [
        Derived(*about, name, case)
        for about, name, op in _exchanged(scope, asked)
        for case in _called(scope, asked, op)
    ]


def _check(scope: Scope, asked: CollectivesOptions) -> None:
    """Refuse options that contradict each other, and what cannot be sent."""
    sized = {
        "splits": bool(asked.splits), "tables": asked.tables is not None, "pairs": asked.pairs,
        "plan": asked.plan is not None, "models": bool(asked.model),
        "primus_lists": asked.primus_lists,
    }  # fmt: skip
    kinds = _kinds(asked)
    is_uneven = sized["splits"] or sized["tables"]
    of_models = bool(asked.model or asked.primus_lists)
    _check_alone(**sized)
    _check_alone(groups=asked.groups > 1, ranks=bool(asked.ranks), plan=asked.plan is not None)
    _check_alone(groups=asked.groups > 1, pairs=asked.pairs)
    _check_alone(stride=asked.stride > 1, ranks=bool(asked.ranks), plan=asked.plan is not None)
    _check_alone(stride=asked.stride > 1, pairs=asked.pairs)
    own = [name for name, said in sized.items() if said]
    others = [kind for kind in asked.kinds if not (is_uneven and kind == "all_to_all_v")]
    if own and others and not of_models:
        told = f"{own[0]} says which collectives are measured"
        raise ValueError(f"kinds = {', '.join(others)}: {told}; leave one of them out")
    if asked.sizes is not None and own and not asked.pairs:
        raise ValueError("sizes: splits, tables, models and plans have their own; leave it out")
    if (asked.seq_len or asked.microbatch_sizes) and not of_models:
        name = "seq_len" if asked.seq_len else "microbatch_sizes"
        raise ValueError(f"{name}: only the exchanges of a model depend on it; name one by model")
    if unknown := set(asked.backends) - set(BACKENDS):
        said = ", ".join(["torch", *BACKENDS[1:]])
        raise ValueError(f"backend = {', '.join(sorted(unknown))!r}: must be one of {said}")
    if scope.dtype == "tf32" or (of_models and scope.dtype in ("fp8", *WHOLE_NUMBERS)):
        raise ValueError(f"dtype = {scope.dtype!r}: is sent as bf16 or fp32; take one of them")
    _check_ends(asked, () if is_uneven or asked.pairs else kinds)
    if "all_to_all_v" in kinds and not is_uneven:
        raise ValueError("all_to_all_v: who sends how much? give splits or tables")
    if "send" in kinds:
        raise ValueError("send: from whom to whom? pairs measures every ordered pair")


def _check_ends(asked: CollectivesOptions, kinds: tuple[str, ...]) -> None:
    """Refuse a reduction or a root where no collective has one. A plan may have any."""
    for name, said, having in (("op", asked.op != "sum", REDUCING), ("root", asked.root, ROOTED)):
        if said and asked.plan is None and not {*having} & {*kinds}:
            value = getattr(asked, name)
            raise ValueError(f"{name} = {value!r}: only {', '.join(having)} have one; add one")


def _kinds(asked: CollectivesOptions) -> tuple[CollectiveKind, ...]:
    return cast("tuple[CollectiveKind, ...]", asked.kinds) or KINDS


def _ops(scope: Scope, asked: CollectivesOptions) -> list[Collective]:
    """List the operations asked for, for every size."""
    group = _group(scope.world_size, asked)
    if asked.splits:
        return [group.of(uneven(tuple(map(tuple, asked.splits)), group.size, scope.dtype))]
    if asked.tables is not None:
        each = asked.tables.split() or [""]
        return [_looked_up(text, group, scope.dtype) for text in each]
    if asked.pairs:
        return _pairs(scope, asked.ranks or tuple(range(scope.world_size)), asked.sizes)
    if asked.plan is not None:
        needed = asked.plan.layout.num_devices
        if needed != scope.world_size:
            raise ValueError(
                f"plan: it is for {needed} ranks, not {scope.world_size}; use --nproc {needed}"
            )
        return _of_plan(asked.plan)
    if asked.model or asked.primus_lists:
        return [op for *_, op in _exchanged(scope, asked)]
    text = asked.sizes
    if text is None:
        text = "1K..1G:x4" if scope.on_gpus else "4K..16M:x4"
    kinds, sizes = _kinds(asked), parse_sizes(text)
    ops = [_sized(kind, size, group, scope.dtype) for size in sizes for kind in kinds]
    return _with_bytes(ops, text, 1 if {*kinds} & {*WHOLE} else group.size)


def _with_bytes(ops: list[Collective], sizes: str | int, parts: int) -> list[Collective]:
    """Return the messages that are not empty; ValueError if all are. ``parts``: of the smallest."""
    if found := [op for op in ops if op.size_bytes]:
        return found
    dtype = ops[0].dtype
    element = f"one element of {DTYPE_BYTES[dtype]} bytes ({dtype})"
    each = "" if parts == 1 else f" for each of {parts} ranks"
    raise ValueError(f"sizes = {sizes!r}: less than {element}{each} leaves no case; give more")


def _looked_up(tables: str, group: Group, dtype: SentDtype) -> Collective:
    """Return the exchange of embeddings that ``tables`` says."""
    sent = embedding_splits(tables, "tables")
    if len(sent) != group.size:
        raise ValueError(f"tables: {len(sent)} ranks send, but the group has {group.size}")
    return group.of(uneven(sent, group.size, dtype))


def _exchanged(
    scope: Scope, asked: CollectivesOptions
) -> Iterator[tuple[tuple[str, int, int, int, int], str, Collective]]:
    """Yield the exchanges of each model's layers: the first fields of a ``Derived``, name, op."""
    group = _group(scope.world_size, asked)
    for model, length, sent in _listed(asked):
        experts = None if isinstance(model, Model) else model.experts
        divides = experts is not None and experts.num_experts % group.size == 0
        tokens = asked.seq_len or (length if scope.on_gpus else min(length, 128))
        tp = 1 if set(sent) <= {"all_to_all"} else group.size
        for rows in asked.microbatch_sizes or (1,):
            about = (model.name, rows, tokens, model.hidden, experts.top_k if experts else 1)
            ep = group.size if divides else 1
            try:
                exchanged = exchanges(model, rows, tokens, tp=tp, ep=ep, dtype=scope.dtype)
            except ValueError as error:
                raise ValueError(
                    f"{model.name}: {error}; split it less: groups, or nproc"
                ) from None
            for one in exchanged:
                op = one.collective
                if op.group_size == group.size:  # pairs stay neighbours
                    op = group.of(op)
                if op.kind in sent:
                    yield about, one.name, op


def _listed(asked: CollectivesOptions) -> list[Listed]:
    """List the given models and those of Primus' two lists, each with its sequence length and the
    kinds to measure."""
    kinds, both = _kinds(asked), ((primus.COLLECTIVES, False), (primus.ALL_TO_ALL, True))
    lists = both if asked.primus_lists else ()
    given: list[Listed] = [
        (model, min(model.max_seq_len, 8192), kinds) for model in models_of(asked)
    ]
    return given + [
        (catalogue.find(name), length, tuple(k for k in kinds if (k == "all_to_all") == to_experts))
        for names, to_experts in lists
        for name, length in names
    ]


def _check_alone(**given: bool) -> None:
    """Refuse more than one of these options."""
    several = [name for name, said in given.items() if said]
    if len(several) > 1:
        raise ValueError(f"{' and '.join(several)}: only one of them can be; leave the others out")


def _called(scope: Scope, asked: CollectivesOptions, op: Collective) -> list[Case]:
    """List one operation in each way asked for that its back end supports."""
    if op.kind in REDUCING:
        op = msgspec.structs.replace(op, redop=asked.op)
    if op.kind in ROOTED:
        op = msgspec.structs.replace(op, root=asked.root)
    return [
        Case(op=placed, regime=mode, backend=backend, world_size=scope.world_size)
        for backend in asked.backends or ("",)
        for mode in asked.modes or (("graph",) if scope.on_gpus else ("warm",))
        for placed in _placed(op, backend, PLACES[asked.place])
    ]


def _group(world_size: int, asked: CollectivesOptions) -> Group:
    groups, stride, ranks = asked.groups, asked.stride, asked.ranks
    if ranks:
        if min(ranks) < 0 or max(ranks) >= world_size or len(set(ranks)) != len(ranks):
            raise ValueError(
                f"ranks = {ranks}: must be different numbers from 0 to {world_size - 1}"
            )
        return Group(len(ranks), ranks=tuple(sorted(ranks)))
    if groups < 1 or world_size % groups:
        raise ValueError(f"groups = {groups}: must divide the {world_size} ranks")
    if groups % stride:
        fit = " or ".join(str(n) for n in range(1, groups + 1) if groups % n == 0)
        raise ValueError(
            f"stride = {stride}: must divide groups = {groups}; use {fit}, or other groups"
        )
    if 1 < groups == world_size:
        fit = "the number of groups, not of the ranks in one"
        raise ValueError(f"groups = {groups}: would leave each rank alone; it is {fit}")
    return Group(world_size // groups, stride)


def _sized(kind: CollectiveKind, size: int, group: Group, dtype: SentDtype) -> Collective:
    """Return the largest message up to ``size`` that divides as the kind needs; size 0 if none."""
    return Collective(
        kind=kind,
        size_bytes=divisible(kind, size, group.size, dtype),
        group_size=group.size,
        group_stride=group.stride,
        dtype=dtype,
        ranks=group.ranks,
    )


def _placed(op: Collective, backend: str, in_place: tuple[bool, ...]) -> list[Collective]:
    """List ``op`` in and out of place, as asked for and as its back end supports."""
    if op.kind not in _IN_PLACE:
        in_place = (False,)
    elif op.kind in IN_PLACE_ONLY and backend in ("", "gloo"):
        in_place = in_place if len(in_place) > 1 else (True,)  # both: one will be skipped
    elif backend == "two_shot":
        in_place = (True,)
    elif backend in ("one_shot", "peer_copy"):
        in_place = (False,)
    return [msgspec.structs.replace(op, in_place=place) for place in in_place]


def _pairs(scope: Scope, ranks: Sequence[int], sizes: str | int | None) -> list[Collective]:
    if sizes is None:
        sizes = "64M" if scope.on_gpus else "1M"
    if len(ranks) < 2:
        raise ValueError(f"pairs: {len(ranks)} rank has no peer; use at least 2 (--nproc)")
    ops = [
        _sized("send", size, Group(2, ranks=(a, b)), scope.dtype)
        for size in parse_sizes(sizes)
        for a in ranks
        for b in ranks
        if a != b
    ]
    return _with_bytes(ops, sizes, 1)


def _of_plan(plan: Plan) -> list[Collective]:
    """List every collective of the plan's stages, and the messages between stages."""
    layout, model, seq_len, found = plan.layout, plan.model, plan.workload.seq_len, []
    for _, _, program in programs_of(model, layout, seq_len, plan.dtype):
        found += [task.op for task in program.tasks if isinstance(task.op, Collective)]
    stride = layout.num_devices // layout.pp
    for layers in layout.stage_layers(model.layers)[:-1]:
        shape = stream_shape(model, layout.microbatch_size, seq_len, layers.stop)
        size = math.prod(shape) * DTYPE_BYTES[plan.dtype]
        found.append(_sized("send_recv", size, Group(2, stride), plan.dtype))
    moving = [op for op in dict.fromkeys(found) if op.group_size > 1 and op.size_bytes]
    return sorted(moving, key=lambda op: op.size_bytes)


def between(samples: Sequence[Sample]) -> list[Case]:
    """List cases in the gaps beside bends of the measured curves; none if all is smooth or dense.

    A bend is a point off the line through its neighbours in log-log, as where NCCL changes its
    protocol, or a point that takes less time than a smaller message.
    """
    curves: dict[str, list[Sample]] = {}
    for sample in samples:
        op = sample.case.op
        if sample.status == "ok" and isinstance(op, Collective) and not op.splits:
            every_size = msgspec.structs.replace(op, size_bytes=0)
            key = msgspec.structs.replace(sample.case, op=every_size).id
            curves.setdefault(key, []).append(sample)
    found = [case for curve in curves.values() for case in _densified(curve)]
    return list(dict.fromkeys(found))


def _densified(curve: list[Sample]) -> list[Case]:
    case, found = curve[0].case, []
    assert isinstance(case.op, Collective)
    sizes = [sample.case.op.size_bytes for sample in curve]  # type: ignore[union-attr]
    times_s = [median_interval(sample.times_s) for sample in curve]
    points = sorted((size, *each) for size, each in zip(sizes, times_s, strict=True))
    logs = [tuple(map(math.log, point)) for point in points]
    gaps: set[int] = set()  # a gap's index is that of the point before it
    for i, ((x0, y0, *_), (x, _, low, high), (x1, y1, *_)) in enumerate(
        zip(logs, logs[1:], logs[2:], strict=False)
    ):
        line = y0 + (y1 - y0) * (x - x0) / (x1 - x0)
        if max(low - line, line - high) > _BEND:  # by more than the point's own uncertainty
            gaps |= {i, i + 1}
    gaps |= {i for i, (a, b) in enumerate(pairwise(logs)) if b[3] < a[2] - _DROP}
    for i in sorted(gaps):
        low, high = points[i][0], points[i + 1][0]
        if high / low > _WIDE:
            op, middle = case.op, math.isqrt(low * high)
            size = divisible(op.kind, middle, op.group_size, op.dtype)
            op = msgspec.structs.replace(op, size_bytes=size)
            found.append(msgspec.structs.replace(case, op=op))
    return found
