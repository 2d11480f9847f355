"""Streams by name: work that may overlap goes to different lanes and is ordered by events.

On a CPU work is done immediately, in the order in which it is given.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

Launch = Callable[[], object]


def chained(launches: Sequence[Launch]) -> Launch:
    """Make one launch of all of them, in their order."""

    def launch() -> None:
        for each in launches:
            each()

    return launch


class Lanes:
    """The streams of one device; ``urgent`` ones go before the others."""

    def __init__(self, device: torch.device, urgent: tuple[str, ...] = ()) -> None:
        self.device = device
        self.urgent = urgent
        self.streams: dict[str, torch.cuda.Stream] = {}

    def now(self) -> Any:
        """Record an event on the current stream."""
        if self.device.type != "cuda":
            return None
        return torch.cuda.current_stream(self.device).record_event()

    def run(self, name: str, work: Launch, *after: Any) -> Any:
        """Run ``work`` in lane ``name`` after the given events; return the event of its end."""
        if self.device.type != "cuda":
            work()
            return None
        if name not in self.streams:
            priority = -1 if name in self.urgent else 0
            self.streams[name] = torch.cuda.Stream(self.device, priority=priority)
        stream = self.streams[name]
        for event in filter(None, after):
            stream.wait_event(event)
        with torch.cuda.stream(stream):
            work()
        return stream.record_event()

    def join(self, *events: Any) -> None:
        """Let the current stream wait for those events."""
        for event in filter(None, events):  # all None on a CPU
            torch.cuda.current_stream(self.device).wait_event(event)
