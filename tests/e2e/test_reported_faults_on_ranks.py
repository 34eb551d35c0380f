"""Faults that users of other trainers reported of several ranks, each as a test named after its kind."""

from __future__ import annotations

from pathlib import Path

import pytest

from rank_pool import RankPool
from samerun.checkpoint import Store

JOBS = "report_jobs"
MIB = 2**20


@pytest.mark.parametrize("low", [False, True], ids=["float32", "bfloat16 forwards"])
def test_a_load_takes_effect_before_any_update(ranks: RankPool, tmp_path: Path, low: bool) -> None:
    saved = ranks.run(2, f"{JOBS}:some_windows", path=str(tmp_path), until=2, low=low)
    loaded = ranks.run(2, f"{JOBS}:some_windows", path=str(tmp_path), until=3, low=low, seed=99)
    for before, after in zip(saved, loaded, strict=True):
        assert after[0]["updates"] == 2
        assert after[0]["probe"] == before[1]["probe"]


def test_memory_loads_before_and_after_wrapping_and_an_optimizer_of_before_is_refused(
    ranks: RankPool, tmp_path: Path
) -> None:
    saved = ranks.run(2, f"{JOBS}:some_windows", path=str(tmp_path), until=2)
    for answer, rank in zip(ranks.run(2, f"{JOBS}:before_and_after_wrapping", path=str(tmp_path)), saved, strict=True):
        held = rank[1]["held"]
        assert answer["wrapped"] == answer["bare"] == held
        assert answer["then wrapped"] == {name: held[name] for name in answer["then wrapped"]}
        assert len(answer["then wrapped"]) == 4
        assert "that no model given here owns" in answer["optimizer first"]


def test_forwards_without_gradients_change_nothing_in_a_sharded_training(ranks: RankPool, tmp_path: Path) -> None:
    """They leave whole copies in the place of shards: neither a save, a restore nor an update may take those."""
    job = f"{JOBS}:sharded_with_forwards"
    twin = ranks.run(2, job, path=str(tmp_path / "twin"), until=4, looks=False)
    ranks.run(2, job, path=str(tmp_path / "run"), until=2, looks=True)
    assert ranks.run(2, job, path=str(tmp_path / "run"), until=4, looks=True) == twin


def test_a_look_between_backward_and_update_leaves_no_old_weights_behind(ranks: RankPool) -> None:
    job = f"{JOBS}:steps_with_forwards"
    assert ranks.run(2, job, look=True) == ranks.run(2, job, look=False)


def test_a_warm_start_takes_effect_in_a_model_that_has_run_a_forward(ranks: RankPool, tmp_path: Path) -> None:
    job = f"{JOBS}:sharded_with_forwards"
    saved = ranks.run(2, job, path=str(tmp_path), until=1, looks=False)
    for loaded in ranks.run(2, f"{JOBS}:warm_started_after_a_forward", path=str(tmp_path)):
        assert loaded == {name: saved[0][name] for name in loaded} and len(loaded) == 4


def test_a_load_takes_no_more_memory_than_the_state_it_leaves(ranks: RankPool, tmp_path: Path) -> None:
    """24 MiB of weights, 48 of moments, one file of 72: no second copy of any of them, not even for a moment."""
    ranks.run(1, f"{JOBS}:large_saved", path=str(tmp_path))
    (answer,) = ranks.run(1, f"{JOBS}:large_resumed", path=str(tmp_path))
    assert 44 * MIB <= answer["held"] <= 60 * MIB
    assert answer["above"] <= 12 * MIB  # a few blocks, and what an allocator keeps; a weight matrix has 4


@pytest.mark.parametrize("trials", [8, pytest.param(50, marks=pytest.mark.soak)])
def test_one_rank_of_two_is_told_at_any_time_and_both_stop_at_the_same_edge(
    ranks: RankPool, tmp_path: Path, trials: int
) -> None:
    ends = ranks.run(2, f"{JOBS}:told_at_any_time", path=str(tmp_path), trials=trials, seed=7)
    assert len(ends[0]) == len(ends[1]) == trials
    for one, other in zip(*ends, strict=True):
        assert {one[0].partition(",")[0], other[0].partition(",")[0]} == {
            "stopped by SIGTERM",
            "stopped by a notice on another rank",
        }
        assert one[0].partition(",")[2] == other[0].partition(",")[2] and one[1] == other[1] == 75
    assert Store(tmp_path).catalog().entries[0].name in ends[0][-1][0]


@pytest.mark.parametrize("worlds", [(2, 3, 2), pytest.param((4, 8, 2, 4), marks=pytest.mark.soak)])
def test_contracted_and_expanded_again_holds_the_same_full_tensors(
    ranks: RankPool, tmp_path: Path, worlds: tuple[int, ...]
) -> None:
    """Sharded over other numbers of ranks, each start by itself from where the one before stopped."""
    before = None
    for number, world_size in enumerate(worlds, start=1):
        answers = ranks.run(world_size, f"{JOBS}:some_windows", path=str(tmp_path), until=2 * number, seed=number)
        first, last = answers[0]
        assert all(answer[0]["held"] == first["held"] for answer in answers)
        assert (first["updates"], last["updates"]) == (2 * number - 2, 2 * number)
        if before is not None:
            assert first["held"] == before["held"]
        assert first["held"] != last["held"] and len(last["held"]) == 4 * 4
        before = last
