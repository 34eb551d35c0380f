from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

from samerun.health.records.event import header_line, read_records
from samerun.health.records.writer import RecordWriter
from unit.health.health_records import record

HEAD = header_line(rank=0, attempt=1, facts={})


def test_lines_arrive_in_order_behind_one_head(tmp_path: Path) -> None:
    path = tmp_path / "new" / "rank-00000.jsonl"
    for first in (0, 500):  # a second attempt on the same file adds no second head
        writer = RecordWriter(path, head=HEAD)
        for number in range(first, first + 500):
            writer.write(record(window=number).to_line)
        assert writer.close()
        assert (writer.num_dropped, writer.problem) == (0, None)
    found = read_records(path)
    assert [r.window for r in found.records] == list(range(1000))
    assert found.num_unreadable == 0


def test_nothing_written_makes_no_file_and_no_thread(tmp_path: Path) -> None:
    before = threading.active_count()
    writer = RecordWriter(tmp_path / "x")
    assert threading.active_count() == before
    assert writer.close()
    assert not (tmp_path / "x").exists()


def test_a_full_disk_loses_lines_and_nothing_else(tmp_path: Path) -> None:
    """Two writes fail, then a line is cut in its middle, then there is room again."""
    answers = iter(["full", "full", "cut"])
    seen = threading.Semaphore(0)

    def append(descriptor: int, data: bytes) -> int:
        try:
            answer = next(answers, "room")
            if answer == "full":
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return os.write(descriptor, data[:30] if answer == "cut" else data)
        finally:
            seen.release()

    writer = RecordWriter(tmp_path / "x", head=HEAD, append=append)
    for number in range(4):
        writer.write(record(window=number).to_line)
        assert seen.acquire(timeout=10)
    assert writer.close()
    assert writer.num_dropped == 3
    assert writer.problem is not None
    found = read_records(tmp_path / "x")
    assert [r.window for r in found.records] == [3]
    assert found.num_unreadable == 1


def test_a_stuck_disk_never_blocks_the_training(tmp_path: Path) -> None:
    started, release = threading.Event(), threading.Event()

    def append(descriptor: int, data: bytes) -> int:
        started.set()
        release.wait(30)
        return os.write(descriptor, data)

    writer = RecordWriter(tmp_path / "x", append=append, max_pending=4)
    writer.write(lambda: b"first\n")
    assert started.wait(10)
    for _ in range(7):
        writer.write(lambda: b"next\n")
    assert writer.num_dropped == 3
    assert writer.problem is not None and "4 records wait" in writer.problem
    assert not writer.close(seconds=0.01)
    release.set()


def test_a_path_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    writer = RecordWriter(tmp_path / "file" / "x")
    writer.write(lambda: b"line\n")
    assert writer.close()
    assert writer.num_dropped == 1
    assert writer.problem is not None


def test_a_line_that_cannot_be_made_costs_itself_and_is_told(tmp_path: Path) -> None:
    def broken() -> bytes:
        raise TypeError("a value of no known kind")

    writer = RecordWriter(tmp_path / "x", head=HEAD)
    for line in (record(window=0).to_line, broken, record(window=2).to_line):
        writer.write(line)
    assert writer.close()
    assert [r.window for r in read_records(tmp_path / "x").records] == [0, 2]
    assert writer.num_dropped == 1 and "no known kind" in (writer.problem or "")


def test_lines_are_made_beside_the_loop_and_not_in_it(tmp_path: Path) -> None:
    made_by: list[str] = []

    def line() -> bytes:
        made_by.append(threading.current_thread().name)
        return record(window=0).to_line()

    writer = RecordWriter(tmp_path / "x", head=HEAD)
    writer.write(line)
    assert writer.close()
    assert made_by == ["samerun-records"]
