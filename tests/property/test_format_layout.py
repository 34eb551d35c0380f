"""Grids, boxes and the proof of coverage against brute force over every element."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from samerun.errors import DamagedError
from samerun.format.layout import Box, grid_box, grid_positions, piece, prove_partition, whole

SHAPES = st.lists(st.integers(0, 7), min_size=0, max_size=3).map(tuple)


@st.composite
def grids(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...]]:
    shape = draw(SHAPES)
    return shape, tuple(draw(st.integers(1, 5)) for _ in shape)


@st.composite
def boxes_in(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    spans = [sorted((draw(st.integers(0, n)), draw(st.integers(0, n)))) for n in shape]
    return Box(tuple(a for a, _ in spans), tuple(b - a for a, b in spans))


def elements(box: Box) -> set[tuple[int, ...]]:
    return set(itertools.product(*(range(o, o + n) for o, n in zip(box.offsets, box.lengths, strict=True))))


@given(st.integers(1, 40), st.integers(1, 9))
def test_a_piece_is_what_torch_chunk_gives(size: int, pieces: int) -> None:
    chunks = [chunk.tolist() for chunk in torch.arange(size).chunk(pieces)]
    ours = [list(range(start, start + length)) for start, length in (piece(size, pieces, i) for i in range(pieces))]
    assert [chunk for chunk in ours if chunk] == chunks
    assert all(0 <= start <= size for start, _ in (piece(size, pieces, i) for i in range(pieces)))


@given(grids())
def test_a_grid_covers_every_element_once(case: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    shape, grid = case
    count = 1
    for pieces in grid:
        count *= pieces
    boxes = [grid_box(shape, grid, position) for position in range(count)]
    prove_partition(shape, boxes, where="t")
    listed = [element for box in boxes for element in elements(box)]
    assert sorted(listed) == sorted(elements(whole(shape)))


@given(st.data(), grids())
def test_the_positions_that_meet_a_box_are_found_without_looking_at_all(
    data: st.DataObject, case: tuple[tuple[int, ...], tuple[int, ...]]
) -> None:
    shape, grid = case
    target = data.draw(boxes_in(shape))
    count = 1
    for pieces in grid:
        count *= pieces
    meeting = {p for p in range(count) if grid_box(shape, grid, p).meet(target) is not None and target.volume}
    found = list(grid_positions(shape, grid, target))
    assert len(found) == len(set(found))
    assert meeting == {p for p in found if grid_box(shape, grid, p).meet(target) is not None}


@given(st.data(), SHAPES)
@settings(max_examples=300)
def test_a_partition_is_proven_exactly_when_it_is_one(data: st.DataObject, shape: tuple[int, ...]) -> None:
    boxes = data.draw(st.lists(boxes_in(shape), max_size=4))
    counts: dict[tuple[int, ...], int] = dict.fromkeys(elements(whole(shape)), 0)
    for box in boxes:
        for element in elements(box):
            counts[element] += 1
    is_partition = all(count == 1 for count in counts.values())
    if is_partition:
        prove_partition(shape, boxes, where="t")
    else:
        with pytest.raises(DamagedError, match="t: "):
            prove_partition(shape, boxes, where="t")


@given(st.data(), SHAPES)
def test_meeting_is_intersection(data: st.DataObject, shape: tuple[int, ...]) -> None:
    a, b = data.draw(boxes_in(shape)), data.draw(boxes_in(shape))
    common = a.meet(b)
    assert (elements(common) if common else set()) == elements(a) & elements(b)
    if common:
        assert elements(common.within(a)) == {
            tuple(x - o for x, o in zip(element, a.offsets, strict=True)) for element in elements(common)
        }
