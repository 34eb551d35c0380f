"""The contract of a source of data, asked of every one that samerun has, and of broken ones that it must catch."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from samerun.data import Data, DataWindow, Guarantee, MicroBatch, PackedDocuments, Replica, Stream, WindowSampler
from samerun.errors import UsageError
from samerun.testing import check_source

torch.set_num_threads(1)
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")


class Noisy:
    """Sample i with a draw of each kind."""

    def __len__(self) -> int:
        return 13

    def __getitem__(self, i: int) -> torch.Tensor:
        return torch.tensor([i, random.random(), torch.rand(()).item()])


class Reels(IterableDataset):
    """Seven items an epoch, always the same."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(7))


class OwnState:
    """A loader with a state of its own; wherever it stands, it goes on."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[int]:
        while self.at < 7:
            self.at += 1
            yield self.at - 1
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def sampled() -> DataLoader[Any]:
    dataset: Any = Noisy()
    return DataLoader(dataset, batch_sampler=WindowSampler(dataset, global_batch=7, micro_batch=2))


def packed() -> Data:
    documents = [list(range(d, d + 1 + d % 5)) for d in range(40)]
    text = PackedDocuments(documents, [len(d) for d in documents], sequence_length=7)
    return Data(text, global_batch=6, micro_batch=1, seed=3)


def stateful() -> Stream:
    from torchdata.stateful_dataloader import StatefulDataLoader

    return Stream(StatefulDataLoader(list(range(26)), batch_size=2, shuffle=False), microbatches_per_window=2)


SOURCES: dict[str, Callable[[], Any]] = {
    "Data": lambda: Data(Noisy(), global_batch=7, micro_batch=2, seed=5),
    "Data, drop_tail": lambda: Data(Noisy(), global_batch=6, micro_batch=1, epoch_end="drop_tail"),
    "Data, skip": lambda: Data(Noisy(), global_batch=6, micro_batch=2, skip=[(3, 9), (20, 21)]),
    "Data, one worker": lambda: Data(Noisy(), global_batch=7, micro_batch=2, num_workers=1),
    "a DataLoader with WindowSampler": sampled,
    "PackedDocuments": packed,
    "Stream of a StatefulDataLoader": stateful,
    "Stream of a plain iterable": lambda: Stream(Reels(), microbatches_per_window=2),
    "Stream of an object with a state": lambda: Stream(OwnState(), microbatches_per_window=3),
}


@pytest.mark.parametrize("name", SOURCES)
def test_every_source_keeps_its_contract(name: str) -> None:
    if name == "Stream of a StatefulDataLoader":
        pytest.importorskip("torchdata")
    few = {"windows": 3, "replicas": (2,)} if "worker" in name else {}
    assert check_source(SOURCES[name], **few) == []  # type: ignore[arg-type]


class Plain:
    """A source by hand that is right: numbers in order, four microbatches of one a window."""

    guarantee = Guarantee.EXACT
    samples_per_epoch: int | None = None

    def __init__(self) -> None:
        self.at = 0
        self.began = False
        self.replica = Replica()

    def attach(self, replica: Replica) -> None:
        self.replica = replica

    def value(self, index: int, number: int) -> float:
        return float(4 * index + number)

    def coverage(self, index: int) -> int | None:
        return None

    def windows(self) -> Iterator[DataWindow]:
        self.began = True
        index = self.at
        while True:
            yield self.window(index)
            index += 1

    def window(self, index: int) -> DataWindow:
        def fetch() -> Iterator[MicroBatch]:
            for number in self.replica.numbers(4):
                yield MicroBatch(number=number, num_samples=1, coverage=1, samples=(), value=self.value(index, number))

        return DataWindow(
            index=index, start=4 * index, end=4 * index + 4, epoch=0, num_samples=4, num_microbatches=4, slots=4,
            coverage=self.coverage(index), fetch=fetch,
        )  # fmt: skip

    def commit(self, window: DataWindow) -> None:
        if window.index != self.at:
            raise UsageError("out of order")
        self.at += 1

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.began:
            raise UsageError("too late")
        self.at = state["at"]

    def identity(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        self.began = False


class DrawsFromTheGlobalGenerator(Plain):
    def value(self, index: int, number: int) -> float:
        return super().value(index, number) + random.random()


class CountsWhatIsRead(Plain):
    def window(self, index: int) -> DataWindow:
        self.at = index + 1
        return super().window(index)

    def commit(self, window: DataWindow) -> None: ...


class ForgetsItsPlace(Plain):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict({"at": 0})


class ResumesOnceOnly(Plain):
    """The offset is taken from where the last resume began."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded = 0

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.loaded = self.at

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at - self.loaded if self.at > self.loaded else self.at}


class KeepsAShuffleBuffer(Plain):
    """What is handed out depends on what came before, which the state leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.last = 0.0

    def value(self, index: int, number: int) -> float:
        self.last = 0.5 * self.last + super().value(index, number)
        return self.last


class IsLoadedTooLate(Plain):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class CommitsAnything(Plain):
    def commit(self, window: DataWindow) -> None:
        self.at = window.index + 1


class HoldsAnObject(Plain):
    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "order": {1, 2}}


class Ends(Plain):
    def windows(self) -> Iterator[DataWindow]:
        yield from (self.window(index) for index in range(self.at, 4))


class PadsOtherRanks(Plain):
    def value(self, index: int, number: int) -> float:
        return super().value(index, min(number, 2) if self.replica.count > 1 else number)


class GivesAllToEveryRank(Plain):
    def attach(self, replica: Replica) -> None: ...


class SavesItsRank(Plain):
    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "rank": self.replica.index}


class SaysOtherSamples(Plain):
    def coverage(self, index: int) -> int | None:
        return 5


BROKEN: dict[type[Plain], str] = {
    DrawsFromTheGlobalGenerator: "a second fresh source: window 0: microbatch 0 holds something else; does it draw",
    CountsWhatIsRead: "what was read and not decided changes the state",
    ForgetsItsPlace: "the state of edge 1, loaded, is not the state",
    ResumesOnceOnly: "and, one window later, again: window",
    KeepsAShuffleBuffer: "resumed at edge 1: window 1: microbatch 0 holds something else",
    IsLoadedTooLate: "was accepted after iteration began",
    CommitsAnything: "commit() took window 1 before window 0",
    HoldsAnObject: "is not plain JSON",
    Ends: "windows() ended after 4 windows",
    PadsOtherRanks: "together: window 0: microbatch 3 holds something else",
    GivesAllToEveryRank: "together: window 0: microbatch 0 holds something else",
    SavesItsRank: "replica 1 saves another state",
    SaysOtherSamples: "other samples arrived than were planned",
}


@pytest.mark.parametrize("kind", BROKEN, ids=lambda kind: kind.__name__)
def test_each_kind_of_fault_is_named(kind: type[Plain]) -> None:
    problems = check_source(kind)
    assert any(BROKEN[kind] in problem for problem in problems), problems


def test_what_promises_less_is_held_to_less() -> None:
    class Snapshot(GivesAllToEveryRank):
        guarantee = Guarantee.SNAPSHOT

    class BestEffort(DrawsFromTheGlobalGenerator):
        guarantee = Guarantee.BEST_EFFORT

    assert check_source(Plain) == check_source(Snapshot) == check_source(BestEffort) == []


def test_the_callers_generators_are_put_back() -> None:
    before = torch.get_rng_state(), random.getstate()
    check_source(Plain, windows=2, replicas=())
    assert torch.equal(before[0], torch.get_rng_state()) and before[1] == random.getstate()
    with pytest.raises(UsageError, match="at least 2"):
        check_source(Plain, windows=1)
