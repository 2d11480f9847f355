"""Signals that end a program: put off, raised, told in one line; never taken from the user."""

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from meshwise import signals

TERM, HUP, INT = signal.SIGTERM, signal.SIGHUP, signal.SIGINT


@pytest.fixture(autouse=True)
def unchanged() -> Iterator[None]:
    """No test, and so nothing tested, leaves another handler behind."""
    before = {number: signal.getsignal(number) for number in signals.ENDING}
    yield
    assert {number: signal.getsignal(number) for number in signals.ENDING} == before


def test_what_is_held_comes_when_the_body_has_ended() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), signals.held() as held:
        assert held.number is None
        signal.raise_signal(INT)
        signal.raise_signal(INT)
        done.append(held.number)
    assert done == [INT]


def test_a_handler_of_the_user_is_called_once_and_late() -> None:
    called: list[int] = []
    before = signal.signal(TERM, lambda number, _: called.append(number))
    try:
        with signals.held():
            signal.raise_signal(TERM)
            assert called == []
        assert called == [TERM]
        with signals.raised():  # it is the user's: nothing is raised
            signal.raise_signal(TERM)
        assert called == [TERM, TERM]
    finally:
        signal.signal(TERM, before)


def test_what_the_user_ignores_stays_ignored() -> None:
    before = signal.signal(HUP, signal.SIG_IGN)  # as nohup does
    try:
        with signals.raised(), signals.held() as held:
            signal.raise_signal(HUP)
        assert held.number is None
    finally:
        signal.signal(HUP, before)


@pytest.mark.parametrize(("number", "name"), [(TERM, "SIGTERM"), (HUP, "SIGHUP")])
def test_raised_it_is_an_exit_with_a_reason(number: int, name: str) -> None:
    with pytest.raises(signals.Ended) as ended, signals.raised():
        signal.raise_signal(number)
    assert ended.value.code == 128 + number and str(ended.value) == f"ended by {name}"
    with pytest.raises(signals.Ended), signals.raised(), signals.held():
        signal.raise_signal(number)


def test_an_error_on_its_way_says_more() -> None:
    with pytest.raises(TimeoutError), signals.raised(unless_failing=True):
        try:
            raise TimeoutError
        finally:
            signal.raise_signal(TERM)
    with pytest.raises(signals.Ended), signals.raised():
        try:
            raise TimeoutError
        finally:
            signal.raise_signal(TERM)


def test_an_error_that_comes_after_the_launchers_signal_says_more() -> None:
    with pytest.raises(TimeoutError), signals.raised(unless_failing=True):
        signal.raise_signal(TERM)
        raise TimeoutError
    with pytest.raises(signals.Ended), signals.raised(unless_failing=True):
        signal.raise_signal(TERM)
        time.sleep(60)
    with pytest.raises(KeyboardInterrupt), signals.raised(unless_failing=True):
        signal.raise_signal(signal.SIGINT)


def test_off_the_main_thread_no_handler_is_touched() -> None:
    seen: list[object] = []

    def work() -> None:
        before = [signal.getsignal(number) for number in signals.ENDING]
        signals.quit_at_once()
        with signals.raised(), signals.held() as held:
            seen.append([signal.getsignal(number) for number in signals.ENDING] == before)
        seen.append(held.number)

    helper = threading.Thread(target=work)
    helper.start()
    helper.join()
    assert seen == [True, None]


@pytest.mark.parametrize(("number", "said"), [(INT, "interrupted"), (TERM, "ended by SIGTERM")])
def test_a_program_quits_by_one_line_amid_an_import_that_swallows_exceptions(
    number: int, said: str
) -> None:
    code = f"""
import signal
from meshwise import signals
signals.quit_at_once()
signals.last_acts.append(lambda why: print("last act:", why, flush=True))
signals.last_acts.insert(0, lambda why: 1 / 0)
try:
    with signals.raised():
        pass
    signal.raise_signal({int(number)})
except BaseException:
    print("swallowed")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (128 + number, f"{said}\n")
    assert done.stdout == f"last act: {signals.describe(number)}\n"


def test_a_signal_amid_an_error_puts_things_in_order_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who sent it may kill soon, before the error that says more has been told."""
    acts: list[str] = []
    monkeypatch.setattr(signals, "last_acts", [acts.append])
    with pytest.raises(ValueError, match="says more"), signals.raised(unless_failing=True):
        try:
            raise ValueError("says more")
        except ValueError:
            signal.raise_signal(TERM)
            assert acts == ["ended by SIGTERM"]
            raise
