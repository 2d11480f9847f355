"""plan: take a model and prices, write the fastest layout that fits (plan.json).

Prices come from costs.json, and missing ones from its cluster's data sheet. With only ``cluster``
all come from the data sheet. So do links between more hosts than were measured.
"""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from meshwise.files import read_text
from meshwise.options import keywords
from meshwise.options.plan import PlanOptions
from meshwise.prices import Prices
from meshwise.spec import (
    Answers,
    AnyModel,
    Cluster,
    Costs,
    Layout,
    Model,
    Plan,
    Recipe,
    RefitCost,
    WideResNet,
    Workload,
)
from meshwise.spec.layout import SPLIT
from meshwise.verbs import configured, files
from meshwise.verbs.costs import known_prices

log = logging.getLogger("meshwise")


@keywords(PlanOptions)
def plan(asked: PlanOptions) -> Plan:
    """Search the legal layouts of a model on ``gpus`` devices for the ``top`` fastest that fit. If
    none of them is a pipeline, add the fastest pipeline for comparison. Prices come from
    costs.json, or with ``cluster`` from its data sheet. With both ``costs`` and ``cluster``, prices
    within a host are measured, those between hosts the cluster's. Models, layouts may be records.
    What else was asked, as ``why_not``, is answered in ``Plan.answers``.
    """
    from meshwise import search
    from meshwise.models import catalogue

    measured_only = asked.measured_only
    chosen = None if asked.model is None else catalogue.find_any(asked.model)
    prices = known_prices(asked.cluster, asked.hosts, asked.costs, measured_only=measured_only)
    if asked.megatron_args is not None or asked.torchtitan is not None:
        asked, prices = configured.taken(asked, prices)
        chosen = catalogue.find_any(asked.model or "")
    recipe = prices.recipe if asked.recipe is None else files.record(asked.recipe, Recipe)
    if len(asked.backends) == 1:
        recipe = msgspec.structs.replace(recipe, attention=asked.backends[0])
    prices = msgspec.structs.replace(prices, recipe=recipe)
    if chosen is None:
        chosen = catalogue.default_model(prices.cluster)
        log.info("planning %s, which fills cluster %s", chosen.name, prices.cluster.name)
    chosen = _long_enough(_loaded(chosen, asked.load), asked.seq_len)
    layout = None if asked.layout is None else files.record(asked.layout, Layout)
    others = [files.record(each, Layout, "why_not") for each in asked.why_not]
    batch = asked.batches[0] if asked.batches else None
    if batch is None and layout is not None:
        batch = layout.batch_size
    workload = _workload(prices, chosen, batch, asked.seq_len)
    lengths = _lengths(asked, chosen, workload)
    if layout is not None:
        if asked.gpus not in (None, layout.num_devices):
            raise ValueError(
                f"gpus = {asked.gpus}: the layout is for {layout.num_devices} devices; leave gpus "
                "out, or give another layout"
            )
        if layout.schedule in SPLIT and prices.lowering == "compiled":
            log.info("%s splits each backward in two, so the plan is eager", layout.schedule)
            prices = msgspec.structs.replace(prices, lowering="eager")
        found = search.given(chosen, workload, prices, layout, measured_only=measured_only)
        if lacks := search.misfit(found, prices, measured_only=measured_only):
            log.warning("this layout does not fit: %s", lacks)
    else:
        if asked.ties_s is not None:
            from meshwise.verbs import ties

            ties.check(prices.cluster, _size(asked, prices.cluster))
        found = _searched(chosen, workload, prices, asked)
        prices = msgspec.structs.replace(prices, recipe=found.recipe)
        if (seconds := asked.ties_s) is not None:
            found = ties.measured(found, seconds, asked.out)
    found = _answered(found, asked, prices, others, lengths)
    files.replace(asked.out, found)
    if asked.trace is not None:
        from meshwise import timeline

        spans = search.spans(found, prices, measured_only=measured_only)
        log.info("wrote %s", timeline.write(Path(asked.trace), found.layout, spans))
    return found


def _searched(model: AnyModel, workload: Workload, prices: Costs, asked: PlanOptions) -> Plan:
    """Return the best plan, with the numbers of devices, batches or back ends of attention that
    were compared."""
    from meshwise import search

    how, tokens, about = _how(asked), asked.num_tokens, (model, workload, prices)
    sizing = {**how, "failures": asked.failures}
    if asked.fewest:
        found, sizes = search.fewest(*about, **sizing)
    elif asked.deadline_s is not None and tokens is not None:
        deadline_s = asked.deadline_s
        found, sizes = search.cheapest(*about, tokens=tokens, deadline_s=deadline_s, **sizing)
    else:
        how["num_devices"] = _size(asked, prices.cluster)
        answers = Answers()
        if len(asked.batches) > 1:
            found, batches = search.best_batch(*about, asked.batches, **how)
            answers = Answers(batches=batches)
        elif len(asked.backends) > 1:
            found, backends = search.best_attention(*about, asked.backends, **how)
            answers = Answers(attention=backends)
        else:
            found = search.find(*about, **how)
        return msgspec.structs.replace(found, answers=answers)
    return msgspec.structs.replace(found, answers=Answers(sizes=sizes))


def _size(asked: PlanOptions, cluster: Cluster) -> int:
    """Return the number of devices to plan for; of a search over sizes, the least."""
    if asked.fewest or asked.deadline is not None:
        return 1
    return cluster.num_devices if asked.gpus is None else asked.gpus


def _how(asked: PlanOptions) -> dict[str, Any]:
    """Return the options of ``search.find``."""
    from meshwise import search

    within = search.space_of(asked.space)
    return {"top": asked.top, "measured_only": asked.measured_only, "within": within}


def _answered(
    plan: Plan,
    asked: PlanOptions,
    prices: Costs,
    others: Sequence[Layout],
    lengths: Sequence[int],
) -> Plan:
    """Answer what was asked beside the layout. ``others``: the layouts of ``why_not``;
    ``lengths``: those of ``seq_lens``."""
    from meshwise import search

    failures, lost = asked.failures, None
    if failures is not None:
        size = plan.layout.num_devices
        lost = search.goodput(plan.model, plan.cluster, size, recipe=plan.recipe, **failures)
    share, known = lost.share if lost else 1.0, Prices(prices, datasheet=not asked.measured_only)
    varying = [search.by_length(plan, known, lengths)] if lengths else []
    varying += [search.by_load(plan, known)] if asked.load == "p95" else []
    answers = Answers(
        why_not=tuple(
            search.why_not(
                plan,
                prices,
                layout,
                measured_only=asked.measured_only,
                within=search.space_of(asked.space),
            )
            for layout in others
        ),
        what_if=search.what_if(plan, prices, **_how(asked)) if asked.what_if else (),
        sizes=plan.answers.sizes,
        batches=plan.answers.batches,
        attention=plan.answers.attention,
        tokens=asked.num_tokens,
        deadline_s=asked.deadline_s,
        goodput=lost,
        varying=tuple(varying),
        ties=plan.answers.ties,
        bills=tuple(
            search.bill(plan, tokens, asked.price_per_gpu_hour, asked.watts, share)
            for tokens in asked.billed
        ),
        refit=None if asked.refit_to is None else _refit(plan, asked.refit_to),
    )
    return msgspec.structs.replace(plan, answers=answers)


def _refit(plan: Plan, to: Path | str) -> RefitCost:
    """Return what moving the plan's weights to those of another plan costs."""
    from meshwise.verbs import forecast

    given = forecast.links(plan.cluster)
    if given is None:
        raise ValueError(
            f"refit_to: cluster {plan.cluster.name!r} names no rate of its links; add bytes_per_s "
            "to its first tier"
        )
    return forecast.between_plans(plan, files.take(to, Plan), given)


def _long_enough(model: AnyModel, seq_len: int | None) -> AnyModel:
    """Give the model positions for ``seq_len`` tokens: more rows in a GPT's table, or more rotary
    positions in other models."""
    if seq_len is None or isinstance(model, WideResNet) or seq_len <= model.max_seq_len:
        return model
    what = "table of positions" if isinstance(model, Model) else "rotary positions"
    log.info(
        "the %s of %s: for %d tokens here, %d as published",
        what, model.name or "the model", seq_len, model.max_seq_len,
    )  # fmt: skip
    return msgspec.structs.replace(model, max_seq_len=seq_len)


def _lengths(asked: PlanOptions, model: AnyModel, workload: Workload) -> list[int]:
    """Read the lengths of ``seq_lens``: whole numbers, with commas, spaces or lines between."""
    if asked.seq_lens is None:
        return []
    words = read_text(asked.seq_lens).replace(",", " ").split()
    if wrong := [word for word in words if not word.isdecimal() or len(word) > 12]:
        raise ValueError(f"{asked.seq_lens}: {wrong[0]!r:.40} must be a number of tokens, as 512")
    found, most = [int(word) for word in words], workload.seq_len
    if isinstance(model, WideResNet) or not found or min(found) < 1:
        raise ValueError(
            f"seq_lens: must be lengths of 1 to {most} tokens, of a language model; mend "
            f"{asked.seq_lens}, or leave it out"
        )
    if max(found) > most:
        raise ValueError(f"seq_lens: {asked.seq_lens} has {max(found)}, beyond --seq-len {most}")
    return found


def _loaded(model: AnyModel, load: Literal["mean", "p95"] | float) -> AnyModel:
    """Let plans assume so many rows of the busiest rank's experts."""
    if load == "mean":
        return model
    experts = None if isinstance(model, WideResNet) else model.experts
    if experts is None:
        raise ValueError(f"expert_load = {load!r}: {model.name or 'the model'} has no experts")
    loaded = msgspec.structs.replace(experts, load=load)
    return msgspec.structs.replace(model, experts=loaded)


def _workload(
    costs: Costs, model: AnyModel, global_batch_size: int | None, seq_len: int | None
) -> Workload:
    from meshwise.models import catalogue

    given = {"global_batch_size": global_batch_size, "seq_len": seq_len}
    return msgspec.structs.replace(
        catalogue.default_workload(costs.cluster, model),
        **{name: value for name, value in given.items() if value is not None},
    )
