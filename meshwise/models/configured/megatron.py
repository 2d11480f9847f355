"""Plans as Megatron-LM's flags, and its flags as a model, a workload, a layout and a recipe.

Its stages are in our order. Of a batch it makes as many microbatches as the data ranks leave.
"""

import shlex
from functools import partial
from typing import Any

from meshwise.models.configured import (
    Configured,
    ConfigValues,
    divided,
    of_stages,
    text_of,
)
from meshwise.models.configured.flags import parsed
from meshwise.models.configured.megatron_model import Flags, flags_of, model_of, unrolled
from meshwise.spec import LanguageModel, Layout, Plan, Recipe, Workload
from meshwise.spec.layout import Cuts
from meshwise.spec.recipe import AttentionBackend, Optimizer

_NAME = "Megatron-LM"
_SHARDED = {2: "optim_grads", 3: "optim_grads_params"}
_BACKENDS: dict[AttentionBackend, str] = {
    "auto": "auto", "cudnn": "fused", "flash": "flash", "math": "unfused"
}  # fmt: skip
_OPTIMIZERS: dict[Optimizer, str] = {"adamw": "adam", "sgd": "sgd"}
# What changes a step or its memory, and is not in any plan; named apart from the others.
_UNPLANNED = (
    "--mtp-num-layers", "--window-size", "--hybrid-layer-pattern", "--linear-attention-freq",
    "--heterogeneous-layers-config-path", "--spec", "--squared-relu", "--quick-geglu",
    "--moe-expert-capacity-factor", "--moe-shared-expert-overlap", "--cpu-offloading",
    "--overlap-moe-expert-parallel-comm", "--optimizer-cpu-offload", "--fp4-format",
    "--use-precision-aware-optimizer", "--account-for-embedding-in-pipeline-split",
    "--account-for-loss-in-pipeline-split",
)  # fmt: skip


def text(plan: Plan) -> tuple[str, tuple[str, ...]]:
    """Write a plan as flags, one a line; return them and what of the plan they do not say."""
    return text_of(plan, _NAME, _flags, partial(read, devices=0, model=None))


def _flags(plan: Plan, model: LanguageModel) -> tuple[str, list[str]]:
    notes = []
    if plan.layout.recompute == "selective":
        notes.append("recompute selective: activation functions of dense layers are kept")
    flags = [*flags_of(model), *_of_layout(plan, model), *_of_recipe(plan, model)]
    said = [flag for flag in flags if flag[1] is not False and flag[1] is not None]
    return "".join(f"{name}{_value(value)}\n" for name, value in said), notes


def _value(value: Any) -> str:
    """Return the words behind a flag as a shell reads them."""
    words = value if isinstance(value, tuple) else () if value is True else (value,)
    return "".join(
        f" {int(word) if isinstance(word, float) and word.is_integer() else shlex.quote(str(word))}"
        for word in words
    )


def _of_layout(plan: Plan, model: LanguageModel) -> Flags:
    layout = plan.layout
    inside = layout.of_rank(0)
    ep_inside_tp = inside.cuts.experts == "experts"
    yield "--seq-length", plan.workload.seq_len
    yield "--micro-batch-size", inside.microbatch_size
    yield "--global-batch-size", plan.workload.global_batch_size
    yield "--tensor-model-parallel-size", inside.tp
    yield "--sequence-parallel", inside.placed.stream == "seq"
    yield "--context-parallel-size", layout.cp
    yield "--pipeline-model-parallel-size", layout.pp
    yield from _of_stages(layout, model.layers)
    if model.experts is not None:
        yield "--expert-model-parallel-size", inside.expert_ranks
        yield "--expert-tensor-parallel-size", 1 if ep_inside_tp else inside.tp
    yield "--use-distributed-optimizer", layout.zero > 0
    if layout.zero > 1:
        yield "--use-megatron-fsdp", True
        yield "--data-parallel-sharding-strategy", _SHARDED[layout.zero]
        yield "--ckpt-format", "fsdp_dtensor"
        yield "--no-gradient-accumulation-fusion", True
    if layout.replicas > 1:
        yield "--num-distributed-optimizer-instances", layout.replicas
    if layout.recompute == "full":
        yield "--recompute-granularity", "full"
        yield "--recompute-method", "block" if layout.recompute_layers else "uniform"
        yield "--recompute-num-layers", layout.recompute_layers or 1
    if layout.recompute == "selective":
        yield "--recompute-granularity", "selective"
        yield "--recompute-modules", ("layernorm", *["moe_act"] * bool(model.experts))


def _of_stages(layout: Layout, num_layers: int) -> Flags:
    if layout.pp == 1:
        return
    layers = [len(stage) for stage in layout.stage_layers(num_layers)]
    first, *middle, last = layers
    if not of_stages(tuple(layers)):
        if layout.stages_per_rank > 1:
            yield "--num-virtual-stages-per-pipeline-rank", layout.stages_per_rank
    elif layout.stages_per_rank == 1 and len(set(middle)) < 2:
        yield "--decoder-first-pipeline-num-layers", first
        yield "--decoder-last-pipeline-num-layers", last
    else:
        stages = "|".join(f"t*{count}" for count in layers)
        yield "--pipeline-model-parallel-layout", f"E{stages}L"


def _of_recipe(plan: Plan, model: LanguageModel) -> Flags:
    recipe = plan.recipe
    yield "--bf16", plan.dtype == "bf16"
    yield "--grad-reduce-in-bf16", plan.dtype == "bf16" and recipe.reduce == "bf16"
    yield "--optimizer", _OPTIMIZERS.get(recipe.optimizer, "adam")
    yield "--lr", recipe.learning_rate
    yield "--weight-decay", recipe.weight_decay
    yield "--clip-grad", recipe.max_grad_norm
    yield "--attention-backend", _BACKENDS.get(recipe.attention, "auto")
    yield "--tp-comm-overlap", recipe.async_tp
    if model.experts is not None:
        yield "--moe-aux-loss-coeff", recipe.aux_loss
    if recipe.fp8:
        yield "--fp8-format", "hybrid"
        yield "--fp8-recipe", "tensorwise"


def read(text: str, gpus: int | None, devices: int, model: LanguageModel | None) -> Configured:
    """Read flags, or a script with arrays of them, as a job of ``gpus`` ranks; else of as many as
    torchrun's flags beside them say, or ``devices``. A given ``model`` replaces theirs."""
    values, launched = parsed(text)
    given, notes = ConfigValues(values), list[str]()
    seq_len = given.count("--seq-length")
    chosen = model_of(given, seq_len, notes) if model is None else model
    has_experts = chosen.experts is not None
    layout, batch = _layout(given, gpus or launched or devices, chosen.layers, has_experts, notes)
    if not given.flag("--bf16") and given.flag("--fp16"):
        notes.append("--fp16: planned in bf16")
    half = given.flag("--bf16") or given.flag("--fp16")
    recipe = _recipe(given, half=half, has_experts=has_experts, notes=notes)
    notes += [f"{name}: not planned" for name in given.unused if name in _UNPLANNED]
    return Configured(
        model=chosen,
        workload=Workload(global_batch_size=batch, seq_len=seq_len),
        layout=layout,
        recipe=recipe,
        dtype="bf16" if half else "fp32",
        lowering=None,
        notes=tuple(notes),
        ignored=tuple(name for name in given.unused if name not in _UNPLANNED),
    )


def _layout(
    given: ConfigValues, gpus: int, layers: int, has_experts: bool, notes: list[str]
) -> tuple[Layout, int]:
    """Return the layout and the batch."""
    tp, cp, pp = (given.count(f"--{name}-parallel-size", 1)
                  for name in ("tensor-model", "context", "pipeline-model"))  # fmt: skip
    dp = divided("gpus", gpus, tp * cp * pp, "tensor x context x pipeline parallel sizes")
    micro = given.count("--micro-batch-size")
    batch = given.count("--global-batch-size", micro * dp)
    zero, replicas = _sharding(given, dp * cp)
    ep, cuts = 1, Cuts()
    if has_experts:
        ep = given.count("--expert-model-parallel-size", 1)
        etp = given.count("--expert-tensor-parallel-size", tp)
        if etp not in (1, tp) or (etp < tp and ep % tp):
            raise ValueError(
                f"--expert-tensor-parallel-size = {etp}: must be {tp}, or 1 with "
                f"--expert-model-parallel-size a multiple of {tp}; other divisions are not planned"
            )
        if etp < tp:
            ep, cuts = ep // tp, Cuts(experts="experts")
    stages = _stages(given, pp, layers) if pp > 1 else ()
    per_rank = len(stages) // pp or 1
    recompute, recompute_layers = _recompute(given, notes)
    return Layout(
        dp=dp, cp=cp, tp=tp, pp=pp, ep=ep, zero=zero, replicas=replicas, cuts=cuts,
        sequence_parallel=given.flag("--sequence-parallel") and tp > 1,
        microbatch_size=micro,
        num_microbatches=divided("--global-batch-size", batch, micro * dp, "microbatches of all"),
        schedule="none" if pp == 1 else "1f1b" if per_rank == 1 else "interleaved_1f1b",
        stages_per_rank=per_rank,
        layers=of_stages(stages),
        recompute=recompute,
        recompute_layers=recompute_layers,
    ), batch  # fmt: skip


def _sharding(given: ConfigValues, ranks: int) -> tuple[int, int]:
    """Return ZeRO's level and the replicas of its shards."""
    zero = int(given.flag("--use-distributed-optimizer"))
    if given.flag("--use-torch-fsdp2"):
        zero = 2 if given.flag("--torch-fsdp2-no-reshard-after-forward") else 3
    elif given.flag("--use-megatron-fsdp"):
        levels = ["no_shard", "optim", *_SHARDED.values()]
        word = given.word("--data-parallel-sharding-strategy", levels[3], levels)
        zero = levels.index(word)
    if ranks == 1 or not zero:
        return 0, 1
    replicas = given.count("--num-distributed-optimizer-instances", 1)
    return (zero, replicas) if replicas < ranks else (0, 1)


def _stages(given: ConfigValues, pp: int, layers: int) -> tuple[int, ...]:
    """Return the number of layers of each stage."""
    if (pattern := given.get("--pipeline-model-parallel-layout")) is not None:
        return _of_pattern(str(pattern), pp, layers)
    ends = [f"--decoder-{end}-pipeline-num-layers" for end in ("first", "last")]
    loops = 1
    if given.get(of_rank := "--num-virtual-stages-per-pipeline-rank") is not None:
        loops = given.count(of_rank, most=layers)
    elif given.get(of_stage := "--num-layers-per-virtual-pipeline-stage") is not None:
        loops, rest = divmod(layers, pp * given.count(of_stage))
        if rest:
            raise ValueError(f"{of_stage}: its stages do not divide {layers} layers")
    first, last = (None if given.get(name) is None else given.count(name) for name in ends)
    inner = pp - (first is not None) - (last is not None)
    each, rest = divmod(layers - (first or 0) - (last or 0), inner) if inner else (0, 0)
    of_ranks = [first or each, *[each] * (pp - 2), last or each]
    found = [one // loops for _ in range(loops) for one in of_ranks]
    if rest or min(found) < 1 or sum(found) != layers:
        raise ValueError(f"--num-layers = {layers}: {pp} x {loops} stages do not divide them so")
    return tuple(found)


def _of_pattern(pattern: str, pp: int, layers: int) -> tuple[int, ...]:
    """Count the layers, t, of each stage in a pattern as Et|(tt|)*6tL."""
    whole = unrolled(pattern)
    found = tuple(stage.count("t") for stage in whole.split("|"))
    if set(whole) - set("EtmL|") or len(found) % pp or 0 in found or sum(found) != layers:
        raise ValueError(
            f"--pipeline-model-parallel-layout = {pattern!r}: must have {layers} t in stages, "
            f"a multiple of {pp}, none empty, as Et|(tt|)*6tL"
        )
    return found


def _recompute(given: ConfigValues, notes: list[str]) -> tuple[Any, int | None]:
    """Return what backward computes again, and in how many layers if not in all."""
    usual = "selective" if given.flag("--recompute-activations") else "none"
    word = given.word("--recompute-granularity", usual, ("full", "selective", "none"))
    if word == "full":
        count = given.count("--recompute-num-layers", 1)
        if given.word("--recompute-method", "uniform", ("uniform", "block")) == "block":
            return word, count
        if count > 1:
            notes.append(f"--recompute-num-layers {count}: planned as each layer by itself")
    if word != "selective":
        return word, None
    modules = str(given.get("--recompute-modules", "core_attn")).split()
    if modules == ["core_attn"]:
        notes.append("--recompute-modules core_attn: planned as none; attention keeps no scores")
        return "none", None
    if not {*modules} <= {"layernorm", "moe_act", "core_attn"}:
        notes.append(f"--recompute-modules {' '.join(modules)}: planned as norms and activations")
    return word, None


def _recipe(given: ConfigValues, *, half: bool, has_experts: bool, notes: list[str]) -> Recipe:
    usual, optimizers = Recipe(), {there: here for here, there in _OPTIMIZERS.items()}
    backends = {there: here for here, there in _BACKENDS.items()}
    if (name := str(given.get("--optimizer", "adam"))) not in optimizers:
        notes.append(f"--optimizer {name}: planned as adam")
    backend = given.word("--attention-backend", "auto", (*backends, "local"))
    return Recipe(
        optimizer=optimizers.get(name, "adamw"),
        learning_rate=given.number("--lr", usual.learning_rate),
        weight_decay=given.number("--weight-decay", 0.01),
        max_grad_norm=given.number("--clip-grad", 1.0),
        reduce="bf16" if half and given.flag("--grad-reduce-in-bf16") else "fp32",
        attention=backends.get(backend, "math"),
        aux_loss=given.number("--moe-aux-loss-coeff", 0.0) if has_experts else usual.aux_loss,
        fp8=given.get("--fp8-format") is not None,
        async_tp=given.flag("--tp-comm-overlap"),
    )
