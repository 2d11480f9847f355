"""The options of ``plan``."""

from dataclasses import dataclass, field
from typing import Annotated, Literal, cast, get_args

from meshwise.options import (
    PYTHON,
    Content,
    File,
    Layouts,
    Many,
    Options,
    Range,
    SomeLanguageModel,
    SomeLayout,
    SomeRecipe,
    Time,
)
from meshwise.options.models import DECODERS, MODELS
from meshwise.spec.recipe import AttentionBackend
from meshwise.units import parse_count, some_rate, some_seconds

_Load = Literal["mean", "p95"]
_COMPUTED = [name for name in DECODERS if not name.startswith(("gpt-oss", "llama-4"))]
_MODEL = (
    f"One of {', '.join((*MODELS, *_COMPUTED))}, moe-380m and Alpa's others, or a Hugging Face "
    "config.json; by default a GPT that fills the cluster."
)


@dataclass(frozen=True, kw_only=True)
class PlanOptions(Options):
    """The model to plan, for which cluster, by which prices."""

    model: SomeLanguageModel | None = field(default=None, kw_only=False, metadata={"help": _MODEL})
    gpus: Annotated[int | None, PYTHON] = None
    "Devices to use, all of the cluster by default; ranks on a CPU count as devices."
    cluster: File | None = None
    (
        "Plan by the data sheet of this cluster: a cluster.toml, or one that comes with Meshwise "
        "(b200-hgx, dgx-a100-80gb, h100-hgx, h200-hgx, p3.16xlarge, p4d.24xlarge)."
    )
    hosts: int | None = None
    "How many such hosts; the data sheet gives the links between them."
    costs: File | None = None
    "Prices of the cluster to plan for: costs.json, unless --cluster is given."
    measured_only: bool = False
    "Refuse prices of data sheets: a missing measurement is then an error."
    global_batch_size: Many | None = None
    (
        "Sequences in a step; 8 a device of the cluster by default, at least 32 (on CPUs 2 and 8). "
        "Of several, as 256,512,1024: plan the one with the most tokens a second."
    )
    seq_len: int | None = None
    (
        "Tokens in a sequence; 1,024 by default (on CPUs 128), or the model's length if that is "
        "shorter. A model's longer one has to be given, as 8192."
    )
    seq_lens: File | None = None
    (
        "A file of lengths of sequences, in tokens: also say how long steps take if microbatches "
        "are padded to their longest sequence."
    )
    expert_load: Many = "mean"
    (
        "Rows of the busiest rank's experts: mean, an equal share; p95, the 95th percentile if "
        "tokens choose experts at random; or a number, as 1.4: so many equal shares."
    )
    top: Annotated[int, Range(1)] = 10
    "How many layouts to keep."
    space: tuple[str, ...] = ()
    (
        "Search only these layouts, as zero-3, uniform or data_parallel_only (Alpa's names), or "
        "with a field as tp=4; may be repeated. docs/plan.md lists them."
    )
    layout: SomeLayout | None = None
    (
        'Price this layout instead of searching, JSON or a file of it, for example {"pp": 2, '
        '"dp": 2, "schedule": "1f1b", "num_microbatches": 4}; docs/formats.md lists the fields.'
    )
    megatron_args: Content | None = None
    (
        "Price what Megatron-LM's flags say: a text of them, a file, or a script that lists them. "
        "They give model, workload, layout and recipe; flags on which no plan depends are named."
    )
    torchtitan: File | None = None
    "The same of torchtitan's job file, as llama3_8b.toml. MODEL replaces the file's flavor."
    recipe: SomeRecipe | None = None
    (
        'Plan for this recipe, JSON or a file of it as for run, for example {"weights": "bf16", '
        '"reduce": "bf16"}; docs/plan.md lists what it may change.'
    )
    attention: str | None = None
    (
        "The back end of attention, by default the recipe's: auto, cudnn, flash, efficient, math. "
        "Of several, as auto,cudnn,flash: plan the fastest, and auto where they tie."
    )
    why_not: Layouts = ()
    (
        "Also compare this layout with the plan, JSON or a file of it as for --layout: whether it "
        "is legal, fits, and in which parts of the step it loses; may be repeated."
    )
    refit_to: File | None = None
    (
        "Also say what it costs to move the weights to this plan, as one of inference: plan.json. "
        "Of dense GPTs."
    )
    what_if: bool = False
    (
        "Also search with 10 GB more memory a device, twice the network, twice the links within a "
        "host and twice the batch, each alone: what is best then, and how much faster."
    )
    fewest: bool = False
    (
        "Plan for the fewest devices on which the model fits with this batch: of those that divide "
        "a host, then of whole hosts, up to the cluster's."
    )
    deadline: Time | None = None
    "Plan for the count of devices that takes --tokens within this time, as 10d, most cheaply."
    tokens: Many | None = None
    "Tokens (or images) of the whole training, as 300B."
    goodput: bool = False
    (
        "Also count failures, checkpoints and restarts: the share of the time that trains, how "
        "often to save a checkpoint, and what --tokens and --deadline then take."
    )
    mtbf_per_gpu: Time | None = None
    "Mean time between failures of a device with its share of the host; 50,700h by default."
    checkpoint: Time | None = None
    (
        "How long a checkpoint stops training, as 30s, or the rate at which all ranks together "
        "write it, as 2TB/s; 1GB/s a host by default."
    )
    restart: Time | None = None
    "How long it takes from a failure to training again; 10m by default."
    price_per_gpu_hour: float | None = None
    "Dollars of a device hour: what the plan costs for a million tokens, and for --tokens."
    watts: float | None = None
    "Power of a device with all that it needs: the energy likewise."
    measure_ties: Time | None = None
    (
        "Also run the layouts that tie with the first on this machine, each once for some steps, "
        "at most two beyond this time, as 120s, and rank them by what they took."
    )
    trace: File | None = None
    "Also write the predicted step of every rank here, for ui.perfetto.dev."
    out: File = "plan.json"
    "The file to write."

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("price_per_gpu_hour", "watts"):
            if (rate := getattr(self, name)) is not None and not 0 < rate < float("inf"):
                raise ValueError(f"{name} = {rate}: must be > 0")
        sizing = [name for name in ("fewest", "deadline") if getattr(self, name)]
        searched = [name for name in ("what_if", "space", "measure_ties") if getattr(self, name)]
        others = [name for name in ("megatron_args", "torchtitan") if getattr(self, name)]
        said = ("layout", "recipe", "global_batch_size", "seq_len", *reversed(others))
        for name in said if others else ():
            if name != others[0] and getattr(self, name) is not None:
                raise ValueError(f"{name}: {others[0]} says it, too; leave one of them out")
        for name in (*sizing, *searched) if self.layout is not None or others else ():
            raise ValueError(f"{name}: it searches, and a layout is given; leave one of them out")
        if sizing and self.gpus is not None:
            raise ValueError(
                f"gpus = {self.gpus}: --{sizing[0]} chooses how many; leave one of them out"
            )
        several = {"global_batch_size": len(self.batches) > 1, "attention": len(self.backends) > 1}
        for asked in [name for name, are in several.items() if are]:
            for name in ("layout", "fewest", "deadline", *({*several} - {asked})):
                if several.get(name, getattr(self, name)):
                    raise ValueError(
                        f"{asked} = {getattr(self, asked)!r}: several are searched with --gpus "
                        f"alone; give one of them, or leave --{name.replace('_', '-')} out"
                    )
        if len(sizing) > 1:
            raise ValueError(
                f"deadline = {self.deadline!r}: --deadline and --fewest both choose how many "
                "devices; leave one of them out"
            )
        given = [name for name in ("mtbf_per_gpu", "checkpoint", "restart") if getattr(self, name)]
        if self.failures is None and given:
            raise ValueError(
                f"{given[0]} = {getattr(self, given[0])!r}: is a part of --goodput, which was not "
                "given; add it, or leave this out"
            )
        if self.num_tokens is None and self.deadline_s is not None:
            raise ValueError(
                f"deadline = {self.deadline!r}: say for how many tokens, as --tokens 300B"
            )

    @property
    def batches(self) -> tuple[int, ...]:
        """The batches asked for; none if the default is."""
        if self.global_batch_size is None:
            return ()
        words = str(self.global_batch_size).split(",")
        if wrong := [word for word in words if not (word.strip().isdecimal() and int(word))]:
            raise ValueError(
                f"global_batch_size = {self.global_batch_size!r}: {wrong[0]!r} must be a number "
                "of sequences >= 1, as 512"
            )
        return tuple(dict.fromkeys(map(int, words)))

    @property
    def backends(self) -> tuple[AttentionBackend, ...]:
        """The back ends of attention asked for; none if the recipe's is."""
        words, known = (self.attention or "").split(","), get_args(AttentionBackend)
        if self.attention is not None and (wrong := [word for word in words if word not in known]):
            raise ValueError(
                f"attention = {self.attention!r}: {wrong[0]!r} must be one of {', '.join(known)}"
            )
        return tuple(dict.fromkeys(cast("list[AttentionBackend]", filter(None, words))))

    @property
    def load(self) -> _Load | float:
        """The rows of the busiest rank's experts: of ``Experts.load``."""
        given = self.expert_load
        if given in get_args(_Load):
            return cast("_Load", given)
        try:
            found = float(given)
        except ValueError:
            found = 0.0
        if not 1 <= found < float("inf"):
            raise ValueError(f"expert_load = {given!r}: must be mean, p95, or >= 1, as 1.4")
        return found

    @property
    def deadline_s(self) -> float | None:
        """The deadline in seconds."""
        return None if self.deadline is None else some_seconds("deadline", self.deadline)

    @property
    def ties_s(self) -> float | None:
        """The seconds to run layouts that tie."""
        return (
            None if self.measure_ties is None else some_seconds("measure_ties", self.measure_ties)
        )

    @property
    def num_tokens(self) -> float | None:
        """The tokens of the whole training."""
        if self.tokens is None:
            return None
        if not (found := parse_count(str(self.tokens), "tokens")):
            raise ValueError(f"tokens = {self.tokens!r}: must be > 0, as 300B")
        return found

    @property
    def failures(self) -> dict[str, float] | None:
        """The keywords of ``search.goodput`` that were given; None if it was not asked for."""
        if not self.goodput:
            return None
        is_rate = str(self.checkpoint).endswith("/s")
        asked = {
            "device_s": ("mtbf_per_gpu", some_seconds),
            "bytes_per_s" if is_rate else "checkpoint_s": (
                "checkpoint",
                some_rate if is_rate else some_seconds,
            ),
            "restart_s": ("restart", some_seconds),
        }
        return {
            word: read(name, given)
            for word, (name, read) in asked.items()
            if (given := getattr(self, name)) is not None
        }

    @property
    def billed(self) -> tuple[float, ...]:
        """The numbers of tokens to make bills of: a million, and all."""
        rates = (self.price_per_gpu_hour, self.watts, self.num_tokens)
        if all(rate is None for rate in rates):
            return ()
        return (1e6,) if self.num_tokens is None else (1e6, self.num_tokens)
