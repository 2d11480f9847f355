"""Tiles copy what the moves say and nothing else, byte by byte. The oracle copies whole boxes with
numpy; the hash's is its formula in Python's own integers."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.lib.stride_tricks import as_strided

from meshwise.reshard import tiles
from meshwise.reshard.regions import Box, Piece, replicated, sharded, whole
from meshwise.reshard.tiles import ROW, TILE, Memory, TileBuffer
from meshwise.reshard.transfer import Move, transfer_list

FEW = settings(max_examples=150)


class End:
    """A buffer in a memory of bytes with something before, between and behind, in any order of the
    dims. ``seen`` has the logical tensor's dims, ``held`` perhaps more or fewer."""

    def __init__(self, shape, itemsize, *, gaps=None, order=None, before=0, held=None):
        gaps, order = gaps or [0] * len(shape), order or range(len(shape))
        steps, step = [0] * len(shape), 1
        for dim in reversed(order):
            steps[dim] = step
            step *= shape[dim] + gaps[dim]
        words = np.arange(before + step + 4, dtype=f"u{itemsize}") * 7
        self.bytes = words.view(np.uint8)
        self.base = before * itemsize
        strides = [step * itemsize for step in steps]
        self.seen = as_strided(words[before:], shape, strides)
        self.held = self.seen if held is None else self.seen.reshape(held)
        assert np.shares_memory(self.held, words) or not self.held.size
        self.memory = Memory(
            self.held.shape,
            tuple(step // itemsize for step in self.held.strides),
            itemsize,
            tiles.alignment_of(self.base),
        )

    def rows(self, tile, end, itemsize, width):
        """A tile's elements at one end, to be read or written."""
        view = self.bytes[self.base + tile[f"{end}_at"] :]
        assert (int(tile["rows"]) - 1) * tile[f"{end}_step"] + width * itemsize <= len(view)
        if itemsize > 1:
            view = np.frombuffer(view.data, f"u{itemsize}", len(view) // itemsize)
        return as_strided(view, (tile["rows"], width), (tile[f"{end}_step"], itemsize))


def slices(box):
    return tuple(map(slice, box.low, box.high))


def table_of(moves, read, write, **options):
    ends = {TileBuffer(0, 0, "a"): read.memory, TileBuffer(1, 1, "a"): write.memory}
    numbers = {TileBuffer(0, 0, "a"): 4, TileBuffer(1, 1, "a"): 9}
    return tiles.tiles([(0, move) for move in moves], ends, numbers, ["a"], **options)


def check(moves, read, write):
    """The tiles of these moves write what the boxes do, every byte once."""
    found = table_of(moves, read, write)
    assert (found["read"] == 4).all() and (found["write"] == 9).all()
    assert (tiles.nbytes(found) <= TILE).all() and (tiles.nbytes(found) > 0).all()
    before = write.bytes.copy()
    for move in moves:
        write.seen[slices(move.write)] = read.seen[slices(move.read)]
    wanted = write.bytes.copy()
    write.bytes[:] = before
    times = np.zeros(len(before), np.uint8)
    for tile in found:
        word = int(tile["word"])
        assert word in (1, 2, 4, 8)
        for end, side in (("read", read), ("write", write)):
            assert (side.base + tile[f"{end}_at"]) % word == 0
            assert tile[f"{end}_step"] % word == 0
        assert tile["width"] % word == 0
        write.rows(tile, "write", 1, tile["width"])[:] = read.rows(tile, "read", 1, tile["width"])
        at = write.base + tile["write_at"]
        as_strided(times[at:], (tile["rows"], tile["width"]), (tile["write_step"], 1))[:] += 1
    assert np.array_equal(write.bytes, wanted)
    marked = np.zeros(len(before), np.uint8)
    write.bytes[:] = 0
    for move in moves:
        write.seen[slices(move.write)] = np.iinfo(write.seen.dtype).max
    marked[write.bytes > 0] = 1
    assert np.array_equal(times, marked)
    return found


def boxes(shape, low):
    return Box(tuple(low), tuple(a + b for a, b in zip(low, shape, strict=True)))


def moved(shape, read_low, write_low):
    zeros = (0,) * len(shape)
    return Move(0, 1, boxes(shape, zeros), boxes(shape, read_low), boxes(shape, write_low))


@st.composite
def an_end(draw, shape, itemsize):
    small = st.lists(st.integers(0, 2), min_size=len(shape), max_size=len(shape))
    low, behind = draw(small), draw(small)
    extents = [a + b + c for a, b, c in zip(low, shape, behind, strict=True)]
    kind = draw(st.sampled_from(["plain", "gaps", "other order", "more dims", "fewer dims"]))
    gaps = draw(small) if kind in ("gaps", "other order") else None
    order = draw(st.permutations(range(len(shape)))) if kind == "other order" else None
    held = None
    if kind == "more dims" and shape:
        parts = draw(st.sampled_from([n for n in (1, 2, 3) if extents[0] % n == 0]))
        held = (parts, extents[0] // parts, *extents[1:])
    if kind == "fewer dims" and shape and shape[0] == 1:
        extents[0], low[0] = 1, 0
        held = tuple(extents[1:])
    before = draw(st.integers(0, 3))
    return low, End(tuple(extents), itemsize, gaps=gaps, order=order, before=before, held=held)


@st.composite
def a_move(draw):
    itemsize = draw(st.sampled_from([1, 2, 4, 8]))
    shape = draw(st.lists(st.integers(1, 5), max_size=4))
    if shape and draw(st.booleans()):
        shape = [*shape[-2:-1], draw(st.sampled_from([7, 255, 2047, 2048, 2049, 9001]))]
    ends = [draw(an_end(shape, itemsize)) for _ in range(2)]
    return moved(shape, *(low for low, _ in ends)), *(end for _, end in ends)


@FEW
@given(a_move())
def test_tiles_write_what_the_box_says_and_every_byte_once(drawn):
    move, read, write = drawn
    check([move], read, write)


WIDE = TILE + 24
SHAPES = {
    "rows longer than a tile": ((3, WIDE), [1, 8], [0, 16], (5, WIDE + 40), (3, WIDE + 16), 1),
    "of odd bytes": ((300, 219), [2, 3], [1, 5], (303, 227), (301, 224), 1),
    "many short rows": ((70000, 3), [0, 1], [0, 0], (70000, 5), (70000, 3), 2),
    "one column": ((5000, 1), [0, 2], [3, 0], (5000, 4), (5003, 1), 4),
    "no gap": ((130, 1024), [1, 0], [2, 0], (131, 1024), (132, 1024), 2),
    "no gap and a rest": ((41, 1001), [0, 0], [0, 0], (41, 1001), (41, 1001), 8),
    "exactly a row": ((ROW // 4,), [0], [1], (ROW // 4,), (ROW,), 4),
    "exactly a tile": ((TILE,), [0], [0], (TILE,), (TILE,), 1),
    "a scalar": ((), [], [], (), (), 4),
}


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_at_the_edges_of_rows_and_tiles(name):
    shape, read_low, write_low, read, write, itemsize = SHAPES[name]
    found = check([moved(shape, read_low, write_low)], End(read, itemsize), End(write, itemsize))
    assert tiles.nbytes(found).sum() == int(np.prod(shape)) * itemsize


def test_large_windows_are_few_tiles_of_large_words():
    shape = (64, 4096)
    found = check([moved(shape, [0, 0], [0, 0])], End(shape, 2), End((64, 8192), 2))
    assert len(found) == 64 * 8192 / TILE and set(found["word"]) == {8}
    found = check([moved(shape, [0, 0], [0, 3])], End(shape, 2), End((64, 8192), 2))
    assert len(found) == 64 * 8192 / TILE and set(found["word"]) == {2}
    found = check([moved((99, 3), [0, 0], [0, 0])], End((99, 8), 1), End((99, 16), 1))
    assert set(found["word"]) == {1}
    found = check([moved((99, 8), [0, 0], [0, 0])], End((99, 16), 1), End((99, 9), 1))
    assert set(found["word"]) == {1}
    found = check([moved((99, 6), [0, 8], [2, 0])], End((99, 16), 1), End((101, 8), 1))
    assert set(found["word"]) == {2}


def test_an_odd_address_makes_small_words():
    found = [
        set(check([moved((64,), [0], [0])], End((64,), 1), End((64,), 1, before=n))["word"])
        for n in range(5)
    ]
    assert found == [{8}, {1}, {2}, {1}, {4}]


def test_fused_strided_and_uneven_layouts_of_a_tensor():
    shape = (12, 21)
    source = sharded(shape, 0, [0], blocks=[5, 7])
    for target in (
        sharded(shape, 1, [3, 1, 4], sizes=[8, 0, 13]),
        sharded(shape, 0, [4, 1], blocks=[5, 7]),
        (Piece(1, Box((3, 0), (9, 21)), (1, 0)), Piece(1, Box((9, 0), (10, 21)), (8, 0))),
    ):
        moves = [move for move in transfer_list(source, target) if move.destination == 1]
        for itemsize in (1, 2, 4, 8):
            check(moves, End(shape, itemsize), End((13, 21), itemsize, before=1))


def test_stacked_and_single_experts():
    experts, shape = replicated((4, 6, 5), [0]), (24, 5)
    one = (Piece(1, Box((2, 1, 0), (3, 6, 5)), (0, 2, 0)),)  # in a buffer of two dims
    moves = transfer_list(experts, one)
    check(moves, End((4, 6, 5), 2), End((1, 8, 5), 2, held=(8, 5)))
    rows = transfer_list(replicated(shape, [0]), replicated(shape, [1]))
    check(rows, End(shape, 2, held=(4, 6, 5)), End(shape, 2))
    check(rows, End(shape, 2), End(shape, 2, held=(2, 2, 6, 5)))


def test_a_buffer_with_gaps_cannot_be_seen_as_fewer_dims():
    gaps = End((4, 3, 5), 4, gaps=[0, 1, 0])
    with pytest.raises(ValueError, match=r"a buffer of \(4, 3, 5\) .* is not contiguous"):
        table_of(transfer_list(replicated((12, 5), [0]), replicated((12, 5), [1])), gaps, gaps)


def test_nothing_has_no_tiles():
    empty, one = End((0, 3), 4), End((3,), 4)
    assert len(table_of([], empty, empty)) == 0
    assert len(check([moved((0,), [1], [1])], one, one)) == 0
    assert transfer_list(replicated((0, 3), [0]), replicated((0, 3), [1])) == ()
    assert tiles.packed(table_of([], empty, empty)).tolist() == [0]


@FEW
@given(a_move(), st.sampled_from([1, 2, 4, 8]))
@example((moved((3, WIDE), [0, 0], [0, 0]), End((3, WIDE), 1), End((3, WIDE), 1)), 4)
def test_tiles_whose_dtype_changes_hold_the_same_elements_at_both_ends(drawn, itemsize):
    move, read, write = drawn
    shape = write.seen.shape
    write, size = End(shape, itemsize, before=1), read.memory.itemsize
    found = table_of([move], read, write, converted=frozenset([0]))
    assert (found["word"] == 0).all() and (tiles.nbytes(found) <= TILE).all()
    wanted = write.bytes.copy().view(write.seen.dtype)
    box = as_strided(wanted[1:], shape, write.seen.strides)
    box[slices(move.write)] = read.seen[slices(move.read)].astype(write.seen.dtype)
    for tile in found:
        assert tile["width"] % itemsize == 0
        width = tile["width"] // itemsize
        taken = read.rows(tile, "read", size, width)
        write.rows(tile, "write", itemsize, width)[:] = taken.astype(write.seen.dtype)
    assert np.array_equal(write.bytes, wanted.view(np.uint8))
    assert tiles.nbytes(found).sum() == whole(move.box.shape).num_elements * itemsize


def test_receivers_that_pass_on_read_the_model_that_is_written():
    place, there = TileBuffer(1, 0, "x"), TileBuffer(1, 1, "y")
    memory = {place: Memory((4,), (1,), 4), there: Memory((4,), (1,), 4)}
    move = moved((4,), [0], [0])._replace(taken="x", put="y")
    (tile,) = tiles.tiles([(0, move)], memory, {place: 1, there: 2}, ["a"], side=1)
    assert [int(tile[c]) for c in ("source", "destination", "read", "write")] == [0, 1, 1, 2]


sizes = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 1600)), max_size=60)


def table_of_sizes(rows):
    table = np.zeros(len(rows), tiles.COLUMNS)
    table["rows"], table["width"] = np.array(rows, np.int64).reshape(-1, 2).T
    return table


@FEW
@given(sizes)
def test_packed_tiles_are_aligned_and_do_not_overlap(rows):
    places = tiles.packed(table_of_sizes(rows)).tolist()
    assert len(places) == len(rows) + 1 and places[0] == 0
    for (count, width), (first, last) in zip(rows, pairwise(places), strict=True):
        assert first % 16 == 0 and 0 <= last - first - count * width < 16


@FEW
@given(sizes, st.integers(1, 90))
def test_parts_are_whole_tiles_and_equal_within_one(rows, count):
    table = table_of_sizes(rows)
    cut = tiles.parts(table, count)
    edges = [0, *(part.stop for part in cut)]
    assert len(cut) == count and edges[-1] == len(rows)
    assert [part.start for part in cut] == edges[:-1] and edges == sorted(edges)
    padded = np.diff(tiles.packed(table))
    fair, largest = padded.sum() / count, max(padded, default=0)
    for part in cut:
        assert abs(padded[part].sum() - fair) <= largest + 1e-6


MASK = 2**64 - 1
A, B = 0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F  # the golden ratio's of 2^64; xxHash's prime 2


def slow_weight(place):
    y = place * A & MASK
    m = (y ^ (y >> 32)) * B & MASK
    return m ^ (m >> 29) | 1


def slow_hash(words):
    """The module's formula, in integers that do not overflow; as a signed number."""
    total = sum(slow_weight(i) * (1 + (word ^ word >> 31)) for i, word in enumerate(words))
    return (total + 2**63) % 2**64 - 2**63


@st.composite
def some_words(draw, min_size=0):
    bits = draw(st.sampled_from([8, 16, 32, 64]))
    of = st.one_of(st.integers(0, 2**bits - 1), st.sampled_from([0, 1, 2**bits - 1]))
    return np.array(draw(st.lists(of, min_size=min_size, max_size=40)), f"u{bits // 8}")


@FEW
@given(some_words())
def test_the_hash_is_its_formula(words):
    assert tiles.hashes(words) == slow_hash(words.tolist())


@FEW
@given(some_words(min_size=2), st.data())
def test_a_changed_word_and_two_that_changed_places_show(words, data):
    places = st.integers(0, len(words) - 1)
    first, second = data.draw(places), data.draw(places)
    changed, swapped = words.copy(), words.copy()
    changed[first] ^= words.dtype.type(1 << data.draw(st.integers(0, words.itemsize * 8 - 1)))
    assert tiles.hashes(changed) != tiles.hashes(words)
    swapped[[first, second]] = words[[second, first]]
    assert (tiles.hashes(swapped) == tiles.hashes(words)) == (words[first] == words[second])


def test_every_flipped_bit_and_every_swap_in_a_full_tile_show():
    words = np.random.default_rng(0).integers(0, 2**64, TILE // 8, np.uint64)
    right = tiles.hashes(words)
    for bit in range(64):
        wrong = words.copy()
        wrong[bit * 127] ^= np.uint64(1 << bit)
        assert tiles.hashes(wrong) != right
    for shift in (1, 2, 256, 4096):
        for first in range(0, len(words) - shift, 509):
            wrong = words.copy()
            wrong[[first, first + shift]] = words[[first + shift, first]]
            assert tiles.hashes(wrong) != right
    assert tiles.hashes(np.roll(words, 1)) != right and tiles.hashes(words[::-1]) != right


def test_many_tiles_at_once_have_the_hash_of_each():
    words = np.random.default_rng(1).integers(0, 2**64, (3, 2, 40), np.uint64)
    each = [[tiles.hashes(row) for row in rows] for rows in words]
    assert np.array_equal(tiles.hashes(words), each)


def test_no_two_weights_of_a_tile_are_equal_or_opposite_below_bit_31():
    """Hence the same bit flipped in any two words shows: it changes one below bit 31."""
    count, low = TILE // 8, 2**31
    assert len({min(w % low, -w % low) for w in map(slow_weight, range(count))}) == count


@pytest.mark.parametrize("bits", [[63], [31, 63], [15, 31, 47, 63], range(7, 64, 8), [62], [0, 32]])
def test_the_same_bits_of_many_words_flipped_show(bits):
    """As signs of numbers of 8, 4, 2 and 1 bytes: of a tile, of a half, of every other word."""
    words = np.random.default_rng(2).integers(0, 2**64, TILE // 8, np.uint64)
    flip = np.uint64(sum(1 << bit for bit in bits))
    for some in (slice(None), slice(TILE // 16), slice(None, None, 2), slice(0, 4), slice(1, 4097)):
        wrong = words.copy()
        wrong[some] ^= flip
        assert tiles.hashes(wrong) != tiles.hashes(words)


@pytest.mark.parametrize("bit", [0, 31, 47, 61, 62, 63])
def test_the_same_bit_of_two_words_flipped_shows(bit):
    random = np.random.default_rng(bit)
    flip = np.uint64(1 << bit)
    for _ in range(300):
        words = random.integers(0, 2**64, 64, np.uint64)
        places = random.choice(64, 2, replace=False)
        wrong = words.copy()
        wrong[places] ^= flip
        assert tiles.hashes(wrong) != tiles.hashes(words)


def test_opposite_steps_of_two_words_show():
    random = np.random.default_rng(9)
    for step in (1, 1 << 16, 1 << 32, 1 << 48, 1 << 63):
        for _ in range(200):
            words = random.integers(0, 2**64, 64, np.uint64)
            first, second = random.choice(64, 2, replace=False)
            wrong = words.copy()
            wrong[first] = (int(words[first]) + step) % 2**64
            wrong[second] = (int(words[second]) - step) % 2**64
            assert tiles.hashes(wrong) != tiles.hashes(words)


def test_zeros_of_other_lengths_differ():
    found = {tiles.hashes(np.zeros(n, np.uint64)) for n in range(1, 101)}
    assert len(found) == 100
