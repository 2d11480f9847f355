"""validate: predict every stored run anew, and list how far each prediction is off."""

import contextlib
import logging
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple, cast

import msgspec

from meshwise import store
from meshwise.files import parse_json, read_bytes
from meshwise.fit.calibrate import calibrate, expected_s
from meshwise.pages import steps
from meshwise.pages import validation as pages
from meshwise.pages.steps import MeasuredQuantity
from meshwise.pages.validation import CheckedRun, CheckedSamples, NotChecked, Validation
from meshwise.prices import Prices, on_hosts
from meshwise.prices.key import how, op_key
from meshwise.search.progress import Reporter
from meshwise.spec import Block, Cluster, Costs, Plan, RunInfo, Sample, Shaped, Sized
from meshwise.spec.label import label
from meshwise.spec.run import changes
from meshwise.verbs import files, price

log = logging.getLogger("meshwise")


class _Stored(NamedTuple):
    path: Path
    info: RunInfo
    samples: list[Sample]


def validate(
    run: Path | str | tuple[Path | str, ...] = (),
    *,
    costs: Path | str | None = None,
    runs: Path | str = "runs",
) -> Validation:
    """Predict runs anew with this version and compare with what they measured. ``run``: run
    directories, or folders of them; all under ``runs`` by default. ``costs``: the prices to use.

    By default a training is predicted by the measurements that its plan names, fitted anew, if they
    lie beside it (or by their costs.json); else by all runs of ``measure profile`` of its machine
    among ``run``. Operations of ``measure`` are priced by other runs than their own. A run that
    cannot be predicted is listed with the reason.
    """
    paths: dict[Path, None] = {}
    for named in files.several(run) or (runs,):
        found = sorted(file.parent for file in Path(named).rglob("run.json"))
        if not found:
            raise ValueError(f"no run in {named}; name a run directory, or a folder of them")
        paths |= dict.fromkeys(found)
    trained, measured, lost = list[CheckedRun](), list[CheckedSamples](), list[NotChecked]()
    tell = Reporter()
    loaded = list(_loaded(paths, lost, tell))
    pool = _Pool(loaded, None if costs is None else files.take(costs, Costs))
    for number, one in enumerate(loaded):
        tell("%d of %d runs predicted", number, len(loaded))
        try:
            if one.info.plan is not None:
                trained.append(_trained(one, one.info.plan, pool))
            else:
                measured += _measured(one, pool)
        except ValueError as reason:
            lost.append(NotChecked(path=str(one.path), reason=str(reason)))
    return pages.validation(trained, measured, lost)


def _loaded(paths: dict[Path, None], lost: list[NotChecked], tell: Reporter) -> Iterator[_Stored]:
    """Load runs. Those that this version does not read, or with damaged lines alone, are lost."""
    for number, path in enumerate(paths):
        tell("%d of %d runs read", number, len(paths))
        try:
            info, samples, warnings = store.load(path)
            if warnings and not samples:
                raise ValueError(warnings[0])
        except ValueError as error:
            said = str(error).replace(f"{path}/", "")
            said = said if len(said) < 240 else f"{said[:80]} ... {said[-150:]}"
            lost.append(NotChecked(path=str(path), reason=said))
            continue
        for warning in warnings:
            log.warning("%s", warning)
        yield _Stored(path, info, samples)


class _Pool:
    """Prices to predict runs with: those given, or fitted to stored measurements when needed."""

    def __init__(self, loaded: list[_Stored], given: Costs | None) -> None:
        self.given = given
        profiles = [one for one in loaded if "-measure-profile" in one.info.run_id and one.samples]
        self.profiles = sorted(profiles, key=lambda one: one.info.run_id)
        self._fitted: dict[tuple[Path, ...], Costs] = {}
        self._prices: dict[tuple[Any, ...], tuple[Costs, Prices]] = {}

    def costs(self, of: _Stored) -> tuple[Costs, bool]:
        """Return prices of a run's machine that do not rest on the run itself, and whether its plan
        was made with them. Without any, a ValueError."""
        info, names = of.info, of.info.plan.runs if of.info.plan else ()
        if self.given is not None:
            if not _fits(info, self.given.cluster) or info.run_id in self.given.runs:
                raise ValueError("the costs given are of another machine, or rest on this run")
            return self.given, names == self.given.runs
        own = [of.path.parent / name for name in names]
        if own and all((path / "run.json").exists() for path in own):
            return self._fit(own), True
        if names and (kept := _kept(of.path, names)):
            return kept, True
        others = [one for one in self.profiles if one.info.run_id != info.run_id]
        if not (alike := [one for one in others if _fits(info, one.info.cluster)]):
            lacking = f" ({', '.join(names)} is not here)" if names else " but its own"
            raise ValueError(f"no prices for {info.cluster.name}{lacking}; name some with --costs")
        last = _kind(alike[-1])
        return self._fit([one.path for one in alike if _kind(one) == last]), False

    def _fit(self, paths: list[Path]) -> Costs:
        """Fit prices to runs of one machine."""
        if (at := tuple(paths)) not in self._fitted:
            self._fitted[at] = calibrate([store.load(path)[:2] for path in paths])
        return self._fitted[at]

    def prices(self, costs: Costs, **of: Any) -> Prices:
        """Return prices with other fields of ``costs``, which stay alive: their id is the key."""
        at = (id(costs), *map(str, of.values()))
        if at not in self._prices:
            self._prices[at] = costs, Prices(msgspec.structs.replace(costs, **of), datasheet=True)
        return self._prices[at][1]


def _kept(path: Path, runs: tuple[str, ...]) -> Costs | None:
    """Return the costs.json near a run, if it is of these measurements and of this version."""
    for folder in path.parents[:2]:
        with contextlib.suppress(ValueError, OSError):
            found = store.read(folder / "costs.json", Costs)
            if found.runs == runs:
                return found
    return None


def _fits(info: RunInfo, priced: Cluster) -> bool:
    """Return whether prices of a cluster are those of a run's machine. A rank alone on a GPU needs
    the same device; others also as many of them on a host."""
    here, alone = info.cluster, info.world_size == 1 and priced.device.kind == "cuda"
    as_many = here.num_devices_per_host == priced.num_devices_per_host
    return here.device.name == priced.device.name and (alone or as_many)


def _kind(one: _Stored) -> tuple[int, int]:
    """Return the size of a host and the method of timing: what is fitted together shares them."""
    return one.info.cluster.num_devices_per_host, one.samples[0].method_version


def _trained(one: _Stored, plan: Plan, pool: _Pool) -> CheckedRun:
    """Predict a training, and compare with what it measured."""
    from meshwise import search

    found = steps.result(one.info, one.samples)
    if found.time is None:
        raise ValueError(f"no step was measured: {found.reason}")
    if found.mode != "train":
        raise ValueError(f"{found.mode}: only training is predicted")
    has_tf32 = "tf32" in plan.cluster.device.peak_flops
    if plan.dtype == "fp32" and has_tf32 and not _says_precision(one.path):
        raise ValueError(
            "its record lacks recipe.fp32_precision: torch chose, TF32 for convolutions; prices "
            "are of IEEE fp32; run it again"
        )
    costs, own = pool.costs(one)
    cluster, hosts = costs.cluster, plan.cluster.num_hosts
    if hosts != cluster.num_hosts:
        cluster = on_hosts(cluster, hosts, plan.cluster)
    of = {"dtype": plan.dtype, "lowering": plan.lowering, "recipe": plan.recipe}
    prices = pool.prices(costs, cluster=cluster, **of)
    told = search.predict(plan.model, plan.workload, plan.layout, prices)
    info = msgspec.structs.replace(one.info, plan=msgspec.structs.replace(plan, prediction=told))
    found = steps.result(info, one.samples)
    return CheckedRun(
        model=plan.model.name or "model",
        layout=plan.layout.name,
        time=cast(MeasuredQuantity, found.time),
        memory=found.memory,
        tier=told.tier,
        own=own,
        **_about(one, costs),
    )


def _says_precision(path: Path) -> bool:
    """Return whether run.json itself, before defaults fill it, says how fp32 was multiplied."""
    stored = parse_json(read_bytes(path / "run.json"), str(path))
    return "fp32_precision" in stored["plan"].get("recipe", {})


def _about(one: _Stored, costs: Costs) -> dict[str, Any]:
    """Return the fields of ``Checked``."""
    info, changed = one.info, changes(costs.versions, one.info.versions)
    about = {"path": str(one.path), "run_id": info.run_id, "machine": info.cluster.name}
    return {**about, "prices": costs.runs, "changed": changed, "busy": info.busy}


def _measured(one: _Stored, pool: _Pool) -> list[CheckedSamples]:
    """Price the operations of a run, kind by kind, and compare with what it measured."""
    found, unpriced = dict[str, list[tuple[float, str, bool]]](), Counter[str]()
    done = [sample for sample in one.samples if sample.status == "ok"]
    priceable = [sample for sample in done if isinstance(sample.case.op, Shaped | Sized | Block)]
    if not priceable:
        raise ValueError(f"{one.info.verb}: it measured no operation that has a price")
    costs, _ = pool.costs(one)
    for sample in priceable:
        op: Any = sample.case.op
        kind, ran = type(op).__struct_config__.tag, how(sample.case)
        prices = pool.prices(costs, lowering=sample.case.lowering)
        try:
            is_known = op_key(op, ran, costs.cluster).category in prices.known
        except ValueError:  # a group larger than the prices' cluster
            is_known = False
        if not is_known or (told := price.of(op, prices, ran)).time_s == 0:
            unpriced[kind] += 1
            continue
        measured = expected_s(sample)
        inside = told.low_s <= measured <= told.high_s
        row = abs(told.time_s / measured - 1), label(sample.case), inside
        found.setdefault(kind, []).append(row)
    if not found:
        raise ValueError("measure: none of its operations has a price that others measured")
    return [
        CheckedSamples(
            kind=kind,
            num_samples=len(rows),
            num_inside=sum(inside for *_, inside in rows),
            num_unpriced=unpriced[kind],
            mean_error=fmean(error for error, *_ in rows),
            worst_error=max(rows)[0],
            worst=max(rows)[1],
            **_about(one, costs),
        )
        for kind, rows in found.items()
    ]
