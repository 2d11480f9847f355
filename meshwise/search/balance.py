"""Deal layers to pipeline stages so that the slowest stage is as fast as possible.

Every microbatch passes every stage, so the slowest stage sets the pace. A stage's time is that of
its layers, plus the embedding in the first and the head in the last stage. At pace T each stage can
take a certain number of layers. To find the least T that places all layers, raise T to the next
load that adds one more layer to some stage. Ties go to equal counts. Leftover layers go to late
stages, which hold fewer microbatches.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, pairwise

from meshwise.prices import Prices
from meshwise.search.layer import cut_of, end_work, layer_work
from meshwise.search.space import equal_counts
from meshwise.spec import AnyModel, Layout, layer_kinds
from meshwise.spec.layout import Recompute

_SAME = 1 + 1e-9  # loads that differ by less are equal: rounded sums of the same layers


def counts(model: AnyModel, seq_len: int, layout: Layout, prices: Prices) -> tuple[int, ...]:
    """Return the layer count of each stage of ``layout`` that makes the slowest stage fastest."""
    # as many recomputed layers in every stage add the same time to each
    word = "none" if layout.recompute_layers else layout.recompute
    return _counts(model, seq_len, cut_of(layout), layout.num_stages, word, prices)


@lru_cache(maxsize=65536)
def _counts(
    model: AnyModel, seq_len: int, cut: Layout, num_stages: int, word: Recompute, prices: Prices
) -> tuple[int, ...]:
    kinds, about = layer_kinds(model, seq_len), (model, seq_len, cut, prices)
    of_kind = {kind: layer_work(*about, (kind, word)).both_s for kind in set(kinds)}
    first_s = end_work(*about, kinds[0], first=True).both_s
    last_s = end_work(*about, kinds[-1], last=True).both_s
    return balanced([of_kind[kind] for kind in kinds], num_stages, first_s, last_s)


def balanced(
    layers_s: Sequence[float], num_stages: int, first_s: float, last_s: float
) -> tuple[int, ...]:
    """Return counts of consecutive layers, at least one per stage, that minimise the slowest
    stage's time. ``first_s`` and ``last_s`` are added to the first and the last stage. Equal counts
    are returned if they are no slower."""
    ends = [0.0, *accumulate(layers_s)]
    ends = [0.0, *[end + first_s for end in ends[1:-1]], ends[-1] + first_s + last_s]
    pace_s = max(ends[-1] / num_stages, *[stop - start for start, stop in pairwise(ends)])
    while (reach := _reach(ends, num_stages, pace_s * _SAME))[-1] < len(layers_s):
        pace_s = min(
            ends[stop + 1] - ends[start] for start, stop in pairwise(reach) if stop < len(layers_s)
        )
    equal = [0, *accumulate(equal_counts(len(layers_s), num_stages))]
    if max(ends[stop] - ends[start] for start, stop in pairwise(equal)) <= pace_s * _SAME:
        return equal_counts(len(layers_s), num_stages)
    stops = [len(layers_s)]
    for stage in range(num_stages - 1, 0, -1):
        stop = stops[-1]
        least = bisect_left(ends, ends[stop] - pace_s * _SAME)
        wanted = stop - -(-stop // (stage + 1))
        stops.append(min(max(wanted, least, stage), reach[stage]))
    return tuple(stop - start for start, stop in pairwise([0, *reversed(stops)]))


def _reach(ends: Sequence[float], num_stages: int, pace_s: float) -> list[int]:
    """Return how many layers the first 0, 1, ... stages can take with none slower than ``pace_s``.
    Each stage leaves one layer for every stage after it."""
    reach = [0]
    for behind in range(num_stages - 1, -1, -1):
        most = bisect_right(ends, ends[reach[-1]] + pace_s) - 1
        reach.append(min(most, len(ends) - 1 - behind))
    return reach
