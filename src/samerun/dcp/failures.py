"""Errors as Python programs expect them: DCP wraps every failure in CheckpointException, which is a BaseException."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from torch.distributed.checkpoint.api import CheckpointException

from samerun.errors import CheckpointError

_FOLDED: Final = "global metadata read failed: "
"""DCP turns whatever `read_metadata` raised into an AssertionError with this text before its message."""


@contextmanager
def real_errors() -> Iterator[None]:
    """Raises the first failing rank's own error in place of the CheckpointException of `dcp.save` or `dcp.load`.

    The error is an Exception that names the key or file; a note says which ranks failed. Works around
    `dcp.save(…)`, `dcp.load(…)` and `future.result()` of `dcp.async_save(…)`.
    """
    try:
        yield
    except CheckpointException as error:
        raise first_failure(error) from None


def first_failure(error: CheckpointException) -> BaseException:
    """The error of the lowest failing rank, with a note that lists all failing ranks."""
    if not error.failures:
        return error
    rank = min(error.failures)
    cause: BaseException = error.failures[rank][0]
    if isinstance(cause, AssertionError) and _FOLDED in str(cause):
        cause = CheckpointError(str(cause).split(_FOLDED, 1)[1])
    cause.add_note(
        f"raised on rank {rank} in DCP's step {error.args[0]!r}; ranks that failed: {sorted(error.failures)}"
    )
    return cause
