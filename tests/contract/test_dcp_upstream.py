"""What PyTorch's own tests of file-system checkpoints state, as a contract: docs/dcp.md lists which cases apply."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rank_pool import RankPool

CALL = "unit.dcp.dcp_ranks"
BY_ROWS: list[Any] = [
    [0, [[0, 5, 0], [5, 5, 1]]],
    [0, [[0, 3, 0], [3, 3, 1], [6, 3, 1], [9, 1, 0]]],
    [0, [[0, 2, 0], [2, 1, 1], [3, 3, 0], [6, 3, 1], [9, 1, 0]]],
    [0, [[0, 8, 1], [8, 2, 0]]],
]
ROWS_AND_COLUMNS: list[Any] = [BY_ROWS[0], [1, [[0, 10, 0], [10, 10, 1]]], [1, [[0, 1, 1], [1, 12, 0], [13, 7, 1]]]]
PLAIN_AND_SHARDED: list[Any] = [None, [0, [[0, 8, 1], [8, 24, 0]]], [0, [[0, 10, 0], [10, 22, 1]]]]


@pytest.mark.parametrize("planner", ["ours", "stock"])
@pytest.mark.parametrize(
    ("shape", "plans"),
    [([10, 20], BY_ROWS), ([10, 20], ROWS_AND_COLUMNS), ([32], PLAIN_AND_SHARDED)],
    ids=["several pieces on a rank", "rows to columns", "plain to sharded"],
)
def test_sharded_tensors_change_their_cut(
    ranks: RankPool, tmp_path: Path, shape: list[int], plans: list[Any], planner: str
) -> None:
    call = f"{CALL}:reshard_sharded"
    assert ranks.run(2, call, path=str(tmp_path), shape=shape, plans=plans, planner=planner) == [[], []]


@pytest.mark.parametrize("kind", ["value", "rng"])
def test_state_of_each_rank_under_one_key_is_refused(ranks: RankPool, tmp_path: Path, kind: str) -> None:
    place = str(tmp_path / "a")
    for text in ranks.run(3, f"{CALL}:save_own_state", path=place, planner="ours", kind=kind):
        assert "own: ranks 0 and 1 hold different values under this one key" in text
    assert not Path(place).exists()
    answers = ranks.run(3, f"{CALL}:save_own_state", path=str(tmp_path / "b"), planner="ours", kind="alike")
    assert answers == ["saved"] * 3


def test_stock_keeps_the_state_of_one_rank_for_all(ranks: RankPool, tmp_path: Path) -> None:
    place = {"path": str(tmp_path / "a"), "planner": "stock"}
    assert ranks.run(3, f"{CALL}:save_own_state", **place, kind="value") == ["saved"] * 3
    assert len(set(ranks.run(3, f"{CALL}:load_own_state", **place))) == 1


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("dtype", "float32 .2. ?, rank 1"),
        ("shape", r"\[2\], rank 1 torch.float32 \[3\]"),
        ("kind", "a plain value, rank 1"),
    ],
)
def test_ranks_that_disagree_are_refused_by_key(ranks: RankPool, tmp_path: Path, what: str, words: str) -> None:
    for text in ranks.run(2, f"{CALL}:disagreeing", path=str(tmp_path / "a"), what=what):
        assert text.startswith("UsageError: w: rank 0 holds")


def test_a_path_that_ranks_do_not_share_is_noticed(ranks: RankPool, tmp_path: Path) -> None:
    for text in ranks.run(2, f"{CALL}:not_shared", path=str(tmp_path)):
        assert "this rank does not see it; is it shared by all?" in text
    assert not list(tmp_path.rglob("manifest.json"))


def test_a_plan_cache_on_several_ranks(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(3, f"{CALL}:cached_saves", path=str(tmp_path / "ours"), planner="ours") == [[], [], []]
    for wrong in ranks.run(3, f"{CALL}:cached_saves", path=str(tmp_path / "stock"), planner="stock"):
        assert len(wrong) == 1 and wrong[0].startswith("2: w: planned were torch.float32")


def test_a_full_disk_on_one_rank_is_everybodys_error(ranks: RankPool, tmp_path: Path) -> None:
    answers = ranks.run(3, f"{CALL}:one_rank_fails", path=str(tmp_path / "a"))
    assert answers == ["28"] * 3
    assert not list(tmp_path.rglob("manifest.json"))


@pytest.mark.parametrize("process", [False, True], ids=["thread", "process"])
def test_saves_in_the_background(ranks: RankPool, tmp_path: Path, process: bool) -> None:
    answers = ranks.run(2, f"{CALL}:asynchronous", path=str(tmp_path / "a"), process=process)
    assert answers == [[], []]
