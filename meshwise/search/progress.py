"""Say how far long work is while it is silent."""

import logging
from time import monotonic

log = logging.getLogger("meshwise")


class Reporter:
    """Logs a line when a phase of long work has been silent for five seconds."""

    def __init__(self) -> None:
        self.last_s = monotonic()

    def __call__(self, text: str, *numbers: int) -> None:
        if monotonic() > self.last_s + 5:
            log.info(text, *numbers)
            self.last_s = monotonic()
