"""Runs that act: a rewind happens once, is recorded before, and what comes after is still the same run."""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from rank_pool import RankError, RankPool
from samerun.checkpoint import Store
from samerun.cli import main as cli
from samerun.health.records.event import read_records
from samerun.run.faults import Deed, Fault, FaultPlan

UNTIL = 190


def start(
    pool: RankPool, path: Path, *, raise_at: int | None = None, world_size: int = 1, until: int = UNTIL, **options: Any
) -> Any:
    """The result of a start, or the name of what ended it."""
    faults = tuple(Fault(at=f"window:{raise_at}.step", rank=rank, deed=Deed.RAISE) for rank in range(world_size))
    environ = {"SAMERUN_FAULTS": FaultPlan(faults=faults if raise_at is not None else ()).to_text()}
    try:
        return pool.run(world_size, "health_scenarios:act", environ=environ, path=str(path), until=until, **options)[0]
    except RankError as error:
        return error.kind


def decision(path: Path, number: int) -> dict[str, Any]:
    return dict(json.loads((path / "decisions" / f"{number:06d}.json").read_text()))


def outcome(path: Path, number: int) -> dict[str, Any]:
    return dict(json.loads((path / "decisions" / f"{number:06d}.outcome.json").read_text()))


@pytest.fixture(scope="module")
def twin(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A run with poisoned samples, interrupted by nothing but its own decisions."""
    path = tmp_path_factory.mktemp("twin") / "run"
    assert [start(ranks, path, poison="data") for _ in range(2)] == ["Stopped", "Stopped"]
    return path, start(ranks, path, poison="data")


def test_the_same_data_first_then_a_quarantine(twin: tuple[Path, Any]) -> None:
    path, done = twin
    first, second = decision(path, 1), decision(path, 2)
    assert (first["action"], first["skip"], first["window"]) == ("rewind_same_data", None, 170)
    assert first["evidence"]["decided"]["target"]["windows"] == 130
    assert outcome(path, 1)["came_back"] is True
    assert (second["action"], second["attempt"]) == ("rewind_and_skip", 2)
    assert second["skip"] == [580, 840]  # windows 145 to 210 of four samples: the poison, 600 to 800, and its rims
    assert outcome(path, 2)["came_back"] is False
    assert done["progress"]["updates"] == UNTIL
    assert done["cursor"]["skip"] == [[580, 840]]
    assert done["cursor"]["position"] == UNTIL * 4 + 260
    assert not (path / "decisions" / "000003.json").exists()


def test_the_abandoned_branch_stays_and_is_never_the_newest(twin: tuple[Path, Any]) -> None:
    path, _ = twin
    catalog = Store(path).catalog()
    assert [entry.epoch for entry in catalog.entries][:3] == [3, 3, 3]
    assert {one.by.decision for one in catalog.retired} == {1, 2}
    assert all(one.entry.epoch < 3 for one in catalog.retired)


def command(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    with mock.patch.object(sys, "argv", ["samerun", *map(str, words)]), contextlib.suppress(SystemExit):
        cli.main()
    return capsys.readouterr().out


def test_the_story_is_told(twin: tuple[Path, Any], capsys: pytest.CaptureFixture[str]) -> None:
    path, _ = twin
    said = command(capsys, "why", path)
    for words in (
        "decision 1  rewind same data to u000000130-",
        "seen      the spike that began at window 150 is ",
        "evidence  window 170: loss ",
        "expected  windows up to 170 pass without an alarm, else the data is suspect",
        "outcome   it came back by window 15",
        "decision 2  rewind and skip to u000000130-",
        "skips     positions 580 to 840, at every start from now on",
        "budget    before it: rewinds here 1 of 2, rewinds today 1 of 4; quarantined with it: 260 samples of 380",
        "outcome   it did not come back",
    ):
        assert words in said
    assert said.count("retired    u0") == len(Store(path).catalog().retired)
    newest = Store(path).catalog().retired[0]
    gone = newest.entry.name
    shown = command(capsys, "show", f"{path}@{gone}")
    assert "no start takes it" in shown and f"decision {newest.by.decision}  rewind" in shown
    assert json.loads(command(capsys, "ls", path, "--json"))["retired"][0]["name"] == gone
    assert "(retired)" in command(capsys, "verify", path)


def test_no_sample_of_the_quarantine_is_read_after_it(twin: tuple[Path, Any]) -> None:
    path, _ = twin
    file = path / "health" / "000003" / "rank-00000.windows.jsonl"
    ends = [(record.start, record.end) for record in read_records(file).records]
    assert (576, 580) in ends and (580, 844) in ends
    assert all(stop <= 580 or stop >= 844 for _, stop in ends)


def test_killed_before_between_and_after_it_is_the_same_run(
    ranks: RankPool, tmp_path: Path, twin: tuple[Path, Any]
) -> None:
    path = tmp_path / "run"
    assert start(ranks, path, poison="data", raise_at=163) == "FaultError"  # inside the incident
    assert start(ranks, path, poison="data") == "Stopped"
    (path / "retired" / "000002.json").unlink()  # as if the machine had died between decision and retirement
    assert start(ranks, path, poison="data", raise_at=152) == "FaultError"
    assert start(ranks, path, poison="data") == "Stopped"
    assert start(ranks, path, poison="data", raise_at=151) == "FaultError"
    assert start(ranks, path, poison="data") == twin[1]
    written = json.loads((path / "retired" / "000002.json").read_text())
    assert (written["attempt"], written["written_by"], written["decision"]) == (2, 3, 1)


def test_what_does_not_come_back_was_not_the_datas_fault(ranks: RankPool, tmp_path: Path) -> None:
    path = tmp_path / "run"
    assert start(ranks, path, poison="once") == "Stopped"
    done = start(ranks, path, poison="once")
    clean = start(ranks, tmp_path / "clean", poison="none")
    assert outcome(path, 1)["came_back"] is False
    assert done == clean  # after the rewind it is the run that never had the fault


def test_replicas_that_differ_go_back_to_where_they_were_equal(ranks: RankPool, tmp_path: Path) -> None:
    path = tmp_path / "run"
    options: dict[str, Any] = {"poison": "none", "world_size": 3, "until": 45}
    assert start(ranks, path, flip_rank=1, **options) == "Stopped"
    found = decision(path, 1)
    assert (found["action"], found["evidence"]["ranks"]) == ("rewind_same_data", [1])
    assert "model.module.0.weight" in found["evidence"]["tensors"]
    assert found["evidence"]["decided"]["target"]["windows"] == 30  # the flip came after window 33
    assert found["evidence"]["incident"]["onset"] == 30
    done = start(ranks, path, flip_rank=1, **options)
    assert done == start(ranks, tmp_path / "clean", **options)
    assert outcome(path, 1)["came_back"] is False


@pytest.mark.soak
def test_control_advice_does_nothing(ranks: RankPool, tmp_path: Path) -> None:
    path = tmp_path / "run"
    done = start(ranks, path, poison="data", mode="advise")
    assert done["progress"]["updates"] == UNTIL
    assert decision(path, 1)["mode"] == "advise"
    assert not list((path / "retired").glob("*"))


@pytest.mark.soak
def test_without_a_good_checkpoint_a_person_is_asked(ranks: RankPool, tmp_path: Path) -> None:
    """The newest good checkpoint is gone: nothing is retired, and the exit says not to start again."""
    path = tmp_path / "run"
    assert start(ranks, path, poison="data", raise_at=149) == "FaultError"
    for folder in (path / "checkpoints").iterdir():
        if int(folder.name[1:10]) < 140:
            (folder / "manifest.json").unlink()
    assert start(ranks, path, poison="data") == "DoNotRestart"
    assert decision(path, 1)["action"] == "stop"
    assert not list((path / "retired").glob("*.json")) or "000002.json" not in {
        file.name for file in (path / "retired").iterdir()
    }
