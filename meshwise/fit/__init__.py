"""Fit prices to samples. Each price comes with its error on points left out of its fit."""

from meshwise.fit.calibrate import calibrate
from meshwise.fit.clusters import unlike
from meshwise.fit.doubts import doubts, falling
from meshwise.fit.sheet import off_sheet
from meshwise.fit.slowdowns import ended_first
from meshwise.fit.transfer import completed, transfer

__all__ = [
    "calibrate",
    "completed",
    "doubts",
    "ended_first",
    "falling",
    "off_sheet",
    "transfer",
    "unlike",
]
