"""The record of a saved training (``checkpoint.json``) and of damage found in it."""

import msgspec

from meshwise.spec.layout import Workload
from meshwise.spec.model import AnyModel
from meshwise.spec.record import NonNegative, Positive, Record, digest

SCHEMA_VERSION = 2


class Whole(Record, kw_only=True):
    """A whole tensor, before it was cut. ``dtype``: torch's name."""

    shape: tuple[NonNegative, ...]
    dtype: str


class Stored(Record, kw_only=True):
    """A data file. ``hashes``: sixteen hex digits for its header, then for each 4 MiB after it;
    empty if version 1 saved it."""

    bytes: NonNegative
    hashes: str


class Checkpoint(Record, kw_only=True):
    """A checkpoint. ``step``: the next step. ``digest``: of all other fields. ``files`` are in the
    subfolder ``data``. ``norms``: of whole tensors."""

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
        """Return the same checkpoint with the digest of its content."""
        bare = msgspec.structs.replace(self, digest="")
        return msgspec.structs.replace(bare, digest=digest(bare))

    @property
    def note(self) -> str:
        """A warning for users of the checkpoint; usually empty."""
        if all(stored.hashes for stored in self.files.values()):
            return ""
        return "saved by an earlier version, without hashes: damage is not seen; save it anew"


class Damage(Record, kw_only=True):
    """A damaged file, or ``bytes`` damaged bytes of it from ``offset`` on. ``tensors``: those with
    a part there."""

    file: str
    reason: str
    offset: NonNegative = 0
    bytes: NonNegative = 0
    tensors: tuple[str, ...] = ()


class Verified(Record, kw_only=True):
    """A checkpoint that was checked. ``verified_bytes``: data compared with the hashes; 0 if there
    are no hashes, or if only ``checkpoint.json`` was read."""

    checkpoint: Checkpoint
    verified_bytes: NonNegative
    damage: tuple[Damage, ...]
