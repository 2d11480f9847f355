"""Narrow a search to a space of layouts, by the names of Alpa's benchmark or by fields of layouts.

In: words, as ``zero-3``, ``small_power_of_two`` or ``num_microbatches=32``; a later one replaces an
earlier one of its kind. Out: a ``Space``, which ``find`` asks about each layout, each way to run a
stage and each cut of the layers.

A stage's physical submesh is a part of a host or whole hosts; its logical mesh is (dp, tp). What
the names mean is in Alpa's benchmark_parallel_utils.py (modes) and stage_construction.py (spaces).
"""

import difflib
from collections.abc import Callable, Iterable
from typing import Annotated, Any, Literal, get_args

import msgspec
import numpy as np

from meshwise.models.counts import layer_flops
from meshwise.spec import AnyModel, Layout, Record, layer_kinds
from meshwise.spec.layout import Recompute, ScheduleName
from meshwise.spec.record import Count

Submeshes = Literal["all", "power_of_two", "small_power_of_two"]
_ONE_MESH = {"pp": "1", "submeshes": "all"}
NAMES: dict[str, dict[str, str]] = {  # of modes, then of spaces of physical and of logical shapes
    "search": {},
    "uniform": {"uniform": "true"},
    "2d_shard": {**_ONE_MESH, "cp": "1"},
    "zero-3": {**_ONE_MESH, "tp": "1", "zero": "3"},
    "shard-largest": {**_ONE_MESH, "dp": "1", "cp": "1"},
    "all": {"submeshes": "all", "same_as_physical": "false"},
    "power_of_two": {"submeshes": "power_of_two"},
    "small_power_of_two": {"submeshes": "small_power_of_two"},
    "single_node_model_parallel": {},  # tp never leaves a host
    "same_as_physical": {"same_as_physical": "true"},
    "data_parallel_only": {"tp": "1"},
    "model_parallel_only": {"dp": "1", "cp": "1"},
}
_NAMED: dict[str, Callable[[str], bool]] = {  # the fields of a name that count
    "parallel_mode": lambda field: True,
    "submesh_physical_shape_space": lambda field: field == "submeshes",
    "submesh_logical_shape_space": lambda field: field != "submeshes",
}
_ALWAYS = {  # stages are always priced as sums of measured layers; either value is taken
    "use_hlo_cost_model": ("true", "false"),
    "layer_profile_mode": ("composition", "individual"),
}
_OF_STAGES = ("dp", "tp", "cp", "ep", "zero", "sequence_parallel", "num_microbatches")
_IN_FLIGHT = {"num_micro_batches": "num_microbatches"}
_MOST_HOSTS = 4  # of small_power_of_two


class Space(Record, kw_only=True):
    """The layouts that a search may choose. None: any. ``submeshes``: numbers of devices of a
    stage. ``same_as_physical``: dp over a stage's hosts, tp over each host's devices.
    ``stage_imbalance_tolerance``: how far a stage's share of the devices and its share of the
    layers' FLOPs may be apart; 1.0 allows a factor of 2. ``num_auto_layers``: equal groups of
    layers, which stages do not cut. The others are fields of layouts; ``zero`` and
    ``sequence_parallel`` are of stages that have ranks to share."""

    uniform: bool = False
    submeshes: Submeshes = "all"
    same_as_physical: bool = False
    stage_imbalance_tolerance: Annotated[float, msgspec.Meta(ge=0)] | None = None
    num_auto_layers: Count | None = None
    dp: Count | None = None
    tp: Count | None = None
    cp: Count | None = None
    ep: Count | None = None
    pp: Count | None = None
    zero: Annotated[int, msgspec.Meta(ge=0, le=3)] | None = None
    sequence_parallel: bool | None = None
    num_microbatches: Count | None = None
    schedule: ScheduleName | None = None
    recompute: Recompute | None = None

    def has(self, layout: Layout, host: int) -> bool:
        """Return whether a layout of like stages is in the space, but for its cut and what it
        recomputes. ``host``: the devices of one."""
        return (
            self.pp in (None, layout.pp)
            and (layout.pp == 1 or self.schedule in (None, layout.schedule))
            and self.has_stage(layout, layout.num_devices // layout.pp, host)
        )

    def has_stage(self, inside: Layout, size: int, host: int) -> bool:
        """Return whether a stage on ``size`` devices may be run so."""
        hosts = max(1, size // host)
        is_power = (hosts if size > host else size).bit_count() == 1
        few = hosts <= _MOST_HOSTS or self.submeshes == "power_of_two"
        if self.submeshes != "all" and not (is_power and few):
            return False
        if self.same_as_physical and inside.data_ranks != hosts:
            return False
        free = {"zero": inside.data_ranks == 1, "sequence_parallel": inside.tp == 1}
        return all(
            getattr(self, name) in (None, getattr(inside, name)) or free.get(name)
            for name in _OF_STAGES
        )

    def has_cut(self, model: AnyModel, seq_len: int, layout: Layout) -> bool:
        """Return whether a layout of like stages may cut the layers and recompute as it does."""
        if self is ANY:
            return True
        stages = layout.stage_layers(model.layers)
        if self.recompute and (layout.recompute, layout.recompute_layers) != (self.recompute, None):
            return False
        if self.uniform and len({*map(len, stages)}) > 1:
            return False
        if not all(self.is_edge(stage.start, model.layers) for stage in stages):
            return False
        shares = self.shares(model, seq_len)
        return shares is None or all(
            self.is_balanced(1 / len(stages), shares[stage.stop] - shares[stage.start])
            for stage in stages
        )

    def is_edge(self, at: int, num_layers: int) -> bool:
        """Return whether a stage may begin or end at a layer."""
        count = min(self.num_auto_layers or num_layers, num_layers)
        return at in {n * num_layers // count for n in range(count + 1)}

    def shares(self, model: AnyModel, seq_len: int) -> np.ndarray | None:
        """Return the share of the FLOPs in the first 0, 1, ... layers; None if it does not
        matter."""
        if self.stage_imbalance_tolerance is None:
            return None
        flops = [layer_flops(model, seq_len, kind) for kind in layer_kinds(model, seq_len)]
        return np.cumsum([0, *flops]) / sum(flops)

    def is_balanced(self, of_devices: Any, of_flops: Any) -> Any:
        """Return whether a stage's two shares go together, of arrays for each pair."""
        most = 1 + (self.stage_imbalance_tolerance or 0.0)
        return (of_devices <= of_flops * most) & (of_devices * most >= of_flops)


ANY = Space()
_LEGAL = {name: get_args(of) for name, of in (
    ("submeshes", Submeshes), ("schedule", ScheduleName), ("recompute", Recompute),
)}  # fmt: skip


def space_of(words: Iterable[str]) -> Space:
    """Return the space that words name; a ValueError names the word that says nothing."""
    known = dict.fromkeys((*NAMES, *_ALWAYS, *_NAMED, *_IN_FLIGHT, *Space.__struct_fields__))
    said, found = dict[str, str](), ANY
    for word in words:
        name, is_pair, value = word.partition("=")
        _check("space", name, known)
        if name in _NAMED or not is_pair:
            of = value if is_pair else name
            _check(name if is_pair else "space", of, NAMES)
            counts = _NAMED.get(name, _NAMED["parallel_mode"])
            said |= {field: text for field, text in NAMES[of].items() if counts(field)}
        elif name in _ALWAYS:
            _check(name, value.lower(), _ALWAYS[name])
        else:
            _check(name, value, _LEGAL.get(name, [value]))
            said[_IN_FLIGHT.get(name, name)] = value
        try:
            found = msgspec.convert(said, Space, strict=False)
        except msgspec.ValidationError as error:
            reason = str(error).partition(" - at ")[0]
            raise ValueError(f"space = {word!r}: {reason}") from None
    return found


def _check(name: str, word: str, known: Iterable[str]) -> None:
    if word in (every := [*known]):
        return
    near = difflib.get_close_matches(word.lower(), every, n=1)
    hint = (
        f"is not known; did you mean {near[0]}?" if near else f"must be one of {', '.join(every)}"
    )
    raise ValueError(f"{name} = {word!r}: {hint}")
