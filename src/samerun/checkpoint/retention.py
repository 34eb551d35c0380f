"""Which checkpoints stay: pure decisions, and their crash-safe execution. No torch."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from samerun.checkpoint.attempts import newest_attempt
from samerun.checkpoint.catalog import Catalog, read_catalog, read_pointer
from samerun.format import names

if TYPE_CHECKING:
    from samerun.checkpoint.catalog import Entry
    from samerun.storage.api import Storage


def kept_last(entries: Sequence[Entry], keep_last: int) -> set[str]:
    """The names of the newest `keep_last` of `entries` (newest first)."""
    return {entry.name for entry in entries[:keep_last]}


def to_remove(entries: Sequence[Entry], kept: Collection[str], *, epoch: int, proven: Collection[str]) -> list[str]:
    """What may go, oldest first: not kept, of this or an older attempt, and never the newest proven one.

    `proven` are those that this process has published or loaded, so whose bytes it knows to be right. When none of
    them would stay, the newest of them stays too; when there is none at all, nothing goes.
    """
    known = [entry.name for entry in entries if entry.name in proven]
    if not known:
        return []
    stay = {*kept, known[0]}
    return [entry.name for entry in reversed(entries) if entry.name not in stay and entry.epoch <= epoch]


def tagged(storage: Storage) -> set[str]:
    """The checkpoints that tags point at."""
    found = set()
    for file in storage.names(names.TAGS):
        pointer = read_pointer(storage, f"{names.TAGS}/{file}") if file.endswith(".json") else None
        if pointer is not None:
            found.add(pointer.name)
    return found


def unfinished(storage: Storage, catalog: Catalog, *, epoch: int, busy: Collection[str]) -> list[str]:
    """Directories of saves that never finished, if this attempt is still the newest one.

    Attempts are looked at *after* the directories were listed: none of them can then belong to a newer attempt.
    """
    listed = [entry.name for entry in catalog.rejected if names.is_checkpoint_name(entry.name)]
    dead = [
        name
        for name in listed
        if name not in busy and names.MANIFEST not in storage.names(names.checkpoint_prefix(name))
    ]
    return dead if newest_attempt(storage) <= epoch else []


def apply_retention(
    storage: Storage, *, keep_last: int, epoch: int, proven: Collection[str], busy: Collection[str] = ()
) -> list[str]:
    """Removes what `to_remove` and `unfinished` allow; returns their names. Nothing when a newer attempt exists."""
    storage.sweep()
    catalog = read_catalog(storage)
    kept = kept_last(catalog.entries, keep_last) | tagged(storage)
    gone = to_remove(catalog.entries, kept, epoch=epoch, proven=proven)
    gone += unfinished(storage, catalog, epoch=epoch, busy=busy)
    if newest_attempt(storage) > epoch:
        return []
    for name in gone:
        storage.discard(names.checkpoint_prefix(name))
    return gone
