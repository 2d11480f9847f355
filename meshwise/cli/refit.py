"""``meshwise refit``: Megatron's refit benchmark under its flags, and more."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

import meshwise
from meshwise.cli.options import ANY, Json, Size, alone, flags
from meshwise.cli.output import DONE, code_of, emit, on_rank_0, say
from meshwise.options import rules
from meshwise.options.refit import Inference, ModelSizes, RefitOptions, Training
from meshwise.spec.weights import Order

if TYPE_CHECKING:
    from meshwise.spec.refit import Forecast

log = logging.getLogger("meshwise")

CHANGED = 0.02  # at most this share of bf16 weights changes in a reinforcement learning step
# Weights depend on them, and scenarios have none: said apart from flags that only trainings have.
_SHAPES = ("--kv-channels", "--multi-latent-attention", "--add-qkv-bias", "--qk-layernorm",
           "--moe-shared-expert-intermediate-size", "--moe-layer-freq")  # fmt: skip


def megatrons(words: Sequence[str]) -> list[str]:
    """Return Megatron's flags among words that are no flags of this verb; refuse other words, with
    the nearest."""
    from meshwise.cli import allocation
    from meshwise.models.configured import flags as megatron

    records = (RefitOptions, Training, Inference, ModelSizes)
    own = {rule.name or name for one in records for name, rule in rules(one).items()}
    for astray in filter(None, map(allocation.astray, words)):
        raise ValueError(astray)
    found = list[str]()
    for name, behind in megatron.split(words, {f"--{one.replace('_', '-')}": "" for one in own}):
        if not name:
            raise ValueError(f"{behind[0]}: not understood here; --help lists what is")
        found.append(name)
    return found


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class Typed:
    """Flags that only the command line has."""

    bf16: bool = False
    "Weights in bf16; of --model the default. Megatron's scenarios are fp32, others bf16."
    fp16: bool = False
    "Weights in fp16."
    fp32: bool = False
    "Weights in fp32."
    train_order: Order = "megatron"
    "Names and order within fused tensors of training."
    inference_order: Order = "engine"
    "The same of inference; engine is vLLM's, hf and hf-fused are Hugging Face's."
    tp: int | None = None
    "Short for --rl-inference-tensor-model-parallel-size."
    delta: bool = False
    "Send only what changed: --changed, by default 0.02, of the weights."
    check: Annotated[bool, Parameter(negative="--no-check")] = True
    "Compare every destination element once, outside the timing."


AS_SCENARIO, AS_TRAINED, AS_MODEL, AS_TYPED, USUAL = (
    Training(), Inference(), ModelSizes(), Typed(), RefitOptions()
)  # fmt: skip


def refit(
    *others: Annotated[str, Parameter(show=False, allow_leading_hyphen=True)],
    asked: Annotated[RefitOptions, flags(RefitOptions)] = USUAL,
    train: Annotated[Training, flags(Training)] = AS_SCENARIO,
    infer: Annotated[Inference, flags(Inference)] = AS_TRAINED,
    sizes: Annotated[ModelSizes, flags(ModelSizes)] = AS_MODEL,
    typed: Typed = AS_TYPED,
    step_time: str | None = None,
    list_: Annotated[bool, Parameter(name="--list")] = False,
    size: Size = ANY,
    json: Json = False,
) -> int:
    """Move a model's weights from a training to an inference layout; time and check it.

    Weights are synthetic, and every element is compared. --dry-run needs no GPU and says what would
    move. In a training loop use meshwise.Refit. All flags of Megatron-LM are taken; those that
    are not listed here are named and ignored.

    Parameters
    ----------
    step_time
        Time of a training step, as 2s: shows which share of it a refit takes.
    list_
        List the scenarios and do nothing.
    """
    _ignore(megatrons(others))
    if list_:
        alone("--list", {name for one in (asked, train, infer, sizes) for name in one.said()})
        return _list(json)
    step_s = _step_s(step_time)
    if typed.tp is not None and "tp" in infer.said():
        raise ValueError(f"tp = {typed.tp}: inference's is given twice; leave one out")
    found = meshwise.refit(
        replace(
            asked,
            train=train.said(),
            infer=infer.said() | ({} if typed.tp is None else {"tp": typed.tp}),
            sizes=sizes.said(),
            dtype=_dtype(typed),
            orders=(typed.train_order, typed.inference_order),
            changed=_changed(asked, typed),
            check=typed.check,
            nproc=size.ranks,
        )
    )
    if isinstance(found, list):
        return _forecasts(found, step_s, json)
    return _results(found, step_s, json)


def _ignore(flags: list[str]) -> None:
    """Name Megatron's flags that do nothing here, first those that weights depend on."""
    for said, names in (
        (", though weights depend on it", _SHAPES),
        ("", sorted({*flags} - {*_SHAPES}, key=flags.index)),
    ):
        if ignored := [name for name in names if name in flags]:
            log.info("ignored%s: %s", said, ", ".join(ignored))


def _dtype(typed: Typed) -> str | None:
    dtypes = [dtype for dtype in ("bf16", "fp16", "fp32") if getattr(typed, dtype)]
    if len(dtypes) > 1:
        raise ValueError(f"--{' and --'.join(dtypes)}: give one of them")
    return dtypes[0] if dtypes else None


def _changed(asked: RefitOptions, typed: Typed) -> float | None:
    """Return the share of weights that changes; None if all are sent."""
    if not typed.delta and asked.changed is not None:
        raise ValueError(
            f"changed = {asked.changed}: only --delta sends changed weights alone; add it"
        )
    return CHANGED if typed.delta and asked.changed is None else asked.changed


def _step_s(text: str | None) -> float | None:
    from meshwise.units import parse_seconds

    step_s = None if text is None else parse_seconds(text, "step_time")
    if step_s is not None and not 1e-9 <= step_s < 1e9:
        raise ValueError(f"step_time = {text!r}: must be some time, as 2s")
    return step_s


def _list(json: bool) -> int:
    from meshwise.pages import refit as page
    from meshwise.probe.cases import refit as cases

    numbers = {
        names[0]: number
        for number, (names, methods) in cases.MENU.items()
        if len(names) == 1 and not methods
    }
    rows = [
        (one, cases.num_ranks(one, one.mode), numbers.get(one.name, ""))
        for one in cases.scenarios().values()
    ]
    document = [
        {"scenario": one, "gpus": gpus, "menu": menu, "command": page.command(one)}
        for one, gpus, menu in rows
    ]
    emit(document, page.listing(rows), json)
    return DONE


def _forecasts(found: "list[Forecast]", step_s: float | None, json: bool) -> int:
    from meshwise.pages import refit as page

    emit(found, page.forecasts(found, step_s), json)
    return DONE


@on_rank_0
def _results(run_dir: Path, step_s: float | None, json: bool) -> int:
    """Print the log's lines, then tables; with --json only the document."""
    from meshwise import store
    from meshwise.pages import refit as page
    from meshwise.pages import samples

    info, measured, _ = store.load(run_dir)
    best = page.recommended(measured)
    document = samples.document(run_dir, info, measured)
    document |= {"recommended": best and best.case_id, "step_s": step_s}
    if not json:
        say(*(line for sample in measured for line in page.log_lines(sample)), "")
    tables = [samples.state(info, measured), *page.tables(measured, step_s)]
    emit(document, [*tables, *samples.failed(measured)], json)
    return code_of(sample.status for sample in measured)
