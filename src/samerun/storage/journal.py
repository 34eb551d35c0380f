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
_NAME: Final = re.compile(r"([0-9]{6,})(-[0-9]{6,})?\.jsonl\Z")


class StoredJournal(Journal):
    """The journal of one attempt, which alone writes these parts: its number is never given twice."""

    def __init__(self, storage: Storage, attempt: int, *, clock: Clock | None = None) -> None:
        super().__init__(None, clock=clock)
        self._storage = storage
        self._attempt = attempt
        self._num_parts = 0
        self._waiting = bytearray()

    def write(self, event: str, *, sync: bool = False, **values: Any) -> None:
        """Raises StorageError when a part cannot be put; its events go with the next one."""
        self._waiting += self._line(event, values)
        if sync or len(self._waiting) >= MAX_PART_BYTES:
            self._put()

    def close(self) -> None:
        self._put()

    def _put(self) -> None:
        if not self._waiting:
            return
        key = f"{FOLDER}/{self._attempt:06d}-{self._num_parts:06d}.jsonl"
        self._num_parts += 1  # also when it fails: the part may have landed, and its name is then taken
        self._storage.put_if_absent(key, bytes(self._waiting))
        self._waiting.clear()


def read_journal(storage: Storage) -> list[dict[str, Any]]:
    """Every whole line of all attempts, oldest attempt first; from directories and object stores alike."""
    files = sorted(name for name in storage.names(FOLDER) if _NAME.match(name))
    lines: list[bytes] = []
    for name in files:
        lines += storage.get(f"{FOLDER}/{name}", max_bytes=_MAX_READ_BYTES).data.split(b"\n")[:-1]
    return [json.loads(line) for line in lines]
