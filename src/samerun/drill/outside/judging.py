"""From differences to a verdict. Pure.

hung, crashed            as they are
wrong                    something exact differs (a counter, a shape, a text, a sample id), a learning rate does, an
                         update or a file of the twin is missing, or anything differs after its files were damaged
drift                    only floating-point numbers differ, or random state
lost work                all the same, but a start began over although earlier ones had done updates, or did updates
                         again after a SIGTERM, or nothing was ever saved before a kill
same                     none of these
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from samerun.drill.judgement import Judgement, Kind
from samerun.drill.outside.compare import Difference, Nature
from samerun.drill.outside.naming import component_of
from samerun.drill.outside.steps import StepDifference
from samerun.drill.traces import First, in_order

_DECIDED: Final = frozenset({"scheduler"})
"""Floats that no rounding may touch: a schedule is a function of counters."""
_EXPECTED_IN_FILES: Final = ("moments", "scheduler", "rng", "cursor")


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    files: Sequence[Difference]
    """Of the final outputs, beyond the twins' own spread."""
    steps: Sequence[StepDifference]
    saved_leaves: frozenset[str]
    """Paths of everything that the twin's files hold."""
    last_step: int | None
    num_done_again: int | None
    num_after_warning: int | None
    """Of those, in starts that followed a SIGTERM with grace: there nothing needs to be done again."""
    began_over: bool
    was_damaged: bool
    saved_before_kills: bool
    notes: Sequence[str]


def judge(evidence: Evidence) -> Judgement:
    components = _components(evidence)
    kind = _kind(evidence)
    notes = list(evidence.notes)
    if not evidence.saved_before_kills:
        notes.append("it had written no file before any of the interruptions: nothing could be resumed")
    if kind is Kind.WRONG and evidence.was_damaged:
        notes.append("what differs comes after damage to its files: it loaded damaged bytes without a word")
    if evidence.began_over:
        notes.append("a start began with the first update again")
    return Judgement(
        kind=kind,
        components=components,
        suspected=_suspected(evidence.saved_leaves) if kind in (Kind.DRIFT, Kind.WRONG) else (),
        lost_updates=evidence.num_done_again if kind is Kind.LOST_WORK else None,
        notes=notes,
    )


def _kind(evidence: Evidence) -> Kind:
    found = [*evidence.files, *(step.difference for step in evidence.steps)]
    if any(_is_wrong(difference) for difference in found) or (found and evidence.was_damaged):
        return Kind.WRONG
    if found:
        return Kind.DRIFT
    redone = (evidence.num_after_warning or 0) > 0
    if redone or evidence.began_over or not evidence.saved_before_kills:
        return Kind.LOST_WORK
    return Kind.SAME


def _is_wrong(difference: Difference) -> bool:
    return difference.nature is not Nature.NUMBER or difference.component in _DECIDED


def _components(evidence: Evidence) -> dict[str, First | None]:
    """First by update where a per-step log tells, else at the end."""
    present = {component_of(path) for path in evidence.saved_leaves}
    found: dict[str, First | None] = dict.fromkeys(in_order(present))
    at_the_end = -1 if evidence.last_step is None else evidence.last_step
    ends = [StepDifference(step=at_the_end, difference=difference) for difference in evidence.files]
    for step in [*evidence.steps, *ends]:
        name = step.difference.component
        if found.get(name) is None:
            found[name] = First(update=step.step, rank=0, key=step.difference.path, size=step.difference.size)
    return {name: found[name] for name in in_order(found)}


def _suspected(leaves: frozenset[str]) -> list[str]:
    held = {component_of(path) for path in leaves}
    return [name for name in _EXPECTED_IN_FILES if name not in held]
