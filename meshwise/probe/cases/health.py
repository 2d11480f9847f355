"""The cases of ``measure health``: every GPU by itself, all at once, then every link. No torch.

Matrix products (the processor), copies in memory, copies from and to the host; collectives over
all ranks; one message over every ordered pair of ranks of a host, one pair at a time; and messages
between each rank and the rank in the same place on the next host. Sizes are large because rates
grow with them: a ring shift between four H200 reaches 155 GB/s at 64 MiB, 305 at 256 MiB, 365 at
4 GiB. Only the 8 KiB all-reduce measures latency. ``pages.health`` judges the results.
"""

from collections.abc import Iterator
from typing import NamedTuple

from meshwise.options.measure import HealthOptions
from meshwise.probe.cases.scope import Scope, typed
from meshwise.spec import DTYPE_BYTES, Case, Collective, Elementwise, Gemm, Op
from meshwise.spec.op import CollectiveKind, Dtype

KiB, MiB, GiB = 2**10, 2**20, 2**30
SMALL_BYTES = 8 * KiB


class HealthSizes(NamedTuple):
    cube: int  # m = n = k of the matrix product
    copy_bytes: int  # read, and as many written
    host_bytes: int  # 0: the device is the host
    group_bytes: int  # for collectives
    pair_bytes: int
    dtype: Dtype  # for messages


GPU = HealthSizes(8192, GiB, 256 * MiB, 256 * MiB, 256 * MiB, "bf16")
CPU = HealthSizes(512, 16 * MiB, 0, 4 * MiB, MiB, "fp32")


def cases(scope: Scope, asked: HealthOptions) -> list[Case]:
    """List the cases. ``quick`` skips the sustained product, and pairs of a host but neighbours."""
    quick = asked.quick
    sizes = GPU if scope.on_gpus else CPU
    product = typed(Gemm(m=sizes.cube, n=sizes.cube, k=sizes.cube), scope.dtype)
    ops: list[Op] = [product]
    copies = {"copy": sizes.copy_bytes, "h2d": sizes.host_bytes, "d2h": sizes.host_bytes}
    ops += [Elementwise(kind=k, read_bytes=n, write_bytes=n) for k, n in copies.items() if n]  # type: ignore[arg-type]
    if scope.world_size > 1:
        ops += _messages(sizes, scope, quick)
    found = [Case(op=op, world_size=scope.world_size) for op in ops]
    if scope.on_gpus and not quick:
        found.insert(1, Case(op=product, regime="sustained", world_size=scope.world_size))
    return found


def _messages(sizes: HealthSizes, scope: Scope, quick: bool) -> Iterator[Op]:
    world_size, per_host = scope.world_size, scope.cluster.num_devices_per_host
    kinds: tuple[tuple[CollectiveKind, int], ...] = (
        ("all_reduce", SMALL_BYTES),
        ("all_reduce", sizes.group_bytes),
        ("all_gather", sizes.group_bytes),
        ("send_recv", sizes.group_bytes),
    )
    for kind, size_bytes in kinds:
        yield Collective(
            kind=kind,
            size_bytes=size_bytes - size_bytes % (world_size * DTYPE_BYTES[sizes.dtype]),
            group_size=world_size,
            dtype=sizes.dtype,
            in_place=kind == "all_reduce",
        )
    for pair in _pairs(world_size, per_host, quick):
        yield Collective(
            kind="send", size_bytes=sizes.pair_bytes, group_size=2, ranks=pair, dtype=sizes.dtype
        )


def _pairs(world_size: int, per_host: int, quick: bool) -> Iterator[tuple[int, int]]:
    """Yield pairs, both directions one after the other. Across hosts, pair ranks in the same place
    on neighbouring hosts. With ``quick``, pair neighbours in the ring of each host."""
    for a in range(world_size):
        for b in range(a + 1, world_size):
            apart = b - a
            if a // per_host == b // per_host:
                last = min(per_host, world_size) - 1
                wanted = not quick or apart in (1, last)
            else:
                wanted = apart == per_host
            if wanted:
                yield from ((a, b), (b, a))
