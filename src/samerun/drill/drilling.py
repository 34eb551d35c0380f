"""One drill from its first start to its verdict. The first twin shows which kind of command it is.

A command that uses samerun leaves a run where SAMERUN_RUN says, and traces where the fault plan says: it is interrupted
at points inside it and compared at every edge. Any other command is interrupted from outside, and what it wrote is
compared with what two uninterrupted twins wrote.
"""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from samerun.checkpoint.retired import read_retirements
from samerun.drill.inside import judging, playing
from samerun.drill.inside.diagnosis import Seen, diagnose, not_possible
from samerun.drill.inside.playing import OnProgress
from samerun.drill.inside.points import TwinFacts, parse_point
from samerun.drill.inside.scenarios import BAD_WINDOW, Scenario, Wish, chapters, health_of, standing_faults
from samerun.drill.judgement import Judgement, Kind, Told
from samerun.drill.outside import playing as outside
from samerun.drill.outside.acts import Observed
from samerun.drill.outside.strays import Snapshot, snapshot, strays
from samerun.drill.outside.triggers import When
from samerun.drill.starting import NPROC, Command, Stage, why_it_failed
from samerun.drill.traces import Line, in_order, read_traces, updates_done
from samerun.errors import UsageError
from samerun.health.rollback.story import stories
from samerun.ranks.topology import Wrapping
from samerun.run.faults import FaultPlan, fired, hits
from samerun.storage.opening import open_storage

TWIN: Final = "twin"


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """Everything that the user asked for."""

    scenario: Scenario
    command: Command
    wish: Wish
    when: When
    log: Path | None = None
    leave_out: Sequence[str] = ()
    tolerance: float = judging.TOLERANCE

    @property
    def is_from_outside(self) -> bool:
        return bool(self.when.at_seconds or self.when.patterns or self.when.watch or self.log)


def drill(order: Order, place: Path, on_progress: OnProgress) -> Told:
    """Everything happens under `place`, which is left with what is needed to see and repeat it.

    UsageError where the order cannot be carried out: no folder to write to, an unknown point, a run that is too short.
    """
    began = time.monotonic()
    for point in order.wish.points:
        parse_point(point, rank=order.wish.rank)
    stage = Stage(order.command, place)
    starts: list[dict[str, Any]] = []
    told: list[str] = []
    try:
        judgement = _drilled(order, stage, starts, told, on_progress)
    finally:
        stage.leave()
    result = Told(
        scenario=order.scenario.value,
        judgement=judgement,
        starts=starts,
        interruptions=told,
        seed=order.wish.seed,
        seconds=time.monotonic() - began,
    )
    (place / "drill.json").write_text(json.dumps(result.to_json(), indent=1) + "\n")
    (place / "starts.sh").write_text(_as_shell(stage))
    return result


def _as_shell(stage: Stage) -> str:
    said = "# Every start, in order. The folder is emptied between phases; drill.json says what struck from outside."
    return "\n".join([said, f"cd {shlex.quote(str(Path.cwd()))}", *stage.shown]) + "\n"


def _drilled(
    order: Order, stage: Stage, starts: list[dict[str, Any]], told: list[str], on_progress: OnProgress
) -> Judgement:
    stage.begin()
    trace = stage.place / f"{TWIN}-trace"
    here, but = Path.cwd(), [stage.place, stage.out]
    before = snapshot(here, but=but)
    watched = outside.WatchedTwin(order.when.watch, stage.out)
    plan = FaultPlan(
        trace=trace,
        faults=standing_faults(order.scenario, order.wish),
        health=health_of(order.scenario, None),
    )

    def poll() -> None:
        watched.poll()
        on_progress(TWIN, updates_done(trace))

    first = stage.start(TWIN, plan, nproc=order.wish.sizes[0], on_poll=poll)
    uses_samerun = (stage.run / "run.json").is_file()
    stage.put_aside(TWIN)
    if first.exit_code != 0:
        why = why_it_failed(first, timeout_seconds=order.command.timeout_seconds)
        return Judgement(kind=Kind.CANNOT_TELL, problem=f"the command fails without any interruption: {why}")
    if uses_samerun:
        return _inside(order, stage, starts, told, on_progress)
    return _outside(order, stage, watched.seen(first), (here, but, before), starts, told, on_progress)


def _inside(
    order: Order, stage: Stage, starts: list[dict[str, Any]], told: list[str], on_progress: OnProgress
) -> Judgement:
    if order.is_from_outside:
        raise UsageError(
            "this command uses samerun: it is interrupted at points inside it (--at window:13, --at save:writing) and "
            "compared at every edge; --on, --watch, --log and --at with seconds are for other commands"
        )
    twin = read_traces(stage.place / f"{TWIN}-trace")
    _require_known(order.leave_out, twin)
    standing = standing_faults(order.scenario, order.wish)
    trace, course = stage.place / f"{playing.RUN}-trace", playing.Course()
    facts = _facts(twin, stage.run_of(TWIN))
    stage.begin()
    problem = playing.play(
        stage,
        chapters(order.scenario, order.wish, facts),
        trace=trace,
        leave_out=order.leave_out,
        standing=standing,
        health=health_of(order.scenario, facts),
        on_progress=on_progress,
        course=course,
    )
    stage.put_aside(playing.RUN)
    run = stage.run_of(playing.RUN)
    told += course.told
    starts += [playing.start_record(event) for event in playing.started_events(run)]
    if problem is not None:
        return Judgement(kind=problem.kind, problem=problem.text, notes=course.notes)
    evidence = judging.Evidence(
        twin=twin,
        run=read_traces(trace),
        twin_run=stage.run_of(TWIN),
        run_run=run,
        events=playing.journal(run),
        damaged=course.damaged,
        warned_windows=course.warned_windows,
        bad_window=BAD_WINDOW if standing else None,
        tolerance=order.tolerance if order.scenario is Scenario.TOPOLOGY else None,
        notes=[*course.notes, *(not_possible(facts) if order.scenario is Scenario.FAULTS else [])],
        diagnoses=diagnose(_seen(run, trace), facts) if order.scenario is Scenario.FAULTS else (),
        abandoned=_abandoned(run),
    )
    return judging.judge(evidence)


def _require_known(leave_out: Sequence[str], twin: Sequence[Line]) -> None:
    """A component that is not there cannot be left out: the control would prove nothing."""
    known = in_order({name for line in twin for name in line.held})
    if unknown := [name for name in leave_out if name not in known]:
        raise UsageError(f"--break {unknown[0]}: this run has no such component; it has {', '.join(known)}")


def _seen(run: Path, trace: Path) -> Seen:
    """What the run says of itself, and what was done to it."""
    return Seen(
        hits=hits(trace),
        fired=fired(trace),
        events=playing.journal(run),
        findings=playing.findings(run),
        stories=stories(open_storage(run)),
    )


def _abandoned(run: Path) -> dict[int, int]:
    """Attempt that ended with a rewind → the window that it went back to."""
    ended = read_retirements(open_storage(run))
    return {one.attempt: one.target.windows for one in ended if one.target is not None}


def _facts(twin: Sequence[Line], run: Path) -> TwinFacts:
    started = playing.started_events(run)
    wrapping = started[0]["facts"]["topology"]["wrapping"] if started else ""
    return TwinFacts(
        is_replicated=wrapping == Wrapping.DDP.value,
        is_sharded=wrapping not in (Wrapping.DDP.value, Wrapping.SOLO.value),
        window_seconds=playing.window_seconds(run),
        is_even=playing.is_even(run),
        num_windows=max((line.window for line in twin), default=0),
        num_ranks=max((line.rank for line in twin), default=0) + 1,
    )


def _outside(
    order: Order,
    stage: Stage,
    seen: Observed,
    around: tuple[Path, Sequence[Path], Snapshot | None],
    starts: list[dict[str, Any]],
    told: list[str],
    on_progress: OnProgress,
) -> Judgement:
    _require_possible_from_outside(order)
    look = outside.Look(
        scenario=order.scenario, when=order.when, sizes=order.wish.sizes, tolerance=order.tolerance, log=order.log
    )
    course = outside.Course(starts=starts, interruptions=told)
    here, but, before = around
    changed = strays(before, snapshot(here, but=but))
    if changed:
        more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
        said = "files outside its folder changed while it ran, so phases may see each other"
        course.notes.append(f"{said}: {', '.join(changed[:3])}{more}")
    return outside.play(stage, look, seen, course, lambda phase: on_progress(phase, 0))


def _require_possible_from_outside(order: Order) -> None:
    said = "this command left no run of samerun"
    if order.scenario is Scenario.TOPOLOGY and not any(NPROC in word for word in order.command.words):
        raise UsageError(f"{said}; topology needs {{nproc}} in it: torchrun --nproc-per-node {{nproc}} …")
    if order.wish.points:
        raise UsageError(f"{said}, so --at {order.wish.points[0]} is no point in it; use --at 2.5s, --on or --watch")
    if order.leave_out:
        raise UsageError(f"{said}, so nothing can be left out of its resumes (--break)")
    if not order.command.has_folder:
        raise UsageError(f"{said}; say where it writes: {{out}} in its arguments, or --dir FOLDER")
