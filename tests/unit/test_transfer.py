"""Plans of whole models against numpy, HiGHS, brute force and published byte counts."""

import itertools
import random
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linear_sum_assignment, linprog

from meshwise.reshard import bounds, flow, regions, senders, transfer
from meshwise.reshard.bounds import Rates
from meshwise.reshard.holdings import HeldTensor, holdings
from meshwise.reshard.regions import Box, Piece
from meshwise.reshard.transfer import loads, transfer_plan
from meshwise.spec import Decoder, Experts, WeightLayout

MB = 1e6


# Random layouts of several tensors, and the simulation that shows what a plan does


@st.composite
def partitions(draw, name, shape, ranks):
    """A tensor cut at random, each part held by some ranks, in buffers of their own."""
    boxes = [regions.whole(shape)]
    for _ in range(draw(st.integers(0, 4))):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        at = draw(st.integers(box.low[dim], box.high[dim]))
        edge = (*box.low[:dim], at, *box.low[dim + 1 :])
        end = (*box.high[:dim], at, *box.high[dim + 1 :])
        boxes += [part for part in (Box(box.low, end), Box(edge, box.high)) if part.num_elements]
    pieces = []
    for number, box in enumerate(boxes):
        for rank in draw(st.sets(st.sampled_from(ranks), min_size=1)):
            offset = tuple(draw(st.integers(0, 2)) for _ in shape)
            for copy in range(draw(st.sampled_from([1, 1, 1, 2]))):  # tied: held twice
                pieces.append(Piece(rank, box, offset, f"{name}.{number}.{copy}"))
    return tuple(draw(st.permutations(pieces)))


@st.composite
def stacked(draw, shape, ranks):
    """Even cuts of a dim, parts of one buffer, as fused weights are laid out."""
    dim = draw(st.integers(0, len(shape) - 1))
    cut = draw(st.integers(0, shape[dim]))
    copies = draw(st.integers(1, min(3, len(ranks))))
    groups = np.array_split(draw(st.permutations(ranks)), copies)
    blocks = [cut, shape[dim] - cut]
    layouts = [regions.sharded(shape, dim, group.tolist(), blocks=blocks) for group in groups]
    return tuple(itertools.chain(*layouts))


@st.composite
def models(draw):
    """(source, destination, host_of) of one or two tensors on 2 to 12 ranks."""
    world = draw(st.integers(2, 12))
    shapes = draw(
        st.lists(st.lists(st.integers(1, 6), min_size=1, max_size=3), min_size=1, max_size=2)
    )
    sides = []
    for _ in range(2):
        ranks = sorted(draw(st.sets(st.integers(0, world - 1), min_size=1)))
        layouts = [
            draw(st.one_of(partitions(f"t{number}", shape, ranks), stacked(shape, ranks)))
            for number, shape in enumerate(shapes)
        ]
        sides.append(
            {
                f"t{number}": HeldTensor(tuple(shape), "fp32", layout)
                for number, (shape, layout) in enumerate(zip(shapes, layouts, strict=True))
            }
        )
    per_host = draw(st.integers(1, world))
    return sides[0], sides[1], lambda rank: rank // per_host


def window(box):
    return tuple(slice(low, high) for low, high in zip(box.low, box.high, strict=True))


def memory(held, values):
    """Every buffer of a side; elements that no piece holds are NaN. No values: all are NaN."""
    shapes: dict[object, tuple[int, ...]] = {}
    for name, tensor in held.items():
        for piece in tensor.layout:
            key, end = (piece.rank, name, piece.buffer), piece.local(piece.box).high
            shapes[key] = tuple(map(max, shapes.get(key, end), end))
    found = {key: np.full(shape, np.nan) for key, shape in shapes.items()}
    for name, tensor in held.items():
        for piece in tensor.layout if values else ():
            local = window(piece.local(piece.box))
            found[piece.rank, name, piece.buffer][local] = values[name][window(piece.box)]
    return found


def logical(held):
    values, start = {}, 0
    for name, tensor in held.items():
        size = int(np.prod(tensor.shape))
        values[name] = np.arange(start, start + size, dtype=float).reshape(tensor.shape)
        start += size
    return values


def carried_out(made, have, got, order=None):
    """Apply the stages, moves of a stage in any order; how often each element was written."""
    writes = {key: np.zeros(buffer.shape, int) for key, buffer in got.items()}
    for number, stage in enumerate(made.stages):
        moves = list(stage)
        if order:
            order.shuffle(moves)
        for tensor, move in moves:
            name = made.names[tensor]
            taken = (got if number else have)[move.source, name, move.taken]
            put = move.destination, name, move.put
            got[put][window(move.write)] = taken[window(move.read)]
            writes[put][window(move.write)] += 1
    return writes


MULTICAST = st.sampled_from(["auto", "never", "always"])


@given(models(), MULTICAST, st.randoms(use_true_random=False))
def test_every_element_is_written_once_from_the_right_place(model, multicast, order):
    source, destination, host_of = model
    made = transfer_plan(source, destination, host_of=host_of, multicast=multicast)
    values = logical(source)
    got, want = memory(destination, None), memory(destination, values)
    writes = carried_out(made, memory(source, values), got, order)
    for key, expected in want.items():
        np.testing.assert_array_equal(got[key], expected)
        np.testing.assert_array_equal(writes[key], ~np.isnan(expected))


def masks(held, name):
    """Which elements every rank holds."""
    tensor = held[name]
    found = {}
    for piece in tensor.layout:
        mask = found.setdefault(piece.rank, np.zeros(tensor.shape, bool))
        mask[window(piece.box)] = True
    return found


@given(models(), st.sampled_from(["auto", "never"]))
def test_wire_bytes_are_what_ranks_need_and_do_not_hold(model, multicast):
    """Even where a rank needs an element twice; then it receives it twice only if told to."""
    source, destination, host_of = model
    one_host = {"host_of": lambda rank: 0} if multicast == "auto" else {"host_of": host_of}
    made = transfer_plan(source, destination, multicast=multicast, **one_host)
    received = sum(matrix.sum(0) - matrix.diagonal() for matrix in loads(made))
    expected = np.zeros(20, int)
    for name, tensor in destination.items():
        have = masks(source, name)
        nobody = np.zeros(tensor.shape, bool)
        for rank, need in masks(destination, name).items():
            missing = need & ~have.get(rank, nobody)
            if multicast == "auto":
                expected[rank] += 4 * missing.sum()
            else:
                pieces = [p for p in tensor.layout if p.rank == rank]
                expected[rank] += 4 * sum(missing[window(p.box)].sum() for p in pieces)
    np.testing.assert_array_equal(received, expected[: len(received)])
    assert not expected[len(received) :].any()


@given(models(), MULTICAST)
def test_every_byte_of_the_destination_is_moved(model, multicast):
    source, destination, host_of = model
    made = transfer_plan(source, destination, host_of=host_of, multicast=multicast)
    size = sum(p.box.num_elements for t in destination.values() for p in t.layout)
    assert sum(matrix.sum() for matrix in loads(made)) == 4 * size


@given(models(), MULTICAST)
def test_there_and_back(model, multicast):
    a, b, host_of = model
    have = memory(a, logical(a))
    for source, destination in ((a, b), (b, a)):
        made = transfer_plan(source, destination, host_of=host_of, multicast=multicast)
        got = memory(destination, None)
        carried_out(made, have, got)
        have = got
    for key, expected in memory(a, logical(a)).items():
        np.testing.assert_array_equal(have[key], expected)


@given(models())
def test_an_owner_on_the_host_sends_before_others(model):
    source, destination, host_of = model
    made = transfer_plan(source, destination, host_of=host_of, multicast="never")
    for tensor, move in made.stages[0]:
        if host_of(move.source) != host_of(move.destination):
            have = masks(source, made.names[tensor])
            near = [
                mask for rank, mask in have.items() if host_of(rank) == host_of(move.destination)
            ]
            assert not any(mask[window(move.box)].any() for mask in near)


@given(models(), MULTICAST)
def test_no_plan_beats_the_limits(model, multicast):
    source, destination, host_of = model
    rates = Rates("unit", 4.0, 3.0, 5.0)
    made = transfer_plan(source, destination, host_of=host_of, multicast=multicast)
    bound = bounds.limits(source, destination, rates, host_of=host_of)
    busiest_s = bounds.busiest_s(made, rates, host_of) * (1 + 1e-12)
    assert bound.time_s <= busiest_s
    if multicast == "never":
        assert max(bound.time_s, bound.egress_s) <= busiest_s


# Balance


CLASSES = st.dictionaries(
    st.frozensets(st.integers(0, 6), min_size=1), st.integers(1, 1000), min_size=1, max_size=10
)
CAPACITIES = st.lists(st.sampled_from([0.25, 1, 2, 3, 50]), min_size=7, max_size=7)


def highs(owned, capacity):
    """Least largest load: minimise z, x of each (class, owner) filling the class."""
    pairs = [(owners, rank) for owners in owned for rank in owners]
    ranks = sorted({rank for _, rank in pairs})
    scale = max(capacity[rank] for rank in ranks)
    fill = np.array([[owners == o for o, _ in pairs] + [False] for owners in owned], float)
    load = np.array(
        [[rank == r for _, r in pairs] + [-capacity[rank] / scale] for rank in ranks], float
    )
    found = linprog(
        [0.0] * len(pairs) + [1.0],
        A_ub=load, b_ub=np.zeros(len(ranks)), A_eq=fill, b_eq=list(owned.values()),
    )  # fmt: skip
    assert found.success
    return found.fun / scale


@given(CLASSES, CAPACITIES)
def test_the_busiest_sender_is_as_little_busy_as_highs_finds(owned, rates):
    capacity = dict(enumerate(rates))
    best = highs(owned, capacity)
    load, tight = flow.balance(owned, capacity)
    assert float(load) == pytest.approx(best, rel=1e-6)
    within = sum(size for owners, size in owned.items() if owners <= tight)
    assert within == load * sum(Fraction(capacity[rank]) for rank in tight)
    busy = dict.fromkeys(range(7), Fraction(0))
    for owners, part in flow.shares(owned, capacity).items():
        assert sum(part.values()) == owned[owners] and part.keys() <= owners
        for rank, size in part.items():
            busy[rank] += size / Fraction(capacity[rank])
    assert max(busy.values()) == load


def test_who_has_nothing_to_do_with_the_busiest_is_balanced_too():
    """Rank 0 must send 90 alone; 1 and 2 share 20 equally all the same."""
    owned = {frozenset([0]): 90, frozenset([1, 2]): 20, frozenset([0, 1]): 2}
    assert flow.shares(owned) == {
        frozenset([0]): {0: 90}, frozenset([1, 2]): {1: 9, 2: 11}, frozenset([0, 1]): {1: 2},
    }  # fmt: skip


@given(st.lists(st.tuples(st.sets(st.integers(0, 5), min_size=1), st.integers(0, 5)), min_size=1))
@settings(max_examples=30)
def test_a_plan_sends_what_highs_finds_up_to_a_cut(tensors):
    """64 MiB tensors whole on some ranks, wanted on another: senders within 2 MiB a tensor."""
    rates = [1, 2, 3, 1, 2, 3]
    size = 64 * 2**20 + 12345
    sides = [
        {str(i): HeldTensor((size,), "fp8", regions.replicated((size,), sorted(ranks)))
         for i, ranks in enumerate(side)}
        for side in ([owners for owners, _ in tensors], [[6 + needer] for _, needer in tensors])
    ]  # fmt: skip
    made = transfer_plan(*sides, multicast="never", bytes_per_s_out=lambda rank: (rates * 2)[rank])
    owned: dict[frozenset[int], int] = {}
    for owners, _ in tensors:
        owned[frozenset(owners)] = owned.get(frozenset(owners), 0) + size
    (matrix,) = loads(made)
    best = highs(owned, dict(enumerate(rates)))
    busiest = max(matrix[rank].sum() / rates[rank] for rank in range(6))
    assert best * (1 - 1e-9) <= busiest <= best + 2 * 2**20 * len(owned)


def test_a_cut_leaves_no_part_below_a_mebibyte():
    """Three owners share one tensor of 4 MiB by 2 KiB rows: two parts of 1.33 MiB, the rest; of
    1 MiB: one sends it all."""
    for rows, parts in ((2048, [1398784, 1396736, 1398784]), (512, [2**20])):
        source = {"w": HeldTensor((rows, 1024), "bf16", regions.replicated((rows, 1024), range(3)))}
        destination = {"w": source["w"]._replace(layout=regions.replicated((rows, 1024), [3]))}
        made = transfer_plan(source, destination)
        assert [2 * move.box.num_elements for _, move in made.stages[0]] == parts


# Published byte counts: Megatron's refit scenarios, their planner replayed and the LP optimum.
# fp32, vocabulary 50432 (large: 50688), untied, not gated; experts 4096 wide.


def gpt(layers=4, hidden=1024, heads=8, vocab=50432, num_experts=0):
    experts = Experts(num_experts=num_experts, top_k=2, ffn=4096) if num_experts else None
    return Decoder(
        layers=layers, hidden=hidden, heads=heads, kv_heads=heads, head_dim=hidden // heads,
        ffn=4 * hidden, vocab=vocab, max_seq_len=512, tied=False, gated=False, experts=experts,
    )  # fmt: skip


def laid_out(model, first_rank=0, **degrees):
    layout = WeightLayout(dtype="fp32", order="megatron", first_rank=first_rank, **degrees)
    return holdings(model, layout)


@pytest.mark.parametrize(
    ("model", "before", "after", "local", "wire", "ingress", "egress"),
    [
        (gpt(), {"tp": 2}, {"dp": 2}, 614.5, 614.5, 307.2, 307.2),
        (gpt(), {"dp": 2}, {"tp": 2}, 614.5, 0, 0, 0),
        (gpt(), {"tp": 2, "dp": 2}, {"tp": 4}, 307.4, 307.2, 153.6, 76.8),
        (gpt(8), {"tp": 2, "pp": 2}, {"tp": 4}, 204.1, 612.0, 204.0, 203.9),
        (gpt(8), {"pp": 2}, {"tp": 2}, 408.0, 408.0, 204.0, 204.0),
        (gpt(num_experts=8), {"dp": 2, "ep": 2}, {"dp": 2}, 2034.6, 1073.7, 536.9, 536.9),
        (gpt(num_experts=8), {"dp": 4, "ep": 2}, {"dp": 4, "ep": 4}, 2458.5, 536.9, 268.4, 134.2),
        (gpt(16, 4096, 32, 50688), {"tp": 2, "pp": 2}, {"tp": 4}, 3637.5, 10910.5, 3636.7, 3636.5),
        (gpt(), {"tp": 2}, {"first_rank": 2}, 0, 614.5, 614.5, 307.3),
    ],
    ids=["tp2-tp1", "tp1-tp2", "tp2-tp4", "tp2pp2-tp4pp1", "tp1pp2-tp2pp1", "ep2-ep1", "ep2-ep4",
         "large", "tp2-tp1-apart"],
)  # fmt: skip
def test_the_scenarios_move_the_published_bytes(model, before, after, local, wire, ingress, egress):
    source, destination = laid_out(model, **before), laid_out(model, **after)
    (matrix,) = loads(transfer_plan(source, destination))
    assert matrix.trace() / MB == pytest.approx(local, abs=0.051)
    between = matrix - np.diag(matrix.diagonal())
    assert between.sum() / MB == pytest.approx(wire, abs=0.051)
    assert between.sum(0).max() / MB == pytest.approx(ingress, abs=0.1)
    assert between.sum(1).max() / MB == pytest.approx(egress, abs=0.1)
    bound = bounds.limits(source, destination, Rates("MB", MB))
    assert (bound.ingress_s, bound.egress_s) == pytest.approx((ingress, egress), abs=0.1)


@pytest.mark.parametrize(
    ("model", "before", "after", "optimum"),
    [
        (gpt(), {"dp": 8}, {"dp": 8}, 614),  # Megatron sends all 4916 MB from one rank
        (gpt(), {"tp": 4, "dp": 2}, {"tp": 8}, 77),  # 154
        (gpt(8), {"tp": 2, "pp": 2, "dp": 2}, {"tp": 4, "dp": 2}, 204),  # 408
        (gpt(vocab=1024, num_experts=8), {"dp": 16, "ep": 4}, {"dp": 8, "ep": 8}, 105),  # 1408
    ],
    ids=["tp1dp8-tp1dp8", "tp4dp2-tp8", "tp2pp2dp2-tp4dp2", "ep4(16)-ep8(8)"],
)  # fmt: skip
def test_replicas_share_the_sending_as_evenly_as_can_be(model, before, after, optimum):
    source, destination = laid_out(model, **before), laid_out(model, first_rank=16, **after)
    (matrix,) = loads(transfer_plan(source, destination))
    bound = bounds.limits(source, destination, Rates("MB", MB))
    assert bound.egress_s == pytest.approx(optimum, abs=0.6)
    assert matrix.sum(1).max() / MB == pytest.approx(bound.egress_s, rel=0.005)


def test_layers_cut_alike_are_cut_once(monkeypatch):
    """61 layers of 96 experts, each a buffer of its own name: a handful of cuts."""
    from meshwise.reshard import atoms

    made = []
    original = atoms._atoms
    monkeypatch.setattr(atoms, "_atoms", lambda *pair: made.append(pair) or original(*pair))
    model = gpt(layers=61, vocab=1024, num_experts=96)
    source, destination = laid_out(model, dp=8, ep=8), laid_out(model, tp=2, dp=4, ep=4)
    found = transfer_plan(source, destination)
    assert len(found.names) > 400 and len(made) < 20


# Multicast


def whole(rows, ranks, name="w", **changes):
    shape = (rows, 1024)
    return {name: HeldTensor(shape, "bf16", regions.replicated(shape, ranks))._replace(**changes)}


def test_one_source_for_eight_sends_stripes_that_they_pass_on():
    """32 MiB each: 8 units out of rank 0 become 1, then everybody passes its eighth to seven."""
    source, destination = whole(16384, [0]), whole(16384, range(1, 9))
    made = transfer_plan(source, destination)
    first, second = loads(made)
    np.testing.assert_array_equal(first[0, 1:], np.full(8, 4 * 2**20))
    np.testing.assert_array_equal(second[1:, 1:], (1 - np.eye(8, dtype=int)) * 4 * 2**20)
    rates = Rates("unit", 32 * 2**20)
    assert bounds.busiest_s(made, rates) == pytest.approx(1 + 7 / 8)
    bound = bounds.limits(source, destination, rates)
    assert (bound.relayed_s, bound.egress_s, bound.time_s) == (1, 8, 1)
    alone = transfer_plan(source, destination, multicast="never")
    assert bounds.busiest_s(alone, rates) == 8


def test_stripes_are_not_used_where_they_lose():
    """As many sources as receivers; and so few bytes that a second step costs more."""
    assert len(transfer_plan(whole(16384, range(8)), whole(16384, range(8, 16))).stages) == 1
    assert len(transfer_plan(whole(4, [0]), whole(4, range(1, 9))).stages) == 1
    assert len(transfer_plan(whole(4, [0]), whole(4, range(1, 9)), multicast="always").stages) == 2


def test_only_what_binds_is_striped():
    """Rank 0 alone owns a; b has as many owners as receivers."""
    source = whole(16384, [0], "a") | whole(1024, range(1, 9), "b")
    destination = whole(16384, range(9, 17), "a") | whole(1024, range(9, 17), "b")
    made = transfer_plan(source, destination)
    assert {made.names[tensor] for tensor, _ in made.stages[1]} == {"a"}


def test_a_host_takes_in_each_byte_once_and_spreads_it():
    """Two hosts of four ranks need what one rank of a third has; slow cards, fast links."""
    source, destination = whole(16384, [0]), whole(16384, range(4, 12))
    made = transfer_plan(
        source, destination, host_of=lambda rank: rank // 4,
        bytes_per_s_out=lambda rank: 400e9, bytes_per_s_between_hosts=lambda rank: 50e9,
    )  # fmt: skip
    first, second = loads(made)
    np.testing.assert_array_equal(first[0, 4:], np.full(8, 8 * 2**20))
    assert not second[:4].any() and not second[4:8, 8:].any() and not second[8:, 4:8].any()
    rates = Rates("unit", 32 * 2**20, 32 * 2**20)
    bound = bounds.limits(source, destination, rates, host_of=lambda rank: rank // 4)
    assert (bound.hosts_s, bound.relayed_s, bound.ingress_s) == (1, 1, 1)


def test_a_rank_that_needs_a_box_twice_receives_it_once():
    shape = (16384, 1024)
    source = whole(16384, [0])
    head = Piece(1, regions.whole(shape), (0, 0), "head.weight")
    layout = (*regions.replicated(shape, [1]), head)
    first, second = loads(transfer_plan(source, whole(0, [], shape=shape, layout=layout)))
    assert (first[0, 1], second[1, 1]) == (32 * 2**20, 32 * 2**20)
    assert first.sum() == second.sum() == 32 * 2**20


# Placement


def test_tp2_to_tp4_needs_no_wire_when_ranks_may_be_renumbered():
    shape = (8, 4)
    half = regions.sharded(shape, 0, [0, 1]) + regions.sharded(shape, 0, [2, 3])
    source = {"w": HeldTensor(shape, "bf16", half)}
    destination = {"w": HeldTensor(shape, "bf16", regions.sharded(shape, 0, range(4)))}
    moved = transfer.place(source, destination)
    assert sorted(moved) == [0, 1, 2, 3] and {moved[0], moved[1]} == {0, 2}
    placed = transfer.renumbered(destination, moved)
    (before,), (after,) = (loads(transfer_plan(source, held)) for held in (destination, placed))
    assert before.trace() == 32 and after.trace() == after.sum() == 64
    kept = transfer.place(source, destination, groups=[[0, 1], [2, 3]])
    assert {kept[0], kept[1]} == {0, 1}  # the halves of the destination may not change places


@given(models())
@settings(max_examples=30)
def test_no_other_placement_moves_fewer_bytes(model):
    source, destination, _ = model
    ranks = sorted({p.rank for t in destination.values() for p in t.layout})[:4]
    moved = transfer.place(source, destination, groups=[ranks])

    def wire(permutation):
        made = transfer_plan(source, transfer.renumbered(destination, permutation))
        return sum(matrix.sum() - matrix.trace() for matrix in loads(made))

    every = []
    for order in itertools.permutations(ranks):
        permutation = list(range(13))
        for role, rank in zip(ranks, order, strict=True):
            permutation[role] = rank
        every.append(wire(permutation))
    assert wire(moved) == min(every)


@given(st.integers(1, 9), st.integers(0, 2**32 - 1))
def test_assignments_cost_what_scipy_finds(n, seed):
    cost = np.random.default_rng(seed).integers(-20, 20, (n, n))
    columns = flow.assigned(cost)
    assert sorted(columns) == list(range(n))
    assert cost[range(n), columns].sum() == cost[linear_sum_assignment(cost)].sum()


def test_ranks_that_gain_nothing_stay():
    held = whole(4, range(5))
    assert transfer.place(held, held) == (0, 1, 2, 3, 4)


def test_a_rank_is_in_one_group():
    with pytest.raises(ValueError, match="a rank may be in one group only"):
        transfer.place(whole(4, [0]), whole(4, [0, 1]), groups=[[0, 1], [1]])


# Mistakes


def test_all_that_does_not_fit_is_told_at_once():
    source = whole(4, [0], "layers.0.q.weight") | whole(4, [0], "b") | whole(4, [0], "c")
    destination = (
        whole(4, [1], "layers.0.q.weights")
        | whole(4, [1], "b", dtype="fp32")
        | whole(5, [1], "c")
        | whole(4, [1], "d", dtype="int4")
    )
    source |= whole(4, [0], "d")
    with pytest.raises(ValueError) as told:
        transfer_plan(source, destination)
    text = str(told.value)
    assert "\n" not in text and "4 tensors do not fit" in text
    assert "'layers.0.q.weight'" in text and "layers.0.q.weights: the source has none" in text
    assert "b: dtype bf16 in the source, fp32 in the destination; allow it by convert=True" in text
    assert "c: shape (4, 1024) in the source, (5, 1024) in the destination" in text
    assert "d: dtype 'int4'" in text


def test_dtypes_may_differ_when_asked_and_the_wire_has_the_destinations():
    made = transfer_plan(whole(4, [0]), whole(4, [1], dtype="fp32"), convert=True)
    assert made.dtypes == (("bf16", "fp32"),) and made.itemsizes == (4,)
    assert loads(made)[0][0, 1] == 4 * 1024 * 4


def test_tensors_may_be_selected_and_what_is_not_used_is_said():
    source = whole(4, [0], "a.lora_a") | whole(4, [0], "a.weight") | whole(4, [0], "value_head")
    destination = whole(4, [1], "a.lora_a") | whole(4, [1], "a.weight")
    assert transfer_plan(source, destination).unused == ("value_head",)
    made = transfer_plan(source, destination, only=["*lora*"])
    assert made.names == ("a.lora_a",) and made.unused == ()
    with pytest.raises(ValueError, match=r"only = 'a.weights': matches no tensor.*'a.weight'"):
        transfer_plan(source, destination, only=["a.weights"])
    with pytest.raises(ValueError, match="must be a list of patterns"):
        transfer_plan(source, destination, only="a.*")


@pytest.mark.parametrize("rate", [0, -1.0, float("inf")])
def test_impossible_rates_are_refused(rate):
    with pytest.raises(
        ValueError, match=r"bytes_per_s of rank \d = .*: must be above 0 and finite"
    ):
        transfer_plan(whole(4, [0, 1]), whole(4, [2, 3]), bytes_per_s_out=lambda _: rate)


def test_what_nobody_holds_is_named():
    source = whole(4, [0], layout=regions.sharded((4, 1024), 0, [0, 1])[:1])
    with pytest.raises(
        ValueError, match=r"^w: no source rank holds indices \(2, 0\) to \(4, 1024\)"
    ):
        transfer_plan(source, whole(4, [3]))


def test_two_pieces_at_one_place_of_a_buffer_are_refused():
    """k's offset forgotten in a fused weight."""
    fused = regions.whole((4, 1024))
    destination = {
        name: whole(4, [], name, layout=(Piece(1, fused, (0, 0), "qkv"),))[name] for name in "qk"
    }
    with pytest.raises(ValueError, match="buffer qkv of rank 1 holds two pieces at"):
        transfer_plan(whole(4, [0], "q") | whole(4, [0], "k"), destination)


@pytest.fixture
def striped():
    destination = whole(16384, [1, 2])
    return transfer_plan(whole(16384, [0]), destination, multicast="always"), destination


def changed(made, stage, number, **fields):
    stages = [list(moves) for moves in made.stages]
    tensor, move = stages[stage][number]
    stages[stage][number] = transfer.Named(tensor, move._replace(**fields))
    return made._replace(stages=tuple(map(tuple, stages)))


def test_a_plan_that_does_not_write_everything_once_fails_its_proof(striped):
    made, destination = striped
    transfer.check(made, destination)
    first, second = made.stages
    other = first[1].move
    for wrong in (
        made._replace(stages=(first, second[:1])),
        made._replace(stages=(first, (*second, second[0]))),
        changed(made, 0, 0, write=other.write),
        changed(made, 0, 0, box=other.box),
        changed(made, 0, 0, destination=other.destination, write=other.write),
        changed(made, 1, 0, put="elsewhere"),
    ):
        with pytest.raises(ValueError, match="w: "):
            transfer.check(wrong, destination)


def test_a_second_stage_that_reads_too_early_fails_its_proof(striped):
    made, destination = striped
    wrong = changed(made, 1, 0, read=made.stages[1][1].move.read)
    with pytest.raises(ValueError, match="reads what is not yet written"):
        transfer.check(wrong, destination)


def test_plans_have_one_digest_only_if_they_are_the_same(striped):
    made, destination = striped
    again = transfer_plan(whole(16384, [0]), destination, multicast="always")
    assert transfer.digest(made) == transfer.digest(again)
    move = made.stages[0][0].move
    others = [
        made._replace(names=("v",)),
        made._replace(stages=made.stages[:1]),
        made._replace(stages=(made.stages[0][::-1], made.stages[1])),
        changed(made, 0, 0, source=3),
        changed(made, 0, 0, read=move.box.shifted((1, 0))),
        changed(made, 0, 0, taken="x"),
        changed(made, 0, 0, put="x"),
    ]
    assert len({transfer.digest(plan_) for plan_ in [made, *others]}) == 1 + len(others)


# Limits, by hand


def test_each_limit_by_hand():
    """Ranks 0 and 1 (host 0) hold halves of 8 MiB; rank 0, and 2 and 3 (host 1), need all."""
    shape = (4096, 1024)
    source = {"w": HeldTensor(shape, "bf16", regions.sharded(shape, 0, [0, 1]))}
    destination = whole(4096, [0, 2, 3])
    mib = 2.0**20
    rates = Rates("by hand", 4 * mib, 1 * mib, 16 * mib)
    bound = bounds.limits(source, destination, rates, host_of=lambda rank: rank // 2)
    assert bound.ingress_s == 2  # 8 MiB into rank 2
    assert bound.egress_s == 3  # rank 1 sends its 4 MiB to 0, 2 and 3
    assert bound.relayed_s == 1  # once
    assert bound.hosts_s == 8  # 8 MiB into host 1
    assert bound.memory_s == 0.75  # rank 0 copies 4 MiB and receives 4 MiB
    assert (bound.time_s, bound.binding, bound.ranks, bound.rate) == (8, "hosts", (1,), "by hand")
    assert bounds.limits(source, source, rates).binding == "memory"
    assert bounds.limits(source, source, rates._replace(memory_bytes_per_s=float("inf"))) == (
        0, 0, 0, 0, 0, "nothing to move", (), "by hand",
    )  # fmt: skip


def test_the_price_of_a_second_step_is_a_few_tens_of_microseconds():
    """What decides between one step and two: 8 receivers, one owner, at 373 GB/s."""
    one = 7 * 2**20 / transfer.PEER_BYTES_PER_S - 7 / 8 * 2**20 / transfer.PEER_BYTES_PER_S
    assert one < senders.STEP_S < 4 * one
    for mib, stages in ((1, 1), (4, 2)):
        rows = mib * 512
        assert len(transfer_plan(whole(rows, [0]), whole(rows, range(1, 9))).stages) == stages


def test_moves_of_equal_holdings_are_in_one_order_whatever_the_names_order():
    """Ranks that build their holdings in different orders make the same plan."""
    names = [f"layers.{i}.w" for i in range(12)]
    shuffled = names[:]
    random.Random(0).shuffle(shuffled)
    sides = [
        ({n: whole(64, [0, 1])["w"] for n in order}, {n: whole(64, [2, 3])["w"] for n in order})
        for order in (names, shuffled)
    ]
    assert transfer.digest(transfer_plan(*sides[0])) == transfer.digest(transfer_plan(*sides[1]))
