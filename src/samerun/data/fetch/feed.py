"""One torch DataLoader over a replica's endless microbatches, its workers, and their clean end."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.utils.data import DataLoader, default_collate

from samerun.data.cursor import Cursor
from samerun.data.fetch.keyed import Fetched, KeyedFetch, identity_collate
from samerun.data.fetch.workers import WorkerStart, close_at_exit, end_workers, no_longer_at_exit, signals_held
from samerun.data.windows import MicroBatchPlan
from samerun.errors import UsageError

if TYPE_CHECKING:
    from samerun.data.loader import LoaderOptions


_TOGETHER: Final = 4
"""Microbatches read at once without workers. Between two forwards the caches are cold, and what reading itself costs is
several times as dear there: four at once cost little more than one."""
_QUICK_SECONDS: Final = 5e-4
"""Only while one takes no longer to read: a slow one is better read while a device still computes the last."""


class Feed:
    """Fetches microbatches in order, from the cursor's committed position on, until closed. Moves them to `device`."""

    def __init__(self, dataset: Any, cursor: Cursor, options: LoaderOptions, *, device: Any = None) -> None:
        check_device(device)
        self._device = device
        self.next_window = cursor.windows
        self._replica = cursor.replica
        self._num_microbatches = cursor.windowing.num_microbatches
        self._next_number = self._replica.index
        collate = options.get("collate_fn") or default_collate
        workers = options.get("num_workers", 0)
        passed: dict[str, Any] = {name: value for name, value in options.items() if name != "collate_fn"}
        passed["worker_init_fn"] = WorkerStart(options.get("worker_init_fn")) if workers else None
        # a generator of its own: the iterator's base seed is otherwise drawn from the global one
        passed["generator"] = torch.Generator().manual_seed(0)
        plans, keyed = cursor.own_microbatches(), KeyedFetch(dataset, collate=collate, seed=cursor.windowing.order.seed)
        loader = _dataloader(keyed, batch_sampler=_Plans(plans), collate_fn=identity_collate, **passed)
        self._iterator: Iterator[Fetched] | None
        if workers or loader.pin_memory:
            close_at_exit(self)
            with signals_held():
                self._iterator = iter(loader)
        else:
            # nothing is left for a DataLoader to do, and its own work for a batch is more than all of this
            self._iterator = self._read_here(keyed, plans)

    def stands_at(self, window: int) -> bool:
        """Whether the next microbatch to come is the first of `window`."""
        return (self.next_window, self._next_number) == (window, self._replica.index)

    def take(self, window: int, number: int) -> Fetched:
        """The microbatch (window, number); earlier ones that a loop left behind are read and dropped."""
        assert self._iterator is not None, "a closed feed was asked for data"
        if (window, number) < (self.next_window, self._next_number):
            raise UsageError(
                f"microbatch {number} of window {window} was passed over: the loop went on to window "
                f"{self.next_window}; iterate the windows in order"
            )
        while True:
            fetched = next(self._iterator)
            expected = (self.next_window, self._next_number)
            assert (fetched.window, fetched.number) == expected, f"the loader gave {fetched[:2]}, expected {expected}"
            self._advance()
            if (fetched.window, fetched.number) == (window, number):
                return fetched if self._device is None else fetched._replace(value=moved(fetched.value, self._device))

    def _read_here(self, keyed: KeyedFetch, plans: Iterator[MicroBatchPlan]) -> Iterator[Fetched]:
        """Never beyond the window of what is asked for: at an edge nothing is read that is not decided."""
        together = 1
        for plan in plans:
            later = range(plan.number, self._num_microbatches, self._replica.count)[1:together]
            group = [plan, *islice(plans, len(later))]
            began = time.perf_counter()
            fetched = keyed.fetch(group)
            is_quick = time.perf_counter() - began <= _QUICK_SECONDS * len(group)
            together = _TOGETHER if is_quick else 1
            yield from fetched

    def _advance(self) -> None:
        self._next_number += self._replica.count
        if self._next_number >= self._num_microbatches:
            self.next_window += 1
            self._next_number = self._replica.index

    def close(self) -> None:
        """Ends the workers. Idempotent."""
        no_longer_at_exit(self)
        iterator, self._iterator = self._iterator, None
        end_workers(iterator)


def _dataloader(dataset: Any, **arguments: Any) -> DataLoader[Any]:
    try:
        return DataLoader(dataset, **arguments)
    except ValueError as error:
        raise UsageError(f"the DataLoader refuses these arguments: {error}") from error


class _Plans:
    """A batch sampler over one pass of plans."""

    def __init__(self, plans: Iterable[MicroBatchPlan]) -> None:
        self._plans = plans

    def __iter__(self) -> Iterator[MicroBatchPlan]:
        return iter(self._plans)


def check_device(device: Any) -> None:
    """Raises UsageError for a device that batches cannot be moved to, before a batch was read for it."""
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, TypeError) as error:
        raise UsageError(f"device={device!r} cannot be used here: {str(error).splitlines()[0]}") from error


def moved(value: Any, device: Any) -> Any:
    """`value` with every tensor in it on `device`: tensors, mappings, tuples, lists, and objects with `.to()`."""
    if hasattr(value, "to"):
        return value.to(device, non_blocking=True) if isinstance(value, torch.Tensor) else value.to(device)
    if isinstance(value, Mapping):
        return {key: moved(item, device) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(moved(item, device) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(moved(item, device) for item in value)
    return value
