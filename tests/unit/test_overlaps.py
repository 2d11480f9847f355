"""Tensors that share memory, against the addresses of all their elements."""

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from meshwise.reshard.overlaps import Extent, is_folded, shared

SIZES = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 9)), max_size=3)


def places(extent):
    """The bytes of each element."""
    for index in product(*map(range, extent.shape)):
        at = sum(i * step for i, step in zip(index, extent.stride, strict=True))
        begin = extent.address + at * extent.itemsize
        yield range(begin, begin + extent.itemsize)


def one(address, dims, itemsize, name=""):
    return Extent(
        4096 + address, tuple(n for n, _ in dims), tuple(s for _, s in dims), itemsize, (0, name)
    )


@given(SIZES)
def test_no_tensor_with_two_elements_at_one_place_passes(dims):
    extent = one(0, dims, 1)
    firsts = [place[0] for place in places(extent)]
    if len(set(firsts)) < len(firsts):
        assert is_folded(extent.shape, extent.stride)


def test_usual_tensors_are_not_folded():
    for shape, stride in [
        ((), ()), ((1, 1), (0, 0)), ((3, 4), (4, 1)), ((4, 3), (1, 4)), ((2, 3), (100, 2)),
        ((0, 5), (0, 0)), ((2, 1, 5), (5, 0, 1)),
    ]:  # fmt: skip
        assert not is_folded(shape, stride)
    for shape, stride in [((2, 3), (0, 1)), ((3, 3), (1, 1)), ((4, 2), (1, 2))]:
        assert is_folded(shape, stride)


@given(st.lists(st.tuples(st.integers(0, 40), SIZES, st.sampled_from([1, 2, 4])), max_size=5))
def test_pairs_that_share_are_those_with_a_byte_in_common(drawn):
    extents = [one(address, dims, size, str(i)) for i, (address, dims, size) in enumerate(drawn)]
    extents = [extent for extent in extents if not is_folded(extent.shape, extent.stride)]
    held = {extent.name: {byte for place in places(extent) for byte in place} for extent in extents}
    wanted = {
        frozenset([a.name, b.name])
        for i, a in enumerate(extents)
        for b in extents[:i]
        if held[a.name] & held[b.name]
    }
    assert {frozenset([a.name, b.name]) for a, b in shared(extents)} == wanted


def test_columns_of_a_matrix_share_nothing_and_many_are_found_in_time():
    rows, columns = 4096, 512
    matrix = [one(2 * column, [(rows, columns)], 2, str(column)) for column in range(columns)]
    assert not list(shared(matrix))
    across = one(1022, [(columns, 1)], 2, "across")
    assert len(list(shared([*matrix, across]))) == columns
