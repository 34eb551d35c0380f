"""Plays chapters one after the other: plan, start, what happened, what was expected."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from samerun.core.events import read_events
from samerun.drill.damage import Damaged, damage_newest
from samerun.drill.inside.chapters import Chapter
from samerun.drill.judgement import Kind
from samerun.drill.processes import Blow, Ended
from samerun.drill.starting import Stage, why_it_failed
from samerun.drill.traces import updates_done
from samerun.errors import ExitCode
from samerun.health.records.event import read_records
from samerun.run.faults import Fault, FaultPlan, fired
from samerun.run.keeping.samples import DECIDED
from samerun.storage.journal import SAMPLES, read_journal
from samerun.storage.opening import open_storage

RUN = "run"

OnProgress = Callable[[str, int], None]
"""(name of the phase, updates done)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """What kept the chapters from being played to the end."""

    kind: Kind
    text: str


@dataclass(slots=True)
class Course:
    """What has happened so far."""

    told: list[str] = field(default_factory=list)
    damaged: list[Damaged] = field(default_factory=list)
    warned_windows: dict[int, int] = field(default_factory=dict)
    """Attempt that was told in time → the window it was in."""
    notes: list[str] = field(default_factory=list)


class WhenFired:
    """An interruption from outside once planned faults have happened inside."""

    def __init__(self, trace: Path, faults: Sequence[Fault], blow: Blow) -> None:
        self.blow = blow
        self._trace = trace
        self._before = len(fired(trace))
        self._faults = faults

    def feed(self, data: bytes) -> None:
        pass

    def is_due(self, seconds: float) -> bool:
        return _all_happened(self._trace, self._before, self._faults)


def play(
    stage: Stage,
    chapters: Sequence[Chapter],
    *,
    trace: Path,
    leave_out: Sequence[str] = (),
    standing: tuple[Fault, ...] = (),
    health: Mapping[str, Any] | None = None,
    on_progress: OnProgress,
    course: Course,
) -> Problem | None:
    """Every chapter in the folder of `stage`, until one goes wrong or the last has ended."""
    for number, chapter in enumerate(chapters):
        if chapter.damage is not None:
            course.damaged.append(damage_newest(stage.run, chapter.damage))
            course.told.append(course.damaged[-1].what)
        plan = FaultPlan(
            trace=trace, leave_out=tuple(leave_out), faults=(*standing, *chapter.faults), health=health or {}
        )
        before = len(fired(trace))
        ended = stage.start(
            RUN,
            plan,
            again=number > 0,
            nproc=chapter.nproc,
            interruption=WhenFired(trace, chapter.faults, chapter.blow) if chapter.blow else None,
            on_poll=lambda: on_progress(RUN, updates_done(trace)),
            orphans_stop=chapter.orphans_stop,
        )
        happened = _all_happened(trace, before, chapter.faults)
        if chapter.until_it_fails_to_come and not happened and ended.exit_code == 0:
            course.notes.append(f"{number} file operations of a save, each with a SIGKILL before it")
            return None
        if chapter.faults:
            course.told.append(f"{chapter.title}: exit {ended.exit_code}")
        _note(course, chapter, ended, stage)
        if problem := _unexpected(chapter, ended, happened, stage.command.timeout_seconds):
            return problem
    return None


def started_events(run: Path) -> list[dict[str, Any]]:
    """What each start decided, from the run's journal."""
    return [event for event in journal(run) if event["event"] == "started"]


def journal(run: Path) -> list[dict[str, Any]]:
    """Every event of every attempt, in order."""
    return [event for file in sorted((run / "journal").glob("*.jsonl")) for event in read_events(file)]


def findings(run: Path) -> list[tuple[int, dict[str, Any]]]:
    """(rank, event) of everything that one rank alone saw, in every attempt."""
    files = sorted((run / "health").glob("*/rank-*.findings.jsonl"))
    return [
        (int(file.name.split(".")[0].removeprefix("rank-")), event) for file in files for event in read_events(file)
    ]


def window_seconds(run: Path) -> float:
    """The median time of a window of rank 0's first attempt; 0 where it left no records."""
    file = run / "health" / "000001" / "rank-00000.windows.jsonl"
    seconds = sorted(record.window_seconds for record in read_records(file).records) if file.exists() else []
    return seconds[len(seconds) // 2] if seconds else 0.0


def is_even(run: Path) -> bool:
    """Whether every rank had as many microbatches in a window, as far as the ledger of samples says."""
    lines = read_journal(open_storage(run), suffix=SAMPLES)
    return all(line["microbatches"] % line["replicas"] == 0 for line in lines if line["event"] == DECIDED)


def start_record(event: dict[str, Any]) -> dict[str, Any]:
    names = ("attempt", "kind", "checkpoint", "progress", "passed", "restored", "waived", "not_bitwise")
    return {name: event[name] for name in names}


def _note(course: Course, chapter: Chapter, ended: Ended, stage: Stage) -> None:
    if ended.ignored_term:
        course.notes.append(f"{chapter.title}: still there after {stage.command.grace_seconds:g} s, and killed")
    if ended.num_left:
        course.notes.append(f"{chapter.title}: {ended.num_left} processes were left behind, and were killed")
    if chapter.had_warning or (chapter.blow is Blow.TERM and not ended.ignored_term):
        attempts = [event["attempt"] for event in started_events(stage.run)]
        window = int(chapter.faults[0].at.removeprefix("window:").split(".")[0])
        if attempts:
            course.warned_windows[attempts[-1]] = window


def _unexpected(chapter: Chapter, ended: Ended, happened: bool, timeout_seconds: float) -> Problem | None:
    why = why_it_failed(ended, timeout_seconds=timeout_seconds)
    if ended.exit_code is None:
        return Problem(kind=Kind.HUNG, text=f"{chapter.title}: {why}")
    if not happened:
        kind = Kind.CANNOT_TELL if ended.exit_code == 0 else Kind.CRASHED
        return Problem(kind=kind, text=f"{chapter.title}: that never came; instead {why}")
    if chapter.is_last:
        return None if ended.exit_code == 0 else Problem(kind=Kind.CRASHED, text=f"{chapter.title}: {why}")
    if chapter.exit_code is not None and ended.exit_code != chapter.exit_code:
        return Problem(kind=Kind.CRASHED, text=f"{chapter.title}: expected exit {int(chapter.exit_code)}, got {why}")
    if ended.exit_code == ExitCode.DO_NOT_RESTART:
        return Problem(kind=Kind.CRASHED, text=f"{chapter.title}: it asks not to be started again: {why}")
    return None


def _all_happened(trace: Path, before: int, faults: Sequence[Fault]) -> bool:
    new = fired(trace)[before:]
    return all(fault.to_json() in new for fault in faults)
