"""A save on its way: staged (copied away from live memory), then durable (published), or failed."""

from __future__ import annotations

import asyncio
import errno
import threading
from collections.abc import Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

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


class Moment:
    """Something that a save reaches, or never reaches because it failed first. Wait for it, or `await` it."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._is_over = threading.Event()
        self._error: Exception | None = None

    @property
    def has_come(self) -> bool:
        return self._is_over.is_set() and self._error is None

    @property
    def is_over(self) -> bool:
        """Come, or never to come."""
        return self._is_over.is_set()

    def wait(self, seconds: float | None = None) -> None:
        """Returns once it has come; raises the save's error when it never will.

        StorageError (ETIMEDOUT) when `seconds` pass first; the save goes on.
        """
        if not self.until_over(seconds):
            raise StorageError(errno.ETIMEDOUT, f"not {self._what} after {seconds} s; still being written")
        if self._error is not None:
            raise self._error

    def until_over(self, seconds: float | None = None) -> bool:
        """Waits until it has come or never will; False when `seconds` pass first. Raises nothing."""
        return self._is_over.wait(seconds)

    def __await__(self) -> Generator[Any, None, None]:
        return asyncio.to_thread(self.wait).__await__()

    def come(self) -> None:
        self._is_over.set()

    def fail(self, error: Exception) -> None:
        """Does nothing once it has come."""
        if not self._is_over.is_set():
            self._error = error
            self._is_over.set()


class Pending:
    """What `Store.save` returns: once `staged` has come live state may change, once `durable` has it is published."""

    def __init__(self, name: str, *, in_background: bool = True) -> None:
        self.name = name
        self.in_background = in_background
        """False: it was over when `save` returned."""
        self.clocks = SaveClocks()
        self.retention_error: Exception | None = None
        """Why older checkpoints could not be thinned out. The save itself is durable; the next one tries again."""
        self.staged = Moment("staged")
        self.durable = Moment("durable")
        self._done = threading.Event()
        self._thread: threading.Thread | None = None
        self._entry: Entry | None = None
        self._error: Exception | None = None
        self._is_told = False

    @property
    def is_staged(self) -> bool:
        return self.staged.has_come

    @property
    def is_durable(self) -> bool:
        return self.durable.has_come

    @property
    def is_done(self) -> bool:
        """Durable or failed, and older checkpoints thinned out."""
        return self._done.is_set()

    @property
    def has_failed(self) -> bool:
        return self._done.is_set() and self._error is not None

    def result(self, seconds: float | None = None) -> Entry:
        """Waits for the end and returns the published checkpoint; raises what went wrong, on every rank alike.

        Raises StorageError (ETIMEDOUT) when `seconds` pass first; the save goes on.
        """
        if not self.wait(seconds):
            raise StorageError(errno.ETIMEDOUT, f"not durable after {seconds} s; still being written", self.name)
        self._is_told = True
        if self._error is not None:
            raise self._error
        assert self._entry is not None, "a save that is done has an entry or an error"
        return self._entry

    def wait(self, seconds: float | None = None) -> bool:
        """Waits for the end, whatever it is, and for the thread that saved; False when `seconds` pass first."""
        if not self._done.wait(seconds):
            return False
        if self._thread is not None:
            self._thread.join()  # nothing is left for it to do; afterwards nothing of the save is alive
        return True

    def run_in(self, thread: threading.Thread) -> None:
        """Starts `thread`, whose last deed is `finish`."""
        self._thread = thread
        thread.start()

    def raise_untold(self) -> None:
        """Raises the error of a save that is over if nobody has asked for its result."""
        if not self._is_told:
            self.result()

    def published(self, entry: Entry) -> None:
        self._entry = entry
        self.staged.come()
        self.durable.come()

    def finish(self, error: Exception | None = None) -> None:
        self._error = error
        if error is not None:
            self.staged.fail(error)
            self.durable.fail(error)
        self._done.set()
