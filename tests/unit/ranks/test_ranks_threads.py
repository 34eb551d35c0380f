"""Ranks as threads: real blocking collectives, and a rank that leaves releases the others."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from samerun.errors import PeerError
from samerun.ranks.group import Group, Solo
from samerun.ranks.threads import ThreadGroup, run_ranks


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_gather_is_in_rank_order_on_every_rank(size: int) -> None:
    def body(group: ThreadGroup) -> list[Any]:
        return [group.gather({"rank": group.rank, "turn": turn}) for turn in range(5)]

    expected = [[{"rank": rank, "turn": turn} for rank in range(size)] for turn in range(5)]
    assert run_ranks(size, body) == [expected] * size


def test_broadcast_is_rank_zeros() -> None:
    assert run_ranks(3, lambda group: group.broadcast(f"from {group.rank}")) == ["from 0"] * 3


def test_values_pass_through_json_as_between_processes() -> None:
    assert run_ranks(2, lambda group: group.gather((1, 2))[0]) == [[1, 2]] * 2
    with pytest.raises(TypeError, match="not JSON serializable"):
        run_ranks(2, lambda group: group.gather({1, 2}))


def test_no_rank_passes_a_barrier_before_the_last_has_come() -> None:
    arrived: list[int] = []
    lock = threading.Lock()

    def body(group: ThreadGroup) -> int:
        with lock:
            arrived.append(group.rank)
        group.barrier()
        return len(arrived)

    assert run_ranks(4, body) == [4] * 4


def test_a_rank_that_fails_releases_the_others_and_its_own_error_is_raised() -> None:
    seen: list[str] = []

    def body(group: ThreadGroup) -> None:
        if group.rank == 1:
            raise KeyError("mine")
        try:
            group.barrier()
        except PeerError as error:
            seen.append(str(error))
            raise

    with pytest.raises(KeyError, match="mine"):
        run_ranks(3, body)
    assert sorted(seen) == [f"rank {rank}: a peer left or did not answer in time" for rank in (0, 2)]


def test_a_rank_that_leaves_early_is_an_error_for_those_who_wait() -> None:
    with pytest.raises(PeerError, match="a peer left or did not answer in time"):
        run_ranks(2, lambda group: group.barrier(seconds=0.2) if group.rank == 0 else None)


def test_a_world_of_one_answers_itself() -> None:
    group: Group = Solo()
    group.barrier()
    assert (group.rank, group.size, group.gather(7), group.broadcast("x")) == (0, 1, [7], "x")
