"""What a start does about rewinds before it looks for a checkpoint: finishes the one that was decided, closes the rest.

An attempt that may rewind announces it. Whatever such an older attempt has not done yet is done or ruled out here, so
the list of checkpoints that follows is the last word. Rank 0 does it; every rank learns what was done, or refuses.
"""

from __future__ import annotations

from typing import Any

from samerun.checkpoint import retired
from samerun.checkpoint.catalog import read_entry
from samerun.errors import Refused, SamerunError
from samerun.health.rollback import past
from samerun.health.rollback.decisions import read_decisions
from samerun.ranks.group import Group
from samerun.storage.api import Storage


def settle_rewinds(place: Storage, group: Group, attempt: int) -> list[str]:
    """Sentences about what was finished. Collective. Raises Refused where the records cannot be read or written."""
    answer: dict[str, Any] = {}
    if group.rank == 0:
        try:
            answer = {"lines": _settle(place, attempt)}
        except (SamerunError, KeyError, TypeError) as error:
            answer = {"error": str(error)}
    answer = group.broadcast(answer)
    if "error" in answer:
        raise Refused(f"{place.where}: the record of a rewind cannot be settled: {answer['error']}")
    return [str(line) for line in answer["lines"]]


def _settle(place: Storage, attempt: int) -> list[str]:
    lines = []
    for older in retired.open_slots(place, attempt):
        record = past.pending(read_decisions(place), older)
        if record is None:
            continue
        name = str(record.evidence["decided"]["target"]["name"])
        retired.retire(
            place,
            attempt=older,
            epoch=attempt,
            target=read_entry(place, name),
            decision=record.number,
            reason=f"decision {record.number}: {record.action.replace('_', ' ')} to {name}",
        )
        lines.append(f"decision {record.number} of attempt {older} is carried out now: {record.action} to {name}")
    retired.close_older(place, attempt)
    return lines
