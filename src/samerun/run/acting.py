"""What becomes of an incident: decided by the ladder, written down, then done. Rank 0's; the others are told to leave.

    incident → situation (checkpoints, earlier decisions) → decide → decision record, durable
    act:  rewind → the branch is retired, durably → every rank leaves with 75 at the coming edge, without saving
                   → the next start resumes from the target and passes over what was quarantined
          stop   → every rank leaves with 93; nothing is retired

Nothing is undone inside a process: what a loop holds besides the run's own state would not be undone with it. After a
crash between the two records the next start writes the second one. What a decision expects is held against what is
seen afterwards, by whichever attempt sees it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from samerun.checkpoint import Entry, Store
from samerun.checkpoint.attempts import newest_attempt
from samerun.checkpoint.retired import retire
from samerun.checkpoint.save.commit import move_pointer
from samerun.core.clock import Clock, SystemClock
from samerun.core.units import AmountUnit
from samerun.errors import CheckpointError, DoNotRestart, FencedError, Stop, Stopped, StorageError
from samerun.format.names import tag_key
from samerun.health.monitor import Decided
from samerun.health.options import HealthOptions, Mode
from samerun.health.rollback import past
from samerun.health.rollback.decisions import DecisionRecord, read_decisions, write_decision
from samerun.health.rollback.good import Candidate
from samerun.health.rollback.ladder import Decided as Ruling
from samerun.health.rollback.ladder import Incident, Rung, Situation, Trigger, decide
from samerun.health.spike.detector import RECOVERY_WINDOWS, Finding, Kind
from samerun.run.goal import Goal
from samerun.storage.api import Storage

GOOD: Final = "good"
"""The tag of the newest checkpoint that enough ordinary windows have followed: a rewind goes back at most this far."""
CANDIDATE: Final = "good-candidate"
"""The one that is waiting to become it; tags keep both from being thinned out."""
_FOR_GOOD: Final = frozenset({Kind.SHIFTED, Kind.DIVERGING, Kind.UNRECOVERED})


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where decisions live and what they rest on."""

    storage: Storage
    store: Store
    attempt: int
    passed_over: Callable[[], Sequence[tuple[int, int]]]
    """Positions that the data source skips: they lie between a count of samples and a position."""
    can_skip: bool
    margin: int
    at: Callable[[str], None]
    tell: Callable[[str], None]
    clock: Clock = field(default_factory=SystemClock)


class Actor:
    """One attempt's. Fed by the monitor; `ending` says how every rank is to leave, once something was decided."""

    def __init__(self, place: Place, options: HealthOptions) -> None:
        self._place = place
        self._options = options
        self._goal: Goal | None = None
        self._last: Decided | None = None
        self._bad: list[Decided] = []
        self._has_spiked = False
        self._candidate: Entry | None = None
        self._knows_candidate = False
        self._checks = self._open_checks()
        self.ending: Stop | None = None

    def heading_for(self, goal: Goal) -> None:
        """How much training is planned, for the share of it that may be quarantined."""
        self._goal = goal

    def found(self, finding: Finding) -> None:
        """A finding of the spike detector."""
        if finding.kind is Kind.SPIKE:
            self._has_spiked = True
            if finding.is_certain:
                self._seen_again(finding.window, f"{finding.series} left its baseline at window {finding.onset}")
        elif finding.kind is Kind.RECOVERED:
            self._has_spiked = False
        elif finding.kind in _FOR_GOOD and finding.is_certain:
            incident = Incident(
                trigger=Trigger.UNRECOVERED, onset=finding.onset, alarm=finding.onset, now=finding.window + 1
            )
            what = f"the spike that began at window {finding.onset} is {finding.kind.value}"
            self._rule(incident, what, {"finding": finding.to_json()})
            self._has_spiked = False

    def decided(self, decided: Decided) -> None:
        """Every window."""
        self._last = decided
        if self._checks:
            self._passed(decided.window + 1)
        overflow = decided.outcome == "non_finite_grad" and decided.scale <= 1
        if not (decided.is_loss_bad or overflow):
            if self._bad:
                self._bad.clear()
            return
        self._bad.append(decided)
        self._seen_again(decided.window, f"window {decided.window} was not finite")
        incident = Incident(
            trigger=Trigger.NON_FINITE,
            onset=self._bad[0].window,
            alarm=decided.window,
            now=decided.window + 1,
            in_a_row=len(self._bad),
            was_retried=True,  # the monitor has replayed each of them
        )
        if len(self._bad) == self._options.limits.skips_in_a_row:
            what = f"{len(self._bad)} windows in a row were not finite, from window {self._bad[0].window} on"
            self._rule(incident, what, {"windows": [[one.window, one.start, one.end] for one in self._bad]})

    def replicas_differ(self, *, window: int, last_equal: int, tensors: Sequence[str], ranks: Sequence[int]) -> None:
        self._seen_again(window, f"replicas differ again: {', '.join(tensors[:3])}")
        incident = Incident(trigger=Trigger.DESYNC, onset=last_equal, alarm=window, now=window)
        what = f"replicas hold different bytes after window {window}, and held the same after window {last_equal}"
        self._rule(incident, what, {"tensors": list(tensors[:100]), "ranks": list(ranks)})

    def saved(self, entry: Entry) -> None:
        """A checkpoint was published: the one that has waited long enough without an incident becomes `good`."""
        try:
            self._promote(entry)
        except (StorageError, CheckpointError) as error:  # a tag less costs no training; the next save tries again
            self._place.tell(f"the tag {GOOD!r} could not be moved: {error}")

    def _promote(self, entry: Entry) -> None:
        place = self._place
        if not self._knows_candidate:
            entries = {one.name: one for one in place.store.catalog().entries}
            self._candidate = entries.get(place.store.tags().get(CANDIDATE, ""))
            self._knows_candidate = True
        waited = None if self._candidate is None else _windows(entry) - _windows(self._candidate)
        if waited is not None and (waited < max(RECOVERY_WINDOWS, place.margin) or self._has_spiked):
            return
        if self._candidate is not None:
            move_pointer(place.storage, tag_key(GOOD), self._candidate, back=True)
        move_pointer(place.storage, tag_key(CANDIDATE), entry, back=True)
        self._candidate = entry

    def _rule(self, incident: Incident, what: str, evidence: dict[str, Any]) -> None:
        if self.ending is not None:
            return
        place = self._place
        if newest_attempt(place.storage) > place.attempt:
            return  # fenced off: the newer attempt decides, and this one is about to be told to leave
        records, entries = read_decisions(place.storage), place.store.catalog().entries
        ruling = decide(incident, self._situation(records, entries), self._options.limits)
        if ruling.skip is not None and not place.can_skip:
            ruling = Ruling(rung=Rung.STOP, reason="the data would have to be passed over, and its source cannot")
        if ruling.rung in (Rung.OBSERVE, Rung.SKIP):
            return
        mode = self._options.mode
        assert isinstance(mode, Mode)
        record = write_decision(
            place.storage,
            DecisionRecord(
                action=ruling.rung.name.lower(),
                reason=f"{what}: {ruling.reason}",
                attempt=place.attempt,
                window=incident.now - 1,
                time=round(place.clock.wall_seconds(), 3),
                mode=mode.value,
                skip=ruling.skip if mode is Mode.ACT else None,
                evidence={
                    "incident": _plain(incident),
                    "decided": ruling.to_json(),
                    "check": {"until": ruling.check_until, "expected": ruling.expected} if ruling.expected else None,
                    **evidence,
                },
            ),
        )
        place.tell(f"{_word(mode)} {record.number}: {_told(record, ruling)}")
        if mode is Mode.ACT:
            self._do(record, ruling, entries)

    def _do(self, record: DecisionRecord, ruling: Ruling, entries: Sequence[Entry]) -> None:
        place = self._place
        if ruling.target is None:
            self.ending = DoNotRestart(f"decision {record.number}: a person is needed: {record.reason}")
            return
        self.ending = Stopped(
            f"decision {record.number}: {record.action.replace('_', ' ')} to {ruling.target.name}: {record.reason}; "
            f"start me again"
        )
        place.at("rewind:decided")
        target = next(entry for entry in entries if entry.name == ruling.target.name)
        try:
            retire(
                place.storage, attempt=place.attempt, epoch=place.attempt, target=target, decision=record.number,
                reason=f"decision {record.number}: {record.action.replace('_', ' ')} to {target.name}",
            )  # fmt: skip
        except FencedError as error:
            self.ending = DoNotRestart(str(error))
        except StorageError as error:  # the decision stands; the next start carries it out
            place.tell(f"the branch could not be retired yet: {error}")
        place.at("rewind:retired")

    def _situation(self, records: Sequence[DecisionRecord], entries: Sequence[Entry]) -> Situation:
        last, skipped = self._last, self._place.passed_over()
        return Situation(
            candidates=[
                Candidate(
                    name=entry.name,
                    windows=_windows(entry),
                    position=position_of(int(entry.progress.samples), skipped),
                    is_verified=True,  # every byte is when it is loaded; a damaged one is passed over for an older one
                    digest=entry.manifest_sha256,
                )
                for entry in entries
            ],
            past=past.actions(records),
            margin=self._place.margin,
            samples_per_window=1 if last is None else max(1, last.samples),
            planned_samples=self._planned_samples(),
            good_until=0 if last is None else max(0, last.window - 2 * RECOVERY_WINDOWS),
            seconds=self._place.clock.wall_seconds(),
        )

    def _planned_samples(self) -> int | None:
        goal, last = self._goal, self._last
        if goal is None or last is None:
            return None
        amount = goal.amount
        if amount.unit is AmountUnit.SAMPLES:
            return int(amount.value)
        if amount.unit is AmountUnit.EPOCHS:
            return None if goal.samples_per_epoch is None else int(amount.value * goal.samples_per_epoch)
        per_window = last.weight if amount.unit is AmountUnit.TOKENS else 1.0
        return int(amount.value / per_window * last.samples) if per_window > 0 else None

    def _open_checks(self) -> list[past.Check]:
        """Decisions whose outcome nobody has seen yet."""
        if self._options.mode is not Mode.ACT:
            return []
        storage = self._place.storage
        records = read_decisions(storage)
        known = past.read_outcomes(storage) if records else {}
        waiting = [past.open_check(one) for one in records if past.is_rewind(one) and one.number not in known]
        return [check for check in waiting if check is not None]

    def _seen_again(self, window: int, what: str) -> None:
        for check in [one for one in self._checks if window <= one.until]:
            self._outcome(check, window, came_back=True, seen=what)

    def _passed(self, windows: int) -> None:
        for check in [one for one in self._checks if windows > one.until]:
            self._outcome(check, windows, came_back=False, seen="nothing out of the ordinary")

    def _outcome(self, check: past.Check, window: int, *, came_back: bool, seen: str) -> None:
        self._checks.remove(check)
        outcome = {"came_back": came_back, "window": window, "seen": seen, "attempt": self._place.attempt}
        past.write_outcome(self._place.storage, check.number, outcome)
        innocent = ": the data was not to blame for it, a device may be" if check.is_same_data else ""
        said = "came back" if came_back else f"did not come back{innocent}"
        self._place.tell(f"decision {check.number}: it {said} ({seen})")


def position_of(num_samples: int, skipped: Sequence[tuple[int, int]]) -> int:
    """The cursor after `num_samples` were trained on, where the ranges `skipped` (sorted, disjoint) were not."""
    position = num_samples
    for start, stop in skipped:
        if start <= position:
            position += stop - start
    return position


def _windows(entry: Entry) -> int:
    return int(entry.progress.windows)


def _word(mode: Mode) -> str:
    return "decision" if mode is Mode.ACT else "advice"


def _told(record: DecisionRecord, ruling: Ruling) -> str:
    target = "" if ruling.target is None else f" to {ruling.target.name}"
    skip = "" if ruling.skip is None else f", quarantine of positions [{ruling.skip[0]}, {ruling.skip[1]})"
    return f"{record.action.replace('_', ' ')}{target}{skip}: {record.reason}"


def _plain(incident: Incident) -> dict[str, Any]:
    names = ("onset", "alarm", "now", "in_a_row", "was_retried")
    return {"trigger": incident.trigger.value, **{name: getattr(incident, name) for name in names}}
