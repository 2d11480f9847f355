"""Fit prices to samples. Each price comes with its error on points left out of its fit."""

from meshwise.fit.calibrate import calibrate
from meshwise.fit.doubts import doubts

__all__ = ["calibrate", "doubts"]
