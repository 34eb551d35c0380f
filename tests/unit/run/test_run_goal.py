"""Goals and save intervals: arithmetic over progress that every rank does alike."""

from __future__ import annotations

import pytest

from samerun.core.progress import Progress
from samerun.errors import UsageError
from samerun.run.goal import Goal, SaveInterval


def at(*, windows: int = 0, updates: int = 0, samples: int = 0, tokens: int = 0) -> Progress:
    counts = {"windows": windows, "skipped": windows - updates, "updates": updates}
    return Progress.from_json({**counts, "samples": samples, "tokens": tokens})


@pytest.mark.parametrize(
    ("until", "before", "reached"),
    [
        (2000, at(windows=2005, updates=1999), at(windows=2006, updates=2000)),
        ("2000 updates", at(windows=1999, updates=1999), at(windows=2000, updates=2000)),
        ("7 windows", at(windows=6), at(windows=7)),
        ("1e9 tokens", at(tokens=10**9 - 1), at(tokens=10**9)),
        ("13 samples", at(samples=12), at(samples=13)),
        ("3 epochs", at(samples=125), at(samples=126)),
        ("0.5 epochs", at(samples=20), at(samples=21)),
    ],
)
def test_a_goal_is_reached_exactly_there(until: int | str, before: Progress, reached: Progress) -> None:
    goal = Goal.parse(until, samples_per_epoch=42)
    assert not goal.is_reached(before)
    assert goal.is_reached(reached)


def test_where_it_stands_in_words() -> None:
    assert Goal.parse(2000, samples_per_epoch=None).describe(at(windows=9, updates=7)) == "7 of 2000 updates"
    assert Goal.parse("3 epochs", samples_per_epoch=42).describe(at(samples=63)) == "1.5 of 3 epochs"


@pytest.mark.parametrize("until", ["10 min", "2h"])
def test_a_run_does_not_end_by_the_clock(until: str) -> None:
    with pytest.raises(UsageError, match="write it like until=2000"):
        Goal.parse(until, samples_per_epoch=42)


def test_epochs_need_a_length() -> None:
    with pytest.raises(UsageError, match="no epochs of known length"):
        Goal.parse("3 epochs", samples_per_epoch=None)


@pytest.mark.parametrize("until", [0, -3, "2.5 updates", "x", "5 furlongs"])
def test_what_is_no_amount_is_refused(until: int | str) -> None:
    with pytest.raises(UsageError):
        Goal.parse(until, samples_per_epoch=42)


def test_a_multiple_is_crossed_once_whatever_the_steps() -> None:
    interval = SaveInterval.parse("7 samples")
    positions = [0, 3, 6, 7, 8, 13, 14, 30, 31, 35]
    saved_at, saves = at(), []
    for position in positions:
        if interval.has_crossed(saved_at, at(samples=position)):
            saves.append(position)
            saved_at = at(samples=position)
    assert saves == [7, 14, 30, 35]


def test_saves_fall_on_the_same_edges_after_a_resume() -> None:
    interval = SaveInterval.parse("5 updates")

    def edges(first: int) -> list[int]:
        saved, found = first, []
        for now in range(first + 1, 31):
            if interval.has_crossed(at(windows=saved, updates=saved), at(windows=now, updates=now)):
                saved = now
                found.append(now)
        return found

    assert edges(0) == [5, 10, 15, 20, 25, 30]
    for resumed in range(30):  # also from a save that a stop made between two multiples
        assert edges(resumed) == [edge for edge in edges(0) if edge > resumed]


def test_by_the_clock_progress_decides_nothing() -> None:
    interval = SaveInterval.parse("10 min")
    assert interval.seconds == 600
    assert not interval.has_crossed(at(), at(samples=10**9, tokens=10**12))
    assert SaveInterval.parse("5 updates").seconds is None


@pytest.mark.parametrize("text", ["3 epochs", "10", "0 updates", "soon"])
def test_what_is_no_interval_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        SaveInterval.parse(text)
