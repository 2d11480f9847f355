"""Configurations of other trainers.

``megatron`` and ``torchtitan`` read one as a ``Configured``, and write a plan as one. What of the
plan it does not say is found by reading it again.
"""

import difflib
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, NamedTuple

import msgspec

from meshwise.models import catalogue
from meshwise.spec import LanguageModel, Layout, Plan, Recipe, Workload
from meshwise.spec.layout import Cuts


class Configured(NamedTuple):
    """A configuration in our records. ``lowering``: None if it does not say. ``notes``: what is
    planned otherwise than it says. ``ignored``: settings on which no plan depends."""

    model: LanguageModel
    workload: Workload
    layout: Layout
    recipe: Recipe
    dtype: Literal["bf16", "fp32"]
    lowering: Literal["eager", "compiled"] | None
    notes: tuple[str, ...]
    ignored: tuple[str, ...]


class ConfigValues:
    """Settings by name, from a file or a command line. Values are checked when they are asked for;
    ``unused`` has the names that nobody asked for."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values, self.asked = values, set[str]()

    def get(self, name: str, usual: Any = None) -> Any:
        self.asked.add(name)
        return self.values.get(name, usual)

    def flag(self, name: str, usual: bool = False) -> bool:
        if not isinstance(found := self.get(name, usual), bool):
            raise ValueError(f"{name} = {found!r}: must be true or false")
        return found

    def count(self, name: str, usual: int | None = None, least: int = 1, most: int = 2**53) -> int:
        found = self.get(name, usual)
        if found is None:
            raise ValueError(f"{name} is missing, and what is planned depends on it; add it")
        number = int(found) if isinstance(found, str) and found.isdecimal() else found
        if isinstance(number, bool) or not isinstance(number, int) or number < least:
            raise ValueError(f"{name} = {found!r}: must be a whole number >= {least}{_open(found)}")
        if number > most:
            raise ValueError(f"{name} = {number}: must be <= {most}")
        return number

    def number(self, name: str, usual: float) -> float:
        found = self.get(name, usual)
        try:
            number = float(found)
        except (TypeError, ValueError):
            number = math.nan
        if not math.isfinite(number):
            raise ValueError(f"{name} = {found!r}: must be a number{_open(found)}")
        return number

    def word(self, name: str, usual: str, known: Iterable[str]) -> str:
        found = self.get(name, usual)
        if found not in (known := tuple(known)):
            raise ValueError(f"{name} = {found!r}: must be one of {', '.join(known)}{_open(found)}")
        return str(found)

    @property
    def unused(self) -> tuple[str, ...]:
        return tuple(name for name in self.values if name not in self.asked)


def _open(found: object) -> str:
    return "; the script leaves it open, so write the value" if "$" in str(found) else ""


def unknown(name: str, known: Iterable[str], what: str) -> ValueError:
    """Return the error of a name that is not known, with the nearest."""
    near = difflib.get_close_matches(name, tuple(known), n=1)
    return ValueError(f"{name}: is no {what}{f'; did you mean {near[0]}?' if near else ''}")


def named(model: LanguageModel) -> LanguageModel:
    """Return the model of the catalogue that has these sizes; the model itself if none has."""
    same = msgspec.structs.replace(model, name="")
    for name in catalogue.all_names():
        found = catalogue.find_any(name)
        if msgspec.structs.replace(found, name="") == same:
            assert isinstance(found, LanguageModel)
            return found
    return model


def of_stages(layers: tuple[int, ...]) -> tuple[int, ...]:
    """Return ``Layout.layers`` of stages: nothing where all have the same."""
    return () if len(set(layers)) == 1 else layers


def divided(what: str, total: int, by: int, names: str) -> int:
    """Return ``total`` / ``by``, which ``names`` make up; a remainder is refused."""
    if total % by:
        raise ValueError(f"{what} = {total}: must be a multiple of {names}, {by}")
    return total // by


def text_of(
    plan: Plan,
    tool: str,
    write: Callable[[Plan, LanguageModel], tuple[str, list[str]]],
    read: Callable[[str, int], Configured],
) -> tuple[str, tuple[str, ...]]:
    """Write a plan as a configuration; return its text and what of the plan it does not say.
    ``write`` returns the text and remarks of its own."""
    if not isinstance(model := plan.model, LanguageModel):
        raise ValueError(f"{model.name or 'the model'} is an image model; {tool} has none")
    layout = plan.layout
    body, notes = write(plan, model)
    try:
        notes = [*notes, *_lost(plan, read(body, layout.num_devices))]
    except ValueError as error:
        notes.append(f"read again it is refused: {error}")
    head = f"{model.name or 'the model'} as {layout.name}, {plan.dtype}, {layout.num_devices} ranks"
    told = [f"# not said here: {note}\n" for note in notes]
    return f"# {tool}, from a plan by Meshwise: {head}\n{''.join(told)}{body}", tuple(notes)


def _lost(plan: Plan, back: Configured) -> list[str]:
    """List the fields in which a plan differs from its configuration read again."""
    found = []
    for record in ("workload", "layout", "recipe", "model"):
        mine, read = getattr(plan, record), getattr(back, record)
        if isinstance(mine, Layout):
            mine, read = plain_layout(mine), plain_layout(read)
        if type(mine) is not type(read):
            found.append(f"{record} is a {type(mine).__name__}, read as a {type(read).__name__}")
            continue
        for field in set(mine.__struct_fields__) - {"name"}:
            one, other = getattr(mine, field), getattr(read, field)
            found += [f"{record}.{field} = {_short(one)}; it says {_short(other)}"] * (one != other)
    for name in ("dtype", "lowering"):
        one, other = getattr(plan, name), getattr(back, name)
        found += [f"{name} = {one}; it says {other}"] * (other not in (one, None))
    return sorted(found)


def plain_layout(layout: Layout) -> Layout:
    """Return the layout with one spelling for each thing that can be said in two ways."""
    is_seq, cuts = layout.placed.stream == "seq", layout.placed
    if is_seq:
        cuts = msgspec.structs.replace(cuts, stream="whole")
    layers = of_stages(layout.layers)
    return msgspec.structs.replace(layout, sequence_parallel=is_seq, cuts=cuts, layers=layers)


def _short(value: object) -> str:
    if isinstance(value, Cuts):
        return value.name or "the usual ones"
    if isinstance(value, msgspec.Struct):
        fields = msgspec.to_builtins(value).items()
        return ", ".join(f"{field} {one}" for field, one in fields if one is not None)
    if isinstance(value, tuple):
        return ",".join(getattr(one, "name", str(one)) for one in value) or "none"
    return str(value)
