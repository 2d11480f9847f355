"""Make errors name a flag as users type it, where the verb names a record's field.

In: ``RingSettings.seq_lengths = (0,): ...``. Out: ``--seq-lengths = (0,): ...``.
"""

import contextlib
import re
from collections.abc import Iterator, Mapping

_FIELD = re.compile(r"(?:[A-Z]\w*\.)?(\w+)(?= = )")


@contextlib.contextmanager
def as_typed(flags: Mapping[str, str]) -> Iterator[None]:
    """Rename fields in errors. ``flags``: by field. Other fields only lose the record's name."""
    try:
        yield
    except ValueError as error:
        found = _FIELD.match(str(error))
        if found is None:
            raise
        flag = flags.get(found[1])
        name = found[1] if flag is None else "--" + flag.replace("_", "-")
        raise ValueError(name + str(error)[found.end() :]) from None
