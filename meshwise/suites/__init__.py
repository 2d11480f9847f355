"""The suites of Alpa's benchmark (OSDI'22; github.com/alpa-projects/alpa, benchmark/alpa), as data.

In: a suite's name and a number of GPUs. Out: its cases, which ``source`` reads from their file.

``layouts`` turns a case into our records, ``scale`` shrinks it to a smaller machine, ``formulas``
counts its FLOPs, ``tsv`` writes its result.
"""

import difflib
from typing import NamedTuple

from meshwise.suites import source
from meshwise.suites.case import BenchmarkCase, Suite


class Sweep(NamedTuple):
    """A suite over all of ``shapes`` (run_exp.py), with the flags of ``run --suite``."""

    name: str
    suite: str
    niter: int = 3
    profile_driver_time: bool = False
    profile_stage_execution_time: bool = False


def names() -> tuple[str, ...]:
    """Return the names of all 20 suites. ``cases`` refuses the two of UNet, which are not built."""
    return tuple(source.data()["names"])


def shapes() -> list[tuple[int, int]]:
    """List the (hosts, devices of a host) that a sweep runs its suite on, in order."""
    return [(hosts, devices) for hosts, devices in source.data()["shapes"]]


def kind(suite: str) -> str:
    """Return the kind of a suite: gpt, moe, wresnet, gpt_inference, moe_inference or
    gpt_no_embedding_inference (only the layers)."""
    return suite.partition(".")[0]


def is_inference(suite: str) -> bool:
    """Whether a suite runs the forward pass only."""
    return kind(suite).endswith("_inference")


def warmup_steps(niter: int) -> int:
    """Return how many of ``niter`` iterations are warm-up and do not count."""
    return 2 if niter >= 5 else 1


def cases(suite: str, num_devices: int) -> tuple[BenchmarkCase, ...]:
    """Return the cases of a suite for ``num_devices`` GPUs.

    Raise ValueError for an unknown suite, one of UNet, or a number of GPUs without a case."""
    found = _suite(suite)
    if num_devices not in found:
        having = ", ".join(map(str, found))
        fix = f"it has cases for {having}" if found else "it is empty; run perf_test_auto instead"
        raise ValueError(f"suite {suite} has no case for {num_devices} GPUs; {fix}")
    return found[num_devices]


def device_counts(suite: str) -> tuple[int, ...]:
    """Return the numbers of GPUs that a suite has cases for, ascending."""
    return tuple(_suite(suite))


def missing(suite: str) -> str:
    """Say in a few words why none of a suite's cases can run; "" if some can."""
    if kind(suite) == "unet":
        return "not built: UNet"
    return "" if any(_suite(suite).values()) else "empty in the source"


def _suite(name: str) -> Suite:
    if name not in names():
        near = difflib.get_close_matches(name, names(), n=1)
        hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(names())}"
        raise ValueError(f"suite {name!r} is not known; {hint}")
    if kind(name) == "unet":
        raise ValueError(f"suite {name}: UNet is not built; run a suite of gpt, moe or wresnet")
    return source.suites()[name]


def sweeps() -> tuple[Sweep, ...]:
    """Return the sweeps of run_exp.py."""
    return tuple(Sweep(**told) for told in source.data()["sweeps"])
