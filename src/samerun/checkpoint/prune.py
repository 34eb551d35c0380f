"""Carrying retention out, safely against crashes and against newer attempts. No torch.

Removal is two-phase: a checkpoint is renamed into the trash, durably, and only then taken apart; a crash in between
leaves trash that the next sweep removes. Tagged checkpoints always stay, whatever the policies say. Retired ones count
for themselves: the policies keep as many of them, as evidence, and never one less of those still in the running.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from samerun.checkpoint.attempts import newest_attempt
from samerun.checkpoint.catalog import Catalog, read_catalog, read_pointer
from samerun.checkpoint.retention import Policy, Tagged, kept_by_any, to_remove
from samerun.format import names

if TYPE_CHECKING:
    from samerun.storage.api import Storage


@dataclass(frozen=True, slots=True, kw_only=True)
class Pruning:
    """What goes (complete checkpoints, oldest first), what never was complete and goes too, and what stays."""

    removed: tuple[str, ...]
    unfinished: tuple[str, ...]
    kept: tuple[str, ...]
    retired: tuple[str, ...] = ()
    """Of those that stay, the ones on a branch that a rewind has ended."""


def tags(storage: Storage) -> dict[str, str]:
    """Tag → the checkpoint it points at. An unreadable tag points nowhere."""
    found = {}
    for file in storage.names(names.TAGS):
        pointer = read_pointer(storage, f"{names.TAGS}/{file}") if file.endswith(".json") else None
        if pointer is not None:
            found[file.removesuffix(".json")] = pointer.name
    return found


def tags_by_name(storage: Storage) -> dict[str, list[str]]:
    """Checkpoint → its tags, sorted."""
    by_name: dict[str, list[str]] = {}
    for tag, name in sorted(tags(storage).items()):
        by_name.setdefault(name, []).append(tag)
    return by_name


def plan_pruning(
    storage: Storage,
    policies: Sequence[Policy],
    *,
    epoch: int,
    proven: Collection[str],
    busy: Collection[str] = (),
    unfinished: bool = True,
    keep_retired: bool = True,
) -> Pruning:
    """What `prune` would do. Nothing goes when an attempt newer than `epoch` exists: then it is not ours to decide.

    Attempts are looked at *after* the directories were listed, so no directory in the list belongs to a newer one.
    """
    catalog = read_catalog(storage)
    entries = catalog.entries
    tagged = Tagged(frozenset(tags(storage).values()))
    gone = to_remove(entries, kept_by_any([*policies, tagged], entries), epoch=epoch, proven=proven)
    retired = [one.entry for one in catalog.retired]
    stays = kept_by_any([*policies, tagged] if keep_retired else [tagged], retired)
    if any(entry.name in proven for entry in entries):  # with nothing sound in the running, evidence is all there is
        gone = [entry.name for entry in reversed(retired) if entry.name not in stays and entry.epoch <= epoch] + gone
    dead = _unfinished(storage, catalog, busy) if unfinished else []
    if newest_attempt(storage) > epoch:
        gone, dead = [], []
    stay = tuple(entry.name for entry in entries if entry.name not in gone)
    evidence = tuple(entry.name for entry in retired if entry.name not in gone)
    return Pruning(removed=tuple(gone), unfinished=tuple(dead), kept=stay, retired=evidence)


def prune(storage: Storage, pruning: Pruning) -> None:
    """Carries out a plan that was just made."""
    storage.sweep()
    for name in (*pruning.removed, *pruning.unfinished):
        storage.discard(names.checkpoint_prefix(name), names.MANIFEST)


def _unfinished(storage: Storage, catalog: Catalog, busy: Collection[str]) -> list[str]:
    """Directories of saves that never finished. One whose manifest is damaged is evidence and stays."""
    listed = [rejected.name for rejected in catalog.rejected if names.is_checkpoint_name(rejected.name)]
    return [
        name
        for name in listed
        if name not in busy and names.MANIFEST not in storage.names(names.checkpoint_prefix(name))
    ]
