"""The ledger of samples: what a run wrote of its windows, over crashes and resumes, and what `show --samples` finds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import samerun
from samerun.core.clock import ManualClock
from samerun.core.events import Journal, read_events
from samerun.data.ledger import account
from samerun.data.source import DataWindow
from samerun.run.keeping.samples import SampleLedger, open_samples
from samerun.step.outcome import Decision, Outcome, Reason
from samerun.step.parallel.agree import Agreed
from samerun.storage.journal import SAMPLES, StoredJournal, read_journal
from samerun.storage.local import Local
from samerun.storage.memory import Memory

torch.set_num_threads(1)


class CrashError(Exception):
    pass


def train(path: Path, until: int, *, crash_after: int | None = None, data: Any = None, bad: int | None = None) -> None:
    torch.manual_seed(3)
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    if data is None:
        data = samerun.Data(torch.arange(13.0).reshape(13, 1), global_batch=5, micro_batch=2, seed=7)
    run = samerun.Run(path, model=model, optimizer=optimizer, data=data, save_every="2 updates")
    with run:
        for window in run.windows(until=until):
            for batch in window:
                loss = model(batch).square().sum()
                window.backward(loss * (float("nan") if window.index == bad else 1.0), len(batch))
            window.step()
            if window.index == crash_after:
                raise CrashError


def ledger(path: Path) -> list[dict[str, Any]]:
    return read_journal(Local(path), suffix=SAMPLES)


def show(path: Path, *options: str) -> tuple[int, dict[str, Any]]:
    code = "import sys; from samerun.cli.main import main; sys.argv[0] = 'samerun'\ntry: main()\n"
    code += "finally: assert 'torch' not in sys.modules, 'show --samples loads torch'"
    done = subprocess.run(
        [sys.executable, "-c", code, "show", str(path), "--samples", "--json", *options],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode in (0, 3), done.stderr
    return done.returncode, json.loads(done.stdout)


def test_a_crashed_and_resumed_run_is_accounted_for(tmp_path: Path) -> None:
    with pytest.raises(CrashError):
        train(tmp_path, 9, crash_after=4)  # saved after windows 1 and 3; window 4 is lost
    train(tmp_path, 7, bad=5)  # eight windows, one of them skipped
    code, found = show(tmp_path)
    assert (code, found["verdict"], found["problems"]) == (0, "sound", [])
    assert found["num_windows"] == found["num_checked"] == 8 and found["position"] == 40
    assert found["decisions"] == {"updated": 7, "non_finite_loss": 1}
    assert found["stretches"] == [
        {"attempt": 1, "first": 0, "stop": 5, "kept": 4},
        {"attempt": 2, "first": 4, "stop": 8, "kept": 8},
    ]


def test_windows_of_an_attempt_that_was_passed_over_do_not_count(tmp_path: Path) -> None:
    """The second attempt decides nothing, yet what the first did after its last checkpoint is gone with it."""
    with pytest.raises(CrashError):
        train(tmp_path, 9, crash_after=4)
    torch.manual_seed(3)
    train(tmp_path, 4)
    found = account(ledger(tmp_path))
    assert (found.num_windows, found.position, found.problems) == (4, 20, ())


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (lambda lines: [*lines[:3], *lines[4:]], "window 3 follows window 1: some are missing"),
        (lambda lines: [*lines[:3], lines[3] | {"start": 8}, *lines[4:]], "positions 8 to 10 come twice"),
        (lambda lines: [*lines[:3], lines[3] | {"start": 11}, *lines[4:]], "positions 10 to 11 are left out"),
        (lambda lines: [*lines[:3], lines[3] | {"coverage": "0" * 16}, *lines[4:]], "window 2 delivered samples"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, fault: Any, words: str) -> None:
    train(tmp_path, 4)
    file = tmp_path / "journal" / "000001.samples.jsonl"
    lines = fault(ledger(tmp_path))
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    code, found = show(tmp_path)
    assert (code, found["verdict"]) == (3, "unsound")
    assert any(words in problem for problem in found["problems"])


def test_another_sources_order_joins_up_but_is_not_checked(tmp_path: Path) -> None:
    train(tmp_path, 3, data=samerun.data.Stream([torch.ones(2, 1)] * 8, microbatches_per_window=1))
    code, found = show(tmp_path)
    assert (code, found["verdict"], found["num_checked"], found["num_windows"]) == (0, "cannot tell", 0, 3)


def test_lines_are_durable_before_the_checkpoint_that_holds_their_window(tmp_path: Path) -> None:
    """On an object store lines wait in memory: whatever a checkpoint says, the ledger must say already."""
    storage = Memory()
    held = StoredJournal(storage, 1, suffix=SAMPLES, clock=ManualClock())
    held.write("window", window=0)
    assert read_journal(storage, suffix=SAMPLES) == []
    ledger = SampleLedger(held, replicas=1, say=pytest.fail)
    ledger.sync()
    assert [line["window"] for line in read_journal(storage, suffix=SAMPLES)] == [0]
    assert read_journal(storage) == [], "the journal itself is another matter"


def test_each_save_syncs_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    monkeypatch.setattr(SampleLedger, "sync", lambda _: order.append("ledger"))
    store_save = samerun.checkpoint.Store.save

    def save(self: Any, *arguments: Any, **options: Any) -> Any:
        order.append("save")
        return store_save(self, *arguments, **options)

    monkeypatch.setattr(samerun.checkpoint.Store, "save", save)
    train(tmp_path, 2)
    assert order == ["ledger", "save"] * 2


def test_a_full_disk_ends_the_ledger_and_not_the_training() -> None:
    class Full(Journal):
        def sync(self) -> None:
            raise OSError(28, "No space left on device")

    said: list[str] = []
    ledger = SampleLedger(Full(None), replicas=1, say=said.append)
    ledger.sync()
    ledger.sync()
    assert len(said) == 1 and "No space left" in said[0]


def decided(index: int) -> tuple[DataWindow, Decision]:
    data = DataWindow(
        index=index, start=2 * index, end=2 * index + 2, epoch=0, num_samples=2, num_microbatches=1, slots=1,
        coverage=index, fetch=lambda: iter(()),
    )  # fmt: skip
    outcome = Outcome(
        reason=Reason.UPDATED, loss=1.0, grad_norm=1.0, grad_norm_clipped=1.0, weight=2.0, lr=0.1, scale=1.0
    )
    agreed = Agreed(
        weight=2.0, loss_sum=2.0, num_bad_ranks=0, num_bad_norms=0, squared_norm=1.0, scale=1.0, lr=None,
        num_samples=2, coverage=index, num_stop=0, num_abandon=0, num_save_due=0, num_save_over=0, num_save_failed=0,
        noise=(),
    )  # fmt: skip
    return data, Decision(outcomes={"model": outcome}, agreed=agreed)


def test_lines_of_short_windows_are_written_together_and_all_by_a_sync_or_the_end(tmp_path: Path) -> None:
    """At the latest a second after the last time, with the time of each decision; long windows at once."""
    path, clock = tmp_path / "ledger", ManualClock()
    ledger = SampleLedger(Journal(path), replicas=1, say=pytest.fail, clock=clock)

    def written() -> list[int]:
        return [line["window"] for line in read_events(path)] if path.exists() else []

    for index in range(4):
        clock.advance(0.3)
        ledger.decided(*decided(index))
        assert written() == ([0, 1, 2, 3] if index == 3 else [])
    for index in (4, 5):
        clock.advance(7.0)
        ledger.decided(*decided(index))
        assert written()[-1] == index
    ledger.decided(*decided(6))
    ledger.decided(*decided(7))
    assert written()[-1] == 5
    ledger.sync()
    assert written()[-1] == 7
    ledger.decided(*decided(8))
    ledger.close()
    assert written() == [*range(9)]
    times = [line["time"] for line in read_events(path)]
    assert [round(later - earlier, 3) for earlier, later in pairwise(times[:6])] == [0.3, 0.3, 0.3, 7.0, 7.0]


def test_a_disk_that_fills_up_in_the_middle_of_a_line_ends_the_ledger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system says so by a number only: half a line, with the next one behind it, could not be read."""
    real, said, clock = os.write, list[str](), ManualClock()
    monkeypatch.setattr("samerun.core.events.os.write", lambda descriptor, data: real(descriptor, data[:30]))
    ledger = SampleLedger(Journal(tmp_path / "ledger"), replicas=1, say=said.append, clock=clock)
    for index in range(3):
        clock.advance(2.0)
        ledger.decided(*decided(index))
    ledger.close()
    assert len(said) == 1 and "No space left" in said[0]
    assert (tmp_path / "ledger").stat().st_size == 30


def test_a_ledger_that_has_ended_keeps_nothing_in_memory() -> None:
    class Full(Journal):
        def write_all(self, event: str, lines: Any) -> None:
            raise OSError(28, "No space left on device")

    said: list[str] = []
    clock = ManualClock()
    ledger = SampleLedger(Full(None), replicas=1, say=said.append, clock=clock)
    clock.advance(2.0)
    for index in range(5):
        ledger.decided(*decided(index))
    assert len(said) == 1
    assert ledger._waiting == []


def test_only_the_leading_rank_writes(tmp_path: Path) -> None:
    lines = open_samples(str(tmp_path), 1, leads=False)
    lines.write("window", window=0)
    lines.close()
    assert not (tmp_path / "journal").exists()
