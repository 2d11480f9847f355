"""Errors that name a flag as users type it, where the verb names a field of a record.

In: ``RingSettings.seq_lengths = (0,): ...``. Out: ``--seq-lengths = (0,): ...``.
"""

import contextlib
import re
from collections.abc import Iterable, Iterator

_FIELD = re.compile(r"(?:[A-Z]\w*\.)?(\w+)(?= = )")


@contextlib.contextmanager
def as_typed(fields: Iterable[str], **others: str) -> Iterator[None]:
    """``fields``: those with a flag of their name; ``others``: fields with another flag."""
    flags = {field: field for field in fields} | others
    try:
        yield
    except ValueError as error:
        found = _FIELD.match(str(error))
        if found is None or found[1] not in flags:
            raise
        flag = flags[found[1]].replace("_", "-")
        raise ValueError(f"--{flag}{str(error)[found.end() :]}") from None
