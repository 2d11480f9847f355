"""A training that was saved (``checkpoint.json``), and what is found damaged of it."""

import msgspec

from meshwise.spec.layout import Workload
from meshwise.spec.model import AnyModel
from meshwise.spec.record import NonNegative, Positive, Record, digest

SCHEMA_VERSION = 2


class Whole(Record, kw_only=True):
    """A tensor before it was cut; ``dtype`` as torch names it."""

    shape: tuple[NonNegative, ...]
    dtype: str


class Stored(Record, kw_only=True):
    """A data file. ``hashes``: sixteen hex digits of its header, then of each 4 MiB behind it;
    empty where version 1 saved it."""

    bytes: NonNegative
    hashes: str


class Checkpoint(Record, kw_only=True):
    """``step``: the next one. ``digest``: of all that follows. ``files`` lie in the subfolder
    ``data``. ``norms``: of whole tensors."""

    schema_version: Positive = SCHEMA_VERSION
    digest: str = ""
    step: NonNegative
    seed: NonNegative
    layout: str
    optimizer: str
    model: AnyModel
    workload: Workload
    data: str
    files: dict[str, Stored]
    tensors: dict[str, Whole]
    numbers: dict[str, int | float]
    norms: dict[str, float] = {}

    def check(self) -> None:
        for field, names in (("data", (self.data,)), ("files", self.files)):
            if any(name in ("", ".", "..") or "/" in name for name in names):
                self.fail(field, "must be names without a folder")

    def sealed(self) -> "Checkpoint":
        """The same with the digest of its content."""
        bare = msgspec.structs.replace(self, digest="")
        return msgspec.structs.replace(bare, digest=digest(bare))

    @property
    def note(self) -> str:
        """A remark for whoever uses the checkpoint; mostly empty."""
        if all(stored.hashes for stored in self.files.values()):
            return ""
        return "saved by an earlier version, without hashes: damage is not seen; save it anew"


class Damage(Record, kw_only=True):
    """A file, or ``bytes`` of it from ``offset`` on, that is not as it was saved; the ``tensors``
    that have a part there."""

    file: str
    reason: str
    offset: NonNegative = 0
    bytes: NonNegative = 0
    tensors: tuple[str, ...] = ()


class Verified(Record, kw_only=True):
    """A checkpoint, and how much of its data was compared with the hashes: ``verified_bytes`` is 0
    where there are none, or where only ``checkpoint.json`` was looked at."""

    checkpoint: Checkpoint
    verified_bytes: NonNegative
    damage: tuple[Damage, ...]
