"""What ranks' last words and torchrun's verdict come to: every mixture, by a table."""

from __future__ import annotations

import itertools

import pytest

from samerun.errors import ExitCode
from samerun.launch.torchrun import judge
from samerun.run.ending.last_words import Word


def word(code: ExitCode, reason: str, rank: int = 0) -> Word:
    return Word(rank=rank, code=code, reason=reason, window=None)


STOPPED = word(ExitCode.STOPPED, "stopped by SIGTERM, saved")
REFUSED = word(ExitCode.REFUSED, "another run")
FENCED = word(ExitCode.DO_NOT_RESTART, "attempt 7 has taken over")


@pytest.mark.parametrize(
    ("words", "num_ranks", "failure", "code", "reason"),
    [
        ([], 2, None, ExitCode.DONE, ""),
        ([], 2, "rank 1 ended with exit code -9", ExitCode.FAILED, "rank 1 ended with exit code -9"),
        ([STOPPED] * 2, 2, "ended by SIGTERM", ExitCode.STOPPED, STOPPED.reason),
        ([STOPPED], 1, None, ExitCode.STOPPED, STOPPED.reason),
        # a rank that died beside one that saved is a failure, not a preemption
        ([STOPPED], 2, "rank 1 ended with exit code -9", ExitCode.FAILED, "rank 1 ended with exit code -9"),
        ([REFUSED] * 2, 2, "rank 0 ended with exit code 4", ExitCode.REFUSED, "another run"),
        # the peers of a rank that refused are ended by torchrun before they can say anything
        ([REFUSED], 4, "rank 0 ended with exit code 4", ExitCode.REFUSED, "another run"),
        ([STOPPED, FENCED], 2, "x", ExitCode.DO_NOT_RESTART, FENCED.reason),
        ([REFUSED, FENCED], 2, "x", ExitCode.DO_NOT_RESTART, FENCED.reason),
        ([STOPPED, REFUSED], 2, "x", ExitCode.REFUSED, "another run"),
    ],
)
def test_table(words: list[Word], num_ranks: int, failure: str | None, code: ExitCode, reason: str) -> None:
    ended = judge(words, num_ranks=num_ranks, failure=failure)
    assert (ended.code, ended.reason) == (code, reason)


def test_the_first_failing_ranks_own_sentence_is_the_reason() -> None:
    words = [word(ExitCode.FAILED, "PeerError: gone", 0), Word(rank=1, code=ExitCode.FAILED, reason="boom", window=7)]
    ended = judge(words, num_ranks=2, failure="exit code 1", rank=1, run_path="runs/x")
    assert (ended.code, ended.reason, ended.rank, ended.window) == (ExitCode.FAILED, "boom", 1, 7)
    assert ended.run_path == "runs/x"


def test_the_order_of_ranks_never_matters_for_the_code() -> None:
    for words in itertools.product([STOPPED, REFUSED, FENCED], repeat=3):
        codes = {judge(list(p), num_ranks=3, failure="x").code for p in itertools.permutations(words)}
        assert len(codes) == 1


def test_a_failure_is_never_reported_as_done() -> None:
    for count in range(3):
        for words in itertools.product([STOPPED, REFUSED, FENCED], repeat=count):
            assert judge(list(words), num_ranks=3, failure="x").code is not ExitCode.DONE
