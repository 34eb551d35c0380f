"""Real signals: a flag and a time, handlers that were there are called and put back, a second Ctrl-C leaves."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType

import pytest

from samerun.core.clock import ManualClock
from samerun.preempt.flag import REPEAT_SECONDS, SIGNALS, StopFlag


@pytest.fixture(autouse=True)
def _handlers_stay() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    after = {number: signal.getsignal(number) for number in SIGNALS}
    for number, handler in before.items():
        signal.signal(number, handler)
    assert after == before, "a test left a handler behind"


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(seconds=100.0)


@pytest.fixture
def flag(clock: ManualClock) -> Iterator[StopFlag]:
    flag = StopFlag(clock)
    yield flag
    flag.remove()


def test_a_signal_sets_the_flag_and_the_time_and_nothing_else(flag: StopFlag, clock: ManualClock) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        assert flag.install()
        assert not flag.is_set
        os.kill(os.getpid(), signal.SIGTERM)
        assert (flag.is_set, flag.noticed_seconds, flag.signal_name) == (True, 100.0, "SIGTERM")
    finally:
        flag.remove()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


@pytest.mark.parametrize("number", SIGNALS)
def test_every_watched_signal_is_noticed(flag: StopFlag, number: signal.Signals) -> None:
    flag.install()
    signal.raise_signal(number)
    assert flag.signal_name == number.name


def test_the_first_signal_is_the_one_that_counts(flag: StopFlag, clock: ManualClock) -> None:
    flag.install()
    signal.raise_signal(signal.SIGTERM)
    clock.advance(5)
    signal.raise_signal(signal.SIGTERM)
    assert (flag.noticed_seconds, flag.signal_name) == (100.0, "SIGTERM")


def test_handlers_found_are_called_and_put_back(flag: StopFlag) -> None:
    called: list[int] = []

    def mine(number: int, frame: FrameType | None) -> None:
        called.append(number)

    before = signal.signal(signal.SIGTERM, mine)
    try:
        flag.install()
        signal.raise_signal(signal.SIGTERM)
        assert (flag.is_set, called) == (True, [signal.SIGTERM])
        flag.remove()
        assert signal.getsignal(signal.SIGTERM) is mine
        signal.raise_signal(signal.SIGTERM)
        assert called == [signal.SIGTERM] * 2
    finally:
        signal.signal(signal.SIGTERM, before)


def test_pythons_own_ctrl_c_handler_is_not_called_the_first_time(
    flag: StopFlag, capfd: pytest.CaptureFixture[str]
) -> None:
    flag.install()
    signal.raise_signal(signal.SIGINT)  # would be KeyboardInterrupt
    assert flag.is_set
    assert "Ctrl-C again leaves at once, without saving" in capfd.readouterr().err


def test_a_second_ctrl_c_leaves_at_once(flag: StopFlag, clock: ManualClock) -> None:
    flag.install()
    signal.raise_signal(signal.SIGINT)
    clock.advance(REPEAT_SECONDS)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_one_ctrl_c_that_arrives_twice_is_one(flag: StopFlag, clock: ManualClock) -> None:
    """Under a launcher the terminal sends it to every process and the launcher passes it on."""
    flag.install()
    signal.raise_signal(signal.SIGINT)
    clock.advance(REPEAT_SECONDS * 0.9)
    signal.raise_signal(signal.SIGINT)
    assert flag.noticed_seconds == 100.0


def test_ctrl_c_after_a_term_leaves_at_once(flag: StopFlag, clock: ManualClock) -> None:
    flag.install()
    signal.raise_signal(signal.SIGTERM)
    clock.advance(REPEAT_SECONDS)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_outside_the_main_thread_it_says_that_it_cannot_watch(flag: StopFlag) -> None:
    answers: list[bool] = []
    thread = threading.Thread(target=lambda: answers.append(flag.install()))
    thread.start()
    thread.join()
    assert answers == [False]


def test_removing_twice_and_without_installing_is_harmless(flag: StopFlag) -> None:
    flag.remove()
    flag.install()
    flag.remove()
    flag.remove()
