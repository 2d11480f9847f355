"""Plans as torchtitan's job files, and job files as a model, a workload, a layout and a recipe.

The keys and their defaults are those of torchtitan 0.2.2 (config/job_config.py), the last version
with TOML files; older names are read too. It always shards what FSDP holds, so zero 2 and 3 are its
``fsdp_reshard_after_forward``; under tp it always has sequence parallelism.
"""

import json
import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import msgspec

from meshwise.files import parse_toml
from meshwise.models import catalogue
from meshwise.models.configured import (
    Configured,
    ConfigValues,
    divided,
    of_stages,
    text_of,
    unknown,
)
from meshwise.spec import LanguageModel, Layout, Plan, Recipe, Workload
from meshwise.spec.layout import Cuts, Recompute, ScheduleName

_FLAVORS = {  # of its model and flavor; its llama3 has the rotary positions of Llama 3.1
    ("llama3", "8B"): "llama-3.1-8b", ("llama3", "70B"): "llama-3.1-70b",
    ("llama3", "405B"): "llama-3.1-405b", ("deepseek_v3", "16B"): "deepseek-v2-lite",
    ("deepseek_v3", "236B"): "deepseek-v2", ("deepseek_v3", "671B"): "deepseek-v3",
    ("qwen3", "235B-A22B"): "qwen3-235b-a22b",
}  # fmt: skip
_SCHEDULES: dict[ScheduleName, str] = {
    "1f1b": "1F1B", "gpipe": "GPipe", "interleaved_1f1b": "Interleaved1F1B",
    "looped_bfs": "LoopedBFS", "interleaved_zero_bubble": "InterleavedZeroBubble",
    "zbv": "ZBVZeroBubble", "dualpipev": "DualPipeV",
}  # fmt: skip
_DTYPES = {"bf16": "bfloat16", "fp32": "float32"}
_PARALLELISM = (  # all keys of this section, in which a typing error would plan another layout
    "context_parallel_degree", "context_parallel_load_balancer", "context_parallel_rotate_method",
    "data_parallel_replicate_degree", "data_parallel_shard_degree", "disable_loss_parallel",
    "enable_async_tensor_parallel", "enable_compiled_autograd", "expert_parallel_comm_backend",
    "expert_parallel_degree", "expert_tensor_parallel_degree", "fsdp_reshard_after_forward",
    "module_fqns_per_model_part", "pipeline_parallel_degree",
    "pipeline_parallel_expert_parallel_overlap", "pipeline_parallel_first_stage_less_layers",
    "pipeline_parallel_last_stage_less_layers", "pipeline_parallel_layers_per_stage",
    "pipeline_parallel_microbatch_size", "pipeline_parallel_schedule",
    "pipeline_parallel_schedule_csv", "pipeline_parallel_split_points", "tensor_parallel_degree",
)  # fmt: skip
_P = "parallelism."


def text(plan: Plan) -> tuple[str, tuple[str, ...]]:
    """Write a plan as a job file; return it and what of the plan it does not say."""
    known = _flavor(plan.model.name) is not None
    model = None if known or not isinstance(plan.model, LanguageModel) else plan.model
    return text_of(plan, "torchtitan", _job, partial(read, devices=0, model=model))


def _flavor(name: str) -> tuple[str, str] | None:
    name = name.replace("llama-3-", "llama-3.1-")
    return next((flavor for flavor, model in _FLAVORS.items() if model == name), None)


def _job(plan: Plan, model: LanguageModel) -> tuple[str, list[str]]:
    notes, flavor = [], _flavor(model.name)
    if flavor is None:
        kv_heads = getattr(model, "kv_heads", model.heads)
        notes.append(
            f"model: torchtitan has no flavor of {model.name or 'these sizes'}; add one of dim "
            f"{model.hidden}, n_layers {model.layers}, n_heads {model.heads}, n_kv_heads "
            f"{kv_heads}, feed-forward {model.ffn}, vocab_size {model.vocab}"
        )
    if plan.layout.recompute == "selective":
        notes.append("recompute selective: option op also computes every second product again")
    if plan.layout.zero == 0 and plan.layout.dp > 1 and plan.layout.num_devices > plan.layout.dp:
        notes.append("layout.zero = 0: torchtitan replicates a model without shards under dp alone")
    layout, recipe, lines = plan.layout, plan.recipe, list[str]()
    inside, compiled = layout.of_rank(0), plan.lowering == "compiled"
    per_pass = inside.microbatch_size * (layout.num_microbatches if layout.pp > 1 else 1)
    sections: dict[str, dict[str, Any]] = {
        "model": {
            "name": flavor[0] if flavor else "llama3",
            "flavor": flavor[1] if flavor else model.name or "custom",
            "converters": ["quantize.linear.float8"] if recipe.fp8 else [],
        },
        "optimizer": {
            "name": "AdamW", "lr": recipe.learning_rate, "weight_decay": recipe.weight_decay
        },
        "training": {
            "local_batch_size": per_pass,
            "global_batch_size": plan.workload.global_batch_size,
            "seq_len": plan.workload.seq_len,
            "max_norm": recipe.max_grad_norm,
            "dtype": _DTYPES[recipe.weights],
            "mixed_precision_param": _DTYPES.get(plan.dtype, "bfloat16"),
            "mixed_precision_reduce": "float32",
        },
        "parallelism": dict(_degrees(plan)),
        "activation_checkpoint": {
            "mode": layout.recompute,
            "selective_ac_option": "op" if layout.recompute == "selective" else None,
        },
        "compile": {"enable": compiled},
    }  # fmt: skip
    for section, keys in sections.items():
        lines += ["", f"[{section}]"]
        lines += [
            f"{key} = {json.dumps(value)}" for key, value in keys.items() if value is not None
        ]
    return "\n".join(lines[1:]) + "\n", notes


def _degrees(plan: Plan) -> Iterator[tuple[str, Any]]:
    layout = plan.layout
    inside = layout.of_rank(0)
    yield "data_parallel_replicate_degree", inside.replicas if layout.zero else inside.dp
    yield "data_parallel_shard_degree", inside.dp // inside.replicas if layout.zero else 1
    if layout.zero:
        yield "fsdp_reshard_after_forward", "always" if layout.zero == 3 else "never"
    yield "tensor_parallel_degree", inside.tp
    yield "enable_async_tensor_parallel", plan.recipe.async_tp
    yield "context_parallel_degree", layout.cp
    yield "pipeline_parallel_degree", layout.pp
    if layout.pp > 1:
        yield "pipeline_parallel_schedule", _SCHEDULES[layout.schedule]
        yield "pipeline_parallel_microbatch_size", inside.microbatch_size
        yield from _of_stages(layout, plan.model.layers)
    if getattr(plan.model, "experts", None) is not None:
        yield "expert_parallel_degree", inside.expert_ranks
        yield "expert_tensor_parallel_degree", inside.tp * inside.ep // inside.expert_ranks


def _of_stages(layout: Layout, num_layers: int) -> Iterator[tuple[str, Any]]:
    """Yield the stages: how many layers fewer the first and last have, or all layers by name."""
    layers = tuple(map(len, layout.stage_layers(num_layers)))
    most, stages = max(layers), len(layers)
    for less in ((most - layers[0], most - layers[-1]), (0, 0)):
        each = math.ceil((num_layers + sum(less)) / stages)
        if (
            _layers(num_layers, stages, *less) == layers
            and math.ceil((num_layers + sum(less)) / each) == stages
        ):
            yield "pipeline_parallel_layers_per_stage", each
            yield "pipeline_parallel_first_stage_less_layers", less[0]
            yield "pipeline_parallel_last_stage_less_layers", less[1]
            return
    named = [[f"layers.{layer}" for layer in stage] for stage in layout.stage_layers(num_layers)]
    named[0].insert(0, "tok_embeddings")
    named[-1] += ["norm", "output"]
    yield "module_fqns_per_model_part", named
    yield "pipeline_parallel_layers_per_stage", None


def _layers(num_layers: int, stages: int, less_first: int, less_last: int) -> tuple[int, ...]:
    """Return the layers of each stage, as torchtitan counts them: the embedding and the head stand
    for layers, and what is left over goes to the first stages."""
    each, more = divmod(num_layers + less_first + less_last, stages)
    found = [each + (stage < more) for stage in range(stages)]
    found[0] -= less_first
    found[-1] -= less_last
    return tuple(found)


def read(text: str, gpus: int | None, devices: int, model: LanguageModel | None) -> Configured:
    """Read a job file as a job of ``gpus`` ranks, by default ``devices``. A given ``model``
    replaces the file's."""
    given, notes = ConfigValues(dict(_keys(parse_toml(text, "torchtitan's file")))), list[str]()
    name, flavor = (str(given.get(f"model.{key}")) for key in ("name", "flavor"))
    if model is None:
        if (name, flavor) not in _FLAVORS:
            known = ", ".join(f"{of} {size}" for of, size in _FLAVORS)
            raise ValueError(
                f"model.flavor = {flavor!r} of {name!r}: known are {known}; name the model"
            )
        model = catalogue.find(_FLAVORS[name, flavor])
    layout, batch = _layout(given, gpus or devices, model, notes)
    compiled = given.flag("training.compile") or given.flag("compile.enable")
    compiled = compiled and "model" in str(given.get("compile.components", "model"))
    dtypes = [given.word(f"training.{name}", usual, _DTYPES.values()) for name, usual in (
        ("mixed_precision_param", "bfloat16"), ("mixed_precision_reduce", "float32"))]  # fmt: skip
    reduce = "bf16" if dtypes == ["bfloat16"] * 2 else "fp32"
    recipe = msgspec.structs.replace(_recipe(given, notes), reduce=reduce)
    for key in given.unused:
        if key.startswith(_P) and (last := key.removeprefix(_P)) not in _PARALLELISM:
            raise unknown(last, _PARALLELISM, "key of [parallelism]")
    return Configured(
        model=model,
        workload=Workload(global_batch_size=batch, seq_len=given.count("training.seq_len", 2048)),
        layout=layout,
        recipe=recipe,
        dtype="bf16" if dtypes[0] == "bfloat16" else "fp32",
        lowering="compiled" if compiled else "eager",
        notes=tuple(notes),
        ignored=given.unused,
    )


def _keys(table: dict[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _keys(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value


def _layout(
    given: ConfigValues, gpus: int, model: LanguageModel, notes: list[str]
) -> tuple[Layout, int]:
    """Return the layout and the batch."""
    tp, cp, pp, replicas = (
        given.count(f"{_P}{name}_degree", 1)
        for name in (
            "tensor_parallel", "context_parallel", "pipeline_parallel", "data_parallel_replicate"
        )
    )  # fmt: skip
    left = divided("gpus", gpus, tp * cp * pp * replicas, "its degrees together")
    shards = given.get(f"{_P}data_parallel_shard_degree", -1)
    if shards not in (-1, left):
        raise ValueError(
            f"{_P}data_parallel_shard_degree = {shards}: {gpus} ranks leave {left}; give --gpus"
        )
    dp = replicas * left
    stages, schedule = _stages(given, pp, model.layers) if pp > 1 else ((), "none")
    rows = local = given.count("training.local_batch_size", given.get("training.batch_size", 8))
    if pp > 1:
        rows = given.count(f"{_P}pipeline_parallel_microbatch_size", 1)
    batch = given.get(name := "training.global_batch_size", -1)
    batch = local * dp if batch == -1 else given.count(name)
    if pp > 1 and (times := divided(name, batch, local * dp, "its data ranks'")) > 1:
        notes.append(f"training.global_batch_size: {times} pipelines in a step, planned as one")
    ep, cuts = _experts(given, tp) if model.experts is not None else (1, Cuts())
    per_rank = len(stages) // pp or 1
    recompute, layers = _recompute(given, model.layers // max(1, len(stages)), notes)
    zero = 0 if left * cp == 1 else _zero(given, pp)
    return Layout(
        dp=dp, cp=cp, tp=tp, pp=pp, ep=ep, zero=zero, replicas=replicas if zero else 1, cuts=cuts,
        sequence_parallel=tp > 1,
        microbatch_size=rows,
        num_microbatches=divided(name, batch, rows * dp, "its microbatches"),
        schedule=schedule,
        stages_per_rank=per_rank,
        layers=of_stages(stages),
        recompute=recompute,
        recompute_layers=layers,
    ), batch  # fmt: skip


def _zero(given: ConfigValues, pp: int) -> int:
    policy = given.word(
        f"{_P}fsdp_reshard_after_forward", "default", ("default", "always", "never")
    )
    return {"always": 3, "never": 2, "default": 3 if pp == 1 else 2}[policy]


def _experts(given: ConfigValues, tp: int) -> tuple[int, Cuts]:
    ep = given.count(f"{_P}expert_parallel_degree", 1)
    etp = given.count(f"{_P}expert_tensor_parallel_degree", 1)
    if ep == 1 or etp == tp:
        return ep, Cuts()
    if etp != 1 or ep % tp:
        raise ValueError(
            f"{_P}expert_parallel_degree = {ep}: must be a multiple of the tensor parallel degree "
            f"{tp}, or expert_tensor_parallel_degree {tp}; other divisions are not planned"
        )
    return ep // tp, Cuts(experts="experts")


def _stages(given: ConfigValues, pp: int, layers: int) -> tuple[tuple[int, ...], ScheduleName]:
    """Return the number of layers of each stage, and the schedule."""
    key, known = f"{_P}pipeline_parallel_schedule", {s.lower(): n for n, s in _SCHEDULES.items()}
    word = str(given.get(key, "1F1B"))
    if (schedule := known.get(word.lower())) is None:
        raise unknown(
            f"{key} = {word}", (f"{key} = {one}" for one in _SCHEDULES.values()), "schedule"
        )
    less = [given.count(f"{_P}pipeline_parallel_{end}_stage_less_layers", 1, least=0, most=layers)
            for end in ("first", "last")]  # fmt: skip
    stages = pp * (1 if schedule in ("1f1b", "gpipe") else 2)
    if given.get(each := f"{_P}pipeline_parallel_layers_per_stage") is not None:
        stages = math.ceil((layers + sum(less)) / given.count(each))
    if (parts := given.get(f"{_P}module_fqns_per_model_part")) is not None:
        named = (
            [part for part in parts if isinstance(part, list)] if isinstance(parts, list) else []
        )
        found = tuple(sum(str(name).startswith("layers.") for name in part) for part in named)
    else:
        found = _layers(layers, stages, *less)
    if len(found) % pp or min(found, default=0) < 1 or sum(found) != layers:
        said = ", ".join(map(str, found[:20]))
        raise ValueError(
            f"{_P}pipeline_parallel_degree = {pp}: {layers} layers as {said}; none may be empty, "
            "and every rank has as many stages"
        )
    return found, schedule


def _recompute(given: ConfigValues, layers: int, notes: list[str]) -> tuple[Recompute, int | None]:
    """Return what backward computes again, and in how many of a stage's ``layers``."""
    key = "activation_checkpoint.selective_ac_option"
    mode = given.get("activation_checkpoint.mode", "selective")
    if mode not in ("none", "selective", "full"):
        notes.append(f"activation_checkpoint.mode {mode}: planned as none")
        return "none", None
    if mode != "selective":
        return mode, None
    if (option := str(given.get(key, "2"))) == "op":
        return mode, None
    each = ConfigValues({key: option}).count(key)
    if each > 1:
        notes.append(f"{key} {each}: planned as full in the first of {each} layers of each stage")
    return "full", None if each == 1 else max(1, layers // each)


def _recipe(given: ConfigValues, notes: list[str]) -> Recipe:
    usual = Recipe()
    if (name := given.get("optimizer.name", "AdamW")) not in ("AdamW", "Adam"):
        notes.append(f"optimizer.name {name}: planned as AdamW")
    if given.flag("training.enable_cpu_offload"):
        notes.append("training.enable_cpu_offload: not planned; parameters stay on the devices")
    weights = given.word("training.dtype", "float32", _DTYPES.values())
    return Recipe(
        learning_rate=given.number("optimizer.lr", 8e-4),
        weight_decay=given.number("optimizer.weight_decay", usual.weight_decay),
        max_grad_norm=given.number("training.max_norm", usual.max_grad_norm),
        weights="bf16" if weights == "bfloat16" else "fp32",
        fp8="float8" in str(given.get("model.converters")).replace("grouped_mm.float8", ""),
        async_tp=given.flag(f"{_P}enable_async_tensor_parallel"),
    )
