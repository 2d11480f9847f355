"""Fit prices to samples, each with the error it makes on points left out of its fit."""

from meshwise.fit.calibrate import calibrate

__all__ = ["calibrate"]
