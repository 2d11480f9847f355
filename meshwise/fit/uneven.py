"""Uneven all-to-alls predicted from even ones, beside what was measured.

Prices are fitted to all samples but the uneven exchanges, so that none of these is a knot of the
curve that predicts it. Each rule of ``prices.uneven`` gives each exchange a size, and the curve
gives that size a time. ml_perf_model's comm_bench.ipynb does so with one law (``sigmoid``) and
compares with the mean of the ranks' times; here it is the slowest rank's, if the log has each.
"""

from typing import NamedTuple

import numpy as np

from meshwise.fit.calibrate import calibrate, expected_s
from meshwise.prices import Prices, op_key
from meshwise.prices.key import how
from meshwise.prices.laws import Floats
from meshwise.prices.uneven import RULES, as_even, even_bytes, is_uneven
from meshwise.spec import Collective, Costs, Curve, RunInfo, Sample
from meshwise.spec.costs import LawName, SizeRule
from meshwise.stats import gmae


class Judged(NamedTuple):
    """The uneven exchanges of one category (``name``), predicted by one rule: sizes in bytes and
    seconds, an element for each exchange. ``curve``: the even ones, which predict them."""

    name: str
    rule: SizeRule
    size_bytes: Floats
    measured_s: Floats
    predicted_s: Floats
    curve: Curve

    @property
    def errors(self) -> Floats:
        """|predicted/measured - 1| of each exchange."""
        return np.abs(self.predicted_s / self.measured_s - 1)

    @property
    def gmae(self) -> float:
        return gmae(self.errors)

    @property
    def mean(self) -> float:
        return float(self.errors.mean())

    @property
    def std(self) -> float:
        """Their standard deviation, of n - 1; 0 of a single exchange."""
        return float(self.errors.std(ddof=1)) if len(self.errors) > 1 else 0.0


def judge(
    runs: list[tuple[RunInfo, list[Sample]]], law: LawName | None = None
) -> tuple[Costs, list[Judged]]:
    """Return the prices of all but the uneven exchanges of ``runs``, of one cluster, and how well
    each rule predicts these: a ``Judged`` for each category and each of ``RULES``. ``law``: see
    ``calibrate``. A ValueError says if there is nothing to predict them from."""
    even = [(info, [one for one in samples if not _uneven(one)]) for info, samples in runs]
    costs, groups = calibrate(even, law), dict[str, list[Sample]]()
    for sample in (one for _, samples in runs for one in samples if _uneven(one)):
        if sample.status == "ok":
            key = op_key(sample.case.op, how(sample.case), costs.cluster)  # type: ignore[arg-type]
            groups.setdefault(key.name, []).append(sample)
    prices = Prices(costs, datasheet=True)
    return costs, [
        _judged(name, rule, samples, prices) for name, samples in groups.items() for rule in RULES
    ]


def _uneven(sample: Sample) -> bool:
    return isinstance(sample.case.op, Collective) and is_uneven(sample.case.op)


def _judged(name: str, rule: SizeRule, samples: list[Sample], prices: Prices) -> Judged:
    ops: list[Collective] = [sample.case.op for sample in samples]  # type: ignore[misc]
    run = how(samples[0].case)
    curve = prices.fitted(ops[0], run)
    if not isinstance(curve, Curve):
        raise ValueError(
            f"{name}: these runs have {len(ops)} uneven exchanges and no even ones to predict them "
            "from; add a run of these (measure collectives all_to_all), or its log"
        )
    return Judged(
        name=name,
        rule=rule,
        size_bytes=np.asarray([even_bytes(op, rule) for op in ops], float),
        measured_s=np.asarray([*map(expected_s, samples)]),
        predicted_s=np.asarray([prices.estimate(as_even(op, rule), run).time_s for op in ops]),
        curve=curve,
    )
