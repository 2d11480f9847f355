"""What an operation costs: measured prices (``measured``), below them data sheets (``datasheet``).

An operation in, its time with an interval and the tier it comes from out.
"""

from meshwise.prices.datasheet import Datasheet, on_hosts, unmeasured
from meshwise.prices.measured import (
    MEASURE,
    Estimate,
    Prices,
    attention_dims,
    curve_key,
    factor_key,
    gemm_dims,
    interpolate_loglog,
    interpolate_utilisation,
    roofline_s,
    shape_op,
    surface_key,
)

__all__ = [
    "MEASURE",
    "Datasheet",
    "Estimate",
    "Prices",
    "attention_dims",
    "curve_key",
    "factor_key",
    "gemm_dims",
    "interpolate_loglog",
    "interpolate_utilisation",
    "on_hosts",
    "roofline_s",
    "shape_op",
    "surface_key",
    "unmeasured",
]
