"""``measure fsdp``: the messages that FSDP2 sends for a model, unit by unit. No torch."""

from meshwise.models import fsdp
from meshwise.models.catalogue import find
from meshwise.probe.cases.scope import Scope, distinct
from meshwise.spec import Case, Decoder, Derived, Model, Regime
from meshwise.spec.op import Dtype

DEFAULT = {"cuda": "llama-3-70b", "cpu": "gpt-30m"}


def derived(
    scope: Scope,
    *,
    models: tuple[Model | Decoder, ...] = (),
    replicas: int = 1,
    param_dtype: Dtype | None = None,
    reduce_dtype: Dtype | None = None,
    modes: tuple[Regime, ...] = ("warm",),
) -> list[Derived]:
    """List all-gathers, reduce-scatters and, with ``replicas`` (HSDP), all-reduces of each unit.

    Equal units are one row, named together (``layers 0-79``). ``param_dtype`` is the dtype of
    gathered weights, ``reduce_dtype`` that of gradients; by default the scope's.
    """
    if replicas < 1 or scope.world_size % replicas:
        raise ValueError(f"replicas = {replicas}: must divide the {scope.world_size} ranks")
    found: dict[tuple[str, Case], Derived] = {}
    units: dict[tuple[str, Case], list[str]] = {}
    for model in models or (find(DEFAULT[scope.cluster.device.kind]),):
        planned = fsdp.planned(
            model,
            shard=scope.world_size // replicas,
            replicas=replicas,
            param_dtype=param_dtype or scope.dtype,
            reduce_dtype=reduce_dtype or scope.dtype,
        )
        for one in planned:
            for mode in modes:
                case = Case(op=one.collective, regime=mode, world_size=scope.world_size)
                row = Derived(model.name, 1, model.max_seq_len, model.hidden, 1, "", case)
                found.setdefault((model.name, case), row)
                units.setdefault((model.name, case), []).append(one.unit)
    return [row._replace(name=_together(units[key])) for key, row in found.items()]


cases = distinct(derived)


def _together(units: list[str]) -> str:
    """``layers 0-2, 4, root``: each unit once, neighbours as a range."""
    ends: list[tuple[int, int]] = []
    for number in sorted({int(name.removeprefix("layers.")) for name in units if name != "root"}):
        first = ends.pop()[0] if ends and ends[-1][1] == number - 1 else number
        ends.append((first, number))
    ranges = ", ".join(f"{first}" if first == last else f"{first}-{last}" for first, last in ends)
    layers = [f"layers {ranges}"] if ranges else []
    return ", ".join([*layers, *(["root"] if "root" in units else [])])
