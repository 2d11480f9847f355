"""plan: a model and prices in, the fastest layout that fits out (plan.json).

Prices are those of costs.json and, where it has none, of its cluster's data sheet; with ``cluster``
alone all are of the data sheet. Links between more hosts than were measured are, too.
"""

import logging
from pathlib import Path

import msgspec

from meshwise import store
from meshwise.prices import on_hosts, unmeasured
from meshwise.spec import AnyModel, Cluster, Costs, Layout, Model, Plan, WideResNet, Workload
from meshwise.verbs import files

DEFAULT_COSTS = "costs.json"
log = logging.getLogger("meshwise")


def plan(
    model: str | AnyModel | None = None,
    *,
    gpus: int | None = None,
    cluster: Path | str | None = None,
    hosts: int | None = None,
    costs: Path | str | None = None,
    measured_only: bool = False,
    global_batch_size: int | None = None,
    seq_len: int | None = None,
    top: int = 10,
    layout: Layout | Path | str | None = None,
    out: Path | str = "plan.json",
) -> Plan:
    """Search the legal layouts of ``model`` on ``gpus`` devices for the ``top`` fastest that fit,
    and the fastest pipeline to compare them with if none of them is one.

    ``model``: a name of the catalogue or a record, by default the one that fills the cluster.
    ``gpus``: all devices of the cluster by default (CPU ranks count as devices). ``costs``: by
    default costs.json; with ``cluster``, a name or a file, prices are its data sheet's instead, or
    with both the measured host's and between hosts the cluster's. ``hosts``: so many of it.
    ``measured_only``: what was not measured is an error. ``layout``: price this one, a record, JSON
    or a file of it, instead of searching; a pipeline may be uneven.
    """
    from meshwise import search
    from meshwise.models import catalogue

    if top < 1:
        raise ValueError(f"top = {top}: must be >= 1")
    chosen = catalogue.find_any(model) if isinstance(model, str) else model
    prices = _prices(cluster, hosts, costs, measured_only=measured_only)
    if chosen is None:
        chosen = catalogue.default_model(prices.cluster)
        log.info("planning %s, which fills cluster %s", chosen.name, prices.cluster.name)
    if seq_len is not None:
        chosen = _long_enough(chosen, seq_len)
    workload = _workload(prices, chosen, global_batch_size, seq_len)
    if layout is not None:
        from meshwise.verbs import given

        asked = given.record(layout, Layout)
        found = search.given(chosen, workload, prices, asked, measured_only=measured_only)
    else:
        size = prices.cluster.num_devices if gpus is None else gpus
        found = search.find(
            chosen, workload, prices, num_devices=size, top=top, measured_only=measured_only
        )
    store.write(out, found)
    log.info("wrote %s", out)
    return found


def _prices(
    cluster: Path | str | None,
    hosts: int | None,
    costs: Path | str | None,
    *,
    measured_only: bool,
) -> Costs:
    """Of costs, a cluster or both."""
    described = None if cluster is None else files.take(cluster, Cluster)
    if costs is None and described is not None:
        if measured_only:
            raise ValueError(
                f"measured_only: nothing was measured of cluster {described.name!r}; give its "
                "prices with --costs, or leave --measured-only out"
            )
        if Path(DEFAULT_COSTS).exists():
            log.info("%s is not used beside --cluster; --costs names it", DEFAULT_COSTS)
        there = described if hosts is None else on_hosts(described, hosts)
        return unmeasured(there)
    if costs is None and not Path(DEFAULT_COSTS).exists():
        raise ValueError(
            f"{DEFAULT_COSTS} does not exist; `meshwise calibrate` writes it, or plan by data "
            "sheets with --cluster (a file, or h100-hgx) and --hosts"
        )
    found = files.take(DEFAULT_COSTS if costs is None else costs, Costs)
    if described is not None:
        _check_alike(found.cluster, described)
        hosts = described.num_hosts if hosts is None else hosts
    if hosts is None:
        return found
    return msgspec.structs.replace(found, cluster=on_hosts(found.cluster, hosts, described))


def _check_alike(measured: Cluster, described: Cluster) -> None:
    for field, here, there in (
        ("device.name", measured.device.name, described.device.name),
        ("num_devices_per_host", measured.num_devices_per_host, described.num_devices_per_host),
    ):
        if here != there:
            raise ValueError(
                f"cluster {described.name!r}: {field} is {there}, but the costs are of {here}; "
                "leave --cluster or --costs out"
            )


def _long_enough(model: AnyModel, seq_len: int) -> AnyModel:
    """The model with positions for ``seq_len`` tokens: a GPT's table grows, others have none."""
    if isinstance(model, WideResNet) or seq_len <= model.max_seq_len:
        return model
    if not isinstance(model, Model):
        raise ValueError(
            f"seq_len = {seq_len}: {model.name or 'the model'} has positions for "
            f"{model.max_seq_len} tokens; use at most that"
        )
    log.info(
        "the table of positions of %s grows from %d to %d tokens",
        model.name or "the model", model.max_seq_len, seq_len,
    )  # fmt: skip
    return msgspec.structs.replace(model, max_seq_len=seq_len)


def _workload(
    costs: Costs, model: AnyModel, global_batch_size: int | None, seq_len: int | None
) -> Workload:
    from meshwise.models import catalogue

    given = {"global_batch_size": global_batch_size, "seq_len": seq_len}
    return msgspec.structs.replace(
        catalogue.default_workload(costs.cluster, model),
        **{name: value for name, value in given.items() if value is not None},
    )
