"""Run a whole program on paper as one action; ``search.simulate`` does it action by action."""

import numpy as np

from meshwise.models import Program
from meshwise.search.simulate import memory, moments


def peak_bytes(program: Program) -> float:
    """The largest sum of bytes that live at one moment."""
    sizes = np.asarray([buffer.num_bytes for buffer in program.buffers.values()], float)
    times = [loop.times for loop in program.loops]
    (whole,) = memory(moments(program, [(0, len(program.tasks))]), sizes, times)
    return sum(program.resident_bytes.values()) + sum(whole.rise.values())
