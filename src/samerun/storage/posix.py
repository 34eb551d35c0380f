"""Every file operation of samerun, one method each, so that they can be recorded, counted and made to fail.

The subclasses in `faulty` override exactly these. What each makes durable, and what it does not, follows POSIX:
`fsync(fd)` the bytes of a file, `sync_directory` the names in a directory; nothing else promises anything.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from samerun.storage.api import Buffer


class Files:
    def make_directory(self, path: str) -> None:
        Path(path).mkdir()

    def create(self, path: str) -> int:
        """A new file opened for writing; it must not exist."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)

    def write(self, descriptor: int, data: Buffer) -> int:
        """Writes some of `data` and returns how many bytes, as the system call does."""
        return os.write(descriptor, data)

    def fsync(self, descriptor: int) -> None:
        os.fsync(descriptor)

    def close(self, descriptor: int) -> None:
        os.close(descriptor)

    def rename(self, source: str, target: str) -> None:
        Path(source).rename(target)

    def link(self, source: str, target: str) -> None:
        os.link(source, target, follow_symlinks=False)

    def unlink(self, path: str) -> None:
        Path(path).unlink()

    def remove_directory(self, path: str) -> None:
        Path(path).rmdir()

    def sync_directory(self, path: str) -> None:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def open_regular(self, path: str) -> tuple[int, int]:
        """Opens a regular file for reading: (descriptor, size). Links, pipes and devices are refused unread."""
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            os.close(descriptor)
            raise OSError(errno.EINVAL, "not a regular file", path)
        return descriptor, found.st_size

    def regular_size(self, path: str) -> int:
        found = os.lstat(path)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", path)
        return found.st_size

    def read_into(self, descriptor: int, target: memoryview, start: int) -> int:
        return os.preadv(descriptor, [target], start)

    def list_directory(self, path: str) -> list[str]:
        return sorted(os.listdir(path))  # noqa: PTH208  # names are wanted, not paths

    def is_directory(self, path: str) -> bool:
        """Whether a directory itself (not a link to one) is there."""
        try:
            return stat.S_ISDIR(os.lstat(path).st_mode)
        except FileNotFoundError:
            return False
