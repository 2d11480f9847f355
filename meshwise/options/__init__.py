"""The options of the verbs, each written once: its name, type, default, range and help.

This module says what a record of options is; its neighbours hold those of one verb each.
The command line makes a flag of every field. A verb takes the record whole, and the ranks get it
with their request. ``keywords`` gives a verb the fields as keyword arguments, for Python.
"""

import ast
import dataclasses
import functools
import inspect
import sys
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Literal,
    NamedTuple,
    NewType,
    ParamSpec,
    Protocol,
    TypeVar,
    get_args,
    get_origin,
    get_type_hints,
    overload,
)

from meshwise.patience import Patience, parsed

if TYPE_CHECKING:  # from Python also objects; on the command line all of it is text
    from meshwise.spec import AnyModel, LanguageModel, Layout, Recipe

    File = Path | str
    SomeModel = AnyModel | str
    Models = tuple[SomeModel, ...]
    SomeLanguageModel = LanguageModel | str
    SomeLayout = Layout | File
    Layouts = tuple[SomeLayout, ...]
    SomeRecipe = Recipe | File
    Time = str | float
    Many = str | float
    Rate = str | float
    Memory = str | int
    Shape = str  # with commas within
    Names = str | tuple[str, ...]
    Content = Any  # a file, or what is in it
else:
    Time = Many = Rate = Memory = NewType("Quantity", str)  # of Python also a number
    Shape = NewType("Shape", str)
    SomeModel = SomeLanguageModel = SomeLayout = SomeRecipe = Content = NewType("Thing", str)
    File, Names = str, tuple[str, ...]
    Models, Layouts = tuple[SomeModel, ...], tuple[SomeLayout, ...]

P = ParamSpec("P")
R_contra = TypeVar("R_contra", contravariant=True)
T_co = TypeVar("T_co", covariant=True)


class Range(NamedTuple):
    """Whole numbers from ``least`` to ``most``."""

    least: int
    most: float = float("inf")


class Flag(NamedTuple):
    """The name of a field on the command line; "" where it has no flag there."""

    name: str


PYTHON = Flag("")
Positive = Annotated[int | None, Range(1)]


_KINDS: dict[Any, tuple[tuple[type, ...], str]] = {
    int: ((int,), "a whole number"), float: ((int, float), "a number"),
    bool: ((bool,), "True or False"), str: ((str,), "text"), Mapping: ((Mapping,), "a dict"),
    Time: ((str, int, float), "text or a number"), Shape: ((str,), "text"),
}  # fmt: skip


class _Rule(NamedTuple):
    name: str  # on the command line
    is_several: bool
    may_lack: bool
    types: tuple[type, ...]
    wanted: str
    bounds: Range | None
    choices: tuple[Any, ...]

    def wrong(self, value: Any) -> str:
        """Say what a value must be; "" if it is that."""
        if value is None and self.may_lack:
            return ""
        if self.choices:
            return "" if value in self.choices else f"one of {', '.join(self.choices)}"
        fits = isinstance(value, self.types) and value is not None
        if not fits or (isinstance(value, bool) and bool not in self.types):
            return self.wanted
        if self.bounds and not self.bounds.least <= value <= self.bounds.most:
            most = "" if self.bounds.most == float("inf") else f" and <= {self.bounds.most}"
            return f">= {self.bounds.least}{most}"
        return ""


@functools.cache
def rules(record: type) -> dict[str, _Rule]:
    """Say of each field what it is called, and which values it takes."""
    found = {}
    for name, hint in get_type_hints(record, include_extras=True).items():
        plain, *extras = get_args(hint) if get_origin(hint) is Annotated else (hint,)
        kinds = (plain, *get_args(plain))
        choices = [get_args(kind) for kind in kinds if get_origin(kind) is Literal]
        types, wanted = next(
            (_KINDS[kind] for each in kinds if (kind := get_origin(each) or each) in _KINDS),
            ((str, object), "text or a record"),
        )
        found[name] = _Rule(
            name=next((extra.name for extra in extras if isinstance(extra, Flag)), name),
            is_several=get_origin(plain) is tuple,
            may_lack=type(None) in kinds,
            types=types,
            wanted=wanted,
            bounds=next((extra for extra in extras if isinstance(extra, Range)), None),
            choices=choices[0] if choices else (),
        )
    return found


@dataclass(frozen=True, kw_only=True)
class Options:
    """A record of options; a ValueError names the field whose value is wrong."""

    def __post_init__(self) -> None:
        kind: Any = type(self)
        for name, rule in rules(kind).items():
            value = getattr(self, name)
            if isinstance(value, Path):  # requests travel as JSON
                value = str(value)
            if rule.is_several and not isinstance(value, tuple):
                value = tuple(value) if isinstance(value, list) else (value,)
            object.__setattr__(self, name, value)
            for one in value if rule.is_several else (value,):
                if wanted := rule.wrong(one):
                    raise ValueError(f"{name} = {one!r}: must be {wanted}")

    def said(self) -> dict[str, Any]:
        """The fields that differ from their defaults."""
        values = {one.name: (getattr(self, one.name), one.default) for one in _fields(self)}
        return {name: value for name, (value, usual) in values.items() if value != usual}


def _fields(record: Any) -> tuple["dataclasses.Field[Any]", ...]:
    return dataclasses.fields(record)


class Verb(Protocol[P, R_contra, T_co]):
    """A verb that takes its options one by one, or as a record."""

    @overload
    def __call__(self, asked: R_contra, /) -> T_co: ...
    @overload
    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> T_co: ...


def keywords(
    record: Callable[P, R_contra],
) -> Callable[[Callable[[R_contra], T_co]], Verb[P, R_contra, T_co]]:
    """Let a function of one ``record`` take the record's fields too; ``help`` lists them. Where the
    first field is a tuple, all positional arguments are in it."""
    assert isinstance(record, type)
    hints, signature = get_type_hints(record), inspect.signature(record)
    first, *others = (
        one.replace(annotation=hints[name]) for name, one in signature.parameters.items()
    )
    if several := first.kind is first.POSITIONAL_OR_KEYWORD and first.default == ():
        first = first.replace(kind=first.VAR_POSITIONAL, default=first.empty, annotation=str)

    def taking(verb: Callable[[R_contra], T_co]) -> Verb[P, R_contra, T_co]:
        @functools.wraps(verb)
        def call(*args: Any, **kwargs: Any) -> T_co:
            whole = len(args) == 1 and isinstance(args[0], record)
            if several and args and isinstance(args[0], str):
                args = (args,)
            try:
                asked = args[0] if whole else record(*args, **kwargs)
            except TypeError as error:  # names the record, of which the caller knows nothing
                told = str(error).replace(f"{record.__name__}.__init__", verb.__name__)
                raise TypeError(told) from None
            return verb(asked)

        call.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=[first, *others], return_annotation=inspect.signature(verb).return_annotation
        )
        call.__doc__ = f"{inspect.getdoc(verb)}\n\n{described(record)}"
        return call

    return taking


def described(record: type, but: type = object) -> str:
    """List every field with its help, a paragraph each, ``but`` for those of another record."""
    known = helps(but)
    lines = [f"{name}: {text}" for name, text in helps(record).items() if name not in known]
    return "\n".join(textwrap.fill(line, 96, subsequent_indent="    ") for line in lines)


@functools.cache
def helps(record: type) -> dict[str, str]:
    """The help of every field: the string behind it, or in its metadata."""
    fields = getattr(record, "__dataclass_fields__", {})
    found = {name: one.metadata["help"] for name, one in fields.items() if one.metadata}
    for kind in reversed(record.__mro__[:-1]):
        body = _classes(kind.__module__)[kind.__name__].body
        for one, behind in pairwise(body):
            if isinstance(one, ast.AnnAssign) and isinstance(behind, ast.Expr):
                assert isinstance(one.target, ast.Name)
                found[one.target.id] = ast.literal_eval(behind.value)
    return found


@functools.cache
def _classes(module: str) -> dict[str, ast.ClassDef]:
    """The classes of a module as they are written; parsed once, since a command waits for it."""
    parsed_module = ast.parse(inspect.getsource(sys.modules[module]))
    return {one.name: one for one in parsed_module.body if isinstance(one, ast.ClassDef)}


@dataclass(frozen=True, kw_only=True)
class Started(Options):
    """Options of every verb that starts ranks."""

    nproc: Annotated[int | None, PYTHON] = None
    "Ranks, one on each device; they are started, or a launcher's are joined."
    gpus: Annotated[int | None, PYTHON] = None
    "Another name of ``nproc``, which ``plan`` uses."
    timeout: Time | None = None
    "How long ranks wait in a collective or at a barrier; 30s by default, longer on shared cores."
    setup_timeout: Time | None = None
    "How long ranks wait at the start, and while any compiles, loads or saves; 10m by default."
    runs: File = "runs"
    "Where run directories are."
    dry_run: bool = False
    "Only say what would be done; write nothing."

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.gpus is not None:
            if self.nproc not in (None, self.gpus):
                raise ValueError(f"gpus = {self.gpus}: nproc is {self.nproc}; give one of them")
            object.__setattr__(self, "nproc", self.gpus)
        _ = self.patience  # a limit that is no time is refused at once

    @property
    def patience(self) -> Patience:
        """The time ranks wait for each other."""
        return parsed(self.timeout, self.setup_timeout)
