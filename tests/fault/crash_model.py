"""What a POSIX file system may hold after the power is lost at any moment of a recorded sequence of operations.

Names: an operation on a directory (create, rename, link, unlink, mkdir, rmdir) is durable once that directory was
synced after it; until then it may be there or not, independently of all others (a rename across directories touches
two). Bytes: what was written before the file's fsync is durable; later writes may be lost, cut, or there as zeros.
A directory's own name is durable when its parent was synced.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from samerun.storage.memory import Memory
from samerun.storage.posix import Deed, Operation


@dataclass
class Inode:
    """A file or directory: what is durable, and what is only in memory."""

    is_directory: bool = False
    synced: bytes = b""
    data: bytes = b""
    names: dict[str, Inode] = field(default_factory=dict)


@dataclass(eq=False)
class Change:
    """One atomic change of one directory's names: removals, then additions."""

    directory: Inode
    removed: tuple[str, ...]
    added: tuple[tuple[str, Inode], ...]


class Disk:
    """Replays operations; knows what is certain and what is open at this moment."""

    def __init__(self, run: str) -> None:
        self._base = PurePosixPath(run).parent
        self._run = PurePosixPath(run).name
        self.root = Inode(is_directory=True)
        self.durable: dict[int, dict[str, Inode]] = {}
        self.pending: list[Change] = []
        self.files: list[Inode] = []

    def apply(self, operation: Operation) -> None:
        match operation.deed:
            case Deed.MAKE_DIRECTORY:
                self._add(operation.path, Inode(is_directory=True), replace=False)
            case Deed.CREATE:
                inode = Inode()
                self.files.append(inode)
                self._add(operation.path, inode, replace=False)
            case Deed.WRITE:
                self._at(operation.path).data += operation.data
            case Deed.FSYNC:
                inode = self._at(operation.path)
                inode.synced = inode.data
            case Deed.RENAME:
                self._rename(operation.path, operation.target)
            case Deed.LINK:
                self._add(operation.target, self._at(operation.path), replace=False)
            case Deed.UNLINK | Deed.REMOVE_DIRECTORY:
                self._remove(operation.path)
            case Deed.SYNC_DIRECTORY:
                self._sync(operation.path)

    def open_files(self) -> list[Inode]:
        return [inode for inode in self.files if inode.synced != inode.data]

    def states(self, *, limit: int, seed: int) -> Iterator[Memory]:
        """Every state that a crash now may leave, or `limit` of them drawn with `seed` when there are more."""
        open_files = self.open_files()
        choices: list[Sequence[object]] = [(False, True)] * len(self.pending)
        choices += [tuple(_losses(inode)) for inode in open_files]
        total = 1
        for choice in choices:
            total *= len(choice)
        if total <= limit:
            picks: Iterator[tuple[object, ...]] = itertools.product(*choices)
        else:
            draw = random.Random(seed)
            extremes = [tuple(c[0] for c in choices), tuple(c[-1] for c in choices)]
            drawn = [tuple(draw.choice(c) for c in choices) for _ in range(limit - len(extremes))]
            picks = iter(extremes + drawn)
        for pick in picks:
            kept = [change for change, stays in zip(self.pending, pick, strict=False) if stays]
            contents = dict(zip(map(id, open_files), pick[len(self.pending) :], strict=True))
            yield self._memory(kept, contents)

    def _memory(self, kept: list[Change], contents: dict[int, object]) -> Memory:
        names = {key: dict(value) for key, value in self.durable.items()}
        for change in kept:
            here = names.setdefault(id(change.directory), {})
            for name in change.removed:
                here.pop(name, None)
            here.update(change.added)
        memory = Memory()
        run = names.get(id(self.root), {}).get(self._run)
        stack = [("", run)] if run is not None else []
        while stack:
            prefix, directory = stack.pop()
            for name, inode in names.get(id(directory), {}).items():
                key = f"{prefix}{name}"
                if inode.is_directory:
                    memory.prefixes.add(key)
                    stack.append((f"{key}/", inode))
                else:
                    data = contents.get(id(inode), inode.synced)
                    assert isinstance(data, bytes)
                    memory.preload(key, data)
        return memory

    def _split(self, path: str) -> tuple[Inode, str]:
        parts = PurePosixPath(path).relative_to(self._base).parts
        directory = self.root
        for part in parts[:-1]:
            directory = directory.names[part]
        return directory, parts[-1]

    def _at(self, path: str) -> Inode:
        if PurePosixPath(path) == self._base:
            return self.root
        directory, name = self._split(path)
        return directory.names[name]

    def _add(self, path: str, inode: Inode, *, replace: bool) -> None:
        directory, name = self._split(path)
        if name in directory.names and not replace:
            return  # the operation failed with EEXIST when it was recorded
        directory.names[name] = inode
        self.pending.append(Change(directory, (), ((name, inode),)))

    def _remove(self, path: str) -> None:
        directory, name = self._split(path)
        if name in directory.names:
            del directory.names[name]
            self.pending.append(Change(directory, (name,), ()))

    def _rename(self, source: str, target: str) -> None:
        here, old = self._split(source)
        there, new = self._split(target)
        if old not in here.names:
            return  # failed with ENOENT when it was recorded
        inode = here.names.pop(old)
        there.names[new] = inode
        if here is there:
            self.pending.append(Change(here, (old,), ((new, inode),)))
        else:
            self.pending.append(Change(there, (), ((new, inode),)))
            self.pending.append(Change(here, (old,), ()))

    def _sync(self, path: str) -> None:
        directory = self._at(path)
        self.durable[id(directory)] = dict(directory.names)
        self.pending = [change for change in self.pending if change.directory is not directory]


def _losses(inode: Inode) -> Iterator[bytes]:
    """What a file with unsynced writes may hold: the old, a cut, zeros where data should be, everything."""
    written = inode.data[len(inode.synced) :]
    yield inode.synced
    yield inode.synced + written[: len(written) // 2]
    yield inode.synced + bytes(len(written))
    yield inode.data
