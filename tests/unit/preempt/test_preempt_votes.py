"""All ranks leave before the same microbatch, or none does, whoever is told when and whoever runs ahead."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samerun.core.clock import ManualClock
from samerun.errors import PeerError
from samerun.preempt.budget import finishing_fits
from samerun.preempt.spans import Spans
from samerun.preempt.votes import MAX_POINTS, Votes, points
from samerun.ranks.board import Board, SoloBoard


class EachItsOwn:
    """A board that is none: every rank reads its own word. Without the first word's staying, ranks part."""

    def first(self, name: str, word: str) -> str:
        return word

    def forget(self, name: str) -> None:
        return None


class OutOfReach(EachItsOwn):
    def first(self, name: str, word: str) -> str:
        raise PeerError("nobody answers")


def rank_on(board: Board, said: list[str] | None = None) -> Votes:
    votes = Votes(board, ManualClock(), leads=True, say=(said if said is not None else []).append)
    votes.begin(0, 8)
    return votes


def ends(board: Board, order: list[int], told: dict[int, int], num_ranks: int) -> list[int | None]:
    """Where each rank left, if `order` says who comes to its next microbatch; rank r is told after told[r] of them."""
    ranks = [rank_on(board) for _ in range(num_ranks)]
    at, left = [0] * num_ranks, [None] * num_ranks
    for rank in [*order, *(r for r in range(num_ranks) for _ in range(8))]:
        if left[rank] is None and at[rank] < 8:
            is_told = at[rank] >= told.get(rank, 99)
            if ranks[rank].is_dropped_at(at[rank], lambda _, now=is_told: now):
                left[rank] = at[rank]
                continue
            at[rank] += 1
            if at[rank] == told.get(rank, 99):
                ranks[rank].noticed(lambda _: True)
    return left


worlds = st.integers(2, 4).flatmap(
    lambda n: st.tuples(
        st.just(n),
        st.lists(st.integers(0, n - 1), max_size=40),
        st.dictionaries(st.integers(0, n - 1), st.integers(0, 8)),
    )
)


@given(worlds)
def test_all_leave_at_the_same_point_or_none(world: tuple[int, list[int], dict[int, int]]) -> None:
    num_ranks, order, told = world
    left = ends(SoloBoard(), order, told, num_ranks)
    assert len(set(left)) == 1, left
    if not told or min(told.values()) > 7:
        assert left[0] is None
    elif left[0] is not None:
        assert left[0] >= min(told.values())


def test_control_without_a_common_board_ranks_part() -> None:
    assert ends(EachItsOwn(), [], {1: 3}, 2) == [None, 3]


def test_in_step_the_microbatch_that_follows_the_notice_is_the_one() -> None:
    """Ranks that meet in every microbatch: told in the middle of the third, all leave before the fourth."""
    assert ends(SoloBoard(), [0, 1, 0, 1, 1, 0], {1: 3}, 2) == [3, 3]


def test_a_rank_that_was_told_too_late_finishes_with_its_peers() -> None:
    assert ends(SoloBoard(), [0] * 8, {1: 2}, 2) == [None, None]


def test_a_board_that_cannot_be_reached_is_said_once_and_stops_nothing() -> None:
    said: list[str] = []
    votes = rank_on(OutOfReach(), said)
    assert not any(votes.is_dropped_at(slot, lambda _: True) for slot in range(8))
    votes.decided()
    votes.begin(1, 8)
    assert not votes.is_dropped_at(0, lambda _: True)
    assert len(said) == 1 and "nobody answers" in said[0]


def test_words_of_decided_windows_are_taken_away() -> None:
    board = SoloBoard()
    votes = rank_on(board)
    for slot in range(8):
        votes.is_dropped_at(slot, lambda _: False)
    votes.decided()
    assert board.first("window-0.microbatch-3", "free") == "free"


@pytest.mark.parametrize("num_shared", [0, 1, 7, 8, 9, 13, 1000])
def test_points_are_few_and_inside(num_shared: int) -> None:
    found = points(num_shared)
    assert len(found) <= MAX_POINTS and all(0 <= slot < num_shared for slot in found)
    assert (0 in found) == (num_shared > 0)


def test_the_rest_of_a_window_is_the_longest_that_it_took_from_the_same_point() -> None:
    clock, seen = ManualClock(), []
    votes = Votes(SoloBoard(), clock, leads=True, say=seen.append)
    for window, pace in enumerate([10.0, 30.0, 10.0]):
        votes.begin(window, 3)
        for slot in range(3):
            votes.is_dropped_at(slot, lambda left, at=(window, slot): bool(seen.append((*at, left))))
            clock.advance(pace)
        votes.decided()
    assert seen[:3] == [(0, 0, None), (0, 1, None), (0, 2, None)]
    assert seen[3:] == [(1, 0, 30.0), (1, 1, 20.0), (1, 2, 10.0), (2, 0, 90.0), (2, 1, 60.0), (2, 2, 30.0)]


@pytest.mark.parametrize(
    ("seconds_left", "window_left", "save", "expected"),
    [
        (34.0, 20.0, 10.0, True),
        (33.9, 20.0, 10.0, False),
        (None, 1e9, 10.0, True),  # nobody said how long there is
        (5.0, None, 10.0, True),  # unmeasured
        (24.0, 20.0, None, True),
        (-1.0, 0.0, 0.0, False),
    ],
)
def test_finishing_fits(
    seconds_left: float | None, window_left: float | None, save: float | None, expected: bool
) -> None:
    fits = finishing_fits(
        seconds_left=seconds_left, window_left_seconds=window_left, save_seconds=save, margin_seconds=2.0
    )
    assert fits is expected


def test_a_span_ends_at_a_look_and_is_named_after_what_took_most_of_it() -> None:
    clock = ManualClock()
    spans = Spans(clock)
    clock.advance(3.0)
    spans.enter("loop body")
    clock.advance(1.0)
    spans.enter("evaluate")
    clock.advance(40.0)
    spans.enter("loop body")
    spans.look()
    assert str(spans) == "44.0 s (evaluate)"
    for _ in range(5):
        clock.advance(30.0)
        spans.look()
    assert str(spans) == "44.0 s (evaluate)"


def test_opening_and_the_first_window_are_no_measure() -> None:
    clock = ManualClock()
    spans = Spans(clock, num_left_out=2)
    for seconds in (100.0, 300.0, 5.0, 7.0, 6.0):
        clock.advance(seconds)
        spans.look()
    assert spans.longest_seconds == 7.0
