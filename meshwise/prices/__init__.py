"""Prices of operations: their ``key``, measured prices, and data sheets as a fallback.

In: an operation. Out: its time, with an interval and the tier of its source.
"""

from meshwise.prices.datasheet import Datasheet, on_hosts, unmeasured
from meshwise.prices.evaluate import TOO_NOISY, Estimate, roofline_s, shape_op, times_of
from meshwise.prices.key import in_step, name_of, op_key
from meshwise.prices.measured import MEASURE, Prices

__all__ = [
    "MEASURE",
    "TOO_NOISY",
    "Datasheet",
    "Estimate",
    "Prices",
    "in_step",
    "name_of",
    "on_hosts",
    "op_key",
    "roofline_s",
    "shape_op",
    "times_of",
    "unmeasured",
]
