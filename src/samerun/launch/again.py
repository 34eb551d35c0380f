"""Starts, and starts again while the ledger allows it. The ledger lies with the run, so it outlives this process."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from samerun.checkpoint import Store
from samerun.core.events import Journal, read_events
from samerun.errors import ExitCode, SamerunError
from samerun.launch.ledger import Failure, GiveUp, Limits, next_step
from samerun.launch.torchrun import Ended, launch
from samerun.storage.opening import is_url

_LEDGER: Final = "launch.jsonl"
_FAILED: Final = "start_failed"


def launch_until_done(
    arguments: Sequence[str],
    *,
    num_ranks: int,
    limits: Limits,
    say: Callable[[str], None],
    start: Callable[..., Ended] = launch,
    wait: Callable[[float], None] = time.sleep,
) -> Ended:
    """Runs the script; after a failure again, as `limits` allow. Without a run there is no ledger and no retry."""
    while True:
        ended = start(arguments, num_ranks=num_ranks)
        if ended.code is not ExitCode.FAILED or limits.any == 0:
            return ended
        if ended.run_path is None or is_url(ended.run_path):
            why = "the script opened no run" if ended.run_path is None else f"{ended.run_path} is no local path"
            say(f"not started again: {why}, so there is no ledger to bound restarts by")
            return ended
        failures = _remember(Path(ended.run_path), ended)
        step = next_step(failures, limits)
        if isinstance(step, GiveUp):
            return Ended(code=ExitCode.DO_NOT_RESTART, reason=step.evidence, run_path=ended.run_path)
        say(f"{failures[-1]}; start {step.number + 1} without progress in {step.after_seconds:g} s")
        wait(step.after_seconds)


def _remember(run: Path, ended: Ended) -> list[Failure]:
    """Writes this failure into the run's ledger, durably, and returns all of them."""
    file = run / "journal" / _LEDGER
    failure = Failure(
        reason=ended.reason,
        rank=ended.rank,
        window=ended.window,
        batch=ended.batch,
        committed_updates=_committed_updates(run),
        checkpoint=_resumed_from(run),
    )
    journal = Journal(file)
    journal.write(_FAILED, sync=True, **failure.to_json())
    journal.close()
    return [Failure.from_json(event) for event in read_events(file) if event["event"] == _FAILED]


def _committed_updates(run: Path) -> int:
    try:
        entries = Store(run).catalog().entries
    except SamerunError:
        return 0
    return max((int(entry.progress.updates) for entry in entries), default=0)


def _resumed_from(run: Path) -> str | None:
    files = sorted(file for file in (run / "journal").glob("*.jsonl") if file.stem.isdigit())
    started = [event for event in read_events(files[-1]) if event["event"] == "started"] if files else []
    return started[-1]["checkpoint"] if started else None
