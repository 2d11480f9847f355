"""Make errors name a flag as users type it, where the verb names a record's field.

In: ``RingSettings.seq_lengths = (0,): ...``. Out: ``--seq-lengths = (0,): ...``.
"""

import re
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from meshwise.options import Options, rules

_FIELD = re.compile(r"(?:[A-Z]\w*\.)?(\w+)(?: = (.*?))?: ")
_ALSO = {  # fields of other records
    "nproc": ("gpus", "num_hosts"), "gpus": ("nproc", "num_hosts"), "num_kv_heads": ("kv_heads",),
    "heads": ("num_heads",), "seq_len": ("seq_lengths",),
    "nodes": ("num_hosts",), "gpus_per_node": ("num_devices_per_host",),
    "nproc_per_node": ("num_devices_per_host",),
}  # fmt: skip


def as_typed(said: str, words: list[str]) -> str:
    """Name the flag among ``words`` that set the field which an error is of; of several the one
    with the value that the error shows. An option not typed only loses its record's name."""
    typed = {}
    for word, after in pairwise([*words, ""]):
        if word.startswith("--"):
            name, _, value = word[2:].partition("=")
            typed[name.replace("-", "_")] = value or after
    field = _FIELD.match(said)
    if field is None:
        return said
    names = {*_ALSO.get(field[1], ()), *_flags(Options, field[1])}
    if not (given := sorted({field[1], *names} & typed.keys() - {""})):
        return said[field.start(1) :] if names else said
    flag = max(given, key=lambda name: (typed[name] in (field[2] or ""), name == field[1]))
    return f"--{flag.replace('_', '-')}{said[field.end(1) :]}"


def _flags(record: Any, field: str) -> Iterator[str]:
    """Yield what records call this field on the command line."""
    for kind in record.__subclasses__():
        if field in (known := rules(kind)):
            yield known[field].name
        yield from _flags(kind, field)
