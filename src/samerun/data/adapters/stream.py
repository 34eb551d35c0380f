"""`Stream`: an iterable of batches as a source. Each batch that the loader yields is one microbatch.

What it can promise depends on what it is given, and it says so (`guarantee`):

    state_dict() and load_state_dict()   SNAPSHOT      torchdata's StatefulDataLoader, Hugging Face iterables, your own
    can be iterated again, alike         REPLAY        a DataLoader, any iterable; resuming reads and drops
    anything, with max_replay=None       BEST_EFFORT   a resume begins wherever the source begins
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final

from samerun.core.choice import whole_number
from samerun.data.adapters.marks import Mark, SnapshotRing, capacity_for
from samerun.data.adapters.recognise import batches_of, counter_for, guarantee_of, whole
from samerun.data.adapters.resume import resumed, stream_state
from samerun.data.coverage import add_coverage, mix64
from samerun.data.elastic import Decision, Policy, Share, parse_bounded
from samerun.data.sampler import check_fingerprint
from samerun.data.source import DataWindow, Guarantee, MicroBatch, Replica, SourceBase
from samerun.errors import UsageError

if TYPE_CHECKING:
    from samerun.data.adapters.reader import Reader

_OFFERED: Final = (Policy.EXACT, Policy.REPLAY, Policy.AT_LEAST_ONCE, Policy.AT_MOST_ONCE, Policy.REFUSE)
_UNDECIDED_WINDOWS: Final = 16
"""How far a loop may run ahead of its commits before it is told."""
_log = logging.getLogger("samerun.data")


class Stream(SourceBase):
    """Windows of `microbatches_per_window` batches of an iterable (default: one for each replica).

    `shared`, on several replicas: True if every replica's loader yields the same batches in the same order (each then
    keeps its own k = j·D + r, reads all, and any replica count continues exactly); False if each loader yields only
    its replica's part. `max_replay`: refuse a resume that would read and drop more batches; None: read nothing again.
    `snapshot_every`: windows between two calls of the loader's state_dict(). `num_samples`: how many samples a batch
    has (default: its length). `on_change`: "exact"; "replay(1000)" is max_replay=1000; "refuse" goes on only where
    nothing changed and nothing is read again; for parts dealt item by item "at-least-once" or "at-most-once" when the
    replica count changes.

    Guarantee: see the module; it ends where the source itself is not a function of its seed and epoch.
    """

    def __init__(
        self,
        loader: Any,
        *,
        microbatches_per_window: int | None = None,
        shared: bool | None = None,
        seed: int = 0,
        max_replay: int | None = 100_000,
        snapshot_every: int = 1,
        on_change: str | Policy = Policy.EXACT,
        num_samples: Callable[[Any], int] | None = None,
        device: Any = None,
        fingerprint: str = "",
    ) -> None:
        if not hasattr(loader, "__iter__") and not hasattr(loader, "__getitem__"):
            raise UsageError(f"{type(loader).__name__} cannot be iterated; give Stream a loader or an iterable")
        check_fingerprint(fingerprint)
        if num_samples is not None and not callable(num_samples):
            raise UsageError(
                f"num_samples={num_samples!r} cannot be called; give a function of a batch, or leave it out"
            )
        if shared not in (True, False, None):
            raise UsageError(f"shared={shared!r}: write True, False or leave it out")
        self._on_change, bound = parse_bounded(on_change, offered=_OFFERED)
        max_replay = _bound(max_replay) if bound is None else bound
        self.guarantee: Final = guarantee_of(loader, replay=max_replay is not None)
        self.decision: Decision | None = None
        self.changeable: Final[frozenset[str]] = frozenset()
        self._loader = loader
        self._asked = _asked(microbatches_per_window)
        self._shared = shared
        self._seed = whole_number(seed, option="seed", at_least=0)
        self._max_replay = max_replay
        self._snapshot_every = whole_number(snapshot_every, option="snapshot_every", at_least=1)
        self._num_samples = num_samples or counter_for(loader)
        self._device = device
        self._fingerprint = fingerprint
        self._replica = Replica()
        self._reader: Reader | None = None
        self._attached = False
        self._opened = False
        self._pending: dict[str, Any] | None = None
        self._resume = (Mark(), 0)
        self._ring: SnapshotRing | None = None
        self._windows = 0
        self._read = 0
        self._turn = 0

    @property
    def device(self) -> Any:
        """Where batches are moved; None: nowhere."""
        return self._device

    @property
    def num_decided(self) -> int:
        """Windows decided so far, those before a resume included."""
        return self._windows

    @property
    def samples_per_epoch(self) -> int | None:
        return None

    @property
    def microbatches_per_window(self) -> int:
        return self._asked or self._replica.count

    @property
    def _is_shared(self) -> bool:
        """A single replica's stream is the whole one."""
        return self._shared is not False

    @property
    def _own(self) -> range:
        """Numbers within a window that this replica trains on."""
        return self._replica.numbers(self.microbatches_per_window)

    @property
    def _reads_per_window(self) -> int:
        return self.microbatches_per_window if self._is_shared else len(self._own)

    def attach(self, replica: Replica) -> None:
        """Says which replica this process is. Raises UsageError when it is not said whose batches the loader yields."""
        if self._ring is not None and replica != self._replica:
            raise UsageError("attach() must come before windows()")
        if replica.count > 1 and self._shared is None:
            raise UsageError(
                f"Stream on {replica.count} replicas: say shared=True if every replica's loader yields the same "
                "batches, or shared=False if each yields only its own part; guessing would repeat or lose samples"
            )
        if (self._asked or replica.count) < replica.count:
            raise UsageError(
                f"microbatches_per_window={self._asked} is less than {replica.count} replicas: some replica would get "
                f"nothing. Use microbatches_per_window >= {replica.count}, or fewer replicas"
            )
        if replica != self._replica and self._reader is not None:
            self._close_reader()  # it was asked for its state before, under another replica's key
        self._replica = replica
        self._attached = True
        self._settle()

    def windows(self) -> Iterator[DataWindow]:
        """Endless windows from the committed cursor on. A newer call ends the iteration of an older one."""
        self._turn += 1
        return self._iterate(self._turn)

    def _iterate(self, turn: int) -> Iterator[DataWindow]:
        if self._ring is None or self._read != self._windows * self._reads_per_window:
            self._open()
        index = self._windows
        while self._turn == turn:
            yield self._window(index, turn)
            index += 1
        raise UsageError("this iteration of windows() was ended by a newer one or by close(); use the newer one")

    def _open(self) -> None:
        from samerun.data.fetch.feed import check_device

        self._settle()
        check_device(self._device)
        if self._ring is not None:
            self._close_reader()
        mark, after = self._resume
        if self._max_replay is not None and after > self._max_replay:
            raise UsageError(
                f"resuming needs {after} batches to be read and dropped, more than max_replay={self._max_replay}; "
                "raise max_replay, or give a source with state_dict() or random access (samerun.Data)"
            )
        mark = self._initial(mark)
        reader = self._reading()
        if self._opened and reader.one_shot and self.guarantee is not Guarantee.SNAPSHOT:
            raise UsageError("the stream was read already and cannot be read again; give a fresh one")
        self._opened = True
        reader.stand_at(mark)
        self._drop(reader, after)
        self._read = self._windows * self._reads_per_window
        self._ring = self._new_ring(mark, after)

    def _initial(self, mark: Mark) -> Mark:
        """The very beginning, with the loader's own state: a sampler may have drawn its seed when it was built."""
        if self.guarantee is not Guarantee.SNAPSHOT or mark != Mark():
            return mark
        self._resume = (self._reading().mark(), 0)
        return self._resume[0]

    def _reading(self) -> Reader:
        """The reader, made when it is first needed: also to ask a loader for its state, which may start its workers."""
        from samerun.data.adapters.reader import Reader

        if self._reader is None:
            stream = 0 if self._is_shared else self._replica.index
            self._reader = Reader(self._loader, seed=self._seed, stream=stream)
        return self._reader

    def _new_ring(self, mark: Mark, after: int) -> SnapshotRing:
        per_window = self._reads_per_window
        ahead = _UNDECIDED_WINDOWS * per_window
        # the stream itself reads nothing in advance, and a loader's own prefetch is behind its state_dict()
        capacity = capacity_for(prefetch=0, workers=0, ahead=ahead, window=per_window, every=1)
        ring = SnapshotRing(capacity=capacity, item=self._read - after, mark=mark)
        ring.commit(self._read)
        return ring

    def _drop(self, reader: Reader, count: int) -> None:
        if not count:
            return
        _log.warning("reading and dropping %d batches to stand where the run stopped", count)
        begin = time.monotonic()
        for _ in range(count):
            reader.read()
        _log.warning("dropped %d batches in %.1f s", count, time.monotonic() - begin)

    def _window(self, index: int, turn: int) -> DataWindow:
        size = self.microbatches_per_window
        start = index * size
        taken = False

        def fetch() -> Iterator[MicroBatch]:
            nonlocal taken
            if taken:
                raise UsageError(f"window {index} was already iterated; take the next one from windows()")
            taken = True
            for number in self._own:
                if self._turn != turn:
                    raise UsageError(f"window {index} belongs to an iteration that has ended; its data is gone")
                yield self._deliver(index, number)
            self._finish(index)

        coverage = 0
        for position in range(start, start + size):
            coverage = add_coverage(coverage, mix64(0, position))
        assert self._reader is not None, "windows() opens the reader"
        return DataWindow(
            index=index,
            start=start,
            end=start + size,
            epoch=self._reader.epoch,
            num_samples=None,
            num_microbatches=size,
            slots=-(-size // self._replica.count),
            coverage=coverage,
            fetch=fetch,
        )

    def _deliver(self, index: int, number: int) -> MicroBatch:
        within = number if self._is_shared else self._own.index(number)
        epoch, value = self._read_to(index * self._reads_per_window + within)
        if self._device is not None:
            from samerun.data.fetch.feed import moved

            value = moved(value, self._device)
        position = index * self.microbatches_per_window + number
        return MicroBatch(
            number=number,
            num_samples=self._num_samples(value),
            coverage=mix64(0, position),
            samples=((epoch, position),),
            value=value,
        )

    def _read_to(self, wanted: int) -> tuple[int, Any]:
        """Reads up to and including read number `wanted`; returns its epoch and value."""
        assert self._reader is not None and self._ring is not None, "windows() opens the reader"
        if wanted < self._read:
            raise UsageError("a microbatch that was passed over was asked for; iterate the windows in order")
        while True:
            self._snapshot_if_due(self._reader, self._ring)
            value = self._reader.read()
            self._read += 1
            if self._reader.item == 1 and self._reader.epoch and self.guarantee is Guarantee.REPLAY:
                self._mark_epoch(self._reader, self._ring)
            if self._read > wanted:
                return self._reader.epoch, value

    def _snapshot_if_due(self, reader: Reader, ring: SnapshotRing) -> None:
        windows, rest = divmod(self._read, self._reads_per_window)
        due = rest == 0 and windows % self._snapshot_every == 0 and self._read > ring.newest
        if due and self.guarantee is Guarantee.SNAPSHOT:
            ring.push(self._read, reader.mark())

    def _mark_epoch(self, reader: Reader, ring: SnapshotRing) -> None:
        """The item just read was the first of its epoch: the only place a source without state can be brought to."""
        if self._read - 1 > ring.newest:
            ring.push(self._read - 1, Mark(epoch=reader.epoch))

    def _finish(self, index: int) -> None:
        """Reads what of window `index` belongs to other replicas, and takes the snapshot that stands at its end."""
        end = (index + 1) * self._reads_per_window
        if self._read < end:
            self._read_to(end - 1)
        assert self._reader is not None and self._ring is not None, "windows() opens the reader"
        if self._read == end:
            self._snapshot_if_due(self._reader, self._ring)

    def commit(self, window: DataWindow) -> None:
        """`window` was decided. What of it was not read is read and dropped: it is decided, too."""
        if self._ring is None or (window.index, window.num_microbatches) != (
            self._windows,
            self.microbatches_per_window,
        ):
            raise UsageError(
                f"commit() got window {window.index}; the next undecided window is {self._windows}. Commit each window "
                "once, in order, after windows() was called"
            )
        self._finish(window.index)
        self._windows += 1
        self._ring.commit(self._windows * self._reads_per_window)

    def state_dict(self) -> dict[str, Any]:
        """The committed cursor with the loader's own snapshot, as JSON. Per replica unless `shared`."""
        self._settle()
        mark, after = self._resume if self._ring is None else self._ring.resume
        mark = self._initial(mark)
        return stream_state(windows=self._windows, mark=mark, after=after, share=self._share(), replica=self._replica)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues at a saved cursor. Raises UsageError once iterated, or if the stream cannot be continued.

        Before `attach`, the check waits for it: whether a stream can be continued depends on the replica.
        """
        if self._ring is not None:
            raise UsageError(
                "the stream was already iterated when its state arrived; call load_state_dict() before windows()"
            )
        self._pending = state
        if self._attached:
            self._settle()

    def _settle(self) -> None:
        """Applies a state that was loaded, now that it is known which replica this is."""
        state, self._pending = self._pending, None
        if state is None:
            return
        loaded = resumed(state, self._share(), replica=self._replica, allowed={self._on_change})
        self._windows, self._resume, self.decision = loaded.windows, (loaded.mark, loaded.after), loaded.decision

    def _share(self) -> Share:
        return Share(
            guarantee=self.guarantee,
            replicas=self._replica.count,
            shared=self._is_shared,
            identity=self.identity(),
        )

    def identity(self) -> dict[str, Any]:
        """What a resume compares: the kind of loader and its sizes, as far as it shows them."""
        return {
            "source": type(self._loader).__qualname__,
            "batch_size": whole(getattr(self._loader, "batch_size", None)),
            "num_workers": whole(getattr(self._loader, "num_workers", None)),
            # a part of a whole is as long as the number of its parts says
            "batches": batches_of(self._loader) if self._is_shared else None,
            "fingerprint": self._fingerprint,
            "seed": self._seed,
            "microbatches_per_window": self.microbatches_per_window,
            "shared": self._is_shared,
        }

    def close(self) -> None:
        """Ends the loader's workers; the stream may be loaded and iterated again."""
        self._turn += 1
        self._close_reader()

    def _close_reader(self) -> None:
        if self._ring is not None:
            self._resume = self._ring.resume
        if self._reader is not None:
            self._reader.close()
        self._reader = self._ring = None


def _asked(microbatches: Any) -> int | None:
    option = "microbatches_per_window"
    return None if microbatches is None else whole_number(microbatches, option=option, at_least=1)


def _bound(max_replay: Any) -> int | None:
    if max_replay is None:
        return None
    return whole_number(max_replay, option="max_replay", at_least=0, instead="None reads nothing again")
