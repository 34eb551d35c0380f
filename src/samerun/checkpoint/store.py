"""The store of one run's checkpoints: the one object that `Run` and users hold."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from samerun.checkpoint import attempts
from samerun.checkpoint.catalog import Catalog, Entry, read_catalog
from samerun.checkpoint.load.opened import Checkpoint
from samerun.checkpoint.prune import Pruning, plan_pruning, prune, tags
from samerun.checkpoint.retention import Last, Policy
from samerun.checkpoint.save.agree import all_ranks, one_rank
from samerun.checkpoint.save.commit import Header, check_fence, move_pointer, named, point_at, write_and_commit
from samerun.checkpoint.save.pending import Pending
from samerun.core.clock import Clock, SystemClock
from samerun.errors import AlreadyExistsError, CheckpointError, FencedError, StorageError, UsageError
from samerun.format import names
from samerun.ranks.group import Solo
from samerun.storage.opening import open_storage

if TYPE_CHECKING:
    from samerun.checkpoint.save.fingerprints import Fingerprints
    from samerun.checkpoint.save.stage import Staged
    from samerun.checkpoint.save.staging import Staging, StagingBuffer
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

    With a `background_group` (a second group of the same ranks, used by nobody else; `Solo()` for one process) `save`
    returns once all is copied, and a thread writes and publishes. One save is in flight at most: the next `save` waits
    for it, and raises its error if nobody asked for the result. The copies take as much memory as a rank writes of one
    checkpoint, once; where a rank needs more than `max_staging_bytes`, the save is made in the foreground, uncopied.
    """

    def __init__(
        self,
        path: str | Path | Storage,
        *,
        group: Group | None = None,
        keep_last: int = 5,
        at: Callable[[str], None] = _nowhere,
        background_group: Group | None = None,
        max_staging_bytes: int | None = None,
        clock: Clock | None = None,
    ) -> None:
        if keep_last < 1:
            raise UsageError(f"keep_last={keep_last}; at least one checkpoint must stay")
        self._storage: Storage = open_storage(path) if isinstance(path, (str, Path)) else path
        self._group: Group = Solo() if group is None else group
        self._background = background_group
        self._max_staging_bytes = max_staging_bytes
        self.staging_bytes = 0
        """The largest copy that a rank needed for the last background save."""
        self._keep_last = keep_last
        self._at = at
        self._clock: Clock = SystemClock() if clock is None else clock
        self._epoch: int | None = None
        self._sequence = 0
        self._proven: set[str] = set()
        self._pending: Pending | None = None
        self._buffer: StagingBuffer | None = None

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
        late: Collection[str] = (),
    ) -> Pending:
        """Collective: publishes `state` as a new checkpoint. Everything has left live memory when it returns.

        Without a background group the save is also over when it returns.

        `facts` is JSON for the manifest (rank 0's counts). Opens an attempt first if none is open. `digests`
        (component → key → digest) is kept in this rank's index; fingerprints of `state` when not given. A failed save
        raises from `result()`, alike on every rank, or at the next save; earlier checkpoints stay as they were.

        Shared tensors of the components in `late` are copied after the return, in the background. The caller promises
        to call `fence()` before it changes one; a write before that fails the save with TornCopyError.
        """
        from samerun.checkpoint.save.fingerprints import Fingerprints  # tensors are touched from here on
        from samerun.checkpoint.save.stage import stage

        started = self._clock.monotonic_seconds()
        self.settle()
        for tag in tags:
            names.tag_key(tag)
        if self._epoch is None:
            self.open_attempt({})
        assert self._epoch is not None, "open_attempt sets it"
        fingerprints = Fingerprints(state, digests)
        staged = stage(state, fingerprints, self._group)
        header = Header(
            epoch=self._epoch, sequence=self._sequence, progress=progress, facts=dict(facts), tags=tuple(tags)
        )
        name, header = named(self._group, header)
        staging = self._staging(staged, fingerprints, late)
        pending = self._pending = Pending(name, in_background=staging is not None)
        if staging is None:
            self._finish(pending, header, replace(staged, unread=fingerprints), started)
            pending.clocks.staged_seconds = pending.clocks.written_seconds  # nothing was copied: writing was staging
        else:
            work = (pending, header, staging, started)
            # a daemon: a process that must leave at once cannot wait, and what it leaves behind has no manifest
            pending.run_in(threading.Thread(target=self._finish_staged, args=work, name=f"save {name}", daemon=True))
        pending.clocks.blocked_seconds = self._clock.monotonic_seconds() - started
        return pending

    def fence(self) -> None:
        """Returns once the save in flight, if any, reads no live memory any more. This rank alone; raises nothing."""
        if self._pending is not None:
            self._pending.staged.until_over()

    def wait(self) -> None:
        """Returns once the save in flight, if any, is over, whatever its end. This rank alone; raises nothing."""
        if self._pending is not None:
            self._pending.wait()

    def settle(self) -> None:
        """Waits for the save in flight, if any, and raises its error if nobody has seen it yet. Collective."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.wait()
            all_ranks(self._group, pending.raise_untold)  # on one rank the result may have been asked for

    def close(self) -> None:
        """The end: as `settle`, and the staging memory is given back. Collective."""
        try:
            self.settle()
        finally:
            self._buffer = None

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _staging(self, staged: Staged, fingerprints: Fingerprints, late: Collection[str]) -> Staging | None:
        """Collective: the copies of this save, made as far as they must be now; None for a save in the foreground."""
        from samerun.checkpoint.save.staging import Staging, StagingBuffer, needed_bytes

        if self._background is None:
            return None
        done: list[Staging] = []
        needed, limit = needed_bytes(staged.pieces), self._max_staging_bytes
        self.staging_bytes = max(all_ranks(self._group, lambda: needed))
        if limit is not None and self.staging_bytes > limit:
            return None
        if self._buffer is None:
            self._buffer = StagingBuffer()
        buffer = self._buffer

        def copy() -> None:
            done.append(Staging(staged, fingerprints, buffer, late=late))
            done[0].at_edge()

        all_ranks(self._group, copy)  # no memory on one rank is an error on all of them, not a hang
        return done[0]

    def _finish_staged(self, pending: Pending, header: Header, staging: Staging, started: float) -> None:
        """The thread of a background save."""
        assert self._background is not None, "only a background save is staged"

        def copy() -> None:
            try:
                staging.late()
            except Exception as error:
                pending.staged.fail(error)
                raise
            pending.clocks.staged_seconds = self._clock.monotonic_seconds() - started
            pending.staged.come()

        try:
            all_ranks(self._background, copy)
            staged = staging.finish()
        except Exception as error:  # noqa: BLE001  # raised by result() or at the next save, on every rank alike
            pending.finish(error)
        else:
            self._finish(pending, header, staged, started)

    def _finish(self, pending: Pending, header: Header, staged: Staged, started: float) -> None:
        """Writes, publishes, thins out. In the calling thread, or in the one of a background save."""
        group = self._group if self._background is None else self._background

        def at(point: str) -> None:
            if point == "save:index":
                pending.clocks.written_seconds = self._clock.monotonic_seconds() - started
            self._at(point)

        try:
            entry = write_and_commit(self._storage, group, pending.name, header, staged, at)
            pending.clocks.durable_seconds = self._clock.monotonic_seconds() - started
            pending.published(entry)
            self._sequence += 1
            self._proven.add(pending.name)
            point_at(self._storage, group, entry, header)
            at("save:committed")
            pending.retention_error = self._retain(group)
        except Exception as error:  # noqa: BLE001  # raised by result() or at the next save, on every rank alike
            pending.finish(error)
        else:
            pending.finish()

    def open(self, entry: Entry) -> Checkpoint:
        """Opens a checkpoint on this rank: manifest and this rank's index verified. DamagedError, SchemaError."""
        checkpoint = Checkpoint(self._storage, entry, rank=self._group.rank, size=self._group.size)
        checkpoint.when_consumed = self._proven.add
        return checkpoint

    def tag(self, tag: str, entry: Entry) -> None:
        """Collective: points `tag` at `entry`, also an older one; a tagged checkpoint is never removed by retention.

        FencedError when this store has opened an attempt and a newer one exists.
        """
        key = names.tag_key(tag)

        def point() -> None:
            if self._epoch is not None:
                check_fence(self._storage, self._epoch)
            move_pointer(self._storage, key, entry, back=True)

        one_rank(self._group, point)

    def tags(self) -> dict[str, str]:
        """Tag → name of the checkpoint it points at; any rank, one listing."""
        return tags(self._storage)

    def prune(self, policies: Sequence[Policy] = (), *, group: Group | None = None) -> Pruning:
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

        one_rank(self._group if group is None else group, thin_out)
        return done[0] if done else Pruning(removed=(), unfinished=(), kept=())

    def _retain(self, group: Group) -> StorageError | None:
        try:
            self.prune(group=group)
        except FencedError:
            return None  # the newer attempt thins out from now on
        except StorageError as error:
            return error
        except CheckpointError as error:  # a record of a rewind that cannot be read: nothing goes, the save stands
            return StorageError(errno.EIO, str(error), self.path)
        return None
