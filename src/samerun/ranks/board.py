"""Words that ranks leave for each other outside every collective: under each name the first one stays, for everybody.

On torch.distributed it is compare-and-set on the store that the default group met at: one round trip to one server,
which answers in the order in which it is asked. A call waits for that server only, never for a peer.
"""

from __future__ import annotations

from typing import Any, Protocol

from samerun.errors import PeerError


class Board(Protocol):
    def first(self, name: str, word: str) -> str:
        """Leaves `word` under `name` unless there is one already; returns the one that is there. Not collective.

        Raises PeerError where the board cannot be reached.
        """

    def forget(self, name: str) -> None:
        """Takes the word away. Only for a name that no rank will ask for again."""


class SoloBoard:
    """For a world of one, and for threads that share it: a dict's setdefault is atomic."""

    def __init__(self) -> None:
        self._words: dict[str, str] = {}

    def first(self, name: str, word: str) -> str:
        return self._words.setdefault(name, word)

    def forget(self, name: str) -> None:
        self._words.pop(name, None)


class StoreBoard:
    """On a torch store. `prefix` must be new for every attempt: a launcher's store outlives its workers."""

    def __init__(self, store: Any, *, prefix: str) -> None:
        from torch.distributed.distributed_c10d import PrefixStore

        self._store = PrefixStore(prefix, store)

    def first(self, name: str, word: str) -> str:
        try:
            return bytes(self._store.compare_set(name, "", word)).decode()
        except RuntimeError as error:  # torch's DistStoreError and DistNetworkError are RuntimeErrors
            raise PeerError(f"the store that the ranks met at cannot be reached: {error}") from error

    def forget(self, name: str) -> None:
        try:
            self._store.delete_key(name)
        except RuntimeError as error:
            raise PeerError(f"the store that the ranks met at cannot be reached: {error}") from error


def board_of_default_group(*, prefix: str) -> Board | None:
    """None where the default group has no store of its own (MPI)."""
    from torch.distributed import distributed_c10d

    store: Any = distributed_c10d._get_default_store()  # the one address that is known to work for every rank
    return None if store is None else StoreBoard(store, prefix=prefix)
