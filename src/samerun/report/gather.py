"""Everything that a page about a run says, read from where the run left it. Changes nothing, opens no data, no torch.

A window counts once: what an attempt decided after the checkpoint that the next one resumed from is kept apart as lost.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

from samerun.checkpoint.catalog import read_catalog
from samerun.checkpoint.prune import tags_by_name
from samerun.core.progress import Progress
from samerun.data.ledger import Account, account
from samerun.errors import ExitCode, StorageError, UsageError
from samerun.health.records.event import WindowRecord, parse_records
from samerun.health.rollback.story import stories
from samerun.report.noticed import sentence
from samerun.storage.journal import SAMPLES, read_journal

if TYPE_CHECKING:
    from samerun.checkpoint.catalog import Entry
    from samerun.storage.api import Storage

SCHEMA: Final = "samerun.report.v1"
_MAX_BYTES: Final = 2**30
_HEALTH: Final = "health"
_RECORDS: Final = "rank-00000.windows.jsonl"
_CODES: Final = {int(code): code.name.lower().replace("_", " ") for code in ExitCode}


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptTold:
    number: int
    began_seconds: float
    """Wall clock, seconds since 1970; so are the other times."""
    how: str
    """Fresh, or resumed from which checkpoint, and how true."""
    ranks: str
    first_window: int
    stop_window: int
    """Behind the last one that it decided, as far as is known."""
    num_lost: int
    """Of those, decided again by a later attempt."""
    ended: str
    is_told_end: bool
    """False where it ended without a word: killed, or still running."""
    notes: tuple[str, ...]
    """Checkpoints passed over, components not restored, why not bitwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointTold:
    name: str
    attempt: int
    updates: int
    windows: int
    num_bytes: int
    tags: tuple[str, ...]
    blocked_seconds: float | None
    durable_seconds: float | None
    is_retired: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Noticed:
    attempt: int
    time_seconds: float
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DoneAgain:
    """Windows that were lost and decided once more: did the same come out? By loss and gradient norm as recorded, to
    nine digits; a hint and no proof, which `samerun drill` gives."""

    num: int
    first_unlike: int | None
    """The first window whose figures differ; None where all are alike."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTold:
    run: str
    read_seconds: float
    progress: Progress | None
    """Of the newest checkpoint."""
    attempts: tuple[AttemptTold, ...]
    checkpoints: tuple[CheckpointTold, ...]
    not_ones: tuple[str, ...]
    """What lies among the checkpoints and is none, with the reason."""
    windows: tuple[WindowRecord, ...]
    """Each once, in order, as rank 0 saw it; none of a run on an object store."""
    lost: tuple[WindowRecord, ...]
    again: DoneAgain
    noticed: tuple[Noticed, ...]
    decisions: tuple[tuple[str, ...], ...]
    """Of the run about itself: lines for people."""
    samples: Account | None
    evaluations: Mapping[str, tuple[tuple[float, float], ...]]
    """Name → (windows decided before it, value), in order."""
    surroundings: Mapping[str, Any]

    def to_json(self) -> dict[str, Any]:
        """Without the single windows, of which there may be millions: their number, the last loss, the median time."""
        seconds = sorted(record.window_seconds for record in self.windows)
        return {
            "schema": SCHEMA,
            "run": self.run,
            "progress": None if self.progress is None else self.progress.to_json(),
            "attempts": [asdict(attempt) for attempt in self.attempts],
            "checkpoints": [asdict(checkpoint) for checkpoint in self.checkpoints],
            "not_ones": list(self.not_ones),
            "windows": {
                "recorded": len(self.windows),
                "lost": len(self.lost),
                "last_loss": repr(self.windows[-1].loss) if self.windows else None,
                "median_seconds": seconds[len(seconds) // 2] if seconds else None,
            },
            "done_again": asdict(self.again),
            "noticed": [asdict(noticed) for noticed in self.noticed],
            "decisions": [list(lines) for lines in self.decisions],
            "samples": None if self.samples is None else _audited(self.samples),
            "evaluations": {name: [list(pair) for pair in pairs] for name, pairs in self.evaluations.items()},
            "surroundings": dict(self.surroundings),
        }


def gather(storage: Storage) -> RunTold:
    """Raises UsageError where no run has ever been, and what reading raises for damaged records."""
    journals = _by_attempt(read_journal(storage, max_bytes=_MAX_BYTES))
    catalog = read_catalog(storage)
    if not journals and not catalog.entries:
        raise UsageError(f"{storage.where}: no attempt and no checkpoint is here; is this the path that Run was given?")
    samples = _samples(storage)
    records = {number: _records(storage, number) for number in journals}
    windows, lost = _kept(journals, records)
    costs = {event["checkpoint"]: event.get("clocks", {}) for events in journals.values() for event in _saved(events)}
    tagged = tags_by_name(storage)
    retired = {one.entry.name for one in catalog.retired}
    every = sorted((*catalog.entries, *(one.entry for one in catalog.retired)), key=lambda entry: entry.age_key)
    return RunTold(
        run=storage.where,
        read_seconds=time.time(),
        progress=catalog.entries[0].progress if catalog.entries else None,
        attempts=tuple(_attempt(number, events, records[number], samples) for number, events in journals.items()),
        checkpoints=tuple(_checkpoint(entry, tagged, costs.get(entry.name, {}), retired) for entry in reversed(every)),
        not_ones=tuple(f"{one.name}: {one.reason}" for one in catalog.rejected),
        windows=windows,
        lost=lost,
        again=_done_again(windows, lost),
        noticed=tuple(
            Noticed(attempt=number, time_seconds=event["time"], text=text)
            for number, events in journals.items()
            for event in events
            if (text := sentence(event)) is not None
        ),
        decisions=tuple(tuple(story.lines()) for story in stories(storage)),
        samples=samples,
        evaluations=_evaluations(journals),
        surroundings=next((e["facts"].get("surroundings", {}) for e in _started(journals)), {}),
    )


def _by_attempt(events: Sequence[Mapping[str, Any]]) -> dict[int, list[Mapping[str, Any]]]:
    """Events lie in attempt order; each attempt's journal says its number when it has started."""
    found: dict[int, list[Mapping[str, Any]]] = {}
    ahead: list[Mapping[str, Any]] = []
    number: int | None = None
    for event in events:
        if event["event"] == "loading":  # of the next attempt, before its start is decided
            ahead.append(event)
        elif event["event"] == "started":
            number = int(event["attempt"])
            found[number] = [*ahead, event]
            ahead = []
        elif number is not None and not ahead:
            found[number].append(event)
    return found


def _started(journals: Mapping[int, Sequence[Mapping[str, Any]]]) -> list[Mapping[str, Any]]:
    """Newest first."""
    return [event for events in reversed([*journals.values()]) for event in events if event["event"] == "started"]


def _saved(events: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [event for event in events if event["event"] == "saved"]


def _samples(storage: Storage) -> Account | None:
    """None where nothing was written down."""
    lines = read_journal(storage, suffix=SAMPLES, max_bytes=_MAX_BYTES)
    return account(lines) if lines else None


def _records(storage: Storage, attempt: int) -> tuple[WindowRecord, ...]:
    key = f"{_HEALTH}/{attempt:06d}/{_RECORDS}"
    try:
        data = storage.get(key, max_bytes=_MAX_BYTES).data
    except StorageError:  # never written: health is off, the store is no file system, or the attempt was too short
        return ()
    return parse_records(data, key).records


def _kept(
    journals: Mapping[int, Sequence[Mapping[str, Any]]], records: Mapping[int, Sequence[WindowRecord]]
) -> tuple[tuple[WindowRecord, ...], tuple[WindowRecord, ...]]:
    """What counts in the end, and what was lost: an attempt supersedes everything from where it began."""
    kept: list[WindowRecord] = []
    lost: list[WindowRecord] = []
    for number, events in journals.items():
        first = _first_window(events)
        while kept and kept[-1].window >= first:
            lost.append(kept.pop())
        kept += records[number]
    return tuple(kept), tuple(sorted(lost, key=lambda record: record.window))


def _done_again(kept: Sequence[WindowRecord], lost: Sequence[WindowRecord]) -> DoneAgain:
    final = {record.window: (repr(record.loss), repr(record.grad_norm)) for record in kept}
    both = [record for record in lost if record.window in final]
    unlike = [one.window for one in both if (repr(one.loss), repr(one.grad_norm)) != final[one.window]]
    return DoneAgain(num=len(both), first_unlike=min(unlike, default=None))


def _first_window(events: Sequence[Mapping[str, Any]]) -> int:
    return next(int(event["progress"]["windows"]) for event in events if event["event"] == "started")


def _attempt(
    number: int, events: Sequence[Mapping[str, Any]], records: Sequence[WindowRecord], samples: Account | None
) -> AttemptTold:
    started = next(event for event in events if event["event"] == "started")
    ended, is_told = _ended(events)
    first = _first_window(events)
    stretch = next((one for one in samples.stretches if one.attempt == number), None) if samples is not None else None
    last = max((record.window for record in records), default=first - 1) + 1
    stop = max(last, stretch.stop if stretch is not None else last)
    how = str(started["kind"])
    if started["checkpoint"] is not None:
        how += f" from {started['checkpoint']}, {'within float tolerance' if started['not_bitwise'] else 'bitwise'}"
    topology = started["facts"].get("topology", {})
    notes = [f"not taken: {passed}" for passed in started["passed"]]
    notes += [f"not bitwise: {reason}" for reason in started["not_bitwise"]]
    notes += [f"not restored, as asked: {', '.join(started['waived'])}"] if started["waived"] else []
    return AttemptTold(
        number=number,
        began_seconds=started["time"],
        how=how,
        ranks=f"{topology.get('world_size', '?')} ({topology.get('wrapping', 'unknown')})",
        first_window=first,
        stop_window=stop,
        num_lost=stop - max(first, min(stop, stretch.kept)) if stretch is not None else 0,
        ended=ended,
        is_told_end=is_told,
        notes=(*notes, *started.get("remapped", ())),
    )


def _ended(events: Sequence[Mapping[str, Any]]) -> tuple[str, bool]:
    for event in reversed(events):
        if event["event"] == "ended":
            return f"{event['reason']} (exit {event['code']}, {_CODES.get(event['code'], 'unknown')})", True
        if event["event"] == "left":
            return f"left by {event['error']}", True
        if event["event"] == "closed":
            return f"closed at update {event['progress']['updates']}", True
    return "no word of an end: killed, or still running", False


def _checkpoint(
    entry: Entry, tagged: Mapping[str, Sequence[str]], clocks: Mapping[str, float], retired: set[str]
) -> CheckpointTold:
    return CheckpointTold(
        name=entry.name,
        attempt=entry.epoch,
        updates=entry.progress.updates.value,
        windows=entry.progress.windows.value,
        num_bytes=entry.num_bytes,
        tags=tuple(tagged.get(entry.name, ())),
        blocked_seconds=clocks.get("blocked_seconds"),
        durable_seconds=clocks.get("durable_seconds"),
        is_retired=entry.name in retired,
    )


def _evaluations(journals: Mapping[int, Sequence[Mapping[str, Any]]]) -> dict[str, tuple[tuple[float, float], ...]]:
    found: dict[str, dict[int, float]] = {}
    for events in journals.values():
        first = _first_window(events)
        for values in found.values():
            for windows in [windows for windows in values if windows > first]:
                del values[windows]
        for event in events:
            if event["event"] == "evaluated" and "windows" in event:
                found.setdefault(event["name"], {})[event["windows"]] = float(event["value"])
    return {name: tuple(sorted(values.items())) for name, values in found.items()}


def _audited(samples: Account) -> dict[str, Any]:
    return {
        "windows": samples.num_windows,
        "checked": samples.num_checked,
        "position": samples.position,
        "decisions": samples.decisions,
        "problems": list(samples.problems),
    }
