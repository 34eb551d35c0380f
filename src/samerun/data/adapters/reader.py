"""One iterable read item by item over epochs, able to stand again where it stood.

The global generators are keyed to (seed, epoch, item) while the source runs and put back afterwards, so that a shuffle
drawn by a sampler, or by a worker from its base seed, is the same when the source is read again. It ends at what the
source draws from elsewhere: time, threads, the operating system.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from samerun.data.adapters.jsonplain import decode, encode
from samerun.data.adapters.marks import Mark
from samerun.data.fetch.keyed import GeneratorsPutBack, seed_generators
from samerun.data.fetch.workers import close_at_exit, end_workers, no_longer_at_exit, signals_held
from samerun.errors import UsageError


class Reader:
    """Reads `source` epoch after epoch. What is drawn is keyed by `seed` and the number of the `stream`."""

    def __init__(self, source: Any, *, seed: int, stream: int) -> None:
        self._source = source
        close_at_exit(self)
        self._key = (seed, stream)
        self._iterator: Iterator[Any] | None = None
        # what iter() returns unchanged can be read once only
        self.one_shot = iter(source) is source if hasattr(source, "__next__") else False
        self.epoch = 0
        self.item = 0
        """Items read of this epoch."""

    def mark(self) -> Mark:
        """Where a source with state stands now."""
        return Mark(epoch=self.epoch, item=self.item, snapshot=snapshot_of(self._source))

    def stand_at(self, mark: Mark) -> None:
        """Before any reading: the source continues at `mark`."""
        self.epoch, self.item = mark.epoch, mark.item
        if mark.snapshot is not None:
            self._source.load_state_dict(decode(mark.snapshot))
        elif mark.epoch and self.one_shot:
            raise UsageError(f"the stream cannot be read again, so epoch {mark.epoch} cannot be reached")

    def read(self) -> Any:
        """The next item, of the next epoch when this one is over. Raises UsageError for an epoch without items."""
        while True:
            try:
                return self._next()
            except StopIteration:
                self._end_epoch()

    def _next(self) -> Any:
        with GeneratorsPutBack():
            if self._iterator is None:
                _announce_epoch(self._source, self.epoch)
                seed_generators("stream", *self._key, self.epoch)
                with signals_held():
                    self._iterator = iter(self._source)
            seed_generators("item", *self._key, self.epoch, self.item)
            value = next(self._iterator)
        self.item += 1
        return value

    def _end_epoch(self) -> None:
        if self.item == 0:
            raise UsageError(f"epoch {self.epoch} of the stream has no items; check the loader")
        if self.one_shot:
            raise UsageError(
                f"the stream ended after {self.item} items and cannot be read again; train to an earlier `until`, or "
                "give an iterable whose iter() starts afresh"
            )
        self.epoch, self.item = self.epoch + 1, 0
        self._iterator = None

    def close(self) -> None:
        """Ends the source's workers, also those that it keeps for a next iteration."""
        no_longer_at_exit(self)
        iterator, self._iterator = self._iterator, None
        end_workers(iterator)
        end_kept_workers(self._source)


def end_kept_workers(source: Any) -> None:
    """A DataLoader keeps its iterator when workers are persistent, and torchdata's when it was asked for its state."""
    kept = getattr(source, "_iterator", None)
    if hasattr(kept, "_workers"):
        end_workers(kept)
        source._iterator = None


def snapshot_of(source: Any) -> Any:
    """The source's own state as JSON. A loader may start its workers to answer, and draw for them."""
    with GeneratorsPutBack(), signals_held():
        seed_generators("snapshot")
        return encode(source.state_dict())


def _announce_epoch(source: Any, epoch: int) -> None:
    """`set_epoch` where people have it: on the loader, its dataset and its samplers; each owner once."""
    owners = [source, *(getattr(source, name, None) for name in ("dataset", "sampler", "batch_sampler"))]
    for owner in owners:
        set_epoch = getattr(owner, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)
