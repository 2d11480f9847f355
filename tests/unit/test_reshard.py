"""Transfer lists against numpy: fill, move, compare; every element once, the least on the wire."""

import collections
import itertools
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwise.reshard import bounds, holdings, regions
from meshwise.reshard.regions import Layout
from meshwise.reshard.transfer import transfer_list


def buffers(layout: Layout, fill: float) -> dict[int, np.ndarray]:
    """One buffer a rank, large enough for its pieces."""
    shapes: dict[int, tuple[int, ...]] = {}
    for piece in layout:
        end = tuple(o + s for o, s in zip(piece.offset, piece.box.shape, strict=True))
        old = shapes.get(piece.rank, (0,) * len(end))
        shapes[piece.rank] = tuple(map(max, old, end))
    return {rank: np.full(shape, fill) for rank, shape in shapes.items()}


def window(box) -> tuple[slice, ...]:
    return tuple(slice(low, high) for low, high in zip(box.low, box.high, strict=True))


def held(layout: Layout, logical: np.ndarray) -> dict[int, np.ndarray]:
    """What every rank's buffer holds of ``logical``."""
    found = buffers(layout, np.nan)
    for piece in layout:
        found[piece.rank][window(piece.local(piece.box))] = logical[window(piece.box)]
    return found


@st.composite
def layouts(draw, shape):
    """Replicas, even and uneven shards, packed blocks, and meshes of two axes, on up to 5 ranks."""
    kind = draw(st.sampled_from(["replicated", "sharded", "uneven", "blocks", "mesh"]))
    ranks = draw(st.permutations(range(draw(st.integers(1, 5)))))
    dim = draw(st.integers(0, len(shape) - 1))
    if kind == "replicated":
        return regions.replicated(shape, ranks)
    if kind == "sharded":
        return regions.sharded(shape, dim, ranks)
    if kind == "uneven":
        cuts = draw(
            st.lists(st.integers(0, shape[dim]), min_size=len(ranks) - 1, max_size=len(ranks) - 1)
        )
        edges = [0, *sorted(cuts), shape[dim]]
        return regions.sharded(shape, dim, ranks, sizes=list(np.diff(edges)))
    if kind == "blocks":
        cut = draw(st.integers(0, shape[dim]))
        return regions.sharded(shape, dim, ranks, blocks=[cut, shape[dim] - cut])
    placements = draw(st.lists(st.sampled_from([None, *range(len(shape))]), min_size=2, max_size=2))
    return regions.placed(shape, (2, draw(st.integers(1, 3))), placements)


@st.composite
def pairs(draw):
    shape = tuple(draw(st.lists(st.integers(1, 7), min_size=1, max_size=3)))
    return shape, draw(layouts(shape)), draw(layouts(shape))


@given(pairs())
def test_moves_fill_the_destination_once_from_the_right_place(pair):
    shape, source, destination = pair
    logical = np.arange(np.prod(shape), dtype=float).reshape(shape)
    have, want = held(source, logical), held(destination, logical)
    got, writes = buffers(destination, np.nan), buffers(destination, 0)
    for move in transfer_list(source, destination):
        got[move.destination][window(move.write)] = have[move.source][window(move.read)]
        writes[move.destination][window(move.write)] += 1
    for rank, expected in want.items():
        np.testing.assert_array_equal(got[rank], expected)
        np.testing.assert_array_equal(writes[rank], ~np.isnan(expected))


@given(pairs())
def test_wire_elements_are_minimal(pair):
    """A rank must receive what it needs and does not hold; not one element more is sent."""
    shape, source, destination = pair
    moves = transfer_list(source, destination)
    for rank in {piece.rank for piece in destination}:
        needs, has = np.zeros(shape, int), np.zeros(shape, bool)
        for piece in destination:
            if piece.rank == rank:
                needs[window(piece.box)] += 1
        for piece in source:
            if piece.rank == rank:
                has[window(piece.box)] = True
        received = sum(
            m.box.num_elements for m in moves if m.destination == rank and not m.is_local
        )
        assert received == (needs * ~has).sum()


@given(pairs())
def test_there_and_back(pair):
    shape, a, b = pair
    logical = np.random.default_rng(0).standard_normal(shape)
    have = held(a, logical)
    for source, destination in ((a, b), (b, a)):
        got = buffers(destination, np.nan)
        for move in transfer_list(source, destination):
            got[move.destination][window(move.write)] = have[move.source][window(move.read)]
        have = got
    for rank, expected in held(a, logical).items():
        np.testing.assert_array_equal(have[rank], expected)


def test_runs_are_merged():
    """tp 3 to tp 2 over 6 rows: two moves into each rank, not one for each of lcm(3, 2) units."""
    source, destination = regions.sharded((6, 4), 0, range(3)), regions.sharded((6, 4), 0, range(2))
    moves = transfer_list(source, destination)
    assert [(m.source, m.destination, m.box.shape) for m in moves] == [
        (0, 0, (2, 4)), (1, 0, (1, 4)), (1, 1, (1, 4)), (2, 1, (2, 4)),
    ]  # fmt: skip


def test_replicas_share_the_sending():
    """8 copies to 8 other ranks: every source sends one, where a fixed choice would send eight."""
    source = regions.replicated((64,), range(8))
    moves = transfer_list(source, regions.replicated((64,), range(8, 16)))
    assert sorted(move.source for move in moves) == list(range(8))


def test_the_same_host_sends_first():
    source = regions.replicated((4,), [0, 4])
    (move,) = transfer_list(source, regions.replicated((4,), [5]), host_of=lambda rank: rank // 4)
    assert move.source == 4


def test_gate_and_up_stay_apart():
    """Megatron's stride 2: a rank's buffer is [its gate; its up]; tp 1 holds them as they are."""
    fused = regions.sharded((8,), 0, range(2), blocks=[4, 4])
    moves = transfer_list(fused, regions.replicated((8,), [0]))
    assert sorted((m.source, m.read.low, m.write.low) for m in moves) == [
        (0, (0,), (0,)), (0, (2,), (4,)), (1, (0,), (2,)), (1, (2,), (6,)),
    ]  # fmt: skip


def test_what_nobody_holds_is_named():
    source = regions.sharded((4,), 0, [0, 1], sizes=[2, 2])[:1]
    with pytest.raises(ValueError, match=r"no source rank holds indices \(2,\) to \(4,\)"):
        transfer_list(source, regions.replicated((4,), [2]))


@pytest.mark.parametrize(
    ("options", "message"), [({"sizes": [1, 2]}, "sizes"), ({"blocks": [3, 2]}, "blocks")]
)
def test_impossible_cuts_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        regions.sharded((4,), 0, [0, 1], **options)


OWNED = st.dictionaries(
    st.frozensets(st.integers(0, 4), min_size=1), st.integers(1, 60), min_size=1, max_size=8
)


@given(OWNED)
def test_balance_equals_the_worst_set_of_senders(owned):
    """Max-flow min-cut by trying every set of ranks."""
    worst = max(
        Fraction(sum(size for owners, size in owned.items() if owners <= set(ranks)), n)
        for n in range(1, 6)
        for ranks in itertools.combinations(range(5), n)
    )
    load, tight = bounds.balance(owned)
    assert load == worst
    assert sum(size for owners, size in owned.items() if owners <= tight) == load * len(tight)


def limits_of(source, destination, dtype, bytes_per_s):
    shape = (0,)  # of no consequence: pieces say what is held
    held = ({"x": holdings.HeldTensor(shape, dtype, layout)} for layout in (source, destination))
    return bounds.limits(*held, bounds.Rates("links", bytes_per_s))


@given(pairs())
def test_no_plan_is_faster_than_the_bounds(pair):
    _, source, destination = pair
    moves = transfer_list(source, destination)
    sent, received = collections.Counter(), collections.Counter()
    for move in moves:
        if move.source != move.destination:
            sent[move.source] += 2 * move.box.num_elements
            received[move.destination] += 2 * move.box.num_elements
    bound = limits_of(source, destination, "bf16", 1.0)
    assert max(received.values(), default=0) == bound.ingress_s
    assert max(sent.values(), default=0) >= bound.egress_s


def test_one_owner_for_many_is_bound_by_its_egress():
    source = regions.replicated((8,), [0])
    bound = limits_of(source, regions.replicated((8,), [1, 2, 3]), "fp32", 32.0)
    assert (bound.ingress_s, bound.egress_s, bound.time_s) == (1.0, 3.0, 1.0)


@given(pairs(), st.data())
def test_cropped_buffers_hold_what_a_slice_of_them_holds(pair, data):
    shape, layout, _ = pair
    logical = np.arange(np.prod(shape), dtype=float).reshape(shape)
    dim = data.draw(st.integers(0, len(shape) - 1))
    low, high = sorted(data.draw(st.lists(st.integers(0, 8), min_size=2, max_size=2)))
    part = regions.cropped(layout, dim, low, high)
    expected = {
        rank: whole[(slice(None),) * dim + (slice(low, high),)]
        for rank, whole in held(layout, logical).items()
    }
    found = held(part, logical)
    assert found.keys() == {rank for rank, kept in expected.items() if kept.size}
    for rank, kept in found.items():
        np.testing.assert_array_equal(kept, expected[rank])


def test_tensors_moved_behind_each_other_are_fused():
    """Ranks 4 and 5 hold [a; b] of two rows each of two tensors in a buffer called ab."""
    a, b = (regions.sharded((4, 3), 0, range(2)) for _ in range(2))
    a = regions.moved(a, ranks=4, buffer="ab")
    b = regions.moved(b, ranks=4, offset=(2, 0), buffer="ab")
    assert [(p.rank, p.box.low, p.offset, p.buffer) for p in a + b] == [
        (4, (0, 0), (0, 0), "ab"), (5, (2, 0), (0, 0), "ab"),
        (4, (0, 0), (2, 0), "ab"), (5, (2, 0), (2, 0), "ab"),
    ]  # fmt: skip


@given(shape=st.lists(st.integers(1, 4), min_size=1, max_size=4), ends=st.data())
def test_a_stretch_of_elements_is_few_boxes_in_their_order(shape, ends):
    numbers = np.arange(np.prod(shape)).reshape(shape)
    first, last = sorted(ends.draw(st.integers(0, numbers.size)) for _ in range(2))
    boxes = list(regions.stretches(shape, first, last))
    found = [number for box in boxes for number in numbers[window(box)].ravel()]
    assert found == list(range(first, last))
    assert len(boxes) <= 2 * len(shape) - 1
