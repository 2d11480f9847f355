"""The base of every record: frozen, keyword-only, strict about names and ranges.

A field's range is declared once, in its annotation (``Annotated[int, Meta(ge=1)]``). It is checked
when a record is built in Python and when it is read from a file. The error for a wrong value is one
line that names the record, the field, the value and the allowed range.
"""

import functools
import hashlib
import math
import operator
import re
import typing
from collections.abc import Callable
from typing import Annotated, Any

import msgspec
from msgspec import Meta

Positive = Annotated[int, Meta(ge=1)]
Count = Annotated[int, Meta(ge=1, le=2**20)]  # for things that code loops over: ranks, experts
Length = Annotated[int, Meta(ge=1, le=2**40)]  # the product of three is still exact
NonNegative = Annotated[int, Meta(ge=0)]
PositiveFloat = Annotated[float, Meta(gt=0, le=1e300)]
NonNegativeFloat = Annotated[float, Meta(ge=0, le=1e300)]

MOST_SHOWN = 100  # characters of a value, in an error
_BOUNDS = (
    ("ge", lambda value, bound: value >= bound, ">="),
    ("gt", lambda value, bound: value > bound, ">"),
    ("le", lambda value, bound: value <= bound, "<="),
    ("lt", lambda value, bound: value < bound, "<"),
)


_Constraint = tuple[str, bool, tuple[Any, ...], tuple[Any, ...]]  # see _constraints


@typing.dataclass_transform(  # mypy does not see that msgspec inherits frozen
    frozen_default=True, kw_only_default=True, field_specifiers=(msgspec.field,)
)
class Record(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, cache_hash=True
):
    """Frozen data with checked ranges. Subclasses override ``check`` for rules across fields."""

    def __post_init__(self) -> None:
        values, ranges, others = _in_range(type(self))
        for held, (choices, least, most) in zip(values(self), ranges, strict=True):
            if held is None or (held in choices if choices else least <= held <= most):
                continue
            self._check_ranges(_constraints(type(self)))
        for constraint in others:
            if getattr(self, constraint[0]) != ():
                self._check_ranges((constraint,))
        self.check()

    def _check_ranges(self, constraints: tuple[_Constraint, ...]) -> None:
        for field, is_tuple, choices, bounds in constraints:
            held = getattr(self, field)
            if held is None:
                continue
            each = "each " if is_tuple else ""
            for value in held if is_tuple else (held,):
                if choices and value not in choices:
                    self.fail(field, f"{each}must be one of {', '.join(map(str, choices))}")
                for holds, bound, sign in bounds:
                    if not holds(value, bound):
                        self.fail(field, f"{each}must be {sign} {bound}")

    def check(self) -> None:
        """Check rules across fields; call ``self.fail(field, fix)`` if one is broken."""

    def fail(self, field: str, fix: str) -> typing.NoReturn:
        """Raise the one-line error that names this record, the field, its value and the fix."""
        value = getattr(self, field)
        records = value if isinstance(value, tuple) else (value,)
        shown = repr(value)
        if records and all(isinstance(one, Record) for one in records):
            shown = ", ".join(getattr(one, "name", "") for one in records)
        shown = shown if len(shown) <= MOST_SHOWN else f"{shown[:MOST_SHOWN]} ..."
        is_shown = f" = {shown}" if shown else ""
        raise ValueError(f"{type(self).__name__}.{field}{is_shown}: {fix}")


class Exact(Record, kw_only=True):
    """A record that programs build. Fields must have their exact type; lists become tuples."""

    def __post_init__(self) -> None:
        given = {field: getattr(self, field) for field in type(self).__struct_fields__}
        for field in [field for field in given if type(given[field]) is list]:
            given[field] = tuple(given[field])
            msgspec.structs.force_setattr(self, field, given[field])
        if found := mistyped(given, _kinds(type(self))):
            self.fail(*found)
        super().__post_init__()


@functools.cache
def _kinds(cls: type) -> Any:
    """Return a TypedDict of the fields' types. ``Record`` checks ranges and choices."""
    hints = {
        field: str if typing.get_origin(hint) is typing.Literal else hint
        for field, hint in typing.get_type_hints(cls).items()
        if field in cls.__struct_fields__  # type: ignore[attr-defined]
    }
    return typing.TypedDict(cls.__name__, hints)  # type: ignore[operator]


def mistyped(given: dict[str, Any], kinds: Any) -> tuple[str, str] | None:
    """Return the name of the first value that does not match ``kinds``, a TypedDict, and the error.

    Nothing is converted: True and 1.0 are no int, a list is no tuple, a tuple is no NamedTuple.
    """
    apart = {  # as plain tuples: NamedTuples would pass unchecked
        name: tuple(value) if isinstance(value, tuple) else value for name, value in given.items()
    }
    try:
        made = msgspec.convert(apart, kinds, strict=True)
    except msgspec.ValidationError as error:
        text, _, path = str(error).partition(" - at `$")
        return re.findall(r"\w+", path)[0], text[0].lower() + text[1:]
    for name, value in given.items():
        kind = type(made[name])
        if value is not made[name] and (kind is not type(value) or value != made[name]):
            return name, f"expected `{kind.__name__}`, got `{type(value).__name__}`"
    return None


@functools.cache
def _in_range(cls: type) -> tuple[Callable[[Any], Any], tuple[Any, ...], tuple[_Constraint, ...]]:
    """Split a class's constraints: a getter of the fields that one comparison checks, their choices
    and bounds, and the other constraints. Fast, since searches build tens of thousands of
    records."""
    quick, others = dict[str, tuple[Any, float, float]](), list[_Constraint]()
    for field, is_tuple, choices, bounds in _constraints(cls):
        limits = {sign: bound for _, bound, sign in bounds}
        if is_tuple or not limits.keys() <= {">=", "<="}:
            others.append((field, is_tuple, choices, bounds))
        else:
            ends = limits.get(">=", -math.inf), limits.get("<=", math.inf)
            quick[field] = (choices, *ends)
    if len(quick) < 2:  # with one field attrgetter returns no tuple
        return lambda record: (), (), _constraints(cls)
    return operator.attrgetter(*quick), tuple(quick.values()), tuple(others)


@functools.cache
def _constraints(cls: type) -> tuple[_Constraint, ...]:
    """Return the fields with a range or choices, and whether these apply to a tuple's elements."""
    found = []
    for field, hint in typing.get_type_hints(cls, include_extras=True).items():
        if field not in cls.__struct_fields__:  # type: ignore[attr-defined]
            continue
        is_tuple = typing.get_origin(hint) is tuple and typing.get_args(hint)[1:] == (...,)
        choices, bounds = _read_hint(typing.get_args(hint)[0] if is_tuple else hint)
        if choices or bounds:
            found.append((field, is_tuple, choices, bounds))
    return tuple(found)


def _read_hint(hint: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    if typing.get_origin(hint) is typing.Literal:
        return typing.get_args(hint), ()
    for inner in typing.get_args(hint):
        if isinstance(inner, Meta):
            limits = ((holds, getattr(inner, name), sign) for name, holds, sign in _BOUNDS)
            return (), tuple(limit for limit in limits if limit[1] is not None)
    if type(None) in typing.get_args(hint):  # Optional: the range of the inner type
        (some,) = (arg for arg in typing.get_args(hint) if arg is not type(None))
        return _read_hint(some)
    return (), ()


def digest(record: Any) -> str:
    """Return twelve hex digits that name a record's content, the same on every machine.

    Fields with their default value do not count, so a record keeps its digest when a new field with
    a default is added.
    """
    return hashlib.sha256(msgspec.json.encode(_told(record), order="sorted")).hexdigest()[:12]


def _told(value: Any) -> Any:
    """Return plain data without the fields that have their default value."""
    if isinstance(value, tuple | list):
        return [_told(item) for item in value]
    if not isinstance(value, msgspec.Struct):
        return value
    config, told = value.__struct_config__, {}
    if config.tag_field:
        told[config.tag_field] = config.tag
    for field in _fields(type(value)):
        held = getattr(value, field.name)
        if field.required or held != field.default:
            told[field.name] = _told(held)
    return told


_fields = functools.cache(msgspec.structs.fields)  # cached: it reads annotations each time
