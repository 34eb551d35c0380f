"""Records that retire a branch: after a rewind, what was saved behind the point it goes back to is history. No torch.

`retired/000012.json` is the one word that attempt 12 may say about the branch that ends with it:

    rewound to a target    checkpoints of attempts up to 12 that are newer than the target are retired: complete, kept
                           for a while, loadable by name, and never again the newest
    gone on                nothing is retired; a later attempt said this when it started

Put-if-absent decides which of the two it is, once: a slow, older attempt cannot rewind a run that a newer one carries
on, and nothing it saves afterwards leaves the branch. `retired/000012.open` is put by an attempt that may rewind, so
that runs which never do pay nothing for the fence. A record that cannot be read stops every start: what it ruled is
unknown.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, Literal

import msgspec

from samerun.checkpoint.attempts import newest_attempt
from samerun.errors import AlreadyExistsError, FencedError
from samerun.format import names, schema
from samerun.format.schema import Name, Natural
from samerun.format.sealed import seal, to_document, typed, unseal

if TYPE_CHECKING:
    from samerun.checkpoint.catalog import Entry
    from samerun.storage.api import Storage

OPEN_SCHEMA: Final = "ckpt.retiring.v1"
_RECORD: Final = re.compile(r"([0-9]{6,12})\.json\Z")
_OPEN: Final = re.compile(r"([0-9]{6,12})\.open\Z")


class Target(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The checkpoint that a rewind goes back to, with all that orders it among others."""

    name: Name
    attempt: Natural
    windows: Natural
    sequence: Natural


class Retirement(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the branch of one attempt ended. Without a target nothing is retired."""

    schema: Literal["ckpt.retired.v1"]
    attempt: Natural
    """The attempt whose branch ends, and with it those of older attempts."""
    written_by: Natural
    """The attempt that said so: itself, or a later one that finished what it had decided, or closed its slot."""
    target: Target | None
    decision: Natural
    """Number of the recorded decision that this carries out; 0 for none."""
    reason: str

    def covers(self, entry: Entry) -> bool:
        """Whether `entry` lies on the branch that this ends."""
        if self.target is None or entry.epoch > self.attempt:
            return False
        target = self.target
        return entry.age_key > (target.attempt, target.windows, target.sequence, target.name)


def retirement_of(entry: Entry, retirements: Sequence[Retirement]) -> Retirement | None:
    """The first record that retires `entry`; None while it is in the running."""
    return next((one for one in retirements if one.covers(entry)), None)


def read_retirements(storage: Storage) -> list[Retirement]:
    """Every record of the run, oldest attempt first. Raises DamagedError or SchemaError for one that was changed."""
    return [_read(storage, name) for name in storage.names(names.RETIRED) if _RECORD.match(name)]


def retire(storage: Storage, *, attempt: int, epoch: int, target: Entry, decision: int, reason: str) -> Retirement:
    """Ends the branch of `attempt` at `target`, durably; said by attempt `epoch` (the same, or a later one).

    Idempotent for one decision. Raises FencedError when an attempt newer than `epoch` exists or the slot is taken.
    """
    if newest_attempt(storage) > epoch:
        raise FencedError(
            f"{storage.where}: this process is attempt {epoch}, attempt {newest_attempt(storage)} has started since; "
            f"nothing was rewound. Stop this one: the newer attempt carries the run on"
        )
    record = Retirement(
        schema=schema.RETIRED_SCHEMA,
        attempt=attempt,
        written_by=epoch,
        target=Target(
            name=target.name, attempt=target.epoch, windows=target.progress.windows.value, sequence=target.sequence
        ),
        decision=decision,
        reason=reason,
    )
    return _put(storage, record)


def announce(storage: Storage, attempt: int) -> None:
    """Said at the start of an attempt that may rewind: later attempts then know of its slot and close it."""
    document = {"schema": OPEN_SCHEMA, "attempt": attempt}
    storage.put_if_absent(f"{names.RETIRED}/{attempt:06d}.open", seal(document))


def close_older(storage: Storage, epoch: int) -> list[int]:
    """Attempt `epoch` has started: no older attempt may rewind any more. Returns those whose slots were open."""
    slots = open_slots(storage, epoch)
    for attempt in slots:
        _put(storage, _gone_on(attempt, epoch))
    return slots


def open_slots(storage: Storage, epoch: int) -> list[int]:
    """Attempts before `epoch` that may rewind and have not said how their branch ends, oldest first."""
    found = storage.names(names.RETIRED)
    taken = {int(match[1]) for name in found if (match := _RECORD.match(name))}
    may = {int(match[1]) for name in found if (match := _OPEN.match(name))}
    return sorted(attempt for attempt in may - taken if attempt < epoch)


def _gone_on(attempt: int, epoch: int) -> Retirement:
    return Retirement(
        schema=schema.RETIRED_SCHEMA,
        attempt=attempt,
        written_by=epoch,
        target=None,
        decision=0,
        reason=f"attempt {epoch} carries the run on",
    )


def _put(storage: Storage, record: Retirement) -> Retirement:
    name = f"{record.attempt:06d}.json"
    try:
        storage.put_if_absent(f"{names.RETIRED}/{name}", seal(to_document(record)))
    except AlreadyExistsError:
        found = _read(storage, name)
        if record.target is None or (found.target, found.decision) == (record.target, record.decision):
            return found  # said already, whichever way: one word an attempt
        raise FencedError(
            f"{storage.where}: the branch of attempt {record.attempt} has ended already ({found.reason}, said by "
            f"attempt {found.written_by}); nothing was rewound"
        ) from None
    return record


def _read(storage: Storage, name: str) -> Retirement:
    key = f"{names.RETIRED}/{name}"
    data = storage.get(key, max_bytes=schema.MAX_SMALL_DOCUMENT_BYTES).data
    where = f"{storage.where}/{key}"
    return typed(unseal(data, schema=schema.RETIRED_SCHEMA, where=where), Retirement, where=where)
