"""Charts: nothing extreme is lost, nothing from outside is markup, axes are those that people would draw."""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samerun.report.chart import Line, Mark, Point, chart, thinned, ticks


def drawn(line: str) -> list[Point]:
    found = re.search(r'points="([^"]*)"', line)
    assert found is not None
    return [(float(x), float(y)) for x, y in (pair.split(",") for pair in found[1].split())]


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 10, [0, 2, 4, 6, 8, 10]),
        (0.3, 0.9, [0.4, 0.6, 0.8]),
        (-1, 1, [-1, -0.5, 0, 0.5, 1]),
        (0, 1e12, [0, 2e11, 4e11, 6e11, 8e11, 1e12]),
        (7, 7, [7]),
    ],
)
def test_ticks_are_round_numbers(low: float, high: float, expected: list[float]) -> None:
    assert ticks(low, high) == pytest.approx(expected)


@given(st.floats(-1e9, 1e9), st.floats(1e-9, 1e9))
def test_ticks_lie_inside_and_are_few(low: float, span: float) -> None:
    high = low + span
    if high > low:
        found = ticks(low, high)
        room = 1e-6 * span
        assert 2 <= len(found) <= 7
        assert all(low - room <= tick <= high + room for tick in found)


@given(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=400), st.integers(1, 30))
def test_thinning_keeps_the_extremes_of_every_column_and_the_ends(values: list[float], columns: int) -> None:
    points = [(float(x), y) for x, y in enumerate(values)]
    found = thinned(points, columns)
    assert len(found) <= max(4 * columns + 4, 4)
    assert set(found) <= set(points) and found == sorted(found)
    assert (found[0], found[-1]) == (points[0], points[-1])
    width = max(1.0, points[-1][0]) / columns
    for column in range(columns + 1):
        inside = [y for x, y in points if int(x / width) == column]
        kept = [y for x, y in found if int(x / width) == column]
        if inside:
            assert (min(kept), max(kept)) == (min(inside), max(inside))


def test_one_spike_in_a_million_windows_is_drawn() -> None:
    values = [(float(x), 100.0 if x == 654_321 else 1.0) for x in range(1_000_000)]
    svg = chart([Line(name="loss", points=values, style="first")])
    assert len(svg) < 100_000
    assert min(y for _, y in drawn(svg)) == 10.0, "the top of the picture"


def test_places_are_those_of_the_values() -> None:
    svg = chart([Line(name="l", points=[(0, 0), (50, 5), (100, 10)], style="first")])
    assert drawn(svg) == [(64.0, 194.0), (476.0, 102.0), (888.0, 10.0)]
    svg = chart([Line(name="l", points=[(0, 0.01), (50, 1), (100, 100)], style="first")], is_log=True)
    assert drawn(svg) == [(64.0, 194.0), (476.0, 102.0), (888.0, 10.0)]


def test_what_is_not_finite_is_left_out_and_a_logarithm_needs_more_than_0() -> None:
    points = [(0, 1.0), (1, math.nan), (2, math.inf), (3, 10.0), (4, 0.0), (5, -1.0)]
    assert len(drawn(chart([Line(name="l", points=points, style="first")]))) == 4
    assert len(drawn(chart([Line(name="l", points=points, style="first")], is_log=True))) == 2
    assert chart([Line(name="l", points=[(0, math.nan)], style="first")]) == ""
    assert chart([]) == ""


def test_one_window_is_a_dot() -> None:
    assert "<circle" in chart([Line(name="l", points=[(3, 1.5)], style="first")])


def test_names_are_text_and_the_picture_is_well_formed() -> None:
    name = '<script>alert("&")</script>'
    svg = chart(
        [Line(name=name, points=[(0, 1), (1, 2)], style="first")], [Mark(x=0.5, text=name), Mark(x=9, text="x")]
    )
    tree = ElementTree.fromstring(svg)
    assert [title.text for title in tree.iter("title")] == [name, name], "a mark outside the picture is not drawn"
