"""The intra-operator search against enumeration and the integer program in HiGHS."""

import itertools
import math
import random

import numpy as np
import pytest
from scipy import optimize, sparse

from meshwise.search.intra_op import GraphPiece, Question, solve


def any_instance(seed):
    """Up to six nodes of up to four placements in a chain of pieces, with edges at random, some
    placements forbidden, and a limit that binds or does not."""
    chance = random.Random(seed)

    def cost():
        return [
            math.inf if chance.random() < 0.03 else chance.randint(1, 20),
            chance.randint(0, 5),
            chance.randint(0, 9),
            chance.randint(0, 4),
            chance.choice([0, 0, 2, 5, 9]),
        ]

    def costs(*sizes):
        return np.asarray([cost() for _ in range(math.prod(sizes))], float).reshape(*sizes, 5)

    pieces, left, entry = [], 6, chance.randint(1, 4)
    while left:
        count = chance.randint(1, left)  # nodes beside the first
        times = chance.choice([1, 1, left // count])
        sizes = [entry, *[chance.randint(1, 4) for _ in range(count)]]
        sizes[-1] = entry if times > 1 else sizes[-1]
        pairs = list(itertools.pairwise(range(count + 1)))
        pairs += [p for p in itertools.combinations(range(count + 1), 2) if chance.random() < 0.2]
        edges = {pair: costs(*[sizes[node] for node in pair]) for pair in pairs}
        pieces.append(GraphPiece([costs(size) for size in sizes], edges, times))
        left, entry = left - count * times, sizes[-1]
        if chance.random() < 0.2:
            break
    flying = chance.choice([1, 2, 2.5, 4])
    limit = chance.choice([30.0, 60.0, 90.0, 120.0, 1e9])
    return pieces, Question(chance.randint(1, 8), flying, limit)


def unrolled(pieces):
    """Return all nodes and edges of a chain, repeated pieces one by one."""
    nodes, edges = [np.zeros((len(pieces[0].nodes[0]), 5))], []
    for piece in pieces:
        for _ in range(piece.times):
            start = len(nodes) - 1
            nodes += piece.nodes[1:]
            edges += [(start + i, start + j, of) for (i, j), of in piece.edges.items()]
    return nodes, edges


def enumerated(pieces, question):
    """Return the least seconds over all placements that fit."""
    nodes, edges = unrolled(pieces)
    every = np.asarray([*itertools.product(*[range(len(node)) for node in nodes])])
    each = [node[every[:, at]] for at, node in enumerate(nodes)]
    each += [of[every[:, i], every[:, j]] for i, j, of in edges]
    pace, once, resident, held, transient = np.moveaxis(np.asarray(each), -1, 0)
    seconds = question.num_microbatches * pace.sum(0) + once.sum(0)
    size = resident.sum(0) + question.in_flight * held.sum(0) + transient.max(0)
    return seconds[size <= question.limit_bytes].min(initial=math.inf)


def programmed(pieces, question):
    """Return the optimum of the integer program: one 0-1 variable for each placement of a node and
    for each pair of an edge, and the largest transient."""
    nodes, edges = unrolled(pieces)
    groups = [*nodes, *[of.reshape(-1, 5) for *_, of in edges]]
    starts = np.cumsum([0, *map(len, groups)])
    costs = np.concatenate(groups)
    count = len(costs) + 1  # the last variable is the largest transient
    forbidden = np.isinf(costs[:, 0])
    pace, once, resident, held, transient = np.where(forbidden[:, None], 0.0, costs).T
    rows, least, most = [], [], []

    def constrain(row, low, high):
        rows.append(row), least.append(low), most.append(high)

    for at in range(len(groups)):
        row = np.zeros(count)
        row[starts[at] : starts[at + 1]] = 1
        constrain(row, 1, 1)
        row = np.zeros(count)
        row[starts[at] : starts[at + 1]] = transient[starts[at] : starts[at + 1]]
        row[-1] = -1
        constrain(row, -np.inf, 0)
    for at, (i, j, of) in enumerate(edges, len(nodes)):
        pairs = np.arange(starts[at], starts[at + 1]).reshape(of.shape[:2])
        for node, sides in ((i, pairs), (j, pairs.T)):
            for placement, beside in enumerate(sides):
                row = np.zeros(count)
                row[beside], row[starts[node] + placement] = 1, -1
                constrain(row, 0, 0)
    constrain([*(resident + question.in_flight * held), 1.0], -np.inf, question.limit_bytes)
    found = optimize.milp(
        [*(question.num_microbatches * pace + once), 0.0],
        integrality=[*np.ones(count - 1), 0],
        bounds=optimize.Bounds(np.zeros(count), [*np.where(forbidden, 0.0, 1.0), np.inf]),
        constraints=optimize.LinearConstraint(sparse.csr_array(np.asarray(rows)), least, most),
        options={"mip_rel_gap": 0.0},
    )
    return found.fun if found.success else math.inf


def verify(pieces, question, placed):
    """The placements take the seconds and bytes that they are said to."""
    nodes, edges = unrolled(pieces)
    lies = [of[at] for of in placed.placements for at in sorted(of)]
    each, (first, *_) = [node[at] for node, at in zip(nodes[1:], lies, strict=True)], nodes
    for entry in range(len(first)):
        at = [entry, *lies]
        pace, once, resident, held, transient = np.asarray(
            [*each, *[of[at[i], at[j]] for i, j, of in edges]]
        ).T
        seconds = question.num_microbatches * pace.sum() + once.sum()
        size = resident.sum() + question.in_flight * held.sum() + transient.max()
        if seconds == pytest.approx(placed.time_s) and size <= placed.num_bytes + 1e-9:
            assert placed.num_bytes <= question.limit_bytes
            return
    raise AssertionError(placed)


def check(seed):
    pieces, question = any_instance(seed)
    least_s = enumerated(pieces, question)
    assert programmed(pieces, question) == pytest.approx(least_s, rel=1e-9)
    placed = solve(pieces, question)
    if placed is None:
        assert math.isinf(least_s)
        return False
    assert placed.time_s == pytest.approx(least_s, rel=1e-12)
    verify(pieces, question, placed)
    assert solve(pieces, question, least_s) is None
    again = solve(pieces, question, least_s * (1 + 1e-9))
    assert again is not None and again.time_s == placed.time_s
    return True


@pytest.mark.parametrize(
    "seeds", [range(100), pytest.param(range(100, 1000), marks=pytest.mark.whole)], ids=str
)
def test_placements_are_the_best_of_all(seeds):
    assert sum(map(check, seeds)) > len(seeds) / 3


@pytest.mark.parametrize("seed", range(3))
def test_equal_layers_in_a_row_are_placed_as_highs_places_them(seed):
    """Six layers of five nodes whose costs are no whole numbers, with too little memory for the
    fastest: too many placements to enumerate."""
    random = np.random.default_rng(seed)
    nodes = [random.random((size, 5)) for size in (3, 4, 4, 4, 3)]
    pairs = [*itertools.pairwise(range(5)), (0, 4)]
    edges = {(i, j): random.random((len(nodes[i]), len(nodes[j]), 5)) / 4 for i, j in pairs}
    pieces, question = [GraphPiece(nodes, edges, 6)], Question(4, 2, 1e9)
    fastest = solve(pieces, question)
    question = question._replace(limit_bytes=0.8 * fastest.num_bytes)
    placed = solve(pieces, question)
    assert fastest.time_s < placed.time_s
    assert placed.time_s == pytest.approx(programmed(pieces, question), rel=1e-6)
    verify(pieces, question, placed)
