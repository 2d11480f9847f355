"""Signals that end a program: Ctrl-C, SIGTERM, SIGHUP, and SIGUSR1, which Slurm sends before a
time limit. A signal can arrive at any point.

``held`` defers them while processes are started and ended. ``raised`` turns the others into
the exception ``Ended``, as Ctrl-C is ``KeyboardInterrupt``. ``quit_at_once`` is for the program: if
nothing must be cleaned up, it ends with one line, not with an exception, which torch's import may
swallow or print. Handlers are changed only on the main thread. A signal that the user ignores
(nohup) stays ignored. This module imports nothing heavy, since it is imported first.
"""

import atexit
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

Handler = Callable[[int, FrameType | None], Any] | int | signal.Handlers

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
_ERROR_S = 1.0  # in which a collective notices that its peer is gone
last_acts: list[Callable[[str], None]] = []  # called with the reason before the program quits


class Ended(SystemExit):
    """The exception of a signal: exit with code 128 + ``number``. ``kept`` names what is left."""

    def __init__(self, number: int, kept: str = "") -> None:
        super().__init__(128 + number)
        self.number, self.kept = number, kept

    def __str__(self) -> str:
        return "; ".join(filter(None, [describe(self.number), self.kept]))


def describe(number: int) -> str:
    """Return ``ended by SIGTERM``, or for Ctrl-C ``stopped by the user``."""
    if number == signal.SIGINT:
        return "stopped by the user"
    return f"ended by {signal.Signals(number).name}"


class HeldSignals:
    """Remembers, as ``number``, the first signal that came while signals were held."""

    number: int | None = None

    def __call__(self, number: int, _: FrameType | None) -> None:
        self.number = self.number or number


@contextlib.contextmanager
def held() -> Iterator[HeldSignals]:
    """Defer signals until the body has ended. The body may check ``number`` and end early."""
    came = HeldSignals()
    before = _handled()
    for number in before:
        signal.signal(number, came)
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if came.number is not None:
            handler = before[came.number]
            if callable(handler):  # called directly, it raises here and not a few lines later
                handler(came.number, sys._getframe())
            else:
                signal.raise_signal(came.number)


@contextlib.contextmanager
def blocked() -> Iterator[None]:
    """Block signals in processes that the body starts, until they unblock them. Otherwise Python
    would print a traceback on Ctrl-C while it starts."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def raised(*, unless_failing: bool = False) -> Iterator[None]:
    """Raise ``Ended`` on these signals, but KeyboardInterrupt on Ctrl-C, even in a program that
    quits at once. ``unless_failing``: not while an error is raised, which says more; SIGTERM, which
    launchers send when another rank has died, waits a moment for that error."""
    failing = sys.exception()
    again: threading.Timer | None = None

    def end(number: int, _: FrameType | None) -> None:
        nonlocal again
        is_failing = sys.exception() is not failing
        if unless_failing and (is_failing or (number == signal.SIGTERM and not again)):
            _put_in_order(number)  # the sender may not wait for the error
            if not is_failing:
                again = threading.Timer(_ERROR_S, os.kill, (os.getpid(), number))
                again.daemon = True
                again.start()
            return
        raise KeyboardInterrupt if number == signal.SIGINT else Ended(number)

    before = {n: h for n, h in _handled().items() if h in (signal.SIG_DFL, _quit)}
    for number in before:
        signal.signal(number, end)
    try:
        yield
    finally:
        if again:
            again.cancel()
        for number, handler in before.items():
            signal.signal(number, handler)


def quit_at_once() -> None:
    """End the program on these signals from now on: ``last_acts``, one line, exit code 128 + n.

    At exit they are blocked: Python removes its handlers before the process is gone.
    """
    for number in _handled():
        signal.signal(number, _quit)
    atexit.register(signal.pthread_sigmask, signal.SIG_BLOCK, ENDING)


def _put_in_order(number: int) -> None:
    for act in last_acts:
        with contextlib.suppress(Exception):
            act(describe(number))


def _quit(number: int, _: FrameType | None) -> None:
    _put_in_order(number)
    said = "interrupted" if number == signal.SIGINT else describe(number)
    os.write(2, f"{said}\n".encode())
    os._exit(128 + number)


def _handled() -> dict[int, Handler]:
    """Return the handlers that may be replaced: Python's, on the main thread, not ignored."""
    if threading.current_thread() is not threading.main_thread():
        return {}
    found = {number: signal.getsignal(number) for number in ENDING}
    return {n: h for n, h in found.items() if h is not None and h != signal.SIG_IGN}
