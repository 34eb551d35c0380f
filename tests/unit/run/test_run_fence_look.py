"""Rank 0 looks for a newer attempt; a storage that cannot be asked stops no training, and is left alone for a while."""

from __future__ import annotations

import errno
from typing import Any, cast

from samerun.core.clock import ManualClock
from samerun.core.environ import launcher
from samerun.errors import StorageError
from samerun.preempt.budget import Preemption
from samerun.preempt.flag import StopFlag
from samerun.ranks.group import Solo
from samerun.run.ending.stopping import Stopping


class Down:
    def __init__(self) -> None:
        self.num_looks = 0
        self.is_down = True

    def newest_attempt(self) -> int:
        self.num_looks += 1
        if self.is_down:
            raise StorageError(errno.EIO, "listing: 503 Slow Down", "s3://bucket/run")
        return 2


def test_a_store_that_is_down_postpones_the_look() -> None:
    clock, store = ManualClock(), Down()
    stopping = Stopping(
        StopFlag(), Preemption(), group=Solo(), store=cast("Any", store), launcher=launcher({}), clock=clock, attempt=1
    )
    clock.advance(6)
    assert not stopping.must_abandon()
    clock.advance(30)
    assert not stopping.must_abandon()
    assert store.num_looks == 1
    store.is_down = False
    clock.advance(60)
    assert stopping.must_abandon()
    assert store.num_looks == 2
