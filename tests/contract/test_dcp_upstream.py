"""What PyTorch's own tests of file-system checkpoints state, as a contract: docs/dcp.md lists which cases apply."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

from rank_pool import RankPool
from samerun.dcp import LoadPlanner, Reader, SavePlanner, Writer, real_errors
from samerun.errors import CheckpointError, UsageError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")

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


@pytest.mark.soak  # the pool starts anew after it
def test_a_rank_killed_in_a_save_is_an_error_of_the_others_and_nothing_is_published(
    ranks: RankPool, tmp_path: Path
) -> None:
    place, report = tmp_path / "a", tmp_path / "report"
    with pytest.raises(RuntimeError, match="rank 1 died with code -9"):
        ranks.run(2, f"{CALL}:killed_in_a_save", path=str(place), report=str(report))
    assert report.read_text().startswith(("RuntimeError: ", "DistBackendError: ", "DistNetworkError: "))
    assert list(place.glob("rank-00001.*"))  # it had written all that it was to write
    assert not (place / "manifest.json").exists()
    with pytest.raises(CheckpointError, match="no manifest"), real_errors():
        dcp.load({}, storage_reader=Reader(place), planner=LoadPlanner(partial=True))


def test_parts_that_load_collectively_do_so_in_one_order(ranks: RankPool, tmp_path: Path) -> None:
    assert ranks.run(2, f"{CALL}:keys_in_another_order", path=str(tmp_path / "a")) == [["a", "b", "c"]] * 2


class Watched(dict[str, Any]):
    """A state that tells which of its keys were replaced."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.replaced: list[str] = []

    def __setitem__(self, key: str, value: Any) -> None:
        self.replaced.append(key)
        super().__setitem__(key, value)


class Part:
    def __init__(self) -> None:
        self.loaded = False

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loaded = True


PLANNERS: dict[str, Any] = {
    "ours": (SavePlanner, LoadPlanner),
    "stock": (dcp.DefaultSavePlanner, dcp.DefaultLoadPlanner),
}


def save(state: dict[str, Any], path: Path, planner: str = "ours") -> None:
    with real_errors():
        dcp.save(state, storage_writer=Writer(path), planner=PLANNERS[planner][0]())


def load(state: dict[str, Any], path: Path, planner: str = "ours") -> None:
    with real_errors():
        dcp.load(state, storage_reader=Reader(path), planner=PLANNERS[planner][1]())


@pytest.mark.parametrize("planner", PLANNERS)
def test_a_part_is_loaded_in_place_and_a_plain_value_is_replaced(tmp_path: Path, planner: str) -> None:
    part, state = Part(), Watched()
    state["part"] = part
    state["values"] = {"w": torch.arange(7), "numbers": [1, 2, 3]}
    save(state, tmp_path / "a", planner)
    state.replaced.clear()
    load(state, tmp_path / "a", planner)
    assert part.loaded
    assert state.replaced == ["values"]
    assert state["part"] is part


@pytest.mark.parametrize("planner", PLANNERS)
def test_nothing_at_all_is_a_state_too(tmp_path: Path, planner: str) -> None:
    save({}, tmp_path / "a", planner)
    load({}, tmp_path / "a", planner)


@pytest.mark.parametrize("planner", PLANNERS)
def test_a_part_of_the_keys_is_read_by_name(tmp_path: Path, planner: str) -> None:
    moments = {"w": {"exp_avg": torch.full((7,), 2.0), "step": torch.tensor(3.0)}}
    save({"model": {"w": torch.arange(7.0)}, "optimizer": {"state": moments, "lr": 0.1}}, tmp_path / "a", planner)
    found = _load_state_dict_from_keys("model", storage_reader=Reader(tmp_path / "a"))
    assert found.keys() == {"model"}
    assert torch.equal(found["model"]["w"], torch.arange(7.0))
    state = _load_state_dict_from_keys("optimizer.state", storage_reader=Reader(tmp_path / "a"))["optimizer"]
    assert state.keys() == {"state"}
    assert torch.equal(state["state"]["w"]["exp_avg"], moments["w"]["exp_avg"])
    assert torch.equal(state["state"]["w"]["step"], moments["w"]["step"])


@pytest.mark.parametrize("planner", PLANNERS)
def test_model_and_optimizer_come_back_in_place_with_their_options(tmp_path: Path, planner: str) -> None:
    def made(lr: float) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model = torch.nn.Sequential(torch.nn.Linear(7, 13), torch.nn.Linear(13, 2))
        return model, torch.optim.Adam(model.parameters(), lr=lr)

    def state_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        return {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}

    saved = state_of(*made(0.1))
    save(saved, tmp_path / "a", planner)
    model, optimizer = made(0.2)
    state = state_of(model, optimizer)
    weights, memory = state["model"], state["optimizer"]
    load(state, tmp_path / "a", planner)
    assert state["model"] is weights
    assert state["optimizer"] is memory
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=memory)
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert all(torch.equal(value, saved["model"][key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize("planner", PLANNERS)
def test_a_buffer_object_is_refused_by_key_and_its_bytes_are_stored(tmp_path: Path, planner: str) -> None:
    with pytest.raises(UsageError, match=r"losses\.data"):
        save({"losses": {"data": io.BytesIO(b"1")}}, tmp_path / "a", planner)
    save({"losses": {"data": b"1"}}, tmp_path / "b", planner)
    state = {"losses": {"data": b""}}
    load(state, tmp_path / "b", planner)
    assert state == {"losses": {"data": b"1"}}
