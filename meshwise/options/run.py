"""The options of ``run``."""

from dataclasses import dataclass, field
from typing import Annotated, Literal, NamedTuple

from meshwise.options import (
    PYTHON,
    File,
    Flag,
    Options,
    Positive,
    Range,
    SomeLayout,
    SomeModel,
    SomeRecipe,
    Started,
)


@dataclass(frozen=True, kw_only=True)
class Given(Options):
    """A plan, or a model to run without one."""

    plan: File | None = field(default=None, kw_only=False)
    "The plan to execute; plan.json by default."
    model: SomeModel | None = None
    "Run this model without a plan: a name of any family, a Hugging Face config.json or a record."
    layout: SomeLayout | None = None
    'A file or JSON, for example {"tp": 2, "microbatch_size": 4}; dp over all devices by default.'
    recipe: SomeRecipe | None = None
    'A file or JSON, for example {"optimizer": "sgd", "max_grad_norm": 0}.'
    global_batch_size: int | None = None
    "Sequences or images in a step; by default those of the layout."
    seq_len: int | None = None
    "Tokens in a sequence."
    dtype: Literal["bf16", "fp32"] | None = None
    "In what it computes: bf16 on GPUs and fp32 on CPUs by default."
    lowering: Literal["eager", "compiled"] | None = None
    "Compiled layers on GPUs and eager ones on CPUs by default."
    cluster: File = "cluster.toml"
    "The machine; one without the file is looked at."


class RunCounts(NamedTuple):
    """The numbers that say how much a run times."""

    steps: int
    warmup: int
    in_flight: int = 4
    new_tokens: int = 64

    @property
    def all_steps(self) -> int:
        return self.warmup + 1 + self.steps  # the first after the warm-up is not timed


USUAL = {"cuda": RunCounts(20, 3), "cpu": RunCounts(5, 1)}


@dataclass(frozen=True, kw_only=True)
class Course(Options):
    """The options of training, inference or decoding that ranks get."""

    mode: Literal["train", "infer", "decode"] = "train"
    "Training steps, batches of inference, or tokens decoded one by one."
    steps: Positive = None
    "Training steps or batches to time; 20 on GPUs and 5 on CPUs by default."
    warmup: Positive = None
    "Untimed ones before them; 3 on GPUs and 1 on CPUs by default."
    rivals: int = 0
    "Also run this many of the plan's runners-up."
    check: bool = False
    "Compare the losses of three steps with one device, in fp32 (images: fp64)."
    profile: bool = False
    "Where a step's time goes: forward, backward, exposed communication, bubble; a timeline."
    find_nonfinite: bool = False
    "Name the module where a loss that is not finite begins."
    nccl_trace: bool = False
    "On the GPUs of one host: compare the collectives that NCCL logs with the plan's."
    driver_time: Annotated[bool, Flag("profile_driver_time")] = False
    "Time the whole loop from rank 0 with no barrier; of inference several batches are under way."
    data: File | None = None
    "A file of tokens; by default they are random."
    seed: Annotated[int, Range(0)] = 0
    "Of weights and data."
    in_flight: Positive = None
    "Batches of streamed inference under way at once; 4 by default."
    new_tokens: Annotated[int | None, Range(2)] = None
    "Tokens to decode behind each sequence; 64 by default."
    save: File | None = None
    "Write a checkpoint into this folder at the end."
    save_every: Positive = None
    "And after each so many steps."
    resume_from: File | None = None
    "Go on with the checkpoint in this folder, under any layout."
    resume: bool = False
    "Go on with the checkpoint in --save, if any, to the step asked for; one or two left are three."

    def check_mode(self) -> None:
        """Refuse what does not go with the mode, or with the rest."""
        mode, given = self.mode, self.said()
        of = {"new_tokens": ("decode", "decoding"), "in_flight": ("infer", "inference")}
        of |= dict.fromkeys(("data", "check", "save", "resume_from", "resume", "profile",
                             "find_nonfinite"), ("train", "training"))  # fmt: skip
        for name, (only, called) in of.items():
            if name in given and mode != only:
                raise ValueError(f"{name}: only {called} has it; leave it out, or {only}")
        if self.save_every is not None and self.save is None:
            raise ValueError(f"save_every = {self.save_every}: there is no folder; give --save")
        if self.resume and (self.save is None or self.resume_from is not None):
            raise ValueError("resume: goes on with the folder of --save; give that alone")
        for name in ("steps", "warmup") if mode == "decode" else ():
            if name in given:
                fix = "leave it out, or give --new-tokens"
                raise ValueError(f"{name}: decoding counts tokens; {fix}")
        if mode == "decode" and self.driver_time:
            raise ValueError("driver_time: decoding has no other clock; leave it out")

    def counts(self, device_kind: str) -> RunCounts:
        """Return the numbers, the usual ones where none was given."""
        given = {name: getattr(self, name) for name in RunCounts._fields}
        return USUAL[device_kind]._replace(**{k: n for k, n in given.items() if n is not None})


@dataclass(frozen=True, kw_only=True)
class RunOptions(Started, Course, Given):
    """Execute a plan, or a model in a layout."""


@dataclass(frozen=True, kw_only=True)
class Suite(RunOptions):
    """The suites of Alpa's benchmark, and its flags."""

    suite: str | None = None
    "Run the cases of this suite for the number of devices, by default all of the cluster."
    list_suites: bool = False
    "Name the suites, the sweeps, and the numbers of devices that they have cases for."
    cases: Annotated[tuple[int, ...], Flag("case"), Range(0)] = ()
    "Only this case of the suite, by its number in --dry-run; may be repeated."
    sweep: str | None = None
    "Run a suite on every shape of the cluster, as the source's run_exp: gpt, moe_inference, ..."
    space: tuple[str, ...] = ()
    (
        "Search each case's layout among these, as plan --space; without it only a case that asks "
        "for a search is searched, in the space it names. May be repeated."
    )
    costs: File | None = None
    "Prices for searches; by default costs.json if it exists, else data sheets."
    niter: int | None = None
    "Iterations of a case, 3 by default; the first, from 5 on the first two, are not counted."
    shard_only: bool = False
    "Refuse pipelines."
    local: bool = False
    "Start the ranks here, not under a launcher."
    profile_stage_execution_time: bool = False
    "Of inference: print each stage's latency and where the trace is."
    exp_name: str = "default"
    "Name of the table: rows are appended to NAME.tsv."
    scale_to_fit: bool = False
    "Make the sizes of a case smaller until they fit a device, and on CPUs take seconds."
    num_hosts: Annotated[int, PYTHON] = 1
    "Hosts that the ranks are on."
