"""What each start of a command that knows nothing of samerun goes through, scenario by scenario. Pure.

| scenario | starts |
|---|---|
| continuity | SIGKILL of everything at the points asked for or drawn |
| crash | SIGKILL at the first change of a file, then at the second, the third, …, counted from each start |
| preempt | six ways to end, or SIGTERM at each point asked for |
| topology | SIGKILL, then another number of ranks |
| damage | SIGKILL, then the newest file that it saved is flipped, cut, removed |
| faults | stopped for a while as a straggler is, a full disk, SIGKILL |
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from samerun.drill.inside.scenarios import Scenario
from samerun.drill.outside.hurting import Hurt
from samerun.drill.outside.triggers import AfterSeconds, OnFileEvent, When, event_shares, triggers
from samerun.drill.processes import Blow, Interruption
from samerun.errors import UsageError

MAX_CRASHES: Final = 12
"""Starts of `crash`."""
_WAYS_TO_STOP: Final = (
    Blow.TERM, Blow.TERM_RANK, Blow.TERM_THEN_KILL, Blow.KILL, Blow.KILL_MAIN, Blow.KILL,
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Act:
    """One start. Without an interruption it must end with 0."""

    interruption: Interruption | None = None
    nproc: int | None = None
    hurt: Hurt | None = None
    """Done before this start to what the one before it saved."""
    is_disk_full: bool = False
    """Its files cannot grow beyond half of the largest that the twin left."""

    def __str__(self) -> str:
        return "the disk is full" if self.is_disk_full else str(self.interruption)


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """What the first twin showed."""

    seconds: float
    first_file_seconds: float
    """Until it first changed a file."""
    num_events: int
    """Changes of files under the watched folder."""
    folder: Path | None = None
    """The watched folder."""


def acts(scenario: Scenario, when: When, seen: Observed, *, sizes: Sequence[int]) -> list[Act]:
    """UsageError where the scenario cannot be done with what was given."""
    return [*_ACTS[scenario](when, seen, sizes), Act(nproc=sizes[-1])]


def _continuity(when: When, seen: Observed, sizes: Sequence[int]) -> list[Act]:
    if not when.is_said and when.watch is None:
        return [Act(interruption=one) for one in _spread([Blow.KILL] * when.num_kills, when, seen)]
    found = triggers(when, blow=Blow.KILL, twin_seconds=seen.seconds, twin_events=seen.num_events)
    return [Act(interruption=one) for one in found]


def _crash(when: When, seen: Observed, sizes: Sequence[int]) -> list[Act]:
    folder = when.watch or seen.folder
    if folder is None or not seen.num_events:
        raise UsageError("crash kills at changes of files, and the first twin made none where --watch looks")
    number = min(MAX_CRASHES, (math.isqrt(8 * seen.num_events + 1) - 1) // 2)
    step = max(1, 2 * seen.num_events // (number * (number + 1)))
    events = [step * (position + 1) for position in range(number)]  # in sum no more than the twin's, so that all come
    return [Act(interruption=OnFileEvent(blow=Blow.KILL, folder=folder, number=event)) for event in events]


def _preempt(when: When, seen: Observed, sizes: Sequence[int]) -> list[Act]:
    if when.is_said:
        found = triggers(when, blow=Blow.TERM, twin_seconds=seen.seconds, twin_events=seen.num_events)
        return [Act(interruption=one) for one in found]
    ways = _spread(_WAYS_TO_STOP, when, seen)
    if seen.num_events and (folder := when.watch or seen.folder):  # the last one in the middle of a save
        ways[-1] = OnFileEvent(blow=Blow.KILL, folder=folder, number=max(1, seen.num_events // (len(ways) + 1)))
    return [Act(interruption=way) for way in ways]


def _topology(when: When, seen: Observed, sizes: Sequence[int]) -> list[Act]:
    if len(sizes) < 2:
        raise UsageError("topology needs at least two numbers of ranks and {nproc} in the command: --nproc 4,2,1")
    return [replace(act, nproc=size) for act, size in zip(_kills(len(sizes) - 1, when, seen), sizes, strict=False)]


def _damage(when: When, seen: Observed, sizes: Sequence[int]) -> list[Act]:
    kills = _kills(len(Hurt) + 1, when, seen)
    return [kills[0], *(replace(act, hurt=hurt) for act, hurt in zip(kills[1:], Hurt, strict=True))]


def _faults(when: When, seen: Observed, sizes: Sequence[int]) -> list[Act]:
    first, last = _kills(2, when, seen)
    assert first.interruption is not None
    first.interruption.blow = Blow.STALL_THEN_KILL
    return [first, Act(is_disk_full=True), last]


def _kills(number: int, when: When, seen: Observed) -> list[Act]:
    """At the points asked for, or spread over the run."""
    if when.is_said:
        asked = replace(when, num_kills=number)
        found = triggers(asked, blow=Blow.KILL, twin_seconds=seen.seconds, twin_events=seen.num_events)[:number]
        return [Act(interruption=one) for one in found]
    return [Act(interruption=one) for one in _spread([Blow.KILL] * number, when, seen)]


def _spread(blows: Sequence[Blow], when: When, seen: Observed) -> list[Interruption]:
    """Some time after a change of a file: the same place in the work on a machine that is faster now than it was for
    the twin. By time only where the twin changed none."""
    folder = when.watch or seen.folder
    if not seen.num_events or folder is None:
        times = shares(len(blows), seen, seed=when.seed)
        return [AfterSeconds(blow=blow, after_seconds=at) for blow, at in zip(blows, times, strict=True)]
    draws = random.Random(when.seed)
    between = max(0.0, seen.seconds - seen.first_file_seconds) / seen.num_events
    return [
        OnFileEvent(blow=blow, folder=folder, number=number, delay_seconds=draws.uniform(0.0, between / 2))
        for blow, number in zip(blows, event_shares(len(blows), seen.num_events, draws), strict=True)
    ]


def shares(number: int, seen: Observed, *, seed: int) -> list[float]:
    """Times for starts that each resume where the last one was: every one does its part of the work, and none all."""
    draws = random.Random(seed)
    work = max(0.0, seen.seconds - seen.first_file_seconds)
    return [seen.first_file_seconds + work / (number + 1) * draws.uniform(0.8, 1.2) for _ in range(number)]


_ACTS: Final[dict[Scenario, Callable[[When, Observed, Sequence[int]], list[Act]]]] = {
    Scenario.CONTINUITY: _continuity,
    Scenario.CRASH: _crash,
    Scenario.PREEMPT: _preempt,
    Scenario.TOPOLOGY: _topology,
    Scenario.DAMAGE: _damage,
    Scenario.FAULTS: _faults,
}
