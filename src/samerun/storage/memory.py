"""Storage in a dict: for tests, simulations, and as the model that the others are compared with."""

from __future__ import annotations

import errno
import threading
from typing import TYPE_CHECKING, Self

from samerun.errors import AlreadyExistsError, NotFoundError, SchemaError, StorageError
from samerun.storage.api import Buffer, Found, checked_key

if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import TracebackType


class Memory:
    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.prefixes: set[str] = set()
        self._versions: dict[str, int] = {}
        self._lock = threading.Lock()

    def preload(self, key: str, data: bytes) -> None:
        """Puts an object there as if it had always been."""
        with self._lock:
            self._store(checked_key(key), data)

    @property
    def where(self) -> str:
        return "memory"

    def make_prefix(self, prefix: str) -> None:
        with self._lock:
            if checked_key(prefix) in self.prefixes or self._names(prefix):
                raise AlreadyExistsError(errno.EEXIST, "creating: it exists", prefix)
            self.prefixes.add(prefix)

    def writer(self, key: str) -> _MemoryWriter:
        return _MemoryWriter(self, checked_key(key))

    def sync(self, prefix: str) -> None:
        if prefix:
            checked_key(prefix)

    def put_if_absent(self, key: str, data: bytes) -> None:
        with self._lock:
            if checked_key(key) in self.objects:
                raise AlreadyExistsError(errno.EEXIST, "creating: it exists", key)
            self._store(key, data)

    def put_if_unchanged(self, key: str, data: bytes, version: str | None, *, durable: bool = True) -> None:
        with self._lock:
            found = self._versions.get(checked_key(key))
            if version != (None if found is None else str(found)):
                raise AlreadyExistsError(errno.EEXIST, "replacing: another writer changed it first", key)
            self._store(key, data)

    def get(self, key: str, *, max_bytes: int) -> Found:
        with self._lock:
            data = self._found(key)
            if len(data) > max_bytes:
                raise SchemaError(f"{key}: {len(data)} bytes, at most {max_bytes} are accepted")
            return Found(data=data, version=str(self._versions[key]))

    def reader(self, key: str) -> _MemoryReader:
        with self._lock:
            return _MemoryReader(key, self._found(key))

    def size_bytes(self, key: str) -> int:
        with self._lock:
            return len(self._found(key))

    def sizes(self, prefix: str, wanted: Iterable[str]) -> dict[str, int]:
        keys = {name: checked_key(f"{prefix}/{name}" if prefix else name) for name in wanted}
        with self._lock:
            return {name: len(self.objects[key]) for name, key in keys.items() if key in self.objects}

    def names(self, prefix: str) -> list[str]:
        with self._lock:
            return self._names(prefix)

    def remove(self, key: str) -> None:
        with self._lock:
            self.objects.pop(checked_key(key), None)
            self._versions.pop(key, None)

    def discard(self, prefix: str, first: str = "") -> None:
        checked_key(prefix)
        with self._lock:
            for key in [key for key in self.objects if key.startswith(f"{prefix}/")]:
                del self.objects[key]
                del self._versions[key]
            self.prefixes.discard(prefix)

    def sweep(self) -> int:
        return 0

    def _store(self, key: str, data: bytes) -> None:
        self.objects[key] = bytes(data)
        self._versions[key] = self._versions.get(key, 0) + 1

    def _found(self, key: str) -> bytes:
        if checked_key(key) not in self.objects:
            raise NotFoundError(errno.ENOENT, "reading: no such object", key)
        return self.objects[key]

    def _names(self, prefix: str) -> list[str]:
        start = f"{prefix}/" if prefix else ""
        below = (name for name in (*self.objects, *self.prefixes) if name.startswith(start))
        return sorted({name[len(start) :].split("/", 1)[0] for name in below})


class _MemoryWriter:
    def __init__(self, store: Memory, key: str) -> None:
        self._store = store
        self._key = key
        self._data = bytearray()

    def write(self, data: Buffer) -> None:
        self._data += data

    def publish(self) -> None:
        self._store.put_if_absent(self._key, bytes(self._data))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._data.clear()


class _MemoryReader:
    def __init__(self, key: str, data: bytes) -> None:
        self._key = key
        self._data = data
        self.size_bytes = len(data)

    def read_into(self, start: int, target: memoryview) -> None:
        part = self._data[start : start + len(target)]
        if len(part) != len(target):
            raise StorageError(errno.EIO, f"reading: ends before byte {start + len(target)}", self._key)
        target[:] = part

    def close(self) -> None:
        return None
