"""What ranks' last words and torchrun's verdict come to: every mixture, by a table."""

from __future__ import annotations

import itertools

import pytest

from samerun.errors import ExitCode
from samerun.launch.torchrun import judge

STOPPED = (ExitCode.STOPPED, "stopped by SIGTERM, saved")
REFUSED = (ExitCode.REFUSED, "another run")
FENCED = (ExitCode.DO_NOT_RESTART, "attempt 7 has taken over")


@pytest.mark.parametrize(
    ("words", "num_ranks", "failure", "code", "reason"),
    [
        ([], 2, "", ExitCode.DONE, ""),
        ([], 2, "rank 1 ended with exit code -9", ExitCode.FAILED, "rank 1 ended with exit code -9"),
        ([STOPPED] * 2, 2, "ended by SIGTERM", ExitCode.STOPPED, STOPPED[1]),
        ([STOPPED], 1, "", ExitCode.STOPPED, STOPPED[1]),
        # a rank that died beside one that saved is a failure, not a preemption
        ([STOPPED], 2, "rank 1 ended with exit code -9", ExitCode.FAILED, "rank 1 ended with exit code -9"),
        ([REFUSED] * 2, 2, "rank 0 ended with exit code 4", ExitCode.REFUSED, "another run"),
        # the peers of a rank that refused are ended by torchrun before they can say anything
        ([REFUSED], 4, "rank 0 ended with exit code 4", ExitCode.REFUSED, "another run"),
        ([STOPPED, FENCED], 2, "x", ExitCode.DO_NOT_RESTART, FENCED[1]),
        ([REFUSED, FENCED], 2, "x", ExitCode.DO_NOT_RESTART, FENCED[1]),
        ([STOPPED, REFUSED], 2, "x", ExitCode.REFUSED, "another run"),
    ],
)
def test_table(words: list[tuple[ExitCode, str]], num_ranks: int, failure: str, code: ExitCode, reason: str) -> None:
    assert judge(words, num_ranks=num_ranks, failure=failure) == (code, reason)


def test_the_order_of_ranks_never_matters_for_the_code() -> None:
    for words in itertools.product([STOPPED, REFUSED, FENCED], repeat=3):
        codes = {judge(list(p), num_ranks=3, failure="x")[0] for p in itertools.permutations(words)}
        assert len(codes) == 1


def test_a_failure_is_never_reported_as_done() -> None:
    for count in range(3):
        for words in itertools.product([STOPPED, REFUSED, FENCED], repeat=count):
            assert judge(list(words), num_ranks=3, failure="x")[0] is not ExitCode.DONE
