"""``meshwise detect``, ``calibrate``, ``plan`` and ``report``: parse, call, print."""

from dataclasses import replace
from typing import Annotated

from cyclopts import Parameter

import meshwise
from meshwise.cli.options import ANY, Json, Rendezvous, Runs, Size, flags
from meshwise.cli.output import DONE, emit, say
from meshwise.options import helps
from meshwise.options.plan import PlanOptions
from meshwise.spec.costs import LawName

USUAL, ANYWHERE = PlanOptions(), Rendezvous()
FLAGS = Parameter(help=helps(PlanOptions)["megatron_args"], allow_leading_hyphen=True)


def detect(
    *,
    nproc: int | None = None,
    peak: tuple[str, ...] = (),
    out: str = "cluster.toml",
    measure: Annotated[bool | None, Parameter(negative="--no-measure")] = None,
    timeout: str | None = None,
    setup_timeout: str | None = None,
    meeting: Rendezvous = ANYWHERE,
    json: Json = False,
) -> int:
    """Look at this machine: devices, memory, links, datasheet peaks. Writes cluster.toml.

    On the ranks of a launcher it also compares the hosts and measures the links.

    Parameters
    ----------
    nproc
        Devices of each host to use: all GPUs, or 4 ranks on a CPU, by default.
    peak
        FLOP/s that no datasheet gives, as bf16=990e12; may be repeated.
    out
        The file to write.
    measure
        Measure the links, by a rank on each device. A launcher's ranks do so by default; with
        --no-measure they only look.
    timeout
        How long ranks wait in a collective or at a barrier; 30s by default, longer on shared cores.
    setup_timeout
        How long ranks wait at the start; 10m by default.
    """
    cluster = meshwise.detect(
        nproc=nproc, peak=peak, out=out, measure=measure, timeout=timeout,
        setup_timeout=setup_timeout,
    )  # fmt: skip
    from meshwise.pages import tables

    emit(cluster, tables.cluster(cluster), json)
    return DONE


def calibrate(
    *run: str,
    law: LawName | None = None,
    transfer_from: tuple[str, ...] = (),
    cluster: str | None = None,
    validate: bool = False,
    costs: str | None = None,
    runs: Runs = "runs",
    out: str | None = None,
    json: Json = False,
) -> int:
    """Fit prices to measurements, with their errors on points left out. Writes costs.json.

    With --validate instead: predict stored runs anew, and list how far each prediction is off.

    Parameters
    ----------
    run
        Run directories of measure; by default the newest. With --validate also of run, and folders
        of them; by default all.
    law
        Use this law for every curve instead of the one that predicts left-out points best.
    transfer_from
        Runs of another machine, for what RUN lacks: its prices are scaled by both data sheets.
    cluster
        With --transfer-from and no RUN: the machine of which nothing was measured; cluster.toml by
        default.
    validate
        Predict each run by the measurements that its plan names, or others of its machine.
    costs
        With --validate: prices for all runs of their machine.
    out
        The file to write; costs.json by default.
    """
    own = {"law": law, "out": out, "transfer_from": transfer_from or None, "cluster": cluster}
    odd = own if validate else {"costs": costs}
    for name, value in odd.items():
        if value is not None:
            fix = "leave one of them out" if validate else "only --validate takes it"
            raise ValueError(f"{name} = {value!r}: {fix}")
    if validate:
        from meshwise.pages import validation

        found = meshwise.validate(run, costs=costs, runs=runs)
        emit(found, validation.tables(found), json)
        return DONE
    made = meshwise.calibrate(
        run, law=law, transfer_from=transfer_from, cluster=cluster, runs=runs,
        out=out or "costs.json",
    )  # fmt: skip
    import msgspec

    from meshwise.fit import off_sheet
    from meshwise.pages import prices

    document = {**msgspec.to_builtins(made), "datasheet": off_sheet(made)}
    emit(document, prices.of(made), json)
    return DONE


def plan(
    asked: Annotated[PlanOptions, flags(PlanOptions, "megatron_args")] = USUAL,
    *,
    megatron_args: Annotated[str | None, FLAGS] = None,
    size: Size = ANY,
    json: Json = False,
) -> int:
    """Search the legal layouts of a model, pipelines included, for the fastest that fit.

    Writes plan.json. Needs no GPU. With --cluster alone, its data sheet replaces measurements.
    """
    chosen = meshwise.plan(replace(asked, megatron_args=megatron_args, gpus=size.ranks))
    from meshwise.pages import answers, tables

    emit(chosen, [*tables.plan(chosen), *answers.of(chosen)], json)
    return DONE


def report(
    *run: str,
    runs: Runs = "runs",
    costs: str = "costs.json",
    plan: str = "plan.json",
    out: str = "report.html",
    figure: tuple[str, ...] = (),
    scaling: Annotated[str | None, Parameter(name=("--scaling", "--results-dir"))] = None,
    output_dir: str | None = None,
    bandwidth: str | None = None,
    law: LawName | None = None,
    json: Json = False,
) -> int:
    """Write one self-contained page of what was measured, priced, planned and run.

    With --scaling instead: how ring attention scales, as pictures, a text and a page. With
    --bandwidth: collectives of the named runs, their fits, and uneven all-to-alls predicted.

    Parameters
    ----------
    run
        Run directories to show, besides the runs of the plan and those that the prices were fitted
        from; others are left out. Without them and without prices, all measurements are shown.
    costs
        Prices to show.
    plan
        The plan to show, with the runs of its model on its cluster.
    out
        The file to write.
    figure
        Write this figure of the page too, as phases.pdf; may be repeated. A wrong name lists all.
    scaling
        The folder of a scaling benchmark, `measure ring`'s --output_dir.
    output_dir
        With --scaling: where to write; by default the same folder.
    bandwidth
        A folder for latency_bw.png, fits.png, a2a.png and a2a.pdf of the named runs.
    law
        With --bandwidth: use this law for every curve, as ml_perf_model sigmoid.
    """
    if law is not None and bandwidth is None:
        raise ValueError(f"law = {law!r}: only --bandwidth fits anything; see calibrate --law")
    if bandwidth is not None:
        if scaling is not None:
            raise ValueError("scaling and bandwidth: only one of them can be; leave the other out")
        return _bandwidth(run, bandwidth, law, json)
    if scaling is not None:
        return _scaling(scaling, output_dir, json)
    if output_dir is not None:
        raise ValueError(
            f"output_dir = {output_dir!r}: only --scaling writes into a folder; give --out"
        )
    from meshwise.pages import steps
    from meshwise.verbs.report import gather, write

    path = str(write(contents := gather(runs, costs, plan, run), out, figure))
    emit({"path": path, "results": contents.results}, steps.tables(contents.results), json)
    if not json:
        say(path)
    return DONE


def _bandwidth(run: tuple[str, ...], folder: str, law: LawName | None, json: bool) -> int:
    from meshwise.pages.bandwidth import tables
    from meshwise.verbs.report import bandwidth

    found = bandwidth(*run, output_dir=folder, law=law)
    paths = list(map(str, found.paths))
    rules = [
        {"name": one.name, "rule": one.rule, "gmae": one.gmae, "mean": one.mean, "std": one.std}
        for one in found.judged
    ]
    emit({"paths": paths, "curves": found.costs.curves, "rules": rules},
         tables(found.costs, found.judged), json)  # fmt: skip
    if not json:
        say(*paths)
    return DONE


def _scaling(results_dir: str, output_dir: str | None, json: bool) -> int:
    from meshwise.pages.scaling import conclusions, read, tables
    from meshwise.verbs.report import write_scaling

    found = read(results_dir)
    paths = list(map(str, write_scaling(found, output_dir or results_dir)))
    said = conclusions(found)
    rows = [row._asdict() for row in found.rows]
    document = {"paths": paths, "conclusions": said, "rows": rows}
    emit(document, tables(found), json)
    if not json:
        say(*(f"- {line}" for line in said), *paths)
    return DONE
