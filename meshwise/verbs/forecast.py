"""Forecast what a refit moves and how fast it could be, before anything runs. Pure, no torch.

In: a ``Resharding`` and the rates of links and memory. Out: a ``Forecast``. The predicted time is
that of the plan's busiest link, stage after stage, or of its busiest memory (``bounds.busiest_s``).
It leaves out launching, packing in staging and verifying. The bounds come from ``bounds.limits``.

The least cap is, for each stage, 1 MiB a peer and the tables of the tiles. There are two slots each
way, and each keeps a 64 KiB tile free for every peer: 256 KiB a peer. With 1 MiB, three quarters of
a slot carry messages; with little over 256 KiB almost none of it does, so steps have no end. Tiles
are at least half full but the last two of a box: at most 2 x bytes / 64 KiB + 2 x boxes tiles.
"""

import time
from collections.abc import Sequence
from math import inf, prod
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from meshwise.reshard import bounds, tiles, transfer
from meshwise.reshard.holdings import Holdings, buffers, holdings, of_plan
from meshwise.spec import DTYPE_BYTES, Cluster, Plan, RefitCost, Resharding
from meshwise.spec.refit import Bound, Forecast
from meshwise.units import format_bytes, format_rate, some_rate

Loads = npt.NDArray[np.int64]

MATRIX_RANKS = 16
PLACED_RANKS = 16  # up to this many ranks, always compute what --place would save
PEER_BYTES = 2**20  # of the cap, for each peer of a rank


class LinkRates(NamedTuple):
    """``rates`` of ranks and hosts, and the ranks of a host."""

    rates: bounds.Rates
    host_ranks: int

    def host_of(self, rank: int) -> int:
        return rank // self.host_ranks


def links(cluster: Cluster, rate: str | float | None = None) -> LinkRates | None:
    """Return the rates of links. ``rate``, as ``373GB/s``, is a rank's within its host. The default
    is our H200 measurement for H200 and H100, else the cluster's file; None if it has none."""
    device, per_host = cluster.device, cluster.num_devices_per_host
    inner = cluster.tiers[0] if cluster.tiers else None
    if rate is not None:
        link, said = some_rate("rate", rate), "--rate"
    elif any(name in device.name for name in ("H100", "H200")):
        link, said = transfer.PEER_BYTES_PER_S, "peer copies measured on H200"
    elif inner is not None and inner.bytes_per_s:
        link, said = inner.bytes_per_s, f"{inner.name} of {cluster.name}"
    else:
        return None
    outer = [tier.bytes_per_s for tier in cluster.tiers if tier.num_devices > per_host]
    between = outer[0] * per_host if outer and outer[0] else inf
    memory = device.peak_memory_bytes_per_s or inf
    name = f"{format_rate(link, 'B/s')} ({said})"
    return LinkRates(bounds.Rates(name, link, between, memory), per_host)


def forecast(op: Resharding, num_ranks: int, given: LinkRates) -> Forecast:
    """Return the plan's figures. With few ranks, add the wire bytes after renumbering (--place)."""
    started = time.perf_counter()
    source, destination = sides(op)
    plan = _plan(source, destination, given)
    took_s = time.perf_counter() - started
    loads = _loads(plan, num_ranks)
    need = _need(op, plan, loads)
    _check_cap(op, need)
    total = np.sum(loads, axis=0)
    received = _held_bytes(destination, op.destination.first_rank, op.placement)
    placed = _placed(source, destination, given) if num_ranks <= PLACED_RANKS else None
    limits = bounds.limits(source, destination, given.rates, host_of=given.host_of)
    moved = _moved(plan, total, limits, given)
    return Forecast(
        op=op,
        num_ranks=num_ranks,
        source_bytes=_held_bytes(source, op.source.first_rank),
        destination_bytes=received,
        num_slices=sum(not named.move.is_local for stage in plan.stages for named in stage),
        num_messages=sum(int(np.count_nonzero(stage - np.diag(np.diag(stage)))) for stage in loads),
        num_stages=len(plan.stages),
        staging_bytes=min(op.cap_bytes, need.most_bytes),
        atomic_bytes=received if op.atomic else 0,
        bounds=_bounds(limits, given.rates),
        plan_took_s=took_s,
        placed_wire_bytes=placed,
        loads=tuple(tuple(map(int, row)) for row in total) if num_ranks <= MATRIX_RANKS else (),
        **moved,
    )


def between_plans(plan: Plan, there: Plan, given: LinkRates) -> RefitCost:
    """Return what moving one plan's live weights to another costs, on ranks of the same numbers, as
    ``Refit`` moves them: in float32. A ValueError if weights of one of them have no known place."""
    if plan.model != there.model:
        raise ValueError(
            f"refit_to: is a plan of {there.model.name or 'another model'}, and this one is of "
            f"{plan.model.name or 'a model'} with other sizes; give a plan of the same model"
        )
    source, destination = of_plan(plan), of_plan(there)
    moves = _plan(source, destination, given)
    loads = _loads(moves, max(plan.layout.num_devices, there.layout.num_devices))
    limits = bounds.limits(source, destination, given.rates, host_of=given.host_of)
    moved = _moved(moves, np.sum(loads, axis=0), limits, given)
    return RefitCost(layout=there.layout, rate=limits.rate, **moved)


def _loads(plan: transfer.Transfer, num_ranks: int) -> list[Loads]:
    return [np.pad(stage, (0, num_ranks - len(stage))) for stage in transfer.loads(plan)]


def _moved(
    plan: transfer.Transfer, total: Loads, limits: bounds.Limits, given: LinkRates
) -> dict[str, Any]:
    """Return the fields that ``Forecast`` and ``RefitCost`` share. ``total``: bytes by pair."""
    wire = total - np.diag(np.diag(total))
    return {
        "wire_bytes": int(wire.sum()),
        "local_bytes": int(np.trace(total)),
        "max_in_bytes": int(wire.sum(0).max()),
        "max_out_bytes": int(wire.sum(1).max()),
        "predicted_s": float(bounds.busiest_s(plan, given.rates, given.host_of)),
        "bound_s": limits.time_s,
        "binding": limits.binding,
    }


def sides(op: Resharding) -> tuple[Holdings, Holdings]:
    """Return the holdings of ranks before and after."""
    destination = holdings(op.model, op.destination)
    if op.placement:
        destination = transfer.renumbered(destination, op.placement)
    return holdings(op.model, op.source), destination


def known(op: Resharding, num_ranks: int, given: LinkRates | None) -> dict[str, float]:
    """Return the forecast's figures for a sample; {} if no rate is known. Raise ValueError if the
    model cannot be laid out so, or cannot be moved under the cap."""
    if given is not None:
        return metrics(forecast(op, num_ranks, given))
    plan = transfer.transfer_plan(*sides(op))
    _check_cap(op, _need(op, plan, transfer.loads(plan)))
    return {}


def placement(op: Resharding) -> tuple[int, ...]:
    """Renumber the destination's ranks so that the fewest bytes go over the wire."""
    return transfer.place(*sides(msgspec.structs.replace(op, placement=())))


def metrics(found: Forecast) -> dict[str, float]:
    """Return the figures of a forecast that a sample keeps."""
    kept = (
        *("wire_bytes", "max_in_bytes", "max_out_bytes", "num_slices", "num_messages"),
        *("bound_s", "predicted_s"),
    )
    of_bounds = {f"bound_{bound.name}_s": bound.seconds for bound in found.bounds}
    rate = found.bounds[0].bytes_per_s
    return {
        **{name: float(getattr(found, name)) for name in kept},
        **of_bounds,
        **({} if rate is None else {"rate_bytes_per_s": rate}),
    }


class _MemoryNeed(NamedTuple):
    """Extra memory of the rank that needs most: the least that works, the most it would use without
    a cap, and the largest number of ``peers`` of a rank."""

    least_bytes: int
    most_bytes: int
    peers: int


def _need(op: Resharding, plan: transfer.Transfer, loads: Sequence[Loads]) -> _MemoryNeed:
    least = most = peers = 0
    for stage, load in zip(plan.stages, loads, strict=True):
        wire = load - np.diag(np.diag(load))
        ends = np.array([named.move[:2] for named in stage], np.int64).reshape(-1, 2)
        boxes = sum(np.bincount(end, minlength=len(load)) for end in ends.T)
        held = load.sum(0) + wire.sum(1)
        tables = _tile_bytes(op) * 2 * (held // tiles.TILE + 1 + boxes)
        each = np.maximum(np.count_nonzero(wire, 0), np.count_nonzero(wire, 1))
        peers = max(peers, int(each.max()))
        least = max(least, int((each * PEER_BYTES + tables).max()))
        most += int((wire.sum(0) + wire.sum(1) + tables + 4 * tiles.TILE * each).max())
    return _MemoryNeed(least * len(plan.stages), most, peers)


def _tile_bytes(op: Resharding) -> int:
    """Return the most bytes of a tile's tables. A tile has lines of 7 words (one to copy, one more
    to hash with delta, two more with full), 3 hashes, and 2 words of padding."""
    lines = 3 if op.verify == "full" else 1 if op.changed is None else 2
    return 8 * (7 * lines + 5)


def _check_cap(op: Resharding, need: _MemoryNeed) -> None:
    least = -(-need.least_bytes // 2**20)
    if op.cap_bytes < least * 2**20:
        raise ValueError(
            f"cap = {format_bytes(op.cap_bytes)}: must be at least {least}MiB for "
            f"{op.scenario or 'this'}: 1MiB for each of up to {need.peers} peers of a rank, and "
            "the tables of what it moves"
        )


def _plan(source: Holdings, destination: Holdings, given: LinkRates) -> transfer.Transfer:
    rates = given.rates
    between = min(rates.host_bytes_per_s / given.host_ranks, rates.rank_bytes_per_s)
    return transfer.transfer_plan(
        source,
        destination,
        host_of=given.host_of,
        bytes_per_s_out=lambda rank: rates.rank_bytes_per_s,
        bytes_per_s_between_hosts=lambda rank: between,
    )


def _bounds(limits: bounds.Limits, rates: bounds.Rates) -> tuple[Bound, ...]:
    """List the bounds, the first of which is that of the ranks' links."""
    of_ranks, of_hosts = rates.rank_bytes_per_s, rates.host_bytes_per_s
    found = {
        "ingress": (limits.ingress_s, of_ranks),
        "relayed": (limits.relayed_s, of_ranks),
        "egress": (limits.egress_s, of_ranks),
        "hosts": (limits.hosts_s, of_hosts),
        "memory": (limits.memory_s, rates.memory_bytes_per_s),
    }
    return tuple(
        Bound(
            name=name,
            seconds=seconds,
            bytes_per_s=rate if rate < inf else None,
            ranks=limits.ranks if name == limits.binding else (),
            rate=limits.rate if rate == of_ranks else "",
        )
        for name, (seconds, rate) in found.items()
    )


def _held_bytes(held: Holdings, rank: int, placement: tuple[int, ...] = ()) -> int:
    found = buffers(held, placement[rank] if placement else rank).values()
    return sum(prod(shape) * DTYPE_BYTES[dtype] for shape, dtype in found)


def held_bytes(op: Resharding, num_ranks: int) -> list[int]:
    """Return the bytes of weights that each rank holds at once: those before and those after. With
    ``atomic``, which hides half-moved weights, those after count twice."""
    source, destination = sides(op)
    return [
        _held_bytes(source, rank) + (1 + op.atomic) * _held_bytes(destination, rank)
        for rank in range(num_ranks)
    ]


def _placed(source: Holdings, destination: Holdings, given: LinkRates) -> int:
    """Return the bytes on the wire after renumbering the destination's ranks."""
    order = transfer.place(source, destination)
    plan = _plan(source, transfer.renumbered(destination, order), given)
    return sum(int(stage.sum() - np.trace(stage)) for stage in transfer.loads(plan))
