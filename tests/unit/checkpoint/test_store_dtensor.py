"""DTensors of a real process group: 1-D and 2-D meshes, replicas written once, any mesh back from any other."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from rank_pool import RankPool
from samerun.checkpoint import Store
from unit.checkpoint.dtensor_ranks import SHAPES, tensor

CALL = "unit.checkpoint.dtensor_ranks"
CASES = [
    ([4], "0", [2], "0"),
    ([2], "0", [4], "1"),
    ([3], "0", [4], "0"),
    ([2, 2], "R0", [3], "0"),
    ([2, 2], "01", [2, 2], "10"),
    ([2, 2], "00", [3], "1"),
    ([4], "1", [2, 2], "00"),
    ([2], "R", [2, 2], "0R"),
]


@pytest.mark.parametrize(("before", "cut", "after", "other_cut"), CASES)
def test_any_mesh_loads_what_any_mesh_saved(
    ranks: RankPool, tmp_path: Path, before: list[int], cut: str, after: list[int], other_cut: str
) -> None:
    world = torch.Size(before).numel()
    ranks.run(world, f"{CALL}:save", path=str(tmp_path), mesh_shape=before, word=cut)
    world = torch.Size(after).numel()
    answers = ranks.run(world, f"{CALL}:load", path=str(tmp_path), mesh_shape=after, word=other_cut)
    assert answers == [[]] * world
    store = Store(tmp_path)
    with store.open(store.catalog().entries[0]) as checkpoint:
        for number in range(len(SHAPES)):
            target = torch.full(SHAPES[number], -1.0)
            checkpoint.source("weights").read_into(str(number), target)
            assert torch.equal(target, tensor(number))


def test_replicas_are_written_once_and_shared_out(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(4, f"{CALL}:save", path=str(tmp_path), mesh_shape=[2, 2], word="R0")
    elements: Counter[str] = Counter()
    files = sorted(tmp_path.glob("checkpoints/*/*.safetensors"))
    for path in files:
        with safe_open(str(path), framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  # it is no dict
                elements[name.split("@")[0]] += file.get_tensor(name).numel()
    assert elements == {f"weights/{n}": torch.Size(shape).numel() for n, shape in enumerate(SHAPES) if 0 not in shape}
    assert len(files) == 4


def test_a_partial_dtensor_is_refused(ranks: RankPool, tmp_path: Path) -> None:
    for text in ranks.run(2, f"{CALL}:save_partial", path=str(tmp_path)):
        assert "Partial placement has no value yet" in text
