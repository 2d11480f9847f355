"""Time the page of many samples: ``PYTHONPATH=. python tools/page_of_many.py 10000``.

The samples are made up: products, attention, collectives by kind, group, mode and size, sends
between pairs, and memory-bound work, as a long `measure` leaves them. Prints bytes and CPU seconds.
"""

import sys
import time
from itertools import product

from meshwise.pages import html
from meshwise.pages.verdict import Contents
from meshwise.spec import Case, Cluster, Collective, Device, Gemm, RunInfo, Sample, Tier
from meshwise.spec.op import CollectiveKind

RANKS = 8
CLUSTER = Cluster(
    name="made-up", num_hosts=1, num_devices_per_host=RANKS,
    device=Device(name="Accelerator X", kind="cuda", memory_bytes=80 * 2**30),
    tiers=(Tier(name="nvlink", num_devices=RANKS, bytes_per_s=4.5e11),),
)  # fmt: skip
KINDS: tuple[CollectiveKind, ...] = (
    "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"
)  # fmt: skip


def ops(count: int) -> list[tuple[Gemm | Collective, str]]:
    """Return ``count`` operations with their regimes: half products, the rest collectives."""
    sizes = [256 * step for step in range(1, 33)]
    shapes = list(product(sizes, sizes, sizes[::4]))[: count // 2]
    found = list[tuple[Gemm | Collective, str]]((Gemm(m=m, n=n, k=k), "cold") for m, n, k in shapes)
    step = max(1, 30 * 2 * 3 * 2 * len(KINDS) * 10 // count)
    ways = product(KINDS, (2, 4, 8), (False, True), ("warm", "graph"), range(0, 320, step))
    for kind, group, in_place, regime, at in ways:
        size = 8 * int(2 ** (7 + at / 16))
        found.append(
            (Collective(kind=kind, size_bytes=size, group_size=group, in_place=in_place), regime)
        )
    return found[:count]


def sample(op: Gemm | Collective, regime: str) -> Sample:
    case = Case(op=op, regime=regime, world_size=RANKS)  # type: ignore[arg-type]
    time_s = 1e-5 + op.flops / 5e14 + op.bytes / 2e11
    times = tuple(time_s * (1 + 0.01 * (at % 5)) for at in range(20))
    return Sample(
        case_id=case.id, case=case, status="ok", times_s=times, rank_times_s=(times,) * RANKS
    )


def contents(count: int) -> Contents:
    """Return a run of ``count`` samples."""
    samples = tuple(sample(*one) for one in ops(count))
    info = RunInfo(
        run_id="20260101T000000-measure-all", verb="measure", command=("meshwise", "measure"),
        status="complete", started="2026-01-01T00:00:00Z", world_size=RANKS, cluster=CLUSTER,
    )  # fmt: skip
    return Contents(None, None, (), ((info, samples),))


def main() -> None:
    made = contents(int(sys.argv[1]))
    begin = time.process_time()
    text = html.page(made)
    took_s = time.process_time() - begin
    print(f"{sys.argv[1]} samples: {len(text.encode()):,} bytes in {took_s:.1f} CPU seconds")
    if len(sys.argv) > 2:
        with open(sys.argv[2], "w", encoding="utf-8") as file:
            file.write(text)


if __name__ == "__main__":
    main()
