"""The store of one run's checkpoints: the one object that `Run` and users hold."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from samerun.checkpoint import attempts
from samerun.checkpoint.catalog import Catalog, Entry, read_catalog
from samerun.checkpoint.load.opened import Checkpoint
from samerun.checkpoint.prune import Pruning, plan_pruning, prune, tags
from samerun.checkpoint.retention import Last, Policy
from samerun.checkpoint.save.agree import one_rank
from samerun.checkpoint.save.commit import Header, begin, check_fence, move_pointer, write_and_commit
from samerun.checkpoint.save.pending import Pending
from samerun.errors import AlreadyExistsError, FencedError, StorageError, UsageError
from samerun.format import names
from samerun.ranks.group import Solo
from samerun.storage.local import Local

if TYPE_CHECKING:
    from samerun.core.component import Captured
    from samerun.core.progress import Progress
    from samerun.ranks.group import Group
    from samerun.storage.api import Storage


def _nowhere(point: str) -> None:
    """The default hook: no fault is planned anywhere."""


class Store:
    """Checkpoints of one run at one path, written by all ranks of `group` together.

    What `save` has published survives a crash of the process or the machine; what it has not is never loaded. Ends at
    the storage's own promises: a disk that loses bytes after fsync is noticed on reading, not prevented.
    Methods marked collective must be called by every rank in the same order. `at` is told the points that a save
    passes (`save:staged`, `save:writing`, `save:shard`, `save:index`, `save:manifest`, `save:committed`).
    """

    def __init__(
        self,
        path: str | Path | Storage,
        *,
        group: Group | None = None,
        keep_last: int = 5,
        at: Callable[[str], None] = _nowhere,
    ) -> None:
        if keep_last < 1:
            raise UsageError(f"keep_last={keep_last}; at least one checkpoint must stay")
        self._storage: Storage = Local(path) if isinstance(path, (str, Path)) else path
        self._group: Group = Solo() if group is None else group
        self._keep_last = keep_last
        self._at = at
        self._epoch: int | None = None
        self._sequence = 0
        self._proven: set[str] = set()

    @property
    def path(self) -> str:
        """Where it is, as a person would write it."""
        return self._storage.where

    def read_run(self) -> dict[str, Any] | None:
        """The run's record; None when the path is empty or missing. SchemaError when something else is there."""
        return attempts.read_run(self._storage)

    def write_run(self, run: dict[str, Any]) -> None:
        """Collective: writes the run's record once; AlreadyExistsError when there is another one already."""

        def write() -> None:
            try:
                attempts.write_run(self._storage, run)
            except AlreadyExistsError:
                if attempts.read_run(self._storage) != run:  # an equal one is our own, its answer lost
                    raise

        one_rank(self._group, write)

    def open_attempt(self, facts: dict[str, Any]) -> int:
        """Collective: takes the next attempt number, from 1. From then on every older attempt is fenced off."""
        self._epoch = int(one_rank(self._group, lambda: attempts.open_attempt(self._storage, facts)))
        self._sequence = 0
        return self._epoch

    def newest_attempt(self) -> int:
        """The largest attempt number at this path, 0 when there is none: one listing, on this rank alone."""
        return attempts.newest_attempt(self._storage)

    def catalog(self) -> Catalog:
        """All complete checkpoints, newest first, and what was passed over with the reason. Any rank, no torch."""
        return read_catalog(self._storage)

    def save(
        self,
        state: Mapping[str, Captured],
        progress: Progress,
        *,
        facts: dict[str, Any],
        tags: Sequence[str] = (),
        digests: Mapping[str, Mapping[str, str]] | None = None,
    ) -> Pending:
        """Collective: publishes `state` as a new checkpoint. Everything has left live memory when it returns.

        `facts` is JSON for the manifest. Opens an attempt first if none is open. `digests` (component → key → digest)
        is kept in this rank's index; fingerprints of `state` when not given. A failed save raises from `result()` of
        what is returned, alike on every rank, and leaves the earlier checkpoints as they were.
        """
        from samerun.checkpoint.save.stage import stage  # tensors are touched from here on: torch is loaded

        for tag in tags:
            names.tag_key(tag)
        if self._epoch is None:
            self.open_attempt({})
        assert self._epoch is not None, "open_attempt sets it"
        staged = stage(state, digests, self._group)
        header = Header(
            epoch=self._epoch, sequence=self._sequence, progress=progress, facts=dict(facts), tags=tuple(tags)
        )
        name = begin(self._storage, self._group, header)
        pending = Pending(name)
        self._at("save:staged")
        try:
            pending.succeed(write_and_commit(self._storage, self._group, name, header, staged, self._at))
        except Exception as error:  # noqa: BLE001  # raised by result(), on every rank alike
            pending.fail(error)
            return pending
        self._sequence += 1
        self._proven.add(name)
        pending.retention_error = self._retain()
        return pending

    def open(self, entry: Entry) -> Checkpoint:
        """Opens a checkpoint on this rank: manifest and this rank's index verified. DamagedError, SchemaError."""
        checkpoint = Checkpoint(self._storage, entry, rank=self._group.rank, size=self._group.size)
        checkpoint.when_consumed = self._proven.add
        return checkpoint

    def tag(self, tag: str, entry: Entry) -> None:
        """Collective: points `tag` at `entry`; a tagged checkpoint is never removed by retention."""
        key = names.tag_key(tag)
        one_rank(self._group, lambda: move_pointer(self._storage, key, entry))

    def tags(self) -> dict[str, str]:
        """Tag → name of the checkpoint it points at; any rank, one listing."""
        return tags(self._storage)

    def prune(self, policies: Sequence[Policy] = ()) -> Pruning:
        """Collective: removes what no policy keeps (default: the last `keep_last`). Tagged ones always stay.

        Never the newest proven checkpoint, one of a newer attempt, or what is not samerun's. FencedError when a newer
        attempt exists.
        """
        if self._epoch is None:
            self.open_attempt({})
        assert self._epoch is not None, "open_attempt sets it"
        epoch, wanted, done = self._epoch, policies or (Last(self._keep_last),), []

        def thin_out() -> None:
            check_fence(self._storage, epoch)
            done.append(plan_pruning(self._storage, wanted, epoch=epoch, proven=self._proven))
            prune(self._storage, done[0])

        one_rank(self._group, thin_out)
        return done[0] if done else Pruning(removed=(), unfinished=(), kept=())

    def _retain(self) -> StorageError | None:
        try:
            self.prune()
        except FencedError:
            return None  # the newer attempt thins out from now on
        except StorageError as error:
            return error
        return None
