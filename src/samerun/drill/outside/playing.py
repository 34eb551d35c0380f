"""A drill of any command: two twins, then the same command interrupted and started again until it is done."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from samerun.drill.inside.scenarios import Scenario
from samerun.drill.judgement import Judgement, Kind
from samerun.drill.outside.acts import Act, Observed, acts
from samerun.drill.outside.compare import Difference, Nature, beyond, compare_folders
from samerun.drill.outside.hurting import hurt_newest
from samerun.drill.outside.judging import Evidence, judge
from samerun.drill.outside.outputs import files_in, leaves
from samerun.drill.outside.steps import (
    Row,
    by_step,
    column_spread,
    differences,
    done_again,
    new_rows,
    read_rows,
    started_over,
)
from samerun.drill.outside.triggers import FolderWatch, When
from samerun.drill.processes import WARNINGS, Blow, Ended
from samerun.drill.starting import Stage, why_it_failed
from samerun.run.faults import FaultPlan

OnPhase = Callable[[str], None]
_NO_FAULTS: Final = FaultPlan()
TWIN: Final = "twin"
SECOND_TWIN: Final = "second-twin"
RUN: Final = "run"


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What to do from outside, and where to look."""

    scenario: Scenario
    when: When
    sizes: Sequence[int] = (1,)
    tolerance: float = 0.0
    """Across numbers of ranks: how far numbers may be apart."""
    log: Path | None = None
    """Per-step log, relative to the folder."""


@dataclass(slots=True)
class Course:
    """What has happened so far."""

    starts: list[dict[str, Any]] = field(default_factory=list)
    interruptions: list[str] = field(default_factory=list)
    rows: list[list[Row]] = field(default_factory=list)
    had_saved: list[bool] = field(default_factory=list)
    came: list[bool] = field(default_factory=list)
    """Of each start: whether its interruption came."""
    had_warning: list[bool] = field(default_factory=list)
    """Of each start: whether it was told to stop and given time."""
    damaged: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


class WatchedTwin:
    """Counts file events of a twin, to draw kill points from."""

    def __init__(self, watch: Path | None, out: Path) -> None:
        self._folder = watch if watch is not None else out
        self._watch = FolderWatch(self._folder)
        self._began = time.monotonic()
        self._first_seconds: float | None = None

    def poll(self) -> None:
        if self._watch.look() and self._first_seconds is None:
            self._first_seconds = time.monotonic() - self._began

    def seen(self, ended: Ended) -> Observed:
        first = ended.seconds / 2 if self._first_seconds is None else self._first_seconds
        return Observed(
            seconds=ended.seconds, first_file_seconds=first, num_events=self._watch.num_events, folder=self._folder
        )


def play(stage: Stage, look: Look, seen: Observed, course: Course, on_phase: OnPhase) -> Judgement:
    """`seen`: what the first twin showed, whose folder has been put aside."""
    on_phase("second twin")
    stage.begin()
    second = stage.start(SECOND_TWIN, _NO_FAULTS)
    stage.put_aside(SECOND_TWIN)
    if second.exit_code != 0:
        why = why_it_failed(second, timeout_seconds=stage.command.timeout_seconds)
        return _cannot(f"an uninterrupted start worked once, and failed in a new folder: {why}", course)
    planned = acts(look.scenario, look.when, seen, sizes=look.sizes)
    stage.begin()
    ending = _interrupted(stage, look, planned, course, on_phase)
    stage.put_aside(RUN)
    if ending is not None:
        return ending
    if look.scenario is Scenario.DAMAGE and not course.damaged:
        return _cannot("it had saved nothing that could be damaged when it was killed; choose later points", course)
    return judge(_evidence(stage.place, look, course))


def _interrupted(
    stage: Stage, look: Look, planned: Sequence[Act], course: Course, on_phase: OnPhase
) -> Judgement | None:
    """The run. A verdict where it came to no end that could be compared."""
    for number, act in enumerate(planned):
        on_phase(f"run, start {number + 1}")
        if act.hurt is not None and (what := hurt_newest(stage.out, act.hurt, but=[look.log] if look.log else [])):
            course.damaged.append(what)
            course.interruptions.append(what)
        ended = _one_start(stage, look, act, course)
        if ended.interrupted or (act.is_disk_full and ended.exit_code is not None):
            continue
        if ended.exit_code is None:
            return _bad(Kind.HUNG, ended, stage, course)
        if ended.exit_code != 0:
            return _bad(Kind.CRASHED, ended, stage, course)
        if act.interruption is not None:
            break  # it was done before the interruption came
    num_came = sum(course.came)
    num_planned = sum(act.interruption is not None for act in planned)
    if num_came == 0:
        return _cannot(f"it ended before the first interruption ({planned[0]}) came; choose an earlier point", course)
    if num_came < num_planned:
        course.notes.append(f"only {num_came} of {num_planned} interruptions came before it was done")
    return None


def _one_start(stage: Stage, look: Look, act: Act, course: Course) -> Ended:
    before = read_rows(stage.out / look.log) if look.log else []
    blow = act.interruption.blow if act.interruption is not None else None
    ended = stage.start(
        RUN,
        _NO_FAULTS,
        interruption=act.interruption,
        again=bool(course.starts),
        nproc=act.nproc,
        orphans_stop=blow is Blow.KILL_MAIN,
        max_file_bytes=_half_of_largest(stage.place / TWIN) if act.is_disk_full else None,
    )
    if look.log is not None:
        course.rows.append(new_rows(before, read_rows(stage.out / look.log)))
    course.starts.append(_record(ended, course))
    course.came.append(ended.interrupted)
    course.had_warning.append(ended.interrupted and blow in WARNINGS)
    if ended.interrupted or act.is_disk_full:
        course.had_saved.append(any(file != look.log for file in files_in(stage.out)))
        course.interruptions.append(f"{act}: exit {ended.exit_code}")
    if ended.ignored_term:
        course.notes.append(f"it was still there {stage.command.grace_seconds:g} s after SIGTERM, and was killed")
    if ended.num_left:
        course.notes.append(f"{ended.num_left} processes were left behind by a start, and were killed")
    return ended


def _half_of_largest(folder: Path) -> int:
    return max(((folder / file).stat().st_size for file in files_in(folder)), default=0) // 2


def _record(ended: Ended, course: Course) -> dict[str, Any]:
    steps = by_step(course.rows[-1]) if course.rows else {}
    return {
        "exit_code": ended.exit_code,
        "seconds": round(ended.seconds, 2),
        "first_update": min(steps, default=None),
        "last_update": max(steps, default=None),
        "log": ended.log.name,
    }


def _evidence(place: Path, look: Look, course: Course) -> Evidence:
    skip = frozenset({look.log} if look.log else ())
    twin, second, run = place / TWIN, place / SECOND_TWIN, place / RUN
    spread = compare_folders(twin, second, skip=skip)
    twin_rows, second_rows = [read_rows(folder / look.log) for folder in (twin, second)] if look.log else ([], [])
    row_spread = column_spread(twin_rows, second_rows)
    if spread or row_spread:
        course.notes.append(_not_deterministic([*row_spread, *spread]))
    if look.log is not None and not by_step(twin_rows):
        course.notes.append(f"{look.log} holds no numbered rows (one of step, update, iteration); it was not used")
    return Evidence(
        files=_within(beyond(compare_folders(twin, run, skip=skip), spread), look),
        steps=[] if look.scenario is Scenario.TOPOLOGY else differences(twin_rows, course.rows, spread=row_spread),
        saved_leaves=frozenset(path for file in files_in(twin) if file not in skip for path in leaves(twin, file)),
        last_step=max(by_step(twin_rows), default=None),
        num_done_again=done_again(course.rows),
        num_after_warning=done_again(course.rows, after=course.had_warning),
        began_over=started_over(course.rows, course.had_saved),
        was_damaged=bool(course.damaged),
        saved_before_kills=any(course.had_saved),
        notes=course.notes,
    )


def _within(found: Sequence[Difference], look: Look) -> list[Difference]:
    """Across numbers of ranks sums are made in another order: numbers may be apart by the tolerance."""
    if look.scenario is not Scenario.TOPOLOGY:
        return list(found)
    return [one for one in found if one.nature is not Nature.NUMBER or one.size is None or one.size > look.tolerance]


def _not_deterministic(spread: Sequence[Difference]) -> str:
    where = ", ".join(one.path if one.size is None else f"{one.path} (by {one.size:.3g})" for one in spread[:4])
    more = f" and {len(spread) - 4} more" if len(spread) > 4 else ""
    said = "two uninterrupted twins differ, so the script is not deterministic"
    return f"{said}: {where}{more}; compared within that spread"


def _bad(kind: Kind, ended: Ended, stage: Stage, course: Course) -> Judgement:
    why = why_it_failed(ended, timeout_seconds=stage.command.timeout_seconds)
    return Judgement(kind=kind, problem=f"start {len(course.starts)} of the run: {why}", notes=course.notes)


def _cannot(problem: str, course: Course) -> Judgement:
    return Judgement(kind=Kind.CANNOT_TELL, problem=problem, notes=course.notes)
