"""What earlier decisions of a run mean to the next one: the budget they took, and whether they were carried out.

A rewind is carried out by the record that retires its branch. One that lost against a newer attempt never happened:
it takes budget all the same, but quarantines nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from samerun.core.canonical import canonical_bytes, decode_canonical
from samerun.errors import AlreadyExistsError
from samerun.health.rollback.decisions import PREFIX, DecisionRecord
from samerun.health.rollback.ladder import Action, Rung
from samerun.storage.api import Storage

ACT: Final = "act"
_MAX_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """What a decision expects, and until when: held against what is seen afterwards."""

    number: int
    """Of the decision."""
    until: int
    """Windows decided by when it is over."""
    expected: str
    is_same_data: bool
    """Whether nothing but the state was changed: then it is an experiment about the data."""


def is_rewind(record: DecisionRecord) -> bool:
    return record.mode == ACT and record.action.upper() in Rung.__members__ and Rung[record.action.upper()].rewinds


def actions(records: Sequence[DecisionRecord]) -> list[Action]:
    """The rewinds that count against the budget, in order. Advice is not one: nobody may have followed it."""
    found: list[Action] = []
    for record in filter(is_rewind, records):
        incident, decided = record.evidence["incident"], record.evidence["decided"]
        farthest = max([int(incident["now"]), *(action.farthest_window for action in found)])
        found.append(
            Action(
                rung=Rung[record.action.upper()],
                onset=int(incident["onset"]),
                at_window=int(decided["target"]["windows"]),
                farthest_window=farthest,
                at_seconds=record.time,
                skipped=record.skip,
            )
        )
    return found


def in_force(records: Sequence[DecisionRecord], carried_out: Mapping[int, int]) -> list[DecisionRecord]:
    """Those whose quarantine counts. `carried_out`: decision number → attempt whose branch it ended."""
    return [record for record in records if not is_rewind(record) or carried_out.get(record.number) == record.attempt]


def pending(records: Sequence[DecisionRecord], attempt: int) -> DecisionRecord | None:
    """The rewind that `attempt` decided last: what is left to do if its branch has not been ended."""
    return next((record for record in reversed(records) if is_rewind(record) and record.attempt == attempt), None)


def open_check(record: DecisionRecord) -> Check | None:
    check = record.evidence.get("check")
    if not isinstance(check, Mapping):
        return None
    return Check(
        number=record.number,
        until=int(check["until"]),
        expected=str(check["expected"]),
        is_same_data=record.skip is None,
    )


def write_outcome(storage: Storage, number: int, outcome: Mapping[str, Any]) -> None:
    """What came of decision `number`. The first word stands: a window that is done again says the same."""
    try:
        storage.put_if_absent(f"{PREFIX}/{number:06d}.outcome.json", canonical_bytes(dict(outcome)))
    except AlreadyExistsError:
        return


def read_outcomes(storage: Storage) -> dict[int, dict[str, Any]]:
    """Decision number → what came of it. Raises SchemaError for one that was edited or damaged."""
    found = {}
    for name in storage.names(PREFIX):
        if name.endswith(".outcome.json"):
            key = f"{PREFIX}/{name}"
            where = f"{storage.where}/{key}"
            data = storage.get(key, max_bytes=_MAX_BYTES).data
            found[int(name[:6])] = dict(decode_canonical(data, where=where))
    return found
