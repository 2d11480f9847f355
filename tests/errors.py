"""How far what was found is from what is due."""

import numpy as np


def largest(errors):
    """Of numbers; NaN if any is, which Python's max() may pass over."""
    return float(np.max(list(errors)))


def loss_error(losses, due):
    """The largest of |loss / due - 1|."""
    return largest(abs(a / b - 1) for a, b in zip(losses, due, strict=True))
