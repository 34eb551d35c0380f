"""A run's journal on an object store: immutable parts, since an object cannot be appended to.

`journal/000012-000003.jsonl` is the fourth part of attempt 12: everything since the part before. A part is put when an
event must be known after a crash (`sync`) and at the end; what came after the last part is lost with the process.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, Final

from samerun.core.events import Journal

if TYPE_CHECKING:
    from samerun.core.clock import Clock
    from samerun.storage.api import Storage

FOLDER: Final = "journal"
MAX_PART_BYTES: Final = 2**20
"""A part is put when this much has gathered, so that memory stays bounded without any `sync`."""
_MAX_READ_BYTES: Final = 64 * 2**20
_NAME: Final = re.compile(r"([0-9]{6,})(-[0-9]{6,})?(\.[a-z.]+)\Z")
JOURNAL: Final = ".jsonl"
SAMPLES: Final = ".samples.jsonl"
"""The ledger of samples: a line a window, apart from the journal, which a start reads."""


class StoredJournal(Journal):
    """The journal of one attempt, which alone writes these parts: its number is never given twice."""

    def __init__(self, storage: Storage, attempt: int, *, suffix: str = JOURNAL, clock: Clock | None = None) -> None:
        super().__init__(None, clock=clock)
        self._storage = storage
        self._attempt = attempt
        self._suffix = suffix
        self._num_parts = 0
        self._waiting = bytearray()

    def _append(self, data: bytes) -> None:
        """Raises StorageError when a part cannot be put; its events go with the next one."""
        self._waiting += data
        if len(self._waiting) >= MAX_PART_BYTES:
            self._put()

    def sync(self) -> None:
        self._put()

    def close(self) -> None:
        self._put()

    def _put(self) -> None:
        if not self._waiting:
            return
        key = f"{FOLDER}/{self._attempt:06d}-{self._num_parts:06d}{self._suffix}"
        self._num_parts += 1  # also when it fails: the part may have landed, and its name is then taken
        self._storage.put_if_absent(key, bytes(self._waiting))
        self._waiting.clear()


def read_journal(storage: Storage, *, suffix: str = JOURNAL, max_bytes: int = _MAX_READ_BYTES) -> list[dict[str, Any]]:
    """Every whole line of all attempts, oldest attempt first; from directories and object stores alike.

    Raises StorageError for a file above `max_bytes`, ValueError for a line that is no JSON.
    """
    named = [(found, name) for name in storage.names(FOLDER) if (found := _NAME.match(name)) is not None]
    lines: list[bytes] = []
    for name in sorted(name for found, name in named if found[3] == suffix):
        lines += storage.get(f"{FOLDER}/{name}", max_bytes=max_bytes).data.split(b"\n")[:-1]
    return [json.loads(line) for line in lines]
