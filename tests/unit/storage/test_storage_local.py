"""What is special about directories: no hard links, strays of a crash, unreadable roots."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from samerun.errors import AlreadyExistsError, StorageError
from samerun.storage.local import Local
from samerun.storage.posix import Deed, Files, Operation


class NoHardLinks(Files):
    def before(self, operation: Operation) -> None:
        if operation.deed is Deed.LINK:
            raise OSError(errno.EPERM, os.strerror(errno.EPERM))


def test_put_if_absent_works_without_hard_links(tmp_path: Path) -> None:
    storage = Local(tmp_path, files=NoHardLinks())
    storage.put_if_absent("attempts/000001.json", b"1")
    with pytest.raises(AlreadyExistsError):
        storage.put_if_absent("attempts/000001.json", b"2")
    assert storage.get("attempts/000001.json", max_bytes=9).data == b"1"
    assert storage.names("attempts") == ["000001.json"]


def test_sweep_takes_old_strays_and_trash_but_nothing_in_the_making(tmp_path: Path) -> None:
    storage = Local(tmp_path)
    storage.put_if_absent("attempts/000001.json", b"1")
    old, new = tmp_path / "attempts" / "000002.json.1.tmp", tmp_path / "latest.json.2.tmp"
    for path in (old, new):
        path.write_bytes(b"x")
    os.utime(old, (0, 0))
    (tmp_path / "trash" / "u1" / "deeper").mkdir(parents=True)
    (tmp_path / "trash" / "u1" / "deeper" / "file").write_bytes(b"x")
    assert storage.sweep() == 2
    assert not old.exists()
    assert new.exists()
    assert list((tmp_path / "trash").iterdir()) == []


def test_a_file_where_the_run_should_be_is_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / "run").write_bytes(b"")
    with pytest.raises(StorageError, match=r"Not a directory|File exists"):
        Local(tmp_path / "run").put_if_absent("run.json", b"1")


def test_a_link_above_the_root_is_the_users_business(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "runs").symlink_to(tmp_path / "disk")
    Local(tmp_path / "runs" / "a").put_if_absent("run.json", b"1")
    assert (tmp_path / "disk" / "a" / "run.json").read_bytes() == b"1"


def test_errors_name_the_operation_the_path_and_the_systems_reason(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"opening: No such file or directory: .*run\.json") as caught:
        Local(tmp_path).reader("run.json")
    assert caught.value.errno == errno.ENOENT
    assert caught.value.filename == str(tmp_path / "run.json")


def test_short_writes_are_carried_on(tmp_path: Path) -> None:
    class Short(Files):
        def write(self, descriptor: int, data: bytes | bytearray | memoryview) -> int:
            return super().write(descriptor, memoryview(data)[:3])

    storage = Local(tmp_path, files=Short())
    storage.put_if_absent("x", b"0123456789")
    assert storage.get("x", max_bytes=10).data == b"0123456789"


class Hinted(Files):
    def __init__(self) -> None:
        self.started: list[tuple[int, int]] = []

    def start_write_back(self, descriptor: int, start: int, num_bytes: int) -> None:
        self.started.append((start, num_bytes))
        super().start_write_back(descriptor, start, num_bytes)


def test_the_disk_is_asked_to_begin_while_bytes_are_still_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("samerun.storage.local.WRITE_BACK_BYTES", 8)
    (tmp_path / "p").mkdir()
    files, words = Hinted(), [b"abc", b"defgh", b"ijklmnopq", b"rs"]
    with Local(tmp_path, files=files).writer("p/x") as writer:
        for word in words:
            writer.write(word)
        assert files.started == [(0, 8), (8, 9)]
        writer.publish()
    assert (tmp_path / "p" / "x").read_bytes() == b"".join(words)


def test_a_file_system_that_takes_no_hints_is_written_to_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ESPIPE, os.strerror(errno.ESPIPE))

    monkeypatch.setattr("samerun.storage.posix.os.posix_fadvise", refuse)
    monkeypatch.setattr("samerun.storage.local.WRITE_BACK_BYTES", 1)
    (tmp_path / "p").mkdir()
    with Local(tmp_path).writer("p/x") as writer:
        writer.write(b"abc")
        writer.publish()
    assert (tmp_path / "p" / "x").read_bytes() == b"abc"
