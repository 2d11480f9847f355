"""``measure fsdp``: the messages that FSDP2 sends for a model, unit by unit. No torch."""

from collections.abc import Iterator

from meshwise.models import blocks_of, fsdp
from meshwise.models.catalogue import find
from meshwise.options.measure import FsdpOptions
from meshwise.probe.cases.scope import Scope, distinct, models_of
from meshwise.spec import AnyModel, Case, Derived, Layout, Overlap
from meshwise.spec.op import Dtype

DEFAULT = {"cuda": "llama-3-70b", "cpu": "gpt-30m"}


def cases(scope: Scope, asked: FsdpOptions) -> list[Case]:
    """List the messages of all units, no case twice."""
    return distinct(derived(scope, asked))


def derived(scope: Scope, asked: FsdpOptions) -> list[Derived]:
    """List all-gathers, reduce-scatters and, with ``replicas`` (HSDP), all-reduces of each unit.

    Units with the same message share one row (``layers 0-79``).
    """
    replicas, dtype = asked.replicas, scope.dtype
    if replicas < 1 or scope.world_size % replicas:
        raise ValueError(f"replicas = {replicas}: must divide the {scope.world_size} ranks")
    found: dict[tuple[str, Case], Derived] = {}
    units: dict[tuple[str, Case], list[str]] = {}
    for model in models_of(asked) or (find(DEFAULT[scope.cluster.device.kind]),):
        planned = fsdp.planned(
            model,
            shard=scope.world_size // replicas,
            replicas=replicas,
            param_dtype=asked.param_dtype or dtype,
            reduce_dtype=asked.reduce_dtype or dtype,
        )
        for one in planned:
            for mode in asked.modes or ("warm",):
                case = Case(op=one.collective, regime=mode, world_size=scope.world_size)
                row = Derived(model.name, 1, model.max_seq_len, model.hidden, 1, "", case)
                found.setdefault((model.name, case), row)
                units.setdefault((model.name, case), []).append(one.unit)
    return [row._replace(name=_together(units[key])) for key, row in found.items()]


def _together(units: list[str]) -> str:
    """Join unit names: ``layers 0-2, 4, root``, each unit once, neighbours as a range."""
    ends: list[tuple[int, int]] = []
    for number in sorted({int(name.removeprefix("layers.")) for name in units if name != "root"}):
        first = ends.pop()[0] if ends and ends[-1][1] == number - 1 else number
        ends.append((first, number))
    ranges = ", ".join(f"{first}" if first == last else f"{first}-{last}" for first, last in ends)
    layers = [f"layers {ranges}"] if ranges else []
    return ", ".join([*layers, *(["root"] if "root" in units else [])])


def beside_units(
    model: AnyModel, seq_len: int, microbatch_size: int, ranks: int, dtype: Dtype
) -> Iterator[Overlap]:
    """Yield each kind of layer beside the messages of its FSDP2 unit over ``ranks``: forward beside
    the gather, backward beside the gather and the reduction."""
    sent = fsdp.planned(model, shard=ranks, param_dtype=dtype)
    messages = {one.collective.kind: one.collective for one in sent if one.unit != "root"}
    layout = Layout(microbatch_size=microbatch_size)
    for ((part, _), way), block in blocks_of(model, seq_len, layout, dtype).items():
        for kind, message in messages.items() if part == "layer" else ():
            if way == "backward" or kind == "all_gather":
                yield Overlap(compute=block, collective=message)
