"""A save on its way: staged (copied away from live memory), then durable (published), or failed."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from samerun.errors import StorageError

if TYPE_CHECKING:
    from samerun.checkpoint.catalog import Entry


class Pending:
    """What `Store.save` returns. Once `is_staged`, live state may change; once `is_durable`, the save is published."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.retention_error: Exception | None = None
        """Why older checkpoints could not be thinned out. The save itself is durable; the next one tries again."""
        self._done = threading.Event()
        self._entry: Entry | None = None
        self._error: Exception | None = None

    @property
    def is_staged(self) -> bool:
        """Always: `Store.save` returns only after everything has been copied or written."""
        return True

    @property
    def is_durable(self) -> bool:
        return self._entry is not None

    @property
    def is_done(self) -> bool:
        """Durable or failed."""
        return self._done.is_set()

    def result(self, seconds: float | None = None) -> Entry:
        """Waits for the end and returns the published checkpoint; raises what went wrong, on every rank alike.

        Raises StorageError when `seconds` pass first; the save goes on.
        """
        if not self._done.wait(seconds):
            raise StorageError(0, f"not durable after {seconds} s; still being written", self.name)
        if self._error is not None:
            raise self._error
        assert self._entry is not None, "a save that is done has an entry or an error"
        return self._entry

    def succeed(self, entry: Entry) -> None:
        self._entry = entry
        self._done.set()

    def fail(self, error: Exception) -> None:
        self._error = error
        self._done.set()
