"""The part of ``run --nccl-trace`` around the ranks: it makes NCCL log, and checks the logs;
``compare`` checks those of other programs.

In: a run directory and its plan. Out: ``nccl/rank-<rank>.log``, the lines of calls without the
host's name and without addresses, and ``nccl_check.json``, a ``TraceCheck``.
"""

import logging
import os
from collections.abc import Iterable
from itertools import chain
from pathlib import Path

from msgspec.structs import replace

from meshwise import store
from meshwise.files import read_bytes, read_text, write_whole
from meshwise.options.trace import TraceOptions
from meshwise.spec import AnyModel, Cluster, Layout, Plan, Recipe, WideResNet
from meshwise.spec.op import Dtype
from meshwise.spec.trace import TraceCheck
from meshwise.verbs import files

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


def compare(paths: Iterable[Path | str], asked: TraceOptions) -> TraceCheck:
    """Compare the calls in traces, of one rank or several each, with those of training steps of a
    model or a plan. Of logs of times only compare which messages there are."""
    from meshwise.probe.importers import calls, plan_trace

    found, counted = zip(*map(calls, paths), strict=True)
    if len(set(counted)) > 1:
        raise ValueError("traces of calls beside logs of times: import them one after the other")
    traced = [of_rank for file in found for of_rank in file]
    largest = max(call.num_ranks for of_rank in traced for call in of_rank)
    model, layout, seq_len, dtype, recipe = _step(asked, largest)
    due = plan_trace.expected(model, layout, seq_len, dtype, recipe)
    notes = [f"Planned: {layout.name}, {dtype}, gradients reduced in {recipe.reduce}."]
    if not counted[0]:
        due, traced = plan_trace.each_once(due), [[*dict.fromkeys(chain(*traced))]]
        notes.append("A log of times says which messages there are, not how many: each counts 1.")
    elif asked.steps is None:
        notes.append("Steps: as many as make the counts agree best; --steps says how many.")
    steps = asked.steps if counted[0] else 1
    check = plan_trace.compare(due, traced, steps, alike=layout.pp == 1)
    if largest > layout.num_devices:
        notes.append(f"The layout has {layout.num_devices} ranks, a communicator {largest}.")
    if layout.pp > 1:
        notes.append(
            f"Ranks of a pipeline differ: planned is their mean. It needs {layout.num_devices} "
            f"ranks' logs; there are {len(traced)}."
        )
    return replace(check, notes=(*check.notes, *notes))


def _step(asked: TraceOptions, largest: int) -> tuple[AnyModel, Layout, int, Dtype, Recipe]:
    """Return what decides the calls of a step. ``largest``: ranks of the largest communicator."""
    from meshwise.models import catalogue

    if asked.plan is not None:
        if odd := sorted(asked.said().keys() - {"plan", "steps"}):
            raise ValueError(f"{odd[0]}: the plan says it; leave out {odd[0]} or plan")
        plan = files.take(asked.plan, Plan)
        return plan.model, plan.layout, plan.workload.seq_len, plan.dtype, plan.recipe
    if asked.model is None:
        told = min(asked.said())
        raise ValueError(f"{told}: of which training? give model or plan, or leave out {told}")
    model = catalogue.find_any(asked.model)
    if asked.layout is None and largest < 2:
        raise ValueError(
            'layout: the trace does not say how many ranks there were; give it, as {"dp": 8, '
            '"zero": 3}'
        )
    layout = files.record(asked.layout or Layout(dp=largest, zero=3), Layout)
    seq_len = asked.seq_len or (1 if isinstance(model, WideResNet) else model.max_seq_len)
    return model, layout, seq_len, asked.param_dtype, Recipe(reduce=asked.reduce_dtype)
