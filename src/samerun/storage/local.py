"""A directory as storage: write aside, fsync, rename, fsync the directory.

`writer` writes `KEY.tmp` and renames it; `put_if_absent` links, so that exactly one of many wins. On file systems
without hard links (some network and FUSE mounts) it falls back to exclusive creation: still one winner, but a crash in
that instant can leave a short object, which its own digest then gives away.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import secrets
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

from samerun.errors import AlreadyExistsError, NotFoundError, SchemaError, StorageError
from samerun.storage.api import Buffer, Found, checked_key, storage_error
from samerun.storage.posix import Files

if TYPE_CHECKING:
    from types import TracebackType

TRASH: Final = "trash"
STRAY_SECONDS: Final = 3600.0
WRITE_BACK_BYTES: Final = 16 * 2**20
"""How much of a file may be written before the system is asked to begin moving it to the disk."""
_SMALL: Final = ("attempts", "tags")
"""Where small objects are put beside others; elsewhere a whole prefix is discarded at once."""
_NO_HARD_LINKS: Final = frozenset({errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK})


class Local:
    """Storage in a local (or mounted) directory. The directory itself is made by the first write."""

    def __init__(self, root: str | Path, *, files: Files | None = None) -> None:
        self._root = str(Path(root))
        self._files = files if files is not None else Files()

    @property
    def where(self) -> str:
        return self._root

    def make_prefix(self, prefix: str) -> None:
        path = self._path(prefix)
        with _told("creating", path):
            parent = str(Path(path).parent)
            self._ensure_directory(parent)
            self._files.make_directory(path)
            self._files.sync_directory(parent)

    def writer(self, key: str) -> _LocalWriter:
        return _LocalWriter(self._files, self._path(key))

    def sync(self, prefix: str) -> None:
        path = self._path(prefix) if prefix else self._root
        with _told("syncing", path):
            self._files.sync_directory(path)

    def put_if_absent(self, key: str, data: bytes) -> None:
        path = self._path(key)
        parent = str(Path(path).parent)
        with _told("creating", path):
            self._ensure_directory(parent)
            with self._aside(path, data) as aside:
                try:
                    self._files.link(aside, path)
                except OSError as error:
                    if error.errno not in _NO_HARD_LINKS:
                        raise
                    self._write_new(path, data)
            self._files.sync_directory(parent)

    def put_if_unchanged(self, key: str, data: bytes, version: str | None, *, durable: bool = True) -> None:
        path = self._path(key)
        parent = str(Path(path).parent)
        with _told("replacing", path):
            self._ensure_directory(parent)
            if version != self._version(key):
                raise AlreadyExistsError(errno.EEXIST, "replacing: another writer changed it first", path)
            with self._aside(path, data, durable=durable) as aside:
                self._files.rename(aside, path)
            if durable:
                self._files.sync_directory(parent)

    def get(self, key: str, *, max_bytes: int) -> Found:
        reader = self.reader(key)
        try:
            if reader.size_bytes > max_bytes:
                raise SchemaError(f"{self._path(key)}: {reader.size_bytes} bytes, at most {max_bytes} are accepted")
            data = bytearray(reader.size_bytes)
            reader.read_into(0, memoryview(data))
        finally:
            reader.close()
        return Found(data=bytes(data), version=hashlib.sha256(data).hexdigest())

    def reader(self, key: str) -> _LocalReader:
        path = self._path(key)
        with _told("opening", path):
            descriptor, size_bytes = self._files.open_regular(path)
        return _LocalReader(self._files, path, descriptor, size_bytes)

    def size_bytes(self, key: str) -> int:
        path = self._path(key)
        with _told("looking at", path):
            return self._files.regular_size(path)

    def sizes(self, prefix: str, wanted: Iterable[str]) -> dict[str, int]:
        found: dict[str, int] = {}
        for name in wanted:
            with contextlib.suppress(NotFoundError):
                found[name] = self.size_bytes(f"{prefix}/{name}" if prefix else name)
        return found

    def names(self, prefix: str) -> list[str]:
        path = self._path(prefix) if prefix else self._root
        with _told("listing", path):
            try:
                return self._files.list_directory(path)
            except FileNotFoundError:
                return []

    def remove(self, key: str) -> None:
        path = self._path(key)
        with _told("removing", path), contextlib.suppress(FileNotFoundError):
            self._files.unlink(path)

    def discard(self, prefix: str, first: str = "") -> None:
        path = self._path(prefix)
        trash = self._path(TRASH)
        aside = f"{trash}/{Path(path).name}.{secrets.token_hex(4)}"
        with _told("discarding", path):
            self._ensure_directory(trash)
            try:
                self._files.rename(path, aside)
            except FileNotFoundError:
                return
            self._files.sync_directory(str(Path(path).parent))
            self._files.sync_directory(trash)
            self._remove_tree(aside)

    def sweep(self) -> int:
        left = [f"{self._path(TRASH)}/{name}" for name in self.names(TRASH)]
        left += [path for prefix in ("", *_SMALL) for path in self._strays(prefix)]
        for path in left:
            with _told("removing", path):
                self._remove_tree(path)
        return len(left)

    def _path(self, key: str) -> str:
        return f"{self._root}/{checked_key(key)}"

    def _strays(self, prefix: str) -> list[str]:
        folder = f"{self._root}/{prefix}" if prefix else self._root
        paths = [f"{folder}/{name}" for name in self.names(prefix) if name.endswith(".tmp")]
        now = time.time()
        with _told("looking at", folder):
            return [path for path in paths if now - self._files.changed_seconds(path) > STRAY_SECONDS]

    def _version(self, key: str) -> str | None:
        try:
            return self.get(key, max_bytes=2**20).version
        except NotFoundError:
            return None

    def _ensure_directory(self, path: str) -> None:
        if self._files.is_directory(path):
            return
        parent = str(Path(path).parent)
        if not Path(parent).is_dir():  # above the root a link is the user's business
            self._ensure_directory(parent)
        try:
            self._files.make_directory(path)
        except FileExistsError:
            if not Path(path).is_dir():
                raise
        self._files.sync_directory(parent)

    @contextmanager
    def _aside(self, path: str, data: bytes, *, durable: bool = True) -> Iterator[str]:
        """A copy of `data` beside `path`, gone afterwards if the body has not renamed it."""
        aside = f"{path}.{secrets.token_hex(4)}.tmp"
        self._write_new(aside, data, durable=durable)
        try:
            yield aside
        finally:
            with contextlib.suppress(FileNotFoundError):
                self._files.unlink(aside)

    def _write_new(self, path: str, data: bytes, *, durable: bool = True) -> None:
        descriptor = self._files.create(path)
        try:
            _write_all(self._files, descriptor, data)
            if durable:
                self._files.fsync(descriptor)
        except OSError:
            with contextlib.suppress(OSError):  # the first failure is the one to tell
                self._files.unlink(path)
            raise
        finally:
            self._files.close(descriptor)

    def _remove_tree(self, path: str) -> None:
        try:
            if self._files.is_directory(path):
                for name in self._files.list_directory(path):
                    self._remove_tree(f"{path}/{name}")
                self._files.remove_directory(path)
            else:
                self._files.unlink(path)
        except FileNotFoundError:
            return  # someone else is emptying the same trash


class _LocalWriter:
    def __init__(self, files: Files, path: str) -> None:
        self._files = files
        self._path = path
        self._aside = f"{path}.tmp"
        self._published = False
        self._num_bytes = 0
        self._num_bytes_started = 0
        with _told("creating", self._aside):
            self._descriptor: int | None = files.create(self._aside)

    def write(self, data: Buffer) -> None:
        assert self._descriptor is not None, "write after publish"
        with _told("writing", self._aside):
            _write_all(self._files, self._descriptor, data)
        self._num_bytes += memoryview(data).nbytes
        waiting = self._num_bytes - self._num_bytes_started
        if waiting >= WRITE_BACK_BYTES:  # the disk works while the next bytes are made, not only once all are there
            self._files.start_write_back(self._descriptor, self._num_bytes_started, waiting)
            self._num_bytes_started = self._num_bytes

    def publish(self) -> None:
        assert self._descriptor is not None, "published twice"
        with _told("writing", self._aside):
            self._files.fsync(self._descriptor)
            descriptor, self._descriptor = self._descriptor, None
            self._files.close(descriptor)
            self._files.rename(self._aside, self._path)
        self._published = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._published:
            return
        with contextlib.suppress(OSError):  # the error that brought us here is the one to tell
            if self._descriptor is not None:
                self._files.close(self._descriptor)
            self._files.unlink(self._aside)


class _LocalReader:
    def __init__(self, files: Files, path: str, descriptor: int, size_bytes: int) -> None:
        self._files = files
        self._path = path
        self._descriptor = descriptor
        self.size_bytes = size_bytes

    def read_into(self, start: int, target: memoryview) -> None:
        done = 0
        with _told("reading", self._path):
            while done < len(target):
                count = self._files.read_into(self._descriptor, target[done:], start + done)
                if count == 0:
                    raise OSError(errno.EIO, f"ends at byte {start + done}, {len(target) - done} more were expected")
                done += count

    def close(self) -> None:
        with _told("closing", self._path):
            self._files.close(self._descriptor)


def _write_all(files: Files, descriptor: int, data: Buffer) -> None:
    rest = memoryview(data).cast("B")
    while rest:
        rest = rest[files.write(descriptor, rest) :]


@contextmanager
def _told(what: str, path: str) -> Iterator[None]:
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        raise storage_error(error, what, path) from error
