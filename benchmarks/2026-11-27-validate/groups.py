"""Price groups of 4 ranks from groups of 2, and the other way round: python groups.py, no device.

Each stored profile of 4 H200 is fitted without the collectives of one group size; these are then
priced, and compared with what was measured. "alone": by the data sheet alone.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

import meshwise
from meshwise.fit import calibrate
from meshwise.fit.calibrate import expected_s
from meshwise.prices import Prices
from meshwise.prices.key import how
from meshwise.spec import Collective, Sample

HERE = Path(__file__).parent.parent
FOLDERS = (
    "2026-11-27-four/plans-gpt-2.6b", "2026-11-21-gpt-2.6b-4xh200", "2026-11-21-operators-4xh200",
)  # fmt: skip


def among(samples: list[Sample], size: int) -> list[Sample]:
    return [
        one for one in samples
        if isinstance(one.case.op, Collective) and one.case.op.group_size == size
    ]  # fmt: skip


def errors(prices: Prices, samples: list[Sample]) -> Iterator[tuple[bool, float, bool]]:
    """Yield whether a message has 64 MiB or more, its error, and whether the interval holds it."""
    for sample in samples:
        op = sample.case.op
        if sample.status == "ok" and op.bytes:
            found, time_s = prices.estimate(op, how(sample.case)), expected_s(sample)
            within = time_s / (1 + found.error) <= found.time_s <= time_s * (1 + found.error)
            yield op.size_bytes >= 2**26, abs(found.time_s / time_s - 1), within


for folder in FOLDERS:
    for path in sorted((HERE / folder / "runs").glob("*-measure-profile-*")):
        run = meshwise.show(path)
        operations = [one for one in run.samples if type(one.case.op).__name__ != "Block"]
        for known, wanted in ((2, 4), (4, 2)):
            left_out = among(operations, wanted)
            costs = calibrate([(run.info, [one for one in operations if one not in left_out])])
            for way in ("with the least time", "alone"):
                prices = Prices(costs, datasheet=True)
                if way == "alone":
                    prices._of_other_ranks = lambda mine: None
                large, error, within = np.asarray([*errors(prices, left_out)]).T
                is_large = large.astype(bool)
                small = f"{error[~is_large].mean():6.1%} of {(~is_large).sum()} below 64 MiB"
                above = f"{error[is_large].mean():6.1%} of {is_large.sum()} above"
                print(f"{path.name[:15]} {wanted} from {known} {way:19} {small}, {above}; ", end="")
                print(f"{within.mean():.0%} inside")
