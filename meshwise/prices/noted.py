"""Remember the remarks on prices, and the lowest tier of those that were asked for."""

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

from meshwise.spec import TIERS, PriceTier

_Any = TypeVar("_Any")


class Noted:
    """``notes``: the remarks on prices asked for since ``begin``."""

    def __init__(self) -> None:
        self.notes: dict[str, int] = {}
        self._sources = set[PriceTier]()
        self._once: dict[Hashable, tuple[Any, tuple[str, ...], set[PriceTier]]] = {}

    @property
    def tier(self) -> PriceTier:
        """The lowest tier of the prices asked for since ``begin``."""
        return max(self._sources, key=TIERS.index, default=TIERS[0])

    def begin(self) -> None:
        """Forget the notes and tiers of the prices asked for so far."""
        self.notes.clear()
        self._sources.clear()

    def once(self, key: Hashable, price: Callable[[], _Any]) -> _Any:
        """Return what ``price`` returned in the first call with this key, and note the prices that
        it asked for, as if it was called again."""
        if key not in self._once:
            noted = self.notes, self._sources
            self.notes, self._sources = {}, set()
            try:
                self._once[key] = price(), (*self.notes,), self._sources
            finally:
                self.notes, self._sources = noted
        found, notes, sources = self._once[key]
        for note in notes:
            self._note(note)
        self._sources |= sources
        return found  # type: ignore[no-any-return]

    def _note(self, text: str) -> None:
        self.notes[text] = self.notes.get(text, 0) + 1
