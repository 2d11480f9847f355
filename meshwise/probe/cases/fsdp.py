"""``measure fsdp``: the messages that FSDP2 sends for a model, unit by unit. No torch."""

from meshwise.models import fsdp
from meshwise.models.catalogue import find
from meshwise.probe.cases.scope import Scope
from meshwise.spec import Case, Decoder, Derived, Model, Regime
from meshwise.spec.op import Dtype

DEFAULT = {"cuda": "llama-3-70b", "cpu": "gpt-30m"}


def cases(
    scope: Scope,
    *,
    models: tuple[Model | Decoder, ...] = (),
    replicas: int = 1,
    param_dtype: Dtype | None = None,
    reduce_dtype: Dtype | None = None,
    modes: tuple[Regime, ...] = ("warm",),
) -> list[Case]:
    """All-gathers, reduce-scatters and, with ``replicas`` (HSDP), all-reduces of every unit that
    differs. ``param_dtype`` is that of gathered weights, ``reduce_dtype`` of gradients; both are
    the scope's dtype unless given."""
    rows = derived(
        scope, models=models, replicas=replicas, param_dtype=param_dtype,
        reduce_dtype=reduce_dtype, modes=modes,
    )  # fmt: skip
    return list(dict.fromkeys(row.case for row in rows))


def derived(
    scope: Scope,
    *,
    models: tuple[Model | Decoder, ...] = (),
    replicas: int = 1,
    param_dtype: Dtype | None = None,
    reduce_dtype: Dtype | None = None,
    modes: tuple[Regime, ...] = ("warm",),
) -> list[Derived]:
    """The same cases with the model and units that each is of; equal units are one row, named
    together (``layers 0-79``)."""
    found: dict[tuple[str, Case], Derived] = {}
    units: dict[tuple[str, Case], list[str]] = {}
    for model in models or (find(DEFAULT[scope.cluster.device.kind]),):
        for one in planned(scope, model, replicas, param_dtype, reduce_dtype):
            for mode in modes:
                case = Case(op=one.collective, regime=mode, world_size=scope.world_size)
                row = Derived(model.name, 1, model.max_seq_len, model.hidden, 1, "", case)
                found.setdefault((model.name, case), row)
                units.setdefault((model.name, case), []).append(one.unit)
    return [row._replace(name=_together(units[key])) for key, row in found.items()]


def _together(units: list[str]) -> str:
    """``layers 0-2, 4, root``: each unit once, neighbours as a range."""
    ends: list[tuple[int, int]] = []
    for number in sorted({int(name.removeprefix("layers.")) for name in units if name != "root"}):
        first = ends.pop()[0] if ends and ends[-1][1] == number - 1 else number
        ends.append((first, number))
    ranges = ", ".join(f"{first}" if first == last else f"{first}-{last}" for first, last in ends)
    layers = [f"layers {ranges}"] if ranges else []
    return ", ".join([*layers, *(["root"] if "root" in units else [])])


def planned(
    scope: Scope, model: Model | Decoder, replicas: int = 1, param_dtype: Dtype | None = None,
    reduce_dtype: Dtype | None = None,
) -> list[fsdp.Planned]:  # fmt: skip
    """One step over all ranks of the scope."""
    if replicas < 1 or scope.world_size % replicas:
        raise ValueError(f"replicas = {replicas}: must divide the {scope.world_size} ranks")
    return fsdp.planned(
        model,
        shard=scope.world_size // replicas,
        replicas=replicas,
        param_dtype=param_dtype or scope.dtype,
        reduce_dtype=reduce_dtype or scope.dtype,
    )
