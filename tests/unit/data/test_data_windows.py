import numpy as np
import pytest

from samerun.data.order import Order
from samerun.data.source import Replica
from samerun.data.windows import EpochEnd, SkipRanges, Windowing, parse_skip
from samerun.errors import UsageError


def windowing(n: int, batch: int, micro: int, end: EpochEnd = EpochEnd.STRADDLE, skip=()) -> Windowing:
    return Windowing(
        order=Order(num_samples=n, seed=7), global_batch=batch, micro_batch=micro, epoch_end=end, skip=parse_skip(skip)
    )


def test_windows_are_consecutive_and_straddle_epochs() -> None:
    cut = windowing(10, 4, 2)
    start, seen = 0, []
    for index in range(5):
        plan = cut.window(index=index, start=start)
        assert (plan.start, plan.end, plan.num_samples, plan.num_microbatches) == (start, start + 4, 4, 2)
        seen += list(zip(plan.epochs.tolist(), plan.samples.tolist(), strict=True))
        start = plan.end
    assert sorted(seen) == [(e, s) for e in (0, 1) for s in range(10)]


def test_a_window_may_be_longer_than_an_epoch() -> None:
    plan = windowing(3, 10, 4).window(index=0, start=0)
    assert plan.epochs.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3]
    assert [len(plan.microbatch(k).samples) for k in range(3)] == [4, 4, 2]


def test_drop_tail_leaves_n_mod_b_of_each_epoch() -> None:
    cut = windowing(10, 4, 2, EpochEnd.DROP_TAIL)
    assert cut.samples_per_epoch == 8
    epochs = [set(cut.window(index=i, start=4 * i).epochs.tolist()) for i in range(4)]
    assert epochs == [{0}, {0}, {1}, {1}]


@pytest.mark.parametrize("cut", [(4, 6), (2, 8)])
def test_drop_tail_takes_no_skip_range_that_cuts_a_window(cut: tuple[int, int]) -> None:
    with pytest.raises(UsageError, match="cuts a window"):
        windowing(10, 4, 2, EpochEnd.DROP_TAIL, [cut])
    assert windowing(10, 4, 2, EpochEnd.DROP_TAIL, [(4, 8)]).window(index=0, start=4).end == 12


def test_microbatches_do_not_depend_on_replicas() -> None:
    plan = windowing(100, 13, 3).window(index=2, start=26)
    assert [plan.microbatch(k).position for k in range(5)] == [26, 29, 32, 35, 38]
    for count in (1, 2, 3, 4):
        shared = [k for r in range(count) for k in Replica(index=r, count=count).numbers(5)]
        assert sorted(shared) == [0, 1, 2, 3, 4]


def test_position_a_trillion_is_looked_up_at_once() -> None:
    plan = windowing(10**9 + 7, 8, 2).window(index=0, start=10**12)
    assert plan.end == 10**12 + 8 and plan.epochs[0] == 10**12 // (10**9 + 7)


@pytest.mark.parametrize(
    "ranges", [[], [(0, 3)], [(2, 5), (5, 6), (9, 11)], [(1, 2), (4, 100)], [(0, 1), (2, 3), (4, 5)]]
)
def test_skip_arithmetic_agrees_with_counting(ranges: list[tuple[int, int]]) -> None:
    skip = parse_skip(ranges)
    kept = [p for p in range(150) if not any(a <= p < b for a, b in ranges)]
    assert skip.positions(np.arange(len(kept))).tolist() == kept
    assert [skip.kept_before(p) for p in range(150)] == [sum(k < p for k in kept) for p in range(150)]


def test_windows_pass_over_skipped_positions_and_stay_full() -> None:
    cut = windowing(20, 4, 2, skip=[(2, 5), (8, 9)])
    first = cut.window(index=0, start=0)
    assert first.positions.tolist() == [0, 1, 5, 6] and first.end == 7 and first.num_samples == 4
    assert cut.window(index=1, start=7).positions.tolist() == [7, 9, 10, 11]
    assert first.microbatch(1).position == 5


@pytest.mark.parametrize(
    ("ranges", "words"),
    [
        ([(0, 5), (3, 8)], ["(0, 5)", "(3, 8)", "overlap"]),
        ([(5, 5)], ["(5, 5)", "empty"]),
        ([(-1, 5)], ["(-1, 5)"]),
        ([(1, 2, 3)], ["(1, 2, 3)", "pair"]),
        ([(1.5, 2)], ["1.5", "whole"]),
        ([7], ["7", "pair"]),
    ],
)
def test_bad_skip_ranges_are_refused(ranges: list, words: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        parse_skip(ranges)
    assert all(word in str(caught.value) for word in words)


def test_touching_skip_ranges_are_one() -> None:
    assert parse_skip([(5, 8), (0, 5)]) == SkipRanges(((0, 8),))


def test_impossible_sizes_are_refused_with_both_numbers() -> None:
    for bad in (lambda: windowing(10, 0, 1), lambda: windowing(10, 4, 0)):
        with pytest.raises(UsageError, match="at least 1"):
            bad()
    with pytest.raises(UsageError, match=r"micro_batch=5.*global_batch=4"):
        windowing(10, 4, 5)
    with pytest.raises(UsageError, match=r"global_batch=11.*10 samples"):
        windowing(10, 11, 1, EpochEnd.DROP_TAIL)
    with pytest.raises(UsageError, match=r"skip range \(2, 8\).*multiples of global_batch=4"):
        windowing(100, 4, 2, EpochEnd.DROP_TAIL, skip=[(2, 8)])


def test_a_batch_too_small_for_the_replicas_is_refused() -> None:
    cut = windowing(100, 8, 3)
    cut.check_replica(Replica(index=1, count=2))
    with pytest.raises(UsageError, match=r"global_batch=8.*3·3 = 9.*global_batch >= 9.*micro_batch <= 2"):
        cut.check_replica(Replica(index=0, count=3))
    with pytest.raises(UsageError, match="replica 3 of 3"):
        Replica(index=3, count=3)
