"""A bar chart of overhead against interval, in characters: what saving takes and what failures take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from samerun.core.units import format_seconds
from samerun.plan.availability.interval import Point

_WIDTH: Final = 56
_SAVING: Final = "█"
_FAILING: Final = "░"


def interval_chart(curve: Sequence[Point], best: Point) -> list[str]:
    """One line an interval: a bar of lost wall clock, in proportion to the worst line; the best one is marked."""
    lost = [1 - point.ettr for point in curve]
    scale = max(lost)
    labels = [format_seconds(_rounded(point.interval_seconds)) for point in curve]
    width = max(len(label) for label in labels)
    lines = [f"  {'interval'.rjust(width)}  lost of the wall clock: {_SAVING} saving  {_FAILING} failing"]
    for point, label, share in zip(curve, labels, lost, strict=True):
        saving = min(share, point.overhead)
        num_saving = round(_WIDTH * saving / scale)
        bar = _SAVING * num_saving + _FAILING * (round(_WIDTH * share / scale) - num_saving)
        mark = "  ← best" if point.interval_seconds == best.interval_seconds else ""
        lines.append(f"  {label.rjust(width)}  {bar} {share:.1%}{mark}")
    return lines


def _rounded(seconds: float) -> float:
    return round(seconds) if seconds >= 10 else seconds
