"""The part of ``run --nccl-trace`` around the ranks: it makes NCCL log, and checks the logs.

In: a run directory and its plan. Out: ``nccl/rank-<rank>.log``, the lines of calls without the
host's name and without addresses, and ``nccl_check.json``, a ``TraceCheck``.
"""

import logging
import os
from pathlib import Path

from meshwise import store
from meshwise.files import read_bytes, read_text, write_whole
from meshwise.spec import Cluster, Plan
from meshwise.spec.trace import TraceCheck

log = logging.getLogger("meshwise")

CHECK = "nccl_check.json"
MOST_BYTES = 2**30  # limit of a rank's log


def check_possible(cluster: Cluster, *, check: bool) -> None:
    """Refuse settings that give no trace, or a trace of more than the plan's steps."""
    if cluster.device.kind != "cuda":
        raise ValueError("--nccl-trace needs GPUs: gloo writes no trace")
    if check:
        raise ValueError("--nccl-trace would also record the steps of --check; run them separately")
    if "RANK" in os.environ or os.environ.get("SLURM_STEP_NUM_TASKS", "1") != "1":
        raise ValueError("--nccl-trace starts the ranks itself; use it without torchrun or srun")


def environment(run_dir: Path) -> dict[str, str]:
    """Return the variables that make NCCL log, each rank into a file of its own."""
    folder = (run_dir / "nccl").resolve()
    folder.mkdir()
    file = str(folder / "rank-{rank}.log").replace("%", "%%")  # NCCL fills in %h and %p
    return {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "COLL", "NCCL_DEBUG_FILE": file}


def keep_calls(run_dir: Path) -> None:
    """Cut the logs down to the lines of calls, because other lines may name hosts and addresses."""
    from meshwise.probe.importers import nccl_trace

    for path in sorted((run_dir / "nccl").glob("rank-*.log")):
        text = read_bytes(path, at_most=MOST_BYTES).decode(errors="replace")
        if torn := nccl_trace.torn(text):
            log.warning("%s: %d lines of calls cannot be read", path.name, len(torn))
        write_whole(path, nccl_trace.without_host(text))


def write_check(run_dir: Path, plan: Plan, steps: int) -> TraceCheck:
    """Compare the logs of all ranks, over all steps, with the plan."""
    from meshwise.probe.importers import nccl_trace, plan_trace

    found = []
    for rank in range(plan.layout.num_devices):
        path = run_dir / "nccl" / f"rank-{rank}.log"
        if not path.exists():
            log.warning("rank %d left no NCCL log", rank)
        text = read_text(path, at_most=MOST_BYTES) if path.exists() else ""
        found.append(nccl_trace.calls(text))
    check = plan_trace.compare(plan_trace.planned(plan), found, steps)
    store.write(run_dir / CHECK, check)
    return check


def read_check(run_dir: Path) -> TraceCheck:
    return store.read(run_dir / CHECK, TraceCheck)
