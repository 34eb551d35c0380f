"""What a save cost, as the run's journal tells it: the four clocks, and the training that went on beside it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from samerun.core.units import format_seconds
from samerun.errors import StorageError
from samerun.storage.journal import read_journal

if TYPE_CHECKING:
    from samerun.checkpoint.catalog import Entry
    from samerun.storage.api import Storage

_CLOCKS: Final = ("blocked", "staged", "written", "durable")


def cost_of(storage: Storage, entry: Entry) -> dict[str, Any] | None:
    """None where the journal knows nothing of this save: it died with the process, or is no journal any more."""
    try:
        events = read_journal(storage)
    except (StorageError, ValueError):  # a checkpoint is shown whatever became of the journal beside it
        return None
    for event in events:
        if event.get("event") == "saved" and event.get("checkpoint") == entry.name and "clocks" in event:
            known = ("clocks", "background", "samples_per_second", "retention_error")
            return {name: event[name] for name in known if name in event}
    return None


def cost_line(cost: dict[str, Any]) -> str:
    clocks = cost["clocks"]
    known = [(name, clocks.get(f"{name}_seconds")) for name in _CLOCKS]
    line = ", ".join(f"{name} {format_seconds(seconds)}" for name, seconds in known if seconds is not None)
    beside = cost.get("samples_per_second")
    trained = "" if beside is None else f"; {beside:g} samples/s were trained beside it"
    return f"save       {line}{trained if cost.get('background') else ' (in the foreground)'}"
