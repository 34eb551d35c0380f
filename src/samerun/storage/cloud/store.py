"""An object store (S3, GCS, Azure Blob and what speaks like them) as storage, through obstore.

No rename is assumed. What carries the guarantees instead:

- **put if absent** (`If-None-Match: *`, or a generation of zero) decides who made a prefix, who owns an attempt and,
  with the manifest, what was published. A store that accepts a second create is found out by a probe before the first
  conditional write, and refused;
- **marks**: each write carries a random word as the object's metadata. An answer that was lost, or a "it exists" that a
  retried request earned by its own first try, is resolved by reading the word back: one's own write is a success;
- **tombstones**: a prefix is discarded by overwriting the object that publishes it (`first`) with a tombstone, which
  unpublishes it in one step, and then removing the rest. The tombstone stays for a day, so a late writer of that
  object loses its put-if-absent instead of bringing half a checkpoint back.

Each listing, read and write of S3, GCS and Azure Blob is strongly consistent (each vendor's documentation says so), so
`sync` has nothing to do. Credentials, endpoints and proxies are obstore's: it reads the vendors' own variables.
"""

from __future__ import annotations

import contextlib
import errno
import json
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

from obstore import exceptions

from samerun.errors import AlreadyExistsError, NotFoundError, SchemaError, StorageError, UsageError
from samerun.storage.api import Found, checked_key
from samerun.storage.cloud.requests import Listed, Requests
from samerun.storage.cloud.upload import SINGLE_REQUEST_BYTES, ObjectWriter

TOMBSTONE: Final = b"samerun discarded this prefix; whoever publishes here is late, and must not.\n"
TOMBSTONE_SECONDS: Final = 24 * 3600.0
"""Longer than any request can be under way; by the store's clock against ours, so generous."""
_OWNER: Final = ".owner"
_PROBES: Final = ".probes"
_DEEP: Final = ("checkpoints",)
"""Prefixes whose sub-prefixes are discarded as a whole."""
_DEFINITE: Final = (
    exceptions.PermissionDeniedError,
    exceptions.UnauthenticatedError,
    exceptions.NotSupportedError,
    FileNotFoundError,
)
_NUMBERS: Final = {
    exceptions.PermissionDeniedError: errno.EACCES,
    exceptions.UnauthenticatedError: errno.EACCES,
    exceptions.NotSupportedError: errno.ENOTSUP,
}


class _Whose(Enum):
    MINE = "mine"
    OTHER = "other"
    ABSENT = "absent"


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How often a write whose outcome is unknown is tried. Below this, obstore repeats single requests by itself."""

    max_tries: int = 3
    first_wait_seconds: float = 0.2


class Cloud:
    """Storage in a bucket (container) under a prefix. `url` is how a person would write it.

    Raises UsageError at the first conditional write to a store that accepts a second create: two attempts could then
    both believe that they own the run.
    """

    def __init__(
        self,
        requests: Requests,
        *,
        url: str,
        patience: Patience | None = None,
        single_request_bytes: int = SINGLE_REQUEST_BYTES,
        wait: Callable[[float], None] = time.sleep,
    ) -> None:
        self._requests = requests
        self._url = url.rstrip("/")
        self._patience = patience or Patience()
        self._single_request_bytes = single_request_bytes
        self._wait = wait
        self._proven = False
        self._lock = threading.Lock()

    @property
    def where(self) -> str:
        return self._url

    def make_prefix(self, prefix: str) -> None:
        self._create(f"{checked_key(prefix)}/{_OWNER}", b"")

    def writer(self, key: str) -> ObjectWriter:
        """One conditional request up to 16 MiB; above, a multipart upload, which has no condition: its key is fresh
        because its prefix belongs to this writer."""
        checked_key(key)

        def send(parts: Iterator[bytes], mark: str) -> None:
            with self._told("uploading", key):
                self._requests.upload(key, parts, mark)

        def settle(error: Exception, mark: str) -> None:
            if self._whose(key, mark) is not _Whose.MINE:
                raise error

        single_bytes = self._single_request_bytes
        return ObjectWriter(
            put=lambda data: self._create(key, data), send=send, settle=settle, single_bytes=single_bytes
        )

    def sync(self, prefix: str) -> None:
        if prefix:
            checked_key(prefix)

    def put_if_absent(self, key: str, data: bytes) -> None:
        self._create(checked_key(key), bytes(data))

    def put_if_unchanged(self, key: str, data: bytes, version: str | None, *, durable: bool = True) -> None:
        if version is None:
            self._create(checked_key(key), bytes(data))
            return
        known = _version_from(version, checked_key(key))
        self._settled(key, "replacing", lambda mark: self._requests.replace(key, bytes(data), mark, known))

    def get(self, key: str, *, max_bytes: int) -> Found:
        with self._told("reading", checked_key(key)):
            held = self._requests.read(key, max_bytes=max(max_bytes, len(TOMBSTONE)))
        if held.data == TOMBSTONE:
            raise NotFoundError(errno.ENOENT, "reading: it was discarded", self._at(key))
        if held.data is None or len(held.data) > max_bytes:
            raise SchemaError(f"{self._at(key)}: {held.size_bytes} bytes, at most {max_bytes} are accepted")
        if len(held.data) != held.size_bytes:
            raise StorageError(errno.EIO, f"reading: {len(held.data)} of {held.size_bytes} bytes came", self._at(key))
        return Found(data=held.data, version=json.dumps(held.version, sort_keys=True))

    def reader(self, key: str) -> ObjectReader:
        return ObjectReader(self, key, self.size_bytes(key))

    def read_range(self, key: str, start: int, target: memoryview) -> None:
        """Fills `target` from byte `start`; StorageError when fewer bytes come."""
        if not len(target):
            return
        with self._told("reading", key):
            data = self._requests.read_range(key, start, len(target))
        if len(data) != len(target):
            raise StorageError(errno.EIO, f"reading: ends at byte {start + len(data)}", self._at(key))
        target[:] = data

    def size_bytes(self, key: str) -> int:
        with self._told("looking at", checked_key(key)):
            size_bytes = self._requests.look(key).size_bytes
        if size_bytes == len(TOMBSTONE) and self._is_tombstone(key):
            raise NotFoundError(errno.ENOENT, "looking at: it was discarded", self._at(key))
        return size_bytes

    def sizes(self, prefix: str, wanted: Iterable[str]) -> dict[str, int]:
        keys = {checked_key(f"{prefix}/{name}" if prefix else name): name for name in wanted}
        with self._told("listing", prefix):
            found = [item for item in self._requests.list_all(prefix) if item.key in keys]
        dead = {item.key for item in found if item.size_bytes == len(TOMBSTONE) and self._is_tombstone(item.key)}
        return {keys[item.key]: item.size_bytes for item in found if item.key not in dead}

    def names(self, prefix: str) -> list[str]:
        start = f"{checked_key(prefix)}/" if prefix else ""
        with self._told("listing", prefix):
            if not prefix:
                found = self._requests.list_level("")
                return sorted({name.rstrip("/") for name in found if not name.startswith(".")})
            below: dict[str, list[Listed]] = {}
            for item in self._requests.list_all(prefix):
                below.setdefault(item.key.removeprefix(start).partition("/")[0], []).append(item)
        return sorted(
            name for name, items in below.items() if not name.startswith(".") and not self._is_grave(items, start)
        )

    def _is_grave(self, items: list[Listed], start: str) -> bool:
        """A tombstone itself, or a prefix that holds nothing else: one that is owned holds two objects at least."""
        if len(items) != 1 or items[0].size_bytes != len(TOMBSTONE):
            return False
        key = items[0].key
        return "/" in key.removeprefix(start) or self._is_tombstone(key)

    def _is_tombstone(self, key: str) -> bool:
        try:
            self.get(key, max_bytes=len(TOMBSTONE))
        except NotFoundError:
            return True
        return False

    def remove(self, key: str) -> None:
        self._delete([checked_key(key)])

    def discard(self, prefix: str, first: str = "") -> None:
        if first:
            key = checked_key(f"{prefix}/{first}")
            with self._told("discarding", key):
                self._requests.overwrite(key, TOMBSTONE)
        with self._told("discarding", checked_key(prefix)):
            found = [item.key for item in self._requests.list_all(prefix)]
        self._delete([key for key in found if not first or key != f"{prefix}/{first}"])

    def sweep(self) -> int:
        with self._told("listing", ""):
            probes = self._requests.list_all(_PROBES)
            deep = [item for prefix in _DEEP for item in self._requests.list_all(prefix)]
        count = Counter(_folder(item.key) for item in deep)
        graves = [item for item in deep if item.size_bytes == len(TOMBSTONE) and count[_folder(item.key)] == 1]
        now = time.time()
        old = [item.key for item in (*probes, *graves) if now - item.modified.timestamp() > TOMBSTONE_SECONDS]
        self._delete(old)
        return len(old)

    def _create(self, key: str, data: bytes) -> None:
        self._prove()
        self._settled(key, "creating", lambda mark: self._requests.create(key, data, mark))

    def _settled(self, key: str, what: str, send: Callable[[str], None]) -> None:
        """Sends a conditional write until it is known to have happened, or known not to."""
        mark = secrets.token_hex(16)
        wait_seconds = self._patience.first_wait_seconds
        for number in range(1, self._patience.max_tries + 1):
            try:
                send(mark)
                return
            except _DEFINITE as error:
                raise self._error(error, what, key) from error
            except (exceptions.BaseError, OSError, ValueError) as error:
                whose = self._whose(key, mark)
                if whose is _Whose.MINE:
                    return
                if _is_lost(error, whose):
                    raise AlreadyExistsError(
                        errno.EEXIST, f"{what}: another writer was first", self._at(key)
                    ) from error
                if number == self._patience.max_tries:
                    unknown = "unknown whether it was written" if whose is None else "not written"
                    raise self._error(error, f"{what}: {unknown} after {number} tries", key) from error
            self._wait(wait_seconds)
            wait_seconds *= 2

    def _whose(self, key: str, mark: str) -> _Whose | None:
        """Whose write the object at `key` is; None when the store cannot be asked."""
        try:
            found = self._requests.look(key)
        except FileNotFoundError:
            return _Whose.ABSENT
        except (exceptions.BaseError, OSError, ValueError):
            return None
        return _Whose.MINE if found.mark == mark else _Whose.OTHER

    def _prove(self) -> None:
        """Once: a second create of the same key must be refused, or nothing here is safe."""
        with self._lock:
            if self._proven:
                return
            key = f"{_PROBES}/{secrets.token_hex(8)}"
            with self._told("probing", key):
                try:
                    self._requests.create(key, b"", secrets.token_hex(16))
                except exceptions.AlreadyExistsError:
                    pass  # repeated below us, after its first answer was lost: it is there, and that is all we need
                except exceptions.NotSupportedError as error:
                    raise self._unsafe("knows no conditional create") from error
                try:
                    self._requests.create(key, b"", secrets.token_hex(16))
                except exceptions.AlreadyExistsError:
                    self._proven = True
            with contextlib.suppress(StorageError):  # a probe that stays behind is swept a day later
                self._delete([key])
            if not self._proven:
                raise self._unsafe("accepted a second create of the same key")

    def _unsafe(self, fault: str) -> UsageError:
        return UsageError(
            f"{self._url}: this store {fault} (If-None-Match: *), so two attempts could both own the run; use a store "
            f"that refuses it (S3, GCS, Azure Blob and newer MinIO do), or a local path. `samerun doctor {self._url}` "
            f"shows what a store guarantees"
        )

    def _delete(self, keys: list[str]) -> None:
        """Some stores end a bulk request at the first key that is gone already: then one by one."""
        if not keys:
            return
        with self._told("removing", keys[0]):
            try:
                self._requests.delete(keys)
            except FileNotFoundError:
                for key in keys:
                    with contextlib.suppress(FileNotFoundError):
                        self._requests.delete([key])

    def _at(self, key: str) -> str:
        return f"{self._url}/{key}" if key else self._url

    def _error(self, error: Exception, what: str, key: str) -> StorageError:
        text = f"{what}: {str(error).partition(chr(10))[0]}"
        if isinstance(error, FileNotFoundError):
            return NotFoundError(errno.ENOENT, text, self._at(key))
        number = next((number for kind, number in _NUMBERS.items() if isinstance(error, kind)), errno.EIO)
        return StorageError(number, text, self._at(key))

    @contextmanager
    def _told(self, what: str, key: str) -> Iterator[None]:
        try:
            yield
        except StorageError:
            raise
        except (exceptions.BaseError, FileNotFoundError, OSError) as error:
            raise self._error(error, what, key) from error


class ObjectReader:
    def __init__(self, store: Cloud, key: str, size_bytes: int) -> None:
        self._store = store
        self._key = key
        self.size_bytes = size_bytes

    def read_into(self, start: int, target: memoryview) -> None:
        if start + len(target) > self.size_bytes:
            where = f"{self._store.where}/{self._key}"
            raise StorageError(errno.EIO, f"reading: ends at byte {self.size_bytes}", where)
        self._store.read_range(self._key, start, target)

    def close(self) -> None:
        """Nothing is held open: each range is a request of its own."""


def _is_lost(error: Exception, whose: _Whose | None) -> bool:
    """A create that was refused while nothing is there (a competitor's request that failed) is worth another try."""
    if isinstance(error, exceptions.PreconditionError):
        return whose in (_Whose.OTHER, _Whose.ABSENT)
    return isinstance(error, exceptions.AlreadyExistsError) and whose is _Whose.OTHER


def _folder(key: str) -> str:
    return key.rpartition("/")[0]


def _version_from(text: str, key: str) -> Mapping[str, str]:
    try:
        value: Any = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise UsageError(f"{key}: {text[:80]!r} is no version that `get` returned")
    return value
