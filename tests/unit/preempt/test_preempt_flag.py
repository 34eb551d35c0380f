"""Real signals: a level and a time at once, handlers that were there are called and put back, Ctrl-C twice leaves."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType

import pytest

from samerun.core.clock import ManualClock
from samerun.preempt.flag import HURRY_SECONDS, INTERRUPTED, REPEAT_SECONDS, SIGNALS, SignalWatch, StopFlag


@pytest.fixture(autouse=True)
def _signals_stay() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in SIGNALS}
    threads = threading.active_count()
    yield
    after = {number: signal.getsignal(number) for number in SIGNALS}
    for number, handler in before.items():
        signal.signal(number, handler)
    assert after == before, "a test left a handler behind"
    assert threading.active_count() == threads
    assert signal.set_wakeup_fd(-1) == -1


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(seconds=100.0)


@pytest.fixture
def flag(clock: ManualClock) -> StopFlag:
    return StopFlag(clock)


@pytest.fixture
def watch(flag: StopFlag, clock: ManualClock) -> Iterator[SignalWatch]:
    watch = SignalWatch(flag, warning_seconds=30.0, clock=clock)
    yield watch
    watch.remove()


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_leaves_a_reason_a_time_and_a_deadline(
    flag: StopFlag, watch: SignalWatch, clock: ManualClock, number: signal.Signals
) -> None:
    assert watch.install()
    assert not flag.is_set
    signal.raise_signal(number)
    assert flag.wait(10)
    assert flag.stop is not None
    assert (flag.stop.reason, flag.stop.noticed_seconds) == (number.name, 100.0)
    clock.advance(12)
    assert flag.seconds_left() == (None if number == signal.SIGINT else 18.0)


def test_the_time_is_noted_while_the_main_thread_cannot_run_python(flag: StopFlag) -> None:
    """A collective holds the main thread in C for seconds; the handler waits, the watcher does not."""
    watch = SignalWatch(flag, warning_seconds=30.0)
    watch.install()
    noted: list[float] = []

    def observe() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        flag.wait(10)
        noted.append(time.monotonic())

    heard: list[float] = []
    signal.signal(signal.SIGTERM, lambda *_: heard.append(time.monotonic()))
    thread = threading.Thread(target=observe)
    thread.start()
    lock = threading.Lock()
    lock.acquire()
    began = time.monotonic()
    while time.monotonic() - began < 1.0:  # a wait in C that signals do not interrupt, like a collective's
        lock.acquire(timeout=1.0 - (time.monotonic() - began))
    thread.join()
    signal.signal(signal.SIGTERM, watch._handle)
    watch.remove()
    assert noted[0] - began < 0.9


def test_a_second_term_shortens_the_deadline_and_nothing_lengthens_it(
    flag: StopFlag, watch: SignalWatch, clock: ManualClock
) -> None:
    watch.install()
    signal.raise_signal(signal.SIGTERM)
    assert flag.wait(10)
    clock.advance(REPEAT_SECONDS)
    os.kill(os.getpid(), signal.SIGTERM)
    wait_for(lambda: flag.seconds_left() == HURRY_SECONDS)
    flag.note("later and longer", seconds_left=500.0)
    assert flag.seconds_left() == HURRY_SECONDS
    assert flag.stop is not None and flag.stop.reason == "SIGTERM"


def test_handlers_found_are_called_and_put_back(watch: SignalWatch, flag: StopFlag) -> None:
    called: list[int] = []

    def mine(number: int, frame: FrameType | None) -> None:
        called.append(number)

    before = signal.signal(signal.SIGTERM, mine)
    try:
        watch.install()
        signal.raise_signal(signal.SIGTERM)
        assert called == [signal.SIGTERM]
        watch.remove()
        assert signal.getsignal(signal.SIGTERM) is mine
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_second_ctrl_c_leaves_at_once(watch: SignalWatch, flag: StopFlag, clock: ManualClock) -> None:
    watch.install()
    signal.raise_signal(signal.SIGINT)
    assert flag.wait(10)
    clock.advance(REPEAT_SECONDS)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


def test_one_ctrl_c_that_arrives_twice_is_one(watch: SignalWatch, flag: StopFlag) -> None:
    watch.install()
    signal.raise_signal(signal.SIGINT)
    assert flag.wait(10)
    signal.raise_signal(signal.SIGINT)


def test_ctrl_c_after_a_term_leaves_at_once(watch: SignalWatch, flag: StopFlag, clock: ManualClock) -> None:
    watch.install()
    signal.raise_signal(signal.SIGTERM)
    assert flag.wait(10)
    clock.advance(REPEAT_SECONDS)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


DEAF = """
import os, signal, sys, threading, time
from samerun.preempt.flag import SignalWatch, StopFlag
flag = StopFlag()
watch = SignalWatch(flag, warning_seconds=None)
watch.install()
def press():
    os.kill(os.getpid(), signal.SIGINT); flag.wait(10); time.sleep(1.1); os.kill(os.getpid(), signal.SIGINT)
threading.Thread(target=press, daemon=True).start()
try:
    while True:
        try:
            threading.Event().wait(60)
        except KeyboardInterrupt:
            threading.Event().wait(60)   # a program that swallows it: not left at once, so it is ended
finally:
    print("cleaned up")
"""


def test_a_main_thread_that_does_not_leave_is_ended() -> None:
    done = subprocess.run([sys.executable, "-c", DEAF], capture_output=True, timeout=60, check=False)
    assert done.returncode == INTERRUPTED
    assert b"cleaned up" not in done.stdout


def test_outside_the_main_thread_it_says_that_it_cannot_watch(watch: SignalWatch) -> None:
    answers: list[bool] = []
    thread = threading.Thread(target=lambda: answers.append(watch.install()))
    thread.start()
    thread.join()
    assert answers == [False]


def test_removing_twice_and_without_installing_is_harmless(watch: SignalWatch) -> None:
    watch.remove()
    watch.install()
    watch.remove()
    watch.remove()


def wait_for(condition: object) -> None:
    assert callable(condition)
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
