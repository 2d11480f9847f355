"""show: read a file that Meshwise wrote, return its record; the command line prints tables.

``follow`` traces one operation from the model to its share of the predicted step; ``pattern``
explains an attention pattern.
"""

import difflib
import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from meshwise import machine, store
from meshwise.models import catalogue
from meshwise.options import keywords
from meshwise.options.ring import Pattern
from meshwise.pages.show import Shown, StoredRun, StoredSteps
from meshwise.pages.table import Table, listed, percent
from meshwise.spec import AnyModel, Case, Cluster, Costs, Plan
from meshwise.spec.checkpoint import Verified
from meshwise.spec.label import label
from meshwise.spec.long_attention import Dilation, LongAttention
from meshwise.spec.phases import Phases
from meshwise.spec.trace import TraceCheck
from meshwise.units import format_bytes, format_seconds
from meshwise.verbs import files

if TYPE_CHECKING:
    from meshwise.attention.cover import Cover
    from meshwise.search.explain import Explained

KINDS = (
    "cluster.toml, costs.json, plan.json, a run directory, run.json, samples.jsonl, steps.jsonl, "
    "phases.json, nccl_check.json, a checkpoint's folder, a config.json, or the name of a cluster "
    "or a model, as h100-hgx or llama-3-8b"
)
log = logging.getLogger("meshwise")

# A field that only this record has -> the record.
_KINDS: dict[str, type[Cluster | Costs | Plan | Phases | TraceCheck]] = {
    "tiers": Cluster,
    "surfaces": Costs,
    "prediction": Plan,
    "profiled_step_s": Phases,
    "agrees": TraceCheck,
}
_CHECKPOINT = {"step", "seed", "data", "files", "tensors"}
_TOLD_EVERY_S = 10.0


def show(path: Path | str) -> Shown:
    """Return the record in ``path``: cluster.toml, costs.json, plan.json, a run (its directory,
    run.json, samples.jsonl or steps.jsonl), phases.json, nccl_check.json, a checkpoint, or a
    model's config.json. Or the record of a name: a cluster that comes with Meshwise, a model of the
    catalogue. For a checkpoint's folder all data are verified, for its checkpoint.json none. A file
    is recognised by its fields, not by its name."""
    path = Path(path)
    if not path.exists():
        return _named(str(path))
    if path.name == "steps.jsonl":
        return StoredSteps(run_id=path.parent.name, steps=tuple(store.steps(path.parent)))
    if path.name in ("run.json", "samples.jsonl") or (path / "run.json").exists():
        info, samples = files.load(path)
        return StoredRun(info=info, samples=tuple(samples))
    if (path / "checkpoint.json").exists():
        return _verified(path)
    fields: dict[str, Any] = {}
    if path.suffix in (".toml", ".json"):
        fields = store.read(path, dict)
    if "traceEvents" in fields:
        raise ValueError(f"{path} is a trace; open it at ui.perfetto.dev")
    if fields.keys() >= _CHECKPOINT:
        from meshwise.engine import folder

        return Verified(checkpoint=folder.read(path), verified_bytes=0, damage=())
    for name, kind in _KINDS.items():
        if name in fields:
            return store.read(path, kind)
    if "model_type" in fields or "family" in fields or (path / "config.json").exists():
        return catalogue.find_any(str(path))
    raise ValueError(f"{path} is no file that Meshwise writes; show reads {KINDS}")


def _named(name: str) -> Cluster | AnyModel:
    """Return a cluster that comes with Meshwise, or a model of the catalogue."""
    clusters, models = machine.shipped(), catalogue.all_names()
    if name in clusters:
        return files.take(name, Cluster)
    if name in models:
        return catalogue.find_any(name)
    near = difflib.get_close_matches(name, [*clusters, *models], n=1)
    hint = f"did you mean {near[0]}?" if near else f"show reads {KINDS}"
    raise ValueError(f"{name} does not exist; {hint}")


def _verified(path: Path) -> Verified:
    """Read a checkpoint and compare every block of its data with its hash."""
    from meshwise.engine import blocks, folder

    record = folder.read(path / folder.JSON)
    size = 0 if record.note else sum(stored.bytes for stored in record.files.values())
    done, last = 0, time.monotonic()

    def told(read: int) -> None:
        nonlocal done, last
        done += read
        if time.monotonic() - last > _TOLD_EVERY_S:
            last = time.monotonic()
            log.info("verified %s of %s", format_bytes(done), format_bytes(size))

    damage = blocks.damage(path, record, told)
    return Verified(checkpoint=record, verified_bytes=size, damage=damage)


def follow(
    path: Path | str, node: str, costs: Path | str = "costs.json"
) -> "tuple[Explained, ...]":
    """Follow ``node`` of the model (``layers.0.up``) into the plan at ``path``. Prices are those
    that the plan was made from. A file that is no plan, or an unknown node, raises a ValueError;
    for a node it suggests the nearest name."""
    from meshwise import models, search
    from meshwise.prices import unmeasured

    plan = show(path)
    if not isinstance(plan, Plan):
        raise ValueError(f"{path}: --node needs a plan.json")
    work, layout = plan.workload, plan.layout
    whole = models.graph(plan.model, layout.microbatch_size, work.seq_len, plan.dtype)
    known = [n.name for n in whole.nodes if n.phase == "forward"]
    near = difflib.get_close_matches(node, known, n=1)
    if near and node not in known:
        raise ValueError(f"no operation {node!r} in {plan.model.name}; did you mean {near[0]}?")
    if plan.prediction and plan.prediction.tier == "datasheet" and not plan.runs:
        return search.explain(plan, unmeasured(plan.cluster), node)
    prices = msgspec.structs.replace(files.take(costs, Costs), cluster=plan.cluster)
    return search.explain(plan, prices, node)


def followed(tasks: "tuple[Explained, ...]") -> Table:
    """Make a table with a row for each task of a rank."""
    return listed(
        "From the model to the plan, on one rank",
        tasks,
        ("task", "task"),
        ("operation", lambda task: label(Case(op=task.op))),
        ("price from", "source"),
        ("price", "price_s", format_seconds),
        ("error", "relative_error", percent),
        ("factor", "factor", "{:.3f}".format),
        ("times", "times"),
        ("in a step", "seconds", format_seconds),
        legend=(
            "in a step = price x factor of its block x times; error: p90 held out, or the sheet's.",
        ),
        left=3,
    )


@keywords(Pattern)
def pattern(asked: Pattern) -> "Cover":
    """Explain what an attention pattern covers, costs and moves. Without segments it is dense."""
    from meshwise.attention import cover, shards

    if asked.ranks > asked.seq_len:
        raise ValueError(f"ranks = {asked.ranks}: must be 1 to {asked.seq_len}")
    rule = ("segment_lengths", "dilation_rates", "offsets", "offset_heads")
    is_dilated = asked.segment_lengths or asked.dilation_rates
    names = ("seq_len", "heads", "head_dim", "batch", "dtype", "causal", "window")
    op = LongAttention(
        **{name: getattr(asked, name) for name in names},
        kv_heads=asked.heads if asked.kv_heads is None else asked.kv_heads,
        dilation=Dilation(**{name: getattr(asked, name) for name in rule}) if is_dilated else None,
        order="zigzag" if asked.zigzag else "contiguous",
    )
    where = (shards.zigzag if asked.zigzag else shards.contiguous)(asked.seq_len, asked.ranks)
    found = cover.of(op, where)
    if asked.figure is not None:
        from meshwise.pages import pattern as page
        from meshwise.pages import svg

        svg.write(asked.figure, page.figure(op, where))
        log.info("wrote %s", asked.figure)
    return found
