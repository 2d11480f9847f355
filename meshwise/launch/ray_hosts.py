"""Hosts of a Ray cluster: which of them a job takes, and where each of its ranks sits.

In: nodes with free resources, and the devices that Ray gave each actor. Out: the hosts of a job,
its ranks in order, and each rank's variables, as torchrun sets them. Nothing here imports Ray.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from meshwise.launch.errand import Errand
from meshwise.options.allocation import Allocation


class RayHost(NamedTuple):
    """A node of the cluster; of a machine with several raylets each is one."""

    node: str
    name: str
    address: str
    cpus: int
    free_cpus: int
    gpus: int
    free_gpus: int

    def has(self, place: Allocation) -> tuple[int, int]:
        """Return how many ranks this host could hold, and how many at present."""
        return (self.gpus, self.free_gpus) if place.gpus_per_node else (self.cpus, self.free_cpus)


class Seat(NamedTuple):
    """An actor's place: its host's number among the job's, and its GPUs by their ids."""

    host: int
    address: str
    gpus: tuple[str, ...] = ()


def sized(errand: Errand, place: Allocation, on_gpus: bool) -> Allocation:
    """Return the place with Alpa's --num-hosts and --num-devices-per-host in it, if the command has
    them. Raise ValueError if it says otherwise."""
    hosts, devices = errand.value("num-hosts"), errand.value("num-devices-per-host")
    if hosts and devices and hosts.isdecimal() and devices.isdecimal():
        asked: dict[str, Any] = {
            "nodes": int(hosts),
            "gpus_per_node" if on_gpus else "nproc_per_node": int(devices),
        }
        for name, number in asked.items():
            if place.said().get(name, number) != number:
                raise ValueError(
                    f"{name} = {getattr(place, name)}: the command says {number} by --num-hosts "
                    "and --num-devices-per-host; leave one out"
                )
        place = dataclasses.replace(place, **asked)
    if place.gpus_per_node not in (0, place.ranks_per_node):
        raise ValueError(
            f"nproc_per_node = {place.nproc_per_node}: each rank has one GPU, and gpus_per_node is "
            f"{place.gpus_per_node}; leave nproc_per_node out"
        )
    return place


def fitting(hosts: Iterable[RayHost], place: Allocation, here: str = "") -> list[RayHost]:
    """Return the hosts of a job, [] if too few are free now. Rank 0 writes, so it is ``here`` if it
    can be: that node comes first. ``pack`` then takes those that it fills best, ``spread`` those
    with most to spare."""
    sign = 1 if place.strategy == "pack" else -1
    free = [host for host in hosts if host.has(place)[1] >= place.ranks_per_node]
    free.sort(key=lambda host: (host.node != here, sign * host.has(place)[1], host.address))
    return free[: place.nodes] if len(free) >= place.nodes else []


def could_fit(hosts: Iterable[RayHost], place: Allocation) -> bool:
    """Return whether the job fits into the cluster while nothing else runs."""
    return sum(host.has(place)[0] >= place.ranks_per_node for host in hosts) >= place.nodes


def too_few(hosts: Sequence[RayHost], place: Allocation) -> str:
    """Say what the job needs and what there is."""
    unit = "GPU" if place.gpus_per_node else "CPU"
    having = [host.has(place) for host in hosts if host.has(place)[0]]
    shown = [f"{free} of {has}" for has, free in having[:8]] + ["..."] * (len(having) > 8)
    what = f"nodes = {place.nodes}"
    if all(has < place.ranks_per_node for has, _ in having):  # no host, whatever is free
        what = f"{'gpus' if unit == 'GPU' else 'nproc'}_per_node = {place.ranks_per_node}"
    return (
        f"{what}: each needs {place.ranks_per_node} free {unit}s, and the cluster's "
        f"hosts with {unit}s have {', '.join(shown) or 'none'}; ask for less, or wait"
    )


def ranked(seats: Sequence[Seat]) -> list[int]:
    """Return the actors in the order of their ranks: by host, then by number of their GPU."""

    def place(actor: int) -> tuple[int, list[tuple[bool, int, str]], int]:
        ids = [(not each.isdecimal(), int(each) if each.isdecimal() else 0, each)
               for each in seats[actor].gpus]  # fmt: skip
        return seats[actor].host, ids, actor

    return sorted(range(len(seats)), key=place)


def variables(seats: Sequence[Seat], port: int) -> list[dict[str, str]]:
    """Return each rank's variables; ``seats`` in the order of ranks. Every rank sees all GPUs of
    the job on its host, as CUDA IPC between ranks needs, and its own is number LOCAL_RANK."""
    found, size = [], len(seats)
    for rank, seat in enumerate(seats):
        beside = [other for other in range(size) if seats[other].host == seat.host]
        place = {
            "RANK": rank,
            "LOCAL_RANK": beside.index(rank),
            "WORLD_SIZE": size,
            "LOCAL_WORLD_SIZE": len(beside),
            "GROUP_RANK": seat.host,
            "MASTER_ADDR": seats[0].address,
            "MASTER_PORT": port,
            "CUDA_VISIBLE_DEVICES": ",".join(gpu for r in beside for gpu in seats[r].gpus),
        }
        found.append({name: str(value) for name, value in place.items()})
    return found
