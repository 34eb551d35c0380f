"""Every file operation of samerun, one method each, so that they can be recorded, counted and made to fail.

Each tells `before` what it is about to do; the subclasses in `faulty` listen there. What an operation makes durable,
and what it does not, follows POSIX: `fsync` the bytes of a file, `sync_directory` the names in a directory; nothing
else promises anything.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import sys
import time
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from samerun.storage.api import Buffer


class Deed(Enum):
    MAKE_DIRECTORY = "make directory"
    CREATE = "create"
    WRITE = "write"
    FSYNC = "fsync"
    CLOSE = "close"
    RENAME = "rename"
    LINK = "link"
    UNLINK = "unlink"
    REMOVE_DIRECTORY = "remove directory"
    SYNC_DIRECTORY = "sync directory"
    OPEN = "open"
    LOOK = "look"
    READ = "read"
    LIST = "list"


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One operation on `path` (or on what `descriptor` stands for), with its second path or its bytes."""

    deed: Deed
    path: str = ""
    descriptor: int = -1
    target: str = ""
    data: bytes = b""


class Files:
    def before(self, operation: Operation) -> None:
        """Called before every operation; may raise OSError instead of it."""

    wants_data = False
    """Whether `before` is given the bytes of a write: only where they are recorded."""

    def make_directory(self, path: str) -> None:
        self.before(Operation(deed=Deed.MAKE_DIRECTORY, path=path))
        Path(path).mkdir()

    def create(self, path: str) -> int:
        """A new file opened for writing; it must not exist."""
        self.before(Operation(deed=Deed.CREATE, path=path))
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)

    def write(self, descriptor: int, data: Buffer) -> int:
        """Writes some of `data` and returns how many bytes, as the system call does."""
        copy = bytes(data) if self.wants_data else b""
        self.before(Operation(deed=Deed.WRITE, descriptor=descriptor, data=copy))
        return os.write(descriptor, data)

    def start_write_back(self, descriptor: int, start: int, num_bytes: int) -> None:
        """Asks the system to begin writing these bytes to the disk now, so that a later fsync finds little left.

        A hint: it promises nothing, is not awaited, is no operation that can fail (`before` is not told of it), and
        does nothing where the system lacks it. On Linux POSIX_FADV_DONTNEED starts the write-back of dirty pages; only
        pages that are clean already leave the cache. Source: mm/fadvise.c.
        """
        if sys.platform == "linux":
            with contextlib.suppress(OSError):
                os.posix_fadvise(descriptor, start, num_bytes, os.POSIX_FADV_DONTNEED)

    def fsync(self, descriptor: int) -> None:
        self.before(Operation(deed=Deed.FSYNC, descriptor=descriptor))
        os.fsync(descriptor)

    def close(self, descriptor: int) -> None:
        """Closes even when it raises, as the system does: the descriptor is gone either way."""
        try:
            self.before(Operation(deed=Deed.CLOSE, descriptor=descriptor))
        finally:
            os.close(descriptor)

    def rename(self, source: str, target: str) -> None:
        self.before(Operation(deed=Deed.RENAME, path=source, target=target))
        Path(source).rename(target)

    def link(self, source: str, target: str) -> None:
        self.before(Operation(deed=Deed.LINK, path=source, target=target))
        os.link(source, target, follow_symlinks=False)

    def unlink(self, path: str) -> None:
        self.before(Operation(deed=Deed.UNLINK, path=path))
        Path(path).unlink()

    def remove_directory(self, path: str) -> None:
        self.before(Operation(deed=Deed.REMOVE_DIRECTORY, path=path))
        Path(path).rmdir()

    def sync_directory(self, path: str) -> None:
        self.before(Operation(deed=Deed.SYNC_DIRECTORY, path=path))
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def open_regular(self, path: str) -> tuple[int, int]:
        """Opens a regular file for reading: (descriptor, size). Links, pipes and devices are refused unread."""
        self.before(Operation(deed=Deed.OPEN, path=path))
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            os.close(descriptor)
            raise OSError(errno.EINVAL, "not a regular file", path)
        return descriptor, found.st_size

    def regular_size(self, path: str) -> int:
        self.before(Operation(deed=Deed.LOOK, path=path))
        found = os.lstat(path)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", path)
        return found.st_size

    def changed_seconds(self, path: str) -> float:
        """When the file was last written, in seconds since the epoch; now when it is gone."""
        self.before(Operation(deed=Deed.LOOK, path=path))
        try:
            return os.lstat(path).st_mtime
        except FileNotFoundError:
            return time.time()

    def read_into(self, descriptor: int, target: memoryview, start: int) -> int:
        self.before(Operation(deed=Deed.READ, descriptor=descriptor))
        return os.preadv(descriptor, [target], start)

    def list_directory(self, path: str) -> list[str]:
        self.before(Operation(deed=Deed.LIST, path=path))
        return sorted(os.listdir(path))  # noqa: PTH208  # names are wanted, not paths

    def is_directory(self, path: str) -> bool:
        """Whether a directory itself (not a link to one) is there."""
        self.before(Operation(deed=Deed.LOOK, path=path))
        try:
            return stat.S_ISDIR(os.lstat(path).st_mode)
        except FileNotFoundError:
            return False
