"""Bound the time of any plan that moves one layout to another: exact lower bounds.

An atom is a box that every rank holds, or needs, entirely or not at all (``atoms``). It costs wire
bytes only if the rank that needs it does not own it.

    ingress   max over ranks r of (bytes r needs and does not own) / rate in
    egress    the least z such that owners can send every needer its bytes, split at will, each
              busy for at most z. By max-flow min-cut it is the maximum, over sets S of ranks, of
              (bytes owned only within S) / (sum of rates out of S), see ``flow``
    relayed   egress if receivers may pass bytes on: each byte leaves its owners once
    hosts     the same for hosts: bytes that a host needs and none of its ranks owns, over its rate
              in; bytes owned only in some hosts and needed in others, over their rate out
    memory    max over ranks of (2 x bytes needed and owned + other bytes needed) / memory rate

A full-duplex unicast takes at least the larger of ingress and egress. Any plan takes at least the
largest of ingress, relayed, hosts and memory.
"""

from collections import Counter
from collections.abc import Callable
from math import inf
from typing import NamedTuple

import numpy as np

from meshwise.reshard.atoms import Atoms, cuts, weighed
from meshwise.reshard.flow import Owners, balance
from meshwise.reshard.holdings import ITEMSIZES, Holdings
from meshwise.reshard.transfer import Transfer, loads


class Rates(NamedTuple):
    """Bytes a second: into and, at the same time, out of a rank over all its links and a host over
    all its network cards; read plus written by a rank's memory. ``name`` says whose they are."""

    name: str
    rank_bytes_per_s: float
    host_bytes_per_s: float = inf
    memory_bytes_per_s: float = inf


class Limits(NamedTuple):
    """Bounds in seconds at the rates named ``rate``. ``binding`` names the largest bound that holds
    for any plan; ``ranks`` (of ``hosts``: hosts) set it."""

    ingress_s: float
    egress_s: float
    relayed_s: float
    hosts_s: float
    memory_s: float
    binding: str
    ranks: tuple[int, ...]
    rate: str

    @property
    def time_s(self) -> float:
        return max(self.ingress_s, self.relayed_s, self.hosts_s, self.memory_s)


class _Need(NamedTuple):
    """Bytes by the ranks that need or own them. ``*_once``: counted once for any number of needers.
    ``touched``: read or written by a rank's memory."""

    needed: Counter[int]
    owned: Counter[Owners]
    owned_once: Counter[Owners]
    touched: Counter[int]
    needed_hosts: Counter[int]
    owned_hosts: Counter[Owners]


def limits(
    source: Holdings,
    destination: Holdings,
    rates: Rates,
    *,
    host_of: Callable[[int], int] = lambda rank: 0,
) -> Limits:
    """Compute the bounds of moving all that the destination holds."""
    names = sorted(destination)
    found, kinds = cuts([(source[name].layout, destination[name].layout) for name in names], names)
    itemsizes = [ITEMSIZES[destination[name].dtype] for name in names]
    need = _need(found, kinds, itemsizes, host_of)
    hosts = (
        _largest(need.needed_hosts, rates.host_bytes_per_s),
        _balanced(need.owned_hosts, rates.host_bytes_per_s),
    )
    all_plans = {
        "ingress": _largest(need.needed, rates.rank_bytes_per_s),
        "relayed": _balanced(need.owned_once, rates.rank_bytes_per_s),
        "hosts": max(hosts, key=lambda found: found[0]),
        "memory": _largest(need.touched, rates.memory_bytes_per_s),
    }
    binding = max(all_plans, key=lambda name: all_plans[name][0])
    if not all_plans[binding][0]:
        binding = "nothing to move"
    return Limits(
        egress_s=_balanced(need.owned, rates.rank_bytes_per_s)[0],
        binding=binding,
        ranks=all_plans[binding][1] if binding in all_plans else (),
        rate=rates.name,
        **{f"{name}_s": time_s for name, (time_s, _) in all_plans.items()},
    )


def _need(
    found: list[Atoms], kinds: list[int], itemsizes: list[int], host_of: Callable[[int], int]
) -> _Need:
    weights = weighed(kinds, itemsizes)
    need = _Need(*(Counter() for _ in _Need._fields))
    for kind, cut in enumerate(found):
        for box, owners, needers in cut.atoms:
            held = frozenset(cut.source[number].rank for number in owners)
            wanted = [cut.destination[number].rank for number in needers]
            _add(need, box.num_elements * weights[kind], held, wanted, host_of)
    return need


def _add(
    need: _Need, size: int, held: Owners, wanted: list[int], host_of: Callable[[int], int]
) -> None:
    """Add one atom. A rank that needs it twice need not receive it twice."""
    missing = set(wanted) - held
    for rank in missing:
        need.needed[rank] += size
    for rank in wanted:
        need.touched[rank] += (2 if rank in held else 1) * size
    if not missing:
        return
    need.owned[held] += size * len(missing)
    need.owned_once[held] += size
    hosts = frozenset(map(host_of, held))
    if abroad := set(map(host_of, missing)) - hosts:
        need.owned_hosts[hosts] += size
        for host in abroad:
            need.needed_hosts[host] += size


def _largest(sizes: dict[int, int], bytes_per_s: float) -> tuple[float, tuple[int, ...]]:
    if not sizes:
        return 0.0, ()
    rank = max(sizes, key=lambda rank: (sizes[rank], -rank))
    return sizes[rank] / bytes_per_s, (rank,)


def _balanced(owned: dict[Owners, int], bytes_per_s: float) -> tuple[float, tuple[int, ...]]:
    if not owned:
        return 0.0, ()
    load, tight = balance(owned)
    return float(load) / bytes_per_s, tuple(sorted(tight))


def busiest_s(
    transfer: Transfer, rates: Rates, host_of: Callable[[int], int] = lambda rank: 0
) -> float:
    """Seconds for which the busiest link of each stage is busy, summed over the stages.

    A rank's memory reads what it sends and writes what it receives.
    """
    total_s = 0.0
    for matrix in loads(transfer):
        local = matrix.diagonal()
        wire = matrix - np.diag(local)
        out, into = wire.sum(1), wire.sum(0)
        hosts = [host_of(rank) for rank in range(len(wire))]
        crossing = Counter[tuple[str, int]]()
        for s, d in zip(*wire.nonzero(), strict=True):
            if hosts[s] != hosts[d]:
                crossing["out", hosts[s]] += int(wire[s, d])
                crossing["in", hosts[d]] += int(wire[s, d])
        total_s += max(
            max(out.max(initial=0), into.max(initial=0)) / rates.rank_bytes_per_s,
            max(crossing.values(), default=0) / rates.host_bytes_per_s,
            (2 * local + out + into).max(initial=0) / rates.memory_bytes_per_s,
        )
    return total_s
