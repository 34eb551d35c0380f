import pytest
from hypothesis import given
from hypothesis import strategies as st

from samerun.data.adapters.marks import Mark, SnapshotRing, capacity_for
from samerun.errors import UsageError


@given(
    prefetch=st.integers(0, 4),
    workers=st.integers(0, 4),
    window=st.integers(1, 7),
    every=st.integers(1, 9),
    ahead=st.integers(0, 9),
)
def test_the_capacity_is_enough_for_the_deepest_prefetch(
    prefetch: int, workers: int, window: int, every: int, ahead: int
) -> None:
    """A producer that runs as far ahead as it may, against a loop that commits as late as it may."""
    ring = SnapshotRing(
        capacity=capacity_for(prefetch=prefetch, workers=workers, ahead=ahead, window=window, every=every),
        item=0,
        mark=Mark(),
    )
    committed = 0
    for item in range(1, 200):
        if item % every == 0:
            ring.push(item, Mark(item=item))
        while item - committed >= prefetch * workers + ahead + window:
            committed += window
            ring.commit(committed)
        mark, after = ring.resume
        assert mark.item + after == committed and 0 <= after < every


def test_one_less_is_not_enough() -> None:
    capacity = capacity_for(prefetch=2, workers=2, ahead=0, window=2, every=1)
    ring = SnapshotRing(capacity=capacity - 1, item=0, mark=Mark())
    with pytest.raises(UsageError, match="only 0 are committed"):
        for item in range(1, capacity):
            ring.push(item, Mark(item=item))
    with pytest.raises(UsageError, match="use >= 2"):
        SnapshotRing(capacity=1, item=0, mark=Mark())
