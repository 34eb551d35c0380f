"""The run's ledger of samples: a line for each decided window, rank 0's, beside the journal.

What it says of a window is durable before any checkpoint that holds the window, so a crash loses no line that counts.
Lines of short windows are made and written together, about once a second: alone, between two windows, each costs ten
times as much. A ledger that cannot be written costs no training: it ends, that is said once, and an audit will name
the gap.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from samerun.core.clock import Clock, SystemClock
from samerun.core.events import Journal
from samerun.data.ledger import began_line, ledger_line
from samerun.data.source import DataSource, DataWindow, Guarantee
from samerun.step.outcome import Decision
from samerun.storage.journal import FOLDER, SAMPLES, StoredJournal
from samerun.storage.opening import is_url, open_storage

DECIDED: Final = "window"
_TOGETHER_SECONDS: Final = 1.0


def open_samples(path: str, attempt: int, *, leads: bool) -> Journal:
    """Where rank 0 writes its lines; other ranks' go nowhere."""
    if not leads:
        return Journal(None)
    if is_url(path):
        return StoredJournal(open_storage(path), attempt, suffix=SAMPLES)
    return Journal(Path(path) / FOLDER / f"{attempt:06d}{SAMPLES}")


class SampleLedger:
    """One attempt's. `began` before the first window, `decided` after each, `sync` before a checkpoint."""

    def __init__(
        self, lines: Journal, *, replicas: int, say: Callable[[str], None], clock: Clock | None = None
    ) -> None:
        self._lines: Journal | None = lines
        self._replicas = replicas
        self._say = say
        self._clock = clock or SystemClock()
        self._has_begun = False
        self._waiting: list[tuple[float, DataWindow, Decision]] = []
        self._written = self._clock.monotonic_seconds()

    def began(self, source: DataSource, *, attempt: int, window: int) -> None:
        """Once; later calls do nothing."""
        if self._has_begun:
            return
        self._has_begun = True
        # a loader's own state can be large and is each rank's own; an exact source's is short and holds its order
        says = source.state_dict() if source.guarantee is Guarantee.EXACT else source.identity()
        line = began_line(attempt=attempt, window=window, source=says)
        self._do(lambda lines: lines.write(line.pop("event"), **line))

    def decided(self, data: DataWindow, decision: Decision) -> None:
        if self._lines is None:
            return
        self._waiting.append((self._clock.wall_seconds(), data, decision))
        now = self._clock.monotonic_seconds()
        if now - self._written >= _TOGETHER_SECONDS:
            self._written = now
            self._do(self._write)

    def _write(self, lines: Journal) -> None:
        waiting, self._waiting = self._waiting, []
        lines.write_all(DECIDED, [self._line(*one) for one in waiting])

    def _line(self, wall_seconds: float, data: DataWindow, decision: Decision) -> dict[str, Any]:
        skipped = [outcome.reason.value for outcome in decision.skipped.values()]
        line = ledger_line(
            data,
            decision=skipped[-1] if skipped and not decision.updated else "updated",
            replicas=self._replicas,
            coverage=decision.agreed.coverage,
        )
        return {"time": round(wall_seconds, 3), **line}

    def sync(self) -> None:
        self._do(self._write)
        self._do(lambda lines: lines.sync())

    def close(self) -> None:
        self._do(self._write)
        self._do(lambda lines: lines.close())

    def _do(self, work: Callable[[Journal], None]) -> None:
        if self._lines is None:
            return
        try:
            work(self._lines)
        except OSError as error:
            self._lines = None
            self._say(f"the ledger of samples ends here, it cannot be written: {error}")
