"""What the ranks are asked to do with a plan, and doing it: training, inference or decoding.

In: a plan and an ``Order``. Out: a run directory that holds one sample of op ``step``, or says why
there is none.
"""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from meshwise import store
from meshwise.patience import USUAL, Patience
from meshwise.spec import Plan, Record, RunInfo, Sample, case_of, ending
from meshwise.verbs import job
from meshwise.verbs.reports import check_writable

log = logging.getLogger("meshwise")

Mode = Literal["train", "infer", "decode"]


class Order(NamedTuple):
    """How often, and what besides; ``engine.train``, ``infer`` and ``decode`` have the meanings.

    Of inference a step is a batch; decoding has ``new_tokens`` instead of steps, behind prompts of
    the plan's sequence length.
    """

    steps: int
    warmup: int
    mode: Mode = "train"
    seed: int = 0
    data: str | None = None
    checked: bool = False
    driver_time: bool = False
    save: str | None = None
    save_every: int | None = None
    resume_from: str | None = None
    in_flight: int = 4
    new_tokens: int = 64
    profile: bool = False
    find_nonfinite: bool = False
    patience: Patience = USUAL

    @property
    def target(self) -> str:
        """The function that every rank calls."""
        return f"meshwise.engine.{self.mode}:run_ranks"

    def request(self, plan: Plan, run_dir: Path) -> Record:
        """What that function is told."""
        if self.mode == "decode":
            return self._decoding(plan, run_dir)
        if self.mode == "infer":
            from meshwise.engine.infer import InferRequest

            return InferRequest(
                plan=plan,
                run_dir=str(run_dir),
                steps=self.steps,
                warmup=self.warmup,
                seed=self.seed,
                in_flight=self.in_flight,
                driver_time=self.driver_time,
            )
        from meshwise.engine.train import TrainRequest

        return TrainRequest(
            plan=plan,
            run_dir=str(run_dir),
            steps=self.steps,
            warmup=self.warmup,
            seed=self.seed,
            data=self.data,
            checked=self.checked,
            driver_time=self.driver_time,
            save=self.save,
            save_every=self.save_every,
            resume_from=self.resume_from,
            profile=self.profile,
            find_nonfinite=self.find_nonfinite,
        )

    def _decoding(self, plan: Plan, run_dir: Path) -> Record:
        from meshwise.engine.decode import DecodeRequest

        return DecodeRequest(
            plan=plan,
            run_dir=str(run_dir),
            prompt_len=plan.workload.seq_len,
            new_tokens=self.new_tokens,
            batch=plan.workload.global_batch_size,
            seed=self.seed,
        )

    def check(self, plan: Plan) -> None:
        """Refuse, before any process starts, what the ranks could not do."""
        if self.mode == "decode":
            from meshwise.engine.decode import DecodeRequest, plan_for

            request = self.request(plan, Path())
            assert isinstance(request, DecodeRequest)
            plan_for(request)
        first = 0
        if self.resume_from is not None:
            from meshwise.engine import checkpoint

            first = checkpoint.checked(self.resume_from, plan, self.seed).step
        if self.save is not None:
            check_writable([self.save])
        if self.data is not None:
            from meshwise.engine.data import batches

            batches(
                plan.model,
                plan.workload,
                steps=self.steps + self.warmup + 1,
                seed=self.seed,
                file=self.data,
                rows=slice(0, 0),
                first=first,
            )
        if plan.recipe.attention != "auto" and self.mode != "decode":
            import torch

            from meshwise.engine import kernels

            kernels.choose(plan.recipe, torch.device(plan.cluster.device.kind), plan.dtype)


def carry_out(
    plan: Plan,
    order: Order,
    runs: Path | str,
    *,
    slug: str = "",
    environment: Mapping[str, str] | None = None,
    run_dir: Path | None = None,
    finished: Sequence[Path] = (),
) -> Path:
    """Start the ranks, or join those that a launcher started, and wait for their end.

    Returns the run directory (of a rank that does not lead ``runs``). However it ends, run.json
    says so; ``finished`` is what to tell after Ctrl-C.
    """
    from meshwise import launch

    size = plan.layout.num_devices
    slug = slug or f"{plan.model.name}-{plan.layout.name}"
    run_dir = run_dir or job.created(runs, "run", slug, plan.cluster, size, plan)
    log.info("%s %s on %d ranks, into %s", plan.model.name, plan.layout.name, size, run_dir)
    kept = f"finished: {', '.join(map(str, finished)) or 'no layout'}"
    request = order.request(plan, run_dir)
    try:
        with job.recorded(run_dir, kept):
            launch.run(
                order.target, request, nproc=size, patience=order.patience, environment=environment
            )
    except BaseException:
        if job.leads() and order.mode == "train":
            _keep_steps(plan, run_dir)
        raise
    if job.leads():
        _draw_timelines(plan, run_dir)
        if store.read(run_dir / "run.json", RunInfo).status == "running":
            samples = store.load(run_dir)[1]
            wrong = [one.reason for one in samples if one.status == "error"]
            store.finish(run_dir, *(("failed", wrong[0]) if wrong else ending(samples)))
    return run_dir


def _keep_steps(plan: Plan, run_dir: Path) -> None:
    """Of a training that broke off: the steps until then, as a sample that says why."""
    from meshwise.timing import METHOD_VERSION

    if not (steps := store.steps(run_dir)):
        return
    info, samples, _ = store.load(run_dir)
    if samples:
        return
    case = case_of(plan, "train")
    sample = Sample(
        case_id=case.id,
        case=case,
        status="error",
        reason=f"it broke off: {info.reason}",
        method_version=METHOD_VERSION,
        times_s=tuple(step.time_s for step in steps),
    )
    store.append(run_dir, sample)


def _draw_timelines(plan: Plan, run_dir: Path) -> None:
    """Of a profiled step, and of what was predicted, in one form."""
    if not (run_dir / "phases.json").exists():
        return
    from meshwise import timeline
    from meshwise.spec.phases import Phases

    spans = store.read(run_dir / "phases.json", Phases).spans
    timeline.write(run_dir / "timeline.json", plan.layout, spans)
    if plan.prediction is not None:
        timeline.write(run_dir / "predicted.json", plan.layout, timeline.predicted(plan))
