"""A save on its way: staged (copied away from live memory), then durable (published), or failed."""

from __future__ import annotations

import errno
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from samerun.errors import StorageError

if TYPE_CHECKING:
    from samerun.checkpoint.catalog import Entry


@dataclass(slots=True)
class SaveClocks:
    """Seconds from the call of `save` to each moment; None until it has come."""

    blocked_seconds: float | None = None
    """Until `save` returned: what training paid."""
    staged_seconds: float | None = None
    """Until everything had left live memory."""
    written_seconds: float | None = None
    """Until this rank's files were durable."""
    durable_seconds: float | None = None
    """Until the checkpoint was published: only from here on does it count."""


class Pending:
    """What `Store.save` returns. Once `is_staged`, live state may change; once `is_durable`, the save is published."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.clocks = SaveClocks()
        self.retention_error: Exception | None = None
        """Why older checkpoints could not be thinned out. The save itself is durable; the next one tries again."""
        self._done = threading.Event()
        self._entry: Entry | None = None
        self._error: Exception | None = None
        self._is_told = False

    @property
    def is_staged(self) -> bool:
        """Always: `Store.save` returns only after everything has been copied or written."""
        return True

    @property
    def is_durable(self) -> bool:
        return self._entry is not None

    @property
    def is_done(self) -> bool:
        """Durable or failed, and older checkpoints thinned out."""
        return self._done.is_set()

    def result(self, seconds: float | None = None) -> Entry:
        """Waits for the end and returns the published checkpoint; raises what went wrong, on every rank alike.

        Raises StorageError (ETIMEDOUT) when `seconds` pass first; the save goes on.
        """
        if not self._done.wait(seconds):
            raise StorageError(errno.ETIMEDOUT, f"not durable after {seconds} s; still being written", self.name)
        self._is_told = True
        if self._error is not None:
            raise self._error
        assert self._entry is not None, "a save that is done has an entry or an error"
        return self._entry

    def wait(self) -> None:
        """Waits for the end, whatever it is."""
        self._done.wait()

    def raise_untold(self) -> None:
        """Raises the error of a save that is over if nobody has asked for its result."""
        if not self._is_told:
            self.result()

    def published(self, entry: Entry) -> None:
        self._entry = entry

    def finish(self, error: Exception | None = None) -> None:
        self._error = error
        self._done.set()
