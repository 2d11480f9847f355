"""Say what a step takes in the median and in one of 20, where batches or experts' loads differ.

Lengths: each microbatch of a data rank is padded to its longest sequence. Steps are predicted for
each eighth of the plan's length, with straight lines between, and a microbatch takes its part of
the step of its length; below an eighth, that of an eighth. Of drawn steps, each waits for the data
rank whose microbatches take longest together. The draws have a fixed seed.

Experts: the median load is the mean one; p95 is ``Experts.load``'s.
"""

from collections.abc import Sequence

import numpy as np
from msgspec.structs import replace

from meshwise.prices import Prices
from meshwise.search.predict import predict
from meshwise.search.space import check
from meshwise.spec import Plan, Varying, WideResNet

_EIGHTHS, _STEPS = 8, 1000


def by_length(plan: Plan, prices: Prices, lengths: Sequence[int]) -> Varying:
    """Return the quantiles of a step whose sequences have lengths drawn from ``lengths`` [tokens],
    none longer than the plan's. A ValueError says which eighth cannot be priced."""
    most, layout = plan.workload.seq_len, plan.layout
    points, seconds = [most * part // _EIGHTHS for part in range(1, _EIGHTHS + 1)], list[float]()
    for point in points:
        size = replace(plan.workload, seq_len=point)
        try:
            check(plan.model, size, layout)
            seconds.append(predict(plan.model, size, layout, prices).usual_s)
        except ValueError as error:
            raise ValueError(f"seq_lens: no step of {point} tokens: {error}") from None
    ranks = max((dp for dp, _ in layout.meshes), default=layout.dp)
    shape = ranks, layout.num_microbatches, layout.microbatch_rows // ranks
    rng, given, found = np.random.default_rng(0), np.asarray(lengths), list[float]()
    for _ in range(_STEPS):
        longest = rng.choice(given, shape).max(axis=2)
        found.append(float(np.interp(longest, points, seconds).mean(axis=1).max()))
    p50_s, p95_s = np.quantile(found, (0.5, 0.95)).tolist()
    return Varying(what="lengths of sequences, padded", p50_s=p50_s, p95_s=p95_s)


def by_load(plan: Plan, prices: Prices) -> Varying:
    """Return the step with the mean load of experts, and with the 95th percentile."""
    assert not isinstance(plan.model, WideResNet) and plan.model.experts is not None
    p50_s, p95_s = (
        predict(
            replace(plan.model, experts=replace(plan.model.experts, load=load)),
            plan.workload,
            plan.layout,
            prices,
        ).usual_s
        for load in ("mean", "p95")
    )
    return Varying(what="load of the busiest rank's experts", p50_s=p50_s, p95_s=p95_s)
