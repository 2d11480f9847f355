"""How long tests wait: seconds of a machine with a core for each process, times the turns taken."""

import math

from meshwise.patience import turns


def paced(seconds: float) -> float:
    """A deadline in whole seconds: ``seconds`` where nothing else runs, more beside other work."""
    return float(math.ceil(seconds * turns()))
