"""When a command is interrupted from outside: after a time, at a line it prints, at the N-th change in a folder."""

from __future__ import annotations

import os
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeVar

from samerun.drill.output import PatternWatch
from samerun.drill.processes import Blow, Interruption

_T = TypeVar("_T")
_TIMES: Final = (0.35, 0.75)
"""Kills by time fall in this part of the twin's duration: late enough to have saved, early enough to come at all."""


@dataclass(slots=True, kw_only=True)
class AfterSeconds:
    blow: Blow
    after_seconds: float

    def feed(self, data: bytes) -> None:
        pass

    def is_due(self, seconds: float) -> bool:
        return seconds >= self.after_seconds

    def __str__(self) -> str:
        return f"{self.blow.value} after {self.after_seconds:.2f} s"


@dataclass(slots=True, kw_only=True)
class OnPattern:
    blow: Blow
    pattern: str
    _watch: PatternWatch = field(init=False)

    def __post_init__(self) -> None:
        self._watch = PatternWatch(self.pattern)

    def feed(self, data: bytes) -> None:
        self._watch.feed(data)

    def is_due(self, seconds: float) -> bool:
        return self._watch.has_matched

    def __str__(self) -> str:
        return f"{self.blow.value} at a line that matches {self.pattern!r}"


class FolderWatch:
    """Counts files that appear, change or vanish under a folder. Polled, so a quick pair counts once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._seen = _state_of(folder)
        self.num_events = 0

    def look(self) -> int:
        now = _state_of(self._folder)
        if now != self._seen:
            self.num_events += len(set(now.items()) ^ set(self._seen.items())) - len(_changed(now, self._seen))
            self._seen = now
        return self.num_events


def _changed(now: dict[str, tuple[int, int]], before: dict[str, tuple[int, int]]) -> list[str]:
    return [name for name in now if name in before and now[name] != before[name]]


def _state_of(folder: Path) -> dict[str, tuple[int, int]]:
    """Path → (size, time of the last change) of every file there."""
    found = {}
    for root, _, names in os.walk(folder):
        for name in names:
            path = os.path.join(root, name)  # noqa: PTH118  # polled: a Path each time would cost more than the look
            try:
                stat = os.lstat(path)
            except FileNotFoundError:
                continue
            found[path] = (stat.st_size, stat.st_mtime_ns)
    return found


@dataclass(slots=True, kw_only=True)
class OnFileEvent:
    blow: Blow
    folder: Path
    number: int
    poll_seconds: float = 0.002
    """A save makes its files within milliseconds of each other."""
    delay_seconds: float = 0.0
    """From the change to the blow: a kill between two saves, rather than inside one."""
    _watch: FolderWatch | None = field(init=False, default=None)
    _seen_seconds: float | None = field(init=False, default=None)

    def feed(self, data: bytes) -> None:
        pass

    def is_due(self, seconds: float) -> bool:
        if self._watch is None:
            self._watch = FolderWatch(self.folder)
        if self._seen_seconds is None and self._watch.look() >= self.number:
            self._seen_seconds = seconds
        return self._seen_seconds is not None and seconds - self._seen_seconds >= self.delay_seconds

    def __str__(self) -> str:
        after = f"{self.delay_seconds:.2f} s after" if self.delay_seconds else "at"
        return f"{self.blow.value} {after} file event {self.number} under {self.folder.name}/"


@dataclass(frozen=True, slots=True, kw_only=True)
class When:
    """What the user asked for; empty: by time, seeded."""

    at_seconds: tuple[float, ...] = ()
    patterns: tuple[str, ...] = ()
    watch: Path | None = None
    num_kills: int = 2
    seed: int = 0

    @property
    def is_said(self) -> bool:
        """Whether the user named points, rather than leaving them to be drawn."""
        return bool(self.at_seconds or self.patterns)


def triggers(when: When, *, blow: Blow, twin_seconds: float, twin_events: int) -> list[Interruption]:
    """One for each start that is to be interrupted. What was given once is repeated, so that it resumes twice."""
    draws = random.Random(when.seed)
    if when.patterns:
        return [OnPattern(blow=blow, pattern=pattern) for pattern in _at_least(when.patterns, when.num_kills)]
    if when.watch is not None and twin_events:
        numbers = event_shares(when.num_kills, twin_events, draws)
        return [OnFileEvent(blow=blow, folder=when.watch, number=number) for number in numbers]
    times = _at_least(when.at_seconds, when.num_kills) if when.at_seconds else None
    times = times or [twin_seconds * draws.uniform(*_TIMES) for _ in range(when.num_kills)]
    return [AfterSeconds(blow=blow, after_seconds=seconds) for seconds in times]


def event_shares(number: int, twin_events: int, draws: random.Random) -> list[int]:
    """For starts that each resume where the last one was: together they need no more events than the twin had."""
    return [max(1, round(twin_events / (number + 1) * draws.uniform(0.5, 1.1))) for _ in range(number)]


def _at_least(given: tuple[_T, ...], number: int) -> list[_T]:
    return [*given, *(given[-1:] * max(0, number - len(given)))]
