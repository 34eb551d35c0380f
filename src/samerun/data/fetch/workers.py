"""Loader workers: deaf to what launchers send to a whole process group, and gone when their owner is.

Workers that ignore SIGTERM survive multiprocessing's own exit hook, which sends it and waits for ever. So owners are
closed at exit before that hook, and a worker that does not end within a grace period is killed.
"""

from __future__ import annotations

import atexit
import signal
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, Protocol

IGNORED_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
"""What launchers and schedulers send to a whole process group: a notice to the training loop, which needs data."""
_GRACE_SECONDS: Final = 5.0


class Owner(Protocol):
    def close(self) -> None: ...


_owners: weakref.WeakSet[Owner] = weakref.WeakSet()


@contextmanager
def signals_held() -> Iterator[None]:
    """Holds back the ignored signals while workers start: a fork must not run the parent's handler.

    A worker that never runs WorkerStart keeps them held back, which comes to the same as ignoring them.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class WorkerStart:
    """Runs first in each worker: ends the parent's signal handling there, then the user's own worker_init_fn."""

    def __init__(self, user_init: Callable[[int], None] | None) -> None:
        self._user_init = user_init

    def __call__(self, worker: int) -> None:
        signal.set_wakeup_fd(-1)  # inherited by fork: a byte written here would wake the parent's watcher
        for number in IGNORED_SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, IGNORED_SIGNALS)
        if self._user_init is not None:
            self._user_init(worker)


def close_at_exit(owner: Owner) -> None:
    """Closes `owner` when the process ends, unless it is gone by then; `no_longer_at_exit` after it was closed."""
    if not _owners:
        # exit hooks run last-registered first: after torch and multiprocessing were imported means before theirs
        atexit.unregister(_close_owners)
        atexit.register(_close_owners)
    _owners.add(owner)


def no_longer_at_exit(owner: Owner) -> None:
    _owners.discard(owner)


def _close_owners() -> None:
    for owner in list(_owners):
        owner.close()


def end_workers(iterator: Any) -> None:
    """Ends the workers of a DataLoader's iterator, if it has any; kills those still busy after a grace period."""
    workers = list(getattr(iterator, "_workers", ()))
    feeders = [getattr(queue, "_thread", None) for queue in getattr(iterator, "_index_queues", ())]
    # the iterator's finaliser does this, too, but the traceback of an error in a worker keeps it alive
    getattr(iterator, "_shutdown_workers", lambda: None)()
    for worker in workers:
        worker.join(timeout=_GRACE_SECONDS)
        if worker.is_alive():
            worker.kill()
            worker.join()
    for feeder in feeders:
        if feeder is not None:
            # a queue's own thread frees the queue's semaphores; if the process ends meanwhile, they are left behind
            feeder.join(timeout=_GRACE_SECONDS)
