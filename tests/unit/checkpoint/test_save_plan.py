"""The plan: each chunk written once by one who holds it, loads even, the same whoever computes it."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samerun.checkpoint.save.plan import View, plan_save
from samerun.errors import UsageError
from samerun.format.layout import prove_partition

WHOLE = {"whole": True}


def mesh(ranks: list[int], shape: list[int], dims: list[int | None]) -> dict[str, Any]:
    return {"mesh": ranks, "shape": shape, "dims": dims}


CUTS: list[tuple[dict[str, Any], int]] = [
    (WHOLE, 4),
    (mesh([0, 1, 2, 3], [4], [0]), 1),
    (mesh([0, 1, 2, 3], [4], [1]), 1),
    (mesh([0, 1, 2, 3], [2, 2], [None, 0]), 2),
    (mesh([0, 1, 2, 3], [2, 2], [0, None]), 2),
    (mesh([3, 2, 1, 0], [2, 2], [0, 1]), 1),
    (mesh([0, 1, 2, 3], [2, 2], [None, None]), 4),
]


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 13), st.integers(1, 9)), min_size=1, max_size=12))
def test_every_element_is_written_once_by_a_holder(items: list[tuple[int, int, int]]) -> None:
    description = {f"w/{n}": ("float32", [rows, columns], CUTS[cut][0]) for n, (cut, rows, columns) in enumerate(items)}
    plan = plan_save([View(ranks=(0, 1, 2, 3), description=description)], 4)
    assert plan == plan_save([View(ranks=(0, 1, 2, 3), description=dict(reversed(description.items())))], 4)
    counts: Counter[int] = Counter()
    for path, (_, shape, _) in description.items():
        boxes = [box for rank in range(4) for box in plan.boxes_of(path, rank)]
        prove_partition(shape, boxes, where=path)
        for rank in range(4):
            counts[rank] += len(plan.boxes_of(path, rank))
    assert [counts[rank] for rank in range(4)] == plan.num_chunks
    total = sum(4 * shape[0] * shape[1] for _, shape, _ in description.values())
    assert sum(plan.num_bytes) == total


def test_replicas_share_the_work_within_the_greedy_bound() -> None:
    sizes = [977, 500, 499, 300, 299, 130, 61, 60, 7, 1]
    description = {f"w/{n}": ("uint8", [size], WHOLE) for n, size in enumerate(sizes)}
    plan = plan_save([View(ranks=(0, 1, 2), description=description)], 3)
    assert max(plan.num_bytes) <= max(sizes[0], 4 / 3 * sum(sizes) / 3)


def test_a_mesh_position_is_the_rank_that_the_mesh_says() -> None:
    description = {"w/a": ("float32", [4, 4], mesh([3, 2, 1, 0], [2, 2], [0, 1]))}
    plan = plan_save([View(ranks=(0, 1, 2, 3), description=description)], 4)
    assert [box.offsets for box in plan.boxes_of("w/a", 3)] == [(0, 0)]
    assert [box.offsets for box in plan.boxes_of("w/a", 2)] == [(0, 2)]
    assert [box.offsets for box in plan.boxes_of("w/a", 1)] == [(2, 0)]


def test_pipeline_stages_describe_different_tensors() -> None:
    first = View(ranks=(0, 1), description={"w/a": ("float32", [8], WHOLE)})
    second = View(ranks=(2, 3), description={"w/b": ("float32", [8], WHOLE)})
    plan = plan_save([first, second], 4)
    writers = {path: [rank for rank in range(4) if plan.boxes_of(path, rank)] for path in ("w/a", "w/b")}
    assert writers["w/a"][0] in (0, 1)
    assert writers["w/b"][0] in (2, 3)
    assert all(len(ranks) == 1 for ranks in writers.values())


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (("float32", [4], WHOLE), ("float32", [5], WHOLE), "must agree on a tensor"),
        (("float32", [4], WHOLE), ("float64", [4], WHOLE), "must agree on a tensor"),
        (("float32", [4], WHOLE), ("float32", [4], {"parts": []}), "in different ways"),
        (("float32", [4], {"parts": [[[0], [2]]]}), ("float32", [4], {"parts": [[[1], [3]]]}), "hold 5 elements"),
        (("float32", [4], {"parts": [[[0], [2]]]}), ("float32", [4], {"parts": []}), "hold 2 elements"),
        (
            ("float32", [4], {"parts": [[[0], [2]], [[0], [2]]]}),
            ("float32", [4], {"parts": [[[1], [2]]]}),
            "overlap",
        ),
        (("float32", [4], mesh([0, 1], [2], [0])), ("float32", [4], mesh([1, 0], [2], [0])), "different meshes"),
        (("float32", [4], mesh([0, 2], [2], [0])), ("float32", [4], mesh([0, 2], [2], [0])), "different meshes"),
    ],
)
def test_contradictions_and_gaps_are_refused(first: Any, second: Any, message: str) -> None:
    views = [View(ranks=(0,), description={"w/a": first}), View(ranks=(1,), description={"w/a": second})]
    with pytest.raises(UsageError, match=message):
        plan_save(views, 2)


def test_a_thousand_ranks_share_one_layout_for_all_tensors_that_are_cut_alike() -> None:
    cut = mesh(list(range(1024)), [1024], [0])
    description = {f"w/{n}": ("bfloat16", [4096 + n % 3, 64], cut) for n in range(64)}
    plan = plan_save([View(ranks=tuple(range(1024)), description=description)], 1024)
    assert len(plan.layouts) == 1
