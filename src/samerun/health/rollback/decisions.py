"""Decisions as records: durable before anything is done, never changed, read by every later start.

One canonical JSON document a decision, `decisions/000001.json`, …; what came of it is a document of its own.
Quarantined ranges are part of a decision and are applied by every resume: a rewind to a checkpoint that is older than
the decision must not read the range again.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from samerun.core.canonical import canonical_bytes, decode_canonical, sha256_hex
from samerun.errors import AlreadyExistsError, SchemaError, UsageError
from samerun.storage.api import Storage

SCHEMA: Final = "samerun.decision.v1"
PREFIX: Final = "decisions"
_NAME: Final = re.compile(r"(\d{6})\.json\Z")
_MAX_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class DecisionRecord:
    """One decision with its evidence. `skip`: quarantined positions [start, stop) of the global sample order."""

    action: str
    reason: str
    attempt: int
    window: int
    time: float
    mode: str
    evidence: Mapping[str, Any] = field(default_factory=dict)
    skip: tuple[int, int] | None = None
    number: int = 0
    """Given by `write`."""

    def to_json(self) -> dict[str, Any]:
        document = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "skip"}
        skip = None if self.skip is None else list(self.skip)
        return {**document, "schema": SCHEMA, "skip": skip, "evidence": dict(self.evidence)}

    @classmethod
    def from_json(cls, document: Any, *, where: str) -> DecisionRecord:
        """Raises SchemaError naming `where`."""
        try:
            if document.pop("schema") != SCHEMA:
                raise ValueError("unknown schema")
            skip = document.pop("skip")
            record = cls(skip=None if skip is None else _range(skip), **document)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise SchemaError(f"{where}: not a {SCHEMA} record ({error})") from error
        return record


def write_decision(storage: Storage, record: DecisionRecord) -> DecisionRecord:
    """Durable when it returns, under the next free number. Nothing may be done about a decision before that."""
    if record.skip is not None:
        _range(list(record.skip))
    number = max((found.number for found in read_decisions(storage)), default=0) + 1
    while True:
        values = {name: getattr(record, name) for name in record.__dataclass_fields__}
        numbered = DecisionRecord(**{**values, "number": number})
        try:
            storage.put_if_absent(f"{PREFIX}/{number:06d}.json", canonical_bytes(numbered.to_json()))
        except AlreadyExistsError:  # another process decided in the same moment; both records stand
            number += 1
            continue
        return numbered


def read_decisions(storage: Storage) -> list[DecisionRecord]:
    """All of a run's, in order. Raises SchemaError for one that was edited or damaged: what it ruled is unknown."""
    found = []
    for name in storage.names(PREFIX):
        if _NAME.match(name):
            key = f"{PREFIX}/{name}"
            where = f"{storage.where}/{key}"
            data = storage.get(key, max_bytes=_MAX_BYTES).data
            found.append(DecisionRecord.from_json(decode_canonical(data, where=where), where=where))
    return found


def quarantined(records: Sequence[DecisionRecord]) -> tuple[tuple[int, int], ...]:
    """The union of all quarantined ranges, sorted and disjoint."""
    merged: list[tuple[int, int]] = []
    for start, stop in sorted(record.skip for record in records if record.skip is not None):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], stop))
        else:
            merged.append((start, stop))
    return tuple(merged)


def digest_of(records: Sequence[DecisionRecord]) -> str:
    """What two starts must agree on to read the same samples."""
    return sha256_hex(canonical_bytes([list(pair) for pair in quarantined(records)]))


class Skips(Protocol):
    """A data source that can pass over positions ahead of its cursor."""

    def skip(self, start: int, stop: int) -> None: ...

    def state_dict(self) -> dict[str, Any]: ...


def apply_quarantine(source: Any, ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Makes `source` pass over what lies ahead of its cursor and is not passed over yet; returns what was added.

    Positions behind the cursor are history: trained on before the decision, or skipped already. Raises UsageError for a
    source that cannot skip, since going on would read what was quarantined.
    """
    if not ranges:
        return []
    state = source.state_dict()
    if not hasattr(source, "skip") or "position" not in state or "skip" not in state:
        raise UsageError(
            f"this run has quarantined samples {list(ranges)}, but {type(source).__name__} cannot pass over positions; "
            f"use samerun.Data"
        )
    position, known = int(state["position"]), [tuple(pair) for pair in state["skip"]]
    added = []
    for start, stop in ranges:
        for part in _without((max(start, position), stop), known):
            source.skip(*part)
            added.append(part)
    return added


def _without(wanted: tuple[int, int], known: Sequence[Any]) -> list[tuple[int, int]]:
    """What of [start, stop) no known range covers."""
    start, stop = wanted
    parts = []
    for a, b in sorted(known):
        if a >= stop or b <= start:
            continue
        if start < a:
            parts.append((start, a))
        start = max(start, b)
    if start < stop:
        parts.append((start, stop))
    return parts


def _range(pair: Any) -> tuple[int, int]:
    start, stop = pair
    if type(start) is not int or type(stop) is not int or not 0 <= start < stop:
        raise UsageError(f"a quarantined range is (start, stop) with 0 <= start < stop, got {pair!r}")
    return start, stop
