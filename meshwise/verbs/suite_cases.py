"""Turn a benchmark case into a plan for this machine, made smaller if asked to fit.

In: a case, the cluster and a number of its devices. Out: the plan, with the source's counts for the
size that runs; or a ValueError, returned and not raised, that says why there is no plan.
"""

from math import inf
from typing import Any, NamedTuple

import msgspec

from meshwise.options.run import RunOptions, Suite
from meshwise.spec import Cluster, Plan, WideResNet
from meshwise.suites import formulas, layouts, scale
from meshwise.suites.case import BenchmarkCase, MoEModelConfig, WResNetModelConfig
from meshwise.suites.formulas import Counts
from meshwise.verbs import given, memory
from meshwise.verbs.suite_search import PriceList, predicted, searched

_VOCAB = 128  # to time only the layers: embedding and head then take hardly any time
_CPU_FLOPS = 2e11  # limit of an iteration on each CPU: takes seconds; what fits takes minutes


class Prepared(NamedTuple):
    """A case as it will run. ``case`` has the sizes that run, ``changes`` says what was shrunk."""

    case: BenchmarkCase
    plan: Plan
    counts: Counts
    changes: tuple[str, ...]
    told: dict[str, Any] = {}  # what a search says in the table


def prepared(
    kind: str,
    case: BenchmarkCase,
    cluster: Cluster,
    size: int,
    asked: Suite,
    known: PriceList | None = None,
) -> Prepared | ValueError:
    """Return the plan of a case, made smaller if asked to fit, or why there is none. ``known``:
    prices, of a suite with searches."""
    inference, told = kind.endswith("_inference"), dict[str, Any]()
    try:
        if known is not None and case.parallel_mode == "search":
            layout, told = searched(case, size, known, asked)
        else:
            layout = layouts.layout(case, size, inference=inference, shard_only=asked.shard_only)
        model, workload = layouts.model(case), layouts.workload(case)
        whole = scale.Scaled(model, workload, layout, ())
        if kind == "gpt_no_embedding_inference":
            whole = _layers_alone(whole)
        if asked.scale_to_fit:
            room = cluster.device.memory_bytes
            most = inf if cluster.device.kind == "cuda" else _CPU_FLOPS
            scaled = scale.scaled(*whole[:3], room, inference=inference, device_flops=most)
            whole = scaled._replace(changes=(*whole.changes, *scaled.changes))
        if whole.changes:
            case = _of_size(case, whole)
        model, workload, layout, changes = whole
        on_gpu = cluster.device.kind == "cuda"
        plan = given.build(
            model,
            workload,
            layout,
            cluster,
            dtype=layouts.dtype(case) if on_gpu else "fp32",
            lowering=asked.lowering or cluster.device.lowering,
            recipe=layouts.recipe(case),
        )
        given.check(plan)
        if known is not None and told:
            prediction = predicted(whole, case, known)
            plan = msgspec.structs.replace(plan, prediction=prediction)
    except ValueError as error:
        return error
    images = model if isinstance(model, WideResNet) else None
    return Prepared(case, plan, formulas.counts(case, kind, images), changes, told)


def too_large(one: Prepared, asked: RunOptions) -> str:
    """Say that a case needs more memory than there is; "" if it is not known to."""
    lacks = memory.shortage(one.plan, asked)
    return f"does not fit: {lacks}; use --scale-to-fit" if lacks else ""


def _layers_alone(whole: scale.Scaled) -> scale.Scaled:
    """Give the model so small a vocabulary that embedding and head take hardly any time."""
    model = whole.model
    assert not isinstance(model, WideResNet)
    change = f"vocab {model.vocab} -> {_VOCAB}"
    return whole._replace(
        model=msgspec.structs.replace(model, vocab=_VOCAB), changes=(*whole.changes, change)
    )


def _of_size(case: BenchmarkCase, scaled: scale.Scaled) -> BenchmarkCase:
    """Return the case with the sizes of the model that runs in its place."""
    model, workload, layout, _ = scaled
    config = case.model_config
    if isinstance(config, WResNetModelConfig):
        assert isinstance(model, WideResNet)
        config = config._replace(image_size=model.image_size, num_channels=model.channels)
    else:
        assert not isinstance(model, WideResNet)
        config = config._replace(
            seq_len=workload.seq_len,
            hidden_size=model.hidden,
            num_layers=model.layers,
            num_heads=model.heads,
            vocab_size=model.vocab,
        )
        if isinstance(config, MoEModelConfig):
            assert model.experts is not None and model.experts.group_size is not None
            config = config._replace(expert_group_size=model.experts.group_size)
    return case._replace(
        batch_size=workload.global_batch_size,
        model_config=config,
        num_micro_batches=layout.num_microbatches,
    )
