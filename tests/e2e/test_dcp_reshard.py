"""Any world loads what any world saved, through dcp.save and dcp.load: meshes, wrappings, odd sizes, empty shards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rank_pool import RankPool

CALL = "unit.dcp.dcp_ranks"
MIB = 2**20
TENSOR_CASES = [
    ([4], "0", [8], "0"),
    ([8], "0", [4], "1"),
    ([3], "0", [5], "0"),
    ([2], "1", [1], "0"),
    ([2, 2], "R0", [3], "0"),
    ([2, 4], "01", [4], "0"),
    ([4], "0", [2, 4], "10"),
    ([2, 2], "00", [3], "1"),
    ([3], "R", [2, 2], "0R"),
]
TRAINING_CASES = [
    ("fsdp", 4, "fsdp", 8),
    ("fsdp", 8, "fsdp", 4),
    ("fsdp", 3, "fsdp", 5),
    ("fsdp", 2, "fsdp", 1),
    ("tp", 2, "tp", 4),
    ("2d", 4, "2d", 8),
    ("2d", 8, "fsdp", 3),
    ("fsdp", 4, "2d", 4),
    ("hsdp", 4, "fsdp", 2),
    ("fsdp", 3, "hsdp", 4),
    ("ddp", 2, "fsdp", 4),
    ("fsdp", 4, "ddp", 2),
    ("ddp", 4, "ddp", 3),
]


def quick(cases: list[Any], *numbers: int) -> list[Any]:
    """These cases in every run, the others in the long one: eight ranks take their time on two cores."""
    return [case if n in numbers else pytest.param(*case, marks=pytest.mark.soak) for n, case in enumerate(cases)]


def world(mesh: list[int]) -> int:
    size = 1
    for number in mesh:
        size *= number
    return size


@pytest.mark.parametrize(
    ("before", "cut", "after", "other_cut", "planner"),
    quick([*((*case, "ours") for case in TENSOR_CASES), *((*case, "stock") for case in TENSOR_CASES[:3])], 0, 2, 3, 5),
)
def test_any_mesh_loads_what_any_mesh_saved(
    ranks: RankPool, tmp_path: Path, before: list[int], cut: str, after: list[int], other_cut: str, planner: str
) -> None:
    place = {"path": str(tmp_path / "a"), "planner": planner}
    ranks.run(world(before), f"{CALL}:save_tensors", **place, mesh_shape=before, word=cut)
    answers = ranks.run(world(after), f"{CALL}:load_tensors", **place, mesh_shape=after, word=other_cut)
    assert answers == [[]] * world(after)


@pytest.mark.parametrize(("before", "num_before", "after", "num_after"), quick(TRAINING_CASES, 0, 2, 3, 10))
def test_a_training_comes_back_in_any_wrapping(
    ranks: RankPool, tmp_path: Path, before: str, num_before: int, after: str, num_after: int
) -> None:
    place = {"path": str(tmp_path / "a"), "planner": "ours"}
    saved = ranks.run(num_before, f"{CALL}:save_training", **place, kind=before)
    loaded = ranks.run(num_after, f"{CALL}:load_training", **place, kind=after)
    assert all(state == saved[0] for state in [*saved, *loaded])
    assert set(saved[0]["model"]) == {
        f"{layer}.{kind}" for layer in ("up", "down", "norm") for kind in ("weight", "bias")
    }


def test_only_wanted_slices_are_read_in_bounded_memory(ranks: RankPool, tmp_path: Path) -> None:
    size = {"path": str(tmp_path / "a"), "num_mib": 512}
    ranks.run(4, f"{CALL}:save_large", **size)
    answers = ranks.run(8, f"{CALL}:load_large", **size, saved_on=4)
    for answer in answers:
        assert answer["right"]
        assert answer["wanted"] == 64 * MIB and answer["read"] == answer["verified"]
        assert answer["read"] <= answer["wanted"] + 4 * MIB  # it begins and ends inside a block: one more than it fills
        assert answer["grown"] <= 64 * MIB + 4 * MIB
    assert sum(a["read"] for a in answers) / sum(a["wanted"] for a in answers) <= 1.05
