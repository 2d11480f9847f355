"""Ray: a command on ranks that actors start, on a running cluster or on a Ray started here.

A placement group reserves a bundle for each rank; an actor in it starts the rank
(``ray_actor``) and is asked for its output until it ends (``ray_job``). Actors and group are gone
however the command ends.
"""

import contextlib
import logging
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

from meshwise import signals
from meshwise.launch import scratch
from meshwise.launch.errand import Errand
from meshwise.launch.ray_hosts import RayHost, could_fit, fitting, sized, too_few
from meshwise.launch.ray_job import RayJob
from meshwise.launch.slurm_script import swept
from meshwise.launcher import is_loopback
from meshwise.options.allocation import Allocation

log = logging.getLogger("meshwise")

_POLL_S = 0.5
_ANSWERING_S = 5.0  # for the first bytes of what listens at an address
_SLOW_S = 5.0  # a longer wait for Ray is told
_SETTLING_S = 10.0  # until Ray counts resources that were just given back
_TOLD_S = 2.0  # of these, before it is told that the job waits
_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])  # with SETTINGS
_STORE_BYTES = 100 << 20  # of Ray's objects, of which there are none; its least is 75 MiB


def hosts(errand: Errand, place: Allocation) -> list[RayHost]:
    """Return the nodes of the cluster."""
    with signals.raised(), _cluster(sized(errand, place, False)) as ray:
        return _hosts(ray)


def start(errand: Errand, place: Allocation) -> int:
    """Run the command, or with ``array`` one for each value. Return the worst exit code."""
    with signals.raised(), _cluster(sized(errand, place, False)) as ray:
        found = _hosts(ray)
        place = sized(errand, place, any(host.gpus for host in found))
        if not could_fit(found, place):
            raise ValueError(too_few(found, place))
        if errand.is_dry:
            here = ray.get_runtime_context().get_node_id()
            for host in fitting(found, place, here):
                print(f"{host.address}: {place.ranks_per_node} x meshwise {' '.join(errand.words)}")
            return 0
        if place.array is None:
            return _carry_out(ray, place, [RayJob(ray, errand)])
        flag, values = swept(place.array)
        jobs = [
            RayJob(ray, Errand((*errand.words, f"--{flag}={value}")), f"{flag} = {value}")
            for value in values
        ]
        return _carry_out(ray, place, jobs)


@contextlib.contextmanager
def _cluster(place: Allocation) -> Iterator[Any]:
    """Connect to the cluster, or start one that only this host reaches. Yield the package ray."""
    host, _, port = (place.address or "127.0.0.1").rpartition(":")
    is_given = place.address not in (None, "auto")
    if is_given and (not host or not port.isdecimal() or "/" in host):
        raise ValueError(f"address = {place.address!r}: must be auto or HOST:PORT")
    if is_given and not 1 <= int(port) <= 65535:
        raise ValueError(f"address = {place.address!r}: its port must be 1 to 65535")
    if place.address is None or is_loopback(host):  # Ray's switch for addresses of loopback alone
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    try:
        import ray
    except ModuleNotFoundError:
        raise ValueError("ray: not installed; pip install 'meshwise[ray]'") from None
    if is_given:
        _knock(host, int(port))
    asked: dict[str, Any] = {"address": place.address, "log_to_driver": False}
    before = signal.getsignal(signal.SIGTERM)  # Ray has a handler of its own
    with scratch.folder() as folder:
        if place.address is None:
            num_cpus = max(os.cpu_count() or 1, place.num_ranks)  # ranks share cores, as always
            asked |= {"address": "local", "num_cpus": num_cpus, "include_dashboard": False,
                      "object_store_memory": _STORE_BYTES, "_temp_dir": str(folder)}  # fmt: skip
        try:
            with _told(f"waiting for Ray to answer, address {place.address or 'local'}"):
                ray.init(**asked, logging_level=logging.ERROR)
        except Exception as error:  # Ray raises bare ones, too
            raise ValueError(_unconnected(str(error), place.address)) from None
        finally:
            signal.signal(signal.SIGTERM, before)
        try:
            yield ray
        finally:
            with signals.held():
                ray.shutdown()


@contextlib.contextmanager
def _told(what: str) -> Iterator[None]:
    """Say what is waited for, if that takes long."""
    slow = threading.Timer(_SLOW_S, log.info, [what])
    slow.start()
    try:
        yield
    finally:
        slow.cancel()


def _knock(host: str, port: int) -> None:
    """Raise ValueError if no Ray answers there: Ray itself would try for minutes. It speaks HTTP/2,
    and so begins its answer to a client's first bytes with SETTINGS (RFC 9113, 3.4); with TLS only
    the connection is tried."""
    try:
        with socket.create_connection((host, port), timeout=_ANSWERING_S) as there:
            if os.environ.get("RAY_USE_TLS", "0").lower() in ("1", "true"):
                return
            there.sendall(_HELLO)
            answer = b""
            while len(answer) < 5 and (more := there.recv(5 - len(answer))):
                answer += more
        found = "" if answer[3:] == b"\x04\x00" else "something else does"
    except OSError as error:
        found = error.strerror or str(error)
    if found:
        raise ValueError(
            f"address = '{host}:{port}': no Ray answers there ({found}); give the one that ray "
            "start --head printed"
        )


def _unconnected(said: str, address: str | None) -> str:
    """Say in one line why Ray did not connect, and what to do."""
    found = re.findall(r"(?:Ray|Python): (\S+)", said)
    if "Version mismatch" in said and len(found) == 4:
        cluster, ours = (f"Ray {a} and Python {b}" for a, b in (found[:2], found[2:]))
        return (
            f"address = {address!r}: the cluster has {cluster}, this environment {ours}; run this "
            f"in the cluster's environment, or pip install ray=={found[0]} under Python {found[1]}"
        )
    if "any running Ray instance" in said:
        return (
            f"address = {address!r}: no Ray runs on this host; begin one by ray start --head, give "
            "HOST:PORT, or leave --address out to use this host alone"
        )
    where = "Ray did not start here" if address is None else f"address = {address!r}"
    return f"{where}: {' '.join(said.split())[:300]}"


def _hosts(ray: Any) -> list[RayHost]:
    free = ray._private.state.available_resources_per_node()  # Ray has no public name for it
    found = []
    for node in ray.nodes():
        if node["Alive"]:
            has, left = node["Resources"], free.get(node["NodeID"], {})
            counts = [int(of.get(kind, 0)) for kind in ("CPU", "GPU") for of in (has, left)]
            name, address = node["NodeManagerHostname"], node["NodeManagerAddress"]
            found.append(RayHost(node["NodeID"], name, address, *counts))
    return sorted(found, key=lambda host: (host.address, host.node))


def _carry_out(ray: Any, place: Allocation, waiting: list[RayJob]) -> int:
    """Begin each job as soon as there is room for it. Return the worst exit code."""
    here, running, code = ray.get_runtime_context().get_node_id(), list[RayJob](), 0
    limit, is_told = time.monotonic() + _SETTLING_S, False
    try:
        while waiting or running:
            if waiting and (found := fitting(_hosts(ray), place, here)):
                running.append(waiting.pop(0))
                running[-1].begin(found, place)
                continue
            if running:
                asked = [answer for job in running for answer in job.asked]
                ray.wait(asked, timeout=_POLL_S)
            elif time.monotonic() > limit:
                raise ValueError(too_few(_hosts(ray), place))
            else:
                if not is_told and time.monotonic() > limit - _SETTLING_S + _TOLD_S:
                    is_told, needs = True, too_few(_hosts(ray), place).partition(";")[0]
                    log.info("waiting up to %g s for room: %s", _SETTLING_S, needs)
                time.sleep(_POLL_S)
            for job in list(running):
                job.hear()
                if not job.asked:
                    running.remove(job)
                    job.end()
                    code = max(code, job.verdict())
                    limit = time.monotonic() + _SETTLING_S
    finally:
        with signals.held():
            for job in running:
                job.end()
    return code
