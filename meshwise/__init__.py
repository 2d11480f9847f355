"""Meshwise: measure a GPU cluster, price it, plan a model's layout, run it, compare.

It offers the nine verbs, ``validate``, ``apply`` and ``tokens`` for your own programs, ``Refit``
and the records. Each is imported when first used: ``meshwise.plan(...)``.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    __version__: str
    from meshwise.reshard.weights import Refit
    from meshwise.spec import *  # noqa: F403
    from meshwise.verbs.apply import apply
    from meshwise.verbs.calibrate import calibrate
    from meshwise.verbs.compare import compare
    from meshwise.verbs.detect import detect
    from meshwise.verbs.measure import measure
    from meshwise.verbs.plan import plan
    from meshwise.verbs.refit import refit
    from meshwise.verbs.report import report
    from meshwise.verbs.run import run
    from meshwise.verbs.show import show
    from meshwise.verbs.tokens import tokens
    from meshwise.verbs.validate import validate

VERBS = ("detect", "measure", "calibrate", "plan", "run", "refit", "compare", "report", "show")
FOR_PROGRAMS = ("apply", "tokens", "validate")  # not verbs of the command line

__all__ = [
    "VERBS",
    "Refit",
    "__version__",
    "apply",
    "calibrate",
    "compare",
    "detect",
    "measure",
    "plan",
    "refit",
    "report",
    "run",
    "show",
    "tokens",
    "validate",
]


def __getattr__(name: str) -> Any:
    if name in VERBS or name in FOR_PROGRAMS:
        return getattr(importlib.import_module(f"meshwise.verbs.{name}"), name)
    if name == "__version__":
        return _version()
    if name == "Refit":
        return importlib.import_module("meshwise.reshard.weights").Refit
    spec = importlib.import_module("meshwise.spec")
    if name in spec.__all__:
        return getattr(spec, name)
    raise AttributeError(f"module 'meshwise' has no attribute {name!r}")


def _version() -> str:
    from importlib import metadata

    try:
        return metadata.version("meshwise")
    except metadata.PackageNotFoundError:
        return "a checkout that is not installed"


def __dir__() -> list[str]:
    return sorted([*__all__, *importlib.import_module("meshwise.spec").__all__])
