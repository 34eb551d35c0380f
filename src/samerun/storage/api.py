"""The little that samerun asks of storage, small enough that a directory, an object store and a dict can all give it.

Keys are relative, '/'-separated, and never leave the root. Three guarantees carry everything else:

- `writer(...).publish()` makes a whole object visible under its key or nothing, and it is durable once `sync` of its
  prefix has returned (on an object store: at once);
- `put_if_absent` has exactly one winner, and the winner's bytes are durable when it returns;
- `make_prefix` of a name that exists is refused, so a prefix that it made belongs to one writer.

Everything raises StorageError (NotFoundError, AlreadyExistsError) with the key and the system's own reason.
"""

from __future__ import annotations

import errno
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol, Self

from samerun.errors import AlreadyExistsError, NotFoundError, StorageError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import TracebackType

_KEY: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+=-]*(/[A-Za-z0-9_][A-Za-z0-9_.+=-]*)*\Z")
MAX_KEY_CHARACTERS: Final = 1024

Buffer = bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """An object's bytes and a version that changes whenever the object is replaced."""

    data: bytes
    version: str


class Writer(Protocol):
    """One object being written. Leaving the context without `publish` aborts: nothing of it becomes visible."""

    def write(self, data: Buffer) -> None: ...

    def publish(self) -> None: ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Reader(Protocol):
    """One object being read by ranges."""

    @property
    def size_bytes(self) -> int: ...

    def read_into(self, start: int, target: memoryview) -> None:
        """Fills the whole of `target` from byte `start`; raises StorageError when the object ends before that."""

    def close(self) -> None: ...


class Storage(Protocol):
    @property
    def where(self) -> str:
        """The root as a person would write it: a path or a URL."""

    def make_prefix(self, prefix: str) -> None:
        """Creates `prefix` (and what is above it), durably; AlreadyExistsError when it is there."""

    def writer(self, key: str) -> Writer:
        """Starts an object under a prefix that this writer owns; a published key is never written again."""

    def sync(self, prefix: str) -> None:
        """Returns when the names published directly under `prefix` ("" is the root) are durable."""

    def put_if_absent(self, key: str, data: bytes) -> None: ...

    def put_if_unchanged(self, key: str, data: bytes, version: str | None, *, durable: bool = True) -> None:
        """Replaces `key` as long as it still has `version` (None: absent), else AlreadyExistsError.

        With `durable=False` a crash may leave the old bytes, the new ones, or none: for hints that nothing rests on.

        Local directories compare and then rename: two writers in the same instant can both win. That is why what is
        kept this way (pointers) is a hint and never a proof.
        """

    def get(self, key: str, *, max_bytes: int) -> Found: ...

    def reader(self, key: str) -> Reader: ...

    def size_bytes(self, key: str) -> int: ...

    def sizes(self, prefix: str, wanted: Iterable[str]) -> dict[str, int]:
        """Name → bytes of those `wanted` that lie directly under `prefix`; one that is missing is not in the answer.

        On an object store one listing, however many names. StorageError for a name that is no object (a link, a pipe).
        """

    def names(self, prefix: str) -> list[str]:
        """The sorted names directly under `prefix` ("" is the root); empty when there is no such prefix."""

    def remove(self, key: str) -> None:
        """Removes one object; one that is gone already is no error."""

    def discard(self, prefix: str, first: str = "") -> None:
        """Makes `prefix` invisible at once and durably, then removes it. One that is gone already is no error.

        `first` names the object that publishes the prefix. Where a prefix cannot vanish in one step (object stores)
        that object goes first, and whoever publishes it late loses.
        """

    def sweep(self) -> int:
        """Removes what a crash left of discards and of small puts; returns how many things that were.

        Never touches what may still be in the making: a stray file must have been left alone for an hour.
        """


def checked_key(key: str) -> str:
    """`key` itself, or UsageError: no empty, absolute, hidden, dotted or overlong parts."""
    if len(key) > MAX_KEY_CHARACTERS or _KEY.match(key) is None:
        raise UsageError(f"storage key {key[:80]!r} is not allowed; use letters, digits and _ . + = - between slashes")
    return key


def storage_error(error: OSError, what: str, where: str) -> StorageError:
    """The system's error as ours, with what was being done to which key."""
    number = error.errno if error.errno is not None else errno.EIO
    text = f"{what}: {error.strerror or error}"
    if isinstance(error, FileNotFoundError):
        return NotFoundError(number, text, where)
    if isinstance(error, FileExistsError):
        return AlreadyExistsError(number, text, where)
    return StorageError(number, text, where)
