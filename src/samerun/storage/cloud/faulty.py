"""Requests to an object store that fail on purpose: for drills of the store's promises, ours and users' own."""

from __future__ import annotations

import threading
from enum import Enum
from typing import TYPE_CHECKING

from obstore.exceptions import GenericError

from samerun.storage.cloud.requests import Request, Requests

if TYPE_CHECKING:
    from obstore.store import ObjectStore


class Fault(Enum):
    REFUSED = "refused"
    """The request never reached the store: throttled, timed out on the way, 5xx."""
    LOST = "lost"
    """The request was carried out; its answer never came."""


class FaultyRequests(Requests):
    """Counts requests from 0 and fails number `at`; `lasting`: also all later ones, as when the store is down."""

    def __init__(
        self, store: ObjectStore, *, at: int | None, fault: Fault, lasting: bool = False, part_bytes: int = 8 * 2**20
    ) -> None:
        super().__init__(store, part_bytes=part_bytes)
        self.num_requests = 0
        self.failed: list[Request] = []
        self._at = at
        self._fault = fault
        self._lasting = lasting
        self._lock = threading.Lock()
        self._due: set[Request] = set()

    def heal(self) -> None:
        """No request fails from now on."""
        self._at = None

    def before(self, request: Request) -> None:
        with self._lock:
            number = self.num_requests
            self.num_requests += 1
            is_due = self._at is not None and (number == self._at or (self._lasting and number > self._at))
            if not is_due:
                return
            self.failed.append(request)
            if self._fault is Fault.LOST:
                self._due.add(request)
                return
        raise GenericError(f"planned: {request.verb.value} of {request.key} refused")

    def after(self, request: Request) -> None:
        with self._lock:
            if request not in self._due:
                return
            self._due.remove(request)
        raise GenericError(f"planned: the answer to {request.verb.value} of {request.key} was lost")
