"""Runs the demo: the twin, then the same run through the story, then the comparison."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from samerun.demo.corpus import write_corpus
from samerun.demo.story import STORY
from samerun.drill.inside.playing import Course, OnProgress, play, start_record, started_events
from samerun.drill.starting import Command, Stage, why_it_failed
from samerun.drill.traces import read_traces, updates_done
from samerun.drill.verdict import Verdict, compare
from samerun.run.faults import FaultPlan

SCHEMA: Final = "samerun.demo.v1"
_START_TIMEOUT_SECONDS: Final = 300.0
NUM_RANKS: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """Everything that happened, for the table and for `--json`."""

    verdict: Verdict
    starts: Sequence[dict[str, Any]]
    interruptions: Sequence[str]
    seconds: float

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            **self.verdict.to_json(),
            "problem": self.verdict.problem,
            "starts": list(self.starts),
            "interruptions": list(self.interruptions),
            "seconds": round(self.seconds, 1),
        }


def tell(folder: Path, *, num_updates: int, leave_out: Sequence[str], on_progress: OnProgress) -> Told:
    """Everything happens under `folder`. Component names in `leave_out` are not restored on any resume."""
    began = time.monotonic()
    stage = Stage(_command(folder / "corpus.bin", num_updates), folder)
    write_corpus(folder / "corpus.bin")
    traces = {name: folder / f"{name}-trace" for name in ("twin", "run")}
    course = Course()
    problem = _twin(stage, traces["twin"], on_progress)
    if problem is None:
        stage.begin()
        met = play(stage, STORY, trace=traces["run"], leave_out=leave_out, on_progress=on_progress, course=course)
        problem = None if met is None else met.text
        stage.put_aside("run")
    run = stage.run_of("run")
    twin, other = read_traces(traces["twin"]), read_traces(traces["run"])
    verdict = compare(twin, other, twin_path=str(stage.run_of("twin")), other_path=str(run))
    return Told(
        verdict=Verdict(components=verdict.components, cause=verdict.cause, problem=problem),
        starts=[start_record(event) for event in started_events(run)],
        interruptions=course.told,
        seconds=time.monotonic() - began,
    )


def _twin(stage: Stage, trace: Path, on_progress: OnProgress) -> str | None:
    stage.begin()
    ended = stage.start("twin", FaultPlan(trace=trace), on_poll=lambda: on_progress("twin", updates_done(trace)))
    stage.put_aside("twin")
    if ended.exit_code == 0:
        return None
    return f"the twin itself failed: {why_it_failed(ended, timeout_seconds=stage.command.timeout_seconds)}"


def _command(corpus: Path, num_updates: int) -> Command:
    script = ["-m", "samerun.demo.train", "{out}", str(corpus), "--updates", str(num_updates)]
    return Command(
        words=[sys.executable, "-m", "samerun.cli", "launch", "--nproc", str(NUM_RANKS), *script],
        timeout_seconds=_START_TIMEOUT_SECONDS,
        environ={"OMP_NUM_THREADS": "1"},
    )
