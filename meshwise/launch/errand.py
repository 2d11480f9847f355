"""A command that runs elsewhere, and where its script and logs are."""

import datetime
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from meshwise.options.allocation import Allocation
from meshwise.text import plain

VERBS = ("detect", "measure", "run", "refit")
_LONGEST = 255  # bytes of a folder's name (Linux, NAME_MAX)


@dataclass(frozen=True)
class Errand:
    """The words of a command after ``meshwise``, without those that say where it runs. Every rank
    carries them out, and joins the others as it does under torchrun. ``is_dry``: only print what
    would be submitted."""

    words: tuple[str, ...]
    is_dry: bool = False

    def __post_init__(self) -> None:
        is_import = self.words[:2] == ("measure", "import")
        if is_import or self.verb not in VERBS:
            named = "measure import" if is_import else self.verb or "no verb"
            raise ValueError(
                f"{named}: needs no ranks; leave --launcher out, or give one of {', '.join(VERBS)}"
            )

    @property
    def verb(self) -> str:
        return next((word for word in self.words[:1] if not word.startswith("-")), "")

    def value(self, flag: str) -> str | None:
        """Return what follows ``--flag`` in the command, or None."""
        for word, after in zip(self.words, (*self.words[1:], None), strict=True):
            if word == f"--{flag}":
                return after
            if word.startswith(f"--{flag}="):
                return word.partition("=")[2]
        return None

    def program(self, place: Allocation) -> list[str]:
        """Return the command line of one rank."""
        python = place.python or ("python3" if image(place) else sys.executable)
        return [python, "-m", "meshwise", *self.words]

    @property
    def can_go_on(self) -> bool:
        """Return whether the command, started again after it was ended early, goes on from there.
        Others would begin anew."""
        if self.verb == "measure":
            return self.words[1:2] != ("ring",)
        return self.verb == "run" and bool(self.value("save"))

    @property
    def going_on(self) -> list[str]:
        """Return the words to add when the command starts again after it was ended early."""
        return ["--resume"] if self.can_go_on and "--resume" not in self.words else []

    def folder(self, place: Allocation) -> Path:
        """Return the absolute path of the folder of the script and the logs."""
        runs = self.value("runs") or os.environ.get("OUTPUT_DIR") or "runs"
        now = datetime.datetime.now().strftime("%Y%m%d-%H%M%S-%f")
        name = place.run_id or os.environ.get("RUN_ID") or f"{self.verb}-{now}"
        if Path(name).name != name or name == ".." or plain(name) != name:
            raise ValueError(
                f"run_id = {name!r}: is the name of a folder, without /, .. or control characters"
            )
        if len(name.encode()) > _LONGEST:
            raise ValueError(f"run_id = {name!r}: must be at most {_LONGEST} bytes long")
        return Path(here(), runs, "jobs", name)


def here() -> str:
    """Return the working directory; ValueError if somebody removed it."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        raise ValueError(
            f"{os.environ.get('PWD', 'the working directory')}: was removed; cd to a folder that "
            "is there"
        ) from None


def image(place: Allocation) -> str | None:
    """Return the container image, of the option or of CONTAINER_IMAGE; none where none is run."""
    if not place.takes("container_image"):
        return None
    return place.container_image or os.environ.get("CONTAINER_IMAGE") or None
