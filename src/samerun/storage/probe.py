"""What a storage really guarantees, found out by trying: each guarantee that samerun leans on, one by one.

A probe shows what the storage does now, for one client. It cannot show what a power cut does to a disk that lies about
fsync, nor what a second machine sees: probe from there too.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from samerun.errors import AlreadyExistsError, NotFoundError, SamerunError, StorageError
from samerun.storage.local import Local
from samerun.storage.opening import is_url, open_storage
from samerun.storage.posix import Files

if TYPE_CHECKING:
    from samerun.storage.api import Storage

_NUM_COMPETITORS: Final = 4
_MAX_SKEW_SECONDS: Final = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Guarantee:
    """One thing that was tried. `needed`: samerun does not keep its promises without it."""

    name: str
    needed: bool
    held: bool
    detail: str


class _BrokenError(Exception):
    """The storage answered, and the answer breaks the guarantee."""


def probe_path(path: str) -> list[Guarantee]:
    """Tries everything in a folder (prefix) of its own below `path`, or below the nearest folder that exists.

    Leaves nothing behind. A path that cannot be written is an answer, not an error; UsageError for one that makes no
    sense.
    """
    with _own_place(path) as (storage, folder):
        found = [] if folder is None else probe_files(Files(), folder)
        return found + probe_storage(storage)


def probe_storage(storage: Storage) -> list[Guarantee]:
    """The guarantees that every storage gives. The storage must be empty and this probe's alone."""
    return [
        _tried("exclusive create", True, lambda: _exclusive_create(storage)),
        _tried("one winner of many", True, lambda: _one_winner(storage)),
        _tried("fresh prefix", True, lambda: _fresh_prefix(storage)),
        _tried("whole or absent", True, lambda: _whole_or_absent(storage)),
        _tried("listing after write", True, lambda: _listing(storage)),
        _tried("ranged read", True, lambda: _ranged_read(storage)),
        _tried("removal", True, lambda: _removal(storage)),
        _tried("conditional replace", False, lambda: _conditional_replace(storage)),
    ]


def probe_files(files: Files, folder: str) -> list[Guarantee]:
    """What a directory must be able to do for the guarantees above to survive a crash."""
    return [
        _tried("fsync of a file", True, lambda: _fsync(files, folder)),
        _tried("rename", True, lambda: _rename(files, folder)),
        _tried("fsync of a directory", True, lambda: _fsync_directory(files, folder)),
        _tried("hard links", False, lambda: _hard_links(files, folder)),
        _tried("its clock and ours", False, lambda: _clock(files, folder)),
    ]


def _tried(name: str, needed: bool, attempt: Callable[[], str]) -> Guarantee:
    try:
        return Guarantee(name=name, needed=needed, held=True, detail=attempt())
    except (_BrokenError, SamerunError, OSError) as error:
        return Guarantee(name=name, needed=needed, held=False, detail=str(error))


@contextmanager
def _own_place(path: str) -> Iterator[tuple[Storage, str | None]]:
    name = f"samerun-doctor-{secrets.token_hex(4)}"
    if is_url(path):
        storage = open_storage(f"{path.rstrip('/')}/{name}")
        try:
            yield storage, None
        finally:
            _clear(storage)
        return
    parent = Path(path).absolute()
    while not parent.is_dir():
        parent = parent.parent
    folder = parent / name
    try:
        folder.mkdir(exist_ok=True)
        yield Local(folder), str(folder)
    except PermissionError:
        yield Local(folder), str(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _clear(storage: Storage) -> None:
    try:
        for name in storage.names(""):
            storage.remove(name)
            storage.discard(name)
    except StorageError:
        return  # what could not be written needs no clearing; what could, lies under a name of its own


def _exclusive_create(storage: Storage) -> str:
    storage.put_if_absent("created", b"1")
    try:
        storage.put_if_absent("created", b"1")
    except AlreadyExistsError:
        return "a second create is refused"
    raise _BrokenError("accepted a second create: two attempts could both own the run")


def _one_winner(storage: Storage) -> str:
    won: list[int] = []
    failed: list[SamerunError] = []

    def compete(number: int) -> None:
        try:
            storage.put_if_absent("contested", b"%d" % number)
            won.append(number)
        except AlreadyExistsError:
            pass
        except SamerunError as error:
            failed.append(error)

    threads = [threading.Thread(target=compete, args=(number,)) for number in range(_NUM_COMPETITORS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
    if len(won) != 1 or storage.get("contested", max_bytes=9).data != b"%d" % won[0]:
        raise _BrokenError(f"{len(won)} of {_NUM_COMPETITORS} competing creates were told that they won")
    return f"{_NUM_COMPETITORS} competing creates, one winner"


def _fresh_prefix(storage: Storage) -> str:
    storage.make_prefix("fresh")
    try:
        storage.make_prefix("fresh")
    except AlreadyExistsError:
        return "a name that exists is refused"
    raise _BrokenError("made the same prefix twice: two saves could write into each other")


def _whole_or_absent(storage: Storage) -> str:
    storage.make_prefix("whole")
    data = secrets.token_bytes(2**16)
    with storage.writer("whole/x") as writer:
        writer.write(data)
        if "x" in storage.names("whole"):
            raise _BrokenError("an object was visible before it was published")
        writer.publish()
    storage.sync("whole")
    if storage.get("whole/x", max_bytes=len(data)).data != data:
        raise _BrokenError("other bytes came back than were written")
    with storage.writer("whole/y") as writer:
        writer.write(data)
    if storage.names("whole") != ["x"]:
        raise _BrokenError("an object that was given up is visible")
    return "nothing shows before it is published"


def _listing(storage: Storage) -> str:
    wanted = [f"n{number}" for number in range(8)]
    for name in wanted:
        storage.put_if_absent(f"listed/{name}", b"1")
    if storage.names("listed") != wanted:
        raise _BrokenError(f"of {len(wanted)} new objects {len(storage.names('listed'))} were listed")
    return "new objects are listed at once"


def _ranged_read(storage: Storage) -> str:
    storage.put_if_absent("ranged", b"0123456789")
    reader, target = storage.reader("ranged"), bytearray(3)
    try:
        reader.read_into(4, memoryview(target))
    finally:
        reader.close()
    if bytes(target) != b"456":
        raise _BrokenError(f"bytes 4 to 7 of 0123456789 came back as {bytes(target)!r}")
    return "the bytes that were asked for"


def _removal(storage: Storage) -> str:
    storage.make_prefix("removed")
    with storage.writer("removed/x") as writer:
        writer.write(b"1")
        writer.publish()
    storage.discard("removed", "x")
    if "removed" in storage.names(""):
        try:
            storage.size_bytes("removed/x")
        except NotFoundError:
            return "what is discarded is gone at once"
        raise _BrokenError("what was discarded is still there")
    return "what is discarded is gone at once"


def _conditional_replace(storage: Storage) -> str:
    storage.put_if_unchanged("pointer", b"1", None)
    version = storage.get("pointer", max_bytes=9).version
    storage.put_if_unchanged("pointer", b"2", version)
    try:
        storage.put_if_unchanged("pointer", b"3", version)
    except AlreadyExistsError:
        return "a replace of an old version is refused"
    raise _BrokenError("an old version was replaced: pointers may move back (they are only hints)")


def _new_file(files: Files, path: str) -> int:
    descriptor = files.create(path)
    files.write(descriptor, b"1")
    return descriptor


def _fsync(files: Files, folder: str) -> str:
    descriptor = _new_file(files, f"{folder}/fsync")
    began = time.monotonic()
    try:
        files.fsync(descriptor)
    finally:
        files.close(descriptor)
    return f"{(time.monotonic() - began) * 1000:.1f} ms"


def _rename(files: Files, folder: str) -> str:
    for name in ("old", "new"):
        files.close(_new_file(files, f"{folder}/{name}"))
    files.rename(f"{folder}/new", f"{folder}/old")
    if "new" in files.list_directory(folder):
        raise _BrokenError("the old name is still there after a rename")
    return "replaces its target in one step"


def _fsync_directory(files: Files, folder: str) -> str:
    began = time.monotonic()
    files.sync_directory(folder)
    return f"{(time.monotonic() - began) * 1000:.1f} ms"


def _hard_links(files: Files, folder: str) -> str:
    files.close(_new_file(files, f"{folder}/linked"))
    files.link(f"{folder}/linked", f"{folder}/link")
    try:
        files.link(f"{folder}/linked", f"{folder}/link")
    except FileExistsError:
        return "exclusive creation is by link: whole or absent, also in a crash"
    raise _BrokenError(os.strerror(errno.EEXIST) + " was expected: a second link of one name was made")


def _clock(files: Files, folder: str) -> str:
    files.close(_new_file(files, f"{folder}/clock"))
    skew = files.changed_seconds(f"{folder}/clock") - time.time()
    if abs(skew) > _MAX_SKEW_SECONDS:
        raise _BrokenError(f"{skew:+.0f} s apart: leftovers are swept by age, and judged wrongly")
    return f"{abs(skew):.1f} s apart"
