"""Helpers of the verbs that start ranks: how many ranks, which one reports, how the run ended.

Under torchrun or srun every rank runs the verb. Only rank 0 writes and prints, and all ranks use
rank 0's request.
"""

import contextlib
import functools
import logging
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from meshwise import launcher, signals
from meshwise.text import masked_words

if TYPE_CHECKING:
    from meshwise.spec import Case, Cluster, Plan, Sample

log = logging.getLogger("meshwise")


def leads() -> bool:
    """Whether this process writes and prints: rank 0, or one that no launcher started."""
    place = launcher.environment()
    return place is None or place["rank"] == 0


def starts() -> bool:
    """Whether this process starts ranks itself; else a launcher did."""
    return launcher.environment() is None


def num_ranks(
    nproc: int | None = None,
    gpus: int | None = None,
    num_hosts: int | None = None,
    num_devices_per_host: int | None = None,
) -> int | None:
    """Return the number of ranks that these options agree on; None if none is given."""
    if (num_hosts is None) != (num_devices_per_host is None):
        raise ValueError("--num-hosts and --num-devices-per-host go together; give both")
    hosts = None if num_hosts is None else num_hosts * (num_devices_per_host or 0)
    options = {
        "--nproc": nproc,
        "--gpus": gpus,
        f"--num-hosts {num_hosts} x --num-devices-per-host {num_devices_per_host}": hosts,
    }
    given = {name: number for name, number in options.items() if number is not None}
    for name, number in given.items():
        if number < 1:
            raise ValueError(f"{name} = {number}: must be >= 1")
    if len(set(given.values())) > 1:
        said = ", ".join(f"{name} = {number}" for name, number in given.items())
        raise ValueError(f"{said}: these set the same number; give one, or make them equal")
    return next(iter(given.values()), None)


def meet_at(address: str | None, port: int | None) -> None:
    """Set where the ranks of several hosts meet, for a launcher that does not set it (srun)."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        return
    given = {"MASTER_ADDR": address, "MASTER_PORT": None if port is None else str(port)}
    os.environ.update({name: value for name, value in given.items() if value is not None})


def world_size(asked: int | None, cluster: "Cluster", default: int) -> int:
    """Return how many ranks to start; refuse more than the launcher or the cluster has."""
    launched = launcher.world_size(asked)
    size = launched or (default if asked is None else asked)
    if not 1 <= size <= cluster.num_devices:
        raise ValueError(
            f"nproc = {size}: cluster {cluster.name!r} has {cluster.num_devices} devices; "
            f"use 1 to {cluster.num_devices}, look again by `meshwise detect`, or name a larger "
            "cluster: a file, or h100-hgx"
        )
    if launched is None and size > cluster.num_devices_per_host:
        raise ValueError(
            f"nproc = {size}: a host of {cluster.name!r} has {cluster.num_devices_per_host} "
            "devices; start this verb on every host with torchrun or srun"
        )
    return size


def check_machine(cluster: "Cluster", size: int) -> None:
    """Refuse to start ``size`` ranks on a machine that is not the one described."""
    import torch

    device = cluster.device
    visible = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device.kind == "cpu":
        if visible:
            raise ValueError(
                f"cluster {cluster.name!r} is of CPUs, but {visible} GPUs are visible; set "
                "CUDA_VISIBLE_DEVICES= to use the CPU, or run `meshwise detect`"
            )
        return
    found = sorted({torch.cuda.get_device_name(i) for i in range(visible)})
    if device.name not in found:
        raise ValueError(
            f"cluster {cluster.name!r} is of {device.name!r}, but here is "
            f"{', '.join(found) or 'no GPU'}; run `meshwise detect` on this machine"
        )
    if visible < min(size, cluster.num_devices_per_host) and starts():
        raise ValueError(f"{size} ranks need {size} GPUs, but {visible} are visible")


def command(verb: str) -> tuple[str, ...]:
    """Return the words that the user typed, with credentials masked; in Python, the verb's name."""
    program = Path(sys.argv[0])
    typed = program.name == "meshwise" or program.parts[-2:] == ("meshwise", "__main__.py")
    return ("meshwise", *masked_words(sys.argv[1:])) if typed else (f"meshwise.{verb}(...)",)


def created(
    runs: Path | str,
    verb: str,
    slug: str,
    cluster: "Cluster",
    size: int,
    plan: "Plan | None" = None,
    **facts: object,
) -> Path:
    """Make the run directory, on the rank that leads, with ``facts`` in its provenance. Other ranks
    get ``runs`` and write nothing there."""
    if not leads():
        return Path(runs)
    from meshwise import provenance, store

    collected = provenance.collect(nproc=size) | facts
    with signals.held():
        run_dir = store.create(
            runs,
            verb=verb,
            slug=slug,
            cluster=cluster,
            world_size=size,
            command=command(verb),
            provenance=collected,
            plan=plan,
        )
        signals.last_acts.append(functools.partial(_close, run_dir))
    return run_dir


def _close(run_dir: Path, reason: str) -> None:
    """Record that a run was interrupted, if the program quits while it is running."""
    from meshwise import store
    from meshwise.spec import RunInfo

    if store.read(run_dir / "run.json", RunInfo).status == "running":
        store.finish(run_dir, "interrupted", reason)


def append_failed(
    run_dir: Path,
    case: "Case",
    status: Literal["skipped", "hung", "error"],
    reason: str,
    **metrics: float,
) -> None:
    """Append a sample without times, on the rank that leads."""
    from meshwise import store
    from meshwise.spec import Sample

    if leads():
        sample = Sample(
            case_id=case.id, case=case, status=status, reason=reason, metrics={**metrics}
        )
        store.append(run_dir, sample)


def samples(run_dir: Path) -> dict[str, "Sample"]:
    """Return the samples so far by case; none on a rank without access to the run directory."""
    from meshwise.verbs import files

    if not leads() and not (run_dir / "run.json").exists():
        return {}
    return {sample.case_id: sample for sample in files.load(run_dir)[1]}


def finish(run_dir: Path) -> None:
    """Record in run.json how the run ended, as its samples tell."""
    from meshwise import store
    from meshwise.spec import ending

    if leads():
        info, found, _ = store.load(run_dir)
        if (info.status, info.reason) != ending(found):
            store.finish(run_dir, *ending(found))


@contextlib.contextmanager
def locked(run_dir: Path) -> Iterator[None]:
    """Lock the run while the body runs. Raise ValueError if another process writes to it."""
    if not leads():
        yield
        return
    from meshwise import files

    path = run_dir / "samples.jsonl"
    try:
        lock, is_held = files.lock(path)
    except BlockingIOError:
        raise ValueError(
            f"another process measures into {run_dir}; wait for its end, or start a new run "
            "without --resume"
        ) from None
    except OSError as error:
        raise ValueError(f"{path} cannot be written: {error.strerror}") from None
    try:
        if not is_held:
            log.warning("%s cannot be locked: its file system has no locks", run_dir)
        yield
    finally:
        os.close(lock)


@contextlib.contextmanager
def recorded(run_dir: Path, kept: str) -> Iterator[None]:
    """Record in run.json how the ranks ended; ``kept`` is added to a signal's error.

    torchrun sends SIGTERM if another rank failed. An error already raised here may say which one.
    """
    try:
        with signals.raised(unless_failing=not starts()):
            yield
    except BaseException as error:
        if not leads():
            raise
        from meshwise import store

        outside = {
            KeyboardInterrupt: signals.describe(signal.SIGINT),
            SystemExit: "ended from outside",
        }
        reason = str(error) if isinstance(error, signals.Ended) else outside.get(type(error))
        status = "interrupted" if reason else "failed"
        with contextlib.suppress(OSError, ValueError):  # folder gone: error says more
            store.finish(run_dir, status, reason or str(error) or repr(error))
        if isinstance(error, KeyboardInterrupt):
            raise KeyboardInterrupt(kept) from None
        if isinstance(error, signals.Ended):
            raise signals.Ended(error.number, kept) from None
        raise
