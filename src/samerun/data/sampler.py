"""The same order and cursor as a `batch_sampler` for a DataLoader that people already have."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from samerun.data.cursor import Cursor, Positions, make_cursor
from samerun.data.elastic import Decision, Policy
from samerun.data.source import DataWindow, Replica
from samerun.data.windows import EpochEnd
from samerun.errors import UsageError


def length_and_fingerprint(dataset: Any, fingerprint: str | None = None) -> tuple[int, str]:
    """How many samples, and a text that changes when the dataset does.

    Without a `fingerprint` argument: the dataset's own `fingerprint` or `_fingerprint` (Hugging Face), else only its
    class and length, so that two versions of one size look alike: nothing is read to find out.
    """
    check_fingerprint(fingerprint)
    if isinstance(dataset, int) and not isinstance(dataset, bool):
        return dataset, fingerprint or ""
    try:
        length = len(dataset)
    except (TypeError, NotImplementedError) as error:
        raise UsageError(
            f"{type(dataset).__name__} has no length, so its samples cannot be ordered; give a dataset with len() and "
            "[i], or use samerun.data.Stream(loader) for an iterable"
        ) from error
    for name in ("fingerprint", "_fingerprint"):
        known = getattr(dataset, name, None)
        if fingerprint is None and isinstance(known, str):
            fingerprint = known
    return length, type(dataset).__qualname__ if fingerprint is None else fingerprint


def check_fingerprint(fingerprint: Any) -> None:
    """Raises UsageError for what is no text: it is kept as one."""
    if not isinstance(fingerprint, (str, type(None))):
        raise UsageError(f"fingerprint={fingerprint!r} must be a text that names the version, such as 'v3'")


class Ordered:
    """What whoever serves a cursor's order answers: where it stands, what is saved, what may be changed."""

    cursor: Cursor

    @property
    def samples_per_epoch(self) -> int:
        return self.cursor.windowing.samples_per_epoch

    @property
    def positions(self) -> Positions:
        """Produced, delivered and committed positions of this replica; only the last is saved."""
        return self.cursor.positions

    @property
    def num_decided(self) -> int:
        """Windows decided so far, those before a resume included."""
        return self.cursor.windows

    @property
    def decision(self) -> Decision | None:
        """What the last load_state_dict decided, with its counts; None before."""
        return self.cursor.decision

    @property
    def changeable(self) -> frozenset[str]:
        """Names in `identity()` that may differ on a resume, because `on_change` says so."""
        return self.cursor.changeable

    def attach(self, replica: Replica) -> None:
        """Says which replica this process is, before iteration. Raises UsageError if some replica would get nothing."""
        self.cursor.attach(replica)

    def commit(self, window: DataWindow | None = None) -> None:
        """The next undecided window (`window`, when given) was decided: the saved position moves to its end.

        Raises UsageError for any other window.
        """
        self.cursor.commit(window)

    def skip(self, start: int, stop: int) -> None:
        """Passes over positions [start, stop) from now on; recorded in the state. Not while iterating."""
        self.cursor.skip(start, stop)

    def state_dict(self) -> dict[str, Any]:
        """The committed cursor as plain JSON, under 1 KiB; the same on every rank; valid at any time."""
        return self.cursor.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues at a saved cursor, in O(1). Raises UsageError once iterated, or for other data than was saved."""
        self.cursor.load_state_dict(state)

    def identity(self) -> dict[str, Any]:
        """What must be the same for a resumed run to be the same run, as plain JSON."""
        return self.cursor.identity()


class WindowSampler(Ordered):
    """A `batch_sampler` that yields this replica's microbatches, window after window, without end.

    `DataLoader(dataset, batch_sampler=WindowSampler(dataset, global_batch=64, micro_batch=8, seed=7))` can be given to
    `Run(data=…)`, or used alone: take `microbatches_per_window` batches, update, `commit()`; save `state_dict()`.
    Guarantee: each sample of a committed window exactly once per epoch, in an order that depends on neither ranks nor
    workers. It ends at the order: used alone, what the dataset draws at random is not keyed to the sample.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        global_batch: int,
        micro_batch: int,
        seed: int = 0,
        epoch_end: str | EpochEnd = EpochEnd.STRADDLE,
        skip: tuple[tuple[int, int], ...] = (),
        fingerprint: str | None = None,
        on_change: str | Policy = Policy.EXACT,
    ) -> None:
        length, found = length_and_fingerprint(dataset, fingerprint)
        self.cursor = make_cursor(
            length, global_batch=global_batch, micro_batch=micro_batch, seed=seed, epoch_end=epoch_end, skip=skip,
            fingerprint=found, on_change=on_change,
        )  # fmt: skip

    def __iter__(self) -> Iterator[list[int]]:
        self.cursor.restart()
        self.cursor.began = True
        return ([sample for _, sample in plan.samples] for plan in self.cursor.own_microbatches())

    @property
    def microbatches_per_window(self) -> int:
        """How many batches of the loader make this replica's part of one window."""
        return len(self.cursor.replica.numbers(self.cursor.windowing.num_microbatches))
