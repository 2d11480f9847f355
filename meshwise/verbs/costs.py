"""The prices that a verb goes by: measured ones, those of a cluster's data sheet, or both."""

import logging
from pathlib import Path

import msgspec

from meshwise.prices.datasheet import on_hosts, unmeasured
from meshwise.spec import Cluster, Costs
from meshwise.verbs import files

DEFAULT_COSTS = "costs.json"
log = logging.getLogger("meshwise")


def known_prices(
    cluster: Path | str | None,
    hosts: int | None,
    costs: Path | str | None,
    *,
    measured_only: bool = False,
) -> Costs:
    """Return prices from costs, from a cluster, or from both: then those within a host are
    measured, those between hosts the cluster's. By default costs.json."""
    described = None if cluster is None else files.take(cluster, Cluster)
    if costs is None and described is not None:
        if measured_only:
            raise ValueError(
                f"measured_only: nothing was measured of cluster {described.name!r}; give its "
                "prices with --costs, or leave --measured-only out"
            )
        if Path(DEFAULT_COSTS).exists():
            log.info("%s is not read beside --cluster, unless --costs names it", DEFAULT_COSTS)
        there = described if hosts is None else on_hosts(described, hosts)
        return unmeasured(there)
    if costs is None and not Path(DEFAULT_COSTS).exists():
        raise ValueError(
            f"{DEFAULT_COSTS} does not exist; `meshwise calibrate` writes it, or go by data "
            "sheets with --cluster (a file, or h100-hgx) and --hosts"
        )
    found = files.prices(DEFAULT_COSTS if costs is None else costs)
    if described is not None:
        check_alike(found.cluster, described)
        hosts = described.num_hosts if hosts is None else hosts
    if hosts is None:
        return found
    return msgspec.structs.replace(found, cluster=on_hosts(found.cluster, hosts, described))


def check_alike(measured: Cluster, described: Cluster) -> None:
    """Refuse prices of other devices, or of hosts with another number of them."""
    for field, here, there in (
        ("device.name", measured.device.name, described.device.name),
        ("num_devices_per_host", measured.num_devices_per_host, described.num_devices_per_host),
    ):
        if here != there:
            raise ValueError(
                f"cluster {described.name!r}: {field} is {there}, but the costs are for {here}; "
                "leave --cluster or --costs out"
            )
