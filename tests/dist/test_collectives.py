"""Every collective, over every kind of group, against numpy on the data of all ranks."""

import dataclasses
import time
from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.distributed as dist
from msgspec.structs import replace

from meshwise.options.measure import CollectivesOptions
from meshwise.probe import collectives, pattern
from meshwise.probe.cases.collectives import cases
from meshwise.probe.cases.scope import Scope
from meshwise.probe.work import Unavailable
from meshwise.ranks import Ranks
from meshwise.spec import Case, Cluster, Collective, Device, Tier
from meshwise.spec.op import ROOTED

pytestmark = pytest.mark.dist
ELEMENTS = 24  # divides among 2, 3 and 4 ranks
KINDS = (
    "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "gather",
    "scatter", "send_recv",
)  # fmt: skip
ONLY_IN_PLACE = ("all_reduce", "broadcast", "reduce")
CALLS = 20  # as a graph holds them
SPLITS = ((4, 8, 12), (0, 16, 4), (20, 0, 8))  # bytes from rank i to rank j


def collective(kind: str, size: int, *, in_place: bool | None = None, **rest) -> Collective:
    place = kind in ONLY_IN_PLACE if in_place is None else in_place
    return Collective(
        kind=kind, size_bytes=4 * ELEMENTS, group_size=size, dtype="fp32", in_place=place, **rest
    )


def uneven(**rest) -> Collective:
    return Collective(
        kind="all_to_all_v", size_bytes=28, group_size=3, splits=SPLITS, dtype="fp32", **rest
    )


def every_op(world: int) -> list[Collective]:
    ops = [collective(kind, world) for kind in KINDS]
    ops += [collective(kind, world, in_place=True) for kind in ("all_gather", "reduce_scatter")]
    if world == 4:
        ops += [collective(kind, 2, group_stride=stride) for kind in KINDS for stride in (1, 2)]
        ops += [collective(kind, 3, ranks=(0, 1, 3)) for kind in KINDS]
        ops += [uneven(ranks=(0, 2, 3))]
    ops += [collective("send", 2, ranks=pair) for pair in ((0, 1), (1, 0), (world - 1, 0))]
    return ops + ([uneven()] if world == 3 else [])


# --- on every rank ---


def waits_alone(ranks: Ranks) -> tuple[str, float]:
    """Return what rank 0 was told when rank 1 took no part in a collective, and after how long."""
    groups = collectives.Groups(dataclasses.replace(ranks, timeout_s=2.0))
    party = groups.party(collective("all_reduce", ranks.world_size))
    begun, told = time.monotonic(), ""
    if ranks.rank == 0:
        try:
            dist.all_reduce(torch.ones(1), group=party.group)
        except RuntimeError as error:
            told = str(error)
    else:
        ranks.store.wait(["rank 0 gave up"], timedelta(seconds=600))
    ranks.store.set("rank 0 gave up", "")
    return told, time.monotonic() - begun


def results(ranks: Ranks) -> list[list[float] | None]:
    """What each operation left on this rank, from sources 1000 * rank + index."""
    groups, found = collectives.Groups(ranks), []
    for op in every_op(ranks.world_size):
        party = groups.party(op)
        if party is None:
            found.append(None)
            continue
        buffers = collectives.allocate(op, party.here, ranks.device)
        buffers.result.fill_(-1)
        buffers.source.copy_(torch.arange(len(buffers.source)) + 1000.0 * ranks.rank)
        collectives.communicate(op, buffers, party)
        found.append(buffers.result.tolist())
    return found


def wrong_elements(ranks: Ranks) -> list[list[int]]:
    """What the built-in check says after one call, many in a row, and none; then of a call, and
    many, whose last result is moved on by one element. None where it cannot say."""
    groups, found = collectives.Groups(ranks), []
    for op in every_op(ranks.world_size):
        case = Case(op=op, world_size=ranks.world_size)
        rows = [(calls, do, False) for calls, do in ((1, 1), (CALLS, CALLS), (1, 0), (CALLS, 0))]
        rows += [(calls, calls, True) for calls in (1, CALLS)]
        found.append([_wrong(case, groups, ranks, *row) for row in rows])
    return found


def _wrong(case, groups, ranks: Ranks, calls: int, do: int, shift: bool) -> int | None:
    """``do`` of the ``calls`` that the check expects."""
    made = []
    allocate = collectives.allocate
    collectives.allocate = lambda *args: made.append(allocate(*args)) or made[0]
    try:
        work = collectives.build(case, groups)
    finally:
        collectives.allocate = allocate
    check = work.check(calls)
    if check is None:
        return None
    check.fill()
    for _ in range(do):
        work.calls[-1]()
    if shift and made:
        made[0].result.copy_(made[0].result.roll(1))
    return sum(ranks.gather(check.num_wrong()))


REDUCING = ("all_reduce", "reduce", "reduce_scatter")
NUMBERS = {
    "int8": 1, "uint8": 1, "int32": 4, "int64": 8, "fp16": 2, "bf16": 2, "fp32": 4, "fp64": 8,
}  # fmt: skip


def reductions(world: int) -> list[Collective]:
    return [
        Collective(
            kind=kind, size_bytes=size * 40 * world, group_size=world, dtype=dtype, redop=redop,
            in_place=kind in ONLY_IN_PLACE, root=world - 1 if kind == "reduce" else 0,
        )
        for kind in REDUCING
        for dtype, size in NUMBERS.items()
        for redop in ("sum", "prod", "max", "min")
    ]  # fmt: skip


def moved(world: int) -> list[Collective]:
    return [
        Collective(
            kind=kind, size_bytes=size * 40 * world, group_size=world, dtype=dtype,
            in_place=kind in ONLY_IN_PLACE, root=world - 1 if kind in ROOTED else 0,
        )
        for kind in (*ROOTED, "all_gather", "all_to_all", "send_recv")
        for dtype, size in NUMBERS.items()
    ]  # fmt: skip


def wrong_numbers(ranks: Ranks) -> list[list[int | None]]:
    """The check passes after one call and after several, not after none or with a moved result."""
    groups, world = collectives.Groups(ranks), ranks.world_size
    rows = ((1, 1, False), (3, 3, False), (1, 0, False), (1, 1, True))
    return [
        [_wrong(Case(op=op, world_size=world), groups, ranks, *row) for row in rows]
        for op in reductions(world) + moved(world)
    ]


def right_of(op: Collective, world: int) -> np.ndarray:
    """A reduction's whole result, by numpy, from 1 + (index + rank) % 2."""
    index = np.arange(40 * world)
    data = np.stack([1.0 + (index + rank) % 2 for rank in range(world)])
    reduce = {"sum": np.sum, "prod": np.prod, "max": np.max, "min": np.min}[op.redop]
    return reduce(data, axis=0)


def reduced(ranks: Ranks) -> list[bool]:
    """Whether each reduction gives this rank what numpy says."""
    groups, found = collectives.Groups(ranks), []
    for op in reductions(ranks.world_size):
        party = groups.party(op)
        buffers = collectives.allocate(op, party.here, ranks.device)
        buffers.source.copy_(1 + (torch.arange(len(buffers.source)) + ranks.rank) % 2)
        collectives.communicate(op, buffers, party)
        right = right_of(op, ranks.world_size)
        if op.kind == "reduce_scatter":
            right = np.split(right, ranks.world_size)[ranks.rank]
        elsewhere = op.kind == "reduce" and ranks.rank != op.root
        found.append(elsewhere or buffers.result.double().tolist() == right.tolist())
    return found


def sums(ranks: Ranks, **options) -> float:
    """Return what the cases of these options leave on this rank, if rank r has 10^r."""
    machine = Cluster(
        name="four",
        num_hosts=1,
        num_devices_per_host=4,
        device=Device(name="x", kind="cpu", memory_bytes=2**30),
        tiers=(Tier(name="host", num_devices=4),),
    )
    asked = CollectivesOptions(kinds=("all_reduce",), sizes="64", **options)
    (case,) = cases(Scope(machine, ranks.world_size, "fp32"), asked)
    party = collectives.Groups(ranks).party(case.op)
    buffers = collectives.allocate(case.op, party.here, ranks.device)
    buffers.source.fill_(10.0**ranks.rank)
    collectives.communicate(case.op, buffers, party)
    (result,) = set(buffers.result.tolist())
    return result


def refusals(ranks: Ranks) -> list[str]:
    groups, said = collectives.Groups(ranks), []
    for op, backend, regime in (
        (collective("all_reduce", 2, in_place=False), "", "warm"),
        (collective("all_to_all", 2, in_place=True), "", "warm"),
        (collective("all_reduce", 2), "smoke_signals", "warm"),
        (collective("all_gather", 2), "one_shot", "warm"),
        (collective("all_gather", 2), "gloo", "graph"),
        (collective("all_gather", 2), "nccl", "warm"),
        (collective("all_reduce", 2, redop="avg"), "", "warm"),
        (replace(collective("all_gather", 2), dtype="fp8"), "gloo", "warm"),
        (replace(collective("all_reduce", 2), dtype="fp8"), "gloo", "warm"),
        (collective("all_reduce", 2, redop="max", in_place=False), "one_shot", "warm"),
    ):
        try:
            collectives.build(Case(op=op, backend=backend, regime=regime, world_size=2), groups)
        except Unavailable as reason:
            said.append(str(reason))
    return said


# --- the oracle ---


def expected(op: Collective, rank: int, world: int) -> list[float] | None:
    """By numpy, from the definition; None where this rank has no part in it."""
    n, stride = op.group_size, op.group_stride
    group = list(op.ranks) or [
        r for r in range(world) if _tile(r, n, stride) == _tile(rank, n, stride)
    ]
    if rank not in group:
        return None
    here, part = group.index(rank), ELEMENTS // n
    sent = part if op.kind in ("all_gather", "gather") else ELEMENTS
    data = np.stack([np.arange(sent) + 1000.0 * r for r in group])
    untouched = np.full(ELEMENTS, -1.0)
    if op.kind == "all_reduce":
        return data.sum(0).tolist()
    if op.kind == "reduce":  # what the others hold afterwards is nobody's business
        return data.sum(0).tolist() if here == 0 else None
    if op.kind == "all_gather":
        return data.reshape(-1).tolist()
    if op.kind == "gather":
        return (data.reshape(-1) if here == 0 else untouched).tolist()
    if op.kind == "reduce_scatter":
        return np.split(data.sum(0), n)[here].tolist()
    if op.kind == "scatter":
        return np.split(data[0], n)[here].tolist()
    if op.kind == "all_to_all":
        return data.reshape(n, n, -1)[:, here].reshape(-1).tolist()
    if op.kind == "all_to_all_v":
        cut = [np.split(np.arange(sum(row) // 4) + 1000.0 * r, np.cumsum(row)[:-1] // 4)
               for row, r in zip(SPLITS, group, strict=True)]  # fmt: skip
        return np.concatenate([parts[here] for parts in cut]).tolist()
    if op.kind == "send":
        return data[0].tolist() if here == 1 else untouched.tolist()
    return (data[0] if op.kind == "broadcast" else data[here - 1]).tolist()


def _tile(rank: int, size: int, stride: int) -> int:
    return rank // (size * stride) * stride + rank % stride


@pytest.mark.parametrize("world", [2, 3, 4])
def test_every_collective_is_what_its_definition_says(gloo_ranks, world):
    for rank, found in enumerate(gloo_ranks(world, results)):
        for op, result in zip(every_op(world), found, strict=True):
            wanted = expected(op, rank, world)
            if op.kind == "reduce" and wanted is None:
                continue
            assert result == wanted, (op, rank)


@pytest.mark.parametrize(
    ("options", "of_ranks"),
    [
        ({}, [1111, 1111, 1111, 1111]),
        ({"groups": 2}, [11, 11, 1100, 1100]),
        ({"groups": 2, "stride": 2}, [101, 1010, 101, 1010]),
    ],
)
def test_the_groups_that_options_ask_for_are_those_that_sum(gloo_ranks, options, of_ranks):
    assert gloo_ranks(4, sums, **options) == of_ranks


@pytest.mark.parametrize("world", [2, 3, 4])
def test_the_check_passes_what_is_right_and_sees_what_is_moved(gloo_ranks, world):
    (found, *others) = gloo_ranks(world, wrong_elements)
    assert all(other == found for other in others)
    for op, (right, right_in_a_row, undone, *rest) in zip(every_op(world), found, strict=True):
        undone_in_a_row, moved, moved_in_a_row = rest
        assert right == 0 and undone > 0 and moved > 0, op
        if op.kind == "reduce":  # the others' buffers, which the next call adds up, are scratch
            assert (right_in_a_row, undone_in_a_row, moved_in_a_row) == (None, None, None)
        else:
            assert right_in_a_row == 0 and undone_in_a_row > 0 and moved_in_a_row > 0, op


def test_what_a_back_end_does_not_do_is_said(gloo_ranks):
    for said in gloo_ranks(2, refusals):
        assert said == [
            "torch's all_reduce is in place; the nccl back end has it out of place",
            "all_to_all has no form in place",
            "no back end 'smoke_signals' for collectives; there are gloo, nccl, one_shot, "
            "two_shot, peer_copy",
            "one_shot does all_reduce, not all_gather",
            "gloo cannot be captured in a graph",
            "NCCL needs GPUs",
            "gloo has no avg",
            "fp8 is only moved by NCCL here, not gloo",
            "fp8 is only moved by NCCL here, not reduced",
            "one_shot has sums of floating-point numbers only",
        ]


@pytest.mark.parametrize("world", [2, 3])
def test_every_reduction_of_every_number_is_what_numpy_says(gloo_ranks, world):
    for found in gloo_ranks(world, reduced):
        wrong = [op for op, right in zip(reductions(world), found, strict=True) if not right]
        assert not wrong


@pytest.mark.parametrize("world", [2, 3])
def test_the_check_is_right_for_every_reduction_number_and_root(gloo_ranks, world):
    found, *_ = gloo_ranks(world, wrong_numbers)
    for op, (right, again, undone, shifted) in zip(
        reductions(world) + moved(world), found, strict=True
    ):
        assert right == 0 and undone > 0 and shifted > 0, op
        assert again in (0, None), op
        if op.redop in ("max", "min") and op.kind != "reduce":
            assert again == 0, op


def test_averages_are_checked_where_nothing_is_rounded():
    def average(n: int, dtype: str, **rest) -> int | None:
        op = Collective(
            kind="all_reduce", size_bytes=800, group_size=n, dtype=dtype, redop="avg", **rest
        )
        number = collectives.sent_dtype(op)
        if (allowed := pattern.tolerance(op, number)) is None:
            return None
        summed = pattern.num_summed(op)
        sources = torch.zeros(n, 800 // number.itemsize, dtype=number)
        for rank in range(n):
            pattern.fill(sources[rank], rank, summed, op.redop)
        result = sources.double().mean(0)
        result = (result if number.is_floating_point else result.floor()).to(number)
        wanted = pattern.pieces(op, 0)
        assert pattern.num_wrong(result.roll(1), wanted, summed, allowed) > 0
        return pattern.num_wrong(result, wanted, summed, allowed)

    for n in (2, 4, 8):
        assert average(n, "bf16") == average(n, "fp32") == average(n, "int8") == 0
    assert average(3, "int32") == average(7, "uint8") == 0
    assert average(3, "fp32") is None and average(6, "bf16") is None  # thirds are rounded
    op = Collective(kind="all_reduce", size_bytes=8, group_size=7, dtype="int8", redop="prod")
    assert pattern.tolerance(op, torch.int8) is None  # 2^7 is no int8
    assert pattern.tolerance(op, torch.uint8) == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_sums_over_the_ranks_are_exact_in_every_dtype(dtype):
    op = Collective(kind="all_reduce", size_bytes=2**16, group_size=8, dtype="fp32", in_place=True)
    sources = [torch.empty(2**14, dtype=dtype) for _ in range(8)]
    for rank, source in enumerate(sources):
        pattern.fill(source, rank, 8)
    total = torch.zeros(2**14, dtype=torch.float64)
    for source in sources:
        total += source.double()
    assert pattern.num_wrong(total.to(dtype), pattern.pieces(op, 0), 8) == 0
    assert torch.equal(total.to(dtype).double(), total)
    assert len(total.unique()) > 8  # enough different values to tell elements apart


@pytest.mark.parametrize("num_ranks", [43, 64, 128, 1000])
def test_copies_of_many_ranks_are_told_apart_in_bf16(num_ranks):
    size = 2 * num_ranks
    op = Collective(kind="all_gather", size_bytes=2 * size, group_size=num_ranks, dtype="bf16")
    sources = torch.empty(num_ranks, size // num_ranks, dtype=torch.bfloat16)
    for rank, source in enumerate(sources):
        pattern.fill(source, rank, pattern.num_summed(op))
    wanted = pattern.pieces(op, 0)
    assert pattern.num_wrong(sources.flatten(), wanted, pattern.num_summed(op)) == 0
    exchanged = sources[torch.tensor([1, 0, *range(2, num_ranks)])].flatten()
    assert pattern.num_wrong(exchanged, wanted, pattern.num_summed(op)) == 4


def test_sums_that_the_dtype_would_round_are_not_judged():
    many = Collective(kind="all_reduce", size_bytes=8, group_size=257, dtype="bf16", in_place=True)
    assert pattern.tolerance(many, torch.bfloat16) is None
    assert pattern.tolerance(many, torch.float32) == 0
    copied = Collective(kind="all_gather", size_bytes=514, group_size=257, dtype="bf16")
    assert pattern.tolerance(copied, torch.bfloat16) == 0


@pytest.mark.parametrize(
    ("dtype", "n", "kind"),
    [
        *((dtype, n, "all_reduce") for dtype in ("bf16", "fp16", "fp32") for n in (2, 3, 6, 8, 16)),
        *((dtype, n, kind) for dtype in ("bf16", "fp32") for n in (2, 5, 8)
          for kind in ("reduce", "reduce_scatter")),
    ],
)  # fmt: skip
def test_sums_of_sums_are_known_up_to_rounding(dtype, n, kind):
    """Calls in a row, in place, done here one after the other by the definition, in the dtype."""
    torch_dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[dtype]
    length = 64 * n
    op = Collective(
        kind=kind, size_bytes=length * torch_dtype.itemsize, group_size=n, dtype=dtype,
        in_place=True,
    )  # fmt: skip
    allowed = pattern.tolerance(op, torch_dtype, CALLS)
    assert allowed is not None
    assert (allowed > 0) == (kind == "all_reduce" and n in (3, 6))
    held = torch.empty(n, length, dtype=torch_dtype)
    for rank in range(n):
        pattern.fill(held[rank], rank, pattern.num_summed(op, CALLS))
    parts = {"all_reduce": [slice(None)] * n, "reduce": [slice(None)] + [slice(0)] * (n - 1)}
    mine = parts.get(kind) or [slice(64 * rank, 64 * rank + 64) for rank in range(n)]
    wanted = [pattern.pieces(op, rank, CALLS) for rank in range(n)]
    summed = pattern.num_summed(op, CALLS)

    def wrong():
        return [
            pattern.num_wrong(held[rank][mine[rank]], wanted[rank], summed, allowed)
            for rank in range(n)
        ]

    assert sum(wrong()) > 0
    for _ in range(CALLS):
        total = held[0].clone()
        for rank in range(1, n):
            total += held[rank]  # rounded each time, as a ring does
        for rank in range(n):
            held[rank][mine[rank]] = total[mine[rank]]
    assert sum(wrong()) == 0
    held[0] = held[0].roll(1)
    assert wrong()[0] > 0


def test_sums_of_sums_in_fp64_are_not_called_wrong():
    """Three ranks, 20 calls in place: 3^19 times the sum, which fp32 does not hold."""
    op = Collective(kind="all_reduce", size_bytes=72 * 8, group_size=3, dtype="fp64", in_place=True)
    summed = pattern.num_summed(op, 20)
    sources = [torch.empty(72, dtype=torch.float64) for _ in range(3)]
    for rank, source in enumerate(sources):
        pattern.fill(source, rank, summed)
    result = sum(sources)
    for _ in range(19):
        result = result + result + result
    wanted, allowed = pattern.pieces(op, 0, 20), pattern.tolerance(op, torch.float64, 20)
    assert pattern.num_wrong(result, wanted, summed, allowed) == 0
    result[5] *= 1 + 1e-12
    assert pattern.num_wrong(result, wanted, summed, allowed) == 1


def test_a_case_waits_as_long_as_its_ranks_do(gloo_ranks):
    told, waited_s = gloo_ranks(2, waits_alone)[0]
    gloo_ranks.end(2)
    assert "imed out" in told
    assert waited_s >= 2.0
