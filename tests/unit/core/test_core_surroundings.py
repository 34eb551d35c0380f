"""Clock, journal and environment: the small parts at the edge of the process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from samerun.core.clock import ManualClock, SystemClock
from samerun.core.environ import fault_plan_text, launcher, run_path_override
from samerun.core.events import Journal, read_events
from samerun.errors import UsageError


def test_a_manual_clock_stands_still_until_it_is_turned() -> None:
    clock = ManualClock(seconds=5)
    assert clock.monotonic_seconds() == clock.monotonic_seconds() == 5
    clock.advance(2.5)
    assert clock.monotonic_seconds() == 7.5
    assert clock.wall_seconds() - clock.monotonic_seconds() == clock.wall_offset_seconds
    with pytest.raises(ValueError, match="cannot go back"):
        clock.advance(-1)


def test_the_systems_clock_does_not_go_back() -> None:
    clock = SystemClock()
    assert clock.monotonic_seconds() <= clock.monotonic_seconds()
    assert clock.wall_seconds() > 1.7e9


def test_a_journal_is_a_line_an_event(tmp_path: Path) -> None:
    path = tmp_path / "journal" / "000001.jsonl"
    journal = Journal(path, clock=ManualClock(seconds=1.23456))
    assert not path.exists()  # nothing is made before there is something to say
    journal.write("started", sync=True, kind="fresh")
    journal.write("saved", checkpoint="u1")
    journal.close()
    journal.close()
    assert [event["event"] for event in read_events(path)] == ["started", "saved"]
    assert read_events(path)[0] == {"event": "started", "kind": "fresh", "time": 1700000001.235}


def test_a_line_that_a_crash_cut_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    journal = Journal(path)
    journal.write("one")
    journal.write("two")
    journal.close()
    whole = path.read_bytes()
    for cut in range(len(whole) + 1):
        path.write_bytes(whole[:cut])
        assert [e["event"] for e in read_events(path)] == ["one", "two"][: whole[:cut].count(b"\n")]


def test_a_journal_goes_on_where_it_was(tmp_path: Path) -> None:
    for event in ("one", "two"):
        journal = Journal(tmp_path / "j.jsonl")
        journal.write(event)
        journal.close()
    assert [e["event"] for e in read_events(tmp_path / "j.jsonl")] == ["one", "two"]


def test_other_ranks_write_nowhere(tmp_path: Path) -> None:
    journal = Journal(None)
    journal.write("started", sync=True)
    journal.close()
    assert list(tmp_path.iterdir()) == []


def test_events_are_json(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j.jsonl")
    journal.write("x", text='quotes " and\nlines')
    journal.close()
    assert json.loads((tmp_path / "j.jsonl").read_text())["text"] == 'quotes " and\nlines'


def test_started_by_hand_there_is_no_launcher() -> None:
    found = launcher({})
    assert (found.rank, found.world_size, found.local_rank) == (None, None, None)
    assert (found.restart_count, found.supervised, found.error_file) == (0, False, None)


def test_what_torchrun_says() -> None:
    found = launcher({
        "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "TORCHELASTIC_RESTART_COUNT": "2",
        "TORCHELASTIC_RUN_ID": "x", "TORCHELASTIC_ERROR_FILE": "/tmp/e/error.json",
    })  # fmt: skip
    assert (found.rank, found.world_size, found.local_rank, found.restart_count) == (3, 4, 1, 2)
    assert (found.supervised, found.error_file) == (True, "/tmp/e/error.json")


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "TORCHELASTIC_RESTART_COUNT"])
def test_a_number_that_is_none_is_named(name: str) -> None:
    assert launcher({name: ""}).restart_count == 0
    with pytest.raises(UsageError, match=f"{name}='two' is not a whole number"):
        launcher({name: "two"})


def test_our_own_two_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run_path_override({"SAMERUN_RUN": "runs/x"}) == "runs/x"
    assert fault_plan_text({"SAMERUN_FAULTS": "{}"}) == "{}"
    assert run_path_override({"SAMERUN_RUN": ""}) is None
    assert fault_plan_text({}) is None
    monkeypatch.setenv("SAMERUN_RUN", "runs/y")
    assert run_path_override() == "runs/y"
