"""Runs the demo: the twin, then the same run through the story, then the comparison."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from samerun.core.environ import FAULTS_VARIABLE
from samerun.core.events import read_events
from samerun.demo.corpus import write_corpus
from samerun.demo.story import STORY, Chapter
from samerun.drill.damage import flip_one_byte_of_newest
from samerun.drill.processes import Ended, run_once
from samerun.drill.traces import read_traces, updates_done
from samerun.drill.verdict import Verdict, compare
from samerun.run.faults import FaultPlan, fired

SCHEMA: Final = "samerun.demo.v1"
_START_TIMEOUT_SECONDS: Final = 300.0
NUM_RANKS: Final = 2

OnProgress = Callable[[str, int], None]
"""(name of the run, updates done)"""


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
    corpus = folder / "corpus.bin"
    write_corpus(corpus)
    told: list[str] = []
    twin_end = _start(folder, "twin", corpus, num_updates, FaultPlan(trace=folder / "twin-trace"), on_progress)
    problem = None if twin_end.exit_code == 0 else f"the twin itself failed:\n{twin_end.tail()}"
    if problem is None:
        problem = _interrupted(folder, corpus, num_updates, tuple(leave_out), told, on_progress)
    twin, other = read_traces(folder / "twin-trace"), read_traces(folder / "run-trace")
    verdict = compare(twin, other, twin_path=str(folder / "twin"), other_path=str(folder / "run"))
    return Told(
        verdict=Verdict(components=verdict.components, cause=verdict.cause, problem=problem),
        starts=[_start_record(event) for event in _started_events(folder / "run")],
        interruptions=told,
        seconds=time.monotonic() - began,
    )


def _interrupted(
    folder: Path, corpus: Path, num_updates: int, leave_out: tuple[str, ...], told: list[str], on_progress: OnProgress
) -> str | None:
    """Plays every chapter; the problem that kept the story from being told, if any."""
    for chapter in STORY:
        if chapter.flip_newest:
            told.append(flip_one_byte_of_newest(folder / "run"))
        plan = FaultPlan(trace=folder / "run-trace", leave_out=leave_out, faults=chapter.faults)
        end = _start(folder, "run", corpus, num_updates, plan, on_progress)
        if chapter.faults:
            told.append(f"{chapter.title}: exit {end.exit_code}")
        happened = fired(folder / "run-trace")[-len(chapter.faults) :] if chapter.faults else []
        if happened != [fault.to_json() for fault in chapter.faults]:
            return f"{chapter.title}: that never came; exit {end.exit_code} instead\n{end.tail()}"
        if problem := _unexpected(chapter, end):
            return problem
    return None


def _unexpected(chapter: Chapter, end: Ended) -> str | None:
    if end.exit_code is None:
        return f"{chapter.title}: nothing moved for {_START_TIMEOUT_SECONDS:g} s\n{end.tail()}"
    if end.exit_code != chapter.exit_code:
        return f"{chapter.title}: exit {end.exit_code}, expected {int(chapter.exit_code)}\n{end.tail()}"
    return None


def _start(folder: Path, name: str, corpus: Path, num_updates: int, plan: FaultPlan, on_progress: OnProgress) -> Ended:
    logs = folder / "logs"
    logs.mkdir(exist_ok=True)
    log = logs / f"{name}-{len(list(logs.glob(f'{name}-*'))) + 1}.log"
    trace = plan.trace
    assert trace is not None
    script = ["-m", "samerun.demo.train", str(folder / name), str(corpus), "--updates", str(num_updates)]
    return run_once(
        [sys.executable, "-m", "samerun.cli", "launch", "--nproc", str(NUM_RANKS), *script],
        environ={FAULTS_VARIABLE: plan.to_text(), "OMP_NUM_THREADS": "1"},
        log=log,
        timeout_seconds=_START_TIMEOUT_SECONDS,
        on_poll=lambda: on_progress(name, updates_done(trace)),
    )


def _started_events(run: Path) -> list[dict[str, Any]]:
    files = sorted((run / "journal").glob("*.jsonl"))
    return [event for file in files for event in read_events(file) if event["event"] == "started"]


def _start_record(event: dict[str, Any]) -> dict[str, Any]:
    names = ("attempt", "kind", "checkpoint", "progress", "passed", "restored", "waived", "not_bitwise")
    return {name: event[name] for name in names}
