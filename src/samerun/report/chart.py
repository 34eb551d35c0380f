"""A line chart as SVG: many points, few of them drawn, none of the extreme ones lost.

Every pixel column shows its lowest and its highest value, so a spike of one window among a million is still there.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

_WIDTH: Final = 900
_HEIGHT: Final = 220
_LEFT: Final = 64
_RIGHT: Final = 12
_TOP: Final = 10
_BOTTOM: Final = 26
_NUM_TICKS: Final = 5
_DECADE: Final = 10.0

Point = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    name: str
    points: Sequence[Point]
    """Ordered by x. What is not finite is left out, and the line has a gap there."""
    style: str
    """The class of its stroke in the page's style sheet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """A vertical line."""

    x: float
    text: str


@dataclass(frozen=True, slots=True)
class _Axis:
    low: float
    high: float
    from_pixel: float
    to_pixel: float
    is_log: bool = False

    def pixel(self, value: float) -> float:
        low, high, at = (math.log10(v) if self.is_log else v for v in (self.low, self.high, value))
        share = 0.5 if high == low else (at - low) / (high - low)
        return round(self.from_pixel + share * (self.to_pixel - self.from_pixel), 1)


def chart(lines: Sequence[Line], marks: Sequence[Mark] = (), *, is_log: bool = False) -> str:
    """One SVG element; "" where no line has a finite point. A logarithmic axis leaves out what is not positive."""
    drawn = [_finite(line, positive=is_log) for line in lines]
    every = [point for line in drawn for point in line.points]
    if not every:
        return ""
    xs, ys = [x for x, _ in every], [y for _, y in every]
    across = _Axis(min(xs), max(xs), _LEFT, _WIDTH - _RIGHT)
    up = _Axis(min(ys), max(ys), _HEIGHT - _BOTTOM, _TOP, is_log)
    parts = [
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">',
        *(_grid(up, tick) for tick in (_decades if is_log else ticks)(up.low, up.high)),
        *(_below(across, tick) for tick in ticks(across.low, across.high)),
        *(_marked(across, mark) for mark in marks if across.low <= mark.x <= across.high),
        *(_drawn(line, across, up) for line in drawn),
        "</svg>",
    ]
    return "\n".join(parts)


def ticks(low: float, high: float) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten in [low, high], about five; `low` alone where there is no range."""
    if high <= low:
        return [low]
    rough = (high - low) / _NUM_TICKS
    power = _DECADE ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    return [number * step for number in range(first, math.floor(high / step + 1e-9) + 1)]


def _decades(low: float, high: float) -> list[float]:
    """Powers of ten; where fewer than two lie inside, the ticks of an ordinary axis."""
    found = [_DECADE**power for power in range(math.ceil(math.log10(low)), math.floor(math.log10(high)) + 1)]
    every = max(1, -(-len(found) // _NUM_TICKS))
    return found[::every] if len(found) > 1 else ticks(low, high)


def thinned(points: Sequence[Point], columns: int) -> list[Point]:
    """At most four of each column's points, in order: the first, the lowest, the highest, the last."""
    if len(points) <= 4 * columns:
        return list(points)
    low, high = points[0][0], points[-1][0]
    width = (high - low) / columns
    kept: list[Point] = []
    column: list[Point] = []
    for point in points:
        if column and int((point[0] - low) / width) != int((column[0][0] - low) / width):
            kept += _extremes(column)
            column = []
        column.append(point)
    return kept + _extremes(column)


def _extremes(column: Sequence[Point]) -> list[Point]:
    chosen = {0, len(column) - 1}
    chosen |= {choose(range(len(column)), key=lambda i: column[i][1]) for choose in (min, max)}
    return [column[i] for i in sorted(chosen)]


def _finite(line: Line, *, positive: bool) -> Line:
    points = [(x, y) for x, y in line.points if math.isfinite(y) and (y > 0 or not positive)]
    return Line(name=line.name, points=points, style=line.style)


def _drawn(line: Line, across: _Axis, up: _Axis) -> str:
    points = thinned(line.points, _WIDTH)
    if len(points) == 1:
        x, y = points[0]
        return f'<circle class="{line.style}" cx="{across.pixel(x)}" cy="{up.pixel(y)}" r="2.5"/>'
    path = " ".join(f"{across.pixel(x)},{up.pixel(y)}" for x, y in points)
    return f'<polyline class="{line.style}" points="{path}"><title>{escape(line.name)}</title></polyline>'


def _grid(up: _Axis, value: float) -> str:
    y = up.pixel(value)
    return (
        f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y}" y2="{y}"/>'
        f'<text class="tick" x="{_LEFT - 6}" y="{y + 4}" text-anchor="end">{_number(value)}</text>'
    )


def _below(across: _Axis, value: float) -> str:
    return (
        f'<text class="tick" x="{across.pixel(value)}" y="{_HEIGHT - 8}" text-anchor="middle">{_number(value)}</text>'
    )


def _marked(across: _Axis, mark: Mark) -> str:
    x = across.pixel(mark.x)
    return (
        f'<line class="mark" x1="{x}" x2="{x}" y1="{_TOP}" y2="{_HEIGHT - _BOTTOM}"><title>{escape(mark.text)}</title>'
        f"</line>"
    )


def _number(value: float) -> str:
    return f"{value:.4g}"


def legend(lines: Iterable[Line]) -> str:
    return " ".join(f'<span class="key {line.style}">{escape(line.name)}</span>' for line in lines)
