"""One phase of work on all ranks, ending on all of them in the same way.

In: each rank's own work. Out: its result on every rank or, when memory ran out on any of them,
``torch.OutOfMemoryError`` on every one, naming the rank, the phase and the case.
"""

import itertools
from collections.abc import Callable
from typing import TypeVar, cast

import torch

from meshwise.parallel import torch_private
from meshwise.parallel.mesh import Place
from meshwise.ranks import Ranks, plain
from meshwise.timing import is_out_of_memory

T = TypeVar("T")
_phases = itertools.count()  # every rank counts the same ones


def together(
    ranks: Ranks,
    place: Place,
    phase: str,
    work: Callable[[], T],
    *,
    compiling: bool = False,
) -> T:
    """This rank's result of ``work``, when all ranks and this one's device have done theirs.

    Ranks that wait in a collective for one that gave up time out there first and learn why here.
    ``compiling`` lets collectives wait as long as set-up may take: ranks compile at different
    speeds and meet in the first steps. Any error but a lack of memory is raised where it is.
    """
    assert ranks.store is not None
    key, result = f"out of memory/{next(_phases)}", None
    torch_private.set_timeout(place.groups, ranks.setup_s if compiling else ranks.timeout_s)
    try:
        result = work()
    except (RuntimeError, MemoryError, TimeoutError) as error:
        if is_out_of_memory(error):
            reason = str(error).splitlines()[0]
            ranks.store.set(key, f"rank {ranks.rank}, {phase}, {ranks.case}: {reason}")
        elif not ranks.store.check([key]):
            raise
    ranks.arrive(f"the end of {phase}")
    if ranks.store.check([key]):
        torch_private.abort(place.groups, ranks.device)
        raise torch.OutOfMemoryError(plain(ranks.store.get(key)))
    ranks.synchronize(phase)
    return cast(T, result)
