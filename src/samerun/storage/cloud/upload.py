"""One object being written to an object store: small ones in one conditional request, large ones part by part.

Parts are handed to a thread that uploads while the next ones are made; at most a few wait, so memory stays bounded.
"""

from __future__ import annotations

import queue
import secrets
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final, Self

from samerun.storage.api import Buffer

if TYPE_CHECKING:
    from types import TracebackType

SINGLE_REQUEST_BYTES: Final = 16 * 2**20
"""Up to this size an object is put in one conditional request; manifests of a thousand ranks are far smaller."""
_MAX_WAITING: Final = 4

Put = Callable[[bytes], None]
Send = Callable[[Iterator[bytes], str], None]
Settle = Callable[[Exception, str], None]


class _AbandonedError(Exception):
    """Ends the stream of parts, so that the upload is aborted."""


class ObjectWriter:
    """`put` writes a small object; `send` uploads parts under a mark, and `settle` decides what a failed one means."""

    def __init__(self, *, put: Put, send: Send, settle: Settle, single_bytes: int) -> None:
        self._put = put
        self._send = send
        self._settle = settle
        self._single_bytes = single_bytes
        self._held = bytearray()
        self._stream: _Stream | None = None
        self._published = False

    def write(self, data: Buffer) -> None:
        assert not self._published, "write after publish"
        if self._stream is not None:
            self._stream.feed(bytes(data))  # a copy: the caller may reuse its buffer before the part has left
            return
        self._held += data
        if len(self._held) > self._single_bytes:
            self._stream = _Stream(self._send)
            self._stream.feed(bytes(self._held))
            self._held.clear()

    def publish(self) -> None:
        assert not self._published, "published twice"
        if self._stream is None:
            self._put(bytes(self._held))
        else:
            try:
                self._stream.finish()
            except Exception as error:  # noqa: BLE001  # a lost answer is no failure; `settle` raises what is one
                self._settle(error, self._stream.mark)
        self._published = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._held.clear()
        if self._stream is not None and not self._published:
            self._stream.abandon()


class _Stream:
    """Parts on their way to the thread that uploads them. `None` ends the stream, an exception aborts it."""

    def __init__(self, send: Send) -> None:
        self.mark = secrets.token_hex(16)
        self._send = send
        self._parts: queue.Queue[bytes | _AbandonedError | None] = queue.Queue(_MAX_WAITING)
        self._error: Exception | None = None
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="samerun-upload", daemon=True)
        self._thread.start()

    def feed(self, part: bytes) -> None:
        """Waits while too many parts are waiting; raises what went wrong with earlier ones."""
        self._put(part)
        if self._done.is_set():
            self._raise()

    def finish(self) -> None:
        self._put(None)
        self._thread.join()
        self._raise()

    def abandon(self) -> None:
        self._put(_AbandonedError())
        self._thread.join()

    def _put(self, part: bytes | _AbandonedError | None) -> None:
        if not self._done.is_set():  # nobody takes parts any more; the one that slips in finds room
            self._parts.put(part)

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            self._send(self._taken(), self.mark)
        except _AbandonedError:
            pass
        except Exception as error:  # noqa: BLE001  # raised at the owner's next call
            self._error = error
        finally:
            self._done.set()
            self._drain()

    def _taken(self) -> Iterator[bytes]:
        while (part := self._parts.get()) is not None:
            if isinstance(part, _AbandonedError):
                raise part
            yield part

    def _drain(self) -> None:
        """Makes room for whoever waits in `_put`."""
        while True:
            try:
                self._parts.get_nowait()
            except queue.Empty:
                return
