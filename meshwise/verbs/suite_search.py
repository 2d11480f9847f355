"""Search the layout of a benchmark case, in the space that the case and the user name.

In: a case, prices, and what was asked. Out: the layout, and the source's metadata about a search.

The case fixes the microbatches, and use_remat what is recomputed: all layers. Without
prefer_reduce_scatter there is no ZeRO and no sequence parallelism; with it the search chooses. The
schedule is 1F1B. auto_stage_option narrows the space, and then the words of ``--space`` do.
"""

import contextlib
import logging
import math
import time
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from meshwise.options.run import Suite
from meshwise.prices import on_hosts, unmeasured
from meshwise.spec import Cluster, Costs, Layout, Prediction
from meshwise.suites import layouts, scale
from meshwise.suites.case import BenchmarkCase, SearchParallelArgs
from meshwise.verbs import files
from meshwise.verbs.costs import DEFAULT_COSTS, check_alike

STAND_IN = "p3.16xlarge"  # the source's machine
_NO_WORDS = ("profiling_database_filename", "space")  # but --costs, and words of its own
_TIMERS = (
    "stage-construction", "stage-construction-dp", "stage-construction-compilation",
    "stage-construction-profiling",
)  # fmt: skip
log = logging.getLogger("meshwise")


class Searched(NamedTuple):
    """A layout, and what the source's tables tell of a search by its keys."""

    layout: Layout
    told: dict[str, Any]


class PriceList(NamedTuple):
    """Prices for searches. ``name``: of their file or data sheet. ``of_here``: of this machine."""

    costs: Costs
    name: str
    of_here: bool = True

    def of(self, case: BenchmarkCase) -> Costs:
        """Return the prices in the case's dtype: in fp32, or in that of the prices."""
        is_fp32 = layouts.dtype(case) == "fp32"
        return msgspec.structs.replace(self.costs, dtype="fp32") if is_fp32 else self.costs


def asking(case: BenchmarkCase, asked: Suite) -> BenchmarkCase:
    """Return the case as one that asks for a search in the user's space, if there is one."""
    if not asked.space:
        return case
    args, option = case.parallel_args, {"space": " ".join(asked.space)}
    clusters = layouts.model(case).layers
    if isinstance(args, SearchParallelArgs):
        option, clusters = args.auto_stage_option | option, args.num_auto_layers
    wanted = SearchParallelArgs(args.prefer_reduce_scatter, args.use_remat, clusters, option)
    return case._replace(parallel_mode="search", parallel_args=wanted)


def prices(cluster: Cluster, asked: Suite) -> PriceList:
    """Return measured prices of this machine, or else those of its data sheet. CPUs have none: then
    those of the source's machine, with a warning."""
    path = asked.costs or (DEFAULT_COSTS if Path(DEFAULT_COSTS).exists() else None)
    if path is not None:
        found = files.prices(path)
        check_alike(found.cluster, cluster)
        there = on_hosts(found.cluster, cluster.num_hosts, cluster)
        return PriceList(msgspec.structs.replace(found, cluster=there), str(path))
    is_gpu = cluster.device.kind == "cuda"
    there = cluster if is_gpu else files.take(STAND_IN, Cluster)
    log.warning(
        "nothing was measured here: layouts are searched by the data sheet of %s; measure prices: "
        "meshwise measure profile && meshwise calibrate", there.name
    )  # fmt: skip
    if not is_gpu:
        there = on_hosts(there, math.ceil(cluster.num_devices / there.num_devices_per_host))
    return PriceList(unmeasured(there), f"data sheet of {there.name}", is_gpu)


def words(case: BenchmarkCase, asked: Suite) -> list[str]:
    """Return the words of the space of a case, the user's last."""
    args = case.parallel_args
    assert isinstance(args, SearchParallelArgs)
    found = [f"num_micro_batches={case.num_micro_batches}", "cp=1", "schedule=1f1b"]
    found.append(f"recompute={'full' if args.use_remat else 'none'}")
    if not args.prefer_reduce_scatter:
        found += ["zero=0", "sequence_parallel=false"]
    option = args.auto_stage_option | {"num_auto_layers": args.num_auto_layers}
    found += [f"{key}={value}" for key, value in option.items() if key not in _NO_WORDS]
    return [*found, *(["2d_shard"] if asked.shard_only else []), *asked.space]


def searched(case: BenchmarkCase, size: int, known: PriceList, asked: Suite) -> Searched:
    """Search the layout of a case on ``size`` devices. If nothing fits and the case may shrink,
    search as if memory sufficed. ValueError if there is no layout."""
    from meshwise import search

    within, costs = search.space_of(words(case, asked)), known.of(case)
    about = layouts.model(case), layouts.workload(case)
    start = time.perf_counter()
    try:
        plan = search.find(*about, costs, num_devices=size, top=1, within=within)
    except search.NoLayout as error:
        if not asked.scale_to_fit:
            raise
        log.warning("%s; searched as if memory sufficed, since the case shrinks to fit", error)
        plan = search.find(*about, _boundless(costs), num_devices=size, top=1, within=within)
    times_s = dict.fromkeys(_TIMERS, 0.0)  # nothing is compiled or profiled for a search
    times_s[_TIMERS[0]] = times_s[_TIMERS[1]] = time.perf_counter() - start
    told = {"compilation_times": times_s, "compute_cost_file_name": known.name}
    host, clusters = costs.cluster.num_devices_per_host, within.num_auto_layers
    return Searched(plan.layout, told | solution(plan.layout, about[0].layers, clusters, host))


def solution(
    layout: Layout, num_layers: int, clusters: int | None, host: int
) -> dict[str, list[Any]]:
    """Return a layout as the source's solution: layers (of ``clusters`` groups, if stages keep
    them whole), physical and logical submesh, and options of each stage."""
    each = num_layers // clusters if clusters and num_layers % clusters == 0 else 1
    stages = layout.stage_layers(num_layers)
    inside = [layout.of_stage(stage) for stage in range(len(stages))]
    sizes = [way.num_devices for way in inside]
    return {
        "forward_stage_layer_ids": [
            [*range(stage.start // each, stage.stop // each)] for stage in stages
        ],
        "submesh_shapes": [(max(1, size // host), min(size, host)) for size in sizes],
        "logical_mesh_shapes": [(way.data_ranks, way.tp) for way in inside],
        "autosharding_option_dicts": [  # experts over the data ranks: the batch is not pinned
            {} if way.ep > 1 else {"force_batch_dim_to_mesh_dim": 0} for way in inside
        ],
    }


def predicted(scaled: scale.Scaled, case: BenchmarkCase, known: PriceList) -> Prediction | None:
    """Return the prediction of what runs, if there are prices of this machine."""
    from meshwise import search

    if not known.of_here:
        return None
    model, workload, layout, _ = scaled
    with contextlib.suppress(ValueError):  # something was not measured
        return search.given(model, workload, known.of(case), layout).prediction
    return None


def _boundless(costs: Costs) -> Costs:
    device = msgspec.structs.replace(costs.cluster.device, memory_bytes=2**62)
    cluster = msgspec.structs.replace(costs.cluster, device=device)
    return msgspec.structs.replace(costs, cluster=cluster)
