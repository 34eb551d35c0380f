"""Per-step logs: what each update of the run said beside what the twin's said, replayed updates too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from samerun.drill.outside.compare import Difference, Nature, beyond, compare_leaves
from samerun.drill.outside.outputs import flatten, rows_of, step_of

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDifference:
    step: int
    difference: Difference


def read_rows(log: Path) -> list[dict[str, Any]]:
    """Empty when there is no such log (yet)."""
    return rows_of(log.read_text(errors="replace"), log.suffix.lower()) if log.is_file() else []


def by_step(rows: Sequence[Row]) -> dict[int, Row]:
    """The first row of each update, in order."""
    found: dict[int, Row] = {}
    for row in rows:
        step = step_of(row)
        if step is not None:
            found.setdefault(step, row)
    return dict(sorted(found.items()))


def new_rows(before: Sequence[Row], after: Sequence[Row]) -> list[Row]:
    """What one start added to a log, whether it appended, or opened the log anew and wrote over it."""
    kept = len(before) if list(after[: len(before)]) == list(before) else 0
    return list(after[kept:])


def done_again(starts: Sequence[Sequence[Row]], *, after: Sequence[bool] | None = None) -> int | None:
    """Updates that a later start logged although an earlier one had done them; None without numbered rows.

    `after` says of each start whether to count what the one after it did again; without it all count.
    """
    highest, total, seen = None, 0, False
    for number, rows in enumerate(starts):
        steps = by_step(rows)
        if steps:
            seen = True
            if highest is not None and (after is None or after[number - 1]):
                total += sum(1 for step in steps if step <= highest)
            highest = max(steps) if highest is None else max(highest, *steps)
    return total if seen else None


def started_over(starts: Sequence[Sequence[Row]], had_saved: Sequence[bool]) -> bool:
    """Whether a start began with the very first update although the one before had done more, and had saved files."""
    steps = [sorted(by_step(rows)) for rows in starts]
    first = steps[0][0] if steps and steps[0] else None
    followed = zip(steps, steps[1:], had_saved, strict=False)
    return any(saved and len(done) > 1 and after[:1] == [first] for done, after, saved in followed)


def differences(
    twin: Sequence[Row], starts: Sequence[Sequence[Row]], *, spread: list[Difference]
) -> list[StepDifference]:
    """Of every update of every start, in order of updates; then the updates that no start logged."""
    expected = by_step(twin)
    found = [
        StepDifference(step=step, difference=difference)
        for rows in starts
        for step, row in by_step(rows).items()
        for difference in beyond(_rows_apart(expected.get(step), row), spread)
    ]
    logged = {step for rows in starts for step in by_step(rows)}
    gone = [step for step in expected if step not in logged]
    found += [
        StepDifference(step=step, difference=Difference(path="step", nature=Nature.MISSING, size=None)) for step in gone
    ]
    return sorted(found, key=lambda one: one.step)


def column_spread(one: Sequence[Row], other: Sequence[Row]) -> list[Difference]:
    """Per column the largest difference of two twins over all updates."""
    largest: dict[str, Difference] = {}
    there = by_step(other)
    for step, row in by_step(one).items():
        for difference in _rows_apart(there.get(step), row):
            known = largest.get(difference.path)
            if known is None or _size(difference) > _size(known):
                largest[difference.path] = difference
    return list(largest.values())


def _size(difference: Difference) -> float:
    return float("inf") if difference.size is None else difference.size


def _rows_apart(expected: Row | None, row: Row) -> list[Difference]:
    if expected is None:
        return [Difference(path="step", nature=Nature.EXACT, size=None)]
    return compare_leaves(dict(flatten(dict(expected), "")), dict(flatten(dict(row), "")))
