"""File operations that fail on purpose, or are recorded: for drills of a store's promises, ours and users' own.

`FaultyFiles` raises an error of the system at the N-th operation, once or from then on (a full disk stays full).
`RecordingFiles` keeps every operation in order, so that the states a crash may leave can be built from them.
"""

from __future__ import annotations

import os
import threading

from samerun.storage.posix import Deed, Files, Operation


class FaultyFiles(Files):
    """Counts operations from 0 and raises `OSError(error_number)` at number `at`; `lasting` also at all later ones."""

    def __init__(self, *, at: int | None, error_number: int, lasting: bool = False) -> None:
        self.num_operations = 0
        self.failed: list[Operation] = []
        self._at = at
        self._error_number = error_number
        self._lasting = lasting
        self._lock = threading.Lock()

    def heal(self) -> None:
        """No operation fails from now on."""
        self._at = None

    def before(self, operation: Operation) -> None:
        with self._lock:
            number = self.num_operations
            self.num_operations += 1
            due = self._at is not None and (number == self._at or (self._lasting and number > self._at))
            if due:
                self.failed.append(operation)
        if due:
            raise OSError(self._error_number, os.strerror(self._error_number), operation.path)


class RecordingFiles(Files):
    """Does everything and keeps what changes storage, with the path that each descriptor was created for."""

    wants_data = True

    def __init__(self) -> None:
        self.operations: list[Operation] = []
        self._paths: dict[int, str] = {}
        self._lock = threading.Lock()

    def create(self, path: str) -> int:
        descriptor = super().create(path)
        with self._lock:
            self._paths[descriptor] = path
        return descriptor

    def before(self, operation: Operation) -> None:
        if operation.deed in (Deed.OPEN, Deed.LOOK, Deed.READ, Deed.LIST, Deed.CLOSE):
            return
        with self._lock:
            path = operation.path or self._paths[operation.descriptor]
            self.operations.append(
                Operation(deed=operation.deed, path=path, target=operation.target, data=operation.data)
            )
