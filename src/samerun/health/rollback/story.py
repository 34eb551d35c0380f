"""A decision as people read it: what was seen, what it rests on, what was done, what came of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from samerun.checkpoint.retired import read_retirements
from samerun.health.rollback import past
from samerun.health.rollback.decisions import DecisionRecord, read_decisions
from samerun.storage.api import Storage


class Standing(Enum):
    IN_FORCE = "in force"
    """The branch was ended, or there was nothing to do but to say it."""
    WAITING = "the next start carries it out"
    OVERTAKEN = "never carried out: a newer attempt had taken over"


@dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    """One decision with everything that is known about it."""

    record: DecisionRecord
    standing: Standing
    outcome: Mapping[str, Any] | None

    @property
    def target(self) -> str | None:
        """Name of the checkpoint gone back to."""
        found = self.record.evidence.get("decided", {}).get("target")
        return None if found is None else str(found["name"])

    def to_json(self) -> dict[str, Any]:
        outcome = None if self.outcome is None else dict(self.outcome)
        return {**self.record.to_json(), "standing": self.standing.value, "outcome": outcome}

    def lines(self) -> list[str]:
        """The first says what was decided; the others, indented, why and what became of it."""
        record, decided = self.record, self.record.evidence.get("decided", {})
        word = "decision" if record.mode != "advise" else "advice"
        target = f" to {self.target}" if self.target is not None else ""
        done = "" if self.standing is Standing.IN_FORCE else f" ({self.standing.value})"
        lines = [f"{word} {record.number}  {record.action.replace('_', ' ')}{target}, attempt {record.attempt}{done}"]
        lines.append(f"    seen      {record.reason}")
        lines += [f"    evidence  {text}" for text in _evidence(record.evidence)]
        passed = [one for one in decided.get("considered", []) if one["why_not"] is not None]
        lines += [f"    not       {one['name']}: {one['why_not']}" for one in passed[:3]]
        if record.skip is not None:
            lines.append(f"    skips     positions {record.skip[0]} to {record.skip[1]}, at every start from now on")
        if budget := decided.get("budget"):
            before = [name for name in budget if name != "quarantined"]
            said = ", ".join(f"{name.replace('_', ' ')} {budget[name][0]} of {budget[name][1]}" for name in before)
            lines.append(f"    budget    before it: {said}{_quarantine(budget.get('quarantined'))}")
        if expected := decided.get("expected"):
            lines.append(f"    expected  {expected}")
        if record.mode == past.ACT and expected:
            lines.append(f"    outcome   {self._outcome()}")
        return lines

    def _outcome(self) -> str:
        if self.outcome is None:
            return "not seen yet"
        came = "it came back" if self.outcome["came_back"] else "it did not come back"
        return f"{came} by window {self.outcome['window']} (attempt {self.outcome['attempt']}): {self.outcome['seen']}"


def stories(storage: Storage) -> list[Story]:
    """Every recorded decision of a run, in order. Raises SchemaError or DamagedError for records that were changed."""
    records = read_decisions(storage)
    if not records:
        return []
    retirements = read_retirements(storage)
    carried_out = {one.decision: one.attempt for one in retirements if one.target is not None}
    effective = {record.number for record in past.in_force(records, carried_out)}
    ended = {one.attempt for one in retirements}
    outcomes = past.read_outcomes(storage)
    return [
        Story(
            record=record,
            standing=Standing.IN_FORCE
            if record.number in effective
            else Standing.OVERTAKEN
            if record.attempt in ended
            else Standing.WAITING,
            outcome=outcomes.get(record.number),
        )
        for record in records
    ]


def _quarantine(used: Sequence[int] | None) -> str:
    return "" if used is None else f"; quarantined with it: {used[1]} samples of {used[2]}"


def _evidence(evidence: Mapping[str, Any]) -> Sequence[str]:
    found = []
    if finding := evidence.get("finding"):
        found.append(
            f"window {finding['window']}: {finding['series']} {finding['value']:.4g}, limit {finding['k']:.1f} spreads "
            f"of {finding['spread']:.3g} above {finding['center']:.4g}, for {finding['alpha']:g} false alarms a window"
        )
    if tensors := evidence.get("tensors"):
        more = f" and {len(tensors) - 3} more" if len(tensors) > 3 else ""
        found.append(f"ranks {evidence.get('ranks')} hold other bytes of {', '.join(tensors[:3])}{more}")
    if windows := evidence.get("windows"):
        found.append(f"windows {windows[0][0]} to {windows[-1][0]}, positions {windows[0][1]} to {windows[-1][2]}")
    return found
