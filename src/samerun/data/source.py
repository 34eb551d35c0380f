"""What a run needs from its data: windows in order, a cursor that moves only when a window is decided, an identity.

The protocol between `Run` and any source of data, and `as_source`, which recognises what people have. No torch here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol, Self, runtime_checkable

from samerun.errors import UsageError


class Guarantee(Enum):
    """How much a resumed run may rely on its data. The value is the name that records use."""

    EXACT = ("exact", "each sample of a decided window exactly once, in one global order, for any ranks and workers")
    SNAPSHOT = ("snapshot", "exact while rank and worker counts stay the same: the loader's own state is saved")
    REPLAY = ("replay", "exact if the source yields the same items again: a resume reads and drops what was consumed")
    BEST_EFFORT = ("best_effort", "the source promises nothing: samples may repeat or go missing after a resume")

    def __init__(self, label: str, meaning: str) -> None:
        self.label = label
        self.meaning = meaning

    def __str__(self) -> str:
        return f"{self.label}: {self.meaning}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """Data-parallel replica `index` of `count`: tensor-, pipeline- and context-parallel peers are one replica."""

    index: int = 0
    count: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.count:
            raise UsageError(f"replica {self.index} of {self.count}: the index must be 0 … {self.count - 1}")

    def numbers(self, num_microbatches: int) -> range:
        """Microbatches of a window that are this replica's own: k = j·D + r."""
        return range(self.index, num_microbatches, self.count)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MicroBatch:
    """One microbatch as it was delivered."""

    number: int
    """k, 0-based within the window, over all replicas."""
    num_samples: int
    coverage: int
    """Σ mix64(epoch, sample) mod 2^64 over the samples that were really read (see coverage.py)."""
    samples: tuple[tuple[int, int], ...]
    """(epoch, sample id) of each sample, in batch order."""
    value: Any
    """What the training loop sees: collated, on the device that was asked for."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DataWindow:
    """The samples of one attempted update. Iterating it fetches this replica's own microbatches, once, in order."""

    index: int
    """Absolute number over the whole run, from 0."""
    start: int
    end: int
    """Positions in the global order, [start, end), over all replicas."""
    epoch: int
    """Epoch of the first sample."""
    num_samples: int | None
    """Samples over all replicas: end − start, less what skip ranges took out. None where it shows only on arrival."""
    num_microbatches: int
    """K, over all replicas."""
    slots: int
    """ceil(K / D): the forwards that every rank must make where forwards have to match."""
    coverage: int | None
    """What Σ `MicroBatch.coverage` over all replicas must come to mod 2^64; None where the source cannot know it."""
    fetch: Callable[[], Iterator[MicroBatch]] = field(repr=False)

    def __iter__(self) -> Iterator[MicroBatch]:
        return self.fetch()


@runtime_checkable
class DataSource(Protocol):
    """What `Run` accepts as `data=`."""

    @property
    def guarantee(self) -> Guarantee: ...

    @property
    def samples_per_epoch(self) -> int | None:
        """None where the source has no epochs or does not know their length."""

    def attach(self, replica: Replica) -> None:
        """Says which replica this process is. Called once, before `windows()`; raises UsageError if it cannot serve."""

    def windows(self) -> Iterator[DataWindow]:
        """Endless, from the committed cursor on."""

    def commit(self, window: DataWindow) -> None:
        """`window` was decided. It must be the next undecided one; raises UsageError otherwise."""

    def state_dict(self) -> dict[str, Any]:
        """Only what is committed, as plain JSON; valid at any time."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues from `state`. Raises UsageError once iteration has begun, or if the state is another source's."""

    def identity(self) -> dict[str, Any]:
        """What must be the same for a resumed run to be the same run, as plain JSON."""

    def close(self) -> None:
        """Ends workers. The source may be loaded and iterated again afterwards."""


class SourceBase:
    """`with source:` closes it."""

    def close(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def as_source(data: Any) -> DataSource:
    """The source behind what a user passed as `data=`.

    Any object with the protocol is taken as it is. A torch DataLoader whose batch_sampler is a WindowSampler is rebuilt
    from its attributes so that the randomness of samples is keyed, too. Raises UsageError, naming Data and Stream, for
    anything else.
    """
    torch_data = sys.modules.get("torch.utils.data")
    if torch_data is not None and isinstance(data, torch_data.DataLoader):
        from samerun.data.loader import from_dataloader

        return from_dataloader(data)
    if isinstance(data, DataSource):
        return data
    missing = [name for name in ("windows", "commit", "state_dict", "load_state_dict") if not hasattr(data, name)]
    raise UsageError(
        f"data= got {type(data).__name__}, which lacks {', '.join(missing) or 'part of the DataSource protocol'}; "
        "pass samerun.Data(dataset, global_batch=…, micro_batch=…) for a dataset with len() and [i], or "
        "samerun.data.Stream(loader) for an iterable"
    )
