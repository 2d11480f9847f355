"""A part of the correctness matrix, and what the whole of it combines."""

import itertools
import sys
from pathlib import Path

import msgspec
import pytest

sys.path.insert(0, str(Path(__file__).parent))
import matrix

pytestmark = pytest.mark.dist

EVERY = {1: 1, 2: 6, 3: 11, 4: 41, 8: 150}  # of so many cases of a world one is run here


def some(world):
    """Cases from all over the world's list, by family."""
    cases = [(name, each) for name in matrix.FAMILIES for each in matrix.layouts(name, world)]
    chosen = cases[:: EVERY[world]]
    for name, group in itertools.groupby(chosen, key=lambda case: case[0]):
        yield name, [layout for _, layout in group]


@pytest.mark.parametrize("world", [1, 2, 3, 4, pytest.param(8, marks=pytest.mark.whole)])
def test_a_part_of_the_matrix_equals_one_device(gloo_ranks, plan_of, world):
    check(gloo_ranks, plan_of, world, "eager")


def test_a_part_of_the_matrix_compiled_equals_one_device(gloo_ranks, plan_of):
    check(gloo_ranks, plan_of, 2, "compiled")


def check(gloo_ranks, plan_of, world, lowering):
    for name, layouts in some(world):
        if lowering == "compiled":
            layouts = [each for each in layouts if each.schedule not in matrix.SPLIT]
        model = matrix.FAMILIES[name]
        plan = plan_of(model, matrix.workload(world, model), layouts[0], lowering=lowering)
        reports = gloo_ranks(
            world,
            matrix.errors,
            name=name,
            plan=msgspec.json.encode(plan).decode(),
            layouts=msgspec.json.encode(layouts).decode(),
        )
        for layout, *of_ranks in zip(layouts, *reports, strict=True):
            for loss, gradient, where in of_ranks:
                assert loss <= matrix.LOSS, (name, layout.name)
                assert gradient <= matrix.GRADIENT, (name, layout.name, where)


def test_the_whole_matrix_combines_every_pair():
    """Pairs of axes and options that exclude each other, or that pipelines with unequal meshes have
    tests of their own for (test_pipeline.py), are left out."""
    pairs, words = set(), set()
    for world, name in itertools.product((2, 3, 4, 8), matrix.FAMILIES):
        for layout in matrix.layouts(name, world):
            found = matrix.features(layout)
            words |= found
            pairs |= set(itertools.combinations(sorted(found), 2))
    alone = [set(matrix.SCHEDULES), {"zero1", "zero2", "zero3"}, {"selective", "full"}]
    for pair in itertools.combinations(sorted(words), 2):
        excluded = "unequal meshes" in pair or any(set(pair) <= group for group in alone)
        assert pair in pairs or excluded, pair
    axes = {"dp", "cp", "tp", "pp", "ep", "hsdp", "sp", "accumulation"}
    assert words >= axes | set(matrix.SCHEDULES) | {"zero1", "zero2", "zero3", "selective", "full"}
