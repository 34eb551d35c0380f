"""`samerun report` on real runs: crashed, resumed, skipped, forked; what it says is what happened."""

from __future__ import annotations

import html.parser
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import samerun
from samerun.cli import main as cli
from samerun.errors import DamagedError, UsageError
from samerun.report.gather import RunTold, gather
from samerun.report.page import page
from samerun.storage.local import Local
from samerun.storage.memory import Memory

torch.set_num_threads(1)


class CrashError(Exception):
    pass


def train(path: Path, until: int, *, crash_after: int = -1, bad: int = -1, nudge: float = 0.0, **options: Any) -> None:
    torch.manual_seed(3)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = samerun.Data(torch.arange(13.0).reshape(13, 1), global_batch=5, micro_batch=2, seed=7)
    run = samerun.Run(path, model=model, optimizer=optimizer, data=data, save_every="4 updates", **options)
    with run:
        for window in run.windows(until=until):
            for batch in window:
                loss = (model(batch) + nudge).square().sum()
                window.backward(loss * (float("nan") if window.index == bad else 1.0), len(batch))
            window.step()
            if run.progress.windows % 4 == 0:
                run.evaluate("distance", lambda: float(model.weight.detach().abs()), better="min")
            if window.index == crash_after:
                raise CrashError


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three attempts: one ends by an error in window 6, one in window 13, one reaches its goal."""
    path = tmp_path_factory.mktemp("report") / "a <b>run<b>"
    for crash_after in (6, 13):
        with pytest.raises(CrashError):
            train(path, 20, crash_after=crash_after, bad=2)
    train(path, 20, bad=2)
    return path


@pytest.fixture(scope="module")
def told(path: Path) -> RunTold:
    return gather(Local(path))


def test_attempts_are_told_as_they_went(told: RunTold) -> None:
    assert [attempt.number for attempt in told.attempts] == [1, 2, 3]
    first, second, third = told.attempts
    assert first.how == "fresh"
    for attempt, before in ((second, first), (third, second)):
        assert attempt.how.startswith("resumed from u0000") and attempt.how.endswith(", bitwise")
        assert before.num_lost == before.stop_window - attempt.first_window > 0
    assert (first.stop_window, second.stop_window, third.stop_window) == (7, 14, 21)
    assert "CrashError" in first.ended and "CrashError" in second.ended
    assert third.ended == "closed at update 20" and third.num_lost == 0


def test_each_window_counts_once_and_what_was_done_again_is_the_same(told: RunTold) -> None:
    assert [record.window for record in told.windows] == [*range(21)]
    assert [record.outcome for record in told.windows if record.outcome != "updated"] == ["non_finite_loss"]
    assert len(told.lost) == sum(attempt.num_lost for attempt in told.attempts)
    assert (told.again.num, told.again.first_unlike) == (len(told.lost), None)


def test_what_was_done_again_otherwise_is_named(tmp_path: Path) -> None:
    with pytest.raises(CrashError):
        train(tmp_path / "run", 20, crash_after=6)
    train(tmp_path / "run", 20, nudge=1.0)  # another loss: nothing in the checkpoint can tell
    again = gather(Local(tmp_path / "run")).again
    assert again.num > 0 and again.first_unlike == 4
    assert "differ first in window 4" in page(gather(Local(tmp_path / "run")))


def test_checkpoints_evaluations_samples_and_news(told: RunTold) -> None:
    names = [checkpoint.name for checkpoint in told.checkpoints]
    assert told.checkpoints[0].updates == 20 and len(names) == len(set(names)) <= 5
    assert all(checkpoint.durable_seconds is not None for checkpoint in told.checkpoints)
    assert [windows for windows, _ in told.evaluations["distance"]] == [4, 8, 12, 16, 20]
    assert told.samples is not None and told.samples.problems == () and told.samples.num_checked == 21
    assert [noticed.text for noticed in told.noticed] == [
        "window 2 was skipped: non finite loss (loss nan)",
    ]


class Reader(html.parser.HTMLParser):
    """Checks that tags close in order; collects text."""

    def __init__(self) -> None:
        super().__init__()
        self.stack: list[str] = []
        self.tags: set[str] = set()
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.add(tag)
        if tag not in ("meta", "br"):
            self.stack.append(tag)
        assert not any(name in ("src", "href") or name.startswith("on") for name, _ in attrs), "it loads nothing"

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        self.tags.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.stack.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def test_the_page_is_whole_loads_nothing_and_runs_nothing(told: RunTold) -> None:
    reader = Reader()
    reader.feed(page(told))
    assert reader.stack == []
    assert "script" not in reader.tags and "link" not in reader.tags and "b" not in reader.tags
    text = " ".join(reader.text)
    assert "a <b>run<b>" in text, "the run's name is text"
    assert "are the same in all of them" in text and "Each position once, in order" in text
    assert page(told).count("<svg") == 4


def command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *words: str) -> tuple[int, str]:
    monkeypatch.setattr(sys, "argv", ["samerun", "report", *words])
    try:
        cli.main()
        code = 0
    except SystemExit as stop:
        code = int(stop.code or 0)
    out = capsys.readouterr()
    return code, out.out + out.err


def test_the_command_writes_a_file_here_or_where_it_is_told(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, said = command(capsys, monkeypatch, str(path))
    assert (code, said) == (0, "a-b-run-b.html: 3 attempts, 21 windows\n")
    assert [file.name for file in tmp_path.iterdir()] == ["a-b-run-b.html"]
    code, said = command(capsys, monkeypatch, str(path), "--json")
    document = json.loads(said)
    assert code == 0 and document["file"] is None and len([*tmp_path.iterdir()]) == 1
    assert document["schema"] == "samerun.report.v1" and document["windows"]["recorded"] == 21
    assert document["done_again"]["first_unlike"] is None
    code, said = command(capsys, monkeypatch, str(path), "--json", "--out", "there.html")
    assert code == 0 and json.loads(said)["file"] == "there.html" and (tmp_path / "there.html").exists()


def test_a_page_never_changes_the_run(path: Path) -> None:
    before = {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}
    page(gather(Local(path)))
    assert {file: file.read_bytes() for file in path.rglob("*") if file.is_file()} == before


def test_a_run_without_records_of_windows_has_a_page_too(tmp_path: Path) -> None:
    train(tmp_path / "run", 5, health="off")
    told = gather(Local(tmp_path / "run"))
    assert told.windows == () and told.attempts[0].stop_window == 5
    assert "No records of single windows are here" in page(told)
    assert told.to_json()["windows"]["median_seconds"] is None


def test_nothing_and_nonsense_are_errors_that_say_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError, match="no attempt and no checkpoint"):
        gather(Memory())
    code, said = command(capsys, monkeypatch, str(tmp_path))
    assert code == 2 and "holds no run" in said
    train(tmp_path / "run", 2)
    journal = tmp_path / "run" / "journal" / "000001.jsonl"
    journal.write_text("not json\n" + journal.read_text())
    code, said = command(capsys, monkeypatch, str(tmp_path / "run"))
    assert code == DamagedError.exit_code and "a record of the run cannot be read" in said
