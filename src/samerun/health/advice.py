"""Advice: for a spike that did not recover, the rung of the ladder, written down as a decision before it is told."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from samerun.core.clock import Clock, SystemClock
from samerun.health.rollback.decisions import DecisionRecord, write_decision
from samerun.health.rollback.good import Candidate
from samerun.health.rollback.ladder import Incident, Situation, Trigger, decide
from samerun.health.spike.detector import Finding, Kind
from samerun.storage.api import Storage

_WORTH_ADVICE = frozenset({Kind.SHIFTED, Kind.DIVERGING, Kind.UNRECOVERED})


class Adviser:
    """On rank 0. Proposes; nothing is done. Candidates are complete checkpoints, verified when they are loaded."""

    def __init__(
        self,
        storage: Storage,
        *,
        attempt: int,
        candidates: Callable[[], Sequence[Candidate]],
        samples_per_window: Callable[[], int],
        tell: Callable[[str], None],
        clock: Clock | None = None,
    ) -> None:
        self._storage = storage
        self._attempt = attempt
        self._candidates = candidates
        self._samples_per_window = samples_per_window
        self._tell = tell
        self._clock = clock or SystemClock()

    def __call__(self, finding: Finding) -> None:
        if finding.kind not in _WORTH_ADVICE or not finding.is_certain:
            return
        now = finding.window + 1
        incident = Incident(trigger=Trigger.UNRECOVERED, onset=finding.onset, alarm=finding.onset, now=now)
        situation = Situation(candidates=self._candidates(), samples_per_window=self._samples_per_window())
        decided = decide(incident, situation)
        record = write_decision(
            self._storage,
            DecisionRecord(
                action=decided.rung.name.lower(),
                reason=f"the spike that began at window {finding.onset} is {finding.kind.value}: {decided.reason}",
                attempt=self._attempt,
                window=finding.window,
                time=round(self._clock.wall_seconds(), 3),
                mode="advise",
                evidence={"finding": finding.to_json(), "decided": decided.to_json()},
            ),
        )
        target = "" if decided.target is None else f" to {decided.target.name}"
        self._tell(f"advice {record.number}: {record.action.replace('_', ' ')}{target}: {record.reason}")
