"""plan: a model and prices in, the fastest layout that fits out (plan.json)."""

import logging
from pathlib import Path

import msgspec

from meshwise import store
from meshwise.spec import Costs, LanguageModel, Layout, Plan, Workload
from meshwise.verbs import files

log = logging.getLogger("meshwise")


def plan(
    model: str | LanguageModel | None = None,
    *,
    gpus: int | None = None,
    costs: Path | str = "costs.json",
    global_batch_size: int | None = None,
    seq_len: int | None = None,
    top: int = 10,
    layout: Layout | Path | str | None = None,
    out: Path | str = "plan.json",
) -> Plan:
    """Search the legal layouts of ``model`` on ``gpus`` devices for the ``top`` fastest that fit,
    and the fastest pipeline to compare them with if none of them is one.

    ``model``: a name of the catalogue or a record, by default the one that fills the cluster.
    ``gpus``: all devices of the cluster by default (CPU ranks count as devices). ``layout``: price
    this one, a record or a JSON file of one, instead of searching; a pipeline may be uneven.
    """
    from meshwise import search
    from meshwise.models import catalogue

    if top < 1:
        raise ValueError(f"top = {top}: must be >= 1")
    chosen = catalogue.find(model) if isinstance(model, str) else model
    prices = files.take(costs, Costs)
    if chosen is None:
        chosen = catalogue.default_model(prices.cluster)
        log.info("planning %s, which fills cluster %s", chosen.name, prices.cluster.name)
    workload = _workload(prices, chosen, global_batch_size, seq_len)
    if layout is not None:
        if not isinstance(layout, Layout):
            layout = store.read(layout, Layout)
        found = search.given(chosen, workload, prices, layout)
    else:
        num_devices = prices.cluster.num_devices if gpus is None else gpus
        found = search.find(chosen, workload, prices, num_devices=num_devices, top=top)
    store.write(out, found)
    log.info("wrote %s", out)
    return found


def _workload(
    costs: Costs, model: LanguageModel, global_batch_size: int | None, seq_len: int | None
) -> Workload:
    from meshwise.models import catalogue

    if seq_len is not None and seq_len > model.max_seq_len:
        raise ValueError(
            f"seq_len = {seq_len}: {model.name or 'the model'} has positions for "
            f"{model.max_seq_len} tokens; use at most that"
        )
    given = {"global_batch_size": global_batch_size, "seq_len": seq_len}
    return msgspec.structs.replace(
        catalogue.default_workload(costs.cluster, model),
        **{name: value for name, value in given.items() if value is not None},
    )
