"""`Data`: a map-style dataset as an endless stream of windows, fetched by one DataLoader that never ends.

The stream crosses windows and epochs, so prefetching workers are never idle at an edge and start once. It is rebuilt
only from the committed cursor. With 0 workers nothing is fetched before its window is. Torch is imported by the
first `windows()`, not by this module.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final, TypedDict, Unpack

from samerun.core.choice import whole_number
from samerun.data.cursor import Cursor, make_cursor
from samerun.data.elastic import Policy
from samerun.data.sampler import Ordered, WindowSampler, length_and_fingerprint
from samerun.data.source import DataWindow, Guarantee, MicroBatch, SourceBase
from samerun.data.windows import EpochEnd, WindowPlan
from samerun.errors import UsageError

if TYPE_CHECKING:
    from samerun.data.fetch.feed import Feed


class LoaderOptions(TypedDict, total=False):
    """The DataLoader arguments that Data passes on. Those that choose samples are not among them: Data does that."""

    collate_fn: Callable[[list[Any]], Any] | None
    num_workers: int
    pin_memory: bool
    prefetch_factor: int | None
    persistent_workers: bool
    timeout: float
    multiprocessing_context: Any
    worker_init_fn: Callable[[int], None] | None


_OPTIONS: Final = frozenset(LoaderOptions.__annotations__)


class Data(Ordered, SourceBase):
    """Windows of a map-style dataset in an order that depends on the seed alone, not on ranks or workers.

    `dataset` has `len()` and `[i]`. `global_batch` samples make one window, cut into microbatches of `micro_batch`.
    `epoch_end`: "straddle" (a window may cross epochs) or "drop_tail" (each epoch loses its last N mod B samples).
    `skip`: (start, stop) ranges of positions in the global order to pass over. `device`: where batches are moved.
    `fingerprint`: your own version text of the dataset; a resume with another one is refused. `on_change`: "exact", or
    "rebatch" to let a resume change global_batch and micro_batch at the saved position (straddling epochs only).

    Guarantee (EXACT): each sample of a decided window exactly once per epoch, in one global order, after any number of
    resumes, on any number of replicas and workers; what `dataset[i]` and `collate_fn` draw from the global generators
    of Python, NumPy and torch CPU is a function of (seed, epoch, sample). It ends at generators that the dataset owns,
    at time and files that it reads, and at changes of content that neither length nor fingerprint shows.
    """

    guarantee: Final = Guarantee.EXACT

    def __init__(
        self,
        dataset: Any,
        *,
        global_batch: int,
        micro_batch: int,
        seed: int = 0,
        epoch_end: str | EpochEnd = EpochEnd.STRADDLE,
        device: Any = None,
        skip: Iterable[tuple[int, int]] = (),
        fingerprint: str | None = None,
        on_change: str | Policy = Policy.EXACT,
        **options: Unpack[LoaderOptions],
    ) -> None:
        _refuse_iterable(dataset)
        length, found = length_and_fingerprint(dataset, fingerprint)
        cursor = make_cursor(
            length, global_batch=global_batch, micro_batch=micro_batch, seed=seed, epoch_end=epoch_end, skip=skip,
            fingerprint=found, on_change=on_change,
        )  # fmt: skip
        self._assemble(dataset, cursor, device, options)

    def _assemble(self, dataset: Any, cursor: Cursor, device: Any, options: LoaderOptions) -> None:
        _check_options(options)
        self._dataset = dataset
        self.cursor = cursor
        self._device = device
        self._options = options
        self._feed: Feed | None = None
        self._turn = 0

    @property
    def device(self) -> Any:
        """Where batches are moved; None: nowhere."""
        return self._device

    def windows(self) -> Iterator[DataWindow]:
        """Endless windows from the committed cursor on. A newer call ends the iteration of an older one."""
        self.cursor.windowing.check_replica(self.cursor.replica)
        self._turn += 1
        return self._windows(self._turn)

    def _windows(self, turn: int) -> Iterator[DataWindow]:
        if self._feed is not None and not self._feed.stands_at(self.cursor.windows):
            self._end_feed()
        self.cursor.began = True
        index, start = self.cursor.windows, self.cursor.positions.committed
        while self._turn == turn:
            plan = self.cursor.plan(index, start)
            yield self._window(plan, turn)
            index, start = plan.index + 1, plan.end
        raise UsageError("this iteration of windows() was ended by a newer one or by close(); use the newer one")

    def _window(self, plan: WindowPlan, turn: int) -> DataWindow:
        taken = False

        def fetch() -> Iterator[MicroBatch]:
            nonlocal taken
            if taken:
                raise UsageError(f"window {plan.index} was already iterated; take the next one from windows()")
            taken = True
            for number in self.cursor.replica.numbers(plan.num_microbatches):
                if self._turn != turn:
                    raise UsageError(f"window {plan.index} belongs to an iteration that has ended; its data is gone")
                yield self._deliver(plan, number)

        return DataWindow(
            index=plan.index,
            start=plan.start,
            end=plan.end,
            epoch=int(plan.epochs[0]),
            num_samples=plan.num_samples,
            num_microbatches=plan.num_microbatches,
            slots=-(-plan.num_microbatches // self.cursor.replica.count),
            coverage=plan.coverage,
            fetch=fetch,
        )

    def _deliver(self, plan: WindowPlan, number: int) -> MicroBatch:
        if self._feed is None:
            self._feed = self._open_feed()
        try:
            fetched = self._feed.take(plan.index, number)
        except BaseException:
            self.close()
            raise
        wanted = self.cursor.delivered(plan.index, number)
        return MicroBatch(
            number=number,
            num_samples=len(wanted.samples),
            coverage=fetched.coverage_high << 32 | fetched.coverage_low,
            samples=wanted.samples,
            value=fetched.value,
        )

    def _open_feed(self) -> Feed:
        from samerun.data.fetch.feed import Feed  # torch is loaded where data is read

        return Feed(self._dataset, self.cursor, self._options, device=self._device)

    def close(self) -> None:
        """Ends the workers; what was fetched and not committed is fetched again by the next `windows()`."""
        self._turn += 1
        self._end_feed()

    def _end_feed(self) -> None:
        feed, self._feed = self._feed, None
        self.cursor.restart()
        if feed is not None:
            feed.close()


def from_dataloader(loader: Any) -> Data:
    """A user's DataLoader with a WindowSampler as a source: same samples, keyed randomness, own generator.

    Raises UsageError for another batch_sampler, or when the loader was already iterated.
    """
    sampler = loader.batch_sampler
    if not isinstance(sampler, WindowSampler):
        raise UsageError(
            f"the DataLoader's order comes from {type(sampler or loader.sampler).__name__}, which cannot be continued; "
            "give it batch_sampler=samerun.data.WindowSampler(dataset, global_batch=…, micro_batch=…), pass the "
            "dataset to samerun.Data, or wrap the loader in samerun.data.Stream(loader)"
        )
    if sampler.cursor.began:
        raise UsageError("the DataLoader was already iterated: some of its samples are gone; make a fresh one")
    data = Data.__new__(Data)
    options: LoaderOptions = {
        "collate_fn": loader.collate_fn,
        "num_workers": loader.num_workers,
        "pin_memory": loader.pin_memory,
        "prefetch_factor": loader.prefetch_factor,
        "persistent_workers": loader.persistent_workers,
        "timeout": loader.timeout,
        "multiprocessing_context": loader.multiprocessing_context,
        "worker_init_fn": loader.worker_init_fn,
    }
    length = len(loader.dataset)
    if length != sampler.cursor.windowing.order.num_samples:
        raise UsageError(
            f"the WindowSampler orders {sampler.cursor.windowing.order.num_samples} samples, the DataLoader's dataset "
            f"has {length}; build the sampler from the same dataset"
        )
    data._assemble(loader.dataset, sampler.cursor, None, options)
    return data


def _check_options(options: LoaderOptions) -> None:
    unknown = sorted(set(options) - _OPTIONS)
    if unknown:
        raise UsageError(
            f"Data does not take {', '.join(unknown)}: global_batch, micro_batch, seed and epoch_end decide which "
            f"samples come when; of DataLoader's arguments it takes {', '.join(sorted(_OPTIONS))}"
        )
    whole_number(options.get("num_workers", 0), option="num_workers", at_least=0, instead="0 reads in this process")
    collate = options.get("collate_fn")
    if collate is not None and not callable(collate):
        raise UsageError(f"collate_fn={collate!r} cannot be called; give a function of a list of samples")


def _refuse_iterable(dataset: Any) -> None:
    torch_data = sys.modules.get("torch.utils.data")
    iterable = torch_data is not None and isinstance(dataset, torch_data.IterableDataset)
    if iterable or not hasattr(dataset, "__getitem__"):
        raise UsageError(
            f"{type(dataset).__name__} has no random access, so Data cannot order it; use samerun.data.Stream(loader) "
            "for an iterable, which says what it can guarantee"
        )
