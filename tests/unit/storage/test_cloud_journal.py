"""A journal of immutable parts: what was synced survives, what waits goes with the next part, nothing is reordered."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from samerun.core.clock import ManualClock
from samerun.core.events import Journal
from samerun.errors import StorageError
from samerun.storage.journal import MAX_PART_BYTES, StoredJournal, read_journal
from samerun.storage.local import Local
from samerun.storage.memory import Memory


def test_a_part_is_put_at_each_synced_event_and_at_the_end() -> None:
    memory = Memory()
    journal = StoredJournal(memory, 12, clock=ManualClock())
    journal.write("skipped", window=1)
    assert memory.names("journal") == []
    journal.write("saved", sync=True, checkpoint="u1")
    journal.write("skipped", window=2)
    assert memory.names("journal") == ["000012-000000.jsonl"]
    journal.close()
    journal.close()
    assert memory.names("journal") == ["000012-000000.jsonl", "000012-000001.jsonl"]
    events = read_journal(memory)
    assert [(event["event"], event.get("window")) for event in events] == [
        ("skipped", 1),
        ("saved", None),
        ("skipped", 2),
    ]
    assert events[0]["time"] == 1.7e9


def test_attempts_come_in_order_from_directories_too(tmp_path: Path) -> None:
    for attempt in (2, 1):
        journal = Journal(tmp_path / "journal" / f"{attempt:06d}.jsonl")
        journal.write("started", attempt=attempt)
        journal.close()
    with (tmp_path / "journal" / "000002.jsonl").open("a") as out:
        out.write('{"event": "cut by a cra')
    (tmp_path / "journal" / "notes.txt").write_text("someone's own")
    assert [event["attempt"] for event in read_journal(Local(tmp_path))] == [1, 2]
    assert read_journal(Local(tmp_path / "nowhere")) == []


def test_memory_stays_bounded_without_any_sync() -> None:
    memory = Memory()
    journal = StoredJournal(memory, 1)
    for number in range(3):
        journal.write("large", number=number, text="x" * MAX_PART_BYTES)
    assert len(memory.names("journal")) == 3


class Failing(Memory):
    fails = True

    def put_if_absent(self, key: str, data: bytes) -> None:
        if self.fails:
            raise StorageError(errno.EIO, "creating: 503 Slow Down", key)
        super().put_if_absent(key, data)


def test_events_of_a_part_that_could_not_be_put_go_with_the_next() -> None:
    memory = Failing()
    journal = StoredJournal(memory, 1)
    with pytest.raises(StorageError, match="503"):
        journal.write("started", sync=True)
    memory.fails = False
    journal.write("saved", sync=True)
    assert memory.names("journal") == ["000001-000001.jsonl"]
    assert [event["event"] for event in read_journal(memory)] == ["started", "saved"]
