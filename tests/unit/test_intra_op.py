"""The intra-operator search against enumeration and the integer program in HiGHS.

Costs here are a step's seconds that nothing can hide, bytes, transient bytes, and of each window
the work and the messages.
"""

import itertools
import math
import random

import numpy as np
import pytest
from scipy import optimize, sparse

from meshwise.search.intra_op import CostGraph, solve


def any_instance(seed):
    """Up to six nodes of up to four placements, with edges and windows at random, some placements
    forbidden. A cost has work and messages in any window, or, as units do that are gathered ahead,
    work in one and messages in the one before."""
    chance = random.Random(seed)
    sizes = [chance.randint(1, 4) for _ in range(chance.randint(1, 6))]
    num_windows, is_ahead = chance.randint(0, 4), chance.random() < 0.5

    def cost(node):
        found = [
            math.inf if chance.random() < 0.03 else chance.randint(0, 6),
            chance.randint(0, 20),
            chance.choice([0, 0, 2, 5, 9]),
        ]
        for window in range(num_windows):
            does = [window == node, window == node - 1] if is_ahead else chance.choices([0, 1], k=2)
            found += [chance.randint(1, 20) * each for each in does]
        return found

    def costs(node, *sizes):
        each = [cost(node) for _ in range(math.prod(sizes))]
        return np.asarray(each, float).reshape(*sizes, -1)

    nodes = [costs(node, size) for node, size in enumerate(sizes)]
    pairs = [
        (i, j)
        for i, j in itertools.combinations(range(len(sizes)), 2)
        if chance.random() < (0.8 if j == i + 1 else 0.2)
    ]
    return nodes, {(i, j): costs(j, sizes[i], sizes[j]) for i, j in pairs}


def solved(nodes, edges):
    def table(costs):
        seconds, work, sent = costs[..., 0], costs[..., 3::2], costs[..., 4::2]
        return np.concatenate(
            [(seconds + work.sum(-1))[..., None], costs[..., 1:3], sent - work], axis=-1
        )

    return solve(CostGraph([*map(table, nodes)], {pair: table(of) for pair, of in edges.items()}))


def summed(nodes, edges, placements):
    """Return the seconds and bytes of placements [choice, node]."""
    each = [node[placements[:, at]] for at, node in enumerate(nodes)]
    each += [of[placements[:, i], placements[:, j]] for (i, j), of in edges.items()]
    total, most = np.sum(each, axis=0), np.max([of[:, 2] for of in each], axis=0)
    return total[:, 0] + np.maximum(total[:, 3::2], total[:, 4::2]).sum(1), total[:, 1] + most


def programmed(nodes, edges, limit):
    """Return the optimum of the integer program: one 0-1 variable for each placement of a node and
    for each pair of an edge, the largest transient, and the seconds of each window."""
    groups = [*nodes, *[of.reshape(-1, of.shape[-1]) for of in edges.values()]]
    starts, costs = np.cumsum([0, *map(len, groups)]), np.concatenate(groups)
    forbidden = np.isinf(costs[:, 0])
    once, size, transient, *windows = np.where(forbidden[:, None], 0.0, costs).T
    chosen, num_windows = len(costs), len(windows) // 2
    count = chosen + 1 + num_windows
    rows, least, most = [], [], []

    def constrain(low, high, *terms):
        row = np.zeros(count)
        for at, factor in terms:
            row[at] = factor
        rows.append(row), least.append(low), most.append(high)

    for start, stop in itertools.pairwise(starts):
        at = slice(start, stop)
        constrain(1, 1, (at, 1))
        constrain(-np.inf, 0, (at, transient[at]), (chosen, -1))
    for (i, j), start, stop in zip(
        edges, *[starts[len(nodes) + at :] for at in range(2)], strict=False
    ):
        pairs = np.arange(start, stop).reshape(len(nodes[i]), len(nodes[j]))
        for node, sides in ((i, pairs), (j, pairs.T)):
            for placement, beside in enumerate(sides):
                constrain(0, 0, (beside, 1), (starts[node] + placement, -1))
    for window, side in itertools.product(range(num_windows), range(2)):  # at least either side
        seconds = windows[2 * window + side]
        constrain(-np.inf, 0, (slice(chosen), seconds), (chosen + 1 + window, -1))
    constrain(-np.inf, limit, (slice(chosen), size), (chosen, 1))
    found = optimize.milp(
        [*once, 0.0, *[1.0] * num_windows],
        integrality=[*np.ones(chosen), *np.zeros(1 + num_windows)],
        bounds=optimize.Bounds(
            np.zeros(count), [*np.where(forbidden, 0.0, 1.0), *[np.inf] * (1 + num_windows)]
        ),
        constraints=optimize.LinearConstraint(sparse.csr_array(np.asarray(rows)), least, most),
        options={"mip_rel_gap": 0.0},
    )
    return found.fun if found.success else math.inf


def check(seed):
    """The fastest is found for every limit of bytes, and takes what it is said to."""
    nodes, edges = any_instance(seed)
    found = solved(nodes, edges)
    every = np.asarray([*itertools.product(*[range(len(node)) for node in nodes])])
    times, sizes = summed(nodes, edges, every)
    for limit in {0.0, *sizes[np.isfinite(times)]}:
        least_s = times[sizes <= limit].min(initial=math.inf)
        best_s = min([of.time_s for of in found if of.num_bytes <= limit], default=math.inf)
        assert best_s == least_s
    for of in found:
        time_s, size = summed(nodes, edges, np.asarray([of.placements]))
        assert (time_s[0], size[0]) == (of.time_s, of.num_bytes)
    limit = random.Random(seed).choice(sizes)
    least_s = times[sizes <= limit].min(initial=math.inf)
    assert programmed(nodes, edges, limit) == pytest.approx(least_s, rel=1e-9)
    return len(found)


@pytest.mark.parametrize(
    "seeds", [range(100), pytest.param(range(100, 1000), marks=pytest.mark.whole)], ids=str
)
def test_placements_are_the_best_of_all(seeds):
    assert sum(map(check, seeds)) > 2 * len(seeds)


@pytest.mark.parametrize("seed", range(3))
def test_layers_in_a_row_are_placed_as_highs_places_them(seed):
    """Six layers of two nodes whose costs are no whole numbers; each layer's work hides the gather
    of the next. For half of the bytes between the leanest and the fastest, and for others."""
    some, nodes, edges = np.random.default_rng(seed), [], {}
    for layer in range(6):
        for _ in range(2):
            costs = np.zeros((3, 15))
            costs[:, :3], costs[:, 3 + 2 * layer] = some.random((3, 3)), some.random(3)
            if layer:
                costs[:, 4 + 2 * (layer - 1)] = some.random(3)
            if nodes:
                edges[len(nodes) - 1, len(nodes)] = np.zeros((3, 3, 15))
                edges[len(nodes) - 1, len(nodes)][..., 3 + 2 * layer] = some.random((3, 3)) / 4
            nodes.append(costs)
    found = solved(nodes, edges)
    for share in (0.0, 0.2, 0.5, 1.0):
        limit = found[-1].num_bytes + share * (found[0].num_bytes - found[-1].num_bytes) + 1e-9
        best_s = min(of.time_s for of in found if of.num_bytes <= limit)
        assert best_s == pytest.approx(programmed(nodes, edges, limit), rel=1e-6)
    assert len(found) > 5


def test_a_window_hides_what_it_can():
    """Two units. The first takes 3 or 5 s and hides the gather of the second, which takes 2 s of
    messages and 4 of work, or 5 and 2.5."""
    first = np.asarray([[0.0, 0, 0, 3, 0], [0, 0, 0, 5, 0]])
    second = np.asarray([[4.0, 0, 0, 0, 2], [2.5, 0, 0, 0, 5]])
    (best,) = solved([first, second], {})
    assert (best.time_s, best.placements) == (3 + 4, (0, 0))
    second[1, 0] = 1.5
    (best,) = solved([first, second], {})
    assert (best.time_s, best.placements) == (5 + 1.5, (0, 1))


def test_of_placements_that_cost_the_same_the_first_are_taken():
    nodes = [np.asarray([[3.0, 1, 0, 1, 3], [1, 1, 0, 2, 4], [1, 1, 0, 2, 4]])] * 2
    (best,) = solved(nodes, {})
    assert best.placements == (1, 1)
