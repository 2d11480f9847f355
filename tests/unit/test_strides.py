"""Copies between strided views as boxes, against the elements one by one."""

import random

import numpy as np
import pytest

from meshwise.bridges.strides import Strided, contiguous, pairs, through


def drawn_view(draw, array):
    """A random view of an array's dims, by what loaders do: narrow, select, step, transpose,
    flatten neighbouring dims."""
    view = array
    for _ in range(draw.randint(0, 5)):
        if view.ndim == 0:
            break
        dim = draw.randrange(view.ndim)
        index = [slice(None)] * view.ndim
        what = draw.choice(("narrow", "select", "step", "turn", "flatten"))
        if what == "narrow" and view.shape[dim]:
            low = draw.randrange(view.shape[dim])
            index[dim] = slice(low, draw.randint(low + 1, view.shape[dim]))
            view = view[(*index, ...)]
        elif what == "select":
            index[dim] = draw.randrange(view.shape[dim])
            view = view[(*index, ...)]
        elif what == "step":
            index[dim] = slice(None, None, 2)
            view = view[(*index, ...)]
        elif what == "turn":
            view = view.swapaxes(dim, draw.randrange(view.ndim))
        elif what == "flatten" and view.flags.c_contiguous and view.ndim > 1:
            view = view.reshape(-1, *view.shape[2:])
    return view


def as_view(view, array):
    offset = (view.__array_interface__["data"][0] - array.__array_interface__["data"][0]) // 8
    return Strided(offset, view.shape, tuple(stride // 8 for stride in view.strides))


def test_boxes_pair_the_elements_that_a_copy_does():
    draw, copies = random.Random(3), 0
    while copies < 400:
        shapes = [tuple(draw.randint(1, 4) for _ in range(draw.randint(1, 3))) for _ in range(2)]
        to, of = (np.arange(int(np.prod(s)), dtype=np.int64).reshape(s) for s in shapes)
        first, second = drawn_view(draw, to), drawn_view(draw, of)
        if first.size != second.size:
            continue
        second = second.reshape(first.shape)
        if not np.shares_memory(second, of):
            continue
        copies += 1
        expected = sorted(zip(first.ravel().tolist(), second.ravel().tolist(), strict=True))
        found = []
        wholes = contiguous(to.shape), contiguous(of.shape)
        views = as_view(first, to), wholes[0], as_view(second, of), wholes[1]
        for local, box in pairs(*views):
            ends = [
                part[tuple(slice(a, a + n) for a, n in zip(p.low, p.sizes, strict=True))].transpose(
                    *p.dims, *[d for d in range(part.ndim) if d not in p.dims]
                )
                for part, p in ((to, local), (of, box))
            ]
            found += zip(ends[0].ravel().tolist(), ends[1].ravel().tolist(), strict=True)
        assert sorted(found) == expected


def test_a_copy_is_followed_through_a_buffer_that_two_copies_filled():
    """q over k in a buffer, whose last rows go on, transposed."""
    q, k = contiguous((4, 3)), contiguous((2, 3))
    buffer = contiguous((6, 3))
    into_q = buffer.narrowed((0, 0), (4, 3)), q
    into_k = buffer.narrowed((4, 0), (2, 3)), k
    rows = buffer.narrowed((3, 0), (3, 3))
    turned = Strided(rows.offset, (3, 3), rows.strides[::-1])
    to = contiguous((3, 3))
    ((to_q, of_q),) = through((to, turned), buffer, into_q)
    assert (to_q, of_q) == (
        Strided(0, (3, 1), (3, 1)),
        Strided(9, (3, 1), (1, 3)),
    )
    ((to_k, of_k),) = through((to, turned), buffer, into_k)
    assert (to_k, of_k) == (Strided(1, (3, 2), (3, 1)), Strided(0, (3, 2), (1, 3)))


def test_what_boxes_cannot_say_is_refused():
    whole = contiguous((1 << 18,))
    half = Strided(0, (1 << 17,), (2,))
    with pytest.raises(ValueError, match="more than 65536 pieces"):
        list(pairs(half, whole, contiguous((1 << 17,)), contiguous((1 << 17,))))
    with pytest.raises(ValueError, match="outside"):
        list(pairs(Strided(9, (2,), (1,)), contiguous((4,)), contiguous((2,)), contiguous((2,))))
