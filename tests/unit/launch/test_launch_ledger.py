"""Restarts are bounded by one ledger, reset only by committed progress (invariant 15)."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samerun.core.events import Journal
from samerun.errors import ExitCode
from samerun.launch.again import launch_until_done
from samerun.launch.ledger import Failure, GiveUp, Limits, Restart, next_step
from samerun.launch.torchrun import Ended
from samerun.run.starting.loads import MAX_CRASHES, LoadTries, earlier_journals


def failed(reason: str = "ValueError: bad batch", updates: int = 5, rank: int = 1) -> Failure:
    return Failure(
        reason=reason,
        rank=rank,
        window=updates + 1,
        batch="positions 60 to 72, epoch 1",
        committed_updates=updates,
        checkpoint="u5",
    )


def test_the_same_failure_is_retried_so_often_and_then_ends_with_the_evidence() -> None:
    limits = Limits.of(2)
    assert next_step([failed()], limits) == Restart(number=1, after_seconds=1.0)
    assert next_step([failed()] * 2, limits) == Restart(number=2, after_seconds=2.0)
    end = next_step([failed()] * 3, limits)
    assert isinstance(end, GiveUp)
    for what in ("ValueError: bad batch", "rank 1", "window 6", "positions 60 to 72", "u5", "update 5"):
        assert what in end.evidence


def test_other_numbers_in_the_sentence_are_the_same_failure() -> None:
    limits = Limits.of(1)
    ledger = [failed("CUDA error at 0x7f00 on rank 3"), failed("CUDA error at 0x8e10 on rank 7")]
    assert isinstance(next_step(ledger, limits), GiveUp)
    assert isinstance(next_step([failed("CUDA error"), failed("OOM")], limits), Restart)


def test_ever_new_failures_without_progress_end_too() -> None:
    ledger = [failed(f"error {letter}") for letter in "abcde"]
    assert isinstance(next_step(ledger[:4], Limits.of(2)), Restart)
    assert isinstance(next_step(ledger, Limits.of(2)), GiveUp)


def test_progress_resets_and_falling_back_does_not() -> None:
    limits = Limits.of(1)
    assert isinstance(next_step([failed(updates=5), failed(updates=6)], limits), Restart)
    assert isinstance(next_step([failed(updates=6), failed(updates=5)], limits), GiveUp)


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 3)), min_size=1, max_size=30), st.integers(0, 3))
def test_restarts_without_progress_never_exceed_the_limit(history: list[tuple[str, int]], k: int) -> None:
    """However failures mix, the ledger never grants more than 2·K starts on one and the same committed progress."""
    ledger: list[Failure] = []
    granted = 0
    for reason, updates in history:
        moved = updates > max((f.committed_updates for f in ledger), default=-1)
        granted = 0 if moved else granted
        ledger.append(failed(reason, updates))
        if isinstance(next_step(ledger, Limits.of(k)), GiveUp):
            return
        granted += 1
        assert granted <= 2 * k or k == 0


def test_launching_again_until_done(tmp_path: Path) -> None:
    """The loop around torchrun: failures, then success; the ledger lies with the run and waits grow."""
    answers = [
        Ended(code=ExitCode.FAILED, reason="boom", rank=0, window=3, run_path=str(tmp_path)),
        Ended(code=ExitCode.FAILED, reason="boom", rank=0, window=3, run_path=str(tmp_path)),
        Ended(code=ExitCode.DONE, run_path=str(tmp_path)),
    ]
    waits: list[float] = []
    ended = launch_until_done(
        ["train.py"],
        num_ranks=2,
        limits=Limits.of(2),
        say=lambda line: None,
        start=lambda *_, **__: answers.pop(0),
        wait=waits.append,
    )
    assert (ended.code, waits) == (ExitCode.DONE, [1.0, 2.0])
    assert len((tmp_path / "journal" / "launch.jsonl").read_text().splitlines()) == 2


def test_a_crash_loop_ends_in_93_also_across_launchers(tmp_path: Path) -> None:
    def start(*_: object, **__: object) -> Ended:
        return Ended(code=ExitCode.FAILED, reason="boom", rank=0, run_path=str(tmp_path))

    for _ in range(2):
        ended = launch_until_done(
            ["x"], num_ranks=1, limits=Limits.of(1), say=lambda line: None, start=start, wait=lambda seconds: None
        )
        assert ended.code is ExitCode.DO_NOT_RESTART
    assert len((tmp_path / "journal" / "launch.jsonl").read_text().splitlines()) == 3


@pytest.mark.parametrize(("path", "said"), [(None, "opened no run"), ("s3://bucket/run", "is no local path")])
def test_without_a_ledger_there_is_no_second_start_and_it_says_so(path: str | None, said: str) -> None:
    lines: list[str] = []
    starts = [Ended(code=ExitCode.FAILED, reason="boom", rank=0, run_path=path)]
    ended = launch_until_done(
        ["x"], num_ranks=1, limits=Limits.of(2), say=lines.append, start=lambda *_, **__: starts.pop(), wait=print
    )
    assert ended.code is ExitCode.FAILED and said in lines[0]


def attempt_journal(folder: Path, number: int, *events: tuple[str, str | None]) -> None:
    journal = Journal(folder / f"{number:06d}.jsonl")
    for event, checkpoint in events:
        journal.write(event, checkpoint=checkpoint)
    journal.close()


def test_a_checkpoint_that_crashes_the_loader_is_counted_only_while_it_is_the_last_word(tmp_path: Path) -> None:
    def crashes(name: str, attempt: int) -> int:
        return LoadTries(Journal(None), earlier_journals(tmp_path, attempt=attempt)).num_crashes(name)

    attempt_journal(tmp_path, 1, ("loading", "a"), ("started", "a"))
    assert crashes("a", 2) == 0
    for number in range(2, 2 + MAX_CRASHES):
        attempt_journal(tmp_path, number, ("loading", "a"))
        assert crashes("a", number + 1) == number - 1
    assert crashes("b", 9) == 0
    attempt_journal(tmp_path, 5, ("loading", "a"), ("refused", None))
    assert crashes("a", 6) == 0
