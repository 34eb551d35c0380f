"""A checkpoint that crashes the program while it is being loaded is passed over after a few tries.

Bad bytes are found and named; this is for what nobody can catch: a driver, a kernel, an allocator that ends the process
on these very bytes. The journal says what an attempt was about to load; an attempt whose journal ends there crashed.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from samerun.core.events import Journal, read_events
from samerun.storage.journal import StoredJournal
from samerun.storage.opening import is_url, open_storage

LOADING: Final = "loading"
MAX_CRASHES: Final = 3
"""Fewer could be an operator's kill or a lost machine; more would keep a run from ever starting."""


class LoadTries:
    """What earlier attempts died loading, and a word before each load of this one. Rank 0's; others hold none."""

    def __init__(self, journal: Journal, earlier: Sequence[Sequence[dict[str, Any]]] = ()) -> None:
        self._journal = journal
        self._last_words = [events[-1] for events in earlier if events]

    def num_crashes(self, name: str) -> int:
        """How many of the latest attempts in a row ended while they loaded checkpoint `name`."""
        count = 0
        for event in reversed(self._last_words):
            if (event["event"], event.get("checkpoint")) != (LOADING, name):
                return count
            count += 1
        return count

    def loading(self, name: str) -> None:
        self._journal.write(LOADING, checkpoint=name, sync=True)

    def refused(self, reason: str) -> None:
        """The program ends, but of its own will: not a crash."""
        self._journal.write("refused", reason=reason, sync=True)


def earlier_journals(folder: Path, *, attempt: int) -> list[list[dict[str, Any]]]:
    """The events of the attempts before this one, oldest first, as many as matter."""
    files = [file for file in sorted(folder.glob("*.jsonl")) if file.stem.isdigit() and int(file.stem) < attempt]
    return [read_events(file) for file in files[-MAX_CRASHES:]]


class Journals:
    """This attempt's journal, once its number is known: rank 0 writes, the others hold one that goes nowhere."""

    def __init__(self, path: str, *, writes: bool) -> None:
        self._path = path
        self._writes = writes
        self._journal: Journal | None = None

    def of(self, attempt: int) -> Journal:
        if self._journal is None:
            self._journal = self._open(attempt)
        return self._journal

    def load_tries(self, attempt: int) -> LoadTries:
        return LoadTries(self.of(attempt), self.earlier(attempt))

    def earlier(self, attempt: int) -> list[list[dict[str, Any]]]:
        """Events of the attempts before this one, oldest first. None on other ranks, nor of a run on an object store"""
        if not self._writes or is_url(self._path):
            return []
        return earlier_journals(Path(self._path) / "journal", attempt=attempt)

    def _open(self, attempt: int) -> Journal:
        if not self._writes:
            return Journal(None)
        if is_url(self._path):
            return StoredJournal(open_storage(self._path), attempt)
        return Journal(Path(self._path) / "journal" / f"{attempt:06d}.jsonl")
