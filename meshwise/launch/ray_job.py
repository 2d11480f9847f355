"""One command on Ray: its actors begin together, are heard until they end, and are gone with it."""

import contextlib
import logging
import os
import signal
import sys
import time
from typing import Any

from meshwise import files
from meshwise.launch import failures, local
from meshwise.launch.errand import Errand
from meshwise.launch.failed import RanksFailed
from meshwise.launch.failures import Fate
from meshwise.launch.ray_actor import Rank
from meshwise.launch.ray_hosts import RayHost, Seat, ranked, variables
from meshwise.options.allocation import Allocation
from meshwise.patience import turns

log = logging.getLogger("meshwise")

BAD_INPUT, SOME_FAILED = 2, 4
_ERROR = "error: "  # how a command's errors begin
_TOLD_S = 0.5  # between two answers of a rank that says nothing
_RESERVING_S = 30.0
_STARTING_S = 600.0  # for actors: a process each that imports Ray
_LEFT_S = 10.0  # for the others to end by themselves when a rank has failed
_ENDING_S = 60.0
_LOSING_S = 30.0  # until Ray knows whether an actor's node is lost, too


class RayJob:
    """A command, its actors in the order of ranks, and the group that holds their resources.

    ``name``: its value in an array. Its output then waits for its end.
    """

    def __init__(self, ray: Any, errand: Errand, name: str = "") -> None:
        self.ray, self.errand, self.name = ray, errand, name
        self.group: Any = None
        self.actors: list[Any] = []
        self.hosts: list[RayHost] = []  # of each rank
        self.asked: dict[Any, int] = {}  # the rank by the answer that it owes
        self.codes: dict[int, int] = {}
        self.fates: dict[int, Fate] = {}  # of ranks that failed
        self.lost: RanksFailed | None = None
        self.said: dict[int, str] = {}  # the last line of standard error
        self.kept: list[tuple[int, bool, str]] = []  # rank, whether an error, line
        self.limit_s = float("inf")

    def begin(self, hosts: list[RayHost], place: Allocation) -> None:
        """Start all ranks. ValueError names a host that cannot."""
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        ray, unit = self.ray, "GPU" if place.gpus_per_node else "CPU"
        of = [number for number in range(len(hosts)) for _ in range(place.ranks_per_node)]
        self.group = placement_group(
            [{unit: 1}] * len(of),
            strategy=place.strategy.upper(),
            bundle_label_selector=[{"ray.io/node-id": hosts[number].node} for number in of],
        )
        if not self.group.wait(_RESERVING_S):
            raise ValueError(f"nodes = {place.nodes}: others took their {unit}s; start again")
        options = {"num_cpus": int(unit == "CPU"), "num_gpus": int(unit == "GPU")}
        for bundle in range(len(of)):
            within = PlacementGroupSchedulingStrategy(self.group, bundle)
            self.actors.append(
                ray.remote(Rank).options(**options, scheduling_strategy=within).remote()
            )
        given = [self._got(actor.gpus.remote(), hosts[n])
                 for actor, n in zip(self.actors, of, strict=True)]  # fmt: skip
        seats = [Seat(n, hosts[n].address, tuple(g)) for n, g in zip(of, given, strict=True)]
        order = ranked(seats)
        self.actors = [self.actors[actor] for actor in order]
        self.hosts = [hosts[seats[actor].host] for actor in order]
        port = self._got(self.actors[0].port.remote(), self.hosts[0])
        each = variables([seats[actor] for actor in order], port)
        args = [(self.errand, place, _settings() | mine, os.getcwd()) for mine in each]
        begun = [actor.start.remote(*a) for actor, a in zip(self.actors, args, strict=True)]
        for rank, answer in enumerate(begun):
            if wrong := self._got(answer, self.hosts[rank]):
                raise ValueError(
                    f"host {self.hosts[rank].address}: {wrong}; every host needs the working "
                    "directory and the interpreter"
                )
        for rank in range(len(begun)):
            self._ask(rank)

    def _got(self, answer: Any, host: RayHost) -> Any:
        try:
            return self.ray.get(answer, timeout=_STARTING_S)
        except self.ray.exceptions.RayError as error:
            raise ValueError(
                f"host {host.address}: no rank started there: {_last_line(str(error))}; "
                "meshwise must be installed in Ray's environment on every host"
            ) from None

    def _ask(self, rank: int) -> None:
        self.asked[self.actors[rank].told.remote(_TOLD_S)] = rank

    def hear(self) -> None:
        """Take the answers there are, and ask again. A rank lost ends the job now, one that failed
        after a while: the others may have something to say."""
        answers = list(self.asked)
        for answer in self.ray.wait(answers, num_returns=len(answers), timeout=0)[0]:
            rank = self.asked.pop(answer)
            try:
                lines, code = self.ray.get(answer)
            except self.ray.exceptions.RayError as error:
                self.lost = self.lost or RanksFailed(
                    f"rank {rank}: {self._loss(rank, error)}; the other ranks were ended", rank
                )
                self.limit_s = 0.0
                continue
            for is_error, line in lines:
                self._show(rank, is_error, line)
            if code is None:
                self._ask(rank)
                continue
            self.codes[rank] = code
            if code:
                self._failed(rank, self._reason(rank, code))
                self.limit_s = min(self.limit_s, time.monotonic() + _LEFT_S * turns())
        if time.monotonic() > self.limit_s:
            self.asked.clear()

    def _show(self, rank: int, is_error: bool, line: str) -> None:
        """Print a line, or keep it for the end: the output of an array; of --json its document, as
        a failure has another; and a rank's error, which the job's may repeat."""
        if is_error and line.strip():
            self.said[rank] = line.strip()
        is_document = rank == 0 and not is_error and "--json" in self.errand.words
        if self.name or is_document or (is_error and line.startswith(_ERROR)):
            self.kept.append((rank, is_error, line))
        else:
            _print(rank, is_error, line)

    def _failed(self, rank: int, error: str) -> None:
        self.fates[rank] = Fate(rank=rank, state="failed", error=error, time_s=len(self.fates))

    def _reason(self, rank: int, code: int) -> str:
        if code < 0:
            return f"rank {rank} on {self.hosts[rank].address} died of {signal.Signals(-code).name}"
        said = self.said.get(rank, f"exited with code {code}").removeprefix(_ERROR)
        return said if said.startswith(f"rank {rank}") else f"rank {rank}: {said}"

    def _loss(self, rank: int, error: Exception) -> str:
        """Say what an actor was lost with. At first Ray may know only that it does not answer."""
        host, limit = self.hosts[rank], time.monotonic() + _LOSING_S
        errors = self.ray.exceptions
        while isinstance(error, errors.ActorUnavailableError) and time.monotonic() < limit:
            time.sleep(_TOLD_S)
            with contextlib.suppress(errors.GetTimeoutError):
                try:
                    self.ray.get(self.actors[rank].gpus.remote(), timeout=_LOSING_S)
                    break
                except errors.RayActorError as later:
                    error = later
        alive = {node["NodeID"] for node in self.ray.nodes() if node["Alive"]}
        if host.node not in alive:
            return f"its node {host.address} ({host.name}, {host.node[:8]}) was lost"
        return f"its actor on {host.address} ({host.name}) was lost: {_last_line(str(error))}"

    def end(self) -> None:
        """End the ranks and their actors, and give back the resources."""
        for actors in self.actors[:1], self.actors[1:]:  # rank 0 first: it says why, in run.json
            ending = [actor.end.remote() for actor in actors]
            if ending:
                self.ray.wait(ending, num_returns=len(ending), timeout=_ENDING_S)
        for actor in self.actors:
            self.ray.kill(actor)
        if self.group is not None:
            from ray.util.placement_group import remove_placement_group

            remove_placement_group(self.group)
        self.asked, self.actors, self.group = {}, [], None

    def verdict(self) -> int:
        """Print what waited, each error once. Return the exit code, or raise RanksFailed with the
        rank to blame."""
        code = self._code()
        failed = None if code is not None else self.lost or failures.explain(self.fates, {}, ())
        if self.name:
            print(f"--- {self.name}", file=sys.stderr, flush=True)
        told = str(failed)
        for rank, is_error, line in self.kept:
            if is_error and line.startswith(_ERROR):
                if line.removeprefix(_ERROR).strip() in told:
                    continue
                told += line
            if failed is None or self.name or is_error:
                _print(rank, is_error, line)
        if code is not None:
            return code
        assert failed is not None
        if not self.name:
            raise failed
        log.error("error: %s: %s", self.name, failed)
        return SOME_FAILED

    def _code(self) -> int | None:
        """Return the exit code that rank 0 gave a reason for; None if a rank is to blame."""
        bad = {rank: code for rank, code in self.codes.items() if code}
        if self.lost or len(self.codes) < len(self.hosts):
            return None
        if set(bad.values()) == {BAD_INPUT} and len(bad) == len(self.hosts):
            return BAD_INPUT
        own = bad.get(0, 0)
        return own if own >= 0 and bad.keys() <= {0} else None


def _settings() -> dict[str, str]:
    """Return the usual variables, and this process's own of NCCL, torch and the like."""
    families = tuple(files.own_data("settings.toml"))
    own = {name: value for name, value in os.environ.items() if name.startswith(families)}
    return local.USUAL | own


def _print(rank: int, is_error: bool, line: str) -> None:
    """Print a rank's line, of ranks beside the first on standard error with their number."""
    text = line if rank == 0 else f"rank {rank}: {line}"
    print(text, end="", file=sys.stderr if is_error or rank else sys.stdout, flush=True)


def _last_line(text: str) -> str:
    return ([line.strip() for line in text.splitlines() if line.strip()] or [""])[-1]
